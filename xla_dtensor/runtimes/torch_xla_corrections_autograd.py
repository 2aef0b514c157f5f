"""Gradients that torch_xla 2.9 loses in silence, computes wrongly, or does not find.

PyTorch differentiates a composite op through the ops that it is made of. torch_xla has kernels of
its own for some of them, and no gradient: `kl_div(...).backward()` leaves no gradient at all. These
ops are taken apart again where gradients are recorded. So is max pooling, whose gradient in
torch_xla reaches into the tensor past the DTensor and finds nothing there.

The gradient of an overlapping `as_strided` goes through a plain tensor of places, which torch_xla
then reads wrongly. It is said by index here.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch

from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.runtimes.index_bounds import refuse_part

__all__ = ["is_overlapping", "places_of", "read_places", "register_composites"]

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
        if is_overlapping(size, stride):
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


def is_overlapping(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Tell whether two places of a strided view may be the same one.

    Example:
        >>> is_overlapping((2, 3), (3, 1)), is_overlapping((2, 3), (1, 1))
        (False, True)
    """
    if 0 in size:
        return False
    reach = 0
    for step, extent in sorted(zip(stride, size, strict=True)):
        if extent > 1 and step <= reach:
            return True
        reach += (extent - 1) * step
    return False


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
