"""Does a tensor lie where it was asked to? What XLA reports, against the placements.

Two independent readings are compared with what the placements mean: the sharding that the runtime
has recorded for the tensor, and the size of the buffer that each device really holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.distributed.tensor import Placement

from mesh_utils import Mesh
from xla_dtensor.core import Layout, OpSharding, local_shape

if TYPE_CHECKING:
    from xla_dtensor import DTensor

__all__ = ["Audit", "audit", "render_audits"]


@dataclass(frozen=True)
class Audit:
    """What was asked of one tensor and what was found.

    Args:
        name: Its name.
        shape: Its global shape.
        placements: What was asked, one placement per mesh axis.
        xla_sharding: What XLA reports, as text.
        device_bytes: Most bytes that one device holds, padding included.
        total_bytes: Bytes of the whole tensor.
        mesh: The mesh it lies on.
        problems: What is not as asked, one sentence each.
    """

    name: str
    shape: tuple[int, ...]
    placements: tuple[Placement, ...]
    xla_sharding: str
    device_bytes: int
    total_bytes: int
    mesh: Mesh
    problems: tuple[str, ...]


def audit(name: str, tensor: DTensor, asked: Sequence[Placement]) -> Audit:
    """Compare how `tensor` lies with the placements `asked`.

    Args:
        name: Name for the report.
        tensor: The tensor.
        asked: One placement per mesh axis.

    Returns:
        The findings; nothing is raised when they differ.
    """
    mesh = tensor.mesh_layout.mesh
    # From what was asked, not from what the tensor says of itself.
    layout = Layout.from_placements(tuple(asked), tensor.ndim, mesh)
    found = str(tensor.xla_sharding())
    problems: list[str] = []
    if OpSharding.parse(found) != layout.op_sharding():
        problems.append(f"{name}: XLA has {found}, asked was {layout.op_sharding()}.")
    shards = tensor.addressable_shards()
    for shard in shards:
        expected = local_shape(layout, tensor.shape, mesh.coordinates(shard.device_id))
        expected_bytes = expected.padded_size_bytes(tensor.element_size())
        held = tuple(shard.data.shape), shard.num_bytes_on_device
        if held != (expected.shape, expected_bytes):
            problems.append(
                f"{name}: device {shard.device_id} holds {held[0]} in {held[1]} bytes, asked was "
                f"{expected.shape} in {expected_bytes}."
            )
    return Audit(
        name=name,
        shape=tuple(tensor.shape),
        placements=tuple(asked),
        xla_sharding=found,
        device_bytes=max(shard.num_bytes_on_device for shard in shards),
        total_bytes=tensor.numel() * tensor.element_size(),
        mesh=mesh,
        problems=tuple(problems),
    )


def render_audits(audits: Sequence[Audit]) -> str:
    """Write audits as a table with a line of totals.

    Args:
        audits: The rows, at least one.

    Returns:
        Aligned lines without a line break at the end.
    """
    axes = ", ".join(map(str, audits[0].mesh.axis_names))
    header = ("parameter", "shape", axes, "XLA's sharding", "bytes/device", "of bytes")
    total = _sizes(sum(row.device_bytes for row in audits), sum(row.total_bytes for row in audits))
    rows = [header, *map(_cells, audits), ("all", "", "", "", *total)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(_line(row, widths) for row in rows)


def _cells(row: Audit) -> tuple[str, ...]:
    shape = " x ".join(map(str, row.shape))
    placements = ", ".join(map(str, row.placements))
    sizes = _sizes(row.device_bytes, row.total_bytes)
    return row.name, shape, placements, row.xla_sharding, *sizes


def _sizes(device_bytes: int, total_bytes: int) -> tuple[str, str]:
    return f"{device_bytes:,}", f"{total_bytes:,}"


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    texts = [cell.ljust(width) for cell, width in zip(row[:4], widths[:4], strict=True)]
    numbers = [cell.rjust(width) for cell, width in zip(row[4:], widths[4:], strict=True)]
    return "  ".join((*texts, *numbers))
