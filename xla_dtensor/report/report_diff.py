"""What differs between two reports: the same step before and after a change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from xla_dtensor.report.finding import Finding
from xla_dtensor.report.quantities import bytes_text, seconds_text
from xla_dtensor.report.report_tables import Table, kind_words, roofline_rows
from xla_dtensor.report.report_words import axes_text, mesh_axes_text, verdict

if TYPE_CHECKING:
    from xla_dtensor.report.compile_report import CompileReport

__all__ = ["Change", "ReportDiff", "diff"]


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
        from xla_dtensor.report.report_markdown import markdown_table, markdown_text

        lines = ["# What changed", ""]
        for name, title, words in zip(("before", "after"), self.titles, self.verdicts, strict=True):
            lines.append(f"- {name}: {markdown_text(title)}. {markdown_text(words)}")
        lines.append("")
        if self.is_empty:
            lines += ["Nothing that the step does differs.", ""]
        for name, found in (("gone", self.findings_gone), ("new", self.findings_new)):
            if found:
                lines += [f"## Findings that are {name}", ""]
                lines += [f"- {each.severity}: {markdown_text(each.title)}" for each in found]
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
    gone, new = _findings(before, after)
    return ReportDiff(
        titles=(before.title, after.title),
        verdicts=(verdict(before), verdict(after)),
        fits=after.fits,
        words=tuple(_words(before, after)),
        memory=tuple(_changes(_memory(before), _memory(after))),
        collectives=tuple(_changes(_collectives(before), _collectives(after))),
        roofline=tuple(_changes(_roofline(before), _roofline(after))),
        findings_gone=gone,
        findings_new=new,
        layouts=tuple(_text_changes(_layouts(before), _layouts(after))),
    )


def _memory(report: CompileReport) -> dict[str, float]:
    memory = report.memory
    found: dict[str, float] = {}
    for part in memory.parts:
        name = kind_words(part.role, 2)
        found[name] = found.get(name, 0) + part.memory_bytes
    found["temporaries"] = memory.temporaries_bytes
    found["program"] = memory.code_bytes
    found["in all"] = memory.total_bytes
    if memory.capacity_bytes is not None:
        found["usable"] = memory.capacity_bytes
    return found


def _collectives(report: CompileReport) -> dict[str, float]:
    found: dict[str, float] = {}
    for line in report.collectives:
        if line.moves:
            name = f"{line.kind} over {axes_text(line.axes, report.mesh)}"
            name += "" if line.network == "-" else f" on {line.network}"
            found[name] = found.get(name, 0) + line.bytes_per_device
    found["in all"] = report.collective_bytes
    return found


def _roofline(report: CompileReport) -> dict[str, float]:
    found = {name: seconds for _, name, seconds in roofline_rows(report)}
    model = report.roofline
    if model is None:
        return found
    return found | {
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


def _findings(
    before: CompileReport, after: CompileReport
) -> tuple[tuple[Finding, ...], tuple[Finding, ...]]:
    """Those that only one has. Numbers in their texts may differ: code and origin say which."""
    return _only(before, after), _only(after, before)


def _only(report: CompileReport, other: CompileReport) -> tuple[Finding, ...]:
    there = Counter((each.code, each.origin) for each in other.findings)
    found: list[Finding] = []
    for each in report.findings:
        key = each.code, each.origin
        if there[key] > 0:
            there[key] -= 1
        else:
            found.append(each)
    return tuple(found)


def _words(before: CompileReport, after: CompileReport) -> Iterator[tuple[str, str, str]]:
    yield from _text_changes(_about(before), _about(after))


def _about(report: CompileReport) -> dict[str, str]:
    return {
        "machine": report.machine.name or report.machine.words,
        "mesh": mesh_axes_text(report.mesh),
        "command": report.command,
        **{f"version of {name}": text for name, text in report.versions.items()},
        **{f"option {name}": text for name, text in report.options.items()},
        **dict(report.attributes),
    }


def _signed(value: float | None, write: Callable[[float | None], str]) -> str:
    text = write(value)
    return f"+{text}" if value is not None and value > 0 else text


def _factor(change: Change) -> str:
    if not change.before or change.after is None:
        return "-"
    return f"x {change.after / change.before:.3g}"
