"""Gathers, scatters, embeddings, and the losses that pick one class per row.

torch refuses an index out of range; a compiled program cannot. Here such an index gives NaN (or
the smallest integer) rather than the clamped neighbour that JAX would return by default, and
writes NaN; negative ones are out of range where torch refuses them.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from xla_dtensor.core.errors import UnsupportedOpError
from xla_dtensor.core.local_shape import may_leave_shards
from xla_dtensor.runtimes.jax.arrays import values as jax_devices
from xla_dtensor.runtimes.jax.arrays.sharding import sharding_of_new
from xla_dtensor.runtimes.jax.arrays.trace import active_trace
from xla_dtensor.runtimes.jax.arrays.values import jax_dtype
from xla_dtensor.runtimes.jax.lower.host import read_on_host
from xla_dtensor.runtimes.jax.lower.random import as_one
from xla_dtensor.runtimes.jax.lower.table import lower

__all__ = [
    "cut",
    "filling_on_host",
    "identity",
    "largest",
    "put_points",
    "reduce_points",
    "smallest",
    "uncut",
    "write_index",
    "write_slice",
]


# ------------------------------------------------------------------- Tensors made like another one
#
# Factories without a tensor argument never reach this runtime.

aten = torch.ops.aten


_fills_on_host = False


@contextlib.contextmanager
def filling_on_host() -> Iterator[None]:
    """Let the host fill new tensors where the memory is its own: no program for each shape.

    For tensors that are older than any trace, such as an optimizer's first state.
    """
    global _fills_on_host
    previous, _fills_on_host = _fills_on_host, jax_devices.has_host_memory()
    try:
        yield
    finally:
        _fills_on_host = previous


def _filled(number: Any, meta: Any) -> Any:
    dtype, sharding = jax_dtype(meta.dtype), sharding_of_new(meta.shape)
    if _fills_on_host and (sharding is None or sharding.is_fully_addressable):
        return jax.device_put(np.full(meta.shape, number, dtype), sharding, may_alias=False)
    return jnp.full(meta.shape, number, dtype, device=sharding)


@lower(
    aten.zeros_like.default,
    aten.empty_like.default,
    aten.new_zeros.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    wants_meta=True,
    is_factory=True,
)
def _zeros(*_: Any, meta: Any, **__: Any) -> Any:
    return _filled(0, meta)


@lower(aten._new_zeros_with_same_feature_meta.default)
def _zeros_for_tangent(x: Any, other: Any, *, self_num_batch_dims: int = 0) -> Any:
    """Zeros that a tangent is written to, in parts: of the primal's shape."""
    return jnp.zeros(x.shape[:self_num_batch_dims] + other.shape, x.dtype)


@lower(aten.ones_like.default, aten.new_ones.default, wants_meta=True, is_factory=True)
def _ones(*_: Any, meta: Any, **__: Any) -> Any:
    return _filled(1, meta)


@lower(aten.full_like.default, wants_meta=True, is_factory=True)
def _full_like(x: Any, fill_value: Any, *, meta: Any, **_: Any) -> Any:
    return _filled(fill_value, meta)


@lower(aten.new_full.default, wants_meta=True, is_factory=True)
def _new_full(x: Any, size: Any, fill_value: Any, *, meta: Any, **_: Any) -> Any:
    return _filled(fill_value, meta)


# ----------------------------------------------------------------------------------------- Extremes
#
# The largest and the smallest of numbers that may be NaN, whichever device has them.
#
# XLA's maximum over devices (jax 0.10, on CPU) loses a NaN that only some of them have, and finite
# numbers with it: of [2, 6, 10, nan] over 4 devices it finds 6. So floats are compared as integers
# in the same order, with NaN at the end that wins.


def ordered(x: Any, nan_is_largest: bool) -> Any:
    """Return integers in the order of the float32 or float64 numbers, NaN at one end."""
    kind = jnp.int64 if x.dtype == jnp.float64 else jnp.int32
    limits = jnp.iinfo(kind)
    bits = lax.bitcast_convert_type(x, kind)
    turned = bits ^ ((bits >> (limits.bits - 1)) & limits.max)
    return jnp.where(jnp.isnan(x), limits.max if nan_is_largest else limits.min, turned)


def unordered(numbers: Any, dtype: Any) -> Any:
    """Return the numbers whose order `ordered` gave."""
    limits = jnp.iinfo(numbers.dtype)
    bits = numbers ^ ((numbers >> (limits.bits - 1)) & limits.max)
    return lax.bitcast_convert_type(bits, dtype)


def largest(x: Any, axis: Any = None, keepdims: bool = False) -> Any:
    """Return the maximum over some dims, NaN where there is one."""
    return _extreme(jnp.max, x, axis, keepdims, nan_is_largest=True)


def smallest(x: Any, axis: Any = None, keepdims: bool = False) -> Any:
    """Return the minimum over some dims, NaN where there is one."""
    return _extreme(jnp.min, x, axis, keepdims, nan_is_largest=False)


