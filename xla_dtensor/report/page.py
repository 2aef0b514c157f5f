"""The HTML page of a report: cards, tables, charts and pictures of shardings, in one file.

A tensor is drawn as a box of two of its dims, cut along the lines between devices. At the left and
at the top stand the coordinates, along the mesh axes, of the devices that hold the row and the
column of tiles; the tile of the first device is filled. Sheets behind the box are copies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mesh_utils import Mesh
from mesh_utils.draw import axis_colour
from xla_dtensor.core import Layout, LayoutError
from xla_dtensor.report.compile_report import CompileReport
from xla_dtensor.report.errors import ReportError
from xla_dtensor.report.finding import Finding, starred
from xla_dtensor.report.hlo_text import element_bytes
from xla_dtensor.report.render import (
    NOT_FROM_COMPILER,
    Table,
    axes_table,
    axis_totals,
    buffers_table,
    collectives_table,
    differing_table,
    finding_place,
    kind_words,
    made_by_table,
    memory_table,
    mesh_axes_text,
    roofline_rows,
    roofline_table,
    step_words,
    tensors_table,
    verdict,
)
from xla_dtensor.report.report import MeshAxis, TensorLine
from xla_dtensor.report.sharding_picture import (
    Element,
    ShardingPicture,
    element,
    join,
    number,
    picture_of,
    table_element,
)
from xla_dtensor.report.texts import AxisUse, axis_uses, bytes_text, seconds_text, share_text

__all__ = ["layout_of_text", "picture_of_tensor", "tensor_line", "to_html"]


# --------------------------------------------------------------------- The bars of the HTML report
#
# Memory, communication by axis, modelled times. SVG, no script.
#
# Colours come from the style sheet of the page, so that they follow light and dark.

WIDTH = 960
"""User units across; the page scales it."""

_ROLE_COLOURS = {
    "parameter": "#0072b2",
    "frozen parameter": "#56b4e9",
    "buffer": "#8c6d31",
    "gradient": "#009e73",
    "optimizer state": "#e69f00",
    "argument": "#7b61c9",
    "result": "#a6761d",
    "temporaries": "#cc79a7",
    "program": "#6b7280",
}
_OTHER_COLOUR = "#9a9a9a"
_PHASE_OPACITY = {"forward": 1.0, "backward": 0.7, "optimizer": 0.45, "other": 0.25}
_MIXED_COLOUR = "#8a8a8a"


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of the memory bar.

    Attributes:
        name: in words.
        bytes: on one device.
        padding: of these, padding of the memory layout.
        colour: "#rrggbb".
    """

    name: str
    bytes: int
    padding: int
    colour: str


def memory_segments(report: CompileReport) -> tuple[Segment, ...]:
    """What one device holds, part by part.

    Args:
        report: the report.

    Returns:
        The parts that are not empty.
    """
    memory = report.memory
    parts = [
        Segment(
            kind_words(part.role, part.count),
            part.memory_bytes,
            part.padding_bytes,
            _ROLE_COLOURS.get(part.role, _OTHER_COLOUR),
        )
        for part in memory.parts
    ]
    parts += [
        Segment("temporaries", memory.temporaries_bytes, 0, _ROLE_COLOURS["temporaries"]),
        Segment("program", memory.code_bytes, 0, _ROLE_COLOURS["program"]),
        Segment("not explained", memory.unexplained_bytes, 0, _OTHER_COLOUR),
    ]
    return tuple(part for part in parts if part.bytes > 0)


