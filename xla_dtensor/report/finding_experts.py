"""Findings about experts: weights that are gathered where the tokens should travel.

Experts that are cut over an axis of their own stay where they are; tokens go to them and come back
(all-to-all). An axis that gathers other weights too is FSDP's, and may gather experts as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from xla_dtensor.report.collective_lines import starred
from xla_dtensor.report.evidence import Evidence, Held
from xla_dtensor.report.finding import Finding
from xla_dtensor.report.finding_moves import weight_of
from xla_dtensor.report.held_shards import axis_dims
from xla_dtensor.report.quantities import bytes_text

if TYPE_CHECKING:
    from xla_dtensor.report.finding_moves import Move

__all__ = ["expert_findings"]

_EXPERT_DIMS = 3
"""Experts are stacked: (experts, in, out)."""


def expert_findings(evidence: Evidence, moves: Iterable[Move]) -> Iterator[Finding]:
    """Finds experts that are gathered over the axis that cuts them.

    Args:
        evidence: what the compiled step left behind.
        moves: its collectives.

    Yields:
        One finding for each axis.
    """
    weights = [one for one in evidence.held if one.role in ("parameter", "frozen parameter")]
    experts = [one for one in weights if len(one.shape) == _EXPERT_DIMS]
    cut = {axis: one for one in experts for axis in _expert_axes(one, evidence)}
    if not cut:
        return
    others = [one for one in weights if len(one.shape) < _EXPERT_DIMS]
    found: dict[str, list[tuple[Move, Held]]] = {}
    fsdp: set[str] = set()
    for move in moves:
        if not move.is_gather or not move.axes:
            continue
        axes = {str(axis) for axis in move.axes}
        for array in move.collective.results:
            if weight_of(array, others, move.collective) is not None:
                fsdp |= axes
                continue
            one = weight_of(array, experts, move.collective)
            if one is not None and move.origin.phase == "forward":
                for axis in axes & set(_expert_axes(one, evidence)):
                    found.setdefault(axis, []).append((move, one))
    for axis, gathers in found.items():
        if axis in fsdp:
            continue
        move, one = gathers[0]
        size = sum(m.collective.result_bytes * m.times for m, _ in gathers)
        yield Finding(
            "warning",
            "experts-gathered",
            f"Experts are gathered over axis {axis}, which cuts them: {starred(one.name)}",
            f"{bytes_text(size)} a step in the forward on each device, which then computes all "
            "experts for its tokens.",
            f"Let the tokens travel: pin what arrives at the experts as they are cut over {axis} "
            "(an all-to-all there and one back), and leave the experts where they are.",
            move.origin,
        )


def _expert_axes(one: Held, evidence: Evidence) -> list[str]:
    dims = axis_dims(one, evidence.mesh) or {}
    return [axis for axis, dim in dims.items() if dim == 0]
