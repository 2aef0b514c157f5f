"""Histograms, places of nonzero elements in a fixed number of rows, and hashes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import torch
from jax import lax

from xla_dtensor.runtimes.jax_lowering.pointwise import quotient
from xla_dtensor.runtimes.jax_lowering.scatter import reduce_points
from xla_dtensor.runtimes.jax_lowering.table import lower

__all__: list[str] = []

aten = torch.ops.aten


# ------------------------------------------------------------------ histograms


def _range_of(values: Any, low: Any, high: Any, margin: float) -> tuple[Any, Any]:
    """Return the outermost edges: the values' own where low equals high.

    Args:
        values: The numbers to count.
        low: The low end.
        high: The high end.
        margin: How far apart from one number the edges lie on both its sides.
    """
    kind = values.dtype
    if low == high and values.size:
        least, most = jnp.min(values), jnp.max(values)
    else:
        least, most = jnp.asarray(low, kind), jnp.asarray(high, kind)
    aside = jnp.where(least == most, jnp.asarray(margin, kind), 0).astype(kind)
    return least - aside, most + aside


def _edges(low: Any, high: Any, bins: int) -> Any:
    """As torch.linspace: the first half counted from the low end, the second from the high one."""
    step = (high - low) / bins
    place = jnp.arange(bins + 1)
    first = low + step * place.astype(step.dtype)
    return jnp.where(
        place < (bins + 1) // 2, first, high - step * (bins - place).astype(step.dtype)
    )


def _bin_of(values: Any, edges: Any) -> Any:
    """Return each value's bin; the number of bins where it has none."""
    bins = edges.shape[0] - 1
    found = jnp.searchsorted(edges, values, side="right") - 1
    found = jnp.where(values == edges[-1], bins - 1, found)
    inside = (values >= edges[0]) & (values <= edges[-1])
    return jnp.where(inside, found, bins)


def _counted(columns: Any, edges: Sequence[Any], weight: Any) -> Any:
    """Return the histogram of rows of numbers, one edge sequence per column."""
    shape = tuple(edge.shape[0] - 1 for edge in edges)
    points = [_bin_of(columns[:, d], edge) for d, edge in enumerate(edges)]
    ones = jnp.ones(columns.shape[0], columns.dtype) if weight is None else weight.reshape(-1)
    return reduce_points(jnp.zeros(shape, columns.dtype), points, ones, "sum")


def _density(counts: Any, edges: Sequence[Any]) -> Any:
    counts = counts / jnp.sum(counts)
    for d, edge in enumerate(edges):
        widths = jnp.diff(edge)
        counts = counts / widths.reshape((-1,) + (1,) * (counts.ndim - d - 1))
    return counts


@lower(aten.histc.default)
def _histc(x: Any, bins: int = 100, min: Any = 0, max: Any = 0) -> Any:
    flat = x.reshape(-1)
    low, high = _range_of(flat, min, max, margin=1)
    wide = flat.astype(jnp.promote_types(flat.dtype, jnp.float32))
    found = jnp.floor(quotient((wide - low) * bins, high - low)).astype(jnp.int64)
    found = jnp.where((wide >= low) & (wide <= high), jnp.clip(found, 0, bins - 1), bins)
    return reduce_points(jnp.zeros(bins, x.dtype), [found], jnp.ones_like(flat), "sum")


@lower(aten.histogram.bins_tensor)
def _histogram_of_edges(x: Any, bins: Any, *, weight: Any = None, density: bool = False) -> Any:
    counts = _counted(x.reshape(-1, 1), [bins], weight)
    return (_density(counts, [bins]) if density else counts), bins


def _bin_edges(columns: Any, bins: Sequence[int], range: Sequence[float] | None) -> list[Any]:
    edges = []
    for d, count in enumerate(bins):
        low, high = (0.0, 0.0) if range is None else range[2 * d : 2 * d + 2]
        if range is None and not columns.size:
            low, high = 0.0, 1.0
        edges.append(_edges(*_range_of_column(columns[:, d], low, high, range is None), count))
    return edges


def _range_of_column(column: Any, low: Any, high: Any, of_values: bool) -> tuple[Any, Any]:
    if of_values:
        return _range_of(column, low, high, margin=0.5)
    low, high = jnp.asarray(low, column.dtype), jnp.asarray(high, column.dtype)
    return jnp.where(low == high, low - 0.5, low), jnp.where(low == high, high + 0.5, high)


@lower(aten.histogram.bin_ct)
def _histogram(
    x: Any, bins: int = 100, *, range: Any = None, weight: Any = None, density: bool = False
) -> Any:
    edges = _bin_edges(x.reshape(-1, 1), [bins], range)
    return _histogram_of_edges(x, edges[0], weight=weight, density=density)


@lower(aten._histogramdd_bin_edges.default)
def _histogramdd_bin_edges(
    x: Any, bins: Any, *, range: Any = None, weight: Any = None, density: bool = False
) -> Any:
    return _bin_edges(x.reshape(-1, x.shape[-1]), bins, range)


@lower(aten._histogramdd_from_bin_tensors.default)
def _histogramdd_of_edges(x: Any, bins: Any, *, weight: Any = None, density: bool = False) -> Any:
    counts = _counted(x.reshape(-1, x.shape[-1]), bins, weight)
    return _density(counts, bins) if density else counts


@lower(aten._histogramdd_from_bin_cts.default)
def _histogramdd(
    x: Any, bins: Any, *, range: Any = None, weight: Any = None, density: bool = False
) -> Any:
    edges = _bin_edges(x.reshape(-1, x.shape[-1]), bins, range)
    return _histogramdd_of_edges(x, edges, weight=weight, density=density)


# ------------------------------------------------------------------ nonzero elements


@lower(aten.nonzero_static.default)
def _nonzero_static(x: Any, *, size: int, fill_value: int = -1) -> Any:
    mask = (x != 0).reshape(-1)
    order = jnp.argsort(~mask, stable=True)[:size]
    order = jnp.pad(order, (0, size - order.shape[0]))
    is_found = jnp.arange(size) < jnp.sum(mask)
    places = (
        jnp.stack(jnp.unravel_index(order, x.shape), axis=-1) if x.ndim else order[:, None][:, :0]
    )
    return jnp.where(is_found[:, None], places, fill_value)


# ------------------------------------------------------------------ hashes


@lower(aten.hash_tensor.default)
def _hash(x: Any, dim: Any = (), *, keepdim: bool = False, mode: int = 0) -> Any:
    if jnp.issubdtype(x.dtype, jnp.floating):  # bfloat16 is of no kind
        bits = lax.bitcast_convert_type(x.astype(jnp.float64), jnp.uint64)
    else:
        bits = x.astype(jnp.int64).astype(jnp.uint64)
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    axes = tuple(d % x.ndim for d in dims) if dims and x.ndim else tuple(range(x.ndim))
    for axis in axes:
        bits = _xor_along(bits, axis)
    return bits if keepdim else bits.squeeze(axes)


def _xor_along(bits: Any, axis: int) -> Any:
    """Combine a dim by halves: XLA has no reduction by XOR over several devices."""
    bits = jnp.moveaxis(bits, axis, 0)
    size = 1 << max(bits.shape[0] - 1, 0).bit_length()
    bits = jnp.pad(bits, [(0, size - bits.shape[0]), *[(0, 0)] * (bits.ndim - 1)])
    while size > 1:
        size //= 2
        bits = bits[:size] ^ bits[size:]
    return jnp.moveaxis(bits, 0, axis)
