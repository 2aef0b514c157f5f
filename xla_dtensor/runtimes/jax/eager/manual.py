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
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from math import prod
from typing import Any, NoReturn

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from mesh_utils import Axis, Mesh
from xla_dtensor.core import Layout, ManualRegion
from xla_dtensor.core.errors import CompileError, ManualRegionError, UnsupportedOpError
from xla_dtensor.runtimes.jax.arrays.sharding import named_sharding, put_host_array
from xla_dtensor.runtimes.jax.arrays.storage import Storage
from xla_dtensor.runtimes.jax.arrays.trace import active_trace, host_input
from xla_dtensor.runtimes.jax.arrays.values import in_dtype, jax_dtype, numpy_from_torch, x64
from xla_dtensor.runtimes.jax.eager.scalar import unwrap_number
from xla_dtensor.runtimes.jax.eager.tensor import JaxTensor, ViewStep, read_through, write_through
from xla_dtensor.runtimes.jax.lower import random
from xla_dtensor.runtimes.jax.lower.index import cut, write_index, write_slice
from xla_dtensor.runtimes.jax.lower.table import Lowering
from xla_dtensor.runtimes.nested import leaves, map_nested
from xla_dtensor.runtimes.op_meta import Meta, of_tensor, output_meta, raise_torchs_error

__all__ = [
    "ManualAxes",
    "axes_of",
    "enter",
    "leave",
    "read_steps",
    "refuse_value",
    "run",
    "run_lowering",
    "stacked_sharding",
    "view_rule",
    "wrapped",
    "write",
]


# --------------------------------------------------------------- Manual regions on the JAX runtime

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
        return tuple([name for names in self.names for name in names])

    @property
    def spec(self) -> PartitionSpec:
        """How a stacked array lies."""
        return PartitionSpec(*[names or None for names in self.names])


@lru_cache(maxsize=1024)
def manual_axes(region: ManualRegion, root: Mesh) -> ManualAxes:
    """Return the names that a region's axes have in JAX programs over `root`."""
    return _axes_on(region, region.mesh, root)[0]


def _axes_on(
    region: ManualRegion, mesh: Mesh, root: Mesh
) -> tuple[ManualAxes, dict[Axis, tuple[str, ...]]]:
    """Return the region's axes and the names of each axis of `mesh`, a factored `region.mesh`."""
    axis_per_dim = Layout(mesh, tuple([(axis,) for axis in mesh.axis_names]))
    sharding = named_sharding(axis_per_dim.op_sharding(root), root, mesh.ndim)
    entries = [(e,) if isinstance(e, str) else tuple(e or ()) for e in sharding.spec]
    names: dict[Axis, tuple[str, ...]] = dict(zip(mesh.axis_names, entries, strict=True))
    # A factored mesh has several axes, one after the other, where the region's mesh has one.
    pieces = iter(zip(mesh.axis_names, mesh.mesh_shape, strict=True))
    region_names: dict[Axis, tuple[str, ...]] = {}
    for axis, size in zip(region.mesh.axis_names, region.mesh.mesh_shape, strict=True):
        piece, covered = next(pieces)
        region_names[axis] = names[piece]
        while covered < size:
            piece, piece_size = next(pieces)
            region_names[axis] += names[piece]
            covered *= piece_size
    jax_mesh: Any = sharding.mesh
    return ManualAxes(region, jax_mesh, tuple([region_names[axis] for axis in region.axes])), names


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


# ----------------------------------------------------------------------- One function on every tile


