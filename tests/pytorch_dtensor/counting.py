"""The bytes that a step reduces along each mesh axis: as gloo is given them, and as XLA is.

Counted is what one device gives to the collective. A reduce-scatter and an all-reduce of one tensor
count alike: which of the two XLA takes, and whether it joins several, is its own affair.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["GlooCounting", "XlaCounting"]

Reduced: TypeAlias = dict[str, dict[str, int]]
SMALL = 16
_OPERATIONS = ("sum", "avg", "max", "min", "product")
# How the ops that reduce are called, and which argument goes in.
_REDUCING = {
    "c10d::allreduce_": 0,
    "c10d::allreduce_coalesced_": 0,
    "c10d::reduce_": 0,
    "c10d::_reduce_scatter_base_": 1,
    "c10d::reduce_scatter_": 1,
    "c10d::reduce_scatter_tensor_coalesced_": 1,
    "_c10d_functional::all_reduce": 0,
    "_c10d_functional::all_reduce_": 0,
    "_c10d_functional::all_reduce_coalesced": 0,
    "_c10d_functional::reduce_scatter_tensor": 0,
    "_c10d_functional::reduce_scatter_tensor_coalesced": 0,
}


class _Reductions(TorchDispatchMode):
    """Notes what goes into each reduction: its size, and the ranks that take part."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[tuple[int, ...], int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its local op comes next
        place = _REDUCING.get(func._schema.name)
        if place is not None:
            given = [v for v in tree_leaves(args[place]) if isinstance(v, torch.Tensor)]
            ranks = tuple(dist.get_process_group_ranks(_group_of(args)))
            self.found += [(ranks, tensor.nbytes) for tensor in given]
        return func(*args, **(kwargs or {}))


def _group_of(args: Any) -> Any:
    name = next((v for v in reversed(args) if isinstance(v, str) and v not in _OPERATIONS), None)
    if name is not None:
        return _resolve_process_group(name)  # pyright: ignore[reportArgumentType]
    return next(dist.ProcessGroup.unbox(v) for v in args if isinstance(v, torch.ScriptObject))


class GlooCounting:
    """Runs a step of PyTorch's and counts what it gives to the process groups of a mesh's axes."""

    def __init__(self, mesh: Any) -> None:
        self.mesh = mesh
        self.reduced: Reduced = {}

    def __call__(self, step: Callable[..., Any], *inputs: Any) -> Any:
        with _Reductions() as mode:
            result = step(*inputs)
        names = self.mesh.mesh_dim_names
        axes = {tuple(dist.get_process_group_ranks(self.mesh.get_group(n))): n for n in names}
        self.reduced = _summed([(axes[ranks], size) for ranks, size in mode.found])
        return result


class XlaCounting:
    """Compiles a step and counts the reductions in its program."""

    def __init__(self, mesh: Any) -> None:
        self.mesh = mesh
        self.reduced: Reduced = {}

    def __call__(self, step: Callable[..., Any], *inputs: Any) -> Any:
        import xla_dtensor as xd
        from xla_dtensor.report import collectives

        compiled = xd.compile(step)
        result = compiled(*inputs)
        found: list[tuple[str, int]] = []
        for each in collectives(compiled.hlo(), self.mesh.value):
            if each.kind in ("all-reduce", "reduce-scatter") and each.axes != ():
                assert each.executions is not None
                axes = "mixed" if each.axes is None else "+".join(map(str, each.axes))
                # XLA joins reductions of several tensors into one with several operands.
                found += [(axes, array.bytes) for array in each.operands] * each.executions
        self.reduced = _summed(found)
        return result


def _summed(found: list[tuple[str, int]]) -> Reduced:
    """The bytes per axis: those of tensors, and of what has at most a few numbers, as losses."""
    summed: Reduced = {}
    for axis, size in found:
        kind = "numbers" if size <= SMALL else "tensors"
        of_axis = summed.setdefault(axis, {"tensors": 0, "numbers": 0})
        of_axis[kind] += size
    return summed
