"""Write by index, with shapes that XLA's partitioner cannot cut unevenly.

Where it cuts the new values of a scatter unevenly but not the indices, it writes some of them in
the wrong place, in silence (jax 0.10, on CPU). Sizes that all devices divide are never cut
unevenly, so the points are flattened, if they have to be, and padded to such a size: by writing the
last one again, or by adding zero to it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from xla_dtensor.runtimes import jax_devices

__all__ = ["on_rows", "or_poison", "put_points", "put_points_along"]


def on_rows(lowering: Callable[..., Any]) -> Callable[..., Any]:
    """Give a lowering of (x, dim, index, ...) that writes to `x` one row where `x` has no dims."""

    @functools.wraps(lowering)
    def run(x: Any, dim: int, index: Any, *others: Any, **options: Any) -> Any:
        if x.ndim:
            return lowering(x, dim, index, *others, **options)
        others = tuple(other.reshape(-1) if hasattr(other, "ndim") else other for other in others)
        return lowering(x[None], 0, index.reshape(-1), *others, **options)[0]

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
        found = put_points(numbers, points, values, accumulate, from_the_end=from_the_end)
        return found.astype(jnp.bool_)
    rest = x.shape[len(points) :]
    shape = [size for size in points[0].shape if size > 1]
    if not shape or any(size % jax_devices.device_count() for size in shape):
        shape = [math.prod(shape)]
    points = [point.reshape(shape) for point in points]
    values = values.astype(x.dtype).reshape(*shape, *rest)
    lack = -shape[0] % jax_devices.device_count() if len(shape) == 1 else 0
    if lack:
        points = [jnp.pad(point, (0, lack), mode="edge") for point in points]
        padding = [(0, lack), *[(0, 0)] * len(rest)]
        values = jnp.pad(values, padding, mode="constant" if accumulate else "edge")
    at = x.at[tuple(points)]
    write = at.add if accumulate else at.set
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