def run_on_tiles(
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
        return _tile_program(axes, function, stacked)(*arrays)
    if key is None:
        return jax.jit(_tile_program(axes, function, stacked))(*arrays)
    key = (axes, tuple(stacked), key)
    program = _programs.get(key)
    if program is None:
        program = _programs[key] = jax.jit(_tile_program(axes, function, stacked))
        if len(_programs) > _PROGRAMS_KEPT:
            _programs.popitem(last=False)
    return program(*arrays)


def _tile_program(
    axes: ManualAxes, function: Callable[..., Any], stacked: Sequence[bool]
) -> Callable[..., Any]:
    ndim = axes.ndim

    def one_device(*arrays: Any) -> Any:
        tiles = [
            a.reshape(a.shape[ndim:]) if s else a for a, s in zip(arrays, stacked, strict=True)
        ]
        return jax.tree.map(lambda x: jnp.expand_dims(x, tuple(range(ndim))), function(*tiles))

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
def _border_programs(region: ManualRegion, layout: Layout, root: Mesh, entering: bool) -> Any:
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


def _cross(array: Any, *crossing: Any) -> Any:
    plain, jitted = _border_programs(*crossing)
    traced = active_trace() is not None or isinstance(array, jax.core.Tracer)
    return plain(array) if traced else jitted(array)


def enter(payload: JaxTensor, layout: Layout, region: ManualRegion, root: Mesh) -> JaxTensor:
    """Return each device's tile of `payload`; see ``Runtime.enter_manual``."""
    with x64():
        array = _cross(payload.value(), region, layout, root, True)
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
        array = _cross(manual.raw(), region, layout, root, False)
    pin = None
    if prod(region.sizes) == root.size():
        pin = named_sharding(layout.op_sharding(root), root, layout.ndim)
    return JaxTensor(Storage(array, sharding=pin))


# --------------------------- Collectives between the devices of a manual region, on stacked arrays
#
# Each one is JAX's own under ``jax.shard_map``. Two things are not left to JAX 0.10:
#
# * ``ppermute`` numbers the members of a group in the order of the mesh, whatever the order in
#   which the axes are named; the pairs are renumbered here.
# * XLA:CPU aborts the process on a reduction of bfloat16 in a region over some axes only. On CPU
#   the narrow floats are reduced in float32, which is what XLA does there in the other cases.

_REDUCTIONS = {"sum": lax.psum, "max": lax.pmax, "min": lax.pmin}


def run(
    name: str,
    manual: JaxTensor,
    region: ManualRegion,
    axes: Sequence[Axis],
    options: Mapping[str, Any],
) -> JaxTensor:
    """Run one collective; see ``Runtime.manual_collective``.

    Raises:
        ManualRegionError: `manual` is not in the region, or a dim does not divide.
    """
    region_axes = manual._storage.manual
    if region_axes is None or region_axes.region != region:
        raise ManualRegionError(
            f"The collective {name!r} over the axes {tuple(axes)} was called on a tensor of shape="
            f"{tuple(manual.shape)} that is not in the manual region over {region.axes}. It has no "
            "tile per device there. Pass a tensor that enable_manual_sharding returned for it."
        )
    with x64():
        if name == "axis_index":
            return _axis_index(region_axes, axes)
        names = tuple(n for axis in axes for n in region_axes.names[region.axes.index(axis)])
        sizes = tuple(region_axes.mesh.shape[n] for n in names)
        function = _COLLECTIVES[name](region_axes, names, sizes, manual, **options)
        if name == "permute":
            key = (name, names, tuple(tuple(pair) for pair in options["pairs"]))
        else:
            key = (name, names, tuple(sorted(options.items())))
        return wrapped(
            run_on_tiles(region_axes, function, [manual.raw()], [True], key), region_axes
        )


def _axis_index(region_axes: ManualAxes, axes: Sequence[Axis]) -> JaxTensor:
    region = region_axes.region
    dims = [region.axes.index(axis) for axis in axes]
    flat = np.arange(prod(region.sizes[dim] for dim in dims), dtype=np.int64)
    index = flat.reshape([region.sizes[dim] for dim in dims])
    index = index.transpose(np.argsort(dims))
    shape = [size if dim in dims else 1 for dim, size in enumerate(region.sizes)]
    stacked = np.array(np.broadcast_to(index.reshape(shape), region.sizes))
    if active_trace() is not None:
        return wrapped(jnp.asarray(stacked), region_axes)
    return wrapped(put_host_array(stacked, stacked_sharding(region_axes)), region_axes)


Tile = Callable[[Any], Any]


def _wide(function: Tile) -> Tile:
    """Reduce narrow floats in float32 on CPU."""

    def widened(x: Any) -> Any:
        narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
        if narrow and jax.default_backend() == "cpu":
            return function(x.astype(jnp.float32)).astype(x.dtype)
        return function(x)

    return widened


def _all_reduce(
    region_axes: ManualAxes, names: tuple[str, ...], sizes: Any, manual: JaxTensor, *, op: str
) -> Tile:
    return _wide(lambda x: _REDUCTIONS[op](x, names)) if names else _copy


def _all_gather(
    region_axes: ManualAxes, names: tuple[str, ...], sizes: Any, manual: JaxTensor, *, dim: int
) -> Tile:
    dim %= manual.ndim
    return (lambda x: lax.all_gather(x, names, axis=dim, tiled=True)) if names else _copy


def _reduce_scatter(
    region_axes: ManualAxes, names: tuple[str, ...], sizes: Any, manual: JaxTensor, *, dim: int
) -> Tile:
    dim %= manual.ndim
    _check_divides("reduce_scatter", manual, dim, sizes)
    if not names:
        return _copy
    return _wide(lambda x: lax.psum_scatter(x, names, scatter_dimension=dim, tiled=True))


def _all_to_all(
    region_axes: ManualAxes,
    names: tuple[str, ...],
    sizes: Any,
    manual: JaxTensor,
    *,
    split_dim: int,
    concat_dim: int,
) -> Tile:
    split_dim, concat_dim = split_dim % manual.ndim, concat_dim % manual.ndim
    _check_divides("all_to_all", manual, split_dim, sizes)
    if not names:
        return _copy
    return lambda x: lax.all_to_all(x, names, split_dim, concat_dim, tiled=True)


def _permute_tiles(
    region_axes: ManualAxes,
    names: tuple[str, ...],
    sizes: Sequence[int],
    manual: JaxTensor,
    *,
    pairs: Sequence[tuple[int, int]],
) -> Tile:
    if not names:
        return _copy if pairs else jnp.zeros_like
    order = np.argsort([region_axes.mesh.axis_names.index(n) for n in names])
    in_mesh_order = np.arange(prod(sizes)).reshape([sizes[i] for i in order])
    renumbered = in_mesh_order.transpose(np.argsort(order)).ravel().tolist()
    renumbered_pairs = [(renumbered[source], renumbered[target]) for source, target in pairs]
    ordered = tuple(names[i] for i in order)
    return lambda x: lax.ppermute(x, ordered, renumbered_pairs)


def _copy(x: Any) -> Any:
    return jnp.array(x, copy=True)


def _check_divides(name: str, manual: JaxTensor, dim: int, sizes: Sequence[int]) -> None:
    if manual.shape[dim] % prod(sizes):
        raise ManualRegionError(
            f"{name} over a group of {prod(sizes)} devices was called on a manual tensor of shape="
            f"{tuple(manual.shape)} with dim={dim}. The dim has to be cut into one block per "
            f"device, all alike. Pad it to a multiple of {prod(sizes)}."
        )


_COLLECTIVES: dict[str, Callable[..., Tile]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "permute": _permute_tiles,
}


# --------------------------------------------------------------------------- Ops on manual tensors
#
# Lowerings, views and writes, each run on every device's own tile.
#
# The arguments of an op are taken apart into arrays, which the program is given, and all else,
# which is a constant in it and part of the key by which it is kept.

aten = torch.ops.aten
# Ops whose Python floats are inputs of the kept program, not constants in it: optimizers call these
# with another number in each step. Their lowerings treat a number and a 0-dim array alike.
_FLOATS_VARY = frozenset(
    {
        aten.add.Tensor,
        aten.add.Scalar,
        aten.sub.Tensor,
        aten.sub.Scalar,
        aten.mul.Tensor,
        aten.mul.Scalar,
        aten.div.Tensor,
        aten.div.Scalar,
        aten.addcmul.default,
        aten.addcdiv.default,
        aten.lerp.Scalar,
    }
)


class _Slot:
    """Stands for the n-th array among an op's arguments."""

    def __init__(self, number: int) -> None:
        self.number = number


class _Arguments:
    """An op's arguments, taken apart into arrays and all else."""

    def __init__(self, func: Any, axes: ManualAxes, args: Any, kwargs: Any) -> None:
        self.arrays: list[Any] = []
        self.stacked: list[bool] = []
        self._func, self._axes = func, axes
        self._floats_vary = func in _FLOATS_VARY and active_trace() is None
        self.structure = map_nested(self._slot_of, (tuple(args), dict(kwargs)))

    def add(self, array: Any, stacked: bool) -> _Slot:
        self.arrays.append(array)
        self.stacked.append(stacked)
        return _Slot(len(self.arrays) - 1)

    def _slot_of(self, argument: Any) -> Any:
        """Return the slot of a tensor, or of a number that varies; anything else as it is."""
        if isinstance(argument, JaxTensor):
            if argument._storage.manual != self._axes:
                _refuse_mixing(self._func, self._axes, argument)
            return self.add(argument.raw(), True)
        if isinstance(argument, torch.Tensor):
            stand_in = host_input(argument)
            host = np.array(numpy_from_torch(argument)) if stand_in is None else stand_in.value()
            return self.add(host, False)
        number = unwrap_number(argument)
        if isinstance(number, jax.Array) or (isinstance(number, float) and self._floats_vary):
            return self.add(number, False)
        return number

    def filled(self, arrays: Sequence[Any]) -> Any:
        return map_nested(lambda v: arrays[v.number] if isinstance(v, _Slot) else v, self.structure)


def _refuse_mixing(func: Any, axes: ManualAxes, tensor: JaxTensor) -> NoReturn:
    kind = "global" if tensor._storage.manual is None else "in another region"
    raise ManualRegionError(
        f"The op {func} was called on a manual tensor over the axes {axes.region.axes} and on a "
        f"tensor of shape={tuple(tensor.shape)} that is {kind}. The one has a value per device, "
        "the other has not. Call enable_manual_sharding on the other one, or "
        "disable_manual_sharding on this one."
    )


def run_lowering(
    axes: ManualAxes, func: Any, lowering: Lowering, args: Any, kwargs: Any, meta: Any
) -> Any:
    """Run a functional op's lowering on every device's tiles.

    Args:
        axes: The manual axes of the tensors among the arguments.
        func: The op.
        lowering: Its lowering, a function on arrays.
        args: Its arguments: manual payloads, host tensors, anything else.
        kwargs: Its keyword arguments.
        meta: What torch says of the result, for one tile.

    Returns:
        The lowering's result, with stacked arrays.

    Raises:
        ManualRegionError: A tensor among the arguments is not of this region.
        UnsupportedOpError: The shape of the result depends on values.
    """
    try:
        return _run_lowering(axes, func, lowering, args, kwargs, meta)
    except (jax.errors.ConcretizationTypeError, jax.errors.NonConcreteBooleanIndexError):
        _refuse_values(func)
    except CompileError:
        if active_trace() is not None:
            raise
        _refuse_values(func)


def _refuse_values(func: Any) -> NoReturn:
    raise UnsupportedOpError(
        f"The op {func} was called on a manual tensor. The shape of its result depends on values, "
        "which differ between the devices. Use an op with a fixed shape, such as torch.where, or "
        "call disable_manual_sharding first."
    ) from None


def _run_lowering(
    axes: ManualAxes, func: Any, lowering: Lowering, args: Any, kwargs: Any, meta: Any
) -> Any:
    arguments = _Arguments(func, axes, args, kwargs)
    options = {"meta": meta} if lowering.wants_meta else {}
    draw = None
    if random.draws(lowering):
        ordinal = np.arange(prod(axes.region.sizes)).reshape(axes.region.sizes)
        draw = (arguments.add(random.next_key_data(), False), arguments.add(ordinal, True))

    def on_tile(*arrays: Any) -> Any:
        tile_args, tile_kwargs = arguments.filled(arrays)
        if draw is None:
            outputs = lowering(*tile_args, **tile_kwargs, **options)
        else:
            with random.drawing_from(*(arrays[slot.number] for slot in draw)):
                outputs = lowering(*tile_args, **tile_kwargs, **options)
        return jax.tree.map(jnp.asarray, outputs)

    try:
        precision = torch.get_float32_matmul_precision()
        key = (func, _frozen(arguments.structure), _frozen(options), precision)
        hash(key)
    except TypeError:
        key = None
    # The program that is kept holds `arguments`: its slots and constants, but no arrays.
    arrays, arguments.arrays = arguments.arrays, []
    return run_on_tiles(axes, on_tile, arrays, arguments.stacked, key)


def _frozen(structure: Any) -> Hashable:
    """Return a hashable form in which 1, 1.0 and True differ."""
    kind = type(structure)
    if kind in (tuple, list):
        return (kind, *map(_frozen, structure))
    if kind is dict:
        return (kind, *((k, _frozen(v)) for k, v in structure.items()))
    return (kind, structure.number if kind is _Slot else structure)


# ---------------------------------------------------------------------- views and writes


def with_key(
    step: ViewStep | None, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], number: int
) -> ViewStep | None:
    """Return a view step of a manual tensor with the key by which its program is kept."""
    if step is None or any(isinstance(v, torch.SymInt) for v in leaves((tuple(args), kwargs))):
        return step
    options = _frozen((tuple(args[1:]), dict(kwargs)))
    return replace(step, key=(func, number, of_tensor(args[0]), options))


