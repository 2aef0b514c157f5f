"""What a job does, against what was predicted of it: each quantity with a tolerance, and a status.

A report that was made before the pod was booked says what a step will take. Once the step runs, its
own program and its devices say what it takes. The two are compared here, number by number:

    memory by role          bytes of one device: parameters, optimizer state, ... exact by default
    memory of the program   what the compilers say: the total, and its temporaries
    communication           bytes of one device in one step, for each kind and axes
    operations              floating-point operations of one step
    memory of the devices   the most that each has had in use, against the predicted total

What only one side knows is listed as unknown and fails nothing: torch_xla's programs name no
tensors, virtual CPU devices do not say what memory they use. Versions, options and layouts that
differ are listed as well. They are reasons, and fail nothing by themselves. Another mesh does fail:
bytes of one device are then not the same question.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

from mesh_utils import Axis
from xla_dtensor.core.argument_types import argument_types
from xla_dtensor.report.finding import CollectiveLine, Finding, starred
from xla_dtensor.report.render import (
    Table,
    axes_text,
    kind_words,
    markdown_table,
    markdown_text,
    mesh_axes_text,
    module_text,
    roofline_rows,
    source_text,
    verdict,
)
from xla_dtensor.report.report import MeshAxis, ReportError
from xla_dtensor.report.texts import bytes_text, seconds_text, share_text

if TYPE_CHECKING:
    from xla_dtensor.report.compile_report import CompileReport

__all__ = [
    "Check",
    "DeviceMemory",
    "ReportDiff",
    "Tolerances",
    "Verification",
    "diff",
    "verdict_text",
    "verify",
]


# ---------------------------------------------------------------- What differs between two reports
#
# The same step before and after a change.


@dataclass(frozen=True, slots=True)
class Change:
    """A number before and after.

    Attributes:
        what: of what.
        before: the number; None if there was none.
        after: the number; None if there is none.

    Example:
        >>> Change("temporaries", 100, 150).difference
        50
    """

    what: str
    before: float | None
    after: float | None

    @property
    def difference(self) -> float | None:
        """By how much it grew; None where one of the two is missing."""
        if self.before is None or self.after is None:
            return None
        return self.after - self.before


@dataclass(frozen=True, slots=True)
class ReportDiff:
    """What differs between two reports.

    Attributes:
        titles: of both.
        verdicts: whether each fits, in words.
        fits: whether the second fits; None if nobody knows.
        words: title, machine, mesh, versions and options that differ: name, before, after.
        memory: bytes of one device, for each part; unchanged parts too.
        collectives: bytes of one device in one step, by kind, axes and network; unchanged too.
        roofline: modelled seconds; unchanged too.
        findings_gone: those of the first that the second has not.
        findings_new: those of the second that the first has not.
        layouts: arrays whose compiled layout differs: name, before, after.
    """

    titles: tuple[str, str]
    verdicts: tuple[str, str]
    fits: bool | None
    words: tuple[tuple[str, str, str], ...]
    memory: tuple[Change, ...]
    collectives: tuple[Change, ...]
    roofline: tuple[Change, ...]
    findings_gone: tuple[Finding, ...]
    findings_new: tuple[Finding, ...]
    layouts: tuple[tuple[str, str, str], ...]

    @property
    def is_empty(self) -> bool:
        """Whether nothing differs in what the step does."""
        numbers = (*self.memory, *self.collectives, *self.roofline)
        same = all(change.before == change.after for change in numbers)
        return same and not (self.findings_gone or self.findings_new or self.layouts)

    def to_markdown(self) -> str:
        """Writes it.

        Returns:
            Markdown, with a line break at the end; unchanged numbers are left out.
        """
        lines = ["# What changed", ""]
        for name, title, words in zip(("before", "after"), self.titles, self.verdicts, strict=True):
            lines.append(f"- {name}: {markdown_text(title)}. {markdown_text(words)}")
        lines.append("")
        if self.is_empty:
            lines += ["Nothing that the step does differs.", ""]
        for name, findings in (("gone", self.findings_gone), ("new", self.findings_new)):
            if findings:
                lines += [f"## Findings that are {name}", ""]
                lines += [
                    f"- {finding.severity}: {markdown_text(finding.title)}" for finding in findings
                ]
                lines.append("")
        for title, table in self.tables():
            lines += [f"## {title}", "", *markdown_table(table), ""]
        return "\n".join(lines).rstrip() + "\n"

    def tables(self) -> Iterator[tuple[str, Table]]:
        """What differs, as tables.

        Yields:
            A title and a table, where something differs.
        """
        numbers = (
            ("Memory of one device", self.memory, bytes_text),
            ("Communication of one step, per device", self.collectives, bytes_text),
            ("Time of one step (modelled)", self.roofline, seconds_text),
        )
        for title, changes, write in numbers:
            rows = [
                (
                    change.what,
                    write(change.before),
                    write(change.after),
                    _signed(change.difference, write),
                    _factor(change),
                )
                for change in changes
                if change.before != change.after
            ]
            if rows:
                header = ("what", ">before", ">after", ">change", ">factor")
                yield title, Table(header, tuple(rows))
        if self.layouts:
            yield "Compiled layouts", Table(("array", "before", "after"), self.layouts)
        if self.words:
            yield "How they were made", Table(("what", "before", "after"), self.words)


def diff(before: CompileReport, after: CompileReport) -> ReportDiff:
    """Compares two reports.

    Args:
        before: the first.
        after: the second.

    Returns:
        What differs, from the first to the second.
    """
    return ReportDiff(
        titles=(before.title, after.title),
        verdicts=(verdict(before), verdict(after)),
        fits=after.fits,
        words=tuple(_text_changes(_about(before), _about(after))),
        memory=tuple(_changes(_memory(before), _memory(after))),
        collectives=tuple(
            _changes(*(_moved(report, with_network=True) for report in (before, after)))
        ),
        roofline=tuple(_changes(_roofline(before), _roofline(after))),
        findings_gone=_only(before, after),
        findings_new=_only(after, before),
        layouts=tuple(_text_changes(_layouts(before), _layouts(after))),
    )


def _memory(report: CompileReport) -> dict[str, float]:
    memory = report.memory
    sizes: dict[str, float] = {}
    for part in memory.parts:
        name = kind_words(part.role, 2)
        sizes[name] = sizes.get(name, 0) + part.memory_bytes
    sizes["temporaries"] = memory.temporaries_bytes
    sizes["program"] = memory.code_bytes
    sizes["in all"] = memory.total_bytes
    if memory.capacity_bytes is not None:
        sizes["usable"] = memory.capacity_bytes
    return sizes


def _moved(report: CompileReport, *, with_network: bool) -> dict[str, float]:
    """The bytes on one device for each kind and axes, and network where that is asked for."""
    sizes: dict[str, float] = {}
    for line in report.collectives:
        if line.moves:
            name = f"{line.kind} over {axes_text(line.axes, report.mesh)}"
            name += f" on {line.network}" if with_network and line.network != "-" else ""
            sizes[name] = sizes.get(name, 0) + line.bytes_per_device
    return sizes | {"in all": report.collective_bytes}


def _roofline(report: CompileReport) -> dict[str, float]:
    times = {name: seconds for _, name, seconds in roofline_rows(report)}
    model = report.roofline
    if model is None:
        return times
    return times | {
        "step, if everything overlaps": model.step_seconds,
        "step, if nothing overlaps": model.step_seconds_no_overlap,
    }


def _layouts(report: CompileReport) -> dict[str, str]:
    return {
        f"{line.name} ({line.role})": layout
        for line in report.tensors
        if (layout := line.layout) is not None
    }


def _changes(before: Mapping[str, float], after: Mapping[str, float]) -> Iterator[Change]:
    for name in dict.fromkeys([*before, *after]):
        yield Change(name, before.get(name), after.get(name))


def _text_changes(
    before: Mapping[str, str], after: Mapping[str, str]
) -> Iterator[tuple[str, str, str]]:
    for name in dict.fromkeys([*before, *after]):
        if before.get(name) != after.get(name):
            yield name, before.get(name, "-"), after.get(name, "-")


def _only(report: CompileReport, counterpart: CompileReport) -> tuple[Finding, ...]:
    """Findings that the other has not. Numbers in their texts may differ: code and origin say."""
    there = Counter((finding.code, finding.origin) for finding in counterpart.findings)
    findings: list[Finding] = []
    for finding in report.findings:
        key = finding.code, finding.origin
        if there[key] > 0:
            there[key] -= 1
        else:
            findings.append(finding)
    return tuple(findings)


def _about(report: CompileReport) -> dict[str, str]:
    return {
        "machine": report.machine.name or report.machine.words,
        "mesh": mesh_axes_text(report.mesh),
        "command": report.command,
        **{f"version of {name}": text for name, text in report.versions.items()},
        **{f"option {name}": text for name, text in report.options.items()},
        **dict(report.attributes),
    }


def _signed(amount: float | None, write: Callable[[float | None], str]) -> str:
    text = write(amount)
    return f"+{text}" if amount is not None and amount > 0 else text


def _factor(change: Change) -> str:
    if not change.before or change.after is None:
        return "-"
    return f"x {change.after / change.before:.3g}"


# ----------------------------------------------- What a job does, against what was predicted of it

Outcome: TypeAlias = Literal["same", "differs", "unknown"]

_HELD = ("parameter", "frozen parameter", "buffer", "gradient", "optimizer state", "argument")
"""The roles that are the user's: counters and random states differ between a trace and a job."""


