"""OpSharding to JAX's NamedSharding and back.

JAX accepts only named shardings inside a program, and all meshes of one program must list the
devices in one order. So an OpSharding, which is a walk through the root's flat order, is written
on a mesh of the root's devices in the root's order, cut into prime factors. A worked example: a
root of (dp=2, tp=4) gives the mesh ``(f0=2, f1=2, f2=2)``; ``{devices=[2,4]<=[4,2]T(1,0)}`` walks
first the inner factor 2, then the outer factor 4, so its PartitionSpec is
``P('f2', ('f0', 'f1'))``.

One mesh serves all tensors of a root, on purpose: jax 0.10 reads the sharding that XLA chose for
an output back on the mesh of *some* input, and fails when that mesh is too coarse. Only a walk
that cuts between the prime factors (a (4, 3) mesh against a root of (3, 4)) gets its own.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from mesh_utils import Mesh
from xla_dtensor.core import OpSharding
from xla_dtensor.core.errors import DistributeError, ShardingDroppedError
from xla_dtensor.runtimes import same_program
from xla_dtensor.runtimes.jax.arrays import values
from xla_dtensor.runtimes.jax.arrays.private import device_ids, hlo_sharding_text

__all__ = [
    "constrained",
    "host_value",
    "lying_like",
    "named_sharding",
    "padded",
    "padded_shape",
    "place",
    "put_host_array",
    "read_op_sharding",
    "sharding_of_new",
    "unpadded",
]


# ------------------------------------------------------------------------------------------ Placing
#
# Put arrays where a sharding says, with the padding that JAX's even tiles need.
#
# ``place`` is the one gate to the devices. It pads, places, and checks what came back, because
# ``with_sharding_constraint`` answers an uneven request with a silently replicated array.


def padded_shape(shape: tuple[int, ...], sharding: NamedSharding | None) -> tuple[int, ...]:
    """Return `shape` with each dim rounded up to a multiple of its number of tiles."""
    if sharding is None:
        return shape
    tiles = _num_tiles(sharding, len(shape))
    return tuple([-(-size // n) * n for size, n in zip(shape, tiles, strict=True)])


@lru_cache(maxsize=4096)
def _num_tiles(sharding: NamedSharding, ndim: int) -> tuple[int, ...]:
    tiles = [1] * ndim
    for dim, entry in enumerate(sharding.spec):
        if entry is not None and entry is not PartitionSpec.UNCONSTRAINED:
            axes = (entry,) if isinstance(entry, str) else entry
            tiles[dim] = math.prod([sharding.mesh.shape[axis] for axis in axes])
    return tuple(tiles)


def padded(array: jax.Array, sharding: NamedSharding | None) -> jax.Array:
    """Return `array` with zeros behind each dim so that it divides by the tiles."""
    target = padded_shape(tuple(array.shape), sharding)
    if target == tuple(array.shape):
        return array
    return jnp.pad(array, [(0, t - s) for t, s in zip(target, array.shape, strict=True)])


def unpadded(
    array: jax.Array, shape: tuple[int, ...], sharding: NamedSharding | None = None
) -> jax.Array:
    """Return the logical part of a padded array.

    Args:
        array: The padded array.
        shape: The logical shape.
        sharding: How `array` lies, if that is known.
    """
    if tuple(array.shape) == shape:
        return array
    logical = jax.lax.slice(array, (0,) * len(shape), shape)
    single = [size == 1 < padded_size for size, padded_size in zip(shape, array.shape, strict=True)]
    if sharding is None or not any(single) or not isinstance(array, jax.core.Tracer):
        return logical
    # One row lies on one device, and is made whole: Shardy 0.10 and 0.12 end the process where
    # dims behind one that it says to be cut are split by a reshape.
    spec = [None if is_one else PartitionSpec.UNCONSTRAINED for is_one in single]
    constraint = NamedSharding(sharding.mesh, PartitionSpec(*spec))
    return jax.lax.with_sharding_constraint(logical, constraint)


@lru_cache(maxsize=4096)
def _placer(sharding: NamedSharding | None) -> Any:
    # The copy keeps JAX from handing back the very buffer it was given: two storages that shared
    # one would both die when a compiled step donates it.
    if sharding is None or PartitionSpec.UNCONSTRAINED not in tuple(sharding.spec):
        return jax.jit(lambda x: jnp.array(padded(x, sharding), copy=True), out_shardings=sharding)

    def leaving_dims_open(x: jax.Array) -> jax.Array:
        copy = jnp.array(padded(x, sharding), copy=True)
        return jax.lax.with_sharding_constraint(copy, sharding)

    return jax.jit(leaving_dims_open)


def place(array: jax.Array, sharding: NamedSharding | None) -> jax.Array:
    """Return a new array with the values of `array`, padded and placed as `sharding` says.

    Works on arrays that span processes, and inside a traced step.

    Raises:
        ShardingDroppedError: XLA gave back another sharding than was asked for.
    """
    if isinstance(array, jax.core.Tracer):
        array = padded(array, sharding)
        return array if sharding is None else jax.lax.with_sharding_constraint(array, sharding)
    if sharding is not None and sharding.is_fully_replicated:
        _compare_gather(array)
    placed = _placer(sharding)(array)
    if isinstance(placed, jax.core.Tracer):
        return placed  # an older array, used in a traced step: how it will lie is not known yet
    if sharding is not None and PartitionSpec.UNCONSTRAINED not in tuple(sharding.spec):
        check_sharding(placed, sharding)
    return placed


def constrained(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Return the logical `array`, told to lie as `sharding` says."""
    return unpadded(place(array, sharding), tuple(array.shape))


