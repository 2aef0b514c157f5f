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

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from mesh_utils import Mesh
from xla_dtensor.core import OpSharding
from xla_dtensor.errors import DistributeError
from xla_dtensor.runtimes import jax_devices
from xla_dtensor.runtimes.jax_private import device_ids, hlo_sharding_text

__all__ = ["named_sharding", "read_op_sharding"]

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
    by_id = {device.id: device for device in jax_devices.devices()}
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