@argument_types
@dataclass(frozen=True, slots=True)
class Tolerances:
    """By which share of the prediction each quantity may differ.

    Attributes:
        state: of parameters, gradients, optimizer state and the batch, by role.
        total: of what the compilers say that the program takes.
        temporaries: of the temporaries in it.
        communication: of the bytes for each kind and axes; a kind that only one side has may be
            this share of all bytes.
        flops: of the operations.
        peak: by which the devices may have had more in use than was predicted; less is fine.

    Raises:
        ReportError: a tolerance that is no share.

    Example:
        >>> Tolerances(total=0.2).total
        0.2
    """

    state: float = 0.0
    total: float = 0.05
    temporaries: float = 0.1
    communication: float = 0.05
    flops: float = 0.01
    peak: float = 0.1

    def __post_init__(self) -> None:
        for name, share in asdict(self).items():
            if not 0 <= share < float("inf"):
                raise ReportError(
                    f"A report was to be verified with the tolerance {name}={share}. A tolerance "
                    "is a share of what was predicted. Pass a number from 0 on; 0.05 is 5 %."
                )


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """What a device says of its memory, in bytes; None for what it does not say.

    Attributes:
        device: its id.
        peak: the most that was in use since the process began, other programs included.
        in_use: what is in use now.
        limit: what a process can have.

    Example:
        >>> DeviceMemory(0, peak=900, limit=1000).limit
        1000
    """

    device: int
    peak: int | None = None
    in_use: int | None = None
    limit: int | None = None


