"""The tables of a report, as words: Markdown and HTML write the same ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from xla_dtensor.report.collective_lines import CollectiveLine, starred
from xla_dtensor.report.compile_report import CompileReport
from xla_dtensor.report.quantities import bytes_text, seconds_text, share_text
from xla_dtensor.report.report_tensors import TensorLine
from xla_dtensor.report.report_words import axes_text, module_text, source_text

__all__ = [
    "AxisTotal",
    "Table",
    "axes_table",
    "axis_totals",
    "buffers_table",
    "collectives_table",
    "differing_table",
    "kind_words",
    "made_by_table",
    "memory_table",
    "roofline_rows",
    "roofline_table",
    "tensors_table",
]

MANY = 15
"""Rows of a table that shows the largest only."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of words under a header.

    Attributes:
        header: a word for each column; columns of numbers have ">" before it.
        rows: the cells.
        more: how many rows were left out.
    """

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    more: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """The header without the marks."""
        return tuple(name.removeprefix(">") for name in self.header)

    @property
    def right(self) -> tuple[bool, ...]:
        """For each column whether it holds numbers."""
        return tuple(name.startswith(">") for name in self.header)


@dataclass(frozen=True, slots=True)
class AxisTotal:
    """What all collectives over the same axes and network move.

    Attributes:
        axes: in words.
        network: "ICI", "DCN" or "-".
        phases: bytes on one device in one step, by phase.
        kinds: the kinds, the most bytes first.
        at_least: whether it is a lower bound.
    """

    axes: str
    network: str
    phases: dict[str, int]
    kinds: tuple[str, ...]
    at_least: bool

    @property
    def bytes(self) -> int:
        """The bytes of all phases."""
        return sum(self.phases.values())


def axis_totals(report: CompileReport) -> tuple[AxisTotal, ...]:
    """Sums the collectives by axes and network.

    Args:
        report: the report.

    Returns:
        The sums, the most bytes first; what moves nothing is left out.
    """
    groups: dict[tuple[str, str], list[CollectiveLine]] = {}
    for line in report.collectives:
        if line.moves:
            key = axes_text(line.axes, report.mesh), line.network
            groups.setdefault(key, []).append(line)
    totals = [_total(*key, lines) for key, lines in groups.items()]
    return tuple(sorted(totals, key=lambda total: (-total.bytes, total.axes, total.network)))


def axes_table(report: CompileReport) -> Table:
    """Collectives by axes, network and phase."""
    totals = axis_totals(report)
    phases = [phase for phase in _PHASES if any(phase in total.phases for total in totals)]
    rows = [
        (
            total.axes,
            total.network,
            *(bytes_text(total.phases.get(phase)) for phase in phases),
            _bound(total.at_least) + bytes_text(total.bytes),
            ", ".join(total.kinds),
        )
        for total in totals
    ]
    header = ("mesh axes", "network", *(f">{phase}" for phase in phases), ">bytes", "kinds")
    return Table(header, tuple(rows))


def collectives_table(lines: Iterable[CollectiveLine], report: CompileReport) -> Table:
    """The collectives that move the most, with the lines that they were made for."""
    all_lines = list(lines)
    rows = [
        (
            line.kind,
            axes_text(line.axes, report.mesh),
            line.network,
            _bound(line.at_least) + bytes_text(line.bytes_per_device),
            bytes_text(line.bytes_each),
            f"{_bound(line.at_least)}{line.executions:,}",
            line.origin.phase,
            module_text(line.origin),
            source_text(line.origin),
        )
        for line in all_lines[:MANY]
    ]
    header = (
        "kind",
        "mesh axes",
        "network",
        ">bytes",
        ">each",
        ">times",
        "phase",
        "made for",
        "line",
    )
    return Table(header, tuple(rows), len(all_lines) - len(rows))


def memory_table(report: CompileReport) -> Table:
    """What one device holds, part by part, and what it can."""
    memory = report.memory
    rows = [
        (
            kind_words(part.role, part.count),
            f"{part.count:,}",
            bytes_text(part.memory_bytes),
            bytes_text(part.padding_bytes) if part.padding_bytes else "-",
            _of(part.memory_bytes, memory.total_bytes),
        )
        for part in memory.parts
    ]
    single = (("temporaries", memory.temporaries_bytes), ("program", memory.code_bytes))
    rows += [
        (name, "", bytes_text(size), "-", _of(size, memory.total_bytes)) for name, size in single
    ]
    if memory.unexplained_bytes:
        rows.append(("not explained", "", bytes_text(memory.unexplained_bytes), "", ""))
    rows.append(("in all", "", bytes_text(memory.total_bytes), "", ""))
    if memory.capacity_bytes is not None:
        rows.append(("usable", "", bytes_text(memory.capacity_bytes), "", ""))
        rows.append(("to spare", "", bytes_text(memory.spare_bytes), "", ""))
    return Table(("per device", ">arrays", ">bytes", ">of it padding", ">share"), tuple(rows))


def buffers_table(report: CompileReport) -> Table:
    """The largest buffers, with what made them."""
    counts: dict[tuple[str, ...], int] = {}
    for one in report.memory.largest:
        name = one.name if one.origin is not None else starred(one.name)
        place = module_text(one.origin), source_text(one.origin)
        key = bytes_text(one.bytes), one.shape, one.kind, name, *place
        counts[key] = counts.get(key, 0) + 1
    rows = [(key[0], f"{count:,}", *key[1:]) for key, count in counts.items()]
    header = (">bytes each", ">arrays", "shape", "kind", "name", "made for", "line")
    return Table(header, tuple(rows[:MANY]), len(rows) - len(rows[:MANY]))


def roofline_rows(report: CompileReport) -> tuple[tuple[str, str, float], ...]:
    """The modelled times of a step: key (as `Roofline.binding`), name and seconds."""
    model = report.roofline
    if model is None:
        return ()
    axes = [(each, axes_text(tuple(each.split(", ")), report.mesh)) for each in model.ici_seconds]
    each_axis = [
        (f"ici {axis}", f"ICI, {words}", model.ici_seconds[axis])
        for axis, words in axes
        if len(axes) > 1
    ]
    name = "ICI, all axes" if len(axes) > 1 else f"ICI, {axes[0][1]}" if axes else "ICI"
    rows = [
        ("compute", "compute", model.compute_seconds),
        ("HBM", "memory (HBM)", model.hbm_seconds),
        ("ICI", name, model.total_ici_seconds),
        *each_axis,
        ("DCN", "DCN", model.dcn_seconds),
    ]
    return tuple(row for row in rows if row[2] > 0 or row[0] in ("compute", "HBM"))


def roofline_table(report: CompileReport) -> Table:
    """The modelled times of a step."""
    model = report.roofline
    step = 0.0 if model is None else model.step_seconds
    rows = [
        (name, seconds_text(each), share_text(each / step) if step else "-")
        for _, name, each in roofline_rows(report)
    ]
    return Table(("modelled", ">seconds", ">of the step"), tuple(rows))


def tensors_table(report: CompileReport) -> Table:
    """The largest arrays, with their layouts."""
    rows = [_tensor(line) for line in report.tensors[:MANY]]
    header = (
        *("name", "role", ">arrays", "shape", "dtype", "layout", "part of one device"),
        ">bytes per device",
    )
    return Table(header, tuple(rows), len(report.tensors) - len(rows))


def differing_table(report: CompileReport) -> Table:
    """The arrays whose layout is another than was asked for."""
    differing = [line for line in report.tensors if line.differs]
    rows = [
        (
            line.name,
            line.role,
            line.requested or "-",
            line.chosen or "-",
            bytes_text(line.total_device_bytes),
        )
        for line in differing[:MANY]
    ]
    header = ("name", "role", "asked for", "compiled", ">bytes per device")
    return Table(header, tuple(rows), len(differing) - len(rows))


def made_by_table(report: CompileReport) -> Table:
    """Versions, options, times and further facts: how the report came to be."""
    rows = [(f"{name}", version) for name, version in report.versions.items()]
    rows += [(f"{name} took", seconds_text(each)) for name, each in report.seconds.items()]
    if report.peak_host_bytes is not None:
        rows.append(("memory of the compiling process", bytes_text(report.peak_host_bytes)))
    rows += [(f"option {name}", value) for name, value in report.options.items()]
    rows += list(report.attributes.items())
    return Table(("what", "value"), tuple(rows))


def kind_words(role: str, count: int) -> str:
    """Writes a role for so many arrays.

    Args:
        role: as of the evidence.
        count: how many.

    Returns:
        The role, in the plural if there are several.

    Example:
        >>> kind_words("parameter", 2), kind_words("optimizer state", 2)
        ('parameters', 'optimizer state')
    """
    return f"{role}s" if count != 1 and role in _COUNTED else role


_COUNTED = frozenset(
    {
        *("parameter", "frozen parameter", "buffer", "gradient", "argument", "result", "number"),
        *("constant", "temporary"),
    }
)
_PHASES = ("forward", "backward", "optimizer", "other")


def _total(axes: str, network: str, lines: list[CollectiveLine]) -> AxisTotal:
    return AxisTotal(
        axes,
        network,
        _summed(lines, lambda line: str(line.origin.phase)),
        tuple(_summed(lines, lambda line: line.kind)),
        any(line.at_least for line in lines),
    )


def _summed(lines: list[CollectiveLine], key_of: Callable[[CollectiveLine], str]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for line in lines:
        sums[key_of(line)] = sums.get(key_of(line), 0) + line.bytes_per_device
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def _tensor(line: TensorLine) -> tuple[str, ...]:
    return (
        line.name,
        line.role,
        f"{line.count:,}",
        _dims(line.shape),
        line.dtype,
        line.layout_words,
        _dims(line.device_shape),
        bytes_text(line.total_device_bytes),
    )


def _dims(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _of(size: int, total: int) -> str:
    return share_text(size / total) if total else "-"


def _bound(at_least: bool) -> str:
    return ">=" if at_least else ""
