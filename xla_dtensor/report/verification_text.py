"""A verification in words: what passed and what did not, what is new, what may be the reason."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from xla_dtensor.report.collective_lines import CollectiveLine
from xla_dtensor.report.quantities import bytes_text, share_text
from xla_dtensor.report.report_markdown import markdown_table, markdown_text
from xla_dtensor.report.report_tables import Table
from xla_dtensor.report.report_words import axes_text, module_text, source_text
from xla_dtensor.report.verification import Check, Verification

__all__ = ["to_markdown", "verdict_text"]

_WORDS = {"same": "ok", "differs": "DIFFERS", "unknown": "not known"}
_MANY = 20


def verdict_text(verification: Verification) -> str:
    """Says in a sentence whether the job does what was predicted.

    Args:
        verification: what was compared.

    Returns:
        A sentence; it begins with "As predicted" or "NOT as predicted".
    """
    known = [check for check in verification.checks if check.outcome != "unknown"]
    if verification.meshes[0] != verification.meshes[1]:
        return (
            f"NOT as predicted: the prediction is for the mesh {verification.meshes[0]}, the job "
            f"has {verification.meshes[1]}."
        )
    failed = verification.differing
    if not failed:
        return f"As predicted: {len(known)} quantities are the same within their tolerances."
    names = ", ".join(f"{check.group}, {check.name}" for check in failed[:3])
    more = f" and {len(failed) - 3} more" if len(failed) > 3 else ""
    return f"NOT as predicted: {len(failed)} of {len(known)} quantities differ ({names}{more})."


def to_markdown(verification: Verification) -> str:
    """Writes a verification.

    Args:
        verification: what was compared.

    Returns:
        Markdown, with a line break at the end.
    """
    titles = verification.titles
    lines = ["# The job against its prediction", "", markdown_text(verdict_text(verification)), ""]
    for name, title in zip(("predicted", "job"), titles, strict=True):
        lines.append(f"- {name}: {markdown_text(title)}")
    lines.append("")
    for title, table in _tables(verification):
        lines += [f"## {title}", "", *markdown_table(table), ""]
    if verification.unknown:
        lines += ["## Not compared", ""]
        lines += [f"- {markdown_text(words)}" for words in verification.unknown]
    return "\n".join(lines).rstrip() + "\n"


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


def _number(value: float | None, unit: str) -> str:
    if unit == "bytes":
        return bytes_text(value)
    return "-" if value is None else f"{value:.4g}"


def _lines_table(lines: Iterable[CollectiveLine]) -> Table:
    told = list(lines)
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
        for line in told[:_MANY]
    ]
    header = ("kind", "mesh axes", "phase", "module", "source", ">runs", ">bytes")
    return Table(header, tuple(rows), max(0, len(told) - _MANY))
