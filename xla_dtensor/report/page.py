"""The HTML page of a report: cards, tables, charts and pictures of shardings, in one file.

What the page says, and in which order, is in page.html.j2; this file works out what is drawn where.
Colours that are not named here come from the style sheet, so that they follow light and dark.

A tensor is drawn as a box of two of its dims, cut along the lines between devices. At the left and
at the top stand the coordinates, along the mesh axes, of the devices that hold the row and the
column of tiles; the tile of the first device is filled. Sheets behind the box are copies.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mesh_utils import Mesh
from mesh_utils.draw import axis_colour
from xla_dtensor.core import Layout, LayoutError
from xla_dtensor.report import render
from xla_dtensor.report.finding import starred
from xla_dtensor.report.hlo_text import element_bytes
from xla_dtensor.report.report import MeshAxis, ReportError, TensorLine
from xla_dtensor.report.roofline import Roofline
from xla_dtensor.report.sharding_picture import Box, Label, ShardingPicture, fill, picture_of
from xla_dtensor.report.texts import AxisUse, axis_uses, bytes_text, seconds_text, share_text

if TYPE_CHECKING:
    from xla_dtensor.report.compile_report import CompileReport

__all__ = ["layout_of_text", "picture_of_tensor", "tensor_line", "to_html"]


def to_html(report: CompileReport) -> str:
    """Writes a report as a page.

    Args:
        report: the report.

    Returns:
        The whole file.
    """
    machine = report.machine
    return fill(
        "page.html.j2",
        report=report,
        machine=f"{machine.name}: {machine.words}" if machine.name else machine.words,
        render=render,
        step_card=step_card,
        communication_card=communication_card,
        memory_chart=memory_chart,
        axis_bars=axis_bars,
        phase_opacities=phase_opacities,
        roofline_bars=roofline_bars,
        sharding_figures=sharding_figures,
        MIXED_COLOUR=MIXED_COLOUR,
    )


def step_card(model: Roofline) -> str:
    """What stands below the modelled time of a step."""
    mfu = "" if model.mfu is None else f"MFU {share_text(model.mfu)}, "
    worst = seconds_text(model.step_seconds_no_overlap)
    return f"{mfu}bound by {model.binding}; {worst} if nothing overlaps"


def communication_card(report: CompileReport) -> str:
    """What stands below the bytes that are sent."""
    if not report.collective_bytes:
        return "no device talks to another"
    share = share_text(report.attribution.share)
    return f"per device and step; {share} of it has a mesh axis and a line of source"


# ------------------------------------ The bars: memory, communication by axis, and modelled times

WIDTH = 960
"""User units across the bar of the memory; the page scales it."""

BAR_WIDTH = 600
"""Likewise of the small bars."""

MIXED_COLOUR = "#8a8a8a"
"""Of what is of no single axis."""

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
_NETWORKS = {"ICI": "inside a slice (ICI)", "DCN": "between slices (DCN)"}


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """A part of the memory bar.

    Attributes:
        name: in words.
        bytes: on one device.
        padding: of these, padding of the memory layout.
        colour: "#rrggbb".
        box: where it is drawn.
    """

    name: str
    bytes: int
    padding: int
    colour: str
    box: Box


@dataclass(frozen=True, slots=True)
class MemoryChart:
    """What one device holds beside what it can.

    Attributes:
        parts: the parts that are not empty.
        labels: what is written on them.
        free: what is left of the device's memory; None if nothing is, or it is not known.
        limit: where the device's memory ends; None if it is not known.
        width: of the drawing.
    """

    parts: tuple[MemoryPart, ...]
    labels: tuple[Label, ...]
    free: Box | None
    limit: float | None
    width: int = WIDTH


@dataclass(frozen=True, slots=True)
class Bar:
    """A small bar, with what stands beside it.

    Attributes:
        name: in words.
        note: below the name.
        parts: of the bar: where each is drawn, and what is said of it.
        text: what it amounts to.
        tone: a class of the style sheet; "" for none.
    """

    name: str
    note: str
    parts: tuple[tuple[Box, str], ...]
    text: str
    tone: str = ""


def memory_chart(report: CompileReport) -> MemoryChart:
    """What one device holds beside what it can."""
    memory, capacity = report.memory, report.memory.capacity_bytes
    sizes = [
        (render.kind_words(part.role, part.count), part.role, part.memory_bytes, part.padding_bytes)
        for part in memory.parts
    ]
    sizes += [
        ("temporaries", "temporaries", memory.temporaries_bytes, 0),
        ("program", "program", memory.code_bytes, 0),
        ("not explained", "", memory.unexplained_bytes, 0),
    ]
    sizes = [part for part in sizes if part[2] > 0]
    scale = WIDTH / max(1, sum(part[2] for part in sizes), memory.total_bytes, capacity or 0)
    x, parts, labels = 0.0, list[MemoryPart](), list[Label]()
    for name, role, size, padding in sizes:
        colour, width = _ROLE_COLOURS.get(role, _OTHER_COLOUR), size * scale
        box = Box(x, 22, width, 36, {"fill": colour, "class": "part"})
        parts.append(MemoryPart(name, size, padding, colour, box))
        for words in (f"{name} {bytes_text(size)}", name):
            if len(words) * 7.5 + 8 < width:
                labels.append(_label(x + width / 2, 45, words, "on-colour"))
                break
        x += width
    if capacity is None:
        return MemoryChart(tuple(parts), tuple(labels), None, None)
    limit = capacity * scale
    free = Box(x, 22, limit - x, 36, {"class": "free"}) if limit > x else None
    if limit - x > 40:
        labels.append(_label(x + (limit - x) / 2, 45, "free", "free-text"))
    side = "end" if limit > WIDTH / 2 else "start"
    labels.append(_label(limit, 11, f"usable: {bytes_text(capacity)}", "limit-text", side))
    return MemoryChart(tuple(parts), tuple(labels), free, limit)


def _axis_colour(name: str, mesh: Sequence[MeshAxis]) -> str:
    """The colour of the axis that words begin with, "#rrggbb"; grey for what is no axis."""
    first = name.split(",")[0].split(" (")[0]
    names = [str(axis.name) for axis in mesh]
    return axis_colour(names.index(first)) if first in names else MIXED_COLOUR


def axis_bars(report: CompileReport) -> list[Bar]:
    """A bar for each mesh axis, of the bytes that go over it; none if nothing is sent."""
    totals = render.axis_totals(report)
    most = max((total.bytes for total in totals), default=0) or 1
    return [
        Bar(
            total.axes,
            f"{_NETWORKS.get(total.network, 'network not known')}: {', '.join(total.kinds)}",
            _bar_parts(
                (size / most, _axis_colour(total.axes, report.mesh), opacity, words)
                for phase, opacity in _PHASE_OPACITY.items()
                if (size := total.phases.get(phase, 0))
                for words in [f"{phase}: {bytes_text(size)}"]
            ),
            f"{'at least ' if total.at_least else ''}{bytes_text(total.bytes)}",
            "dcn" if total.network == "DCN" else "",
        )
        for total in totals
    ]


def phase_opacities(report: CompileReport) -> dict[str, float]:
    """How opaque the bars of the phases are in which something is sent."""
    totals = render.axis_totals(report)
    return {
        phase: opacity
        for phase, opacity in _PHASE_OPACITY.items()
        if any(total.phases.get(phase) for total in totals)
    }


def roofline_bars(report: CompileReport) -> list[Bar]:
    """A bar for each modelled time of a step: the longest binds. None if nothing was modelled."""
    rows = render.roofline_rows(report)
    longest = max((seconds for _, _, seconds in rows), default=0) or 1
    binding = "" if report.roofline is None else report.roofline.binding
    bars: list[Bar] = []
    for key, name, seconds in rows:
        binds = key == binding
        colour = "var(--binding)" if binds else "var(--muted-bar)"
        if key.startswith("ici "):
            colour = _axis_colour(key.removeprefix("ici "), report.mesh)
        text = seconds_text(seconds)
        parts = _bar_parts([(seconds / longest, colour, 1.0 if binds else 0.55, text)])
        note = "binds: the step cannot be faster" if binds else ""
        bars.append(Bar(name, note, parts, text, "modelled"))
    return bars


def _bar_parts(
    parts: Iterable[tuple[float, str, float, str]],
) -> tuple[tuple[Box, str], ...]:
    """Puts parts, of a share, a colour, an opacity and words each, behind each other."""
    x, drawn = 0.0, list[tuple[Box, str]]()
    for share, colour, opacity, words in parts:
        width = max(0.5, share * BAR_WIDTH)
        look = {"style": f"fill:{colour};fill-opacity:{opacity}"}
        drawn.append((Box(x, 0, width, 20, look), words))
        x += width
    return tuple(drawn)


def _label(
    x: float, y: float, words: str, style: str | None = None, anchor: str = "middle"
) -> Label:
    return Label(x, y, words, {"text-anchor": anchor, "class": style})


# ---------------------------------------------------- Pictures of how a parameter lies on the mesh

FIGURES = 8
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


@dataclass(frozen=True, slots=True)
class Figure:
    """How a parameter lies.

    Attributes:
        line: the parameter.
        width: of the drawing.
        height: of the drawing.
        boxes: tiles, copies, and the colours of the axes.
        labels: what is written beside them.
        sentences: what stands below; from the third on what is less often asked.
    """

    line: TensorLine
    width: float
    height: float
    boxes: tuple[Box, ...]
    labels: tuple[Label, ...]
    sentences: tuple[str, ...]


def sharding_figures(report: CompileReport) -> list[Figure]:
    """Figures of the largest parameters whose layouts can be read."""
    figures: list[Figure] = []
    lines = [line for line in report.tensors if line.role.endswith("parameter")]
    for line in sorted(lines, key=lambda line: -line.count * line.global_bytes):
        uses = axis_uses(line.layout, report.mesh, len(line.shape))
        if uses is not None and line.shape and len(figures) < FIGURES:
            figures.append(_figure(line, uses, report.mesh))
    return figures


def _figure(line: TensorLine, uses: Sequence[AxisUse], mesh: Sequence[MeshAxis]) -> Figure:
    rows, columns = _sides(line, uses)
    width, height = _box(rows, columns)
    left = _left(rows)
    tall, wide = rows.tiles(), columns.tiles()
    cell_height, cell_width = height / len(tall), width / len(wide)
    boxes: list[Box] = []
    if any(use.dim is None and use.size > 1 for use in uses):
        sheet = {"class": "sheet"}
        boxes += [Box(left + by, _TOP + by, width, height, sheet) for by in (8, 4)]
    labels: list[Label] = []
    for i, row in enumerate(tall):
        for j, column in enumerate(wide):
            x, y = left + j * cell_width, _TOP + i * cell_height
            if row is None or column is None:
                middle = x + cell_width / 2, y + cell_height / 2 + 3
                labels.append(_label(*middle, "\N{HORIZONTAL ELLIPSIS}", "dots"))
            else:
                kind = "tile first" if row == 0 and column == 0 else "tile"
                boxes.append(Box(x, y, cell_width, cell_height, {"class": kind}))
    for side, bar in (
        (rows, (left - 6, _TOP, 4, height)),
        (columns, (left, _TOP - 6, width, 4)),
    ):
        if side.uses:
            colour = _axis_colour(side.uses[0].axis, mesh)
            boxes.append(Box(*bar, {"style": f"fill:{colour}"}))
    labels += [*_row_labels(rows, left, cell_height), *_column_labels(columns, left, cell_width)]
    labels += _titles(rows, columns, left, width, height)
    sentences = tuple(_sentences(line, uses))
    size = left + _BOX_WIDTH + 20, _TOP + height + 14
    return Figure(line, *size, tuple(boxes), tuple(labels), sentences)


def _sentences(line: TensorLine, uses: Sequence[AxisUse]) -> list[str]:
    many = f"{line.count:,} of " if line.count > 1 else ""
    size, part = bytes_text(line.global_bytes), bytes_text(line.device_bytes)
    sentences = [
        f"{many}{_dims(line.shape)} {line.dtype}, {size}",
        f"each device holds {_dims(line.device_shape)}, {part}",
    ]
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


def _box(rows: Side, columns: Side) -> tuple[float, float]:
    """Width and height, like the tensor's but not too narrow for what is written."""
    if rows.dim is None:
        return _BOX_WIDTH, 36
    ratio = math.sqrt(columns.extent / max(1, rows.extent)) if columns.extent else 1
    ratio = min(2.6, max(0.75, ratio))
    width = min(_BOX_WIDTH, _BOX_HEIGHT * ratio)
    return width, max(96, min(_BOX_HEIGHT, width / ratio))