def _extreme(reduce: Any, x: Any, axis: Any, keepdims: bool, *, nan_is_largest: bool) -> Any:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return reduce(x, axis=axis, keepdims=keepdims)
    wide = x if x.dtype == jnp.float64 else x.astype(jnp.float32)
    extreme = reduce(ordered(wide, nan_is_largest), axis=axis, keepdims=keepdims)
    return unordered(extreme, wide.dtype).astype(x.dtype)


# ------------------------------------------------------------------------------- Keep images whole
#
# The dims that windows move over are not cut among devices.
#
# XLA's partitioner (jax 0.10, on CPU) cuts a convolution over image dims with an exchange of
# borders, and gets it wrong in places: weight gradients of strided convolutions over dims that
# divide unevenly are wrong in silence, and some spread windows abort the process. So an image that
# is cut is gathered first; batch and channels stay as they lie.


def uncut(x: Any, num_free: int) -> Any:
    """Return `x` with all dims but the first `num_free` in one piece on each device.

    Args:
        x: An array, or a tracer; the values stay.
        num_free: How many dims may stay cut, in whichever way.
    """
    if isinstance(x, Tracer):
        mesh = mesh_of_program()
        if mesh is None:
            return x
        spec = (*[PartitionSpec.UNCONSTRAINED] * num_free, *[None] * (x.ndim - num_free))
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*spec)))
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding) or not any(sharding.spec[num_free:]):
        return x
    return jax.device_put(x, NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:num_free])))


def mesh_of_program() -> Mesh | None:
    """A mesh of the devices that the step which is traced will run on; None if nothing tells."""
    trace = active_trace()
    axis_types = jax.sharding.get_abstract_mesh().axis_types or ()
    if trace is None or AxisType.Manual in axis_types:
        return None
    for storage in chain(trace.captured, trace._arguments):
        if isinstance(storage.sharding, NamedSharding):
            mesh = storage.sharding.mesh
            # The mesh of one device has no axes, and nothing to say.
            return mesh if isinstance(mesh, Mesh) and mesh.axis_names else None
    return None


def even_points(indices: Any) -> Any:
    """Return indices whose dims after the first are cut only where all devices have as many.

    XLA's partitioner fails in its own verifier (jax 0.12, on CPU) where such a dim of a gather's
    indices is cut unevenly along an axis that the rows are cut along as well.
    """
    mesh = mesh_of_program() if isinstance(indices, Tracer) and indices.ndim > 1 else None
    if mesh is None or not any(size % mesh.size for size in indices.shape[1:]):
        return indices
    free = PartitionSpec.UNCONSTRAINED
    spec = (free, *(None if size % mesh.size else free for size in indices.shape[1:]))
    return jax.lax.with_sharding_constraint(indices, NamedSharding(mesh, PartitionSpec(*spec)))


# -------------------------- Write by index, with shapes that XLA's partitioner cannot cut unevenly
#
# Where it cuts the new values of a scatter unevenly but not the indices, it writes some of them in
# the wrong place, in silence (jax 0.10, on CPU). Sizes that all devices divide are never cut
# unevenly, so the points are flattened, if they have to be, and padded to such a size: by writing
# the last one again, or by adding zero to it.


def on_rows(lowering: Callable[..., Any]) -> Callable[..., Any]:
    """Give a lowering of (x, dim, index, ...) that writes to `x` one row where `x` has no dims."""

    @functools.wraps(lowering)
    def run(x: Any, dim: int, index: Any, *operands: Any, **options: Any) -> Any:
        if x.ndim:
            return lowering(x, dim, index, *operands, **options)
        operands = tuple(v.reshape(-1) if hasattr(v, "ndim") else v for v in operands)
        return lowering(x[None], 0, index.reshape(-1), *operands, **options)[0]

    return run


def or_poison(
    x: Any, points: Sequence[Any], values: Any, *, from_the_end: bool = True
) -> tuple[list[Any], Any]:
    """Return points and values of which those beyond `x` write NaN to its first rows.

    Of whole numbers, which have no NaN, they write nothing.

    Args:
        x: What is written to.
        points: Indices along its first dims, of one shape.
        values: What is written, of that shape and the other dims' after it.
        from_the_end: Whether negative indices count from there.
    """
    sizes = x.shape[: len(points)]
    inside = [
        (p >= (-n if from_the_end else 0)) & (p < n) for p, n in zip(points, sizes, strict=True)
    ]
    is_right = functools.reduce(jnp.logical_and, inside)
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return [jnp.where(is_right, p, n) for p, n in zip(points, sizes, strict=True)], values
    rows = is_right.reshape(*is_right.shape, *[1] * (x.ndim - len(points)))
    return [jnp.where(is_right, p, 0) for p in points], jnp.where(rows, values, jnp.nan)