def _key_of_steps(steps: Sequence[ViewStep]) -> Any:
    keys = tuple(step.key for step in steps)
    return None if None in keys else keys


def read_steps(axes: ManualAxes, steps: Sequence[ViewStep], base: jax.Array) -> jax.Array:
    """Return what a view of a manual tensor shows, stacked."""
    keys = _key_of_steps(steps)
    key = None if keys is None else ("read", keys)
    return run_on_tiles(axes, lambda tile: read_through(steps, tile), [base], [True], key)


def write(target: torch.Tensor, source: torch.Tensor) -> None:
    """Give `target` the values of `source` on each device; at least one of them is manual."""
    axes = axes_of((target, source))
    assert axes is not None
    if not isinstance(target, JaxTensor):
        raise ManualRegionError(
            f"A manual tensor over the axes {axes.region.axes} was written to a CPU tensor of "
            f"shape={tuple(target.shape)}. Each device has a value of its own, and the CPU tensor "
            "has room for one. Call disable_manual_sharding first, or write to a manual tensor."
        )
    arguments = _Arguments(aten.copy_.default, axes, (target, source), {})
    steps, shape, dtype = target._steps, tuple(target.shape), jax_dtype(target.dtype)
    keys = _key_of_steps(steps)

    def on_tile(base: Any, new: Any) -> Any:
        return write_through(steps, base, jnp.broadcast_to(in_dtype(new, dtype), shape))

    # `arguments` holds what the target shows; below its views lies the whole tile.
    arrays = [target._storage.read(), arguments.arrays[1]]
    key = None if keys is None else ("write", keys, shape, dtype)
    target._storage.write(run_on_tiles(axes, on_tile, arrays, arguments.stacked, key))