def memory_bar(report: CompileReport) -> Element:
    """Draws what one device holds beside what it can.

    Args:
        report: the report.

    Returns:
        The bar and its legend.
    """
    memory, parts = report.memory, memory_segments(report)
    capacity = memory.capacity_bytes
    shown = sum(part.bytes for part in parts)
    scale = WIDTH / max(1, shown, memory.total_bytes, capacity or 0)
    x, drawn = 0.0, list[Element]()
    for part in parts:
        width = part.bytes * scale
        drawn.append(_segment(part, x, width))
        x += width
    free = None
    if capacity is not None and capacity * scale > x:
        room = capacity * scale - x
        label = _label(x + room / 2, 45, "free", "free-text") if room > 40 else None
        free = element("g", element("rect", x=x, y=22, width=room, height=36, class_="free"), label)
    limit = None if capacity is None else _limit(capacity * scale, bytes_text(capacity))
    bar = element(
        "svg",
        element("title", "Memory of one device"),
        *drawn,
        free,
        limit,
        viewBox=f"0 0 {WIDTH} 62",
        role="img",
        class_="chart",
    )
    return join(bar, _memory_legend(parts, memory.total_bytes))


def _segment(part: Segment, x: float, width: float) -> Element:
    text = f"{part.name}: {bytes_text(part.bytes)}"
    label = None
    for words in (f"{part.name} {bytes_text(part.bytes)}", part.name):
        if label is None and len(words) * 7.5 + 8 < width:
            label = _label(x + width / 2, 45, words, "on-colour")
    rect = element("rect", x=x, y=22, width=width, height=36, fill=part.colour, class_="part")
    return element("g", element("title", text), rect, label)


def _limit(x: float, words: str) -> Element:
    line = element("line", x1=x, y1=14, x2=x, y2=62, class_="limit")
    anchor = "end" if x > WIDTH / 2 else "start"
    text = element("text", f"usable: {words}", x=x, y=11, text_anchor=anchor, class_="limit-text")
    return element("g", line, text)


def _memory_legend(parts: Sequence[Segment], total: int) -> Element:
    items = [
        element(
            "li",
            _swatch(part.colour),
            element("span", part.name, class_="name"),
            " ",
            element("b", bytes_text(part.bytes)),
            f" {share_text(part.bytes / total)}" if total else None,
            f", of it {bytes_text(part.padding)} padding" if part.padding else None,
        )
        for part in parts
    ]
    return element("ul", *items, class_="legend")


def axis_colour_of(name: str, mesh: Sequence[MeshAxis]) -> str:
    """The colour of a mesh axis on the page.

    Args:
        name: of the axis, or words that begin with it.
        mesh: the axes.

    Returns:
        "#rrggbb"; grey for what is no axis.

    Example:
        >>> axis_colour_of("mixed", [MeshAxis("dp", 2, 1)])
        '#8a8a8a'
    """
    first = name.split(",")[0].split(" (")[0]
    names = [str(axis.name) for axis in mesh]
    return axis_colour(names.index(first)) if first in names else _MIXED_COLOUR


def axis_bars(report: CompileReport) -> Element | None:
    """Draws the bytes that go over each axis of the mesh.

    Args:
        report: the report.

    Returns:
        A bar for each, and a legend of the phases; None if nothing is sent.
    """
    totals = axis_totals(report)
    if not totals:
        return None
    most = max(total.bytes for total in totals) or 1
    rows: list[Element] = []
    for total in totals:
        colour = axis_colour_of(total.axes, report.mesh)
        pieces: list[tuple[float, str, float, str]] = []
        for phase in _PHASE_OPACITY:
            size = total.phases.get(phase, 0)
            if size:
                words = f"{phase}: {bytes_text(size)}"
                pieces.append((size / most, colour, _PHASE_OPACITY[phase], words))
        badge = {"ICI": "inside a slice (ICI)", "DCN": "between slices (DCN)"}
        where = badge.get(total.network, "network not known")
        bound = "at least " if total.at_least else ""
        rows.append(
            _bar_row(
                total.axes,
                f"{where}: {', '.join(total.kinds)}",
                pieces,
                f"{bound}{bytes_text(total.bytes)}",
                "dcn" if total.network == "DCN" else None,
            )
        )
    used = [p for p in _PHASE_OPACITY if any(total.phases.get(p) for total in totals)]
    legend = element(
        "ul",
        *(element("li", _swatch(_MIXED_COLOUR, _PHASE_OPACITY[phase]), phase) for phase in used),
        class_="legend",
    )
    return join(element("div", *rows, class_="bars"), legend)