@dataclass(frozen=True, slots=True)
class Check:
    """A quantity, predicted and measured.

    Attributes:
        group: what it is of, "memory by role".
        name: of the quantity.
        predicted: the number; None where the prediction has none.
        measured: likewise.
        tolerance: the share by which they may differ.
        unit: "bytes" or "operations".
        one_sided: whether less than predicted is fine.
        allowance: a difference, in the unit, that is fine whatever its share.

    Example:
        >>> Check("communication", "all-gather over dp", 100.0, 104.0, 0.05).outcome
        'same'
    """

    group: str
    name: str
    predicted: float | None
    measured: float | None
    tolerance: float
    unit: str = "bytes"
    one_sided: bool = False
    allowance: float = 0.0

    @property
    def outcome(self) -> Outcome:
        """Whether both are the same within the tolerance."""
        if self.predicted is None or self.measured is None:
            return "unknown"
        over = self.measured - self.predicted
        if self.one_sided and over <= 0:
            return "same"
        fine = max(self.tolerance * abs(self.predicted), self.allowance)
        return "same" if abs(over) <= fine else "differs"


@dataclass(frozen=True, slots=True)
class LineChange:
    """A collective of both programs that moves another number of bytes.

    Attributes:
        before: as predicted.
        after: as measured.
    """

    before: CollectiveLine
    after: CollectiveLine


