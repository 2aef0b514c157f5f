"""What the tests of the core draw from, and the oracles that they compare with.

The oracles are slow and literal: a tensor dim is an array of positions, cut placement by placement.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mesh_utils import Mesh
from xla_dtensor.core import (
    Layout,
    OpSharding,
    Partial,
    PlacementRecord,
    Replicate,
    Shard,
    StridedShard,
)

_EXAMPLES = settings().max_examples  # of the profile: 20 in the contract, 200 in test-all
THOROUGH = settings(
    max_examples=min(5 * _EXAMPLES, 500),
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)

QUICK = settings(parent=THOROUGH, max_examples=min(_EXAMPLES, 100))
"""For what another test checks thoroughly from another side."""

GROUPS = ("several axes per dim", "strided", "size-1 axes", "permuted order", "uneven shapes")

AXES = ("dp", "ep", "sp", "tp")
SMALL_SHAPES = tuple(
    shape
    for ndim in (1, 2, 3, 4)
    for shape in np.ndindex(*(9,) * ndim)
    if min(shape) >= 1 and math.prod(shape) <= 8
)
LARGE_SHAPES = ((6, 4), (4, 6, 5), (2, 3, 4, 2), (8, 1, 12), (16, 16), (3, 5, 7, 2), (64,))


@dataclass(frozen=True)
class Case:
    """A layout with a tiling, its root mesh, and a shape."""

    layout: Layout
    root: Mesh
    shape: tuple[int, ...]


def shuffled_iota(draw: st.DrawFn, count: int, group: str) -> NDArray[np.int64]:
    """0..count-1: in order, reshaped and transposed, or in any order."""
    kind = draw(st.sampled_from(("radix", "any"))) if group == "permuted order" else "iota"
    if kind == "any":
        return np.array(draw(st.permutations(range(count))), np.int64)
    ids = np.arange(count, dtype=np.int64)
    if kind == "radix":
        factors = [f for f in (2, 3, 4) if count % f == 0]
        first = draw(st.sampled_from(factors)) if factors else 1
        rest = count // first
        second = draw(st.sampled_from([f for f in (1, 2, 3) if rest % f == 0]))
        shape = (first, second, rest // second)
        ids = ids.reshape(shape).transpose(draw(st.permutations(range(3)))).reshape(-1)
    return ids


@st.composite
def meshes(draw: st.DrawFn, group: str, *, large: bool = False) -> Mesh:
    """Meshes of 1 to 4 axes, with names and without: up to 8 devices, or larger ones."""
    shapes = LARGE_SHAPES if large else SMALL_SHAPES
    if group == "size-1 axes":
        shapes = tuple(shape for shape in shapes if 1 in shape)
    elif group in ("several axes per dim", "strided"):
        shapes = tuple(shape for shape in shapes if len(shape) > 1)
    shape = draw(st.sampled_from(shapes))
    ids = shuffled_iota(draw, math.prod(shape), group)
    return Mesh(ids, shape, AXES[-len(shape) :] if draw(st.booleans()) else None)


@st.composite
def axis_orders(draw: st.DrawFn, mesh: Mesh, group: str) -> tuple[tuple[str | int, ...], ...]:
    """For each of 0 to 5 dims the whole axes that cut it, in any order."""
    crowded = group in ("several axes per dim", "strided", "uneven shapes")
    ndim = draw(st.integers(1, 2) if crowded else st.integers(0, 5))
    dims: list[list[str | int]] = [[] for _ in range(ndim)]
    if ndim:
        for axis in draw(st.permutations(mesh.axis_names)):
            place = draw(st.integers(0, ndim))
            if place < ndim:
                dims[place].append(axis)
    return tuple(map(tuple, dims))


@st.composite
def placement_lists(
    draw: st.DrawFn, mesh: Mesh, tensor_ndim: int, *, strided: bool = True
) -> list[PlacementRecord]:
    """Placements of every kind; split factors of all small sizes, fitting or not."""
    result: list[PlacementRecord] = []
    for _ in mesh.axis_names:
        kind = draw(st.sampled_from(("shard", "shard", "strided", "replicate", "partial")))
        if tensor_ndim == 0 and kind in ("shard", "strided"):
            kind = "replicate"
        if kind in ("shard", "strided"):
            dim = draw(st.integers(0, min(tensor_ndim, 2) - 1))
            factor = draw(st.integers(2, 6)) if strided and kind == "strided" else 1
            result.append(Shard(dim) if factor == 1 else StridedShard(dim, factor))
        elif kind == "replicate":
            result.append(Replicate())
        else:
            result.append(Partial(draw(st.sampled_from(("sum", "avg", "max", "min", "product")))))
    return result


@st.composite
def cases(draw: st.DrawFn, group: str, *, large: bool = False) -> Case:
    """Layouts that are tilings, of every group, with an even shape unless the group is uneven."""
    mesh = draw(meshes(group, large=large))
    layout = Layout(mesh, draw(axis_orders(mesh, group)))
    if group == "strided" and draw(st.booleans()):
        layout = draw(straddled_layouts(mesh))
    if group == "uneven shapes":
        shape = tuple(draw(st.integers(0, 30)) for _ in layout.dims)
    else:
        shape = tuple(layout.num_shards(d) * draw(st.integers(1, 3)) for d in range(layout.ndim))
    return Case(layout, Mesh.arange((mesh.size(),), ("all",)), shape)


@st.composite
def straddled_layouts(draw: st.DrawFn, mesh: Mesh) -> Layout:
    """Layouts of strided placements, some with an axis in parts, none with a gap outside a cut."""
    sizes = mesh.mesh_shape
    placements: list[PlacementRecord] = []
    for index in range(mesh.ndim):
        later = math.prod(sizes[index + 1 :])
        factors = [f for f in range(1, later + 1) if later % f == 0]
        factor = draw(st.sampled_from(factors))
        placements.append(StridedShard(0, factor) if factor > 1 else Shard(0))
    try:
        layout = Layout.from_placements(placements, 1, mesh)
        layout.op_sharding()
    except ValueError:
        return Layout(mesh, (tuple(reversed(mesh.axis_names)),))
    return layout


GRIDS = ((8,), (2, 4), (4, 2), (2, 2, 2), (6,), (3, 2), (2, 3), (4, 3), (1, 4), (1, 1), (2, 6))
TYPES = ("replicated", "manual", "unreduced")


@st.composite
def op_shardings(draw: st.DrawFn) -> OpSharding:
    """Tiled ones of few devices, as an iota or a list, with subgroups in any order."""
    dims = list(draw(st.sampled_from(GRIDS)))
    subgroups = draw(st.lists(st.sampled_from(TYPES), max_size=len(dims)))
    if draw(st.booleans()):
        place = draw(st.integers(0, len(dims)))
        dims.insert(place, 1)
    count = math.prod(dims)
    if draw(st.booleans()):
        factors = draw(st.sampled_from([g for g in GRIDS if math.prod(g) == count] or [(count,)]))
        perm = tuple(draw(st.permutations(range(len(factors)))))
        return OpSharding("tiled", tuple(dims), factors, perm, subgroup_types=tuple(subgroups))
    devices = tuple(draw(st.permutations(range(count))))
    return OpSharding("tiled", tuple(dims), devices=devices, subgroup_types=tuple(subgroups))


def chunks(positions: NDArray[np.int64], count: int) -> list[NDArray[np.int64]]:
    """torch.chunk, with empty chunks at the end."""
    size = -(-len(positions) // count)
    return [positions[i * size : (i + 1) * size] for i in range(count)]


def torch_positions(
    placements: Any, mesh: Mesh, shape: tuple[int, ...], coordinate: tuple[int, ...]
) -> list[NDArray[np.int64]]:
    """PyTorch's placements, taken literally: what is left of each dim at a coordinate."""
    left = [np.arange(extent, dtype=np.int64) for extent in shape]
    for placement, size, index in zip(placements, mesh.mesh_shape, coordinate, strict=True):
        if isinstance(placement, Shard):
            left[placement.dim] = chunks(left[placement.dim], size)[index]
        elif isinstance(placement, StridedShard):
            pieces = chunks(left[placement.dim], placement.split_factor)
            left[placement.dim] = np.concatenate([chunks(p, size)[index] for p in pieces])
    return left


def xla_positions(
    tile_index: tuple[int, ...], tiles: tuple[int, ...], shape: tuple[int, ...]
) -> list[NDArray[np.int64]]:
    """XLA's tiles: ceil division, the last ones shorter or empty."""
    return [
        np.arange(extent, dtype=np.int64)[i * -(-extent // n) : (i + 1) * -(-extent // n)]
        for i, n, extent in zip(tile_index, tiles, shape, strict=True)
    ]


def sliced(index: tuple[slice, ...], shape: tuple[int, ...]) -> list[list[int]]:
    """The positions of slices."""
    return [list(range(*s.indices(extent))) for s, extent in zip(index, shape, strict=True)]