# ----------------------------------------------------------------------------- Values of nothing
#
# Zeros, and what is drawn, are computed of no tensor, so XLA would make them whole, on one device.
# The op that makes them says of which tensor they have the shape, and they lie as that one.

_like: jax.Array | None = None


@contextlib.contextmanager
def lying_like(array: jax.Array | None) -> Iterator[None]:
    """Let what is made inside lie as an array does, where it has its shape."""
    global _like
    previous, _like = _like, array
    try:
        yield
    finally:
        _like = previous


def sharding_of_new(shape: Sequence[int]) -> NamedSharding | None:
    """Return how an array that is made of nothing is to lie; None leaves that to JAX."""
    if _like is None or tuple(shape) != _like.shape:
        return None
    sharding = _like.sharding
    return sharding if isinstance(sharding, NamedSharding) else None


def check_sharding(array: jax.Array, sharding: NamedSharding) -> None:
    """Raise when `array` does not lie as `sharding` says."""
    if array.sharding.is_equivalent_to(sharding, array.ndim):
        return
    raise ShardingDroppedError(
        f"A tensor of shape={tuple(array.shape)} was asked to lie as {sharding.spec} on a mesh "
        f"{dict(sharding.mesh.shape)}, but XLA placed it as {array.sharding}. Computing on would "
        "cost memory and time without a word. Choose a sharding whose tiles divide the padded "
        "shape, or replicate this dim."
    )


def put_host_array(array: np.ndarray[Any, Any], sharding: Any) -> jax.Array:
    """Copy a host array, equal in every process, to the devices; each takes only its own tiles."""
    if sharding is None:
        return jnp.array(array)
    target = padded_shape(array.shape, sharding)

    def tile(index: Any) -> np.ndarray[Any, Any]:
        part = array[index]
        missing = [
            (0, (size if s.stop is None else s.stop) - (s.start or 0) - n)
            for s, size, n in zip(index, target, part.shape, strict=True)
        ]
        # A copy: on CPU, JAX may otherwise keep looking at memory that torch will write to.
        return np.pad(part, missing) if any(map(any, missing)) else np.array(part)

    placed = jax.make_array_from_callback(target, sharding, tile)
    check_sharding(placed, sharding)
    return placed


def host_value(array: jax.Array) -> np.ndarray[Any, Any]:
    """Return a whole value as a NumPy array, gathering it first when it spans processes."""
    if isinstance(array, jax.core.Tracer):
        from xla_dtensor.runtimes.jax.arrays.trace import refuse_read

        refuse_read("read on the host")
    if not array.is_fully_addressable and not array.is_fully_replicated:
        mesh = array.sharding.mesh  # pyright: ignore[reportAttributeAccessIssue]
        _compare_gather(array)
        array = _placer(NamedSharding(mesh, PartitionSpec()))(array)
    if not array.is_fully_addressable:
        array = array.addressable_data(0)
    return np.asarray(array)


def _compare_gather(array: jax.Array) -> None:
    """Have all processes that hold a part of an array say that they gather it, too."""
    checks = same_program.checks()
    if checks is None or checks.mode == "off":
        return
    if not array.is_fully_addressable and not array.is_fully_replicated:
        group = {device.process_index for device in array.sharding.device_set}
        event = f"the gather of a tensor of shape={tuple(array.shape)}"
        checks.compare(event, str(array.dtype), tuple(group))


# ------------------------------------------------------ OpSharding to JAX's NamedSharding and back

Digit = tuple[int, int]  # (size, stride) in the root's flat order