def roofline_bars(report: CompileReport) -> Element | None:
    """Draws the modelled times of one step.

    Args:
        report: the report.

    Returns:
        A bar for each; the longest is the one that binds. None if nothing was modelled.
    """
    rows = roofline_rows(report)
    if not rows:
        return None
    longest = max(seconds for _, _, seconds in rows) or 1
    binding = "" if report.roofline is None else report.roofline.binding
    bars: list[Element] = []
    for key, name, seconds in rows:
        binds = key == binding
        colour = "var(--binding)" if binds else "var(--muted-bar)"
        if key.startswith("ici "):
            colour = axis_colour_of(key.removeprefix("ici "), report.mesh)
        piece = (seconds / longest, colour, 1.0 if binds else 0.55, seconds_text(seconds))
        note = "binds: the step cannot be faster" if binds else ""
        bars.append(_bar_row(name, note, [piece], seconds_text(seconds), "modelled"))
    return element("div", *bars, class_="bars")


def _bar_row(
    name: str,
    note: str,
    pieces: Sequence[tuple[float, str, float, str]],
    value: str,
    class_: str | None,
) -> Element:
    x, drawn = 0.0, list[Element]()
    for share, colour, opacity, words in pieces:
        width = max(0.5, share * 600)
        style = f"fill:{colour};fill-opacity:{opacity}"
        place = {"x": x, "y": 0, "width": width, "height": 20}
        drawn.append(element("rect", element("title", words), style=style, **place))
        x += width
    bar = element(
        "svg", *drawn, viewBox="0 0 600 20", preserveAspectRatio="none", class_="bar", role="img"
    )
    label = element("div", element("b", name), element("span", note, class_="quiet"), class_="what")
    words = " ".join(word for word in ("row", class_) if word)
    return element("div", label, bar, element("div", value, class_="value"), class_=words)


def _swatch(colour: str, opacity: float = 1.0) -> Element:
    style = f"background:{colour};opacity:{opacity}"
    return element("span", class_="swatch", style=style)


def _label(x: float, y: float, words: str, class_: str) -> Element:
    return element("text", words, x=number(x), y=y, text_anchor="middle", class_=class_)


# ---------------------------------------------------- Pictures of how a parameter lies on the mesh

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


# -------------------------------------------------------------------------------------------- Style
#
# The style sheet of the HTML report, for light and for dark screens, and for paper.

