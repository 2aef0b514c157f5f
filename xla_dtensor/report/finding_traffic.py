"""Findings about what devices send each other.

What is right depends on what moves. Weights may be gathered (FSDP), and gradients may be reduced
over any network, since both can hide behind compute; activations of one layer are waited for. So
each rule first asks what a collective moves:

- over DCN in the forward: activations, unless it is a gather of a weight or a point-to-point send
  (a pipeline);
- a gather in the forward whose result has no weight's shape: activations. It is right where the
  weights of the next product are sharded over the same axis and stay so (Megatron with a sharded
  sequence); inside attention finding_attention.py judges.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from mesh_utils import Mesh
from xla_dtensor.report.collective_reader import DCN_TARGET
from xla_dtensor.report.collective_seconds import axes_text
from xla_dtensor.report.evidence import Evidence, Held
from xla_dtensor.report.finding import Finding
from xla_dtensor.report.finding_attention import attention_findings, is_attention
from xla_dtensor.report.finding_axes import axis_findings
from xla_dtensor.report.finding_experts import expert_findings
from xla_dtensor.report.finding_moves import Move, are_weights, largest_weight, moves_of
from xla_dtensor.report.held_shards import is_sharded_over
from xla_dtensor.report.hlo_reading import HloReading
from xla_dtensor.report.quantities import bytes_text, seconds_text
from xla_dtensor.report.roofline import Roofline

__all__ = ["gathering_axes", "traffic_findings"]

SMALL_MESSAGE_BYTES = 64 * 1024
"""Losses, norms and counters are reduced over every axis in right plans: they are a few bytes."""

LARGE_GATHER = 2
"""A gathered activation is worth a finding from so many times the largest weight of a layer on: it
then moves more than the weights themselves would."""

_TRANSFER = "_xla_megascale_transfer_type"
_WEIGHTS = ("parameter", "frozen parameter")


def traffic_findings(
    evidence: Evidence, reading: HloReading, roofline: Roofline | None
) -> Iterator[Finding]:
    """Finds collectives that should not be, or not there.

    Args:
        evidence: what the compiled step left behind.
        reading: the collectives of its program.
        roofline: the modelled times; None if there are none.

    Yields:
        The findings.
    """
    moves = moves_of(reading.collectives, evidence.held)
    weights = [one for one in evidence.held if one.role in _WEIGHTS]
    gathered = gathering_axes(moves) if weights else frozenset[str]()
    yield from _over_dcn(moves, weights, roofline)
    if weights:
        yield from _gathered_activations(moves, weights, gathered, evidence.mesh)
        yield from attention_findings(evidence, moves)
        yield from expert_findings(evidence, moves)
    yield from axis_findings(evidence, reading.collectives, gathered)


# ------------------------------------------------------------------------- DCN


def _over_dcn(
    moves: Sequence[Move], weights: list[Held], roofline: Roofline | None
) -> Iterator[Finding]:
    found: dict[str, list[Move]] = {}
    for move in moves:
        item = move.collective
        attributes = dict(item.frontend_attributes)
        if item.kind != "send" or DCN_TARGET not in attributes or move.origin.phase != "forward":
            continue
        transfer = attributes.get(_TRANSFER, "ONE_TO_ONE")
        moves_weight = transfer == "ALL_GATHER" and are_weights(item.operands, weights, item)
        if transfer == "ONE_TO_ONE" or moves_weight or item.operand_bytes < SMALL_MESSAGE_BYTES:
            continue
        found.setdefault(axes_text(move.axes), []).append(move)
    for axes, slow in found.items():
        times = sum(move.times for move in slow)
        size = sum(move.times * move.collective.operand_bytes for move in slow)
        modelled = "" if roofline is None else f"; DCN {seconds_text(roofline.dcn_seconds)} a step"
        yield Finding(
            "warning",
            "tensor-parallel-over-dcn",
            f"Activations cross slices over axis {axes}, and the forward waits for them",
            f"{times} transfers a step in the forward alone, {bytes_text(size)} from each device"
            + (f"{modelled} (modelled)." if modelled else "."),
            f"Keep axis {axes} inside a slice, and put a data axis across slices: its gradients "
            "are reduced once a step, and nothing waits for them.",
            slow[0].origin,
        )


# ------------------------------------------------------------------------- gathers


def gathering_axes(moves: Iterable[Move]) -> frozenset[str]:
    """Lists the axes over which weights are gathered for use, as FSDP does.

    Args:
        moves: the collectives.

    Returns:
        Their names.
    """
    found = (move.axes or () for move in moves if move.gathers_weights)
    return frozenset(str(axis) for axes in found for axis in axes)


def _gathered_activations(
    moves: Sequence[Move], weights: list[Held], gathered: frozenset[str], mesh: Mesh
) -> Iterator[Finding]:
    found: dict[tuple[str, str | None], list[tuple[Move, int]]] = {}
    for move in moves:
        item, axes = move.collective, [str(axis) for axis in move.axes or ()]
        if not move.is_gather or move.origin.phase != "forward" or not axes:
            continue
        if is_attention(move.origin.module):
            continue
        # Megatron: the weights of the next product are sharded over the axis, and stay so.
        kept = not gathered.intersection(axes) and any(
            is_sharded_over(one, axis, mesh) for one in weights for axis in axes
        )
        size = max((array.bytes for array in move.activations), default=0)
        if not kept and size >= LARGE_GATHER * largest_weight(item, weights) > 0:
            found.setdefault((axes_text(move.axes), move.origin.module), []).append((move, size))
    for (axes, module), gathers in found.items():
        move, size = gathers[0]
        array = max(move.collective.results, key=lambda each: each.bytes)
        yield Finding(
            "warning",
            "activation-gathered",
            f"An activation is gathered over axis {axes}"
            + ("" if module is None else f" in {module}"),
            f"{array}, {bytes_text(size)} on each device, {sum(m.times for m, _ in gathers)} times "
            "a step; no weight is sharded over that axis there, so its devices then compute the "
            "same.",
            f"Keep it sharded over {axes} through this module: look for a placement that asks for "
            "it whole, or for an op without a rule for that dim.",
            move.origin,
        )