@dataclass(frozen=True)
class Verification:
    """What a job does, against what was predicted of it. See the module docstring.

    Attributes:
        titles: of the prediction and of the job.
        checks: the quantities, in the order of the module docstring.
        new: collectives that only the job has, the most bytes first.
        missing: collectives that only the prediction has.
        changed: collectives of both with other bytes.
        words: machine, mesh, versions and options that differ: name, predicted, of the job.
        layouts: arrays that the job's program lays out otherwise: name, predicted, of the job.
        meshes: both meshes, in words.
        unknown: what could not be compared, and why.
    """

    titles: tuple[str, str]
    checks: tuple[Check, ...]
    new: tuple[CollectiveLine, ...] = ()
    missing: tuple[CollectiveLine, ...] = ()
    changed: tuple[LineChange, ...] = ()
    words: tuple[tuple[str, str, str], ...] = ()
    layouts: tuple[tuple[str, str, str], ...] = ()
    meshes: tuple[str, str] = ("", "")
    unknown: tuple[str, ...] = ()

    @property
    def differing(self) -> tuple[Check, ...]:
        """The checks that failed."""
        return tuple(check for check in self.checks if check.outcome == "differs")

    @property
    def passed(self) -> bool:
        """Whether the job does what was predicted, as far as both sides know."""
        return not self.differing and self.meshes[0] == self.meshes[1]

    @property
    def status(self) -> int:
        """The exit status: 0 if it passed, else 1."""
        return 0 if self.passed else 1

    def to_markdown(self) -> str:
        """Writes it as Markdown, which reads well in a terminal too; it ends with a line break."""
        verdict = markdown_text(verdict_text(self))
        lines = ["# The job against its prediction", "", verdict, ""]
        for name, title in zip(("predicted", "job"), self.titles, strict=True):
            lines.append(f"- {name}: {markdown_text(title)}")
        lines.append("")
        for title, table in _tables(self):
            lines += [f"## {title}", "", *markdown_table(table), ""]
        if self.unknown:
            lines += ["## Not compared", ""]
            lines += [f"- {markdown_text(words)}" for words in self.unknown]
        return "\n".join(lines).rstrip() + "\n"

    def to_json(self) -> str:
        """Writes it as JSON, with the outcome of each check and the status."""
        plain = asdict(self)
        for written, check in zip(plain["checks"], self.checks, strict=True):
            written["outcome"] = check.outcome
        return json.dumps(plain | {"status": self.status}, indent=1)

    def __str__(self) -> str:
        return self.to_markdown()


def verify(
    predicted: CompileReport,
    actual: CompileReport,
    devices: Sequence[DeviceMemory] = (),
    tolerances: Tolerances | None = None,
) -> Verification:
    """Compares what a job does with what was predicted.

    Args:
        predicted: the report made before.
        actual: the report of the job's own program.
        devices: what its devices say of their memory.
        tolerances: by how much each quantity may differ.

    Returns:
        Each quantity of both, and what differs.

    Example:
        >>> from mesh_utils import Mesh
        >>> from xla_dtensor.report import CompileReport, Evidence
        >>> report = CompileReport.of(Evidence("a step", "HloModule m", Mesh.arange((8,), ("dp",))))
        >>> verify(report, report).status
        0
    """
    limits = Tolerances() if tolerances is None else tolerances
    between = diff(predicted, actual)
    new, missing, changed = _lines(predicted.collectives, actual.collectives)
    return Verification(
        titles=between.titles,
        checks=(
            *_by_role(predicted, actual, limits),
            *_of_program(predicted, actual, limits),
            *_communication(predicted, actual, limits),
            Check(
                "operations",
                "of one step",
                predicted.flops,
                actual.flops,
                limits.flops,
                unit="operations",
            ),
            *_of_devices(predicted, devices, limits),
        ),
        new=new,
        missing=missing,
        changed=changed,
        words=between.words,
        layouts=between.layouts,
        meshes=(mesh_axes_text(_plain(predicted)), mesh_axes_text(_plain(actual))),
        unknown=tuple(_unknown(predicted, actual, devices)),
    )


def _plain(report: CompileReport) -> Iterator[MeshAxis]:
    """Its axes, wherever they lie: virtual devices are in no slices."""
    return (replace(axis, slices=1) for axis in report.mesh)


def _by_role(
    predicted: CompileReport, actual: CompileReport, limits: Tolerances
) -> Iterator[Check]:
    predicted_bytes, actual_bytes = _roles(predicted), _roles(actual)
    for role in _HELD:
        if role in predicted_bytes or role in actual_bytes:
            sizes = [
                totals.get(role, 0.0) if totals else None
                for totals in (predicted_bytes, actual_bytes)
            ]
            yield Check("memory by role", kind_words(role, 2), sizes[0], sizes[1], limits.state)