STYLE = """
:root{--paper:#fff;--card:#f7f7f5;--ink:#1a1a1a;--quiet:#5c6370;--line:#d8d8d4;--free:#eceae4;
--good:#0a7d38;--bad:#c5221f;--warn:#8f5a00;--note:#0b63a5;--binding:#333a45;--muted-bar:#9aa3ad;
--good-bg:#e8f6ec;--bad-bg:#fdeceb;--warn-bg:#fff5e0;--note-bg:#eaf3fb;--tile:#eef2f6;
--first:#3b82c4;color-scheme:light dark}
@media (prefers-color-scheme:dark){:root{--paper:#0d1117;--card:#161b22;--ink:#e6edf3;
--quiet:#9aa5b1;--line:#30363d;--free:#21262d;--good:#56d364;--bad:#ff7b72;--warn:#e3b341;
--note:#79c0ff;--binding:#e6edf3;--muted-bar:#6e7681;--good-bg:#10301b;--bad-bg:#3a1614;
--warn-bg:#33270a;--note-bg:#0c2338;--tile:#21262d;--first:#4f9be0}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
main{max-width:1060px;margin:0 auto;padding:24px 24px 64px}
h1{font-size:26px;line-height:1.25;margin:0 0 2px;overflow-wrap:anywhere}
h2{font-size:19px;margin:40px 0 2px}
h3{font-size:15px;margin:20px 0 4px}
p{margin:4px 0 12px;max-width:78ch}
.quiet{color:var(--quiet)}
.code,code,pre,td{font-family:ui-monospace,Menlo,Consolas,"DejaVu Sans Mono",monospace}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(210px,1fr));gap:12px;
margin:18px 0 4px}
.card{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:12px 14px}
.card b{display:block;font-size:22px;line-height:1.25;margin:2px 0;overflow-wrap:anywhere}
.card span{display:block;color:var(--quiet);font-size:13px}
.card.good{background:var(--good-bg);border-color:var(--good)}.card.good b{color:var(--good)}
.card.bad{background:var(--bad-bg);border-color:var(--bad)}.card.bad b{color:var(--bad)}
.card.unknown{background:var(--warn-bg);border-color:var(--warn)}.card.unknown b{color:var(--warn)}
.badge{display:inline-block;border:1px dashed var(--quiet);border-radius:99px;padding:0 8px;
font-size:12px;font-weight:400;color:var(--quiet);vertical-align:middle}
.finding{border-left:5px solid var(--note);background:var(--note-bg);border-radius:0 8px 8px 0;
padding:8px 14px;margin:8px 0;overflow-wrap:anywhere}
.finding.error{border-color:var(--bad);background:var(--bad-bg)}
.finding.warning{border-color:var(--warn);background:var(--warn-bg)}
.finding.none{border-color:var(--good);background:var(--good-bg)}
.finding p{margin:2px 0}
.finding .severity{font-weight:700;text-transform:uppercase;font-size:12px;letter-spacing:.04em}
.finding.error .severity{color:var(--bad)}.finding.warning .severity{color:var(--warn)}
.finding.note .severity{color:var(--note)}
.chart{width:100%;height:auto;display:block;margin:6px 0}
.chart text{font-size:13px;fill:var(--ink)}
.chart .part{stroke:var(--paper);stroke-width:1}
.chart .on-colour{fill:#fff;font-weight:600;paint-order:stroke;stroke:rgba(0,0,0,.55);
stroke-width:2.5px}
.chart .free{fill:var(--free)}.chart .free-text{fill:var(--quiet)}
.chart .limit{stroke:var(--bad);stroke-width:2;stroke-dasharray:5 3}
.chart .limit-text{fill:var(--bad);font-weight:600}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:4px 20px;margin:6px 0 10px;padding:0;
font-size:13px;color:var(--quiet)}
.legend b,.legend .name{color:var(--ink)}
.swatch{display:inline-block;width:12px;height:12px;border-radius:3px;margin-right:6px;
vertical-align:-1px}
.bars{margin:8px 0}
.row{display:grid;grid-template-columns:250px 1fr 130px;gap:14px;align-items:center;margin:7px 0}
.row .what b{display:block;overflow-wrap:anywhere}
.row .what span{display:block;font-size:12px;line-height:1.3}
.row .bar{width:100%;height:20px;background:var(--free);border-radius:3px}
.row.dcn .bar{outline:2px solid var(--bad);outline-offset:1px}
.row.modelled .bar{outline:1px dashed var(--quiet);outline-offset:1px}
.row .value{font-weight:600;white-space:nowrap}
.pictures{display:grid;grid-template-columns:repeat(auto-fill,minmax(290px,1fr));gap:16px;
margin:10px 0}
figure{margin:0;background:var(--card);border:1px solid var(--line);border-radius:10px;
padding:10px 12px}
figcaption span,figcaption b{display:block;font-size:13px;overflow-wrap:anywhere}
.sharding{width:100%;height:auto;display:block}
.sharding text{font-size:9.5px;fill:var(--quiet)}
.sharding .dim{font-size:11px;fill:var(--ink)}
.sharding .tile{fill:var(--tile);stroke:var(--quiet);stroke-width:.7}
.sharding .first{fill:var(--first)}
.sharding .gap{fill:none;stroke:none}
.sharding .sheet{fill:var(--card);stroke:var(--quiet);stroke-width:.7}
.scroll{overflow-x:auto;margin:6px 0 12px}
table{border-collapse:collapse;font-size:13px}
th{text-align:left;font-weight:600;color:var(--quiet);border-bottom:1px solid var(--line);
padding:4px 14px 4px 0;white-space:nowrap}
td{padding:3px 14px 3px 0;border-bottom:1px solid var(--line);vertical-align:top;font-size:12px;
overflow-wrap:break-word;max-width:420px}
td.number,th.number{text-align:right;white-space:nowrap}
details{margin:8px 0}
summary{cursor:pointer;color:var(--note)}
pre{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:10px 12px;
overflow-x:auto;font-size:13px;white-space:pre-wrap;overflow-wrap:anywhere}
dl{display:grid;grid-template-columns:max-content 1fr;gap:4px 16px;font-size:14px}
dt{font-weight:600}dd{margin:0;color:var(--quiet)}
@media (max-width:700px){.row{grid-template-columns:1fr}.row .value{justify-self:start}
dl{grid-template-columns:1fr}}
@media print{main{max-width:none}.card,figure,.finding{break-inside:avoid}}
"""
"""Plain CSS; it names no font, picture or style from outside."""