# ---------------------------------------------------------------------------------------- View ops
#
# A new JaxTensor over the same storage, one more step in its chain.
#
# Each rule gives the two halves of a :class:`~xla_dtensor.runtimes.jax.eager.tensor.ViewStep`. The
# common views have exact ones that keep sharded dims apart. Everything else that torch calls a view
# (diagonal, unfold, as_strided, ...) goes by positions: torch itself applies the view to an integer
# tensor of positions on the CPU, and reading and writing index the flat value by the answer.

Array = jax.Array


def _permuted(perm: Sequence[int]) -> ViewStep:
    inverse = tuple(int(i) for i in np.argsort(perm))
    return ViewStep(
        lambda base: jnp.transpose(base, tuple(perm)), lambda base, new: jnp.transpose(new, inverse)
    )


def _identity(x: JaxTensor, meta: Meta, *_: Any, **__: Any) -> ViewStep | None:
    return None


def _view(x: JaxTensor, meta: Meta, *_: Any, **__: Any) -> ViewStep:
    return ViewStep(
        lambda base: base.reshape(meta.shape), lambda base, new: new.reshape(base.shape)
    )


def _t(x: JaxTensor, meta: Meta) -> ViewStep | None:
    return _permuted((1, 0)) if x.ndim == 2 else None


