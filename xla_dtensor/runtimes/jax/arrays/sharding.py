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

from collections.abc import Iterable, Mapping, Sequence
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
    "named_sharding",
    "padded",
    "padded_shape",
    "place",
    "put_host_array",
    "read_op_sharding",
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
    return tuple(
        -(-size // n) * n for size, n in zip(shape, _tiles(sharding, len(shape)), strict=True)
    )


@lru_cache(maxsize=4096)
def _tiles(sharding: NamedSharding, ndim: int) -> tuple[int, ...]:
    entries = (*sharding.spec, *(None,) * (ndim - len(sharding.spec)))
    sizes = sharding.mesh.shape

    def of(entry: Any) -> int:
        if entry is None or entry is PartitionSpec.UNCONSTRAINED:
            return 1
        names = (entry,) if isinstance(entry, str) else entry
        return int(np.prod([sizes[name] for name in names], dtype=np.int64))

    return tuple(of(entry) for entry in entries)


def padded(value: jax.Array, sharding: NamedSharding | None) -> jax.Array:
    """Return `value` with zeros behind each dim so that it divides by the tiles."""
    target = padded_shape(tuple(value.shape), sharding)
    if target == tuple(value.shape):
        return value
    return jnp.pad(value, [(0, t - s) for t, s in zip(target, value.shape, strict=True)])


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
    result = jax.lax.slice(array, (0,) * len(shape), shape)
    single = [size == 1 < whole for size, whole in zip(shape, array.shape, strict=True)]
    if sharding is None or not any(single) or not isinstance(array, jax.core.Tracer):
        return result
    # One row lies on one device, and is made whole: Shardy 0.10 and 0.12 end the process where
    # dims behind one that it says to be cut are split by a reshape.
    spec = [None if is_one else PartitionSpec.UNCONSTRAINED for is_one in single]
    where = NamedSharding(sharding.mesh, PartitionSpec(*spec))
    return jax.lax.with_sharding_constraint(result, where)


@lru_cache(maxsize=4096)
def _placer(sharding: NamedSharding | None) -> Any:
    # The copy keeps JAX from handing back the very buffer it was given: two storages that shared
    # one would both die when a compiled step donates it.
    if sharding is None or PartitionSpec.UNCONSTRAINED not in tuple(sharding.spec):
        return jax.jit(lambda x: jnp.array(padded(x, sharding), copy=True), out_shardings=sharding)

    def leaving_dims_open(x: jax.Array) -> jax.Array:
        copied = jnp.array(padded(x, sharding), copy=True)
        return jax.lax.with_sharding_constraint(copied, sharding)

    return jax.jit(leaving_dims_open)


def place(value: jax.Array, sharding: NamedSharding | None) -> jax.Array:
    """Return a new array with `value` padded and placed as `sharding` says.

    Works on arrays that span processes, and inside a traced step.

    Raises:
        ShardingDroppedError: XLA gave back another sharding than was asked for.
    """
    if isinstance(value, jax.core.Tracer):
        value = padded(value, sharding)
        return value if sharding is None else jax.lax.with_sharding_constraint(value, sharding)
    if sharding is not None and same_program.checks() is not None and _gathers(value, sharding):
        _compare_gather(value)
    result = _placer(sharding)(value)
    if isinstance(result, jax.core.Tracer):
        return result  # an older array, used in a traced step: how it will lie is not known yet
    if sharding is not None and PartitionSpec.UNCONSTRAINED not in tuple(sharding.spec):
        check_sharding(result, sharding)
    return result


def constrained(value: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Return the logical `value`, told to lie as `sharding` says."""
    return unpadded(place(value, sharding), tuple(value.shape))


def check_sharding(array: jax.Array, asked: NamedSharding) -> None:
    """Raise when `array` does not lie as `asked`."""
    if array.sharding.is_equivalent_to(asked, array.ndim):
        return
    raise ShardingDroppedError(
        f"A tensor of shape={tuple(array.shape)} was asked to lie as {asked.spec} on a mesh "
        f"{dict(asked.mesh.shape)}, but XLA placed it as {array.sharding}. Computing on would cost "
        "memory and time without a word. Choose a sharding whose tiles divide the padded shape, "
        "or replicate this dim."
    )


def put_host_array(array: np.ndarray[Any, Any], sharding: Any) -> jax.Array:
    """Copy a host array, equal in every process, to the devices; each takes only its own tiles."""
    if sharding is None:
        return jnp.array(array)
    target = padded_shape(array.shape, sharding)

    def tile(index: Any) -> np.ndarray[Any, Any]:
        starts = [s.start or 0 for s in index]
        stops = [t if s.stop is None else s.stop for s, t in zip(index, target, strict=True)]
        part = array[tuple(slice(a, b) for a, b in zip(starts, stops, strict=True))]
        missing = [(0, b - a - n) for a, b, n in zip(starts, stops, part.shape, strict=True)]
        # A copy: on CPU, JAX may otherwise keep looking at memory that torch will write to.
        return np.pad(part, missing) if any(m for _, m in missing) else np.array(part)

    result = jax.make_array_from_callback(target, sharding, tile)
    check_sharding(result, sharding)
    return result


def host_value(value: jax.Array) -> np.ndarray[Any, Any]:
    """Return a whole value as a NumPy array, gathering it first when it spans processes."""
    if isinstance(value, jax.core.Tracer):
        from xla_dtensor.runtimes.jax.arrays.trace import refuse_read

        refuse_read("read on the host")
    if not value.is_fully_addressable and not value.is_fully_replicated:
        mesh = value.sharding.mesh  # pyright: ignore[reportAttributeAccessIssue]
        _compare_gather(value)
        value = _placer(NamedSharding(mesh, PartitionSpec()))(value)
    if not value.is_fully_addressable:
        value = value.addressable_data(0)
    return np.asarray(value)


def _gathers(value: jax.Array, sharding: NamedSharding) -> bool:
    """Tell whether each process is given what only several of them hold together."""
    spread = not value.is_fully_addressable and not value.is_fully_replicated
    return spread and sharding.is_fully_replicated


def _compare_gather(value: jax.Array) -> None:
    """Have all processes that hold a part say that they gather it, too."""
    found = same_program.checks()
    if found is not None and found.mode != "off":
        group = {device.process_index for device in value.sharding.device_set}
        what = f"the gather of a tensor of shape={tuple(value.shape)}"
        found.compare(what, str(value.dtype), tuple(group))


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
    sizes = tuple(outer // inner for outer, inner in pairwise(boundaries))
    spec = [
        PartitionSpec.UNCONSTRAINED
        if not digits and dim in open_dims and names  # on one device nothing is left to choose
        else _names_of(digits, boundaries, names)
        for dim, digits in enumerate(dims)
    ]
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
    rest = [digit for digit in walk if digit[0] > 1][::-1]
    dims: list[list[Digit]] = []
    for tiles in tile_dims:
        digits: list[Digit] = []
        while tiles > 1:
            size, stride = rest.pop()
            taken = min(size, tiles)
            if taken < size:
                rest.append((size // taken, stride))
            digits.append((taken, stride * (size // taken)))
            tiles //= taken
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


def _names_of(
    digits: Iterable[Digit], boundaries: Sequence[int], names: dict[int, str]
) -> tuple[str, ...] | None:
    found = [
        names[mark]
        for size, stride in digits
        for mark in boundaries[1:]
        if stride <= mark < stride * size
    ]
    return tuple(found) or None


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
