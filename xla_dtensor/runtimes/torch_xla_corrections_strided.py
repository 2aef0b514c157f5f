"""Writes into a slice with a step, and the gradient of one, in words that XLA partitions right.

torch_xla spreads the written values by a pad between elements. XLA's partitioner is wrong about
these, in silence, where the dim is cut (docs/decisions/strided_slices.md)::

    x[::2] = y                 of 12 rows on 4 devices: values of y in the gaps too
    (x[::2] * w).sum()         the same in x.grad

A new dim is padded behind each element instead, and merged with the dim. This happens in the kernel
that functionalization calls for the base of a view: above it nobody knows that one is written.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

__all__ = ["register"]

aten = torch.ops.aten


@cache
def register() -> torch.library.Library:
    """Install the kernels; calling it again does nothing."""
    cut = torch.library.get_kernel("aten::slice_copy.Tensor", "XLA")
    write = torch.library.get_kernel("aten::slice_scatter", "XLA")

    def slice_copy(
        keys: Any,
        x: torch.Tensor,
        dim: int = 0,
        start: int | None = None,
        end: int | None = None,
        step: int = 1,
    ) -> torch.Tensor:
        # torch_xla's result writes to x what is written to it, by a pad between elements.
        result = cut.call_boxed(keys, x, dim, start, end, step)
        return result if step == 1 else aten.clone(result)

    def slice_scatter(
        keys: Any,
        x: torch.Tensor,
        new: torch.Tensor,
        dim: int = 0,
        start: int | None = None,
        end: int | None = None,
        step: int = 1,
    ) -> torch.Tensor:
        size, count = x.shape[dim], new.shape[dim]
        first = slice(start, end, step).indices(size)[0]
        if step == 1 or count == 0:
            return write.call_boxed(keys, x, new, dim, start, end, step)
        if count == 1:
            return write.call_boxed(keys, x, new, dim, first, first + 1, 1)
        values = _spread(new.to(x.dtype), dim % x.ndim, first, step, size)
        ones = torch.ones(count, dtype=x.dtype, device=x.device)
        is_written = aten.ne(_spread(ones, 0, first, step, size), 0)
        behind = [1] * (x.ndim - dim % x.ndim - 1)
        return aten.where(aten.view_copy(is_written, [size, *behind]), values, x)

    def slice_backward(
        _: Any, grad: torch.Tensor, sizes: Any, dim: int, start: int, end: int, step: int
    ) -> torch.Tensor:
        return aten.slice_scatter(grad.new_zeros(sizes), grad, dim, start, end, step)

    kernels = torch.library.Library("aten", "IMPL")
    for name, kernel in [
        ("slice_copy.Tensor", slice_copy),
        ("slice_scatter", slice_scatter),
        ("slice_backward", slice_backward),
    ]:
        kernels.impl(name, kernel, "XLA", with_keyset=True)
    return kernels


def _spread(x: torch.Tensor, dim: int, start: int, step: int, size: int) -> torch.Tensor:
    """Return zeros with the elements of `x` at ``start, start + step, ...`` of a dim of `size`."""
    count, behind = x.shape[dim] * step, [0, 0] * (x.ndim - dim - 1)
    apart = aten.constant_pad_nd(aten.unsqueeze_copy(x, dim + 1), [*behind, 0, step - 1])
    flat = aten.view_copy(apart, [*x.shape[:dim], count, *x.shape[dim + 1 :]])
    if count > size - start:
        flat, count = aten.slice_copy(flat, dim, 0, size - start), size - start
    return aten.constant_pad_nd(flat, [*behind, start, size - start - count])
