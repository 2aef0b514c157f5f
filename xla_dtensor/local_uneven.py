"""LocalViews of dims that the mesh does not divide: padding that must not be mistaken for values.

10 rows over 4 devices are 3, 3, 3 and 1. All devices' arrays have one shape, so the last one has a
row of its own and two of padding, whose values are whatever the ops before made of them. An
:class:`Uneven` remembers, per dim, how much of each device's array is real.

What keeps real and padding apart is allowed: pointwise ops, sum (with the padding taken as zero),
and views that keep the padded dim. Everything else raises: a mean over the padded dim, a maximum, a
sort would be wrong in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NoReturn

import numpy as np
import torch

from xla_dtensor.core import ManualRegion
from xla_dtensor.errors import LocalViewError
from xla_dtensor.nested import leaves
from xla_dtensor.runtimes.functional_local import real_sizes

__all__ = ["Uneven", "run_uneven"]

aten = torch.ops.aten
Table = tuple[int, ...]


@dataclass(frozen=True)
class Uneven:
    """How much of each device's array is real.

    Args:
        sizes: Per padded dim (dim, table): the real size on each device, the region's coordinates
            in row-major order.
    """

    sizes: tuple[tuple[int, Table], ...]

    @classmethod
    def of(cls, sizes: Mapping[int, Table]) -> Uneven | None:
        """Make one from dim -> table; None where nothing is padded."""
        padded = {dim: table for dim, table in sizes.items() if min(table) < max(table)}
        return cls(tuple(sorted(padded.items()))) if padded else None

    def sizes_on(self, region: ManualRegion) -> dict[int, np.ndarray[Any, Any]]:
        """Return dim -> real sizes by coordinate of the region."""
        return {dim: np.array(table).reshape(region.sizes) for dim, table in self.sizes}

    def refuse(self, what: str) -> NoReturn:
        """Raise the error for an op that could mix padding with values."""
        dims = {dim: f"{max(table)} to {min(table)}" for dim, table in self.sizes}
        raise LocalViewError(
            f"{what} was called on an uneven local view, whose sizes by dim are {dims} on the "
            "devices. Their arrays are padded to one shape, and padding could get into the result. "
            "Pad the global tensor so that the mesh divides it, or use pointwise ops, sum and "
            "views that keep the dim."
        )


_SAME_SHAPE = frozenset(
    {
        aten.detach.default,
        aten.alias.default,
        aten.clone.default,
        aten._to_copy.default,
        aten.copy_.default,
        aten.zero_.default,
        aten.fill_.Scalar,
        aten.fill_.Tensor,
        aten.zeros_like.default,
        aten.ones_like.default,
        aten.full_like.default,
        aten.empty_like.default,
        aten.rand_like.default,
        aten.randn_like.default,
        aten.lift_fresh.default,
        aten.masked_fill_.Scalar,
        aten.masked_fill_.Tensor,
        aten.bernoulli_.float,
        aten.uniform_.default,
        aten.normal_.default,
        aten.native_dropout.default,
    }
)
_FRESH = frozenset(
    {
        aten.new_empty.default,
        aten.new_zeros.default,
        aten.new_ones.default,
        aten.new_full.default,
    }
)
_SUMS = frozenset({aten.sum.default, aten.sum.dim_IntList})
_SQUEEZES = frozenset({aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims})
_CUTS = frozenset({aten.slice.Tensor, aten.slice_backward.default})
_MOVED = frozenset({aten.t.default, aten.transpose.int, aten.permute.default})
_VIEWS = (
    frozenset(
        {
            aten.view.default,
            aten._unsafe_view.default,
            aten.unsqueeze.default,
            aten.expand.default,
            aten.select.int,
            aten.select_backward.default,
        }
    )
    | _SQUEEZES
    | _CUTS
    | _MOVED
)


def run_uneven(
    run: Callable[..., Any],
    func: Any,
    args: Sequence[Any],
    kwargs: Any,
    payload_args: Any,
    payload_kwargs: Any,
) -> tuple[Any, Uneven | None]:
    """Run an op of which some arguments are uneven.

    Args:
        run: Runs an op on payloads.
        func: The op.
        args: Its arguments.
        kwargs: Its keyword arguments.
        payload_args: The arguments with payloads in place of views.
        payload_kwargs: The same for the keyword arguments.

    Returns:
        The result, of payloads, and how uneven it is.

    Raises:
        LocalViewError: The op could mix padding with values.
    """
    view = next(v for v in leaves((args, kwargs)) if getattr(v, "_uneven", None) is not None)
    if torch.Tag.pointwise in func.tags or func in _SAME_SHAPE:
        uneven = _broadcast(func, args, kwargs)
        return run(func, payload_args, payload_kwargs), uneven
    if func in _SUMS:
        masked = _zeros_for_padding(run, view)
        result = run(func, (masked, *payload_args[1:]), payload_kwargs)
        return result, _after_sum(view, args, kwargs)
    if func in _VIEWS:
        result = run(func, payload_args, payload_kwargs)
        return result, _after_view(func, view, args, result)
    if func in _FRESH:
        return run(func, payload_args, payload_kwargs), None
    return view._uneven.refuse(str(func))


def _broadcast(func: Any, args: Any, kwargs: Any) -> Uneven | None:
    tensors = [v for v in leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
    ndim = max(t.ndim for t in tensors)
    found: dict[int, Table] = {}
    for tensor in tensors:
        own: Any = getattr(tensor, "_uneven", None)
        if own is None:
            continue
        for dim, table in own.sizes:
            place = ndim - tensor.ndim + dim
            if found.setdefault(place, table) != table:
                own.refuse(f"{func}, with another one that is uneven in another way,")
    uneven = Uneven.of(found)
    assert uneven is not None
    if torch._C._current_graph_task_id() >= 0:
        return uneven  # the backward pass of sum expands one number, which is even
    for tensor in tensors:
        mine = dict(u.sizes) if (u := getattr(tensor, "_uneven", None)) is not None else {}
        for place in found:
            dim = place - (ndim - tensor.ndim)
            if dim >= 0 and tensor.shape[dim] != 1 and dim not in mine:
                uneven.refuse(f"{func}, with an even tensor of shape={tuple(tensor.shape)},")
    return uneven


def _zeros_for_padding(run: Callable[..., Any], view: Any) -> torch.Tensor:
    payload, region = view._payload, view._region
    for dim, sizes in view._uneven.sizes_on(region).items():
        size = real_sizes(payload, sizes, region)
        count = payload.shape[dim]
        shape = [1] * payload.ndim
        shape[dim] = count
        size = run(aten.view.default, (size, [1] * payload.ndim), {})
        real = run(aten.gt.Tensor, (size, torch.arange(count).reshape(shape)), {})
        zero = torch.zeros((), dtype=payload.dtype)
        payload = run(aten.where.self, (real, payload, zero), {})
    return payload


def _after_sum(view: Any, args: Sequence[Any], kwargs: Any) -> Uneven | None:
    dims = args[1] if len(args) > 1 else kwargs.get("dim")
    keepdim = args[2] if len(args) > 2 else kwargs.get("keepdim", False)
    summed = {dim % view.ndim for dim in dims} if dims else set(range(view.ndim))
    left = {
        dim if keepdim else dim - sum(s < dim for s in summed): table
        for dim, table in view._uneven.sizes
        if dim not in summed
    }
    return Uneven.of(left)


def _after_view(func: Any, view: Any, args: Sequence[Any], result: torch.Tensor) -> Uneven | None:
    places = _places(func, view, args, result)
    for dim, _ in view._uneven.sizes:
        place = places.get(dim)
        if place is None or result.shape[place] != view.shape[dim]:
            view._uneven.refuse(str(func))
    return Uneven.of({places[dim]: table for dim, table in view._uneven.sizes})


def _places(func: Any, view: Any, args: Sequence[Any], result: torch.Tensor) -> dict[int, int]:
    """Return where a view op puts each dim that it keeps."""
    ndim = view.ndim
    if func in _MOVED:
        # A tensor of distinct sizes shows where each dim went.
        probe = func(torch.empty(list(range(2, ndim + 2)), device="meta"), *args[1:])
        return {size - 2: place for place, size in enumerate(probe.shape)}
    if func in _CUTS:
        return {dim: dim for dim in range(ndim)}
    if func is aten.select.int:
        gone = {args[1] % ndim}
    elif func in _SQUEEZES:
        asked = args[1] if len(args) > 1 else range(ndim)
        dims = [asked] if isinstance(asked, int) else asked
        gone = {dim % ndim for dim in dims if view.shape[dim] == 1}
    elif func is aten.unsqueeze.default or func is aten.select_backward.default:
        new = args[1 if func is aten.unsqueeze.default else 2] % (ndim + 1)
        return {dim: dim + (new <= dim) for dim in range(ndim)}
    elif func is aten.expand.default:
        return {dim: result.ndim - ndim + dim for dim in range(ndim)}
    else:
        return _places_after_view(tuple(view.shape), tuple(result.shape))
    kept = [dim for dim in range(ndim) if dim not in gone]
    return {dim: place for place, dim in enumerate(kept)}


def _places_after_view(before: tuple[int, ...], after: tuple[int, ...]) -> dict[int, int]:
    """Return where a reshape leaves the dims that it neither joins nor cuts."""
    if before == after:
        return {dim: dim for dim in range(len(before))}
    found: dict[int, int] = {}
    for dim, size in enumerate(before):
        same = [
            place
            for place in range(len(after))
            if after[place] == size and prod(after[:place]) == prod(before[:dim])
        ]
        if len(same) == 1 and before.count(0) == 0:
            found[dim] = same[0]
    return found
