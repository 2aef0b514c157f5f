"""Manual regions on the JAX runtime: one array holds every device's own tile.

A manual payload is a :class:`JaxTensor` with the shape of ONE device's tile. Its storage holds the
tiles of all devices, *stacked* along the axes of the region, and each stacked dim is sharded over
its axis, so that every device has exactly its own tile::

    region over (dp=2, tp=4), tiles of shape (8, 3)
    torch's shape     (8, 3)
    the array         (2, 4, 8, 3)     sharded [dp, tp, -, -]

An op is its lowering on one tile, run under ``jax.shard_map`` over the region's axes, so it cannot
communicate. The mesh's other axes stay XLA's: it may shard the tile's own dims over them. Inside a
compiled step the shard_map is traced into the program; outside it is compiled once per op and kept
(docs/decisions/manual_jax.md has the figures).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, NoReturn

import jax
import jax.core
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from mesh_utils import Axis, Mesh
from xla_dtensor.core import Layout, ManualRegion
from xla_dtensor.errors import ManualRegionError
from xla_dtensor.nested import leaves
from xla_dtensor.runtimes.jax_convert import x64
from xla_dtensor.runtimes.jax_sharding import named_sharding
from xla_dtensor.runtimes.jax_tensor import JaxTensor, Storage
from xla_dtensor.runtimes.jax_trace import active_trace

__all__ = [
    "ManualAxes",
    "axes_of",
    "enter",
    "leave",
    "manual_axes",
    "mapped",
    "mapped_over",
    "refuse_value",
    "stacked_sharding",
    "wrapped",
]

_PROGRAMS_KEPT = 8192
_programs: OrderedDict[Hashable, Any] = OrderedDict()


# ---------------------------------------------------------------------- axes


@dataclass(frozen=True)
class ManualAxes:
    """A region's axes in JAX's words.

    Args:
        region: The region.
        mesh: A JAX mesh over the root's devices in the root's order, cut into factors.
        names: For each of the region's axes the factors that make it up, outermost first; none for
            an axis of size 1.
    """

    region: ManualRegion
    mesh: jax.sharding.Mesh
    names: tuple[tuple[str, ...], ...]

    @property
    def ndim(self) -> int:
        """The number of stacked dims."""
        return len(self.names)

    @property
    def flat_names(self) -> tuple[str, ...]:
        """All factors."""
        return tuple(name for names in self.names for name in names)

    @property
    def spec(self) -> PartitionSpec:
        """How a stacked array lies."""
        return PartitionSpec(*(names or None for names in self.names))


@lru_cache(maxsize=1024)
def manual_axes(region: ManualRegion, root: Mesh) -> ManualAxes:
    """Return the names that a region's axes have in JAX programs over `root`."""
    return _axes_on(region, region.mesh, root)[0]


def _axes_on(
    region: ManualRegion, mesh: Mesh, root: Mesh
) -> tuple[ManualAxes, dict[Axis, tuple[str, ...]]]:
    """Return the region's axes and the names of each axis of `mesh`, a factored `region.mesh`."""
    every = Layout(mesh, tuple((axis,) for axis in mesh.axis_names))
    sharding = named_sharding(every.op_sharding(root), root, mesh.ndim)
    names = dict(zip(mesh.axis_names, map(_tuple_of, sharding.spec), strict=True))
    # A factored mesh has several axes, one after the other, where the region's mesh has one.
    pieces = iter(zip(mesh.axis_names, mesh.mesh_shape, strict=True))
    whole: dict[Axis, tuple[str, ...]] = {}
    for axis, size in zip(region.mesh.axis_names, region.mesh.mesh_shape, strict=True):
        piece, covered = next(pieces)
        whole[axis] = names[piece]
        while covered < size:
            piece, piece_size = next(pieces)
            whole[axis] += names[piece]
            covered *= piece_size
    jax_mesh: Any = sharding.mesh
    return ManualAxes(region, jax_mesh, tuple(whole[axis] for axis in region.axes)), names


