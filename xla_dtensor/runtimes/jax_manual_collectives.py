"""Collectives between the devices of a manual region, on stacked arrays.

Each one is JAX's own under ``jax.shard_map``. Two things are not left to JAX 0.10:

* ``ppermute`` numbers the members of a group in the order of the mesh, whatever the order in which
  the axes are named; the pairs are renumbered here.
* XLA:CPU aborts the process on a reduction of bfloat16 in a region over some axes only. On CPU
  the narrow floats are reduced in float32, which is what XLA does there in the other cases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from mesh_utils import Axis
from xla_dtensor.core import ManualRegion
from xla_dtensor.errors import ManualRegionError
from xla_dtensor.runtimes.jax_convert import x64
from xla_dtensor.runtimes.jax_manual import ManualAxes, mapped, wrapped
from xla_dtensor.runtimes.jax_placing import put_host_array
from xla_dtensor.runtimes.jax_tensor import JaxTensor
from xla_dtensor.runtimes.jax_trace import active_trace

__all__ = ["run"]

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
    known = manual._storage.manual
    if known is None or known.region != region:
        raise ManualRegionError(
            f"The collective {name!r} over the axes {tuple(axes)} was called on a tensor of shape="
            f"{tuple(manual.shape)} that is not in the manual region over {region.axes}. It has no "
            "tile per device there. Pass a tensor that enable_manual_sharding returned for it."
        )
    with x64():
        if name == "axis_index":
            return _axis_index(known, axes)
        names = tuple(n for axis in axes for n in known.names[region.axes.index(axis)])
        sizes = tuple(known.mesh.shape[n] for n in names)
        function = _COLLECTIVES[name](known, names, sizes, manual, **options)
        key = (name, names, tuple(sorted(options.items()))) if name != "permute" else None
        if name == "permute":
            key = (name, names, tuple(tuple(pair) for pair in options["pairs"]))
        return wrapped(mapped(known, function, [manual.raw()], [True], key), known)


def _axis_index(known: ManualAxes, axes: Sequence[Axis]) -> JaxTensor:
    region = known.region
    where = [region.axes.index(axis) for axis in axes]
    flat = np.arange(prod(region.sizes[i] for i in where), dtype=np.int64)
    index = flat.reshape([region.sizes[i] for i in where])
    index = index.transpose(np.argsort(where))
    shape = [size if i in where else 1 for i, size in enumerate(region.sizes)]
    stacked = np.array(np.broadcast_to(index.reshape(shape), region.sizes))
    if active_trace() is not None:
        return wrapped(jnp.asarray(stacked), known)
    return wrapped(put_host_array(stacked, NamedSharding(known.mesh, known.spec)), known)


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
    known: ManualAxes, names: tuple[str, ...], sizes: Any, manual: JaxTensor, *, op: str
) -> Tile:
    return _wide(lambda x: _REDUCTIONS[op](x, names)) if names else _copied


def _all_gather(
    known: ManualAxes, names: tuple[str, ...], sizes: Any, manual: JaxTensor, *, dim: int
) -> Tile:
    dim %= manual.ndim
    return (lambda x: lax.all_gather(x, names, axis=dim, tiled=True)) if names else _copied


def _reduce_scatter(
    known: ManualAxes, names: tuple[str, ...], sizes: Any, manual: JaxTensor, *, dim: int
) -> Tile:
    dim %= manual.ndim
    _check_divides("reduce_scatter", manual, dim, sizes)
    if not names:
        return _copied
    return _wide(lambda x: lax.psum_scatter(x, names, scatter_dimension=dim, tiled=True))


def _all_to_all(
    known: ManualAxes,
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
        return _copied
    return lambda x: lax.all_to_all(x, names, split_dim, concat_dim, tiled=True)


def _permute_tiles(
    known: ManualAxes,
    names: tuple[str, ...],
    sizes: Sequence[int],
    manual: JaxTensor,
    *,
    pairs: Sequence[tuple[int, int]],
) -> Tile:
    if not names:
        return _copied if pairs else jnp.zeros_like
    order = np.argsort([known.mesh.axis_names.index(n) for n in names])
    in_mesh_order = np.arange(prod(sizes)).reshape([sizes[i] for i in order])
    renumbered = in_mesh_order.transpose(np.argsort(order)).ravel().tolist()
    moves = [(renumbered[source], renumbered[to]) for source, to in pairs]
    ordered = tuple(names[i] for i in order)
    return lambda x: lax.ppermute(x, ordered, moves)


def _copied(x: Any) -> Any:
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
