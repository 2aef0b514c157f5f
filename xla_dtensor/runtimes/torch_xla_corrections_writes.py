"""Which aten ops write by index, and the points that each writes.

A write along a dim with an index of the tensor's rank (scatter) is wrong in torch_xla 2.9's XLA,
and so is such a read (gather), also with even sizes, where index or values are cut over axes that
cut the tensor otherwise: some points are left out, or start from the reduction's identity. So index
and values are whole on every device there, and so are the indices of other reads that may be cut
unevenly. Of the other writes, those whose indices have only sizes
that all devices divide are left to torch_xla.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from xla_dtensor.runtimes.torch_xla_corrections_host import has_manual
from xla_dtensor.runtimes.torch_xla_corrections_points import (
    assign,
    cut_evenly,
    evenly,
    into_front,
    put_points,
    round_up,
    whole,
)

__all__ = ["has_write_rule", "write_correction"]

aten = torch.ops.aten
Replacement = Callable[[], torch.Tensor] | None
_MASKS = (torch.bool, torch.uint8)


def has_write_rule(func: Any) -> bool:
    """Tell whether `func` is a write by index that torch_xla may get wrong."""
    return func in _RULES or func.overloadpacket in _RULES


def write_correction(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Replacement:
    """Return what to run in place of a write by index; None where torch_xla is right.

    Args:
        func: An ``OpOverload``.
        args: Its positional arguments, payloads in place.
        kwargs: Its keyword arguments.
    """
    rule = _RULES.get(func) or _RULES.get(func.overloadpacket)
    if rule is None or "out" in kwargs:
        return None
    if func.overloadpacket in _WITHOUT_FORMS:
        return rule(*args, **kwargs)
    return rule(func.overloadpacket.__name__.endswith("_"), *args, **kwargs)


def _scatter(
    in_place: bool, x: torch.Tensor, dim: int, index: torch.Tensor, src: Any, reduce: str = ""
) -> Replacement:
    names = {"": "", "add": "sum", "multiply": "prod"}
    return _scatter_points(in_place, x, dim, index, src, names[reduce])


def _scatter_value(
    in_place: bool, x: torch.Tensor, dim: int, index: torch.Tensor, value: Any, reduce: str = ""
) -> Replacement:
    return _scatter(in_place, x, dim, index, value, reduce)


def _scatter_add(
    in_place: bool, x: torch.Tensor, dim: int, index: torch.Tensor, src: torch.Tensor
) -> Replacement:
    return _scatter_points(in_place, x, dim, index, src, "sum")


def _scatter_reduce(
    in_place: bool,
    x: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    src: torch.Tensor,
    reduce: str,
    include_self: bool = True,
) -> Replacement:
    return _scatter_points(in_place, x, dim, index, src, reduce, include_self)


def _scatter_points(
    in_place: bool,
    x: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    src: Any,
    reduce: str,
    include_self: bool = True,
) -> Replacement:
    if x.ndim == 0 or index.ndim == 0 or index.numel() == 0 or has_manual(x, index):
        return None
    dim %= x.ndim

    def write() -> torch.Tensor:
        values = src if isinstance(src, torch.Tensor) else x.new_full((), src).expand(index.shape)
        values = values[tuple(slice(size) for size in index.shape)]
        places, values = whole(index), whole(values)
        if reduce not in ("", "sum") or not include_self:
            result = _scatter_with_spare(x, dim, places, values, reduce, include_self)
            return assign(x, result) if in_place else result
        points = [
            places if at == dim else _places(places, at, size)
            for at, size in enumerate(index.shape)
        ]
        return put_points(x, points, values, reduce == "sum", in_place)

    return write


def _gather(
    x: torch.Tensor, dim: int, index: torch.Tensor, sparse_grad: bool = False
) -> Replacement:
    if x.ndim == 0 or index.ndim == 0 or has_manual(x, index):
        return None
    return lambda: aten.gather(x, dim, whole(index))


def _index(x: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> Replacement:
    given = [index for index in indices if index is not None]
    if not given or any(index.dtype in _MASKS for index in given) or has_manual(x, *given):
        return None
    shapes = [index.shape for index in given]
    shape = shapes[0] if len(shapes) == 1 else torch.broadcast_shapes(*shapes)
    if x.numel() == 0 or 0 in shape:
        # torch_xla leaves other dims out.
        meta: Any = aten.index(x.to("meta"), [i if i is None else i.to("meta") for i in indices])
        return lambda: x.new_zeros(meta.shape)
    if evenly(shape) or all(cut_evenly(index) for index in given):
        return None
    return lambda: aten.index(x, [i if i is None else whole(i) for i in indices])


def _index_select(x: torch.Tensor, dim: int, index: torch.Tensor) -> Replacement:
    if x.ndim == 0 or index.numel() == 0 or cut_evenly(index) or has_manual(x, index):
        return None
    return lambda: aten.index_select(x, dim, whole(index))


def _embedding(weight: torch.Tensor, indices: torch.Tensor, *args: Any) -> Replacement:
    if indices.numel() == 0 or cut_evenly(indices) or has_manual(weight, indices):
        return None
    return lambda: aten.embedding(weight, whole(indices), *args)


def _places(index: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    shape = [1] * index.ndim
    shape[dim] = size
    return torch.arange(size, device=index.device).reshape(shape).expand(index.shape)


def _scatter_with_spare(
    x: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    values: torch.Tensor,
    reduce: str,
    include_self: bool,
) -> torch.Tensor:
    """Pad all to even sizes; what is too much goes to places past the end, which are cut off."""

    def pad(tensor: torch.Tensor, shape: Sequence[int], value: int) -> torch.Tensor:
        lacks = [end - size for end, size in zip(shape, tensor.shape, strict=True)]
        return torch.constant_pad_nd(tensor, [n for lack in lacks[::-1] for n in (0, lack)], value)

    spare = [round_up(size + (at == dim)) for at, size in enumerate(x.shape)]
    shape = [round_up(size) for size in index.shape]
    result = torch.scatter_reduce(
        pad(x, spare, 0),
        dim,
        pad(index, shape, x.shape[dim]),
        pad(values, shape, 0),
        reduce,
        include_self=include_self,
    )
    return result[tuple(slice(size) for size in x.shape)]


def _index_put(
    in_place: bool,
    x: torch.Tensor,
    indices: Sequence[torch.Tensor | None],
    values: torch.Tensor,
    accumulate: bool = False,
) -> Replacement:
    given = [index for index in indices if index is not None]
    if any(index.dtype in _MASKS for index in given):
        return _index_put_mask(in_place, x, indices, values, accumulate)
    shape = torch.broadcast_shapes(*(index.shape for index in given))
    if not given or 0 in shape or evenly(shape):
        return None
    dims = [dim for dim, index in enumerate(indices) if index is not None]
    rest = [x.shape[dim] for dim in range(x.ndim) if dim not in dims]
    adjacent = dims[-1] - dims[0] + 1 == len(dims)
    at = dims[0] if adjacent else 0

    def write() -> torch.Tensor:
        spread = values.expand(*rest[:at], *shape, *rest[at:])
        spread = spread.movedim(tuple(range(at, at + len(shape))), tuple(range(len(shape))))
        points = [index.expand(shape) for index in given]
        return into_front(x, dims, points, spread, accumulate, in_place)

    return write


def _index_put_mask(
    in_place: bool,
    x: torch.Tensor,
    indices: Sequence[torch.Tensor | None],
    values: torch.Tensor,
    accumulate: bool,
) -> Replacement:
    """Say a mask as what it is where it can be: as indices, it has to be read first."""
    *before, mask = indices
    fills = values.numel() == 1 and not accumulate
    is_mask = (
        mask is not None
        and mask.dtype == torch.bool
        and not any(index is not None for index in before)
    )
    if any(index is not None and index.ndim == 0 for index in indices):
        return None
    if mask is None or not is_mask or not fills:
        return lambda: _put_read(in_place, x, indices, values, accumulate)
    if x.shape[len(before) : len(before) + mask.ndim] != mask.shape:
        return None
    after = x.ndim - len(before) - mask.ndim
    spread = mask.reshape(*mask.shape, *[1] * after)
    fill = x.masked_fill_ if in_place else x.masked_fill
    return lambda: fill(spread, values.reshape(()))


def _put_read(
    in_place: bool,
    x: torch.Tensor,
    indices: Sequence[torch.Tensor | None],
    values: torch.Tensor,
    accumulate: bool,
) -> torch.Tensor:
    """Write through masks whose places are read: as many as there are cannot be cut unevenly."""
    places: list[torch.Tensor | None] = []
    for index in indices:
        is_mask = index is not None and index.dtype in _MASKS
        places += aten.nonzero(index).unbind(1) if is_mask else [index]
    write = _index_put(in_place, x, places, values, accumulate)
    put = aten.index_put_ if in_place else aten.index_put
    return put(x, places, values, accumulate) if write is None else write()


def _index_add(
    in_place: bool,
    x: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    source: torch.Tensor,
    alpha: Any = 1,
) -> Replacement:
    return _along(in_place, x, dim, index, lambda: source if alpha == 1 else source * alpha, True)


def _index_copy(
    in_place: bool, x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor
) -> Replacement:
    return _along(in_place, x, dim, index, lambda: source, False)


def _index_fill(
    in_place: bool, x: torch.Tensor, dim: int, index: torch.Tensor, value: Any
) -> Replacement:
    def source() -> torch.Tensor:
        shape = list(x.shape)
        shape[dim] = index.numel()
        is_tensor = isinstance(value, torch.Tensor)
        filling = value.to(x.dtype).reshape(()) if is_tensor else x.new_full((), value)
        return filling.expand(shape)

    return _along(in_place, x, dim, index, source, False)


def _along(
    in_place: bool,
    x: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    source: Callable[[], torch.Tensor],
    accumulate: bool,
) -> Replacement:
    if x.ndim == 0 or index.numel() == 0 or evenly(index.shape):
        return None
    dim %= x.ndim

    def write() -> torch.Tensor:
        values = source()
        values = (values if values.ndim == x.ndim else values.unsqueeze(dim)).movedim(dim, 0)
        return into_front(x, [dim], [index.reshape(-1)], values, accumulate, in_place)

    return write


def _put(
    in_place: bool,
    x: torch.Tensor,
    index: torch.Tensor,
    source: torch.Tensor,
    accumulate: bool = False,
) -> Replacement:
    if index.numel() == 0 or evenly(index.shape):
        return None

    def write() -> torch.Tensor:
        flat, points = x.reshape(-1), [index.reshape(-1)]
        result = put_points(flat, points, source.reshape(-1), accumulate, False).reshape(x.shape)
        return assign(x, result) if in_place else result

    return write


def _embedding_backward(
    grad: torch.Tensor, indices: torch.Tensor, num_weights: int, padding_idx: int, by_count: bool
) -> Replacement:
    if indices.numel() == 0 or evenly(indices.shape):
        return None

    def backward() -> torch.Tensor:
        points, size = indices.reshape(-1), grad.shape[-1]
        rows = grad.reshape(-1, size)
        if by_count:
            ones = rows.new_ones(len(points))
            counts = put_points(rows.new_zeros(num_weights), [points], ones, True, False)
            rows = rows / counts[points].unsqueeze(1)
        rows = rows.masked_fill((points == padding_idx).unsqueeze(1), 0)
        return put_points(rows.new_zeros(num_weights, size), [points], rows, True, False)

    return backward


_RULES: dict[Any, Callable[..., Replacement]] = {
    aten.scatter.src: _scatter,
    aten.scatter.reduce: _scatter,
    aten.scatter_.src: _scatter,
    aten.scatter_.reduce: _scatter,
    aten.scatter.value: _scatter_value,
    aten.scatter.value_reduce: _scatter_value,
    aten.scatter_.value: _scatter_value,
    aten.scatter_.value_reduce: _scatter_value,
    aten.scatter_add: _scatter_add,
    aten.scatter_add_: _scatter_add,
    aten.scatter_reduce: _scatter_reduce,
    aten.scatter_reduce_: _scatter_reduce,
    aten.index_put: _index_put,
    aten.index_put_: _index_put,
    aten._unsafe_index_put: _index_put,
    aten.index_add: _index_add,
    aten.index_add_: _index_add,
    aten.index_copy: _index_copy,
    aten.index_copy_: _index_copy,
    aten.index_fill: _index_fill,
    aten.index_fill_: _index_fill,
    aten.put: _put,
    aten.put_: _put,
    aten.embedding_dense_backward: _embedding_backward,
    aten.embedding: _embedding,
    aten.gather: _gather,
    aten.index: _index,
    aten.index_select: _index_select,
}
_WITHOUT_FORMS = frozenset(
    {
        aten.embedding,
        aten.embedding_dense_backward,
        aten.gather,
        aten.index,
        aten.index_select,
    }
)
