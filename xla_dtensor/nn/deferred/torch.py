"""Initial values that are plain PyTorch's, bit by bit: drawn by its CPU generator, on each host.

The CPU's stream is sequential, so every process draws all of it, run by run, and keeps what its
devices hold. Arithmetic is done on the host as well, by torch's kernels, on the blocks of this
process: XLA's ``erfinv`` is not torch's in the last bit.

Ops that have no such form run on the host on the whole tensor: a draw into a view with gaps, and
all that makes new tensors of a parameter, such as the QR factorization of ``orthogonal_``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from xla_dtensor.dtensor.dtensor import DTensor
from xla_dtensor.nn.deferred.blocks import HostBlocks, runs
from xla_dtensor.nn.deferred.draws import DRAWS, Maker
from xla_dtensor.runtimes.nested import map_nested

__all__ = ["TorchMaker"]

aten = torch.ops.aten
_SHAPES_ONLY = frozenset(
    {
        aten.new_empty.default,
        aten.new_empty_strided.default,
        aten.new_zeros.default,
        aten.new_ones.default,
        aten.new_full.default,
        aten.empty_like.default,
        aten.zeros_like.default,
        aten.ones_like.default,
        aten.full_like.default,
        aten.rand_like.default,
        aten.randn_like.default,
    }
)


class TorchMaker(Maker):
    """See the module docstring."""

    def draw(self, func: Any, target: DTensor, args: Sequence[Any], kwargs: Any) -> None:
        """Draw a tensor's values anew."""
        blocks = HostBlocks(target)
        if target.is_contiguous():
            blocks.write_in_runs(lambda values, start: func(values, *args[1:], **kwargs))
        else:
            whole = torch.empty_strided(target.shape, target.stride(), dtype=target.dtype)
            func(whole, *args[1:], **kwargs)
            blocks.write(0, whole.reshape(-1))
        self.assign(target, blocks.payload())

    def skip(self, func: Any, target: torch.Tensor, args: Sequence[Any], kwargs: Any) -> None:
        """Leave a tensor alone, the generator where a draw leaves it."""
        if func not in DRAWS:
            return
        if not target.is_contiguous():
            whole = torch.empty_strided(target.shape, target.stride(), dtype=target.dtype)
            func(whole, *args[1:], **kwargs)
            return
        for start, stop in runs(target.numel()):
            func(torch.empty(stop - start, dtype=target.dtype), *args[1:], **kwargs)

    def change(self, func: Any, target: DTensor, args: Sequence[Any], kwargs: Any) -> None:
        """Run an in-place op that takes numbers only."""
        blocks = HostBlocks(target, filled=True)
        for buffer in blocks.buffers.values():
            func(buffer, *args[1:], **kwargs)
        self.assign(target, blocks.payload())

    def compute(self, func: Any, args: Sequence[Any], kwargs: Any) -> Any:
        """Run an op that makes new tensors."""
        if func in _SHAPES_ONLY:
            like = args[0]
            bare = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
            return func(bare, *args[1:], **{**kwargs, "device": torch.device("cpu")})
        args, kwargs = map_nested(_on_host, (tuple(args), dict(kwargs)))
        return func(*args, **kwargs)


def _on_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, DTensor) else value
