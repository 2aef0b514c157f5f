"""A report as sections of sentences, findings and tables, in the order in which they are read."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from xla_dtensor.report.compile_report import CompileReport
from xla_dtensor.report.finding import Finding
from xla_dtensor.report.quantities import bytes_text, share_text
from xla_dtensor.report.report_tables import (
    Table,
    axes_table,
    buffers_table,
    collectives_table,
    differing_table,
    made_by_table,
    memory_table,
    roofline_table,
    tensors_table,
)
from xla_dtensor.report.report_words import (
    mesh_axes_text,
    module_text,
    roofline_sentence,
    source_text,
    verdict,
)

__all__ = [
    "NOT_FROM_COMPILER",
    "Block",
    "Command",
    "Section",
    "finding_place",
    "opening",
    "sections",
]

NOT_FROM_COMPILER = "Added up from the arrays of the program: the compiler did not say."
"""Beside a total of the memory that is no figure of the compiler's."""


@dataclass(frozen=True, slots=True)
class Command:
    """Words for a shell.

    Attributes:
        text: the words.
    """

    text: str


Block: TypeAlias = str | Table | Finding | Command


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a report.

    Attributes:
        title: its title.
        blocks: what it says: sentences, tables, findings and commands.
    """

    title: str
    blocks: tuple[Block, ...]


def opening(report: CompileReport) -> tuple[str, ...]:
    """The sentences with which every format begins.

    Args:
        report: the report.

    Returns:
        The verdict first, then time, machine and mesh.
    """
    return (
        verdict(report),
        roofline_sentence(report),
        f"Machine: {_machine(report)}.",
        f"Mesh: {mesh_axes_text(report.mesh)}.",
    )


def finding_place(finding: Finding) -> str:
    """Where in the model a finding is.

    Args:
        finding: the finding.

    Returns:
        Its module and line, or "".
    """
    if finding.origin is None:
        return ""
    words = (module_text(finding.origin), source_text(finding.origin))
    return ", ".join(word for word in words if word != "-")


def sections(report: CompileReport) -> Iterator[Section]:
    """The sections of a report.

    Args:
        report: the report.

    Yields:
        The sections that have something to say.
    """
    found = report.findings or ("Nothing to look at was found.",)
    yield Section("Findings", tuple(found))
    said = () if report.memory.from_compiler else (NOT_FROM_COMPILER,)
    causes = tuple(cause.text for cause in report.memory.causes)
    yield Section("Memory of one device", (memory_table(report), *said, *causes))
    if report.memory.largest:
        yield Section("Largest buffers", (buffers_table(report),))
    yield Section("Communication of one step, per device", tuple(_communication(report)))
    if report.roofline is not None:
        blocks = (
            roofline_sentence(report),
            roofline_table(report),
            *(f"Assumed: {each}." for each in report.roofline.assumptions),
        )
        yield Section("Time of one step (modelled)", blocks)
    if report.tensors:
        yield Section("Largest arrays", (tensors_table(report),))
    if any(line.differs for line in report.tensors):
        yield Section("Compiled otherwise than asked for", (differing_table(report),))
    if report.unread:
        yield Section("Not read", report.unread)
    yield Section("How this was made", tuple(_made(report)))


def _machine(report: CompileReport) -> str:
    machine = report.machine
    return f"{machine.name} ({machine.words})" if machine.name else machine.words


def _communication(report: CompileReport) -> Iterator[Block]:
    if not any(line.moves for line in report.collectives):
        yield "No device talks to another."
        return
    share = share_text(report.attribution.share)
    yield (
        f"{bytes_text(report.collective_bytes)} in all: of each collective the larger of what goes "
        f"in and out, as often as it runs. {share} of it has a mesh axis and a line of source."
    )
    yield axes_table(report)
    moving = [line for line in report.collectives if line.moves]
    yield "The largest, with what they were made for:"
    yield collectives_table(moving, report)
    if 0 < len(report.attribution.rest) < len(moving):
        yield "Without an axis or a line:"
        yield collectives_table(report.attribution.rest, report)


def _made(report: CompileReport) -> Iterator[Block]:
    if report.command:
        yield Command(report.command)
    if report.flops is not None and math.isfinite(report.flops):
        yield (
            f"{report.flops:.4g} floating-point operations a step on all devices, recomputation "
            f"not counted; matrix products in {report.compute_dtype}."
        )
    table = made_by_table(report)
    if table.rows:
        yield table
