"""How the rows of a batch are cut, whatever its tensors' other dims: the first dim alone."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import Placement, Replicate

from xla_dtensor.core import Layout
from xla_dtensor.dtensor.mesh import DeviceMesh
from xla_dtensor.dtensor.redistribute import checked_placements, torch_placements
from xla_dtensor.hosts.data.nested import said_placements
from xla_dtensor.hosts.data.part import ProcessPart, part_of
from xla_dtensor.hosts.data.sharding_spec import placements_for

__all__ = ["rows_layout", "rows_part", "rows_placements"]


def rows_placements(asked: Any, mesh: DeviceMesh) -> tuple[Placement, ...]:
    """Return the placements of a tensor of one dim whose elements lie as the rows of a batch.

    Args:
        asked: Placements of the batch; of a structure the first one counts.
        mesh: The mesh.
    """
    said = said_placements(asked)
    while not said.is_said:
        children = said.value.values() if hasattr(said.value, "values") else said.value
        said = said_placements(next(iter(children), None))
    value = said.value
    if hasattr(value, "partition_spec"):
        value = placements_for(value, len(value.partition_spec), ())
    if not isinstance(value, (list, tuple)):
        return checked_placements("ShardedLoader", value, mesh, 1, partial=False)
    if value and not any(isinstance(p, Placement) for p in value):
        value = torch_placements(Layout.from_aliases(tuple(value), mesh.value))
    rows = [p if getattr(p, "dim", None) == 0 else Replicate() for p in value]
    return checked_placements("ShardedLoader", rows, mesh, 1, partial=False)


def rows_layout(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Layout:
    """Return the layout of a tensor of one dim."""
    return Layout.from_placements(placements, 1, mesh.value)


def rows_part(
    rows: int, mesh: DeviceMesh, placements: tuple[Placement, ...], process: int | None = None
) -> ProcessPart:
    """Return which of `rows` rows a process holds; this one when None."""
    return part_of((rows,), rows_layout(mesh, placements), process)