def put_points(
    x: Any, points: Sequence[Any], values: Any, accumulate: bool, *, from_the_end: bool = True
) -> Any:
    """Return `x` with `values` at points along its first dims; `points` are of one shape.

    With `from_the_end` negative indices count from there, else they write nothing.
    """
    if not points[0].size:
        return x
    if x.dtype == jnp.bool_ and accumulate:  # the sum of bools is whether one of them is true
        numbers = x.astype(jnp.int32)
        sums = put_points(numbers, points, values, accumulate, from_the_end=from_the_end)
        return sums.astype(jnp.bool_)
    row_shape = x.shape[len(points) :]
    shape = [size for size in points[0].shape if size > 1]
    if not shape or any(size % jax_devices.device_count() for size in shape):
        shape = [math.prod(shape)]
    points = [point.reshape(shape) for point in points]
    values = values.astype(x.dtype).reshape(*shape, *row_shape)
    lack = -shape[0] % jax_devices.device_count() if len(shape) == 1 else 0
    if lack:
        points = [jnp.pad(point, (0, lack), mode="edge") for point in points]
        padding = [(0, lack), *[(0, 0)] * len(row_shape)]
        values = jnp.pad(values, padding, mode="constant" if accumulate else "edge")
    target = x.at[tuple(points)]
    write = target.add if accumulate else target.set
    return write(values, wrap_negative_indices=from_the_end)


def put_points_along(
    x: Any,
    dims: Sequence[int],
    points: Sequence[Any],
    values: Any,
    accumulate: bool,
    *,
    from_the_end: bool = True,
) -> Any:
    """As :func:`put_points` after :func:`or_poison`, with indices along any `dims`.

    `values` are as if these dims came first.
    """
    front = range(len(dims))
    x = jnp.moveaxis(x, dims, front)
    points, values = or_poison(x, points, values, from_the_end=from_the_end)
    return jnp.moveaxis(put_points(x, points, values, accumulate), front, dims)


# ------------------------------------------------------------------------------ Bags of embeddings
#
# Rows of a table, summed, averaged or maximised per bag.

_SUM, _MEAN, _MAX = 0, 1, 2


@lower(aten.embedding_renorm.default)
def _embedding_renorm(table: Any, indices: Any, max_norm: float, norm_type: float) -> Any:
    rows, unread = indices.reshape(-1), jnp.zeros(table.shape[:1], bool)
    is_read = put_points_along(unread, [0], [rows], jnp.ones(rows.shape, bool), False)
    norms = jnp.linalg.norm(table, norm_type, axis=1)
    scales = jnp.where(is_read & (norms > max_norm), max_norm / (norms + 1e-7), 1)
    return table * scales[:, None].astype(table.dtype)


def _bag_of(indices: Any, offsets: Any) -> Any:
    """The bag that each index lies in."""
    places = jnp.arange(indices.shape[0], dtype=offsets.dtype)
    return jnp.sum(offsets <= places[:, None], axis=1, dtype=offsets.dtype) - 1


def _rows(weight: Any, indices: Any) -> Any:
    return weight.at[even_points(indices)].get(mode="fill", wrap_negative_indices=False)


def _total(bags: Any, values: Any, count: int) -> Any:
    """Sum values per bag."""
    wide = jnp.promote_types(values.dtype, jnp.float32) if values.dtype.kind != "i" else jnp.int64
    zeros = jnp.zeros((count, *values.shape[1:]), wide)
    return put_points(zeros, [bags], values.astype(wide), accumulate=True)


def _maximum(weight: Any, indices: Any, inside: Any) -> Any:
    """The largest element per bag and column, and the index of the row that has it."""
    values = jnp.where(inside[..., None], _rows(weight, indices), -jnp.inf)
    place = jnp.argmax(values, axis=1)
    maxima = jnp.where(jnp.any(inside, 1)[:, None], largest(values, axis=1), 0)
    return maxima, jnp.where(jnp.any(inside, 1)[:, None], indices[place], 0)