def _roles(report: CompileReport) -> dict[str, float]:
    """The bytes of elements on one device, for each role; nothing where no tensor is named."""
    totals: dict[str, float] = {}
    for line in report.tensors:
        totals[line.role] = totals.get(line.role, 0.0) + line.total_device_bytes
    return totals


def _of_program(
    predicted: CompileReport, actual: CompileReport, limits: Tolerances
) -> Iterator[Check]:
    both = [r.memory if r.memory.from_compiler else None for r in (predicted, actual)]
    totals = [None if memory is None else memory.total_bytes for memory in both]
    temporaries = [None if memory is None else memory.temporaries_bytes for memory in both]
    group = "memory of the program"
    yield Check(group, "in all", totals[0], totals[1], limits.total)
    yield Check(group, "temporaries", temporaries[0], temporaries[1], limits.temporaries)


def _communication(
    predicted: CompileReport, actual: CompileReport, limits: Tolerances
) -> Iterator[Check]:
    # Not by network: virtual devices have none.
    predicted_bytes, actual_bytes = (
        _moved(report, with_network=False) for report in (predicted, actual)
    )
    fine = limits.communication * predicted.collective_bytes
    names = dict.fromkeys([*predicted_bytes, *actual_bytes])
    for name in sorted(names, key=lambda name: name == "in all"):
        both = name in predicted_bytes and name in actual_bytes
        yield Check(
            "communication",
            name,
            predicted_bytes.get(name, 0),
            actual_bytes.get(name, 0),
            limits.communication,
            allowance=0.0 if both else fine,
        )


def _of_devices(
    predicted: CompileReport, devices: Iterable[DeviceMemory], tolerances: Tolerances
) -> Iterator[Check]:
    memories = list(devices)
    total, group = predicted.memory.total_bytes, "memory of the devices"
    peaks = {memory.device: memory.peak for memory in memories if memory.peak is not None}
    if peaks:
        worst = max(peaks, key=lambda device: peaks[device])
        name = f"the most in use, on device {worst}"
        yield Check(group, name, total, peaks[worst], tolerances.peak, one_sided=True)
    limits = {memory.device: memory.limit for memory in memories if memory.limit is not None}
    if limits:
        least = min(limits, key=lambda device: limits[device])
        name = f"needed, of what device {least} has"
        yield Check(group, name, limits[least], total, 0.0, one_sided=True)


def _lines(
    before: Iterable[CollectiveLine], after: Iterable[CollectiveLine]
) -> tuple[tuple[CollectiveLine, ...], tuple[CollectiveLine, ...], tuple[LineChange, ...]]:
    """What is new, what is missing, and what moves other bytes; equal bytes first find each other.

    Lines of source are not looked at: a prediction is often made from another checkout.
    """
    here, there = _by_key(before), _by_key(after)
    new: list[CollectiveLine] = []
    missing: list[CollectiveLine] = []
    changed: list[LineChange] = []
    for key in dict.fromkeys([*here, *there]):
        unpaired, right = list(here.get(key, ())), list(there.get(key, ()))
        for line in list(unpaired):
            same = next((o for o in right if o.bytes_per_device == line.bytes_per_device), None)
            if same is not None:
                unpaired.remove(line)
                right.remove(same)
        pairs = list(zip(unpaired, right, strict=False))
        changed += [LineChange(*pair) for pair in pairs]
        missing += unpaired[len(pairs) :]
        new += right[len(pairs) :]
    return _largest(new), _largest(missing), tuple(changed)


def _by_key(
    lines: Iterable[CollectiveLine],
) -> dict[tuple[str, tuple[Axis, ...] | None, str, str], list[CollectiveLine]]:
    groups: dict[tuple[str, tuple[Axis, ...] | None, str, str], list[CollectiveLine]] = {}
    for line in lines:
        if line.moves:
            key = (line.kind, line.axes, line.origin.phase, starred(line.origin.module or ""))
            groups.setdefault(key, []).append(line)
    return groups


def _largest(lines: Iterable[CollectiveLine]) -> tuple[CollectiveLine, ...]:
    return tuple(sorted(lines, key=lambda line: (-line.bytes_per_device, line.kind)))