@lru_cache(maxsize=4096)
def named_sharding(
    op_sharding: OpSharding, root: Mesh, ndim: int, open_dims: frozenset[int] = frozenset()
) -> NamedSharding:
    """Return the NamedSharding that means `op_sharding` over `root`'s devices.

    Args:
        op_sharding: Replicated, or tiled with replication only, relative to `root`.
        root: The mesh whose flat order is the program's device order.
        ndim: The tensor's number of dims.
        open_dims: Dims without tiles that XLA may shard as it likes.

    Returns:
        A NamedSharding over a factored mesh.

    Raises:
        DistributeError: The order of the tiles is no mixed-radix permutation of the root's order.
    """
    dims = _dim_digits(op_sharding, ndim, root)
    boundaries = _boundaries(dims, root)
    names = {stride: f"f{i}" for i, stride in enumerate(boundaries[1:])}
    sizes = tuple([outer // inner for outer, inner in pairwise(boundaries)])
    spec: list[Any] = []
    for dim, digits in enumerate(dims):
        if not digits and dim in open_dims and names:  # on one device nothing is left to choose
            spec.append(PartitionSpec.UNCONSTRAINED)
            continue
        factors = [
            names[mark]
            for size, stride in digits
            for mark in boundaries[1:]
            if stride <= mark < stride * size
        ]
        spec.append(tuple(factors) or None)
    mesh = _jax_mesh(root, sizes, tuple(names.values()))
    return NamedSharding(mesh, PartitionSpec(*spec))


def _dim_digits(op_sharding: OpSharding, ndim: int, root: Mesh) -> list[list[Digit]]:
    op_sharding = op_sharding.canonical()
    if op_sharding.kind == "replicated":
        return [[] for _ in range(ndim)]
    if op_sharding.kind != "tiled" or op_sharding.devices is not None:
        axes = ", ".join(f"{n}={s}" for n, s in zip(root.axis_names, root.mesh_shape, strict=True))
        raise DistributeError(
            f"The sharding {op_sharding} was asked for over the root mesh ({axes}). A JAX program "
            "has one device order, and this one is no mixed-radix permutation of it. Build every "
            "mesh of the process over the same device order, or choose this order for the root by "
            "making its mesh first."
        )
    reshape_dims = op_sharding.reshape_dims or ()
    strides = np.cumprod([1, *reshape_dims[:0:-1]])[::-1].tolist()
    walk = [(reshape_dims[p], strides[p]) for p in op_sharding.transpose_perm or ()]
    return _cut(walk, op_sharding.tile_dims[:ndim])


def _cut(walk: Iterable[Digit], tile_dims: Sequence[int]) -> list[list[Digit]]:
    """Deal the walk's digits out to the tile dims, splitting a digit at a border between two."""
    pending = [digit for digit in walk if digit[0] > 1][::-1]
    dims: list[list[Digit]] = []
    for tiles in tile_dims:
        digits: list[Digit] = []
        while tiles > 1:
            size, stride = pending.pop()
            outer = min(size, tiles)
            if outer < size:
                pending.append((size // outer, stride))
            digits.append((outer, stride * (size // outer)))
            tiles //= outer
        dims.append(digits)
    return dims


def _boundaries(dims: Iterable[Iterable[Digit]], root: Mesh) -> list[int]:
    """Strides at which the flat order is cut, outermost first: [total, ..., 1]."""
    needed = {
        mark for digits in dims for size, stride in digits for mark in (stride, size * stride)
    }
    shared = _prime_boundaries(root.mesh_shape)
    if needed <= set(shared):
        return list(shared)
    return sorted(needed | {1, root.size()}, reverse=True)


@lru_cache(maxsize=256)
def _prime_boundaries(mesh_shape: tuple[int, ...]) -> tuple[int, ...]:
    marks = [1]
    for size in reversed(mesh_shape):
        factor = 2
        while size > 1:
            if size % factor:
                factor += 1
                continue
            size //= factor
            marks.append(marks[-1] * factor)
    return tuple(reversed(marks))


@lru_cache(maxsize=256)
def _jax_mesh(root: Mesh, sizes: tuple[int, ...], names: tuple[str, ...]) -> jax.sharding.Mesh:
    by_id = {device.id: device for device in values.devices()}
    devices = np.array([by_id[i] for i in root.device_ids.flat], dtype=object)
    auto = (AxisType.Auto,) * len(sizes)
    return jax.sharding.Mesh(devices.reshape(sizes), names, axis_types=auto)


def read_op_sharding(array: jax.Array, roots: Mapping[tuple[int, ...], Mesh]) -> OpSharding:
    """Return how `array` lies, relative to the root mesh of its devices.

    Args:
        array: Any concrete array.
        roots: The process's root meshes by their sorted device ids.

    Returns:
        The sharding. ``{replicated}`` for an array that lies on one device only because nothing
        has placed it yet: any program it enters receives it whole.
    """
    sharding = array.sharding
    ids = device_ids(sharding)
    if len(ids) == 1:
        return OpSharding.parse("{replicated}")
    parsed = OpSharding.parse(hlo_sharding_text(sharding, array.ndim))
    root = roots.get(tuple(sorted(ids)))
    if root is None or tuple(root.device_ids.ravel().tolist()) == ids:
        return parsed.canonical()
    raise DistributeError(
        f"The sharding of an array on devices {list(ids[:8])} was read, but the root mesh lists "
        f"them as {root.device_ids.ravel().tolist()[:8]}. One process has one device order. Make "
        "the array through xla_dtensor, or choose its order for the root mesh."
    )