def _left(rows: Side) -> float:
    """Where the box begins: right of the words beside it."""
    words = [rows.words(tile) for tile in rows.tiles() if tile is not None]
    return 26 + max(30, _LETTER * max(map(len, words), default=0))


def _row_labels(rows: Side, left: float, height: float) -> list[Label]:
    if not rows.uses or height < 9:
        return []
    return [
        _label(left - 10, _TOP + (i + 0.5) * height + 3, rows.words(tile), anchor="end")
        for i, tile in enumerate(rows.tiles())
        if tile is not None
    ]


def _column_labels(columns: Side, left: float, width: float) -> list[Label]:
    if not columns.uses:
        return []
    words = [(i, columns.words(tile)) for i, tile in enumerate(columns.tiles()) if tile is not None]
    longest = max(len(text) for _, text in words)
    step = max(1, math.ceil(longest * _LETTER / width))
    return [_label(left + (i + 0.5) * width, _TOP - 10, text) for i, text in words[::step]]


def _titles(rows: Side, columns: Side, left: float, width: float, height: float) -> list[Label]:
    titles: list[Label] = []
    if columns.dim is not None:
        titles.append(_label(left + width / 2, _TOP - 24, _title(columns), "dim"))
    if rows.dim is not None:
        x, y = 9, _TOP + height / 2
        title = _label(x, y, _title(rows), "dim")
        turn = f"rotate(-90 {x} {round(y, 1)})"
        titles.append(replace(title, look={**title.look, "transform": turn}))
    return titles


