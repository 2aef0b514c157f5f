"""Pictures of how a parameter lies on the mesh: which device holds which tile.

A tensor is drawn as a box of two of its dims, cut along the lines between devices. At the left and
at the top stand the coordinates, along the mesh axes, of the devices that hold the row and the
column of tiles; the tile of the first device is filled. Sheets behind the box are copies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from xla_dtensor.report.compile_report import CompileReport
from xla_dtensor.report.placement_texts import AxisUse, axis_uses
from xla_dtensor.report.quantities import bytes_text
from xla_dtensor.report.report_html_charts import axis_colour_of
from xla_dtensor.report.report_html_elements import Element, element, number
from xla_dtensor.report.report_tensors import TensorLine

__all__ = ["sharding_pictures"]

PICTURES = 8
"""How many parameters are drawn."""

_SHOWN = 8
"""Tiles along a side that are all drawn; of more, the first ones and the last."""

_TOP, _BOX_WIDTH, _BOX_HEIGHT = 40, 200, 150
_LETTER = 5.2
"""The width of a letter of a label, more or less."""


@dataclass(frozen=True, slots=True)
class Side:
    """One side of the box: a dim of the tensor, or nothing.

    Attributes:
        dim: the dim; None if the tensor has no such.
        extent: its size.
        uses: the axes that split it, in the order of the mesh.
    """

    dim: int | None
    extent: int
    uses: tuple[AxisUse, ...]

    @property
    def parts(self) -> int:
        """Into how many parts it is split."""
        return math.prod(use.size for use in self.uses)

    def tiles(self) -> list[int | None]:
        """The numbers of the tiles that are drawn; None is a gap."""
        if self.parts <= _SHOWN:
            return list(range(self.parts))
        return [0, 1, 2, 3, None, self.parts - 1]

    def words(self, tile: int) -> str:
        """The coordinates of the devices that hold a tile."""
        if any(use.is_strided for use in self.uses):
            return ""
        coordinates: list[str] = []
        for use in reversed(self.uses):
            tile, coordinate = divmod(tile, use.size)
            coordinates.append(f"{use.axis} {coordinate}")
        return ", ".join(reversed(coordinates))


def sharding_pictures(report: CompileReport) -> Element | None:
    """Draws the largest parameters.

    Args:
        report: the report.

    Returns:
        The pictures; None if there is no parameter whose layout can be read.
    """
    drawn: list[Element] = []
    lines = [line for line in report.tensors if line.role.endswith("parameter")]
    for line in sorted(lines, key=lambda each: -each.count * each.global_bytes):
        uses = axis_uses(line.layout, report.mesh, len(line.shape))
        if uses is not None and line.shape and len(drawn) < PICTURES:
            drawn.append(_figure(line, uses, report))
    return element("div", *drawn, class_="pictures") if drawn else None


def _figure(line: TensorLine, uses: Sequence[AxisUse], report: CompileReport) -> Element:
    many = f"{line.count:,} of " if line.count > 1 else ""
    whole, part = _dims(line.shape), _dims(line.device_shape)
    caption = element(
        "figcaption",
        element("b", line.name, class_="code"),
        element("span", f"{many}{whole} {line.dtype}, {bytes_text(line.global_bytes)}"),
        element("span", f"each device holds {part}, {bytes_text(line.device_bytes)}"),
        *(element("span", sentence, class_="quiet") for sentence in _sentences(line, uses)),
    )
    return element("figure", _drawing(line, uses, report), caption)


def _sentences(line: TensorLine, uses: Sequence[AxisUse]) -> list[str]:
    sentences: list[str] = []
    rows, columns = _sides(line, uses)
    for dim, extent in enumerate(line.shape):
        over = [use for use in uses if use.dim == dim and use.size > 1]
        if over and dim not in (rows.dim, columns.dim):
            sentences.append(f"dim {dim} of {extent:,} is split too: {_product(over)}")
    copies = [use for use in uses if use.dim is None and not use.is_partial and use.size > 1]
    if copies:
        sentences.append(f"copied along {_product(copies)}")
    sums = [use for use in uses if use.is_partial and use.size > 1]
    if sums:
        sentences.append(f"summands along {_product(sums)}")
    if line.differs:
        sentences.append(f"compiled as {line.chosen}; asked for was {line.requested}")
    return sentences


def _sides(line: TensorLine, uses: Sequence[AxisUse]) -> tuple[Side, Side]:
    """The dims that are drawn as rows and as columns: those that are split, then the largest."""
    split = {use.dim for use in uses if use.dim is not None and use.size > 1}
    dims = range(len(line.shape))
    chosen = sorted(dims, key=lambda dim: (dim not in split, -line.shape[dim], dim))[:2]
    sides = [
        Side(dim, line.shape[dim], tuple(u for u in uses if u.dim == dim and u.size > 1))
        for dim in sorted(chosen)
    ]
    # One dim only lies across.
    return (Side(None, 1, ()), sides[0]) if len(sides) == 1 else (sides[0], sides[1])


def _drawing(line: TensorLine, uses: Sequence[AxisUse], report: CompileReport) -> Element:
    rows, columns = _sides(line, uses)
    width, height = _box(rows, columns)
    left = _left(rows)
    copied = any(use.dim is None and use.size > 1 for use in uses)
    tall, wide = rows.tiles(), columns.tiles()
    cell_height, cell_width = height / len(tall), width / len(wide)
    sheets = [
        element("rect", x=left + shift, y=_TOP + shift, width=width, height=height, class_="sheet")
        for shift in ((8, 4) if copied else ())
    ]
    cells = [
        _cell(left + j * cell_width, _TOP + i * cell_height, cell_width, cell_height, row, column)
        for i, row in enumerate(tall)
        for j, column in enumerate(wide)
    ]
    return element(
        "svg",
        element("title", f"{line.name}: {line.layout}"),
        *sheets,
        *cells,
        *_row_labels(rows, left, cell_height, report),
        *_column_labels(columns, left, cell_width, report),
        *_titles(rows, columns, left, width, height),
        viewBox=f"0 0 {number(left + _BOX_WIDTH + 20)} {number(_TOP + height + 14)}",
        class_="sharding",
        role="img",
    )


def _box(rows: Side, columns: Side) -> tuple[float, float]:
    """Width and height, like the tensor's but not too narrow for what is written."""
    if rows.dim is None:
        return _BOX_WIDTH, 36
    ratio = math.sqrt(columns.extent / max(1, rows.extent)) if columns.extent else 1
    ratio = min(2.6, max(0.75, ratio))
    width = min(_BOX_WIDTH, _BOX_HEIGHT * ratio)
    return width, max(96, min(_BOX_HEIGHT, width / ratio))


