"""Check the placements that a user passes, and make them canonical (no negative dims)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, cast

from torch.distributed.tensor import Placement, Replicate

from xla_dtensor.core import Layout
from xla_dtensor.device_mesh import DeviceMesh, mesh_text
from xla_dtensor.errors import DistributeError, ShardDimError

__all__ = ["checked_placements"]


def checked_placements(
    function: str,
    placements: Sequence[Any] | None,
    mesh: DeviceMesh,
    ndim: int,
    *,
    partial: bool,
) -> tuple[Placement, ...]:
    """Return `placements` as a tuple of torch placements with non-negative dims.

    Args:
        function: The public function that was called, for messages.
        placements: One per mesh axis, None for all Replicate, or alias placements: one entry per
            tensor dim, e.g. ``("dp", None)``.
        mesh: The mesh they refer to.
        ndim: The tensor's number of dims.
        partial: Whether Partial is allowed.

    Raises:
        DistributeError: Wrong number, kind or dim.
    """
    if placements is None or (ndim == 0 and isinstance(placements, tuple) and not placements):
        return (Replicate(),) * mesh.ndim
    if isinstance(placements, (str, Placement)) or not isinstance(placements, Sequence):
        raise DistributeError(
            f"{function} was called with placements={placements!r}. Placements are a sequence with "
            f"one entry per axis of the mesh {mesh_text(mesh.value)}. Pass a list, e.g. "
            f"[{', '.join(['Replicate()'] * mesh.ndim)}]."
        )
    if placements and not any(isinstance(p, Placement) for p in placements):
        layout = Layout.from_aliases(tuple(placements), mesh.value)
        _check_ndim(function, placements, ndim)
        placements = torch_placements(layout)
    if len(placements) != mesh.ndim:
        raise DistributeError(
            f"{function} was called with {len(placements)} placements={list(placements)} on the "
            f"mesh {mesh_text(mesh.value)}. There is one placement per mesh axis, {mesh.ndim} in "
            f"all, whatever the tensor's dims. Pass {mesh.ndim} placements; Replicate() leaves an "
            "axis out."
        )
    return tuple(
        _checked(function, placement, axis, mesh, ndim, partial)
        for axis, placement in enumerate(placements)
    )


def _check_ndim(function: str, aliases: Sequence[Any], ndim: int) -> None:
    if len(aliases) != ndim:
        raise DistributeError(
            f"{function} was called with alias placements={tuple(aliases)} for a tensor with "
            f"{ndim} dims. Aliases name the mesh axes of each tensor dim, so there is one entry "
            f"per dim. Pass {ndim} entries; None leaves a dim whole."
        )


def _checked(
    function: str, placement: Any, axis: int, mesh: DeviceMesh, ndim: int, partial: bool
) -> Placement:
    where = f"for axis {mesh.value.axis_names[axis]!r} of the mesh {mesh_text(mesh.value)}"
    if not isinstance(placement, Placement):
        raise DistributeError(
            f"{function} was called with {placement!r} {where}. Each entry has to be a placement, "
            "and aliases and placements cannot be mixed. Pass Shard(dim), Replicate() or "
            "Partial()."
        )
    if placement.is_partial() and not partial:
        raise DistributeError(
            f"{function} was called with {placement!r} {where}. Partial says that a reduction is "
            "still pending, which no annotation can bring about for a value that is already "
            "whole. Pass Shard(dim) or Replicate()."
        )
    dim = getattr(placement, "dim", None)
    if dim is None:
        return placement
    if not -ndim <= dim < ndim:
        raise ShardDimError(
            f"{function} was called with {placement!r} {where} for a tensor with {ndim} dims. The "
            f"dim {dim} does not exist. Pass a dim from {-ndim} to {ndim - 1}."
            if ndim
            else f"{function} was called with {placement!r} {where} for a tensor without dims. A "
            "scalar cannot be split. Pass Replicate()."
        )
    if dim >= 0:
        return placement
    kind = cast("Any", type(placement))
    factor = getattr(placement, "split_factor", None)
    return kind(dim + ndim) if factor is None else kind(dim + ndim, split_factor=factor)


@lru_cache(maxsize=4096)
def torch_placements(layout: Layout) -> tuple[Placement, ...]:
    """Return a layout's placements as torch's own objects."""
    from torch.distributed.tensor import Partial, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    from xla_dtensor.core import placements as records

    def convert(record: Any) -> Placement:
        if isinstance(record, records.StridedShard):
            return _StridedShard(record.dim, split_factor=record.split_factor)
        if isinstance(record, records.Shard):
            return Shard(record.dim)
        if isinstance(record, records.Partial):
            return Partial(record.reduce_op)
        return Replicate()

    return tuple(convert(record) for record in layout.to_placements())
