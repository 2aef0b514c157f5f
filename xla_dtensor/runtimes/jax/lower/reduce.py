"""Reductions along dims, and the ops that scan or sort along one.

Half-precision sums accumulate in float32, as torch's kernels do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch
from jax import lax

from xla_dtensor.core.errors import IndexRangeError, UnsupportedOpError
from xla_dtensor.runtimes.jax.arrays.values import counted_scan, jax_dtype
from xla_dtensor.runtimes.jax.lower.index import (
    identity,
    largest,
    ordered,
    reduce_points,
    smallest,
)
from xla_dtensor.runtimes.jax.lower.pointwise import log_add_exp, lower_derivative, quotient
from xla_dtensor.runtimes.jax.lower.random import as_one
from xla_dtensor.runtimes.jax.lower.table import lower

__all__: list[str] = []


# ----------------------------------------------------------------------------------------- Counting
#
# Histograms, places of nonzero elements in a fixed number of rows, and hashes.

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
    bin_index = jnp.searchsorted(edges, values, side="right") - 1
    bin_index = jnp.where(values == edges[-1], bins - 1, bin_index)
    inside = (values >= edges[0]) & (values <= edges[-1])
    return jnp.where(inside, bin_index, bins)


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
    bin_index = jnp.floor(quotient((wide - low) * bins, high - low)).astype(jnp.int64)
    bin_index = jnp.where((wide >= low) & (wide <= high), jnp.clip(bin_index, 0, bins - 1), bins)
    return reduce_points(jnp.zeros(bins, x.dtype), [bin_index], jnp.ones_like(flat), "sum")


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


# ------------------------------------------------------------------------------------ The CTC loss
#
# The probability of a label sequence, over all ways to spread it over the steps.
#
# A sequence of S labels has 2S + 1 *states*: each label, and a blank before, between and after
# them. The forward sums over paths through the states from the first step on, the backward from
# both ends.


class _Problem(NamedTuple):
    """Log-probabilities of each state, shape (steps, batch, states), and which states there are."""

    scores: Any
    labels: Any  # (batch, states)
    skips: Any  # (batch, states): a path may come from two states before
    steps: Any  # (batch,)
    last: Any  # (batch,): the last state, the blank after the last label


def _problem(
    log_probs: Any, targets: Any, steps: Any, lengths: Any, blank: int, longest: int
) -> _Problem:
    steps, lengths = (jnp.asarray(v, jnp.int32).reshape(-1) for v in (steps, lengths))
    places = jnp.arange(longest, dtype=jnp.int32)
    if targets.ndim == 1:  # all sequences, one after the other
        places = places + (jnp.cumsum(lengths) - lengths)[:, None]
        padded = jnp.take(targets, places, mode="clip") if targets.size else places
    else:
        padded = targets[:, :longest]
    labels = jnp.full((len(lengths), 2 * longest + 1), blank, jnp.int32)
    spread = jnp.stack([padded.astype(jnp.int32), labels[:, 1::2]], 2).reshape(len(lengths), -1)
    labels = jnp.concatenate([labels[:, :1], spread], 1)
    previous = jnp.pad(labels, ((0, 0), (2, 0)), constant_values=blank)[:, :-2]
    scores = jnp.take_along_axis(log_probs, labels[None], axis=2, mode="clip")
    exists = jnp.arange(labels.shape[1], dtype=jnp.int32) <= 2 * lengths[:, None]
    scores = jnp.where(exists, scores, -jnp.inf)
    return _Problem(scores, labels, (labels != blank) & (labels != previous), steps, 2 * lengths)


def _log_sum(*terms: Any) -> Any:
    stacked = jnp.stack(jnp.broadcast_arrays(*terms))
    largest = jnp.max(stacked, axis=0)
    largest = jnp.where(jnp.isfinite(largest), largest, 0)
    return jnp.log(jnp.sum(jnp.exp(stacked - largest), axis=0)) + largest


def _from(states: Any, number: int) -> Any:
    """What lies `number` states before each one (behind it, if negative); nothing at the ends."""
    padding = ((0, 0), (number, 0)) if number > 0 else ((0, 0), (0, -number))
    padded = jnp.pad(states, padding, constant_values=-jnp.inf)
    return padded[:, :-number] if number > 0 else padded[:, -number:]


def _forward_sums(problem: _Problem) -> Any:
    states = jnp.arange(problem.labels.shape[1])
    begin = jnp.where((states < 2) & (states <= problem.last[:, None]), 0.0, -jnp.inf)
    first = begin + problem.scores[0]

    def step(sums: Any, scores: Any) -> Any:
        skipped = jnp.where(problem.skips, _from(sums, 2), -jnp.inf)
        sums = _log_sum(sums, _from(sums, 1), skipped) + scores
        return sums, sums

    _, later_sums = counted_scan(step, first, problem.scores[1:])
    return jnp.concatenate([first[None], later_sums])


def _backward_sums(problem: _Problem) -> Any:
    count = problem.scores.shape[0]
    states = jnp.arange(problem.labels.shape[1])
    ends = (states == problem.last[:, None]) | (states == problem.last[:, None] - 1)
    may_skip = jnp.pad(problem.skips, ((0, 0), (0, 2)))[:, 2:]

    def step(sums: Any, row: Any) -> Any:
        scores, number = row
        skipped = jnp.where(may_skip, _from(sums, -2), -jnp.inf)
        sums = _log_sum(sums, _from(sums, -1), skipped)
        at_end = (number == problem.steps - 1)[:, None]
        sums = jnp.where(at_end, jnp.where(ends, 0.0, -jnp.inf), sums) + scores
        return sums, sums

    start = jnp.full(problem.labels.shape, -jnp.inf, problem.scores.dtype)
    numbers = jnp.arange(count, dtype=jnp.int32)
    return counted_scan(step, start, (problem.scores, numbers), reverse=True)[1]


def _longest(targets: Any, lengths: Any) -> int:
    if isinstance(lengths, (list, tuple)):
        return max(lengths, default=0)
    return targets.shape[-1]


@lower(aten._ctc_loss.default, aten._ctc_loss.Tensor)
@as_one
def _ctc_loss(
    log_probs: Any,
    targets: Any,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    zero_infinity: bool = False,
) -> Any:
    batched = log_probs.ndim == 3
    probs = log_probs if batched else log_probs[:, None]
    longest = _longest(targets, target_lengths)
    if not batched and targets.ndim == 1:
        targets = targets[None]
    problem = _problem(probs, targets, input_lengths, target_lengths, blank, longest)
    sums = _forward_sums(problem)
    rows = jnp.arange(probs.shape[1])
    ending = sums[jnp.maximum(problem.steps - 1, 0), rows]
    on_label = jnp.where(problem.last > 0, ending[rows, jnp.maximum(problem.last - 1, 0)], -jnp.inf)
    loss = -_log_sum(ending[rows, problem.last], on_label)
    loss = jnp.where(problem.steps == 0, jnp.where(problem.last == 0, 0.0, jnp.inf), loss)
    sums = jnp.moveaxis(sums, 0, 1)
    return (loss, sums) if batched else (loss[0], sums[0])


@lower(aten._ctc_loss_backward.default, aten._ctc_loss_backward.Tensor)
@as_one
def _ctc_loss_backward(
    grad: Any,
    log_probs: Any,
    targets: Any,
    input_lengths: Any,
    target_lengths: Any,
    loss: Any,
    sums: Any,
    blank: int,
    zero_infinity: bool = False,
) -> Any:
    batched = log_probs.ndim == 3
    probs = log_probs if batched else log_probs[:, None]
    if not batched:
        targets = targets[None] if targets.ndim == 1 else targets
        loss, sums = loss.reshape(1), sums.reshape(1, *sums.shape[-2:])
    longest = (sums.shape[-1] - 1) // 2
    problem = _problem(probs, targets, input_lengths, target_lengths, blank, longest)
    paths = jnp.moveaxis(sums, 1, 0) + _backward_sums(problem)  # each has the state's score
    share = jnp.exp(paths - problem.scores + loss[:, None])
    share = jnp.where(jnp.isneginf(paths), 0, share)
    classes = problem.labels[..., None] == jnp.arange(probs.shape[-1], dtype=jnp.int32)
    share = jnp.einsum(
        "tns,nsc->tnc", share, classes.astype(share.dtype), precision=lax.Precision.HIGHEST
    )
    # As torch's: the gradient of what a log_softmax before the loss was given.
    grads = (jnp.exp(probs) - share) * grad.reshape(-1)[:, None]
    impossible = jnp.isposinf(loss)[:, None]
    grads = jnp.where(impossible, 0 if zero_infinity else jnp.nan, grads)
    steps = jnp.arange(probs.shape[0], dtype=jnp.int32)[:, None, None]
    grads = jnp.where(steps < problem.steps[:, None], grads, 0)
    return grads if batched else grads[:, 0]


# --------------------------------------------------------------------------- Margin losses and CTC
#
# One number per row, from scores and the classes that belong to it.


def _reduced(losses: Any, reduction: int) -> Any:
    if reduction == 0:
        return losses
    return jnp.mean(losses) if reduction == 1 else jnp.sum(losses)


@lower(aten.multi_margin_loss.default)
@as_one
def _multi_margin_loss(
    x: Any,
    target: Any,
    p: Any = 1,
    margin: Any = 1,
    weight: Any = None,
    reduction: int = 1,
) -> Any:
    scores = x if x.ndim == 2 else x.reshape(1, -1)
    classes = target.reshape(-1)
    is_target = lax.broadcasted_iota(classes.dtype, scores.shape, 1) == classes[:, None]
    chosen = jnp.sum(jnp.where(is_target, scores, 0), axis=1, keepdims=True)
    lack = margin - chosen + scores
    # Where nothing is lacking there is no gradient, at zero too.
    lack = jnp.where((lack > 0) & ~is_target, lack, 0)
    penalties = lack if p == 1 else lack * lack
    if weight is not None:
        penalties = penalties * jnp.take(weight, classes, mode="fill")[:, None]
    losses = jnp.sum(penalties, axis=1) / scores.shape[1]
    losses = jnp.where(jnp.any(is_target, axis=1), losses, jnp.nan)  # there is no such class
    return _reduced(losses.reshape(target.shape), reduction)


lower_derivative(aten.multi_margin_loss_backward.default, aten.multi_margin_loss.default, "self")


@lower(aten.multilabel_margin_loss_forward.default)
@as_one
def _multilabel_margin_loss(x: Any, target: Any, reduction: int) -> Any:
    """Each target is a list of classes that ends before the first negative one."""
    scores, classes = (v.reshape(-1, v.shape[-1] if v.ndim else 1) for v in (x, target))
    listed = jnp.cumsum(classes < 0, axis=1) == 0
    # Dims: row, place in the list, class.
    is_listed_class = classes[..., None] == jnp.arange(scores.shape[1], dtype=classes.dtype)
    is_listed_class &= listed[..., None]
    is_target = jnp.any(is_listed_class, axis=1)
    chosen = jnp.sum(jnp.where(is_listed_class, scores[:, None, :], 0), axis=2)
    lack = 1 - chosen[..., None] + scores[:, None, :]
    counted = (lack > 0) & listed[..., None] & ~is_target[:, None, :]
    losses = jnp.sum(jnp.where(counted, lack, 0), axis=(1, 2)) / scores.shape[1]
    is_no_class = jnp.any((classes < -1) | (classes >= scores.shape[1]), axis=1)
    losses = jnp.where(is_no_class, jnp.nan, losses).reshape(x.shape[: max(x.ndim - 1, 0)])
    return _reduced(losses, reduction), is_target.astype(x.dtype).reshape(target.shape)


lower_derivative(
    aten.multilabel_margin_loss_backward.default,
    aten.multilabel_margin_loss_forward.default,
    "self",
)


# ---------------------------------- Reductions along dims, and the ops that scan or sort along one


def _axes(x: jax.Array, dim: Any) -> tuple[int, ...]:
    if dim is None or (isinstance(dim, Sequence) and not dim):
        return tuple(range(x.ndim))
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    most = max(x.ndim, 1)
    if any(not -most <= d < most for d in dims):
        raise IndexRangeError(
            f"A reduction was asked for along dim={dim} of a tensor of shape={x.shape}. It has the "
            f"dims {-most} to {most - 1}. Pass one of these."
        )
    return tuple(d % max(x.ndim, 1) for d in dims) if x.ndim else ()


def _wide(x: jax.Array, meta: Any) -> jax.Array:
    """`x` in the dtype to accumulate in: that of the result, but complex numbers stay complex."""
    dtype = jax_dtype(meta.dtype)
    if jnp.iscomplexobj(x):
        return x.astype(jnp.promote_types(x.dtype, dtype))
    return x.astype(jnp.float32 if dtype in (jnp.bfloat16, jnp.float16) else dtype)


@lower(aten.sum.default, aten.sum.dim_IntList, wants_meta=True)
def _sum(x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, meta: Any) -> Any:
    return jnp.sum(_wide(x, meta), axis=_axes(x, dim), keepdims=keepdim)


@lower(aten.mean.default, aten.mean.dim, wants_meta=True)
def _mean(x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, meta: Any) -> Any:
    axes, wide = _axes(x, dim), _wide(x, meta)
    if wide.dtype != jax_dtype(meta.dtype) or jnp.iscomplexobj(wide):
        return jnp.mean(wide, axis=axes, keepdims=keepdim)
    count = math.prod(x.shape[d] for d in axes)
    return quotient(jnp.sum(wide, axis=axes, keepdims=keepdim), count)


@lower(aten.prod.default, wants_meta=True)
def _prod(x: Any, *, dtype: Any = None, meta: Any) -> Any:
    return jnp.prod(_wide(x, meta))


@lower(aten.prod.dim_int, wants_meta=True)
def _prod_dim(x: Any, dim: int, keepdim: bool = False, *, dtype: Any = None, meta: Any) -> Any:
    return jnp.prod(_wide(x, meta), axis=_axes(x, dim), keepdims=keepdim)


@lower(aten.amax.default)
def _amax(x: Any, dim: Any = (), keepdim: bool = False) -> Any:
    return largest(x, axis=_axes(x, dim), keepdims=keepdim)


@lower(aten.amin.default)
def _amin(x: Any, dim: Any = (), keepdim: bool = False) -> Any:
    return smallest(x, axis=_axes(x, dim), keepdims=keepdim)


@lower(aten.max.default)
def _max(x: Any) -> Any:
    return largest(x)


@lower(aten.min.default)
def _min(x: Any) -> Any:
    return smallest(x)


@lower(aten.max.dim)
def _max_dim(x: Any, dim: int, keepdim: bool = False) -> Any:
    axis = _axes(x, dim)
    if not axis:
        return x, jnp.zeros((), jnp.int64)
    return (
        largest(x, axis=axis, keepdims=keepdim),
        jnp.argmax(x, axis=axis[0], keepdims=keepdim),
    )


@lower(aten.min.dim)
def _min_dim(x: Any, dim: int, keepdim: bool = False) -> Any:
    axis = _axes(x, dim)
    if not axis:
        return x, jnp.zeros((), jnp.int64)
    return (
        smallest(x, axis=axis, keepdims=keepdim),
        jnp.argmin(x, axis=axis[0], keepdims=keepdim),
    )


@lower(aten.argmax.default)
def _argmax(x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    return jnp.argmax(x, axis=dim if x.ndim else None, keepdims=keepdim and x.ndim > 0)


@lower(aten.argmin.default)
def _argmin(x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    return jnp.argmin(x, axis=dim if x.ndim else None, keepdims=keepdim and x.ndim > 0)


@lower(aten.any.default, aten.any.dim, aten.any.dims, aten._is_any_true.default)
def _any(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return jnp.any(x != 0, axis=_axes_of_truth(x, dim), keepdims=keepdim)


@lower(aten.all.default, aten.all.dim, aten.all.dims, aten._is_all_true.default)
def _all(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return jnp.all(x != 0, axis=_axes_of_truth(x, dim), keepdims=keepdim)


def _axes_of_truth(x: Any, dim: Any) -> tuple[int, ...]:
    """To any and all, no dims are no dims; to sum and the like they are all dims."""
    return () if isinstance(dim, Sequence) and not dim else _axes(x, dim)


@lower(aten.logsumexp.default)
def _logsumexp(x: Any, dim: Any, keepdim: bool = False) -> Any:
    return jax.nn.logsumexp(x, axis=_axes(x, dim), keepdims=keepdim)


@lower(aten.var.correction, wants_meta=True)
def _var(x: Any, dim: Any = None, *, correction: Any = 1, keepdim: bool = False, meta: Any) -> Any:
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        # torch's kernels say so; its meta device takes any dtype.
        raise NotImplementedError("std and var only support floating point and complex dtypes")
    axes = _axes(x, dim)
    count = 1
    for axis in axes:
        count *= x.shape[axis]
    wide = _wide(x, meta)
    centred = wide - jnp.mean(wide, axis=axes, keepdims=True)
    divisor = max(count - (1 if correction is None else correction), 0)
    squares = jnp.real(centred * jnp.conj(centred))
    return jnp.sum(squares, axis=axes, keepdims=keepdim) / divisor


@lower(aten.linalg_vector_norm.default, wants_meta=True)
def _vector_norm(
    x: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, meta: Any
) -> Any:
    wide, axes = _wide(jnp.abs(x), meta), _axes(x, dim)
    if ord == 2:
        return jnp.sqrt(jnp.sum(wide * wide, axis=axes, keepdims=keepdim))
    if ord in (float("inf"), float("-inf")):
        return (largest if ord > 0 else smallest)(wide, axis=axes, keepdims=keepdim)
    if ord == 0:
        return jnp.sum(wide != 0, axis=axes, keepdims=keepdim)
    return jnp.sum(wide**ord, axis=axes, keepdims=keepdim) ** (1 / ord)


@lower(aten.cumsum.default, wants_meta=True)
def _cumsum(x: Any, dim: int, *, dtype: Any = None, meta: Any) -> Any:
    return jnp.cumsum(_wide(x, meta), axis=dim) if x.ndim else x


@lower(aten.cumprod.default, wants_meta=True)
def _cumprod(x: Any, dim: int, *, dtype: Any = None, meta: Any) -> Any:
    return jnp.cumprod(_wide(x, meta), axis=dim) if x.ndim else x


@lower(aten.logcumsumexp.default)
def _logcumsumexp(x: Any, dim: int) -> Any:
    if not x.ndim or not x.size:
        return x
    if x.dtype.kind != "c":
        return lax.cumlogsumexp(x, axis=dim % x.ndim)
    rows = jnp.moveaxis(x, dim, 0)

    def add(total: Any, row: Any) -> tuple[Any, Any]:
        total = log_add_exp(total, row)
        return total, total

    _, totals = lax.scan(add, rows[0], rows[1:])
    return jnp.moveaxis(jnp.concatenate([rows[:1], totals]), 0, dim)


@lower(aten._softmax.default)
def _softmax(x: Any, dim: int, half_to_float: bool) -> Any:
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return jax.nn.softmax(wide, axis=_axes(x, dim))


@lower(aten._log_softmax.default)
def _log_softmax(x: Any, dim: int, half_to_float: bool) -> Any:
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return jax.nn.log_softmax(wide, axis=_axes(x, dim))


@lower(aten._softmax_backward_data.default)
def _softmax_backward(grad: Any, y: Any, dim: int, input_dtype: Any) -> Any:
    product = grad * y
    return product - y * jnp.sum(product, axis=_axes(y, dim), keepdims=True)


@lower(aten._log_softmax_backward_data.default)
def _log_softmax_backward(grad: Any, y: Any, dim: int, input_dtype: Any) -> Any:
    return grad - jnp.exp(y) * jnp.sum(grad, axis=_axes(y, dim), keepdims=True)


@lower(aten.topk.default)
def _topk(x: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    if not x.ndim:
        return x, jnp.zeros((), jnp.int64)
    # NaN counts as the largest number; XLA orders NaNs by their sign, and in bfloat16 after all.
    numbers = x
    if jnp.issubdtype(x.dtype, jnp.floating):
        numbers = ordered(x if x.dtype == jnp.float64 else x.astype(jnp.float32), True)
    # ~x turns the order of integers round without the overflow of -x.
    _, indices = lax.top_k(jnp.moveaxis(numbers if largest else ~numbers, dim, -1), k)
    indices = jnp.moveaxis(indices, -1, dim)
    return jnp.take_along_axis(x, indices, axis=dim), indices


@lower(aten.sort.default, aten.sort.stable)
def _sort(x: Any, dim: int = -1, descending: bool = False, *, stable: bool | None = None) -> Any:
    if not x.ndim:
        return x, jnp.zeros((), jnp.int64)
    order = jnp.argsort(x, axis=dim, descending=descending, stable=True)
    return jnp.take_along_axis(x, order, axis=dim), order


# ----------------------------------------------------------------------------------------- Segments
#
# Reductions over consecutive segments of a dim, whose lengths or borders a tensor gives.

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

    def search(row: Any) -> Any:
        return jnp.searchsorted(row, jnp.arange(size), side="right") - 1

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
    reduced = reduce_points(base, points, data, _REDUCE[reduce])
    if lengths is not None and not unsafe:
        is_sum = jnp.all(borders[..., -1] == data.shape[axis])
        reduced = jnp.where(is_sum, reduced, jnp.nan)
    if reduce != "mean":
        return reduced
    sizes = _beside(jnp.diff(borders, axis=-1), reduced.ndim).astype(reduced.dtype)
    without = jnp.asarray(jnp.nan if initial is None else initial, reduced.dtype)
    return jnp.where(sizes > 0, reduced / jnp.maximum(sizes, 1), without)


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
    grads = pull(grad)
    if reduce == "mean":
        sizes = _beside(jnp.diff(borders, axis=-1), output.ndim).astype(grad.dtype)
        grads = grads / pull(jnp.broadcast_to(jnp.maximum(sizes, 1), output.shape))
    elif reduce in ("max", "min"):
        hit = (data == pull(output)) | jnp.isnan(data)
        ties = reduce_points(jnp.zeros(output.shape, jnp.int64), points, hit, "sum")
        grads = jnp.where(hit, grads / jnp.maximum(pull(ties), 1).astype(grad.dtype), 0)
    elif reduce == "prod":
        grads = grads * _product_of_others(data, points, output, initial, pull)
    return jnp.where(inside, grads, 0)


# -------------------------------------------------------------------------------- Order statistics
#
# Medians, modes, running extrema, and places in a sorted sequence.


def _is_nan(x: Any) -> Any:
    return jnp.isnan(x) if jnp.issubdtype(x.dtype, jnp.floating) else jnp.zeros(x.shape, jnp.bool_)


def _picked(x: Any, order: Any, place: Any, dim: int, keepdim: bool) -> tuple[Any, Any]:
    """Return the elements at `place` in the sorted order along a dim, and where they were."""
    shape = [1 if d == dim else n for d, n in enumerate(x.shape)]
    indices = jnp.take_along_axis(order, jnp.broadcast_to(place, shape), axis=dim)
    values = jnp.take_along_axis(x, indices, axis=dim)
    return (values, indices) if keepdim else (values.squeeze(dim), indices.squeeze(dim))


@lower(aten.kthvalue.default)
def _kthvalue(x: Any, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    if not x.ndim:
        return x, jnp.zeros((), jnp.int64)
    dim %= x.ndim
    return _picked(x, jnp.argsort(x, axis=dim, stable=True), k - 1, dim, keepdim)


# ------------------------------------------------------------------ medians


def _median(x: Any, dim: int, keepdim: bool, skip_nan: bool) -> Any:
    if not x.ndim:
        return x, jnp.zeros((), jnp.int64)
    dim %= x.ndim
    order = jnp.argsort(x, axis=dim, stable=True)  # NaN comes last
    numbers = jnp.sum(~_is_nan(x), axis=dim, keepdims=True)
    size = x.shape[dim]
    middle = jnp.maximum(numbers - 1, 0) // 2
    if not skip_nan:
        middle = jnp.where(numbers < size, numbers, (size - 1) // 2)  # the first NaN
    return _picked(x, order, middle, dim, keepdim)


@lower(aten.median.dim)
def _median_dim(x: Any, dim: int, keepdim: bool = False) -> Any:
    return _median(x, dim, keepdim, skip_nan=False)


@lower(aten.nanmedian.dim)
def _nanmedian_dim(x: Any, dim: int, keepdim: bool = False) -> Any:
    return _median(x, dim, keepdim, skip_nan=True)


def _median_of_all(x: Any, skip_nan: bool) -> Any:
    if not x.size:
        is_float = jnp.issubdtype(x.dtype, jnp.floating)
        return jnp.asarray(jnp.nan if is_float else jnp.iinfo(x.dtype).min, x.dtype)
    return _median(x.reshape(-1), 0, False, skip_nan)[0]


@lower(aten.median.default)
def _median_default(x: Any) -> Any:
    return _median_of_all(x, skip_nan=False)


@lower(aten.nanmedian.default)
def _nanmedian_default(x: Any) -> Any:
    return _median_of_all(x, skip_nan=True)


@lower(aten.mode.default)
def _mode(x: Any, dim: int = -1, keepdim: bool = False) -> Any:
    if not x.ndim:
        return x, jnp.zeros((), jnp.int64)
    dim %= x.ndim
    order = jnp.argsort(x, axis=dim, stable=True)
    values = jnp.take_along_axis(x, order, axis=dim)
    # How many equal elements end at each place; the first maximum is the least of the modes.
    place = lax.broadcasted_iota(jnp.int64, x.shape, dim)
    previous = jnp.roll(values, 1, axis=dim)
    starts = (place == 0) | (values != previous)
    run = place - lax.cummax(jnp.where(starts, place, 0), axis=dim)
    return _picked(x, order, jnp.argmax(run, axis=dim, keepdims=True), dim, keepdim)


# ------------------------------------------------------------------ running extrema


def _cumulative_extremum(x: Any, dim: int, scan: Any) -> Any:
    if not x.ndim:
        return x, jnp.zeros((), jnp.int64)
    dim %= x.ndim
    kind = x.dtype
    x = x.astype(jnp.uint8) if kind == jnp.bool_ else x
    values = scan(x, axis=dim)
    is_new = (x == values) | (_is_nan(x) & _is_nan(values))  # the last one of equals, as torch
    place = lax.broadcasted_iota(jnp.int64, x.shape, dim)
    return values.astype(kind), lax.cummax(jnp.where(is_new, place, 0), axis=dim)


@lower(aten.cummax.default)
def _cummax(x: Any, dim: int) -> Any:
    return _cumulative_extremum(x, dim, lax.cummax)


@lower(aten.cummin.default)
def _cummin(x: Any, dim: int) -> Any:
    return _cumulative_extremum(x, dim, lax.cummin)


# ------------------------------------------------------------------ places in a sequence


@lower(aten.searchsorted.Tensor, aten.searchsorted.Scalar)
def _searchsorted(
    sequence: Any,
    values: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Any = None,
) -> Any:
    values = jnp.asarray(values)
    if sorter is not None:
        sequence = jnp.take_along_axis(sequence, sorter, axis=-1)
    kind = jnp.promote_types(sequence.dtype, values.dtype)
    sequence, values = sequence.astype(kind), values.astype(kind)
    where = "right" if right or side == "right" else "left"

    def search(row: Any, row_values: Any) -> Any:
        places = jnp.searchsorted(row, row_values, side=where)
        # NaN goes behind all, behind other NaNs too.
        return jnp.where(row_values != row_values, row.shape[0], places)

    for _ in range(sequence.ndim - 1):
        search = jax.vmap(search)
    return search(sequence, values).astype(jnp.int32 if out_int32 else jnp.int64)


@lower(aten.bucketize.Tensor, aten.bucketize.Scalar)
def _bucketize(
    values: Any, boundaries: Any, *, out_int32: bool = False, right: bool = False
) -> Any:
    return _searchsorted(boundaries, values, out_int32=out_int32, right=right)