@lower(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
@as_one
def _embedding_bag(
    weight: Any,
    indices: Any,
    offsets: Any,
    scale_grad_by_freq: bool = False,
    mode: int = _SUM,
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> Any:
    count = offsets.shape[0] - include_last_offset
    bags = _bag_of(indices, offsets[:count])
    is_used = indices != padding_idx
    sizes = _total(bags, is_used.astype(jnp.int64), count)
    largest = jnp.zeros((0,), indices.dtype)
    if mode == _MAX and not indices.size:
        output = jnp.zeros((count, weight.shape[1]), weight.dtype)
        largest = jnp.zeros(output.shape, indices.dtype)
    elif mode == _MAX:
        inside = (bags == jnp.arange(count, dtype=bags.dtype)[:, None]) & is_used
        output, largest = _maximum(weight, indices, inside)
    else:
        rows = _rows(weight, indices)
        rows = rows if per_sample_weights is None else rows * per_sample_weights[:, None]
        output = _total(bags, jnp.where(is_used[:, None], rows, 0), count)
        if mode == _MEAN:
            output = output / jnp.maximum(sizes, 1)[:, None]
    is_in_order = jnp.all((offsets >= 0) & (offsets <= indices.shape[0]))
    output = jnp.where(is_in_order, output, jnp.nan)
    sizes = jnp.pad(sizes, (0, int(include_last_offset)))
    return output.astype(weight.dtype), bags, sizes, largest


def _refuse(option: str, reason: str) -> NoReturn:
    raise UnsupportedOpError(
        f"The gradient of embedding_bag was asked for with {option}. The JAX runtime does not have "
        f"it: {reason}. Leave the option out."
    )


def _table_gradient(
    grad: Any,
    indices: Any,
    bags: Any,
    sizes: Any,
    largest: Any,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    per_sample_weights: Any,
    padding_idx: int,
) -> Any:
    if scale_grad_by_freq:
        _refuse("scale_grad_by_freq=True", "torch divides by the frequency of another row")
    wide = jnp.promote_types(grad.dtype, jnp.float32)
    zeros = jnp.zeros((num_weights, grad.shape[1]), wide)
    if not indices.size:
        return zeros.astype(grad.dtype)
    if mode == _MAX:
        filled = jnp.where(sizes[: grad.shape[0], None] > 0, grad, 0)
        columns = lax.broadcasted_iota(largest.dtype, largest.shape, 1)
        return put_points(zeros, [largest, columns], filled, accumulate=True).astype(grad.dtype)
    values = _rows(grad.astype(wide), bags)
    if mode == _MEAN:
        values = values / jnp.maximum(sizes, 1)[bags][:, None]
    if per_sample_weights is not None:
        values = values * per_sample_weights[:, None]
    values = jnp.where((indices == padding_idx)[:, None], 0, values)
    return put_points(zeros, [indices], values, accumulate=True).astype(grad.dtype)


@lower(aten._embedding_bag_backward.default)
@as_one
def _backward(
    grad: Any,
    indices: Any,
    offsets: Any,
    bags: Any,
    sizes: Any,
    largest: Any,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: Any,
    padding_idx: int = -1,
) -> Any:
    if sparse:
        _refuse("sparse=True", "XLA has no sparse tensors")
    options = (num_weights, scale_grad_by_freq, mode, per_sample_weights, padding_idx)
    return _table_gradient(grad, indices, bags, sizes, largest, *options)


@lower(aten._embedding_bag_dense_backward.default)
@as_one
def _dense_backward(
    grad: Any,
    indices: Any,
    bags: Any,
    sizes: Any,
    largest: Any,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    per_sample_weights: Any,
    padding_idx: int = -1,
) -> Any:
    options = (num_weights, scale_grad_by_freq, mode, per_sample_weights, padding_idx)
    return _table_gradient(grad, indices, bags, sizes, largest, *options)


@lower(aten._embedding_bag_per_sample_weights_backward.default)
@as_one
def _sample_weights_backward(
    grad: Any,
    weight: Any,
    indices: Any,
    offsets: Any,
    bags: Any,
    mode: int,
    padding_idx: int = -1,
) -> Any:
    grads = jnp.sum(_rows(grad, bags) * _rows(weight, indices), axis=1)
    return jnp.where(indices == padding_idx, 0, grads)


# ----------------------------------------------------------------------------------------- Indexing


@lower(aten.embedding.default)
def _embedding(
    weight: Any,
    indices: Any,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    return weight.at[even_points(indices)].get(mode="fill", wrap_negative_indices=False)


@lower(aten.embedding_dense_backward.default)
def _embedding_backward(
    grad: Any, indices: Any, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Any:
    if scale_grad_by_freq:
        ones, none = jnp.ones(indices.shape, jnp.int32), jnp.zeros(num_weights, jnp.int32)
        counts = put_points(none, [indices], ones, accumulate=True, from_the_end=False)
        grad = grad / counts[indices][..., None].astype(grad.dtype)
    if padding_idx >= 0:
        grad = jnp.where((indices == padding_idx)[..., None], 0, grad)
    rows = jnp.zeros((num_weights, grad.shape[-1]), jnp.promote_types(grad.dtype, jnp.float32))
    # The indices just as the forward pass takes them: what moves them there serves here as well.
    summed = put_points(rows, [indices], grad, accumulate=True, from_the_end=False)
    return summed.astype(grad.dtype)


@lower(aten.index_select.default)
def _index_select(x: Any, dim: int, index: Any) -> Any:
    if not x.ndim:
        return _index_select(x[None], 0, index.reshape(-1)).reshape(())
    return jnp.take(x, _from_start(index, x.shape[dim]), axis=dim, mode="fill")


def _from_start(index: Any, size: int) -> Any:
    """Return indices of which the negative ones are out of range, like those beyond the end."""
    return jnp.where(index < 0, size, index)


@lower(aten.gather.default)
def _gather(x: Any, dim: int, index: Any, *, sparse_grad: bool = False) -> Any:
    if not index.size:
        return jnp.zeros(index.shape, x.dtype)
    if not x.ndim:
        return _gather(x[None], 0, index.reshape(-1)).reshape(index.shape)
    cut = tuple(
        slice(None) if d == dim % x.ndim else slice(0, n) for d, n in enumerate(index.shape)
    )
    index = _from_start(index, x.shape[dim])
    return jnp.take_along_axis(x[cut], index, axis=dim, mode="fill")


def _scattered(x: Any, dim: int, index: Any, values: Any, accumulate: bool) -> Any:
    if not index.size:
        return x
    points = [lax.broadcasted_iota(index.dtype, index.shape, d) for d in range(index.ndim)]
    points[dim % x.ndim] = index
    points, values = or_poison(x, points, values, from_the_end=False)
    return put_points(x, points, values, accumulate)


@lower(aten.scatter.src)
@on_rows
def _scatter_src(x: Any, dim: int, index: Any, src: Any) -> Any:
    return _scattered(x, dim, index, src[tuple(map(slice, index.shape))], accumulate=False)


@lower(aten.scatter.value)
@on_rows
def _scatter_value(x: Any, dim: int, index: Any, value: Any) -> Any:
    values = jnp.broadcast_to(jnp.asarray(value), index.shape)
    return _scattered(x, dim, index, values, accumulate=False)


@lower(aten.scatter_add.default)
@on_rows
def _scatter_add(x: Any, dim: int, index: Any, src: Any) -> Any:
    return _scattered(x, dim, index, src[tuple(map(slice, index.shape))], accumulate=True)


def _advanced(indices: Any) -> tuple[Any, ...]:
    def index(i: Any) -> Any:
        if i is None:
            return slice(None)
        if i.dtype not in (jnp.bool_, jnp.uint8):  # to torch, uint8 is a mask as well
            return i
        usage = "used as a mask that decides how many elements there are"
        return read_on_host(i, usage).astype(bool)

    return tuple(map(index, indices))


@lower(aten.index.Tensor)
def _index(x: Any, indices: Any) -> Any:
    places = _advanced(indices)
    if any(isinstance(i, jax.Array) and i.dtype != jnp.bool_ for i in places):
        return x.at[tuple(map(even_points, places))].get(mode="fill")
    return x[places]


@lower(aten.index_put.default)
def _index_put(x: Any, indices: Any, values: Any, accumulate: bool = False) -> Any:
    values = values.astype(x.dtype)
    mask = indices[0] if len(indices) == 1 else None
    if mask is not None and mask.dtype == jnp.bool_ and values.size == 1:
        # The one write through a mask whose shapes do not depend on the mask's values.
        mask = mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim))
        return jnp.where(mask, x + values.reshape(()) if accumulate else values.reshape(()), x)
    if any(i is not None and i.dtype in (jnp.bool_, jnp.uint8) for i in indices):
        target = x.at[_advanced(indices)]
        return target.add(values) if accumulate else target.set(values)
    dims = [dim for dim, i in enumerate(indices) if i is not None]
    points = jnp.broadcast_arrays(*(indices[dim] for dim in dims))
    shape = points[0].shape
    row_shape = [x.shape[dim] for dim in range(x.ndim) if dim not in dims]
    # Values have the indices' dims in place of the indexed ones, or first where these are apart.
    position = dims[0] if dims[-1] - dims[0] + 1 == len(dims) else 0
    values = jnp.broadcast_to(values, (*row_shape[:position], *shape, *row_shape[position:]))
    values = jnp.moveaxis(values, range(position, position + len(shape)), range(len(shape)))
    return put_points_along(x, dims, points, values, accumulate)


@lower(aten.put.default)
def _put(x: Any, index: Any, source: Any, accumulate: bool = False) -> Any:
    flat = x.reshape(-1)
    points, values = or_poison(flat, [index.reshape(-1)], source.reshape(-1))
    return put_points(flat, points, values, accumulate).reshape(x.shape)


@lower(aten.index_copy.default)
@on_rows
def _index_copy(x: Any, dim: int, index: Any, source: Any) -> Any:
    values = jnp.moveaxis(jnp.atleast_1d(source), dim, 0)
    points = [index.reshape(-1)]
    return put_points_along(x, [dim], points, values, accumulate=False, from_the_end=False)


@lower(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
@on_rows
def _index_fill(x: Any, dim: int, index: Any, value: Any) -> Any:
    index, value = index.reshape(-1), jnp.asarray(value).reshape(())
    row_shape = [size for d, size in enumerate(x.shape) if d != dim % x.ndim]
    values = jnp.broadcast_to(value, (*index.shape, *row_shape))
    return put_points_along(x, [dim], [index], values, accumulate=False)


@lower(aten.index_add.default)
@on_rows
def _index_add(x: Any, dim: int, index: Any, source: Any, *, alpha: Any = 1) -> Any:
    source = (source * alpha).reshape(*x.shape[: dim % x.ndim], -1, *x.shape[dim % x.ndim + 1 :])
    values = jnp.moveaxis(source, dim, 0)
    points = [index.reshape(-1)]
    return put_points_along(x, [dim], points, values, accumulate=True, from_the_end=False)


@lower(aten.max_unpool2d.default, aten.max_unpool3d.default)
def _max_unpool(x: Any, indices: Any, output_size: Any, *_: Any) -> Any:
    lead = x.shape[: -len(output_size)]
    volume = jnp.zeros((*lead, math.prod(output_size)), x.dtype)
    places, values = indices.reshape(*lead, -1), x.reshape(*lead, -1)
    filled = _scattered(volume, -1, places, values, accumulate=False)
    return filled.reshape(*lead, *output_size)


# ------------------------------------------------------------------ class-picking losses


def _picked(shape: tuple[int, ...], target: Any) -> Any:
    """True at each row's class. A comparison partitions over sharded classes; a gather gathers."""
    axis = 1 if len(shape) > 1 else 0
    classes = lax.broadcasted_iota(target.dtype, shape, axis)
    return classes == jnp.expand_dims(target, axis)


def _row_weights(log_probs: Any, target: Any, weight: Any, ignore_index: int) -> Any:
    is_used = target != ignore_index
    if weight is None:
        return is_used.astype(log_probs.dtype)
    return jnp.where(is_used, weight[jnp.where(is_used, target, 0)], 0)


@lower(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def _nll_loss(log_probs: Any, target: Any, weight: Any, reduction: int, ignore_index: int) -> Any:
    axis = 1 if log_probs.ndim > 1 else 0
    rows = _row_weights(log_probs, target, weight, ignore_index)
    chosen = jnp.sum(jnp.where(_picked(log_probs.shape, target), log_probs, 0), axis=axis)
    is_class = (target >= 0) & (target < log_probs.shape[axis]) | (target == ignore_index)
    chosen = jnp.where(is_class, chosen, jnp.nan)
    # Whatever an ignored row holds: -inf times its weight of 0 is NaN.
    losses, total = jnp.where(target == ignore_index, 0, -chosen * rows), jnp.sum(rows)
    if reduction == 0:
        return losses, jnp.zeros((), log_probs.dtype)
    return (jnp.sum(losses) / total if reduction == 1 else jnp.sum(losses)), total


@lower(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def _nll_loss_backward(
    grad: Any,
    log_probs: Any,
    target: Any,
    weight: Any,
    reduction: int,
    ignore_index: int,
    total: Any,
) -> Any:
    axis = 1 if log_probs.ndim > 1 else 0
    rows = _row_weights(log_probs, target, weight, ignore_index) * grad
    rows = rows / total if reduction == 1 else rows
    rows = jnp.where(target == ignore_index, 0, -rows)  # where all are, the total is 0
    return jnp.where(_picked(log_probs.shape, target), jnp.expand_dims(rows, axis), 0)


@lower(aten.one_hot.default)
def _one_hot(x: Any, num_classes: int = -1) -> Any:
    if num_classes < 0:
        raise NotImplementedError("one_hot needs num_classes here: the values are not known")
    return jax.nn.one_hot(x, num_classes, dtype=jnp.int64)


# --------------------------------------------------------------------------- Scatters that combine
#
# By sum, product, mean or extremum; and writes through a mask.

_METHODS = {"sum": "add", "mean": "add", "prod": "multiply", "amax": "max", "amin": "min"}


def identity(reduce: str, dtype: Any) -> Any:
    """Return what changes nothing when combined with any number."""
    if reduce in ("sum", "mean"):
        return jnp.zeros((), dtype)
    if reduce == "prod":
        return jnp.ones((), dtype)
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.asarray(-jnp.inf if reduce == "amax" else jnp.inf, dtype)
    limits = jnp.iinfo(dtype)
    return jnp.asarray(limits.min if reduce == "amax" else limits.max, dtype)


def reduce_points(x: Any, points: Sequence[Any], values: Any, reduce: str) -> Any:
    """Return `x` combined with `values` at points along its first dims ("mean" sums).

    The points are padded to a size that XLA's partitioner never cuts unevenly; see
    :mod:`~xla_dtensor.runtimes.jax.lower.index`.
    """
    row_shape = x.shape[len(points) :]
    count = math.prod(points[0].shape)
    if not count:
        return x
    if reduce in ("amax", "amin") and x.dtype.kind == "f":
        largest = reduce == "amax"
        numbers = reduce_points(
            ordered(x, largest), points, ordered(values.astype(x.dtype), largest), reduce
        )
        return unordered(numbers, x.dtype)
    lack = -count % jax_devices.device_count()
    flat = [jnp.pad(point.reshape(-1), (0, lack)) for point in points]
    values = values.astype(x.dtype).reshape(count, *row_shape)
    padding = [(0, lack), *[(0, 0)] * len(row_shape)]
    values = jnp.pad(values, padding, constant_values=identity(reduce, x.dtype))
    return getattr(x.at[tuple(flat)], _METHODS[reduce])(values, mode="drop")


_BY = {"add": "sum", "multiply": "prod"}


def _reduced(x: Any, points: Sequence[Any], values: Any, reduce: str, include_self: bool) -> Any:
    shape = points[0].shape
    points, values = or_poison(x, points, values, from_the_end=False)
    kind = x.dtype
    if kind in (jnp.bfloat16, jnp.float16):
        x, values = x.astype(jnp.float32), values.astype(jnp.float32)
    elif kind == jnp.bool_:
        x, values = x.astype(jnp.int32), values.astype(jnp.int32)
    counts = None
    if reduce == "mean" or not include_self:
        head = x.shape[: len(points)]
        ones = jnp.ones(shape, jnp.int64)
        counts = reduce_points(jnp.zeros(head, jnp.int64), points, ones, "sum")
        counts = counts.reshape(*head, *(1,) * (x.ndim - len(head)))
    base = x
    if not include_self and counts is not None:
        base = jnp.where(counts > 0, identity(reduce, x.dtype), x)
    reduced = reduce_points(base, points, values, reduce)
    if reduce == "mean" and counts is not None:
        number = jnp.maximum(counts + (1 if include_self else 0), 1)
        reduced = reduced // number if kind.kind in "iu" else reduced / number.astype(reduced.dtype)
    return reduced.astype(kind)


@lower(aten.scatter_reduce.two)
@on_rows
def _scatter_reduce(
    x: Any, dim: int, index: Any, src: Any, reduce: str, *, include_self: bool = True
) -> Any:
    if not index.size:
        return x
    index = index.reshape((-1,) if not index.ndim else index.shape)
    src = src.reshape((-1,) if not src.ndim else src.shape)
    points = [lax.broadcasted_iota(index.dtype, index.shape, d) for d in range(index.ndim)]
    points[dim % x.ndim] = index
    values = src[tuple(map(slice, index.shape))]
    return _reduced(x, points, values, reduce, include_self)


@lower(aten.scatter.reduce)
def _scatter_by(x: Any, dim: int, index: Any, src: Any, *, reduce: str) -> Any:
    """The older form of scatter_reduce; its ``reduce`` is "add" or "multiply"."""
    return _scatter_reduce(x, dim, index, src, _BY[reduce])


@lower(aten.scatter.value_reduce)
def _scatter_value_by(x: Any, dim: int, index: Any, value: Any, *, reduce: str) -> Any:
    src = jnp.full(index.shape, value, x.dtype)
    return _scatter_reduce(x, dim, index, src, _BY[reduce])


@lower(aten.index_reduce.default)
@on_rows
def _index_reduce(
    x: Any, dim: int, index: Any, source: Any, reduce: str, *, include_self: bool = True
) -> Any:
    source = jnp.moveaxis(source.reshape((-1,) if not source.ndim else source.shape), dim, 0)
    rows = jnp.moveaxis(x, dim, 0)
    reduced = _reduced(rows, [index.reshape(-1)], source, reduce, include_self)
    return jnp.moveaxis(reduced, 0, dim)


# ------------------------------------------------------------------ through a mask


@lower(aten.masked_scatter.default, wants_meta=True)
def _masked_scatter(x: Any, mask: Any, source: Any, *, meta: Any) -> Any:
    x, mask = jnp.broadcast_to(x, meta.shape), jnp.broadcast_to(mask, meta.shape)
    if not source.size or not x.size:
        return x
    number = (jnp.cumsum(mask.reshape(-1)) - 1).reshape(mask.shape)
    elements = jnp.take(source.reshape(-1), jnp.where(mask, number, 0), mode="fill")
    return jnp.where(mask, elements, x)


@lower(aten.masked_scatter_backward.default)
def _masked_scatter_backward(grad: Any, mask: Any, sizes: Any) -> Any:
    """The gradient of the source: what lies under the mask, in order, and zeros behind."""
    sizes = tuple(sizes)
    count, mask = math.prod(sizes), jnp.broadcast_to(mask, grad.shape).reshape(-1)
    if not count or not mask.size:
        return jnp.zeros(sizes, grad.dtype)
    order = jnp.argsort(~mask, stable=True)[:count]
    grads = jnp.where(mask[order], grad.reshape(-1)[order], 0)
    return jnp.pad(grads, (0, count - grads.shape[0])).reshape(sizes)


# ------------------------------------------------------------------------------------------- Slices
#
# Read a slice, and write into one, in words that XLA's partitioner gets right on a sharded dim.
#
# It is wrong in silence, in JAX 0.10 and 0.12, by GSPMD and Shardy
# (docs/decisions/strided_slices.md has the figures):
#
# * in chains of scatters: in ``a.at[1:3].set(b).at[0].set(5)`` the second write zeroes rows of the
#   first. A write is a pad and a select instead.
# * in a pad between elements, which is what the gradient of ``x[::2]`` would be: a fifth of the
#   results that are cut have values in the gaps. A new dim is padded behind each element instead,
#   and merged with the dim.
# * in a slice that takes one element by a step. It is taken without one.
#
# It fails where a slice leaves every shard as it is, as 1024 rows on 8 devices and their first 1023
# (128 on each), and both are gathered: the partitioner has one name for the two shards, and takes
# the one that was gathered first for the other. A constraint that asks for nothing is a copy to it,
# which has a name of its own.


def cut(base: Any, dim: int, start: int, stop: int, step: int = 1) -> Any:
    """Return ``base[start:stop:step]`` along a dim."""
    if stop - start <= step:
        stop, step = min(stop, start + 1), 1
    part = lax.slice_in_dim(base, start, stop, step, dim)
    mesh = mesh_of_program() if start == 0 and step == 1 and isinstance(base, Tracer) else None
    if mesh is None or not may_leave_shards(base.shape[dim], stop, mesh.size):
        return part
    is_open = NamedSharding(mesh, PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * base.ndim))
    return lax.with_sharding_constraint(part, is_open)


def spread(new: Any, shape: Sequence[int], dim: int, start: int, step: int = 1) -> Any:
    """Return zeros of `shape` with `new` at ``start, start + step, ...`` along a dim."""
    count = new.shape[dim]
    if count == 0:
        return jnp.zeros(tuple(shape), new.dtype)
    if step > 1 and count > 1:
        new = _with_gaps(new, dim, step)
        new = lax.slice_in_dim(new, 0, min(count * step, shape[dim] - start), 1, dim)
    padding = [(0, 0, 0)] * new.ndim
    padding[dim] = (start, shape[dim] - start - new.shape[dim], 0)
    return lax.pad(new, jnp.zeros((), new.dtype), padding)


def _with_gaps(x: Any, dim: int, step: int) -> Any:
    """Return `x` with ``step - 1`` zeros behind each element along a dim."""
    padding = [(0, 0, 0)] * (x.ndim + 1)
    padding[dim + 1] = (0, step - 1, 0)
    apart = lax.pad(jnp.expand_dims(x, dim + 1), jnp.zeros((), x.dtype), padding)
    return lax.collapse(apart, dim, dim + 2)


def write_slice(base: Any, new: Any, dim: int, start: int, step: int = 1) -> Any:
    """Return `base` with `new` at ``start, start + step, ...`` along a dim."""
    place = lax.broadcasted_iota(jnp.int32, base.shape, dim) - start
    inside = (place >= 0) & (place < new.shape[dim] * step)
    if step > 1:
        inside &= place % step == 0
    return jnp.where(inside, spread(new, base.shape, dim, start, step), base)


def write_index(base: Any, new: Any, dim: int, index: Any) -> Any:
    """Return `base` with `new`, which lacks the dim, at an index that may be a traced number."""
    place = lax.broadcasted_iota(jnp.int32, base.shape, dim)
    return jnp.where(place == index, jnp.expand_dims(new, dim), base)


# -------------------------------------------------------------------------------------------- Shape
#
# Ops that move elements without computing on them and return new tensors, not views.


@lower(aten.clone.default)
def _clone(x: Any, *, memory_format: Any = None) -> Any:
    return jnp.array(x, copy=True)


@lower(aten._unsafe_view.default, aten.reshape.default, wants_meta=True)
def _reshape(x: Any, size: Any, *, meta: Any) -> Any:
    return x.reshape(meta.shape)


@lower(aten.cat.default)
def _cat(tensors: Any, dim: int = 0) -> Any:
    # torch skips empty 1-D tensors whatever the shape of the others.
    parts = [t for t in tensors if t.shape != (0,)]
    return jnp.concatenate(parts, axis=dim) if parts else jnp.zeros(0, tensors[0].dtype)


@lower(aten.stack.default)
def _stack(tensors: Any, dim: int = 0) -> Any:
    return jnp.stack(tensors, axis=dim)


@lower(aten.repeat.default)
def _repeat(x: Any, repeats: Any) -> Any:
    return jnp.tile(x.reshape((1,) * (len(repeats) - x.ndim) + x.shape), tuple(repeats))


@lower(aten.flip.default)
def _flip(x: Any, dims: Any) -> Any:
    return jnp.flip(x, tuple(dims)) if x.ndim else x


@lower(aten.roll.default)
def _roll(x: Any, shifts: Any, dims: Any = ()) -> Any:
    if not dims or not x.ndim:
        return jnp.roll(x.ravel(), shifts[0]).reshape(x.shape)
    return jnp.roll(x, tuple(shifts), tuple(dims))


@lower(aten.tril.default)
def _tril(x: Any, diagonal: int = 0) -> Any:
    return jnp.tril(x, diagonal)


@lower(aten.triu.default)
def _triu(x: Any, diagonal: int = 0) -> Any:
    return jnp.triu(x, diagonal)


@lower(aten.constant_pad_nd.default)
def _constant_pad(x: Any, pad: Any, value: Any = 0) -> Any:
    pairs = [(0, 0, 0)] * (x.ndim - len(pad) // 2)
    pairs += [(pad[i], pad[i + 1], 0) for i in range(len(pad) - 2, -1, -2)]
    return lax.pad(x, jnp.asarray(value).astype(x.dtype), pairs)


@lower(aten.slice_backward.default)
def _slice_backward(grad: Any, sizes: Any, dim: int, start: int, end: int, step: int) -> Any:
    dim %= len(sizes)
    first, _, _ = slice(start, end, step).indices(sizes[dim])
    return spread(grad, sizes, dim, first, step)


@lower(aten.select_backward.default)
def _select_backward(grad: Any, sizes: Any, dim: int, index: int) -> Any:
    dim %= len(sizes)
    return spread(jnp.expand_dims(grad, dim), sizes, dim, index % sizes[dim])


@lower(aten.fill.Scalar, wants_meta=True, is_factory=True)
def _fill(x: Any, value: Any, *, meta: Any) -> Any:
    return _filled(value, meta)


@lower(aten.fill.Tensor)
def _fill_with(x: Any, value: Any) -> Any:
    return jnp.broadcast_to(jnp.asarray(value).astype(x.dtype), x.shape)


@lower(aten.zero.default)
def _zero(x: Any) -> Any:
    return jnp.zeros_like(x)


@lower(aten.copy.default)
def _copy(x: Any, source: Any, non_blocking: bool = False) -> Any:
    return jnp.broadcast_to(source.astype(x.dtype), x.shape)