# ----------------------------------------------------------------------- A report as one HTML file
#
# Nothing from outside, no script, for light and dark screens.
#
# The order is that of the questions: does it fit, what is wrong, where does the memory go, who
# talks to whom, how long does it take, how do the parameters lie; and at the end how it was made.

_WORDS = (
    ("device", "one chip, or one core where a chip shows as two devices"),
    ("mesh axis", "a named direction in which the devices are arranged, such as fsdp or tp"),
    ("ICI", "the fast links between the chips of one slice (pod)"),
    ("DCN", "the slower data centre network between slices"),
    ("temporaries", "what the step makes and drops: activations, gradients, gathered weights"),
    ("padding", "what the memory layout adds, since the hardware stores tiles"),
    ("all-gather", "each device gets the parts of all others: a sharded weight made whole"),
    ("reduce-scatter", "a sum over devices, of which each keeps its part: sharded gradients"),
    ("all-reduce", "a sum over devices that each of them gets whole"),
    ("MFU", "useful floating-point operations per second, as a share of the hardware's peak"),
    ("modelled", "computed from the speeds of the machine and the program; nothing was run"),
)


def to_html(report: CompileReport) -> str:
    """Writes a report as a page.

    Args:
        report: the report.

    Returns:
        The whole file.
    """
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", f"{report.title}: compile report"),
        Element((f"<style>{STYLE}</style>",)),
    )
    body = element("body", element("main", join(*_page(report))))
    page = element("html", head, body, lang="en")
    return f"<!DOCTYPE html>\n{page[0]}\n"


def _page(report: CompileReport) -> Iterator[Element | None]:
    machine = report.machine
    where = f"{machine.name}: {machine.words}" if machine.name else machine.words
    yield element("h1", report.title)
    yield element(
        "p",
        "What this training step will do on ",
        element("b", where),
        ". It was compiled for that machine, not run on it.",
        class_="quiet",
    )
    yield _cards(report)
    yield from _findings(report)
    yield from _memory(report)
    yield from _communication(report)
    yield from _time(report)
    yield from _layouts(report)
    if report.unread:
        yield element("h2", "What could not be read")
        yield element("ul", *(element("li", sentence) for sentence in report.unread))
    yield from _made(report)


def _cards(report: CompileReport) -> Element:
    memory, model = report.memory, report.roofline
    tone = {True: "good", False: "bad", None: "unknown"}[memory.fits]
    headline = {True: "Fits", False: "Does not fit", None: "Not known"}[memory.fits]
    cards = [
        _card("Does it fit?", headline, verdict(report).split(": ", 1)[-1], tone),
        _card(
            "Communication",
            bytes_text(report.collective_bytes),
            f"per device and step; {share_text(report.attribution.share)} of it has a mesh axis "
            "and a line of source"
            if report.collective_bytes
            else "no device talks to another",
        ),
        _card("Mesh", f"{report.machine.devices:,} devices", mesh_axes_text(report.mesh)),
    ]
    if model is not None:
        worst = seconds_text(model.step_seconds_no_overlap)
        mfu = "" if model.mfu is None else f"MFU {share_text(model.mfu)}, "
        words = f"{mfu}bound by {model.binding}; {worst} if nothing overlaps"
        cards.insert(1, _card("One step (modelled)", seconds_text(model.step_seconds), words))
    return element("div", *cards, class_="cards")


