"""Findings about gathers inside attention.

Attention needs all keys and values of a sequence, of the heads that a device has. So of a sequence
that is cut over an axis (context parallelism) keys and values are gathered there, one array each,
or both as one; with heads cut over an axis (tensor parallelism) nothing is but, where the residual
is cut as well, the input, once. What is more than that is not needed:

- queries, scores or results gathered over the sequence's axis;
- anything of the batch gathered over an axis that cuts it;
- queries, keys, values or results gathered over the axis of the heads: each of its devices then
  computes the heads of all. Where the axis has more devices than there are heads of keys, each has
  a part of one, and keys and values are gathered along their last dim: that is right.

Counted are the arrays of at least SMALL_GATHER_BYTES that are gathered in the forward of one
attention module, as often as each other.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from xla_dtensor.report.collective_seconds import axes_text
from xla_dtensor.report.evidence import Evidence
from xla_dtensor.report.finding import Finding
from xla_dtensor.report.finding_axes import batch_axes
from xla_dtensor.report.quantities import bytes_text

if TYPE_CHECKING:
    from xla_dtensor.report.finding_moves import Move
    from xla_dtensor.report.hlo_shape import ArrayShape

__all__ = ["attention_findings", "is_attention"]

SMALL_GATHER_BYTES = 1 << 20
"""Tables of positions, masks and statistics of a softmax are smaller, and cost little."""

_KEYS_AND_VALUES = 2
"""Arrays that may be gathered; over the axis of the heads that is the input, or parts of heads."""

_HEADED_DIMS = 4
"""Dims of queries, keys and values whose heads have a dim of their own."""

_ATTENTION = re.compile(r"att(?:entio)?n", re.IGNORECASE)


def is_attention(module: str | None) -> bool:
    """Whether a module is attention, or a part of it, by its name.

    Args:
        module: its path.

    Returns:
        True for "layers.*.self_attn.q_proj".
    """
    return module is not None and _ATTENTION.search(module) is not None


def attention_findings(evidence: Evidence, moves: Iterable[Move]) -> Iterator[Finding]:
    """Finds gathers inside attention that it does not need.

    Args:
        evidence: what the compiled step left behind.
        moves: its collectives; of those of attention, gathers of activations are looked at.

    Yields:
        The findings.
    """
    batch, sequence = batch_axes(evidence, 0), batch_axes(evidence, 1)
    places: dict[tuple[str, str, int], list[tuple[Move, ArrayShape]]] = {}
    for move in moves:
        large = [one for one in move.activations if one.bytes >= SMALL_GATHER_BYTES]
        if not move.is_gather or move.origin.phase != "forward" or not large or not move.axes:
            continue
        module = move.origin.module
        if module is None or not is_attention(module):
            continue
        # A loop that XLA has peeled has some of its collectives a second time, run less often.
        key = _block(module), axes_text(move.axes), move.times
        places.setdefault(key, []).extend((move, one) for one in large)
    said: set[tuple[str, str]] = set()
    for (block, axes, _), gathered in places.items():
        names = {str(axis) for axis in gathered[0][0].axes or ()}
        allowed = _KEYS_AND_VALUES
        if names & batch or (not names <= sequence and any(_joins_heads(*one) for one in gathered)):
            allowed = 0
        if len(gathered) > allowed and (block, axes) not in said:
            said.add((block, axes))
            yield _finding(block, axes, gathered, _why(names, batch, sequence))


def _block(module: str) -> str:
    """The attention itself, of which q_proj and others are parts."""
    parts = module.split(".")
    first = next(place for place, part in enumerate(parts) if _ATTENTION.search(part))
    return ".".join(parts[: first + 1])


def _joins_heads(move: Move, array: ArrayShape) -> bool:
    """Whether heads become more by it: a dim other than the last of an array that has heads."""
    if len(array.dims) < _HEADED_DIMS:
        return False
    at = move.collective.results.index(array)
    operands = move.collective.operands
    if at >= len(operands) or len(operands[at].dims) != len(array.dims):
        return False
    pairs = zip(operands[at].dims, array.dims, strict=True)
    grown = [dim for dim, (small, large) in enumerate(pairs) if small != large]
    return bool(grown) and grown[0] != len(array.dims) - 1


def _why(names: set[str], batch: set[str], sequence: set[str]) -> tuple[str, str]:
    if names & batch:
        return (
            "the batch is cut over that axis, and no sequence needs another one's values",
            "Keep the batch sharded: look for a placement that asks for it whole, or an op without "
            "a rule for that dim.",
        )
    if names <= sequence:
        return (
            "of a cut sequence only keys and values are needed whole, an array each",
            "Gather keys and values only, where the heads are fewest: queries and results stay cut "
            "as the sequence is.",
        )
    return (
        "heads are cut over that axis, so that each device needs its own only",
        "Keep the heads sharded from the projections to the output projection: look for a "
        "placement, a reshape or an attention kernel that asks for them whole.",
    )


def _finding(
    block: str, axes: str, gathered: list[tuple[Move, ArrayShape]], why: tuple[str, str]
) -> Finding:
    arrays = ", ".join(str(one) for _, one in gathered[:3])
    more = len(gathered) - 3
    size = sum(one.bytes for _, one in gathered)
    return Finding(
        "warning",
        "attention-gathered",
        f"Attention gathers {'an array' if len(gathered) == 1 else f'{len(gathered)} arrays'} over "
        f"axis {axes} in {block}",
        f"{arrays}{f' and {more} more' if more > 0 else ''}: {bytes_text(size)} on each device, "
        f"{gathered[0][0].times} times a step; {why[0]}.",
        why[1],
        gathered[-1][0].origin,
    )