def _transpose(x: JaxTensor, meta: Meta, dim0: int, dim1: int) -> ViewStep | None:
    if x.ndim == 0:
        return None
    perm = list(range(x.ndim))
    perm[dim0], perm[dim1] = perm[dim1], perm[dim0]
    return _permuted(perm)


def _permute(x: JaxTensor, meta: Meta, dims: Sequence[int]) -> ViewStep:
    return _permuted([d % x.ndim for d in dims])


def _expand(x: JaxTensor, meta: Meta, *_: Any, **__: Any) -> ViewStep:
    shape = (1,) * (len(meta.shape) - x.ndim) + tuple(x.shape)
    sizes = zip(shape, meta.shape, strict=True)
    repeated = [dim for dim, (size, expanded) in enumerate(sizes) if size != expanded]

    def write(base: Array, new: Array) -> Array:
        if not repeated:
            return new.reshape(base.shape)
        # Elements that share one place have the value of those that were written to. If several
        # were, they are alike: `refuse_overlap` has let nothing else through.
        old = jnp.broadcast_to(base, new.shape)
        changed = ~((new == old) | ((new != new) & (old != old)))
        for dim in repeated:
            first = jnp.argmax(changed, axis=dim, keepdims=True)
            new = jnp.take_along_axis(new, first, axis=dim)
            changed = jnp.any(changed, axis=dim, keepdims=True)
        return new.reshape(base.shape)

    return ViewStep(lambda base: jnp.broadcast_to(base, meta.shape), write)