def _card(question: str, answer: str, words: str, tone: str | None = None) -> Element:
    classes = " ".join(word for word in ("card", tone) if word)
    return element(
        "div",
        element("span", question),
        element("b", answer),
        element("span", words),
        class_=classes,
    )


def _findings(report: CompileReport) -> Iterator[Element]:
    yield element("h2", "Findings")
    if not report.findings:
        yield element(
            "div",
            element("p", "Nothing to look at was found."),
            class_="finding none",
        )
    for finding in report.findings:
        yield _finding(finding)


def _finding(finding: Finding) -> Element:
    place = finding_place(finding)
    severity = finding.severity if finding.severity in ("error", "warning") else "note"
    return element(
        "div",
        element("span", finding.severity, class_="severity"),
        " ",
        element("b", finding.title),
        element("p", finding.detail) if finding.detail else None,
        element("p", element("b", "To try: "), finding.fix) if finding.fix else None,
        element("p", place, class_="quiet code") if place else None,
        class_=f"finding {severity}",
    )


def _memory(report: CompileReport) -> Iterator[Element]:
    yield element("h2", "Memory of one device")
    said = "" if report.memory.from_compiler else f" {NOT_FROM_COMPILER}"
    words = f"What each device holds at the worst moment of a step.{said}"
    yield element("p", words, class_="quiet")
    yield memory_bar(report)
    if report.memory.causes:
        yield element("h3", "The largest causes")
        yield element("ol", *(element("li", cause.text) for cause in report.memory.causes))
    yield _details("The same as a table", memory_table(report))
    if report.memory.largest:
        yield _details("The largest buffers, and what made them", buffers_table(report))


def _communication(report: CompileReport) -> Iterator[Element | None]:
    yield element("h2", "Communication of one step, per device")
    bars = axis_bars(report)
    if bars is None:
        yield element("p", "No device talks to another.")
        return
    yield element(
        "p",
        "Bytes that each device sends and receives together with the others along a mesh axis: of "
        "each collective the larger of what goes in and out, as often as it runs.",
        class_="quiet",
    )
    yield bars
    moving = [line for line in report.collectives if line.moves]
    yield element("h3", "The largest collectives, and the lines they were made for")
    yield table_element(collectives_table(moving, report))
    yield _details("By axis, network and phase", axes_table(report))
    rest = report.attribution.rest
    if 0 < len(rest) < len(moving):
        yield _details("Without an axis or a line of source", collectives_table(rest, report))


def _time(report: CompileReport) -> Iterator[Element | None]:
    yield element("h2", "Time of one step ", element("span", "modelled", class_="badge"))
    bars = roofline_bars(report)
    if bars is None:
        yield element("p", f"Not modelled: {report.no_roofline or 'nothing to model'}.")
        return
    yield element(
        "p",
        "How long each part of the machine would be busy if it did nothing else and wasted "
        "nothing. The longest binds. A model, not a measurement.",
        class_="quiet",
    )
    yield bars
    yield element("p", f"A step takes {step_words(report)}.")
    yield _details("The same as a table", roofline_table(report))
    for each in () if report.roofline is None else report.roofline.assumptions:
        yield element("p", f"Assumed: {each}.", class_="quiet")


def _layouts(report: CompileReport) -> Iterator[Element | None]:
    pictures = sharding_pictures(report)
    if pictures is not None:
        yield element("h2", "How the largest parameters lie on the mesh")
        yield element(
            "p",
            "Each box is a parameter, cut into the tiles that the devices hold. At the sides stand "
            "the places of those devices along the mesh axes. Blue is the tile of the first "
            "device; sheets behind a box are copies.",
            class_="quiet",
        )
        yield pictures
    if any(line.differs for line in report.tensors):
        yield element("h3", "Compiled otherwise than asked for")
        yield table_element(differing_table(report))
    if report.tensors:
        yield _details("All arrays that outlive a step, the largest first", tensors_table(report))


