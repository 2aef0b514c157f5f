"""A sharding for a terminal: a grid of blocks, each with the devices that hold it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xla_dtensor.report.errors import ReportError
from xla_dtensor.report.report_words import one_line
from xla_dtensor.report.sharding_blocks import COLUMNS, Face, ShardingPicture

__all__ = ["cell_text", "heading", "to_rich", "to_text"]

_GAP = "..."
_COLOURS = ("blue", "green", "magenta", "cyan", "yellow", "red")


def cell_text(devices: Sequence[int] | None, limit: int = 3) -> str:
    """Writes the devices of a block.

    Args:
        devices: their ids; None for a gap.
        limit: how many runs of ids are written out.

    Returns:
        Runs of ids, and how many there are where that is not seen.

    Example:
        >>> cell_text((0, 1, 2, 3)), cell_text((0, 4)), cell_text(tuple(range(0, 64, 4)))
        ('0-3', '0, 4', '0, 4, 8, ... (16)')
    """
    if devices is None:
        return _GAP
    runs: list[list[int]] = []
    for device in devices:
        if runs and device == runs[-1][1] + 1:
            runs[-1][1] = device
        else:
            runs.append([device, device])
    words = [
        str(first) if first == last else f"{first}{', ' if last == first + 1 else '-'}{last}"
        for first, last in runs[:limit]
    ]
    text = ", ".join(words)
    return text if len(runs) <= limit else f"{text}, {_GAP} ({len(devices):,})"


def heading(picture: ShardingPicture) -> str:
    """Writes the first line: what is shown, and how it lies on which mesh."""
    words = [one_line(picture.title)] if picture.title else []
    if picture.layout:
        words.append(picture.layout)
    if picture.mesh is not None:
        names = zip(picture.mesh.axis_names, picture.mesh.mesh_shape, strict=True)
        words.append("on " + ", ".join(f"{name}={size}" for name, size in names))
    return " ".join(words)


def to_text(picture: ShardingPicture, max_width: int = 100) -> str:
    """Draws a picture as text.

    Args:
        picture: the picture.
        max_width: characters of a line.

    Returns:
        Lines, without a line break at the end.
    """
    columns = COLUMNS
    lines = _lines(picture, columns)
    while columns > 3 and max(map(len, lines), default=0) > max_width:
        columns -= 1
        lines = _lines(picture, columns)
    return "\n".join(line.rstrip() for line in lines)


def _lines(picture: ShardingPicture, columns: int) -> list[str]:
    lines = [heading(picture)] if heading(picture) else []
    lines += [f"  {line}" for line in picture.summary]
    for face in picture.faces(columns=columns):
        if face.hidden:
            lines += ["", f"{_GAP} and {face.hidden:,} more"]
            continue
        lines += ["", *([face.title] if face.title else [])]
        lines += _aligned(table_of(picture, face))
    return lines


def table_of(picture: ShardingPicture, face: Face) -> list[list[str]]:
    """Returns the words of a face: two header rows, then a row of blocks each."""
    row, column = picture.sides
    left = [_label(picture, row, block) for block in face.rows]
    top = [_label(picture, column, block) for block in face.columns]
    head = [
        [*(["", ""]), *(words[part] for words in top)]
        for part in (0, 1)
        if any(words[part] for words in top)
    ]
    if head:
        head[0][0] = "devices"
    body = [
        [*words, *(cell_text(cell) for cell in cells)]
        for words, cells in zip(left, face.cells, strict=True)
    ]
    return [*head, *body]


def _label(picture: ShardingPicture, dim: int | None, block: int | None) -> tuple[str, str]:
    if block is None:
        return "", _GAP
    return ("", "") if dim is None else picture.label(dim, block)


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True) if width)
        for row in rows
    ]


def to_rich(picture: ShardingPicture, *, use_color: bool = True) -> Any:
    """Draws a picture for rich.

    Args:
        picture: the picture.
        use_color: whether blocks have colours: one for each set of devices, in turn.

    Returns:
        A rich Group: heading, summary and tables.

    Raises:
        ReportError: rich is not installed.
    """
    try:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text
    except ImportError as error:
        raise ReportError(
            "A picture of a sharding was asked for with rich. It is not installed. Use text(), "
            "or pip install rich."
        ) from error
    parts: list[Any] = [Text(heading(picture), style="bold")]
    parts += [Text(f"  {line}") for line in picture.summary]
    colours: dict[Any, str] = {}
    for face in picture.faces():
        if face.hidden:
            parts.append(Text(f"{_GAP} and {face.hidden:,} more"))
            continue
        words = table_of(picture, face)
        num_head = len(words) - len(face.rows)
        table = Table(show_header=False, title=face.title or None, title_justify="left")
        for _ in words[0]:
            table.add_column(justify="center")
        for row in words[:num_head]:
            table.add_row(*(Text(cell, style="dim") for cell in row))
        for row, cells in zip(words[num_head:], face.cells, strict=True):
            styles = [_style(cell, colours) if use_color else "" for cell in cells]
            blocks = (Text(c, style=s) for c, s in zip(row[2:], styles, strict=True))
            table.add_row(Text(row[0], style="dim"), Text(row[1], style="dim"), *blocks)
        parts.append(table)
    return Group(*parts)


def _style(cell: tuple[int, ...] | None, colours: dict[Any, str]) -> str:
    if cell is None:
        return ""
    return colours.setdefault(cell, f"white on {_COLOURS[len(colours) % len(_COLOURS)]}")