def _slice_step(dim: int, start: int, stop: int, step: int = 1) -> ViewStep:
    return ViewStep(
        lambda base: cut(base, dim, start, stop, step),
        lambda base, new: write_slice(base, new, dim, start, step),
    )


def _select(x: JaxTensor, meta: Meta, dim: int, index: Any) -> ViewStep:
    dim %= max(x.ndim, 1)
    number = unwrap_number(index)
    if not isinstance(number, int):
        return ViewStep(
            lambda base: jax.lax.dynamic_index_in_dim(base, number, dim, keepdims=False),
            lambda base, new: write_index(base, new, dim, number),
        )
    number %= x.shape[dim]
    return ViewStep(
        lambda base: jax.lax.squeeze(cut(base, dim, number, number + 1), [dim]),
        lambda base, new: write_index(base, new, dim, number),
    )


def _slice(
    x: JaxTensor,
    meta: Meta,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> ViewStep:
    dim %= max(x.ndim, 1)
    first, last, _ = slice(start, end, step).indices(x.shape[dim])
    return _slice_step(dim, first, max(first, last), step)


def _split_steps(x: JaxTensor, sizes: Sequence[int], dim: int) -> list[ViewStep]:
    ends = np.cumsum(sizes).tolist()
    return [
        _slice_step(dim % max(x.ndim, 1), end - size, end)
        for size, end in zip(sizes, ends, strict=True)
    ]


def _split(x: JaxTensor, metas: Any, size: int, dim: int = 0) -> list[ViewStep]:
    return _split_steps(x, [m.shape[dim] for m in metas], dim)


def _split_with_sizes(x: JaxTensor, metas: Any, sizes: Any, dim: int = 0) -> list[ViewStep]:
    return _split_steps(x, list(sizes), dim)


def _unbind(x: JaxTensor, metas: Any, dim: int = 0) -> list[ViewStep]:
    return [_select(x, m, dim, i) for i, m in enumerate(metas)]


def _conj(x: JaxTensor, meta: Meta) -> ViewStep:
    return ViewStep(jnp.conj, lambda base, new: jnp.conj(new))


def _neg_view(x: JaxTensor, meta: Meta) -> ViewStep:
    return ViewStep(jnp.negative, lambda base, new: -new)


def _real_pairs(numbers: Array) -> Array:
    return jnp.stack([numbers.real, numbers.imag], axis=-1)


def _complex_numbers(pairs: Array) -> Array:
    return jax.lax.complex(pairs[..., 0], pairs[..., 1])


def _view_as_real(x: JaxTensor, meta: Meta) -> ViewStep:
    return ViewStep(_real_pairs, lambda base, new: _complex_numbers(new))


def _view_as_complex(x: JaxTensor, meta: Meta) -> ViewStep:
    return ViewStep(_complex_numbers, lambda base, new: _real_pairs(new))


def _view_dtype(x: JaxTensor, meta: Meta, dtype: torch.dtype) -> ViewStep:
    old, viewed = jax_dtype(x.dtype), jax_dtype(dtype)

    def write(base: Array, new: Array) -> Array:
        if dtype != torch.bool or x.dtype == torch.bool:
            return _bits_as(new, old, base.shape)
        # A bool is one bit of eight: where it is the same, the others stay.
        return jnp.where(new == _bits_as(base, viewed, meta.shape), base, new.astype(old))

    if dtype == torch.bool and x.dtype.itemsize > 1:
        raise UnsupportedOpError(
            f"A tensor of {x.dtype} was viewed as torch.bool. A bool of XLA is true or false, no "
            "byte of a larger number. View it as torch.uint8 and compare that with 0."
        )
    return ViewStep(lambda base: _bits_as(base, viewed, meta.shape), write)


def _bits_as(elements: Array, dtype: Any, shape: Sequence[int]) -> Array:
    """Return the elements' bits as elements of another dtype, along the last dim as in memory."""
    if not elements.size:
        return jnp.zeros(shape, dtype)
    rows, part, kind = elements.shape[:-1], np.dtype(dtype), np.dtype(dtype).kind
    if jnp.iscomplexobj(elements):
        elements = _real_pairs(elements).reshape(*rows, -1)
    elif elements.dtype.kind == "b":
        elements = elements.astype(np.uint8)
    if kind in "cb":
        part = np.dtype(np.uint8 if kind == "b" else f"f{part.itemsize // 2}")
    if part.itemsize > elements.dtype.itemsize:
        elements = elements.reshape(*rows, -1, part.itemsize // elements.dtype.itemsize)
    bits = jax.lax.bitcast_convert_type(elements, part)
    if kind == "c":
        bits = _complex_numbers(bits.reshape(*rows, -1, 2))
    elif kind == "b":
        bits = bits != 0
    return bits.reshape(tuple(shape))


_RULES: dict[Any, Callable[..., Any]] = {
    aten._conj.default: _conj,
    aten._neg_view.default: _neg_view,
    aten.view_as_real.default: _view_as_real,
    aten.view_as_complex.default: _view_as_complex,
    aten.alias.default: _identity,
    aten.detach.default: _identity,
    aten.lift_fresh.default: _identity,
    aten.view.default: _view,
    aten.view.dtype: _view_dtype,
    aten.unsqueeze.default: _view,
    aten.squeeze.default: _view,
    aten.squeeze.dim: _view,
    aten.squeeze.dims: _view,
    aten.t.default: _t,
    aten.transpose.int: _transpose,
    aten.permute.default: _permute,
    aten.expand.default: _expand,
    aten.select.int: _select,
    aten.slice.Tensor: _slice,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split_with_sizes,
    aten.unbind.int: _unbind,
}


@cache
def view_rule(func: Any) -> Callable[[Any, Sequence[Any], Mapping[str, Any]], Any] | None:
    """Return the function that runs `func` as a view, or None when it is no view op."""
    if func in _RULES:
        return _run_rule
    schema = func._schema
    if schema.is_mutable or schema.name in ("aten::reshape", "aten::contiguous"):
        return None
    # A view's first argument and its results share memory, and it is no composite of other ops.
    is_view = (
        len(schema.arguments) > 0
        and schema.arguments[0].alias_info is not None
        and len(schema.returns) > 0
        and all(output.alias_info is not None for output in schema.returns)
        and not torch._C._dispatch_has_kernel_for_dispatch_key(
            func.name(), torch._C.DispatchKey.CompositeImplicitAutograd
        )
    )
    return _run_by_positions if is_view else None


def _run_rule(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    meta = output_meta(func, args, kwargs)
    if meta is None:
        raise_torchs_error(func, args, kwargs)
    steps = _RULES[func](args[0], meta, *args[1:], **kwargs)
    return _views(func, args, kwargs, steps, meta)


def _views(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], steps: Any, meta: Any) -> Any:
    """Return a tensor one step further, or a list of them where `steps` is one."""
    x, has_list = args[0], isinstance(steps, list)
    steps, metas = (steps, meta) if has_list else ([steps], [meta])
    if x._storage.manual is not None:
        steps = [with_key(step, func, args, kwargs, i) for i, step in enumerate(steps)]
    views = [
        JaxTensor(
            x._storage,
            x._steps if step is None else (*x._steps, step),
            shape=view.shape,
            stride=view.stride,
            storage_offset=view.storage_offset,
            dtype=view.dtype,
        )
        for step, view in zip(steps, metas, strict=True)
    ]
    return views if has_list else views[0]


def _run_by_positions(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    x = args[0]
    meta = output_meta(func, args, kwargs)
    if func is aten.as_strided.default:
        positions = _strided_positions(x, *args[1:], **kwargs)
    else:
        positions = func(torch.arange(x.numel()).reshape(x.shape), *args[1:], **kwargs)
    if isinstance(positions, (list, tuple)):
        steps: Any = [_by_positions(p) for p in positions]
    else:
        steps = _by_positions(positions)
    return _views(func, args, kwargs, steps, meta)


def _strided_positions(
    x: JaxTensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> torch.Tensor:
    """Positions in `x` of the elements of ``x.as_strided``, with x laid out as torch believes."""
    start = 0 if storage_offset is None else storage_offset - x.storage_offset()
    last = start + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    extent = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    memory = np.full(extent if x.numel() else 0, -1)
    places = sum(
        np.arange(n).reshape((-1,) + (1,) * (x.ndim - d - 1)) * s
        for d, (n, s) in enumerate(zip(x.shape, x.stride(), strict=True))
    )
    memory[places] = np.arange(x.numel()).reshape(tuple(x.shape))
    if 0 in size:
        return torch.empty(tuple(size), dtype=torch.int64)
    positions = None
    is_known = storage_offset is None or not x._storage.is_part
    if is_known and start >= 0 and last < memory.size:
        positions = torch.from_numpy(memory).as_strided(tuple(size), tuple(stride), start)
    if positions is None or bool((positions < 0).any()):
        raise UnsupportedOpError(
            f"as_strided was called with size={tuple(size)}, stride={tuple(stride)}, "
            f"storage_offset={storage_offset} on a tensor of shape={tuple(x.shape)}, "
            f"stride={x.stride()}. It reaches memory outside that tensor, and a tensor of the JAX "
            "runtime is no memory. Take the view from the tensor that holds those elements."
        )
    return positions


def _by_positions(positions: torch.Tensor) -> ViewStep:
    index = positions.contiguous().numpy()
    return ViewStep(
        lambda base: base.ravel()[index],
        lambda base, new: base.ravel().at[index].set(new).reshape(base.shape),
    )
