"""Derivatives that torch_xla gets wrong: of views that overlap, of slices with a step.

torch_xla spreads the written values by a pad between elements. XLA's partitioner is wrong about
these, in silence, where the dim is cut (docs/decisions/strided_slices.md)::

    x[::2] = y                 of 12 rows on 4 devices: values of y in the gaps too
    (x[::2] * w).sum()         the same in x.grad

A new dim is padded behind each element instead, and merged with the dim. torch_xla takes a view of
``as_strided`` with gaps for one without::

    x.as_strided((2, 2), (1, 8)).copy_(y)    of 16 numbers: writes the first four

There the places are read, or selected, one by one. This happens in the kernels that
functionalization calls for the base of a view: above them nobody knows that one is written.

Slices that leave every shard as it is fail where both tensors are gathered, as in
jax/lower/index.py. They get a barrier, which the partitioner does not take for its operand.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from operator import attrgetter
from typing import Any

import torch

from xla_dtensor.core.errors import UnsupportedOpError
from xla_dtensor.core.local_shape import may_leave_shards
from xla_dtensor.runtimes.bounds import refuse_part
from xla_dtensor.runtimes.written import may_overlap

__all__ = ["read_places", "register_composites", "register_strided"]


# ----------------------------------------------------------------------------------------- Autograd
#
# Gradients that torch_xla 2.9 loses in silence, computes wrongly, or does not find.
#
# PyTorch differentiates a composite op through the ops that it is made of. torch_xla has kernels of
# its own for some of them, and no gradient: `kl_div(...).backward()` leaves no gradient at all.
# These ops are taken apart again where gradients are recorded. So is max pooling, whose gradient in
# torch_xla reaches into the tensor past the DTensor and finds nothing there.
#
# The gradient of an overlapping `as_strided` goes through a plain tensor of places, which torch_xla
# then reads wrongly. It is said by index here.

aten = torch.ops.aten
# By name: this module is also imported on newer torch, which has no `qr` any more.
_COMPOSITES = (
    "cross.default",
    "diag.default",
    "inverse.default",
    "kl_div.default",
    "logdet.default",
    "max_pool2d.default",
    "max_pool3d.default",
    "qr.default",
    "selu.default",
    "selu_.default",
    "silu_backward.default",
    "std.default",
    "std.dim",
    "svd.default",
)
_registrations: list[torch.library.Library] = []


def register_composites() -> None:
    """Install the kernels; calling it again does nothing."""
    if _registrations:
        return
    kernels = torch.library.Library("aten", "IMPL")
    _registrations.append(kernels)
    table: dict[Any, Callable[..., Any]] = {
        aten.as_strided.default: _differentiable_as_strided,
        aten.as_strided_copy.default: read_places,
    }
    composites = [attrgetter(name)(aten) for name in _COMPOSITES]
    table |= {op: _taken_apart(op) for op in composites}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*verriding a previously registered kernel")
        for op, kernel in table.items():
            kernels.impl(op.name(), kernel, "AutogradXLA")
        # The key of DTensors, on which torch itself takes composites apart.
        for op in (aten.as_strided.default, aten.as_strided_copy.default):
            kernels.impl(op.name(), table[op], "AutogradPrivateUse3")


def _taken_apart(op: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: op.decompose(*args, **kwargs)


def _differentiable_as_strided(
    x: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> torch.Tensor:
    if x.requires_grad and torch.is_grad_enabled():
        if may_overlap(size, stride):
            return read_places(x, size, stride, offset)
        return _nested_view(x, size, stride, offset or 0)
    with torch._C._AutoDispatchBelowAutograd():
        return aten.as_strided.default(x, size, stride, offset)


def _nested_view(
    x: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int
) -> torch.Tensor:
    """Return ``as_strided`` as views of views: autograd knows these, and they can be written to.

    From the widest step to the narrowest, the last dim is cut into windows, one step apart::

        size (2, 3), stride (8, 2), of 16 numbers     windows of 5, 8 apart; of these 1, 2 apart
    """
    places_of(x, size, stride, offset)  # raises where they are not in `x`
    order = sorted((d for d in range(len(size)) if size[d] > 1), key=lambda d: -stride[d])
    view = x.view(-1)[offset:]
    for at, dim in enumerate(order):
        width = 1 + sum((size[d] - 1) * stride[d] for d in order[at + 1 :])
        view = view[..., : (size[dim] - 1) * stride[dim] + width].unfold(-1, width, stride[dim])
    places = [order.index(dim) for dim in range(len(size)) if size[dim] > 1]
    return view[..., 0].permute(places).view(tuple(size))


def read_places(
    x: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> torch.Tensor:
    """Return what ``as_strided`` shows, as a copy.

    Raises:
        UnsupportedOpError: It would show places outside `x`.
    """
    places = places_of(x, size, stride, offset)
    flat = x.reshape(-1)
    return flat.index_select(0, places.reshape(-1).to(x.device)).reshape(tuple(size))


def places_of(
    x: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None
) -> torch.Tensor:
    """Return where in `x`, row by row, the places of ``as_strided`` are, on the host.

    Raises:
        UnsupportedOpError: Some are outside `x`, or `x` is a part of another tensor.
    """
    refuse_part(x)
    places = torch.zeros((), dtype=torch.int64) + (offset or 0)
    for extent, step in zip(size, stride, strict=True):
        places = places.unsqueeze(-1) + torch.arange(extent) * step
    if places.numel() and int(places.max()) >= x.numel():
        raise UnsupportedOpError(
            f"as_strided was called with size={tuple(size)}, stride={tuple(stride)} and "
            f"storage_offset={offset or 0}, which reach place {int(places.max())} of the "
            f"{x.numel()} places of a tensor of shape={tuple(x.shape)}. Pass smaller ones."
        )
    return places


# ------------------------------------------------------------------------------------------ Strided


@cache
def register_strided(n_devices: int) -> torch.library.Library:
    """Install the kernels; calling it again does nothing.

    Args:
        n_devices: Among which XLA's own partitioner cuts tensors; 1 where it is libtpu's.
    """
    write = torch.library.get_kernel("aten::slice_scatter", "XLA")

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
        *_kernels_of_other_views(n_devices),
        *((name, _kernel_of_slices(name, first, n_devices)) for name, first in _FIRST_ROWS.items()),
        ("slice_scatter", slice_scatter),
        ("slice_backward", slice_backward),
    ]:
        kernels.impl(name, kernel, "XLA", with_keyset=True)
    return kernels


def _rows_of_slice(
    x: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> tuple[int, int]:
    first, last, _ = slice(start, end, step).indices(x.shape[dim])
    return dim, last if first == 0 and step == 1 else 0


_FIRST_ROWS: dict[str, Callable[..., tuple[int, int]]] = {
    "slice_copy.Tensor": _rows_of_slice,
    "select_copy.int": lambda x, dim, index: (dim, int(index % x.shape[dim] == 0)),
    "split_copy.Tensor": lambda x, size, dim=0: (dim, size),
    "split_with_sizes_copy": lambda x, sizes, dim=0: (dim, sizes[0] if sizes else 0),
    "unsafe_split.Tensor": lambda x, size, dim=0: (dim, size),
    "unsafe_split_with_sizes": lambda x, sizes, dim=0: (dim, sizes[0] if sizes else 0),
    "unbind_copy.int": lambda x, dim=0: (dim, 1),
}
"""By kernel: the dim that it cuts, and how many rows its first result has, from row 0; else 0."""


def _kernel_of_slices(name: str, first_rows: Callable[..., tuple[int, int]], n_devices: int) -> Any:
    cut = torch.library.get_kernel(f"aten::{name}", "XLA")

    def kernel(keys: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        results = cut.call_boxed(keys, x, *args, **kwargs)
        dim, count = first_rows(x, *args, **kwargs)
        if not may_leave_shards(x.shape[dim], count, n_devices):
            # torch_xla's result writes to x what is written to it, with a step by a pad.
            is_slice_by_step = name == "slice_copy.Tensor" and count == 0
            return aten.clone(results) if is_slice_by_step else results
        if isinstance(results, torch.Tensor):
            return _apart(results)
        return [_apart(results[0]), *results[1:]]

    return kernel


def _apart(x: torch.Tensor) -> torch.Tensor:
    copied = aten.clone(x)
    importlib.import_module("torch_xla")._XLAC._xla_optimization_barrier_([copied])
    # What comes out of a barrier is part of a tuple. Ops that look at the shape of its node
    # (index_select) would end the process; a view has a node of its own.
    return aten.view_copy(copied, list(copied.shape))


def _kernels_of_other_views(n_devices: int) -> list[tuple[str, Any]]:
    as_strided_copy = torch.library.get_kernel("aten::as_strided_copy", "XLA")
    as_strided_scatter = torch.library.get_kernel("aten::as_strided_scatter", "XLA")
    diagonal_of = torch.library.get_kernel("aten::diagonal_copy", "XLA")
    parts_of = torch.library.get_kernel("aten::view_as_real_copy", "XLA")

    def read(keys: Any, x: Any, size: Any, stride: Any, offset: int | None = None) -> Any:
        places = _places_with_gaps(x, size, stride, offset)
        if places is None:
            return as_strided_copy.call_boxed(keys, x, size, stride, offset)
        rows = aten.index_select(aten.view_copy(x, [x.numel()]), 0, places.to(x.device))
        return aten.view_copy(rows, size)

    def scatter(
        keys: Any, x: Any, new: Any, size: Any, stride: Any, offset: int | None = None
    ) -> Any:
        places = _places_with_gaps(x, size, stride, offset)
        if places is None:
            return as_strided_scatter.call_boxed(keys, x, new, size, stride, offset)
        numbers = torch.full((x.numel(),), -1).index_put((places,), torch.arange(len(places)))
        is_written = (numbers >= 0).to(x.device)
        flat = aten.view_copy(new.to(x.dtype), [len(places)])
        values = aten.index_select(flat, 0, numbers.clamp(min=0).to(x.device))
        merged = aten.where(is_written, values, aten.view_copy(x, [x.numel()]))
        return aten.view_copy(merged, x.shape)

    def diagonal(keys: Any, x: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
        is_whole = not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)
        if n_devices == 1 or not is_whole or not x.numel():
            return diagonal_of.call_boxed(keys, x, offset, dim1, dim2)
        # Cut among devices it is an all-reduce by "or", which XLA has none of for whole numbers.
        dims = [dim for dim in range(x.ndim) if dim not in (dim1 % x.ndim, dim2 % x.ndim)]
        rows, columns = x.shape[dim1], x.shape[dim2]
        last = aten.permute_copy(x, [*dims, dim1 % x.ndim, dim2 % x.ndim])
        flat = aten.view_copy(last, [*last.shape[:-2], rows * columns])
        places = torch.arange(rows * columns).reshape(rows, columns).diagonal(offset)
        return aten.index_select(flat, -1, places.contiguous().to(x.device))

    def real_and_imaginary(keys: Any, x: torch.Tensor) -> torch.Tensor:
        # The layout of torch_xla's result has a dim too few, which is noticed if it is read itself.
        parts = parts_of.call_boxed(keys, x)
        return aten.stack([aten.select_copy(parts, -1, part) for part in (0, 1)], -1)

    return [
        ("as_strided_copy", read),
        ("as_strided_scatter", scatter),
        ("diagonal_copy", diagonal),
        ("view_as_real_copy", real_and_imaginary),
    ]


def _places_with_gaps(x: Any, size: Any, stride: Any, offset: int | None) -> torch.Tensor | None:
    """Return the places of a view of `x` that is not one row of places; None where it is."""
    if 0 in size or list(stride) == list(torch.empty(size, device="meta").stride()):
        return None
    return places_of(x, size, stride, offset).reshape(-1)


def _spread(x: torch.Tensor, dim: int, start: int, step: int, size: int) -> torch.Tensor:
    """Return zeros with the elements of `x` at ``start, start + step, ...`` of a dim of `size`."""
    count, behind = x.shape[dim] * step, [0, 0] * (x.ndim - dim - 1)
    apart = aten.constant_pad_nd(aten.unsqueeze_copy(x, dim + 1), [*behind, 0, step - 1])
    flat = aten.view_copy(apart, [*x.shape[:dim], count, *x.shape[dim + 1 :]])
    if count > size - start:
        flat, count = aten.slice_copy(flat, dim, 0, size - start), size - start
    return aten.constant_pad_nd(flat, [*behind, start, size - start - count])
