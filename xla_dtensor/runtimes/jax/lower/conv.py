"""Images: convolution, pooling, padding, resizing, and sampling at the positions of a grid.

Where torch's gradient of a position is a convention, at the edge of the image or beyond, it is
torch's: none where a position was moved to the edge, and the sign of the last reflection.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from xla_dtensor.runtimes.jax.lower.index import put_points, uncut
from xla_dtensor.runtimes.jax.lower.matmul import precision
from xla_dtensor.runtimes.jax.lower.pointwise import lower_derivative, pull_back, quotient
from xla_dtensor.runtimes.jax.lower.random import as_one
from xla_dtensor.runtimes.jax.lower.table import lower

__all__: list[str] = []


# --------------------------------------------------------------------------------------------- Grid

aten = torch.ops.aten
_BILINEAR, _NEAREST, _BICUBIC = 0, 1, 2
_ZEROS, _BORDER, _REFLECTION = 0, 1, 2
_OUTSIDE = -100.0


# ------------------------------------------------------------------ positions


def _unnormalized(position: Any, size: int, align: bool) -> Any:
    if align:
        return (position + 1) / 2 * (size - 1)
    return ((position + 1) * size - 1) / 2


def _clipped(position: Any, size: int) -> Any:
    inside = (position > 0) & (position < size - 1)
    return jnp.where(inside, position, lax.stop_gradient(jnp.clip(position, 0, size - 1)))


def _reflected(position: Any, size: int, align: bool) -> Any:
    low, high = (0.0, size - 1.0) if align else (-0.5, size - 0.5)
    span = high - low
    if span == 0:
        return jnp.zeros_like(position)
    distance = jnp.where(position < low, low - position, position - low)
    flips = lax.stop_gradient(jnp.floor(quotient(distance, span)))
    remainder = distance - flips * span
    return jnp.where(flips % 2 == 0, remainder + low, span - remainder + low)


def _placed(position: Any, size: int, padding: int, align: bool) -> Any:
    """Move positions into the image, as far as the padding mode does that."""
    if padding == _BORDER:
        position = _clipped(position, size)
    elif padding == _REFLECTION:
        position = _clipped(_reflected(position, size, align), size)
    # Anything that no int32 can hold lies outside.
    holds = jnp.abs(position) < 2.0**30
    return jnp.where(holds, position, _OUTSIDE)


# ------------------------------------------------------------------ reading


@jax.custom_vjp
def _read(planes: Any, index: Any) -> Any:
    """Elements of planes, (batch, channels, elements), at an index of shape (batch, points)."""
    return jnp.take_along_axis(planes, index[:, None, :], axis=2, mode="clip")


def _read_forward(planes: Any, index: Any) -> Any:
    return _read(planes, index), (index, jnp.zeros((planes.shape[-1], 0), planes.dtype))


def _read_backward(saved: Any, grad: Any) -> Any:
    index, like = saved
    batch, channels = grad.shape[:2]
    rows = lax.broadcasted_iota(index.dtype, index.shape, 0)
    zeros = jnp.zeros((batch, like.shape[0], channels), like.dtype)
    written = put_points(zeros, [rows, index], jnp.moveaxis(grad, 1, 2), accumulate=True)
    return jnp.moveaxis(written, 2, 1), None


_read.defvjp(_read_forward, _read_backward)


def _elements(x: Any, corner: Sequence[Any]) -> Any:
    """The image's elements at integer positions, zero outside; (batch, channels, points)."""
    sizes = x.shape[2:]
    index = jnp.zeros(corner[0].shape, jnp.int32)
    inside = jnp.ones(corner[0].shape, jnp.bool_)
    for place, size in zip(corner, sizes, strict=True):
        inside &= (place >= 0) & (place < size)
        index = index * size + jnp.clip(place, 0, size - 1).astype(jnp.int32)
    elements = _read(x.reshape(*x.shape[:2], math.prod(sizes)), index)
    return jnp.where(inside[:, None], elements, 0)


# ------------------------------------------------------------------ sampling


def _linear(x: Any, positions: Sequence[Any]) -> Any:
    starts = [lax.stop_gradient(jnp.floor(position)) for position in positions]
    total: Any = 0.0
    for corner in itertools.product((0, 1), repeat=len(positions)):
        weight: Any = 1.0
        for step, start, position in zip(corner, starts, positions, strict=True):
            weight = weight * (position - start if step else start + 1 - position)
        places = [start + step for start, step in zip(starts, corner, strict=True)]
        total = total + _elements(x, places) * weight[:, None]
    return total


def _cubic_weights(part: Any) -> list[Any]:
    a = -0.75

    def near(d: Any) -> Any:
        return ((a + 2) * d - (a + 3)) * d * d + 1

    def far(d: Any) -> Any:
        return ((a * d - 5 * a) * d + 8 * a) * d - 4 * a

    return [far(part + 1), near(part), near(1 - part), far(2 - part)]


