"""Collectives between the devices of a manual region, on torch_xla.

all_reduce, all_gather and reduce_scatter are XLA's own ops: each has device groups, which are
partition ids here, as is everything in torch_xla's SPMD programs.

torch_xla 2.9 aborts on an all-to-all and on a permute of manual tensors. Both only move tiles, so
they are said to GSPMD: leave the region under one sharding, enter it again under another, and the
partitioner makes the one all-to-all or collective-permute that this takes.

    all_to_all over tp (n=4), split_dim=0, tile (8, 3):
      (1, 4, 2*3)   the blocks of split_dim
      leave as [tp, -, -]    (4, 4, 6)    dim 0: whose blocks, dim 1: for whom
      enter as [-, tp, -]    (4, 1, 6)    each member has its block of everyone

    permute over tp by (0, 1), (1, 0), (2, 2), (3, 3), tile (8, 3):
      leave with row i on device i       (4, 24)
      enter with rows 0, 1 on devices 1, 0

Devices that differ along other axes only do the same side by side: those axes shard one more dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache, reduce
from typing import Any

import torch

from mesh_utils import Axis, Mesh
from xla_dtensor.core import Layout, OpSharding
from xla_dtensor.errors import DistributeError, UnsupportedOpError
from xla_dtensor.runtimes.torch_xla_manual_nodes import entered, fresh, left
from xla_dtensor.runtimes.torch_xla_payload import functionalization, to_payload, to_plain
from xla_dtensor.runtimes.torch_xla_sharding import DEVICE, xlac

__all__ = ["run_collective"]

# torch_xla gives its own all-reduces and reduce-scatters this channel too.
_CHANNEL = 1
_REDUCTIONS = ("sum", "max", "min")


def run_collective(
    name: str,
    manual: torch.Tensor,
    mesh: Mesh,
    axes: tuple[Axis, ...],
    options: Mapping[str, Any],
) -> torch.Tensor:
    """Run one of the collectives of :meth:`Runtime.manual_collective`.

    Args:
        name: Which.
        manual: A manual payload that no program has computed yet.
        mesh: The region's mesh, over all devices.
        axes: The axes along which members are numbered.
        options: As the collective takes them.

    Returns:
        A payload whose value on each device is the collective's; unlabelled.

    Raises:
        DistributeError: Wrong options.
        UnsupportedOpError: No such collective.
    """
    collective = _COLLECTIVES.get(name)
    if collective is None:
        raise UnsupportedOpError(
            f"The collective name={name!r} was asked for in a manual region. The runtime "
            f"'torch_xla' does not know it. Pass one of {sorted(_COLLECTIVES)}."
        )
    with functionalization():
        return collective(manual, mesh, axes, **options)


def _all_reduce(manual: torch.Tensor, mesh: Mesh, axes: tuple[Axis, ...], op: str) -> torch.Tensor:
    if op not in _REDUCTIONS or (manual.is_complex() and op != "sum"):
        raise UnsupportedOpError(
            f"all_reduce with op={op!r} was asked for on a tensor of dtype={manual.dtype}. It is "
            f"none of {_REDUCTIONS}, or complex numbers have no such order. Pass one that the "
            "dtype has."
        )
    groups = _groups(mesh, axes)
    if manual.numel() == 0 or len(groups[0]) == 1:
        return manual.clone()
    return to_payload(xlac()._xla_spmd_all_reduce(op, to_plain(manual), 1.0, groups))


def _all_gather(manual: torch.Tensor, mesh: Mesh, axes: tuple[Axis, ...], dim: int) -> torch.Tensor:
    dim = _dim(manual, dim, "all_gather")
    groups = _groups(mesh, axes)
    n = len(groups[0])
    if n == 1:
        return manual.clone()
    if manual.numel() == 0:
        return fresh(_resized(manual.shape, dim, n * manual.shape[dim]), manual.dtype)
    tile = to_plain(manual)
    return to_payload(xlac()._xla_all_gather(tile, dim, n, groups, False, _CHANNEL, True))


def _reduce_scatter(
    manual: torch.Tensor, mesh: Mesh, axes: tuple[Axis, ...], dim: int
) -> torch.Tensor:
    groups = _groups(mesh, axes)
    n = len(groups[0])
    dim = _divided_dim(manual, dim, n, "reduce_scatter")
    if n == 1:
        return manual.clone()
    if manual.numel() == 0:
        return fresh(_resized(manual.shape, dim, manual.shape[dim] // n), manual.dtype)
    tile = to_plain(manual)
    return to_payload(xlac()._xla_spmd_reduce_scatter("sum", tile, 1.0, dim, n, groups))


def _all_to_all(
    manual: torch.Tensor, mesh: Mesh, axes: tuple[Axis, ...], split_dim: int, concat_dim: int
) -> torch.Tensor:
    n = len(_groups(mesh, axes)[0])
    split = _divided_dim(manual, split_dim, n, "all_to_all")
    concat = _dim(manual, concat_dim, "all_to_all")
    if n == 1:
        return manual.clone()
    if manual.numel() == 0:
        shape = _resized(manual.shape, split, manual.shape[split] // n)
        return fresh(_resized(shape, concat, n * shape[concat]), manual.dtype)
    blocks = manual.unflatten(split, (n, -1)).movedim(split, 0)
    others = tuple(axis for axis in mesh.axis_names if axis not in axes)
    before = _sharding(mesh, others, axes, (), ())
    after = _sharding(mesh, others, (), axes, ())
    stacked = left(blocks.reshape(1, 1, n, -1), before)
    received = entered(stacked, after).reshape(blocks.shape)
    return received.movedim(0, concat).flatten(concat, concat + 1)


def _permute(
    manual: torch.Tensor, mesh: Mesh, axes: tuple[Axis, ...], pairs: Sequence[tuple[int, int]]
) -> torch.Tensor:
    before, after, empty = _move(mesh, axes, tuple((of, to) for of, to in pairs))
    if manual.numel() == 0:
        return manual.clone()
    moved = manual.clone()
    if before != after:
        moved = entered(left(manual.reshape(1, -1), before), after).reshape(manual.shape)
    if not empty:
        return moved
    index = _axis_index(manual, mesh, axes)
    without_source = reduce(torch.logical_or, [index == member for member in empty])
    return torch.where(without_source, torch.zeros_like(moved), moved)


def _axis_index(manual: torch.Tensor, mesh: Mesh, axes: tuple[Axis, ...]) -> torch.Tensor:
    n = len(_groups(mesh, axes)[0])
    numbers = to_payload(torch.arange(n, device=DEVICE))
    return entered(numbers, _sharding(mesh, axes)).reshape(())


_COLLECTIVES = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "permute": _permute,
    "axis_index": _axis_index,
}


# For meshes of many devices: what follows takes time in proportion to them.


@lru_cache(1024)
def _groups(mesh: Mesh, axes: tuple[Axis, ...]) -> list[list[int]]:
    return mesh.groups(axes).tolist()


@lru_cache(1024)
def _move(
    mesh: Mesh, axes: tuple[Axis, ...], pairs: tuple[tuple[int, int], ...]
) -> tuple[OpSharding, OpSharding, list[int]]:
    """How a stack of all tiles lies before and after a permute; the members without a source."""
    groups = mesh.groups(axes)
    target, empty = _completed(pairs, groups.shape[1])
    before = OpSharding.from_assignment(groups.reshape(-1, 1))
    after = OpSharding.from_assignment(groups[:, target].reshape(-1, 1))
    return before, after, empty


@lru_cache(1024)
def _sharding(mesh: Mesh, *axes_per_dim: tuple[Axis, ...]) -> OpSharding:
    spec = tuple(axes or None for axes in axes_per_dim)
    root = Mesh.arange((mesh.size(),), ("device",))
    return Layout.from_partition_spec(spec, mesh).op_sharding(root)


def _completed(pairs: Sequence[tuple[int, int]], n: int) -> tuple[list[int], list[int]]:
    """Where each member sends to, those without a pair to anyone left; who had no source."""
    target = dict(pairs)
    sources, destinations = [source for source, _ in pairs], [to for _, to in pairs]
    in_range = all(0 <= member < n for member in (*sources, *destinations))
    if not in_range or len(target) < len(sources) or len(set(destinations)) < len(destinations):
        raise DistributeError(
            f"permute was asked for with pairs={list(pairs)} among {n} members. A member is a "
            f"number in 0..{n - 1}, sends to one at most and receives from one at most. Leave out "
            "the other pairs."
        )
    empty = [member for member in range(n) if member not in destinations]
    # To themselves where that is possible: it costs nothing.
    for member in [member for member in empty if member not in target]:
        target[member] = member
    spare = iter([member for member in empty if member not in target.values()])
    return [target[member] if member in target else next(spare) for member in range(n)], empty


def _dim(manual: torch.Tensor, dim: int, what: str) -> int:
    if not -manual.ndim <= dim < manual.ndim:
        raise DistributeError(
            f"{what} along dim={dim} was asked for on a manual tensor of "
            f"shape={tuple(manual.shape)}. It has {manual.ndim} dims. Pass one of them, or reshape "
            "the tensor."
        )
    return dim % manual.ndim


def _divided_dim(manual: torch.Tensor, dim: int, n: int, what: str) -> int:
    dim = _dim(manual, dim, what)
    if manual.shape[dim] % n:
        raise DistributeError(
            f"{what} over {n} devices along dim={dim} was asked for on a manual tensor of "
            f"shape={tuple(manual.shape)}. The dim of size={manual.shape[dim]} has no {n} equal "
            "blocks. Pad it first."
        )
    return dim


def _resized(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])