def _title(side: Side) -> str:
    by = f" by {_product(side.uses)}" if side.uses else ""
    return f"dim {side.dim}: {side.extent:,}{by}"


def _product(uses: Sequence[AxisUse]) -> str:
    return " x ".join(f"{use.axis} {use.size}" for use in uses)


def _dims(shape: tuple[int, ...]) -> str:
    return " x ".join(f"{size:,}" for size in shape) or "scalar"


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
    tensor = names.get(name) or names.get(starred(name))
    if tensor is None:
        near = ", ".join(list(names)[:5]) or "none: its program names no tensors"
        raise ReportError(
            f"The tensor name={name!r} was asked for, of the report {report.title!r}. It has no "
            f"tensor of that name. The largest ones are {near}."
        )
    return tensor


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
    on = Mesh.arange(tuple(axis.size for axis in mesh), tuple(axis.name for axis in mesh))
    if text.lstrip().startswith("["):
        try:
            layout = Layout.parse(text, on)
        except LayoutError:
            return None
        return layout if layout.ndim == ndim else None
    uses = axis_uses(text, mesh, ndim)
    if uses is None or any(use.is_strided for use in uses):
        return None
    dims = ([mesh[use.place].name for use in uses if use.dim == dim] for dim in range(ndim))
    partial = tuple((mesh[use.place].name, "sum") for use in uses if use.is_partial)
    return Layout(on, tuple(map(tuple, dims)), partial)


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
