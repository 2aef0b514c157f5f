"""What each module communicates, as a table whose rows are indented by depth."""

from __future__ import annotations

from xla_dtensor.report.module_counts import CommCounts, ModuleComm
from xla_dtensor.report.quantities import bytes_text
from xla_dtensor.report.report_words import one_line

__all__ = ["tracing_table"]

_HEADER = ("module", "phase", "collective", "mesh axes", "runs", "bytes")
_RIGHT = ("runs", "bytes")
_NO_MODULES = (
    "The names in this program tell no modules (torch_xla's never do): everything is Global."
)


def tracing_table(counts: CommCounts, *, with_axes: bool = True, depth: int | None = None) -> str:
    """Writes the table.

    Args:
        counts: what to write.
        with_axes: whether kinds are told apart by their mesh axes.
        depth: how deep modules are shown; None for all.

    Returns:
        Lines, with a line break at the end. Bytes are of one device in one step; ">=" where a loop
        of unknown trip count was counted once.

    Example:
        >>> print(tracing_table(CommCounts(ModuleComm("Global"))), end="")
        no collectives
    """
    if not counts.root.parts:
        return "no collectives\n"
    rows = [_HEADER]
    for module in counts.root.walk():
        if depth is None or module.depth <= depth:
            rows += _rows(module, with_axes)
    columns = [i for i, name in enumerate(_HEADER) if with_axes or name != "mesh axes"]
    shown = [[row[i] for i in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    right = [_HEADER[i] in _RIGHT for i in columns]
    lines = [
        "  ".join(
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in shown
    ]
    if not counts.has_modules:
        lines.append(_NO_MODULES)
    lines += [f"not read: {one_line(words)}" for words in counts.unread]
    return "\n".join(lines) + "\n"


def _rows(module: ModuleComm, with_axes: bool) -> list[tuple[str, ...]]:
    name = "  " * module.depth + one_line(module.path)
    rows: list[tuple[str, ...]] = []
    phase = None
    for entry in module.entries(with_axes=with_axes):
        bound = ">=" if entry.at_least else ""
        rows.append(
            (
                name if not rows else "",
                entry.phase if entry.phase != phase else "",
                entry.kind,
                entry.axes,
                f"{bound}{entry.count:,}",
                bound + bytes_text(entry.bytes),
            )
        )
        phase = entry.phase
    return rows