def _cubic(x: Any, positions: Sequence[Any], padding: int, align: bool) -> Any:
    starts = [lax.stop_gradient(jnp.floor(position)) for position in positions]
    weights = [_cubic_weights(p - start) for p, start in zip(positions, starts, strict=True)]
    total: Any = 0.0
    for corner in itertools.product(range(4), repeat=len(positions)):
        # Positions are not moved before; each element that is read is.
        places = [
            _placed(start + step - 1, size, padding, align)
            for start, step, size in zip(starts, corner, x.shape[2:], strict=True)
        ]
        weight: Any = 1.0
        for dim_weights, step in zip(weights, corner, strict=True):
            weight = weight * dim_weights[step]
        total = total + _elements(x, [lax.stop_gradient(p) for p in places]) * weight[:, None]
    return total


@lower(aten.grid_sampler_2d.default, aten.grid_sampler_3d.default)
@as_one
def _grid_sampler(x: Any, grid: Any, interpolation: int, padding: int, align: bool) -> Any:
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    points = grid.astype(wide.dtype).reshape(
        grid.shape[0], math.prod(grid.shape[1:-1]), grid.shape[-1]
    )
    # The last dim of a grid has the position along the last dim of the image first.
    positions = [
        _unnormalized(points[..., -1 - d], size, align) for d, size in enumerate(x.shape[2:])
    ]
    if interpolation == _BICUBIC:
        samples = _cubic(wide, positions, padding, align)
    else:
        dims = zip(positions, x.shape[2:], strict=True)
        positions = [_placed(position, size, padding, align) for position, size in dims]
        if interpolation == _NEAREST:
            nearest = [lax.stop_gradient(jnp.round(position)) for position in positions]
            samples = _elements(wide, nearest)
        else:
            samples = _linear(wide, positions)
    return samples.reshape(*x.shape[:2], *grid.shape[1:-1]).astype(x.dtype)


for _name in ("grid_sampler_2d", "grid_sampler_3d"):
    _op = getattr(aten, _name).default
    lower_derivative(getattr(aten, f"{_name}_backward").default, _op, "input", "grid")


# -------------------------------- Convolutions in groups, as one product per element of the kernel
#
# XLA's own form for them, ``feature_group_count``, is partitioned badly (jax 0.10, on CPU): a
# sharded batch is gathered, and the weight's gradient is summed over devices that hold the same
# part of it, which makes it too large. Here each element of the kernel multiplies a shifted image;
# groups are a batch dim of that product, and a depthwise convolution is left with multiplications
# only.

Sizes = Sequence[int]


def grouped(
    x: Any, weight: Any, stride: Sizes, padding: Sizes, dilation: Sizes, groups: int
) -> Any:
    """Return the convolution of `x`, (batch, groups * in, ...), by (groups * out, in, ...).

    Args:
        x: The images.
        weight: The kernels.
        stride: One number per image dim, as the next two.
        padding: Zeros before and after the image.
        dilation: Elements between those of the kernel.
        groups: How many.
    """
    ndim = x.ndim - 2
    around = [(0, 0, 0)] * 2 + [(p, p, 0) for p in padding]
    x = _split(lax.pad(x, jnp.zeros((), x.dtype), around), groups)
    weight = weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:])
    sizes = [
        (n - d * (k - 1) - 1) // s + 1
        for n, k, s, d in zip(x.shape[3:], weight.shape[3:], stride, dilation, strict=True)
    ]
    steps = [s if n > 1 else 1 for s, n in zip(stride, sizes, strict=True)]  # as `slices.cut`
    total: Any = None
    for place, starts in _elements_of_weight(weight, dilation):
        ends = [b + s * (n - 1) + 1 for b, s, n in zip(starts, steps, sizes, strict=True)]
        shifted = lax.slice(x, (0, 0, 0, *starts), (*x.shape[:3], *ends), (1, 1, 1, *steps))
        part = _product("ngc{0},goc->ngo{0}", ndim, shifted, weight[(..., *place)])
        total = part if total is None else total + part
    return _merge_groups(total)


def grouped_transpose(
    x: Any,
    weight: Any,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    output_padding: Sizes,
    groups: int,
) -> Any:
    """Return the transposed convolution by `weight`, of shape (groups * in, out, ...).

    Args:
        x: The images.
        weight: The kernels.
        stride: One number per image dim, as the next three: how far the image is spread.
        padding: Elements that the result lacks on both sides.
        dilation: Elements between those of the kernel.
        output_padding: Elements that the result has more at its end.
        groups: How many.
    """
    ndim = x.ndim - 2
    x = _split(x, groups)
    weight = weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:])
    dims = list(zip(x.shape[3:], weight.shape[3:], stride, dilation, strict=True))
    spread = [(n - 1) * s + 1 for n, _, s, _ in dims]
    lengths = [m + d * (k - 1) for m, (_, k, _, d) in zip(spread, dims, strict=True)]
    total: Any = None
    for place, starts in _elements_of_weight(weight, dilation):
        part = _product("ngc{0},gco->ngo{0}", ndim, x, weight[(..., *place)])
        pads = [
            (b, length - b - m, s - 1)
            for b, length, m, s in zip(starts, lengths, spread, stride, strict=True)
        ]
        part = lax.pad(part, jnp.zeros((), part.dtype), [(0, 0, 0)] * 3 + pads)
        total = part if total is None else total + part
    pads_at_end = [(0, 0, 0)] * 3 + [(0, extra, 0) for extra in output_padding]
    total = lax.pad(total, jnp.zeros((), total.dtype), pads_at_end)
    begin = (0, 0, 0, *padding)
    end = [n - b for n, b in zip(total.shape, begin, strict=True)]
    return _merge_groups(lax.slice(total, begin, end))


