"""A sharding as an SVG picture: self-contained, every text escaped."""

from __future__ import annotations

from collections.abc import Sequence

from xla_dtensor.report.report_html_elements import Element, element, number
from xla_dtensor.report.sharding_blocks import Face, ShardingPicture
from xla_dtensor.report.sharding_text import cell_text, heading

__all__ = ["to_svg"]

_LINE, _LETTER, _PAD = 18.0, 7.0, 16.0
_CELL_HEIGHT = 34.0
_HUES = ("#cfe3f7", "#d5efd9", "#f7e3c5", "#ead7f0", "#f6d3d3", "#d2eeee")
"""Light colours, readable under black, in turn for each set of devices."""


def to_svg(picture: ShardingPicture) -> str:
    """Draws a picture as SVG.

    Args:
        picture: the picture.

    Returns:
        The text of an SVG file.
    """
    top = _PAD
    parts: list[Element] = []
    for place, line in enumerate((heading(picture), *picture.summary)):
        if line:
            parts.append(_text(_PAD, top + 12, line, weight="600" if place == 0 else None))
            top += _LINE
    widest = max((len(line) for line in (heading(picture), *picture.summary)), default=0)
    width = _PAD + widest * _LETTER
    colours: dict[tuple[int, ...], str] = {}
    for face in picture.faces():
        top += 10
        if face.hidden:
            parts.append(_text(_PAD, top + 12, f"\N{HORIZONTAL ELLIPSIS} and {face.hidden:,} more"))
            top += _LINE
            continue
        drawn, size = _face(picture, face, top, colours)
        parts += drawn
        width, top = max(width, size[0]), top + size[1]
    svg = element(
        "svg",
        element("title", heading(picture) or "a sharding"),
        element("rect", x=0, y=0, width=width + _PAD, height=top + _PAD, fill="#ffffff"),
        *parts,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {number(width + _PAD)} {number(top + _PAD)}",
        width=width + _PAD,
        height=top + _PAD,
        font_family="Helvetica, Arial, sans-serif",
        font_size=12,
        role="img",
    )
    return svg[0] + "\n"


def _face(
    picture: ShardingPicture, face: Face, top: float, colours: dict[tuple[int, ...], str]
) -> tuple[list[Element], tuple[float, float]]:
    """The elements of a face, and the right edge and the height that it takes."""
    row, column = picture.sides
    left_words = [_words(picture, row, block) for block in face.rows]
    top_words = [_words(picture, column, block) for block in face.columns]
    texts = [[cell_text(cell) for cell in cells] for cells in face.cells]
    widest = max(len(word) for line in (*texts, *top_words) for word in line)
    cell = max(44.0, widest * _LETTER + 12)
    margin = max((len(word) for words in left_words for word in words), default=0)
    left = _PAD + (margin * _LETTER + 10 if margin else 0)
    drawn: list[Element] = []
    down = top
    if face.title:
        drawn.append(_text(_PAD, down + 12, face.title))
        down += _LINE
    if any(any(words) for words in top_words):
        for place, words in enumerate(top_words):
            x = left + (place + 0.5) * cell
            drawn += _stacked(x, down + 11, words, "middle")
        down += 2 * 13 + 4
    for i, (words, cells) in enumerate(zip(left_words, face.cells, strict=True)):
        y = down + i * _CELL_HEIGHT
        drawn += _stacked(left - 6, y + _CELL_HEIGHT / 2 - 2, words, "end")
        for j, devices in enumerate(cells):
            drawn += _block(left + j * cell, y, cell, devices, texts[i][j], colours)
    height = down + len(face.rows) * _CELL_HEIGHT - top
    return drawn, (left + len(face.columns) * cell, height)


def _block(
    x: float,
    y: float,
    width: float,
    devices: tuple[int, ...] | None,
    text: str,
    colours: dict[tuple[int, ...], str],
) -> list[Element]:
    fill = "#f4f4f4"
    if devices is not None:
        fill = colours.setdefault(devices, _HUES[len(colours) % len(_HUES)])
    box = element("rect", x=x, y=y, width=width, height=_CELL_HEIGHT, fill=fill, stroke="#555555")
    return [box, _text(x + width / 2, y + _CELL_HEIGHT / 2 + 4, text, anchor="middle")]


def _words(picture: ShardingPicture, dim: int | None, block: int | None) -> tuple[str, str]:
    if block is None or dim is None:
        return "", ""
    return picture.label(dim, block)


def _stacked(x: float, y: float, words: Sequence[str], anchor: str) -> list[Element]:
    told = [word for word in words if word]
    start = y if len(told) > 1 else y + 6
    return [
        _text(x, start + 13 * place, word, anchor=anchor, size=11, fill="#444444")
        for place, word in enumerate(told)
    ]


def _text(
    x: float,
    y: float,
    words: str,
    *,
    anchor: str | None = None,
    weight: str | None = None,
    size: int | None = None,
    fill: str = "#111111",
) -> Element:
    return element(
        "text",
        words,
        x=x,
        y=y,
        text_anchor=anchor,
        font_weight=weight,
        font_size=size,
        fill=fill,
    )