def _made(report: CompileReport) -> Iterator[Element]:
    yield element("h2", "How this was made")
    if report.command:
        yield element("pre", report.command)
    if report.flops is not None:
        yield element(
            "p",
            f"{report.flops:.4g} floating-point operations a step on all devices, recomputation "
            f"not counted; matrix products in {report.compute_dtype}.",
        )
    table = made_by_table(report)
    if table.rows:
        yield table_element(table)
    words = [part for word, text in _WORDS for part in (element("dt", word), element("dd", text))]
    yield element("details", element("summary", "Words"), element("dl", *words))


def _details(title: str, table: Table) -> Element:
    return element("details", element("summary", title), table_element(table))


# ---------------------------- Tensors of a report, looked up by name, and pictures of how they lie


def tensor_line(report: CompileReport, name: str) -> TensorLine:
    """Looks a tensor up.

    Args:
        report: the report.
        name: of the tensor, "layers.0.wq.weight": also where equal layers are one line.

    Returns:
        Its line.

    Raises:
        ReportError: the report names no such tensor.
    """
    names = {line.name: line for line in report.tensors}
    found = names.get(name) or names.get(starred(name))
    if found is None:
        near = ", ".join(list(names)[:5]) or "none: its program names no tensors"
        raise ReportError(
            f"The tensor name={name!r} was asked for, of the report {report.title!r}. It has no "
            f"tensor of that name. The largest ones are {near}."
        )
    return found


def layout_of_text(text: str | None, mesh: Sequence[MeshAxis], ndim: int) -> Layout | None:
    """Reads a layout as a value.

    Args:
        text: a layout's, or placements for each axis in order; None if there is none.
        mesh: the axes.
        ndim: the number of dims of the tensor.

    Returns:
        The layout, on devices numbered along the mesh; None for text that says something else.

    Example:
        >>> axes = [MeshAxis("dp", 2, 1), MeshAxis("tp", 4, 1)]
        >>> str(layout_of_text("Shard(1), Replicate()", axes, 2)), layout_of_text("[pp]", axes, 1)
        ('[-, dp]', None)
    """
    if text is None:
        return None
    value = Mesh.arange(tuple(axis.size for axis in mesh), tuple(axis.name for axis in mesh))
    if text.lstrip().startswith("["):
        try:
            found = Layout.parse(text, value)
        except LayoutError:
            return None
        return found if found.ndim == ndim else None
    uses = axis_uses(text, mesh, ndim)
    if uses is None or any(use.is_strided for use in uses):
        return None
    dims = ([mesh[use.place].name for use in uses if use.dim == dim] for dim in range(ndim))
    partial = tuple((mesh[use.place].name, "sum") for use in uses if use.is_partial)
    return Layout(value, tuple(map(tuple, dims)), partial)


def picture_of_tensor(report: CompileReport, line: TensorLine) -> ShardingPicture:
    """Shows how a tensor of a report lies.

    Args:
        report: the report.
        line: the tensor.

    Returns:
        A picture, on devices numbered along the mesh.

    Raises:
        ReportError: it is not known how the tensor lies.
    """
    layout = layout_of_text(line.layout, report.mesh, len(line.shape))
    try:
        sharding = None if layout is None else layout.op_sharding()
    except LayoutError:
        sharding = None
    if layout is None or sharding is None:
        raise ReportError(
            f"A picture of the tensor {line.name!r} was asked for. Its layout is "
            f"{line.layout!r}, which names no blocks on the mesh. Ask for another tensor."
        )
    notes = [f"asked for was {line.requested}"] if line.differs else []
    if line.count > 1:
        notes.append(f"{line.count:,} tensors lie like this")
    return picture_of(
        sharding,
        line.shape,
        layout.mesh,
        layout=layout,
        title=f"{line.name} {line.dtype}",
        element_bytes=element_bytes(line.dtype) or None,
        notes=notes,
    )
