"""Reports as plain text."""

from collections.abc import Iterable, Sequence

from xla_dtensor.report.summary import CollectiveSummary

_HEADER = ("collective", "mesh axes", "count", "MB per device")


def render_collectives(summary: Iterable[CollectiveSummary]) -> str:
    """Writes a summary as a table.

    Args:
        summary: as `summarize()` gives it.

    Returns:
        Aligned lines without a line break at the end. "mixed": the groups follow no mesh axes, or
        no mesh was given. "-": each device is alone, nothing is sent. ">=": a loop of unknown trip
        count was counted once. MB are 1e6 bytes.

    Example:
        >>> print(render_collectives([CollectiveSummary("all-reduce", ("tp",), 4, 2_000_000)]))
        collective  mesh axes  count  MB per device
        all-reduce  tp             4          2.000
    """
    rows = [_HEADER, *map(_cells, summary)]
    if len(rows) == 1:
        return "no collectives"
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(_line(row, widths) for row in rows)


def _cells(row: CollectiveSummary) -> tuple[str, str, str, str]:
    bound = ">=" if row.at_least else ""
    axes = "mixed" if row.axes is None else ", ".join(map(str, row.axes)) or "-"
    return row.kind, axes, f"{bound}{row.count}", f"{bound}{row.bytes_per_device / 1e6:,.3f}"


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    kind, axes, count, size = row
    return "  ".join(
        (
            kind.ljust(widths[0]),
            axes.ljust(widths[1]),
            count.rjust(widths[2]),
            size.rjust(widths[3]),
        )
    )
