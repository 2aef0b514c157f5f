"""CompileReport: what a compiled step will do, as one value.

    report = CompileReport.of(Evidence.load("evidence"))
    report.fits                     True, False, or None if nobody knows
    print(report.render())          for a terminal
    Path("r.html").write_text(report.to_html())
    CompileReport.from_json(report.to_json()) == report

It is made from evidence alone, without torch, jax or a device, and everything in it is plain data.
What is a fact (read from the program, counted, said by the compiler) and what is modelled is kept
apart: only `roofline`, and findings that name it, rest on a model of the machine.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from xla_dtensor.report.finding import CollectiveLine, Finding, collective_lines
from xla_dtensor.report.findings import findings
from xla_dtensor.report.memory import MemoryReport, memory_report
from xla_dtensor.report.render import render, to_markdown
from xla_dtensor.report.report import (
    Evidence,
    Machine,
    MeshAxis,
    ReportError,
    TensorLine,
    from_plain,
    json_schema,
    machine_of,
    mesh_axes,
    tensor_lines,
    to_plain,
)
from xla_dtensor.report.roofline import Roofline, roofline, why_no_roofline
from xla_dtensor.report.verification import ReportDiff, Tolerances, Verification, diff, verify

__all__ = ["SCHEMA", "Attribution", "CompileReport", "schema"]


# ----------------------------------------------------------------------------------- CompileReport


@dataclass(frozen=True, slots=True)
class Attribution:
    """How much of the communication can be told a mesh axis and a line of source.

    Attributes:
        total_bytes: the payload of all collectives on one device in one step.
        attributed_bytes: of those with an axis and a line.
        rest: the others.

    Example:
        >>> Attribution(200, 190, ()).share
        0.95
    """

    total_bytes: int
    attributed_bytes: int
    rest: tuple[CollectiveLine, ...]

    @property
    def share(self) -> float | None:
        """The share of the bytes that is attributed; None if nothing is sent."""
        return self.attributed_bytes / self.total_bytes if self.total_bytes else None


@dataclass(frozen=True)
class CompileReport:
    """See the module docstring.

    Attributes:
        title: what was compiled.
        machine: for what.
        mesh: the axes.
        findings: what to look at, the worst first.
        memory: what one device must hold, and what it can.
        collectives: the communication of one step, equal collectives as one line, the most bytes
            first.
        attribution: how much of it is told an axis and a line of source.
        roofline: how long a step takes, as modelled; None where that cannot be said.
        no_roofline: why not; "" where it can.
        tensors: parameters, optimizer state, inputs and results, the most bytes first.
        flops: of one step on all devices together, as the model demands them; None if not counted.
        compute_dtype: of the matrix products.
        seconds: how long each part took where it was compiled.
        peak_host_bytes: the most memory that the compiling process held; None if unknown.
        versions: of everything that had a say.
        options: the compiler's options that were set.
        command: that makes the evidence again; "" if there is none.
        attributes: further facts, name and text.
        unread: what could not be read of the program, in words.

    Example:
        >>> from mesh_utils import Mesh
        >>> report = CompileReport.of(Evidence("a step", "HloModule m", Mesh.arange((1,), ("dp",))))
        >>> report.title, report.collectives, report.fits
        ('a step', (), None)
    """

    title: str
    machine: Machine
    mesh: tuple[MeshAxis, ...]
    findings: tuple[Finding, ...]
    memory: MemoryReport
    collectives: tuple[CollectiveLine, ...]
    attribution: Attribution
    roofline: Roofline | None
    no_roofline: str = ""
    tensors: tuple[TensorLine, ...] = ()
    flops: float | None = None
    compute_dtype: str = "bf16"
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    peak_host_bytes: int | None = None
    versions: Mapping[str, str] = field(default_factory=dict[str, str])
    options: Mapping[str, str] = field(default_factory=dict[str, str])
    command: str = ""
    attributes: Mapping[str, str] = field(default_factory=dict[str, str])
    unread: tuple[str, ...] = ()

    @classmethod
    def of(cls, evidence: Evidence) -> CompileReport:
        """Makes a report.

        Args:
            evidence: what a compiled step left behind.

        Returns:
            The report.

        Raises:
            EvidenceError: evidence that contradicts itself.
        """
        evidence.check_valid()
        lines = _lines(evidence)
        memory = memory_report(evidence)
        model = roofline(evidence, evidence.reading.collectives)
        return cls(
            title=evidence.title,
            machine=machine_of(evidence),
            mesh=mesh_axes(evidence),
            findings=findings(evidence, memory, lines, model),
            memory=memory,
            collectives=lines,
            attribution=_attribution(lines),
            roofline=model,
            no_roofline=why_no_roofline(evidence) or "",
            tensors=tensor_lines(evidence.held),
            flops=evidence.flops,
            compute_dtype=evidence.compute_dtype,
            seconds=dict(evidence.seconds),
            peak_host_bytes=evidence.peak_host_bytes,
            versions=dict(evidence.versions),
            options=dict(evidence.options),
            command=evidence.command,
            attributes=dict(evidence.attributes),
            unread=(
                *map(str, evidence.reading.unread),
                *_doubts(lines),
                *((f"Memory: {memory.not_read}",) if memory.not_read else ()),
            ),
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CompileReport:
        """Reads a report from a JSON file, or makes one from a folder of evidence.

        Args:
            path: the file that `to_json` was written to, or the folder of `Evidence.save`.

        Returns:
            The report.

        Raises:
            ReportError: a file that is no report.
            EvidenceError: a folder that is no evidence.
            OSError: a file that cannot be opened.
        """
        if os.path.isdir(path):
            return cls.of(Evidence.load(path))
        with open(path, encoding="utf-8") as file:
            return cls.from_json(file.read())

    @property
    def fits(self) -> bool | None:
        """Whether one device can hold it; None if nobody knows."""
        return self.memory.fits

    @property
    def collective_bytes(self) -> int:
        """The payload of all collectives on one device in one step."""
        return self.attribution.total_bytes

    def to_json(self) -> str:
        """Writes it as JSON, which :meth:`from_json` reads; no line break at the end."""
        document = {
            "format": FORMAT,
            "schema": SCHEMA,
            "summary": to_plain(_summary(self)),
            "report": to_plain(self),
        }
        return json.dumps(document, indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> CompileReport:
        """Reads what `to_json` wrote, exactly.

        Args:
            text: the JSON.

        Returns:
            The report.

        Raises:
            ReportError: text that is no report, or one of a newer schema.
        """
        try:
            document = json.loads(text)
        except ValueError as error:
            raise ReportError(
                f"A report was read from text that is no JSON: {error}. Nothing can be read of it. "
                "Pass a file that CompileReport.to_json wrote."
            ) from error
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise ReportError(
                f"A report was read from JSON whose format is not {FORMAT!r}. It is something "
                "else. Pass a file that CompileReport.to_json wrote."
            )
        number = document.get("schema")
        if not isinstance(number, int) or number > SCHEMA or number < 1:
            raise ReportError(
                f"A report was read of schema={number}. This version reads schemas 1 to {SCHEMA}. "
                "Install the version of xla_dtensor that wrote it, or a newer one."
            )
        return from_plain(cls, document.get("report"))

    def to_markdown(self) -> str:
        """Writes it as Markdown, which reads well in a terminal too."""
        return to_markdown(self)

    def to_html(self) -> str:
        """Writes it as one HTML file that needs nothing from outside."""
        from xla_dtensor.report.page import to_html  # drawing is loaded when something is drawn

        return to_html(self)

    def render(self, width: int | None = None, *, colour: bool | None = None) -> str:
        """Writes it for a terminal.

        Args:
            width: characters of a line; those of the terminal by default.
            colour: whether to use colours; by default where the output is a terminal.

        Returns:
            Lines.
        """
        return render(self, width, colour=colour)

    def diff(self, other: CompileReport) -> ReportDiff:
        """Compares it with a later one.

        Args:
            other: the report after a change.

        Returns:
            What differs, from this one to the other.
        """
        return diff(self, other)

    def verify(
        self, job: Any, *given: Any, tolerances: Tolerances | None = None, title: str = "this job"
    ) -> Verification:
        """Compares this prediction with a job that runs.

        Args:
            job: the compiled step, after a call; or a report of the job.
            *given: of a step the mesh, then the modules that it trains, as for ``report_of``.
            tolerances: by how much each quantity may differ; see :class:`Tolerances`.
            title: what the job is called.

        Returns:
            What differs. ``sys.exit(report.verify(step, mesh, model).status)`` ends a job that
            does not do what was predicted.

        Raises:
            CompileError: the step was not called yet.
            ArgumentTypeError: `job` is no compiled step.
        """
        if isinstance(job, CompileReport):
            return verify(self, job, tolerances=tolerances)
        # By name: a report is made and read without torch, and only a job that runs has it.
        live = importlib.import_module("xla_dtensor.plan.live")
        return live.verify(self, job, *given, tolerances=tolerances, title=title)


def _lines(evidence: Evidence) -> tuple[CollectiveLine, ...]:
    collectives = evidence.reading.collectives
    if not collectives:
        return ()
    return collective_lines(
        collectives,
        evidence.granules,
        evidence.program.replica_count * evidence.program.num_partitions,
        "-" if evidence.topology is None else "ICI",
    )


def _attribution(lines: tuple[CollectiveLine, ...]) -> Attribution:
    moving = [line for line in lines if line.moves]
    unattributed_lines = tuple(line for line in moving if not line.is_attributed)
    total = sum(line.bytes_per_device for line in moving)
    return Attribution(
        total, total - sum(line.bytes_per_device for line in unattributed_lines), unattributed_lines
    )


def _doubts(lines: tuple[CollectiveLine, ...]) -> tuple[str, ...]:
    """What makes the numbers of the report lower bounds."""
    unknown = sum(line.count for line in lines if line.at_least)
    if not unknown:
        return ()
    what = "collective stands" if unknown == 1 else "collectives stand"
    return (
        f"{unknown} {what} in a loop of which the program does not say how often it runs; "
        "counted once, so that its bytes are a lower bound.",
    )


# -------------------------------------------------------- A report as JSON, with a numbered schema
#
#     {
#      "format": "xla_dtensor compile report",
#      "schema": 1,
#      "summary": {"fits": true, "total_bytes": ..., "step_seconds": ..., ...},
#      "report": {"title": ..., "machine": {...}, "mesh": [...], "memory": {...}, ...}
#     }
#
# "report" holds the fields of CompileReport under their names, and those of the dataclasses in it:
# report.py says how each type is written, `schema()` gives a JSON Schema of the whole. Bytes are
# those of one device, seconds are seconds. "summary" repeats, for programs that want nothing else,
# what properties compute; it is not read back.
#
# SCHEMA grows whenever a reader of the old one would misread, or could not read, what is written.
# Files of older schemas are read where that is possible; those of newer ones are refused.

FORMAT = "xla_dtensor compile report"
SCHEMA = 1


def schema() -> dict[str, Any]:
    """Describes the JSON of a report.

    Returns:
        A JSON Schema, draft 2020-12.

    Example:
        >>> schema()["properties"]["schema"]
        {'const': 1}
    """
    report = json_schema(CompileReport)
    definitions = report.pop("$defs")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": FORMAT,
        "type": "object",
        "properties": {
            "format": {"const": FORMAT},
            "schema": {"const": SCHEMA},
            "summary": {"type": "object"},
            "report": report,
        },
        "required": ["format", "schema", "report"],
        "$defs": definitions,
    }


def _summary(report: CompileReport) -> dict[str, Any]:
    """What is computed from the fields, for programs that do not want to compute it."""
    model = report.roofline
    return {
        "fits": report.fits,
        "total_bytes": report.memory.total_bytes,
        "capacity_bytes": report.memory.capacity_bytes,
        "spare_bytes": report.memory.spare_bytes,
        "collective_bytes_per_device": report.collective_bytes,
        "attributed_share": report.attribution.share,
        "modelled_step_seconds": None if model is None else model.step_seconds,
        "modelled_mfu": None if model is None else model.mfu,
        "modelled_binding": None if model is None else model.binding,
        "findings": {
            severity: sum(finding.severity == severity for finding in report.findings)
            for severity in ("error", "warning", "note")
        },
    }
