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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal, TypeAlias

from mesh_utils import Axis
from xla_dtensor.argument_types import argument_types
from xla_dtensor.report.collective_lines import CollectiveLine, starred
from xla_dtensor.report.compile_report import CompileReport
from xla_dtensor.report.errors import ReportError
from xla_dtensor.report.report_diff import diff
from xla_dtensor.report.report_machine import MeshAxis
from xla_dtensor.report.report_tables import kind_words
from xla_dtensor.report.report_words import axes_text, mesh_axes_text

__all__ = ["Check", "DeviceMemory", "LineChange", "Tolerances", "Verification", "verify"]

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
        for name, value in asdict(self).items():
            if not 0 <= value < float("inf"):
                raise ReportError(
                    f"A report was to be verified with the tolerance {name}={value}. A tolerance "
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
        """Writes it as Markdown, which reads well in a terminal too."""
        from xla_dtensor.report.verification_text import to_markdown

        return to_markdown(self)

    def to_json(self) -> str:
        """Writes it as JSON, with the outcome of each check and the status."""
        data = asdict(self)
        for written, check in zip(data["checks"], self.checks, strict=True):
            written["outcome"] = check.outcome
        return json.dumps(data | {"status": self.status}, indent=1)

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
        >>> from xla_dtensor.report.evidence import Evidence
        >>> report = CompileReport.of(Evidence("a step", "HloModule m", Mesh.arange((8,), ("dp",))))
        >>> verify(report, report).status
        0
    """
    given = Tolerances() if tolerances is None else tolerances
    between = diff(predicted, actual)
    new, missing, changed = _lines(predicted.collectives, actual.collectives)
    return Verification(
        titles=between.titles,
        checks=(
            *_by_role(predicted, actual, given),
            *_of_program(predicted, actual, given),
            *_communication(predicted, actual, given),
            Check(
                "operations",
                "of one step",
                predicted.flops,
                actual.flops,
                given.flops,
                unit="operations",
            ),
            *_of_devices(predicted, devices, given),
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


def _by_role(predicted: CompileReport, actual: CompileReport, given: Tolerances) -> Iterator[Check]:
    before, after = _roles(predicted), _roles(actual)
    for role in _HELD:
        if role in before or role in after:
            known = [found.get(role, 0.0) if found else None for found in (before, after)]
            yield Check("memory by role", kind_words(role, 2), known[0], known[1], given.state)


def _roles(report: CompileReport) -> dict[str, float]:
    """The bytes of elements on one device, for each role; nothing where no tensor is named."""
    found: dict[str, float] = {}
    for line in report.tensors:
        found[line.role] = found.get(line.role, 0.0) + line.total_device_bytes
    return found


def _of_program(
    predicted: CompileReport, actual: CompileReport, given: Tolerances
) -> Iterator[Check]:
    both = [r.memory if r.memory.from_compiler else None for r in (predicted, actual)]
    totals = [None if memory is None else memory.total_bytes for memory in both]
    made = [None if memory is None else memory.temporaries_bytes for memory in both]
    group = "memory of the program"
    yield Check(group, "in all", totals[0], totals[1], given.total)
    yield Check(group, "temporaries", made[0], made[1], given.temporaries)


def _communication(
    predicted: CompileReport, actual: CompileReport, given: Tolerances
) -> Iterator[Check]:
    before, after = _bytes_moved(predicted), _bytes_moved(actual)
    fine = given.communication * predicted.collective_bytes
    for name in dict.fromkeys([*before, *after]):
        both = name in before and name in after
        yield Check(
            "communication",
            name,
            before.get(name, 0),
            after.get(name, 0),
            given.communication,
            allowance=0.0 if both else fine,
        )
    moved = actual.collective_bytes
    yield Check("communication", "in all", predicted.collective_bytes, moved, given.communication)


def _bytes_moved(report: CompileReport) -> dict[str, float]:
    # Not by network: virtual devices have none.
    found: dict[str, float] = {}
    for line in report.collectives:
        if line.moves:
            name = f"{line.kind} over {axes_text(line.axes, report.mesh)}"
            found[name] = found.get(name, 0) + line.bytes_per_device
    return found


def _of_devices(
    predicted: CompileReport, devices: Iterable[DeviceMemory], given: Tolerances
) -> Iterator[Check]:
    told = list(devices)
    total, group = predicted.memory.total_bytes, "memory of the devices"
    peaks = {one.device: one.peak for one in told if one.peak is not None}
    if peaks:
        worst = max(peaks, key=lambda device: peaks[device])
        name = f"the most in use, on device {worst}"
        yield Check(group, name, total, peaks[worst], given.peak, one_sided=True)
    limits = {one.device: one.limit for one in told if one.limit is not None}
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
        left, right = list(here.get(key, ())), list(there.get(key, ()))
        for line in list(left):
            same = next((o for o in right if o.bytes_per_device == line.bytes_per_device), None)
            if same is not None:
                left.remove(line)
                right.remove(same)
        pairs = list(zip(left, right, strict=False))
        changed += [LineChange(*pair) for pair in pairs]
        missing += left[len(pairs) :]
        new += right[len(pairs) :]
    return _largest(new), _largest(missing), tuple(changed)


def _by_key(
    lines: Iterable[CollectiveLine],
) -> dict[tuple[str, tuple[Axis, ...] | None, str, str], list[CollectiveLine]]:
    found: dict[tuple[str, tuple[Axis, ...] | None, str, str], list[CollectiveLine]] = {}
    for line in lines:
        if line.moves:
            key = (line.kind, line.axes, line.origin.phase, starred(line.origin.module or ""))
            found.setdefault(key, []).append(line)
    return found


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
    if not any(one.peak is not None or one.limit is not None for one in devices):
        yield "The devices do not say what memory they use, or were not asked."