def _cell(
    x: float, y: float, width: float, height: float, row: int | None, column: int | None
) -> Element:
    if row is None or column is None:
        middle = element(
            "text", "\N{HORIZONTAL ELLIPSIS}", x=x + width / 2, y=y + height / 2 + 3,
            text_anchor="middle", class_="dots",
        )  # fmt: skip
        return element(
            "g", element("rect", x=x, y=y, width=width, height=height, class_="gap"), middle
        )
    kind = "tile first" if row == 0 and column == 0 else "tile"
    return element("rect", x=x, y=y, width=width, height=height, class_=kind)


def _left(rows: Side) -> float:
    """Where the box begins: right of the words beside it."""
    words = [rows.words(tile) for tile in rows.tiles() if tile is not None]
    return 26 + max(30, _LETTER * max(map(len, words), default=0))


def _row_labels(rows: Side, left: float, height: float, report: CompileReport) -> list[Element]:
    if not rows.uses:
        return []
    colour = axis_colour_of(rows.uses[0].axis, report.mesh)
    found = [
        element("rect", x=left - 6, y=_TOP, width=4, height=height * len(rows.tiles()),
                style=f"fill:{colour}")
    ]  # fmt: skip
    for place, tile in enumerate(rows.tiles()):
        if tile is not None and height >= 9:
            y = _TOP + (place + 0.5) * height + 3
            text = rows.words(tile)
            found.append(element("text", text, x=left - 10, y=y, text_anchor="end"))
    return found


def _column_labels(
    columns: Side, left: float, width: float, report: CompileReport
) -> list[Element]:
    if not columns.uses:
        return []
    colour = axis_colour_of(columns.uses[0].axis, report.mesh)
    found = [
        element("rect", x=left, y=_TOP - 6, width=width * len(columns.tiles()), height=4,
                style=f"fill:{colour}")
    ]  # fmt: skip
    words = [(place, tile) for place, tile in enumerate(columns.tiles()) if tile is not None]
    longest = max(len(columns.words(tile)) for _, tile in words)
    step = max(1, math.ceil(longest * _LETTER / width))
    for place, tile in words[::step]:
        x = left + (place + 0.5) * width
        text = columns.words(tile)
        found.append(element("text", text, x=x, y=_TOP - 10, text_anchor="middle"))
    return found


def _titles(rows: Side, columns: Side, left: float, width: float, height: float) -> list[Element]:
    found: list[Element] = []
    if columns.dim is not None:
        text = f"dim {columns.dim}: {columns.extent:,}{_split_words(columns)}"
        x, y = left + width / 2, _TOP - 24
        found.append(element("text", text, x=x, y=y, text_anchor="middle", class_="dim"))
    if rows.dim is not None:
        text = f"dim {rows.dim}: {rows.extent:,}{_split_words(rows)}"
        x, y = 9, _TOP + height / 2
        turn = f"rotate(-90 {x} {round(y, 1)})"
        style = "dim"
        found.append(
            element("text", text, x=x, y=y, text_anchor="middle", transform=turn, class_=style)
        )
    return found


def _split_words(side: Side) -> str:
    return f" by {_product(side.uses)}" if side.uses else ""


def _product(uses: Sequence[AxisUse]) -> str:
    return " x ".join(f"{use.axis} {use.size}" for use in uses)


def _dims(shape: tuple[int, ...]) -> str:
    return " x ".join(f"{size:,}" for size in shape) or "scalar"
