"""Findings about what devices send each other.

What is right depends on what moves. Weights may be gathered (FSDP), and gradients may be reduced
over any network, since both can hide behind compute; activations of one layer are waited for. So
each rule first asks what a collective moves:

- over DCN in the forward: activations, unless it is a gather of a weight or a point-to-point send
  (a pipeline);
- a gather in the forward whose result has no weight's shape: activations. It is right where the
  weights of the next product are sharded over the same axis and stay so (Megatron with a sharded
  sequence), or inside attention (keys and values for a sharded sequence).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from mesh_utils import Axis, Mesh
from xla_dtensor.report.attribution import Origin, origin_of
from xla_dtensor.report.collective import Collective
from xla_dtensor.report.collective_reader import DCN_TARGET
from xla_dtensor.report.collective_seconds import axes_text
from xla_dtensor.report.evidence import Evidence, Held
from xla_dtensor.report.finding import Finding
from xla_dtensor.report.held_shards import is_sharded_over, is_vocabulary
from xla_dtensor.report.hlo_reading import HloReading
from xla_dtensor.report.hlo_shape import ArrayShape
from xla_dtensor.report.quantities import bytes_text, seconds_text
from xla_dtensor.report.roofline import Roofline

__all__ = ["traffic_findings"]

SMALL_MESSAGE_BYTES = 64 * 1024
"""Losses, norms and counters are reduced over every axis in right plans: they are a few bytes."""

LARGE_GATHER = 2
"""A gathered activation is worth a finding from so many times the largest weight of a layer on: it
then moves more than the weights themselves would."""

_TRANSFER = "_xla_megascale_transfer_type"
_WEIGHTS = ("parameter", "frozen parameter")
_ATTENTION = re.compile(r"att(?:entio)?n", re.IGNORECASE)
_PART = re.compile(r":\(\d+\)\d+$")


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
    moves = [_Move(each, origin_of(each.op_name, each.source)) for each in reading.collectives]
    weights = [one for one in evidence.held if one.role in _WEIGHTS]
    yield from _over_dcn(moves, weights, roofline)
    yield from _gathered_activations(moves, weights, evidence.mesh)


@dataclass(frozen=True)
class _Move:
    collective: Collective
    origin: Origin

    @property
    def times(self) -> int:
        return 1 if self.collective.executions is None else self.collective.executions


# ------------------------------------------------------------------------- DCN


def _over_dcn(
    moves: list[_Move], weights: list[Held], roofline: Roofline | None
) -> Iterator[Finding]:
    found: dict[str, list[_Move]] = {}
    for move in moves:
        item = move.collective
        attributes = dict(item.frontend_attributes)
        if item.kind != "send" or DCN_TARGET not in attributes or move.origin.phase != "forward":
            continue
        transfer = attributes.get(_TRANSFER, "ONE_TO_ONE")
        moves_weight = transfer == "ALL_GATHER" and _are_weights(item.operands, weights, item)
        if transfer == "ONE_TO_ONE" or moves_weight or item.operand_bytes < SMALL_MESSAGE_BYTES:
            continue
        found.setdefault(axes_text(_whole(item.axes)), []).append(move)
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


def _gathered_activations(moves: list[_Move], weights: list[Held], mesh: Mesh) -> Iterator[Finding]:
    if not weights:
        return
    gathered_weights = {
        axis
        for move in moves
        if move.collective.kind == "all-gather"
        and _are_weights(move.collective.results, weights, move.collective)
        for axis in _whole(move.collective.axes) or ()
    }
    found: dict[tuple[str, str | None], list[tuple[_Move, int]]] = {}
    for move in moves:
        item, origin = move.collective, move.origin
        axes = _whole(item.axes)
        if item.kind != "all-gather" or origin.phase != "forward" or not axes:
            continue
        if origin.module is not None and _ATTENTION.search(origin.module):
            continue
        # Megatron: the weights of the next product are sharded over the axis, and stay so.
        kept = not gathered_weights.intersection(axes) and any(
            is_sharded_over(one, str(axis), mesh) for one in weights for axis in axes
        )
        size = _largest_activation(item, weights)
        if not kept and size >= LARGE_GATHER * _largest_weight(item, weights) > 0:
            found.setdefault((axes_text(axes), origin.module), []).append((move, size))
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


def _largest_activation(item: Collective, weights: list[Held]) -> int:
    return max(
        (array.bytes for array in item.results if not _is_weight(array, weights, item)), default=0
    )


def _largest_weight(item: Collective, weights: list[Held]) -> int:
    """The bytes of the largest weight, vocabulary matrices aside where there are others.

    In a loop, of weights that are stacked layer by layer one layer's.
    """
    layers = [one for one in weights if not is_vocabulary(one)] or weights
    return max(
        one.global_bytes // (one.shape[0] if _is_stacked(one, item) else 1) for one in layers
    )


def _are_weights(arrays: Iterable[ArrayShape], weights: list[Held], item: Collective) -> bool:
    listed = list(arrays)
    if not weights:
        return True  # Nobody said what the weights are: not to be held against the plan.
    return all(_is_weight(array, weights, item) for array in listed)


def _is_weight(array: ArrayShape, weights: list[Held], item: Collective) -> bool:
    """Whether an array can be a weight, whole or in shards: each dim divides one of the weight's.

    A transposed weight is one too, and in a loop one layer of those that are stacked.
    """
    dims = sorted(dim for dim in array.dims if dim > 1)
    for one in weights:
        shapes = [one.shape, *([one.shape[1:]] if _is_stacked(one, item) else [])]
        for shape in shapes:
            whole = sorted(dim for dim in shape if dim > 1)
            if len(whole) == len(dims) and all(
                large % small == 0 for small, large in zip(dims, whole, strict=True)
            ):
                return True
    return False


def _is_stacked(held: Held, item: Collective) -> bool:
    layers = held.shape[0] if len(held.shape) > 1 else 0
    return item.in_loop and bool(layers) and layers == item.executions


def _whole(axes: tuple[Axis, ...] | None) -> tuple[Axis, ...] | None:
    """The axes of which some are parts."""
    if axes is None:
        return None
    return tuple(dict.fromkeys(_PART.sub("", x) if isinstance(x, str) else x for x in axes))
