"""Findings of involuntary full rematerialization: an array gathered whole to shard it otherwise.

XLA's partitioner knows ways from many shardings to many others. Where it knows none it gathers the
whole array on every device, and each takes its part. It says so in its log:

    [spmd] Involuntary full rematerialization. The compiler cannot go from sharding {...} to {...}
    efficiently for HLO operation %add = bf16[...] add(...), metadata={op_name="..."}

and it shows in the program, log or no log: an all-gather whose result goes into a dynamic-slice at
a place that depends on the device (partition-id), and nowhere else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from xla_dtensor.report.attribution import origin_of
from xla_dtensor.report.errors import HloError
from xla_dtensor.report.evidence import Evidence
from xla_dtensor.report.finding import Finding
from xla_dtensor.report.hlo_module import Computation, HloModule, Instruction
from xla_dtensor.report.hlo_shape import arrays
from xla_dtensor.report.quantities import bytes_text
from xla_dtensor.report.stack_frames import StackFrames, parse_fields

__all__ = ["rematerialization_findings"]

SMALL_GATHER_BYTES = 1 << 20
"""Index arrays and scalars are gathered and cut again in right programs; they cost nothing."""

MOST = 5
"""Findings of this kind: one reason often makes many."""

_LOG = re.compile(
    r"Involuntary full rematerialization\.[^\n]*?from sharding (\{.*?\}) to (\{.*?\}) "
    r"(?:efficiently )?for HLO operation:? %?([\w.\-]+)([^\n]*)"
)
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_GATHERS = ("all-gather", "all-gather-done")
_COPIES = ("bitcast", "copy", "reshape", "convert", "transpose")
_REACH = 32
"""Instructions that a place is followed back through: indices are short sums and products."""

_FIX = (
    "Give the array one layout on both sides: shard what produces it as what uses it needs it, or "
    "put a redistribute through a layout between the two (first one dim, then the other)."
)


def rematerialization_findings(evidence: Evidence) -> Iterator[Finding]:
    """Finds arrays that are gathered whole to be sharded otherwise.

    Args:
        evidence: what the compiled step left behind; the compiler's log, if any, in
            `attributes["compiler_log"]`.

    Yields:
        The findings: those of the log if it has some, else those of the program.
    """
    logged = list(_logged(evidence.attributes.get("compiler_log", "")))
    if logged:
        yield from logged[:MOST]
        return
    try:
        module = HloModule.parse(evidence.hlo_text)
    except HloError:
        return
    found = (
        each
        for computation in module.computations.values()
        for each in _shown(computation, module.frames)
    )
    for _, each in zip(range(MOST), found, strict=False):
        yield each


def _logged(log: str) -> Iterator[Finding]:
    seen: set[tuple[str, ...]] = set()
    for match in _LOG.finditer(log):
        name = _OP_NAME.search(match[4])
        key = match[1], match[2], name[1] if name else match[3]
        if key in seen:
            continue
        seen.add(key)
        yield Finding(
            "warning",
            "full-rematerialization",
            f"XLA gathers {match[3]} whole on every device to shard it otherwise",
            f"From {match[1]} to {match[2]}, as its log says.",
            _FIX,
            origin_of(name[1]) if name else None,
        )


def _shown(computation: Computation, frames: StackFrames) -> Iterator[Finding]:
    table = computation.instructions
    gathers = [one for one in table.values() if one.opcode in _GATHERS]
    if not gathers:
        return
    for gather in gathers:
        try:
            size = max((array.bytes for array in arrays(gather.shape)), default=0)
        except HloError:
            continue
        if size >= SMALL_GATHER_BYTES and _is_cut(gather, computation):
            fields = parse_fields(gather.attributes.get("metadata", ""))
            yield Finding(
                "warning",
                "full-rematerialization",
                f"An array is gathered whole on every device, and each keeps a part: {gather.name}",
                f"{bytes_text(size)}: {gather.shape_text.split('{')[0]}.",
                _FIX,
                origin_of(fields.get("op_name"), frames.source(fields)),
            )


def _is_cut(gather: Instruction, computation: Computation) -> bool:
    """Whether all that uses it cuts the device's part out of it."""
    followed, seen = [gather], {gather.name}
    cuts = 0
    while followed:
        current = followed.pop()
        for user in computation.users.get(current.name, ()):
            if user.name in seen:
                continue
            seen.add(user.name)
            if user.opcode in _COPIES:
                followed.append(user)
            elif _cuts(user, current, computation):
                cuts += 1
            else:
                return False
    return cuts > 0


def _cuts(user: Instruction, array: Instruction, computation: Computation) -> bool:
    """Whether an instruction is a dynamic-slice of the array, at a place of the device's own."""
    is_slice = user.opcode == "dynamic-slice"
    is_fused = user.opcode == "fusion" and "dynamic-slice" in user.name
    if not (is_slice or is_fused):
        return False
    places = [name for name in user.operand_names if name != array.name]
    seen: set[str] = set()
    while places and len(seen) < _REACH:
        name = places.pop()
        source = computation.instructions.get(name)
        if source is None or name in seen:
            continue
        seen.add(name)
        if source.opcode == "partition-id" or "partition-id" in source.rest:
            return True
        places += source.operand_names
    return False