def _split(x: Any, groups: int) -> Any:
    return x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])


def _merge_groups(x: Any) -> Any:
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:])


def _elements_of_weight(
    weight: Any, dilation: Sizes
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Each element of the kernel, and where it lies on the image."""
    for place in itertools.product(*map(range, weight.shape[3:])):
        yield place, tuple(k * d for k, d in zip(place, dilation, strict=True))


def _product(formula: str, ndim: int, x: Any, weight: Any) -> Any:
    if weight.shape[1:] == (1, 1):
        return x * weight.reshape(1, -1, 1, *(1,) * ndim)
    return jnp.einsum(formula.format("xyz"[:ndim]), x, weight, precision=precision())


# -------------------------------------------------------------------------------------- Convolution
#
# Convolutions of any number of dims, with groups, dilation and strides, and their transposes.
#
# Batch, channels and image dims stay what they are, so a sharded batch costs no communication but
# the sum of the weight's gradient, and sharded channels cost one sum of the output or of the
# gradient. Image dims that are cut are gathered (``index.uncut``).


def _per_dim(numbers: int | Sequence[int], ndim: int) -> tuple[int, ...]:
    """One number per image dim; torch lets a single one stand for all."""
    numbers = (numbers,) if isinstance(numbers, int) else tuple(numbers)
    return numbers * ndim if len(numbers) == 1 else numbers


@lower(aten.convolution.default)
def _convolution(
    x: Any,
    weight: Any,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> Any:
    ndim = x.ndim - 2
    x, weight = uncut(x, 2), uncut(weight, 2)
    stride, padding, dilation = (_per_dim(v, ndim) for v in (stride, padding, dilation))
    if transposed:
        output_padding = _per_dim(output_padding, ndim)
        settings = (x, weight, stride, padding, dilation, output_padding)
        y = _transposed(*settings) if groups == 1 else grouped_transpose(*settings, groups)
    elif groups > 1:
        y = grouped(x, weight, stride, padding, dilation, groups)
    else:
        y = lax.conv_general_dilated(
            x,
            weight,
            stride,
            [(p, p) for p in padding],
            rhs_dilation=dilation,
            precision=precision(),
        )
    y = uncut(y, 2)
    return y if bias is None else y + bias.reshape(-1, *(1,) * ndim)


def _transposed(
    x: Any,
    weight: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    output_padding: Sequence[int],
) -> Any:
    """The gradient of a convolution: stride spreads the input, the weight is turned round."""
    ndim = x.ndim - 2
    weight = jnp.flip(jnp.swapaxes(weight, 0, 1), tuple(range(2, weight.ndim)))
    reach = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
    sides = zip(reach, padding, output_padding, strict=True)
    return lax.conv_general_dilated(
        x,
        weight,
        (1,) * ndim,
        [(r - p, r - p + extra) for r, p, extra in sides],
        lhs_dilation=stride,
        rhs_dilation=dilation,
        precision=precision(),
    )


@lower(aten.convolution_backward.default)
def _convolution_backward(
    grad: Any, x: Any, weight: Any, bias_sizes: Any, *options: Any
) -> tuple[Any, Any, Any]:
    *settings, mask = options
    grad, x, weight = uncut(grad, 2), uncut(x, 2), uncut(weight, 2)
    differentiated = [x] * mask[0] + [weight] * mask[1]

    def function(*inputs: Any) -> Any:
        image = inputs[0] if mask[0] else x
        kernel = inputs[-1] if mask[1] else weight
        return _convolution(image, kernel, None, *settings)

    grads = pull_back(function, differentiated, grad) if differentiated else []
    grad_x = grads[0] if mask[0] else None
    grad_weight = grads[-1] if mask[1] else None
    grad_bias = jnp.sum(grad, (0, *range(2, grad.ndim))) if mask[2] else None
    return grad_x, grad_weight, grad_bias


# ------------------------------------------------------------- Read and write by index into images
#
# Element ``index`` of each (batch, channel) plane.
#
# An index counts the elements of the plane's last dims in order, as torch's pooling ops do.

# Up to this many (index, element) pairs per plane are compared; more are scattered.
_MOST_COMPARED = 1 << 16


def flat_index(shape: Sequence[int], ndim: int) -> Any:
    """Return each element's index in its plane, an int32 array of `shape`.

    Args:
        shape: The tensor's.
        ndim: How many dims a plane has.
    """
    total = jnp.zeros(tuple(shape), jnp.int32)
    for dim in range(len(shape) - ndim, len(shape)):
        place = lax.broadcasted_iota(jnp.int32, tuple(shape), dim)
        total = total * shape[dim] + place
    return total


def add_on_planes(values: Any, indices: Any, shape: Sequence[int], ndim: int) -> Any:
    """Return zeros of `shape` with `values` added at `indices` of each plane.

    Args:
        values: Dims before the planes' last `ndim` are those of `shape`.
        indices: Of the shape of `values`.
        shape: The result's.
        ndim: How many dims a plane has.
    """
    batch = tuple(shape[: len(shape) - ndim])
    plane = tuple(shape[len(shape) - ndim :])
    size, count = math.prod(plane), math.prod(values.shape[len(batch) :])
    flat_values = values.reshape(*batch, count)
    flat_indices = indices.reshape(*batch, count)
    if size * count <= _MOST_COMPARED:
        # Partitioned over the planes, whatever their number; XLA never writes the pairs out.
        pairs = flat_indices[..., None] == lax.iota(flat_indices.dtype, size)
        return jnp.sum(jnp.where(pairs, flat_values[..., None], 0), axis=-2).reshape(shape)
    points = [lax.broadcasted_iota(jnp.int32, flat_indices.shape, d) for d in range(len(batch))]
    zeros = jnp.zeros((*batch, size), values.dtype)
    points.append(flat_indices.astype(jnp.int32))
    return put_points(zeros, points, flat_values, accumulate=True).reshape(shape)


# -------------------------------------------------------- Linear maps along one dim, given as taps
#
# Which elements each output takes, and how much of each.
#
# Resizing, adaptive averages and the backward of padding are such maps, one per image dim. A map is
# known before any value is, so its transpose is known too, and is again a list of taps: the
# backward of a gather is a gather, where a scatter would make XLA's partitioner collect the shards.


@dataclass(frozen=True)
class Taps:
    """A linear map from `size` elements to ``len(indices)``.

    Attributes:
        indices: Shape (outputs, taps): the element that a tap takes.
        weights: Same shape: how much of it; 0 for taps that are not used.
        size: How many elements there are to take from.

    Example:
        >>> halves = Taps(np.array([[0, 1], [2, 3]]), np.full((2, 2), 0.5), 4)
        >>> apply_taps(jnp.arange(4.0), 0, halves).tolist()
        [0.5, 2.5]
    """

    indices: Any
    weights: Any
    size: int

    def transposed(self) -> Taps:
        """Return the map whose matrix is the transpose of this one's."""
        outputs = np.broadcast_to(np.arange(len(self.indices))[:, None], self.indices.shape)
        used = self.weights != 0
        sources, outputs, weights = self.indices[used], outputs[used], self.weights[used]
        order = np.argsort(sources, kind="stable")
        sources, outputs, weights = sources[order], outputs[order], weights[order]
        counts = np.bincount(sources, minlength=self.size)
        slot = np.arange(len(sources)) - np.repeat(np.cumsum(counts) - counts, counts)
        shape = (self.size, max(int(counts.max(initial=0)), 1))
        transpose = Taps(np.zeros(shape, np.int64), np.zeros(shape), len(self.indices))
        transpose.indices[sources, slot] = outputs
        transpose.weights[sources, slot] = weights
        return transpose


def apply_taps(x: Any, dim: int, taps: Taps) -> Any:
    """Return `x` with a dim mapped by `taps`, in the dtype of `x`.

    Args:
        x: Floats, ``taps.size`` of them along `dim`.
        dim: Not negative.
        taps: The map.
    """
    outputs, count = taps.indices.shape
    elements = jnp.take(x, taps.indices.reshape(-1), axis=dim, mode="clip")
    if count == 1 and np.all(taps.weights == 1):
        return elements
    elements = elements.reshape(*x.shape[:dim], outputs, count, *x.shape[dim + 1 :])
    weights = taps.weights.reshape(outputs, count, *(1,) * (x.ndim - dim - 1))
    # A tap that is not used must not let an infinity in as 0 * inf.
    parts = jnp.where(weights != 0, elements * jnp.asarray(weights, x.dtype), 0)
    return jnp.sum(parts, axis=dim + 1)


# -------------------------------------------- The backward of padding with an image's own elements


@lower(
    aten.replication_pad1d_backward.default,
    aten.replication_pad2d_backward.default,
    aten.replication_pad3d_backward.default,
)
def _replication_backward(grad: Any, x: Any, padding: Any) -> Any:
    wide = grad.astype(jnp.promote_types(grad.dtype, jnp.float32))
    for last, pad in enumerate(padding[::2]):
        dim = x.ndim - 1 - last
        places = np.arange(grad.shape[dim]) - pad
        indices = np.clip(places, 0, x.shape[dim] - 1)[:, None]
        taps = Taps(indices, np.ones(indices.shape), x.shape[dim])
        wide = apply_taps(wide, dim, taps.transposed())
    return wide.astype(grad.dtype)


# ------------------------------------------------------------------------------ Resizing of images
#
# Nearest, linear and cubic in any number of dims, with and without antialias.
#
# Each dim is resized on its own, by taps that are computed here as torch computes them: positions
# in float32 unless the image has float64, which decides what is nearest.

Maker = Callable[[int, int, bool, "float | None", Any], Taps]


def _scale(size: int, outputs: int, align: bool, factor: float | None, dtype: Any) -> Any:
    """Elements of the image per element of the result."""
    if align:
        return dtype((size - 1) / (outputs - 1) if outputs > 1 else 0)
    if factor is not None and factor > 0:
        return dtype(1 / factor)
    return dtype(size) / dtype(outputs)


def _positions(size: int, outputs: int, align: bool, factor: float | None, dtype: Any) -> Any:
    scale, place = _scale(size, outputs, align, factor, dtype), np.arange(outputs).astype(dtype)
    return scale * place if align else scale * (place + dtype(0.5)) - dtype(0.5)


def _single_taps(indices: Any, size: int) -> Taps:
    clipped = np.minimum(indices, size - 1).astype(np.int64)
    return Taps(clipped[:, None], np.ones((len(clipped), 1)), size)


def _nearest(size: int, outputs: int, align: bool, factor: float | None, dtype: Any) -> Taps:
    scale = _scale(size, outputs, False, factor, dtype)
    return _single_taps(np.floor(scale * np.arange(outputs).astype(dtype)), size)


def _nearest_exact(size: int, outputs: int, align: bool, factor: float | None, dtype: Any) -> Taps:
    positions = _positions(size, outputs, False, factor, dtype)
    return _single_taps(np.floor(np.maximum(positions, 0) + dtype(0.5)), size)


def _linear_taps(size: int, outputs: int, align: bool, factor: float | None, dtype: Any) -> Taps:
    if size == outputs:
        return _single_taps(np.arange(size), size)
    positions = np.maximum(_positions(size, outputs, align, factor, dtype), 0)
    first = np.minimum(positions.astype(np.int64), size - 1)
    second = np.minimum(first + 1, size - 1)
    part = np.clip(positions - first, 0, 1)
    return Taps(np.stack([first, second], 1), np.stack([1 - part, part], 1), size)


def _cubic_weight(distance: Any, a: float) -> Any:
    """The cubic kernel of Keys at a distance, zero from two elements on."""
    d = np.abs(distance)
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return np.where(d <= 1, near, np.where(d < 2, far, 0))


def _cubic_taps(size: int, outputs: int, align: bool, factor: float | None, dtype: Any) -> Taps:
    positions = _positions(size, outputs, align, factor, dtype)
    first = np.minimum(np.floor(positions), size - 1)
    part = np.clip(positions - first, 0, 1)
    offsets = np.arange(-1, 3)
    indices = np.clip(first[:, None].astype(np.int64) + offsets, 0, size - 1)
    return Taps(indices, _cubic_weight(part[:, None] - offsets, -0.75), size)


def _antialiased(kernel: Callable[[Any], Any], width: int) -> Maker:
    """The kernel stretched over the elements that one element of the result stands for."""

    def make(size: int, outputs: int, align: bool, factor: float | None, dtype: Any) -> Taps:
        scale = _scale(size, outputs, align, factor, dtype)
        support = dtype(width / 2) * max(scale, dtype(1))
        centers = scale * (np.arange(outputs).astype(dtype) + dtype(0.5))
        first = np.maximum((centers - support + dtype(0.5)).astype(np.int64), 0)
        end = np.minimum((centers + support + dtype(0.5)).astype(np.int64), size)
        indices = first[:, None] + np.arange(max(int((end - first).max(initial=1)), 1))
        distance = (indices - centers[:, None] + dtype(0.5)) / max(scale, dtype(1))
        weights = np.where(indices < end[:, None], kernel(distance), 0)
        total = weights.sum(1, keepdims=True)
        weights = weights / np.where(total == 0, 1, total)
        return Taps(np.minimum(indices, size - 1), weights, size)

    return make


_linear_aa = _antialiased(lambda d: np.maximum(1 - np.abs(d), 0), 2)
_cubic_aa = _antialiased(lambda d: _cubic_weight(d, -0.5), 4)


def _maps(make: Maker, sizes: Any, outputs: Any, align: bool, factors: Any, dtype: Any) -> Any:
    dtype = np.float64 if dtype == jnp.float64 else np.float32
    factors = [*factors, *[None] * (len(outputs) - len(factors))]
    dims = enumerate(zip(outputs, factors, strict=True), len(sizes) - len(outputs))
    for dim, (count, factor) in dims:
        yield dim, make(int(sizes[dim]), int(count), align, factor, dtype)


def _resize(x: Any, maps: Any) -> Any:
    integer = x.dtype.kind in "iu"
    wide = x.astype(jnp.promote_types(jnp.float32 if integer else x.dtype, jnp.float32))
    for dim, taps in maps:
        wide = apply_taps(wide, dim, taps)
    if integer:  # the cubic kernel has negative weights, which lead out of a byte's range
        limits = jnp.iinfo(x.dtype)
        wide = jnp.clip(jnp.round(wide), limits.min, limits.max)
    return wide.astype(x.dtype)


def _lower_resize(name: str, make: Maker, aligns: bool) -> None:
    def forward(x: Any, output_size: Any, *options: Any) -> Any:
        align, factors = (options[0], options[1:]) if aligns else (False, options)
        return _resize(x, _maps(make, x.shape, output_size, align, factors, x.dtype))

    def backward(grad: Any, output_size: Any, input_size: Any, *options: Any) -> Any:
        align, factors = (options[0], options[1:]) if aligns else (False, options)
        maps = _maps(make, input_size, output_size, align, factors, grad.dtype)
        return _resize(grad, [(dim, taps.transposed()) for dim, taps in maps])

    lower(getattr(aten, name).default)(as_one(forward))
    lower(getattr(aten, f"{name}_backward").default)(as_one(backward))


for _dims in (1, 2, 3):
    _lower_resize(f"upsample_nearest{_dims}d", _nearest, False)
    _lower_resize(f"_upsample_nearest_exact{_dims}d", _nearest_exact, False)
_lower_resize("upsample_linear1d", _linear_taps, True)
_lower_resize("upsample_bilinear2d", _linear_taps, True)
_lower_resize("upsample_trilinear3d", _linear_taps, True)
_lower_resize("upsample_bicubic2d", _cubic_taps, True)
_lower_resize("_upsample_bilinear2d_aa", _linear_aa, True)
_lower_resize("_upsample_bicubic2d_aa", _cubic_aa, True)


# --------------------------------------------------------------------- The windows of a pooling op
#
# Over which dims, how far padded, how many elements each has.


@dataclass(frozen=True)
class Windows:
    """Windows over the last dims of a tensor, one number per dim in each field.

    Attributes:
        sizes: The image.
        kernel: Elements per window.
        stride: Elements between the starts of windows.
        padding: Elements added before and after the image.
        dilation: Elements between those of one window.
        outputs: How many windows.

    Example:
        >>> Windows.of((8, 3, 5, 5), 2, [3], [2], 1, ceil_mode=False).outputs
        (3, 3)
    """

    sizes: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    outputs: tuple[int, ...]

    @staticmethod
    def of(
        shape: Sequence[int],
        ndim: int,
        kernel: Any,
        stride: Any,
        padding: Any,
        ceil_mode: bool,
        dilation: Any = 1,
    ) -> Windows:
        """Return the windows that torch's arguments mean.

        Args:
            shape: Of the input; its last `ndim` dims are the image.
            ndim: How many dims windows have.
            kernel: As torch takes it: one number for all dims, or one each.
            stride: The same; empty for the kernel's.
            padding: The same.
            ceil_mode: Whether a window may lack elements at the end.
            dilation: As `kernel`.
        """
        sizes, size = tuple(shape[len(shape) - ndim :]), _per_dim(kernel, ndim)
        steps = _per_dim(stride, ndim) if stride else size
        pads, gaps = _per_dim(padding, ndim), _per_dim(dilation, ndim)
        outputs: list[int] = []
        for n, k, s, p, d in zip(sizes, size, steps, pads, gaps, strict=True):
            count = (n + 2 * p - d * (k - 1) - 1 + (s - 1 if ceil_mode else 0)) // s + 1
            # None may start behind the image and the padding before it.
            outputs.append(count - (ceil_mode and (count - 1) * s >= n + p))
        return Windows(sizes, size, steps, pads, gaps, tuple(outputs))

    def reduce_window(self, ndim: int) -> dict[str, Any]:
        """Return the options of ``lax.reduce_window`` for a tensor of `ndim` dims."""
        batch = ndim - len(self.sizes)
        return {
            "window_dimensions": (1,) * batch + self.kernel,
            "window_strides": (1,) * batch + self.stride,
            "padding": [(0, 0)] * batch + list(zip(self.padding, self.padding_after, strict=True)),
            "window_dilation": (1,) * batch + self.dilation,
        }

    @property
    def padding_after(self) -> list[int]:
        """The padding that windows reach behind the image; with ceil_mode it may exceed torch's."""
        lacks: list[int] = []
        for dim, size in enumerate(self.sizes):
            reach = self.dilation[dim] * (self.kernel[dim] - 1) + 1
            end = self.stride[dim] * (self.outputs[dim] - 1) + reach
            lacks.append(max(end - size - self.padding[dim], 0))
        return lacks

    def counts(self, with_padding: bool) -> Any:
        """Return how many elements each window has, an array over the windows.

        Args:
            with_padding: Count torch's padding too, though nothing behind it.
        """
        total = np.ones((), np.int64)
        for dim, size in enumerate(self.sizes):
            pad = self.padding[dim]
            start = np.arange(self.outputs[dim]) * self.stride[dim] - pad
            end = np.minimum(start + self.kernel[dim], size + pad)
            if not with_padding:
                start, end = np.maximum(start, 0), np.minimum(end, size)
            total = total[..., None] * (end - start)
        return total


# ---------------------------------------------------------------------------- Pooling over windows
#
# Averages, maxima and where these lie. Batch and channels stay apart.
#
# Image dims that are cut are gathered (``index.uncut``). A maximum's index counts the elements of
# its plane in order. The backward of a maximum does not scatter by these indices, which XLA's
# partitioner would gather for: each element of a window is compared with the window's index, and
# spread back with a pad.

# Windows of more elements than this are not unrolled, so that programs stay small.
_LARGEST_UNROLLED = 64


def _average(
    x: Any,
    ndim: int,
    kernel_size: Any,
    stride: Any = (),
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    batch = x.ndim - ndim
    x = uncut(x, batch)
    windows = Windows.of(x.shape, ndim, kernel_size, stride, padding, ceil_mode)
    divisor = windows.counts(count_include_pad) if divisor_override is None else divisor_override
    integer = x.dtype.kind in "iu"
    wide = x if integer else x.astype(jnp.promote_types(x.dtype, jnp.float32))
    zero = np.zeros((), wide.dtype)  # not traced, or JAX does not see the sum
    total = lax.reduce_window(wide, zero, lax.add, **windows.reduce_window(x.ndim))
    divisor = jnp.broadcast_to(jnp.asarray(divisor, total.dtype), total.shape)
    return uncut(lax.div(total, divisor).astype(x.dtype), batch)


def lowest(dtype: Any) -> Any:
    """Return the number that no maximum is below."""
    return jnp.array(-jnp.inf if dtype.kind not in "iu" else jnp.iinfo(dtype).min, dtype)


def larger(pair_a: Any, pair_b: Any) -> Any:
    """Return the (value, index) of the larger value: of equal ones the first, of NaNs the last."""
    (a, i), (b, j) = pair_a, pair_b
    nan_a, nan_b = a != a, b != b
    tied = jnp.where(nan_a, i > j, i < j)
    first = jnp.where(nan_a == nan_b, (a > b) | (((a == b) | nan_a) & tied), nan_a)
    return jnp.where(first, a, b), jnp.where(first, i, j)


def _maximum(x: Any, windows: Windows) -> Any:
    ndim, batch = len(windows.sizes), x.ndim - len(windows.sizes)
    start = (lowest(x.dtype), jnp.array(jnp.iinfo(jnp.int32).max, jnp.int32))
    pairs = (uncut(x, batch), flat_index(x.shape, ndim))
    maxima, indices = lax.reduce_window(pairs, start, larger, **windows.reduce_window(x.ndim))
    return uncut(maxima, batch), uncut(indices, batch)


@as_one
def _put_back(grad: Any, x: Any, windows: Windows, indices: Any) -> Any:
    """Give each window's gradient to the element that `indices` names; sums where windows meet."""
    ndim, batch = len(windows.sizes), x.ndim - len(windows.sizes)
    if math.prod(windows.kernel) > _LARGEST_UNROLLED:
        return add_on_planes(grad, indices, x.shape, ndim)
    # Windows are spread over the padded image: XLA's partitioner aborts on pads below zero.
    edges = list(zip(windows.padding, windows.sizes, windows.padding_after, strict=True))
    padded = [low + size + high for low, size, high in edges]
    total = jnp.zeros((*x.shape[:batch], *padded), jnp.promote_types(grad.dtype, jnp.float32))
    for offsets in itertools.product(*map(range, windows.kernel)):
        index, inside = jnp.zeros((), indices.dtype), jnp.ones((), jnp.bool_)
        pads = [(0, 0, 0)] * batch
        for dim, offset in enumerate(offsets):
            count, step, size = windows.outputs[dim], windows.stride[dim], windows.sizes[dim]
            begin = offset * windows.dilation[dim]
            place = begin + step * lax.broadcasted_iota(indices.dtype, grad.shape, batch + dim)
            place = place - windows.padding[dim]
            inside &= (place >= 0) & (place < size)
            index = index * size + place
            pads.append((begin, padded[dim] - begin - step * (count - 1) - 1, step - 1))
        here = jnp.where(inside & (indices == index), grad, 0).astype(total.dtype)
        total = total + lax.pad(here, np.zeros((), total.dtype), pads)
    begins = [low for low, _, _ in edges]
    ends = [low + size for low, size, _ in edges]
    total = lax.slice(total, [0] * batch + begins, [*x.shape[:batch], *ends])
    return uncut(total.astype(grad.dtype), batch)


def _of_maximum(x: Any, ndim: int, options: Any) -> Windows:
    names = ("kernel", "stride", "padding", "dilation", "ceil_mode")
    defaults = {"stride": (), "padding": 0, "dilation": 1, "ceil_mode": False}
    return Windows.of(x.shape, ndim, **(defaults | dict(zip(names, options, strict=False))))


def _lower_pools(ndim: int) -> None:
    def average(x: Any, *options: Any) -> Any:
        return _average(x, ndim, *options)

    def average_backward(grad: Any, x: Any, *options: Any) -> Any:
        grad, x = uncut(grad, x.ndim - ndim), uncut(x, x.ndim - ndim)
        return pull_back(lambda v: _average(v, ndim, *options), (x,), grad)[0]

    def maximum(x: Any, *options: Any) -> Any:
        return _maximum(x, _of_maximum(x, ndim, options))

    def maximum_backward(grad: Any, x: Any, *options: Any) -> Any:
        *settings, indices = options
        grad, indices = uncut(grad, x.ndim - ndim), uncut(indices, x.ndim - ndim)
        return _put_back(grad, x, _of_maximum(x, ndim, settings), indices)

    lower(getattr(aten, f"avg_pool{ndim}d").default)(average)
    lower(getattr(aten, f"avg_pool{ndim}d_backward").default)(average_backward)
    lower(getattr(aten, f"max_pool{ndim}d_with_indices").default)(maximum)
    lower(getattr(aten, f"max_pool{ndim}d_with_indices_backward").default)(maximum_backward)


_lower_pools(2)
_lower_pools(3)


# ----------------------------------------------------------------------------------------- Adaptive
#
# Pooling to a given number of windows, which then differ in size, and at random places.


def _adaptive(size: int, outputs: int) -> Taps:
    """The mean over each of `outputs` windows; neighbours may share an element."""
    place = np.arange(outputs)
    start, end = place * size // outputs, -(-(place + 1) * size // outputs)
    count = (end - start)[:, None]
    offsets = np.arange(max(int(count.max(initial=1)), 1))
    indices = np.minimum(start[:, None] + offsets, end[:, None] - 1)
    return Taps(indices, np.where(offsets < count, 1 / count, 0), size)


def _averages(shape: Sequence[int], outputs: Sequence[int]) -> list[tuple[int, Taps]]:
    first = len(shape) - len(outputs)
    return [(d, _adaptive(shape[d], n)) for d, n in enumerate(outputs, first)]


@lower(aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool3d.default)
@as_one
def _adaptive_average(x: Any, output_size: Any) -> Any:
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    for dim, taps in _averages(x.shape, output_size):
        wide = apply_taps(wide, dim, taps)
    return wide.astype(x.dtype)


# ------------------------------------------------------------------ maxima


def _largest(x: Any, places: Any, ndim: int) -> Any:
    """Reduce windows whose elements lie side by side: dims (window, element) for each image dim."""
    batch = x.ndim - 2 * ndim
    start = (lowest(x.dtype), jnp.array(jnp.iinfo(jnp.int32).max, jnp.int32))
    return lax.reduce((x, places), start, larger, tuple(range(batch + 1, x.ndim, 2)))


@lower(aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default)
@as_one
def _adaptive_maximum(x: Any, output_size: Any) -> Any:
    ndim, batch = len(output_size), x.ndim - len(output_size)
    places = flat_index(x.shape, ndim)
    for d, n in enumerate(output_size):
        # An element that a short window takes twice changes no maximum.
        indices = _adaptive(x.shape[batch + 2 * d], n).indices
        x, places = (_windows_along(v, batch + 2 * d, indices) for v in (x, places))
    return _largest(x, places, ndim)


def _windows_along(x: Any, dim: int, indices: Any) -> Any:
    elements = jnp.take(x, indices.reshape(-1), axis=dim, mode="clip")
    return elements.reshape(*x.shape[:dim], *indices.shape, *x.shape[dim + 1 :])


# ------------------------------------------------------------------ at random places


def _starts(sample: Any, size: int, kernel: int, outputs: int) -> Any:
    """Where the windows of each plane start, as torch draws them from one number in [0, 1)."""
    room = size - kernel
    if outputs == 1:
        return jnp.full((*sample.shape, 1), room, jnp.int32)
    step = quotient(jnp.asarray(room, sample.dtype), outputs - 1)
    place = jnp.arange(outputs, dtype=sample.dtype)
    starts = ((place + sample[..., None]) * step).astype(jnp.int32)
    starts = starts - (sample * step).astype(jnp.int32)[..., None]
    return jnp.where(place == outputs - 1, room, starts)


def _fractional(x: Any, kernel_size: Any, output_size: Any, samples: Any, order: Any) -> Any:
    ndim = len(order)
    shape = x.shape
    x = x.reshape(*samples.shape[:2], *shape[x.ndim - ndim :])
    places = flat_index(x.shape, ndim)
    for d, (k, n) in enumerate(zip(kernel_size, output_size, strict=True)):
        dim = 2 + 2 * d
        starts = _starts(samples[..., order[d]], x.shape[dim], k, n)
        indices = starts[..., None] + jnp.arange(k, dtype=jnp.int32)
        behind = (1,) * (x.ndim - dim - 1)
        across = indices.reshape(*x.shape[:2], *(1,) * (dim - 2), n * k, *behind)
        elements = [jnp.take_along_axis(v, across, axis=dim, mode="clip") for v in (x, places)]
        x, places = (v.reshape(*v.shape[:dim], n, k, *v.shape[dim + 1 :]) for v in elements)
    maxima, indices = _largest(x, places, ndim)
    output_shape = (*shape[: len(shape) - ndim], *output_size)
    return maxima.reshape(output_shape), indices.reshape(output_shape)


# ------------------------------------------------------------------ registered for 2 and 3 dims


def _lower_pools_of_any_windows(ndim: int) -> None:
    # torch takes the first number of each pair for the second dim.
    order = (1, 0) if ndim == 2 else (0, 1, 2)

    def average_backward(grad: Any, x: Any) -> Any:
        wide = grad.astype(jnp.promote_types(grad.dtype, jnp.float32))
        for dim, taps in _averages(x.shape, grad.shape[grad.ndim - ndim :]):
            wide = apply_taps(wide, dim, taps.transposed())
        return wide.astype(grad.dtype)

    def fractional_maximum(x: Any, kernel_size: Any, output_size: Any, samples: Any) -> Any:
        return _fractional(x, kernel_size, output_size, samples, order)

    def maximum_backward(grad: Any, x: Any, *options: Any) -> Any:
        return add_on_planes(grad, options[-1], x.shape, ndim)

    for name, rule in (
        ("_adaptive_avg_pool{}d_backward", average_backward),
        ("adaptive_max_pool{}d_backward", maximum_backward),
        ("fractional_max_pool{}d", fractional_maximum),
        ("fractional_max_pool{}d_backward", maximum_backward),
    ):
        lower(getattr(aten, name.format(ndim)).default)(as_one(rule))


_lower_pools_of_any_windows(2)
_lower_pools_of_any_windows(3)