def _tuple_of(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def axes_of(args: Any, kwargs: Any = None) -> ManualAxes | None:
    """Return the axes of the manual tensors among an op's arguments, None where there are none."""
    for leaf in leaves((args, kwargs)):
        if isinstance(leaf, JaxTensor) and leaf._storage.manual is not None:
            return leaf._storage.manual
    return None


def refuse_value(tensor: JaxTensor) -> NoReturn:
    """Raise the error for a manual tensor where a global value is needed."""
    axes = tensor._storage.manual
    assert axes is not None
    raise ManualRegionError(
        f"A manual tensor of shape={tuple(tensor.shape)} over the axes {axes.region.axes} was used "
        "as a global one, to be read, placed or computed with. It has another value on each "
        "device. Call disable_manual_sharding first."
    )


def wrapped(array: jax.Array, axes: ManualAxes) -> JaxTensor:
    """Return the manual payload over a stacked array."""
    return JaxTensor(Storage(array, manual=axes), shape=array.shape[axes.ndim :])


def stacked_sharding(axes: ManualAxes) -> NamedSharding:
    """Return how a stacked array lies."""
    return NamedSharding(axes.mesh, axes.spec)


# ---------------------------------------------------------------------- one function on every tile


def mapped(
    axes: ManualAxes,
    function: Callable[..., Any],
    arrays: Sequence[Any],
    stacked: Sequence[bool],
    key: Hashable | None,
) -> Any:
    """Run `function` on each device's own tiles.

    Args:
        axes: The manual axes.
        function: Takes tiles and returns tiles, in any nesting.
        arrays: Its arguments.
        stacked: Which of them are stacked; every device gets the others as they are.
        key: What tells `function` from others, to keep its compiled program. None keeps nothing.

    Returns:
        What `function` returns, stacked.
    """
    if active_trace() is not None or any(isinstance(a, jax.core.Tracer) for a in arrays):
        return _on_tiles(axes, function, stacked)(*arrays)
    if key is None:
        return jax.jit(_on_tiles(axes, function, stacked))(*arrays)
    key = (axes, tuple(stacked), key)
    program = _programs.get(key)
    if program is None:
        program = _programs[key] = jax.jit(_on_tiles(axes, function, stacked))
        if len(_programs) > _PROGRAMS_KEPT:
            _programs.popitem(last=False)
    return program(*arrays)


def _on_tiles(
    axes: ManualAxes, function: Callable[..., Any], stacked: Sequence[bool]
) -> Callable[..., Any]:
    ndim = axes.ndim

    def one_device(*arrays: Any) -> Any:
        tiles = [
            a.reshape(a.shape[ndim:]) if s else a for a, s in zip(arrays, stacked, strict=True)
        ]
        result = function(*tiles)
        return jax.tree.map(lambda r: jnp.expand_dims(r, tuple(range(ndim))), result)

    return mapped_over(
        axes,
        one_device,
        tuple(axes.spec if s else PartitionSpec() for s in stacked),
        axes.spec,
    )


def mapped_over(
    axes: ManualAxes, function: Callable[..., Any], in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """Return `function` under shard_map; as it is where all axes have size 1."""
    if not axes.flat_names:
        return function
    return jax.shard_map(
        function,
        mesh=axes.mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=frozenset(axes.flat_names),
        check_vma=False,
    )


# ---------------------------------------------------------------------- the border


@lru_cache(maxsize=4096)
def _crossing(region: ManualRegion, layout: Layout, root: Mesh, entering: bool) -> Any:
    factored = layout.factored()
    axes, names = _axes_on(region, factored.mesh, root)
    tiled = PartitionSpec(
        *(tuple(n for axis in dim for n in names[axis]) or None for dim in factored.dims)  # pyright: ignore
    )
    ndim = axes.ndim
    if entering:
        inside = lambda x: jnp.expand_dims(x, tuple(range(ndim)))  # noqa: E731
        function = mapped_over(axes, inside, tiled, axes.spec)
    else:
        outside = lambda x: x.reshape(x.shape[ndim:])  # noqa: E731
        function = mapped_over(axes, outside, axes.spec, tiled)
    return function, jax.jit(function)


def _crossed(array: Any, *crossing: Any) -> Any:
    plain, jitted = _crossing(*crossing)
    traced = active_trace() is not None or isinstance(array, jax.core.Tracer)
    return plain(array) if traced else jitted(array)


def enter(payload: JaxTensor, layout: Layout, region: ManualRegion, root: Mesh) -> JaxTensor:
    """Return each device's tile of `payload`; see ``Runtime.enter_manual``."""
    with x64():
        array = _crossed(payload.value(), region, layout, root, True)
        return wrapped(array, manual_axes(region, root))


def leave(manual: JaxTensor, layout: Layout, region: ManualRegion, root: Mesh) -> JaxTensor:
    """Return the payload whose tiles are `manual`; see ``Runtime.leave_manual``.

    Over a whole mesh the result is pinned to `layout`. Otherwise XLA may have sharded it over the
    other axes as well, and a pin would gather it.
    """
    axes = manual._storage.manual
    if axes is None or axes.region != region:
        raise ManualRegionError(
            f"A tensor of shape={tuple(manual.shape)} was to leave the manual region over the axes "
            f"{region.axes}. It is not in that region. Pass a tensor that enable_manual_sharding "
            "returned for the same mesh and axes."
        )
    with x64():
        array = _crossed(manual.raw(), region, layout, root, False)
    whole = prod(region.sizes) == root.size()
    pin = named_sharding(layout.op_sharding(root), root, layout.ndim) if whole else None
    return JaxTensor(Storage(array, sharding=pin))