def _unknown(
    predicted: CompileReport, actual: CompileReport, devices: Sequence[DeviceMemory]
) -> Iterator[str]:
    for words, report in (("The prediction", predicted), ("The job's program", actual)):
        if not report.tensors:
            yield f"{words} names no tensors: its memory is not known by role."
        if not report.memory.from_compiler:
            yield f"{words} comes without its compiler's word on memory."
        for part in report.unread:
            yield f"{words} could not be read in full: {part}"
    if not any(memory.peak is not None or memory.limit is not None for memory in devices):
        yield "The devices do not say what memory they use, or were not asked."


# ------------------------------------------------------------------------- A verification in words
#
# What passed and what did not, what is new, what may be the reason.

_WORDS = {"same": "ok", "differs": "DIFFERS", "unknown": "not known"}
_MANY = 20


def verdict_text(verification: Verification) -> str:
    """Says in a sentence whether the job does what was predicted.

    Args:
        verification: what was compared.

    Returns:
        A sentence; it begins with "As predicted" or "NOT as predicted".
    """
    checked = [check for check in verification.checks if check.outcome != "unknown"]
    if verification.meshes[0] != verification.meshes[1]:
        return (
            f"NOT as predicted: the prediction is for the mesh {verification.meshes[0]}, the job "
            f"has {verification.meshes[1]}."
        )
    failed = verification.differing
    if not failed:
        return f"As predicted: {len(checked)} quantities are the same within their tolerances."
    names = ", ".join(f"{check.group}, {check.name}" for check in failed[:3])
    more = f" and {len(failed) - 3} more" if len(failed) > 3 else ""
    return f"NOT as predicted: {len(failed)} of {len(checked)} quantities differ ({names}{more})."


def _tables(verification: Verification) -> Iterator[tuple[str, Table]]:
    header = ("what", "quantity", ">predicted", ">job", ">difference", ">tolerance", "outcome")
    yield "Quantities", Table(header, tuple(_check_row(check) for check in verification.checks))
    for title, lines in (
        ("New collectives", verification.new),
        ("Missing collectives", verification.missing),
    ):
        if lines:
            yield title, _lines_table(lines)
    if verification.changed:
        rows = [
            (
                change.after.kind,
                axes_text(change.after.axes),
                change.after.origin.phase,
                module_text(change.after.origin),
                bytes_text(change.before.bytes_per_device),
                bytes_text(change.after.bytes_per_device),
            )
            for change in verification.changed[:_MANY]
        ]
        header = ("kind", "mesh axes", "phase", "module", ">predicted", ">job")
        more = max(0, len(verification.changed) - _MANY)
        yield "Collectives that move other bytes", Table(header, tuple(rows), more)
    if verification.layouts:
        yield "Layouts that differ", Table(("array", "predicted", "job"), verification.layouts)
    if verification.words:
        header = ("what", "predicted", "job")
        yield "Made with other versions, flags or machines", Table(header, verification.words)


def _check_row(check: Check) -> tuple[str, ...]:
    difference = "-"
    if check.predicted is not None and check.measured is not None:
        over = check.measured - check.predicted
        sign = "+" if over > 0 else ""
        share = f" ({sign}{100 * over / check.predicted:.1f} %)" if check.predicted and over else ""
        difference = f"{sign}{_number(over, check.unit)}{share}"
    return (
        check.group,
        check.name,
        _number(check.predicted, check.unit),
        _number(check.measured, check.unit),
        difference,
        share_text(check.tolerance),
        _WORDS[check.outcome],
    )


def _number(amount: float | None, unit: str) -> str:
    if unit == "bytes":
        return bytes_text(amount)
    return "-" if amount is None else f"{amount:.4g}"


def _lines_table(lines: Iterable[CollectiveLine]) -> Table:
    changes = list(lines)
    rows = [
        (
            line.kind,
            axes_text(line.axes),
            line.origin.phase,
            module_text(line.origin),
            source_text(line.origin),
            f"{line.executions:,}",
            bytes_text(line.bytes_per_device),
        )
        for line in changes[:_MANY]
    ]
    header = ("kind", "mesh axes", "phase", "module", "source", ">runs", ">bytes")
    return Table(header, tuple(rows), max(0, len(changes) - _MANY))
