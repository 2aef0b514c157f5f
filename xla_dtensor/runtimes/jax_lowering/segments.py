"""Reductions over consecutive segments of a dim, whose lengths or borders a tensor gives."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.runtimes.jax_lowering.scatter import identity, reduce_points
from xla_dtensor.runtimes.jax_lowering.table import lower

__all__: list[str] = []

aten = torch.ops.aten
_REDUCE = {"sum": "sum", "mean": "sum", "prod": "prod", "max": "amax", "min": "amin"}


def _borders(lengths: Any, offsets: Any) -> Any:
    """Return where the segments start, and at last where the last one ends."""
    if offsets is not None:
        return offsets
    if lengths is None:
        raise UnsupportedOpError(
            "segment_reduce was called with neither lengths nor offsets. Segments by indices are "
            "not there in PyTorch either. Pass lengths or offsets."
        )
    ends = jnp.cumsum(lengths, axis=-1)
    return jnp.concatenate([jnp.zeros((*ends.shape[:-1], 1), ends.dtype), ends], axis=-1)


def _segment_of(borders: Any, size: int) -> Any:
    """Return each place's segment; -1 and the number of segments outside of all of them."""

    def search(one: Any) -> Any:
        return jnp.searchsorted(one, jnp.arange(size), side="right") - 1

    for _ in range(borders.ndim - 1):
        search = jax.vmap(search)
    return search(borders)


def _points(segments: Any) -> list[Any]:
    points = [lax.broadcasted_iota(segments.dtype, segments.shape, d) for d in range(segments.ndim)]
    return [*points[:-1], segments]


def _beside(x: Any, ndim: int) -> Any:
    return x.reshape(x.shape + (1,) * (ndim - x.ndim))


@lower(aten.segment_reduce.default)
def _segment_reduce(
    data: Any,
    reduce: str,
    *,
    lengths: Any = None,
    indices: Any = None,
    offsets: Any = None,
    axis: int = 0,
    unsafe: bool = False,
    initial: Any = None,
) -> Any:
    borders = _borders(lengths, offsets)
    data = data.astype(jnp.promote_types(data.dtype, jnp.float32))  # the caller casts back
    count = borders.shape[-1] - 1
    segments = _segment_of(borders, data.shape[axis])
    start = identity(_REDUCE[reduce], data.dtype) if initial is None else initial
    shape = (*data.shape[:axis], count, *data.shape[axis + 1 :])
    base = jnp.full(shape, start, data.dtype)
    # A negative place would count from the end, and one at the end is dropped.
    points = _points(jnp.where(segments < 0, count, segments))
    found = reduce_points(base, points, data, _REDUCE[reduce])
    if lengths is not None and not unsafe:
        is_sum = jnp.all(borders[..., -1] == data.shape[axis])
        found = jnp.where(is_sum, found, jnp.nan)
    if reduce != "mean":
        return found
    sizes = _beside(jnp.diff(borders, axis=-1), found.ndim).astype(found.dtype)
    without = jnp.asarray(jnp.nan if initial is None else initial, found.dtype)
    return jnp.where(sizes > 0, found / jnp.maximum(sizes, 1), without)


def _product_of_others(data: Any, segments: Any, output: Any, initial: Any, pull: Any) -> Any:
    """Each element's derivative of its segment's product, right where there are zeros."""
    is_zero = data == 0
    ones = jnp.ones(output.shape, data.dtype) * (1 if initial is None else initial)
    filled = reduce_points(ones, segments, jnp.where(is_zero, 1, data), "prod")
    zeros = reduce_points(jnp.zeros(output.shape, jnp.int64), segments, is_zero, "sum")
    of_others = pull(zeros) - is_zero
    return jnp.where(of_others > 0, 0, pull(filled) / jnp.where(is_zero, 1, data))


@lower(aten._segment_reduce_backward.default)
def _segment_reduce_backward(
    grad: Any,
    output: Any,
    data: Any,
    reduce: str,
    *,
    lengths: Any = None,
    offsets: Any = None,
    axis: int = 0,
    initial: Any = None,
) -> Any:
    borders = _borders(lengths, offsets)
    segments = _segment_of(borders, data.shape[axis])
    count = borders.shape[-1] - 1
    inside = _beside((segments >= 0) & (segments < count), data.ndim)
    index = jnp.broadcast_to(_beside(jnp.clip(segments, 0, count - 1), data.ndim), data.shape)

    def pull(x: Any) -> Any:
        return jnp.take_along_axis(x, index, axis=axis)

    points = _points(jnp.where(segments < 0, count, segments))
    found = pull(grad)
    if reduce == "mean":
        sizes = _beside(jnp.diff(borders, axis=-1), output.ndim).astype(grad.dtype)
        found = found / pull(jnp.broadcast_to(jnp.maximum(sizes, 1), output.shape))
    elif reduce in ("max", "min"):
        hit = (data == pull(output)) | jnp.isnan(data)
        ties = reduce_points(jnp.zeros(output.shape, jnp.int64), points, hit, "sum")
        found = jnp.where(hit, found / jnp.maximum(pull(ties), 1).astype(grad.dtype), 0)
    elif reduce == "prod":
        found = found * _product_of_others(data, points, output, initial, pull)
    return jnp.where(inside, found, 0)
