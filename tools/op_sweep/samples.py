"""Which ops are swept, their sample inputs, and the placements that these get."""

from __future__ import annotations

import random
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.utils._pytree import tree_flatten, tree_map

__all__ = ["Call", "calls_of", "find_ops", "op_names", "put_on", "random_placements"]

_DTYPES = (torch.float32, torch.int64, torch.bool)
_MOST_CANDIDATES = 200
_PLAIN_SHARE = 0.2


@lru_cache(1)
def _op_db() -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    return {op.full_name: op for op in op_db}


def op_names() -> list[str]:
    """Return the names of all ops in ``op_db``, in its order."""
    return list(_op_db())


def find_ops(names: Sequence[str]) -> list[Any]:
    """Return the entries of ``op_db`` with these full names.

    Raises:
        KeyError: ``op_db`` has no such entry.
    """
    return [_op_db()[name] for name in names]


@dataclass(frozen=True)
class Call:
    """One call of an op: what it is called with, in plain tensors."""

    function: Callable[..., Any]
    arguments: tuple[Any, tuple[Any, ...], dict[str, Any]]
    finish: Callable[[Any], Any]
    stays_on_host: bool = False

    def mapped(self, change: Callable[[torch.Tensor], Any]) -> Call:
        """Return this call with each tensor changed; one that occurs twice stays one."""
        changed: dict[int, Any] = {}

        def once(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if id(value) not in changed:
                changed[id(value)] = change(value)
            return changed[id(value)]

        return replace(self, arguments=tree_map(once, self.arguments))

    def with_device(self, device: torch.device) -> Call:
        """Return this call with `device` in place of the device that a sample names."""
        source, args, kwargs = self.arguments
        kwargs = kwargs | ({"device": device} if kwargs.get("device") is not None else {})
        cpu = ("cpu", torch.device("cpu"))
        changed = tuple(
            [device if isinstance(v, str | torch.device) and v in cpu else v for v in args]
        )
        return replace(self, arguments=(source, changed, kwargs))

    def tensors(self) -> list[torch.Tensor]:
        """The distinct tensors among the arguments."""
        flat = tree_flatten(self.arguments)[0]
        return list({id(v): v for v in flat if isinstance(v, torch.Tensor)}.values())

    def run(self) -> Any:
        """Call the op."""
        source, args, kwargs = self.arguments
        return self.function(source, *args, **kwargs)


def calls_of(op: Any, number: int, seed: int) -> Iterator[Call]:
    """Choose sample inputs of an op.

    Args:
        op: An entry of ``op_db``.
        number: How many calls at most.
        seed: Decides, with the op's name, the values and the choice.

    Yields:
        The calls. None where the op has no sample in a dtype that the sweep covers.
    """
    chooser = op_random(op, seed)
    number_seed = chooser.randrange(2**31)
    torch.manual_seed(number_seed)
    np.random.seed(number_seed)
    random.seed(number_seed)
    dtype = next((dtype for dtype in _DTYPES if dtype in op.dtypes), None)
    if dtype is None:
        return
    gradients = dtype == torch.float32 and op.supports_autograd
    found: list[Any] = []
    for sample in op.sample_inputs("cpu", dtype, requires_grad=gradients):
        found.append(sample)
        if len(found) == _MOST_CANDIDATES:
            break
    for sample in chooser.sample(found, min(number, len(found))):
        arguments = (sample.input, tuple(sample.args), dict(sample.kwargs))
        finish = (lambda r: r) if op.name in _SAME_FOR_ALL else sample.output_process_fn_grad
        yield Call(_unique(op), arguments, finish, op.name in _HOST_ARGUMENTS)


# PyTorch asks for further arguments of these on the host, on every device.
_HOST_ARGUMENTS = {"tensor_split"}
# Results that are one of many right ones -> what is the same for all of them.
_SAME_FOR_ALL: dict[str, Callable[[Any], Any]] = {
    "linalg.eigh": lambda r: (r[0], r[1] @ torch.diag_embed(r[0]) @ r[1].mT, r[1].mT @ r[1]),
    "linalg.svd": lambda r: (r[1], _product(r[0], r[1], r[2])),
    "pca_lowrank": lambda r: (r[1], _product(r[0], r[1], r[2].mT)),
    "svd": lambda r: (r[1], _product(r[0], r[1], r[2].mT)),
    "svd_lowrank": lambda r: (r[1], _product(r[0], r[1], r[2].mT)),
}


def _product(u: torch.Tensor, s: torch.Tensor, vh: torch.Tensor) -> torch.Tensor:
    rank = s.shape[-1]
    return (u[..., :rank] * s.unsqueeze(-2)) @ vh[..., :rank, :]


def _unique(op: Any) -> Callable[..., Any]:
    same = _SAME_FOR_ALL.get(op.name)
    return op.op if same is None else lambda *args, **kwargs: same(op.op(*args, **kwargs))


def op_random(op: Any, seed: int) -> random.Random:
    """Return the generator of an op's choices: the same whichever ops are swept beside it."""
    return random.Random(zlib.crc32(f"{op.full_name}:{seed}".encode()))


def random_placements(shape: Sequence[int], chooser: random.Random) -> tuple[Any, ...]:
    """Draw one placement for each of two mesh axes: as often Replicate as any one dim."""
    dims = range(len(shape))
    return tuple(chooser.choice([Replicate(), *(Shard(dim) for dim in dims)]) for _ in range(2))


def put_on(
    call: Call, distribute: Callable[..., torch.Tensor], chooser: random.Random
) -> tuple[Call, list[str]]:
    """Distribute a call's tensors at random; some without gradient, but not the first, stay plain.

    Args:
        call: Plain tensors.
        distribute: Takes a tensor and placements, returns a DTensor.
        chooser: Decides.

    Returns:
        The call on DTensors, and what each tensor got, such as ``"S0,R"`` or ``"plain"``.
    """
    texts: list[str] = []

    def put(tensor: torch.Tensor) -> torch.Tensor:
        needs = tensor.requires_grad
        plain = texts and not needs and chooser.random() < _PLAIN_SHARE
        if plain or (texts and call.stays_on_host):
            texts.append("plain")
            return tensor.detach().clone()
        placements = random_placements(tensor.shape, chooser)
        texts.append(",".join("R" if p.is_replicate() else f"S{p.dim}" for p in placements))
        return distribute(tensor.detach().clone(), placements).requires_grad_(needs)

    return call.mapped(put), texts
