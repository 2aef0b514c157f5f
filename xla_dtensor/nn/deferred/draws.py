"""How the values of an initialisation are made: what a draw and a number do to a DTensor.

Two makers share what needs no random numbers. Neither has a whole parameter on one device or host:

================  =============================  =================================================
op                "device"                       "torch"
================  =============================  =================================================
normal_ and kin   each device draws its part     torch's CPU stream, run by run, into the blocks
fill_, zero_      made where they lie            the same
mul_, erfinv_     on the devices                 on the host's blocks, by torch's own kernels
copy_ of a host   each device gets its part      the same
tensor
linalg.qr, ...    on the devices                 on the host, whole
================  =============================  =================================================
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from xla_dtensor.dtensor.dtensor import DTensor
from xla_dtensor.nn.deferred.blocks import HostBlocks, sharding_of
from xla_dtensor.runtimes.registry import get_runtime

__all__ = ["DRAWS", "Maker", "argument"]

aten = torch.ops.aten
DRAWS = frozenset(
    {
        aten.normal_.default,
        aten.uniform_.default,
        aten.exponential_.default,
        aten.bernoulli_.float,
        aten.random_.default,
        aten.random_.to,
        getattr(aten.random_, "from"),
        aten.cauchy_.default,
        aten.log_normal_.default,
        aten.geometric_.default,
    }
)
_EYES = frozenset({aten.eye.out, aten.eye.m_out})


def argument(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> Any:
    """Return an op's argument by name, its default where it was not given."""
    for place, formal in enumerate(func._schema.arguments):
        if formal.name == name:
            given = args[place] if place < len(args) else formal.default_value
            return kwargs.get(name, given)
    return None


class Maker(ABC):
    """Gives DTensors the values that the ops of an initialisation ask for."""

    @abstractmethod
    def draw(self, func: Any, target: DTensor, args: Sequence[Any], kwargs: Any) -> None:
        """Draw a tensor's values anew."""

    @abstractmethod
    def skip(self, func: Any, target: torch.Tensor, args: Sequence[Any], kwargs: Any) -> None:
        """Leave a tensor alone, and the generator where a draw would have left it."""

    @abstractmethod
    def change(self, func: Any, target: DTensor, args: Sequence[Any], kwargs: Any) -> None:
        """Run an in-place op that takes numbers only."""

    @abstractmethod
    def compute(self, func: Any, args: Sequence[Any], kwargs: Any) -> Any:
        """Run an op that makes new tensors of DTensors."""

    def between_modules(self) -> None:  # noqa: B027
        """Hear that a module is done."""

    def assign(self, target: DTensor, payload: torch.Tensor) -> None:
        """Give a tensor the values of a payload of its shape."""
        get_runtime().run_op(aten.copy_.default, (target._local_tensor, payload), {})

    def write(self, func: Any, target: DTensor, args: Sequence[Any], kwargs: Any) -> None:
        """Run an op that writes to one DTensor."""
        if func in DRAWS:
            if target.numel():
                self.draw(func, target, args, kwargs)
        elif func is aten.zero_.default:
            self._fill(target, 0)
        elif func is aten.fill_.Scalar:
            self._fill(target, args[1])
        elif func in _EYES:
            self._fill_eye(target)
        elif func is aten.copy_.default and not isinstance(args[1], DTensor):
            self._copy_from_host(target, args[1])
        elif _is_of_numbers(func, args, kwargs):
            self.change(func, target, args, kwargs)
        else:
            func(*args, **kwargs)

    def _fill(self, target: DTensor, value: Any) -> None:
        layout, _ = sharding_of(target)
        shape = tuple(target.shape)
        self.assign(target, get_runtime().make(value, shape, target.dtype, layout))

    def _fill_eye(self, target: DTensor) -> None:
        rows, columns = target.shape
        blocks = HostBlocks(target)

        def ones_on_the_diagonal(values: torch.Tensor, start: int) -> None:
            first = -(-start // (columns + 1)) * (columns + 1)
            values.zero_()
            last = min(start + values.numel(), min(rows, columns) * (columns + 1))
            values[first - start : max(last - start, 0) : columns + 1] = 1

        blocks.write_in_runs(ones_on_the_diagonal)
        self.assign(target, blocks.payload())

    def _copy_from_host(self, target: DTensor, source: torch.Tensor) -> None:
        layout, _ = sharding_of(target)
        whole = source.detach().to("cpu", target.dtype).expand(target.shape)
        self.assign(target, get_runtime().put(whole, layout))


def _is_of_numbers(func: Any, args: Sequence[Any], kwargs: Any) -> bool:
    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, (torch.Tensor, list))]
    return torch.Tag.pointwise in func.tags and len(tensors) == 1 and tensors[0] is args[0]
