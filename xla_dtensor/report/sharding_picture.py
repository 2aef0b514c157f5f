"""Which device holds which block of a tensor, of any rank, on any number of devices.

A tensor is cut into a grid of blocks, one dim after another; each block lies on one device, or on
several, which have copies. That is what a picture shows, whatever it is drawn with:

    picture.dims         per dim: in how many blocks, by which axes of the mesh, what is padding
    picture.devices      the device ids, int64 array of shape (blocks of each dim ..., copies)
    picture.faces()      the grid in two dims at a time, with gaps where it is too large to show
    picture.text()       for a terminal; picture.rich() in colour; picture.svg() for a page

Blocks are XLA's: a dim of 10 in 4 blocks has 3, 3, 3 and 1, and each device keeps room for 3.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mesh_utils import Mesh
from xla_dtensor.core import Layout, OpSharding
from xla_dtensor.core.translate import layout_of_op_sharding
from xla_dtensor.report.render import Table, one_line, table_lines
from xla_dtensor.report.report import ReportError
from xla_dtensor.report.texts import bytes_text, seconds_text, share_text

__all__ = ["Box", "DimCut", "Label", "ShardingPicture", "fill", "number", "picture_of"]


# --------------------------------------------------------------------- Templates of pages, drawings
#
# No file but the templates writes an angle bracket, and they escape every value: nothing that comes
# from a model, a path or a flag becomes markup.


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle of a drawing, in its units.

    Attributes:
        x: its left edge.
        y: its upper edge.
        width: its width.
        height: its height.
        look: further attributes of SVG.
    """

    x: float
    y: float
    width: float
    height: float
    look: Mapping[str, object]

    @property
    def attributes(self) -> dict[str, object]:
        """All attributes of SVG."""
        places = {"x": self.x, "y": self.y, "width": self.width, "height": self.height}
        return {name: number(place) for name, place in places.items()} | dict(self.look)


@dataclass(frozen=True, slots=True)
class Label:
    """A line of text of a drawing.

    Attributes:
        x: where it is anchored, in the units of the drawing.
        y: its base line.
        words: the text.
        look: further attributes of SVG.
    """

    x: float
    y: float
    words: str
    look: Mapping[str, object]

    @property
    def attributes(self) -> dict[str, object]:
        """All attributes of SVG."""
        return {"x": number(self.x), "y": number(self.y), **self.look}


def number(value: float) -> str:
    """Writes a coordinate.

    Args:
        value: in user units.

    Returns:
        At most one decimal.

    Example:
        >>> number(1.25), number(3.0)
        ('1.2', '3')
    """
    return f"{value:.1f}".removesuffix(".0")


def fill(template: str, **values: object) -> str:
    """Fills a template.

    Args:
        template: its name in this folder.
        **values: what it asks for.

    Returns:
        The text, in which every value is escaped and on one line.
    """
    return _templates().get_template(template).render(values)


@cache
def _templates() -> Any:
    import jinja2

    folder = files("xla_dtensor.report")
    templates: Any = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: folder.joinpath(name).read_text("utf-8")),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
        autoescape=True,
        # What is escaped by then is of another type.
        finalize=lambda value: one_line(value) if type(value) is str else value,
    )
    templates.filters.update(
        bytes=bytes_text, seconds=seconds_text, share=share_text, number=number, count="{:,}".format
    )
    return templates


# ---------------------------------------------------------------------------------- Sharding blocks

ROWS, COLUMNS, FACES = 8, 8, 3
"""How many are shown in full; of more the first ones and the last."""


@dataclass(frozen=True, slots=True)
class DimCut:
    """How one dim is cut.

    Attributes:
        dim: the dim.
        extent: its size in elements; None if nobody said.
        blocks: into how many blocks it is cut.
        axes: the axes of the mesh that cut it, outermost first; None if that cannot be said.

    Example:
        >>> rows = DimCut(0, 10, 4, ("tp",))
        >>> rows.block, rows.padding, rows.span(3), rows.words
        (3, 2, (9, 10), 'dim 0: 10 in 4 blocks of 3 by tp, the last of 1 (2 of padding)')
    """

    dim: int
    extent: int | None
    blocks: int
    axes: tuple[str, ...] | None = ()

    @property
    def block(self) -> int | None:
        """The elements of a full block."""
        return None if self.extent is None else -(-self.extent // self.blocks)

    @property
    def padding(self) -> int:
        """The elements that fill up the last blocks."""
        return 0 if self.extent is None else self.blocks * (self.block or 0) - self.extent

    def span(self, block: int) -> tuple[int, int] | None:
        """Where a block begins and ends; the same twice for an empty one."""
        if self.extent is None or self.block is None:
            return None
        start = min(block * self.block, self.extent)
        return start, min(start + self.block, self.extent)

    @property
    def words(self) -> str:
        """The cut in a line."""
        extent = "" if self.extent is None else f" {self.extent:,}"
        if self.blocks == 1:
            return f"dim {self.dim}:{extent} whole"
        by = "" if not self.axes else f" by {' x '.join(self.axes)}"
        words = f"dim {self.dim}:{extent} in {self.blocks:,} blocks"
        if self.block is not None:
            words += f" of {self.block:,}"
        return f"{words}{by}{self._padding_words()}"

    def _padding_words(self) -> str:
        if not self.padding or self.extent is None or not self.block:
            return ""
        full, last = divmod(self.extent, self.block)
        empty = self.blocks - full - (1 if last else 0)
        words = ""
        if last:
            words += f", the last of {last:,}" if not empty else f", then one of {last:,}"
        if empty:
            words += f", {empty:,} empty"
        return f"{words} ({self.padding:,} of padding)"


@dataclass(frozen=True, slots=True)
class Face:
    """The blocks along two dims, with those of all other dims held fixed.

    Attributes:
        title: which blocks of the other dims; "" if they have one each.
        rows: the blocks along the first dim that are shown; None is a gap.
        columns: likewise along the second.
        cells: the device ids of each shown block; None in a gap.
        hidden: how many faces a gap stands for; 0 for a face.
    """

    title: str
    rows: tuple[int | None, ...] = ()
    columns: tuple[int | None, ...] = ()
    cells: tuple[tuple[tuple[int, ...] | None, ...], ...] = ()
    hidden: int = 0


@dataclass(frozen=True)
class ShardingPicture:
    """See the module docstring.

    Attributes:
        title: what is shown.
        dims: how each dim is cut.
        devices: device ids, int64 array of shape (blocks of each dim ..., copies of a block).
        layout: the same as text of a layout, or as XLA writes it.
        mesh: the mesh whose axes are named; None if there is none.
        copied_along: the axes along which blocks are copied; None if that cannot be said.
        element_bytes: of one element; None if it is not known.
        notes: what else is to be said, in sentences.
    """

    title: str
    dims: tuple[DimCut, ...]
    devices: NDArray[np.int64] = field(repr=False)
    layout: str = ""
    mesh: Mesh | None = None
    copied_along: tuple[str, ...] | None = ()
    element_bytes: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def num_copies(self) -> int:
        """On how many devices each block lies."""
        return int(self.devices.shape[-1])

    @property
    def sides(self) -> tuple[int | None, int | None]:
        """The dims that are drawn as rows and as columns; None where there is no such dim."""
        ndim = len(self.dims)
        if ndim < 2:
            return None, (0 if ndim else None)
        cut = [cut.dim for cut in self.dims if cut.blocks > 1]
        if len(cut) >= 2:
            return cut[-2], cut[-1]
        first = min(cut[0] if cut else ndim - 2, ndim - 2)
        return first, first + 1

    @property
    def summary(self) -> tuple[str, ...]:
        """What is cut, copied and padded, in lines."""
        lines = [cut.words for cut in self.dims]
        if not self.dims:
            lines.append("one element, whole")
        if self.num_copies > 1:
            along = f", copied along {' x '.join(self.copied_along)}" if self.copied_along else ""
            lines.append(f"each block on {self.num_copies:,} devices{along}")
        blocks = [cut.block for cut in self.dims]
        if self.element_bytes is not None and None not in blocks:
            total = math.prod(cut.extent or 0 for cut in self.dims) * self.element_bytes
            block_bytes = math.prod(size or 0 for size in blocks) * self.element_bytes
            shape = " x ".join(f"{size:,}" for size in blocks if size is not None) or "1"
            lines.append(f"a device holds {shape}, {block_bytes:,} of {total:,} bytes")
        return (*lines, *self.notes)

    def label(self, dim: int, block: int) -> tuple[str, str]:
        """Says of a block along a dim where on the mesh it lies, and what part it is.

        Args:
            dim: the dim.
            block: the number of the block.

        Returns:
            Coordinates, "dp 1", and positions, "5:10"; "" for what is not known or says nothing.
        """
        cut = self.dims[dim]
        span = cut.span(block)
        where = ""
        if span is not None:
            where = "empty" if span[0] == span[1] and cut.extent else f"{span[0]:,}:{span[1]:,}"
        return self._coordinates(cut, block), where

    def _coordinates(self, cut: DimCut, block: int) -> str:
        if self.mesh is None or not cut.axes or cut.blocks == 1:
            return ""
        index = [0] * self.devices.ndim
        index[cut.dim] = block
        device = int(self.devices[tuple(index)])
        places = np.argwhere(self.mesh.device_ids == device)
        names = [str(axis) for axis in self.mesh.axis_names]
        if not len(places) or not set(cut.axes) <= set(names):
            return ""
        return ", ".join(f"{axis} {places[0][names.index(axis)]}" for axis in cut.axes)

    def faces(self, rows: int = ROWS, columns: int = COLUMNS, faces: int = FACES) -> Iterator[Face]:
        """Yields the grid, two dims at a time; a gap says how many faces are left out.

        Args:
            rows: how many rows of blocks are shown in full.
            columns: likewise.
            faces: likewise.
        """
        row, column = self.sides
        outer = [cut.dim for cut in self.dims if cut.dim not in (row, column)]
        sizes = tuple(self.dims[dim].blocks for dim in outer)
        count = math.prod(sizes)
        for number in shown(count, faces):
            if number is None:
                yield Face("", hidden=count - faces)
                continue
            place = [int(i) for i in np.unravel_index(number, sizes)] if sizes else []
            yield self._face(dict(zip(outer, place, strict=True)), rows, columns)

    def _face(self, fixed: dict[int, int], rows: int, columns: int) -> Face:
        row, column = self.sides
        down = shown(1 if row is None else self.dims[row].blocks, rows)
        across = shown(1 if column is None else self.dims[column].blocks, columns)

        def cell(i: int | None, j: int | None) -> tuple[int, ...] | None:
            if i is None or j is None:
                return None
            at = fixed | {d: k for d, k in ((row, i), (column, j)) if d is not None}
            return tuple(self.devices[tuple(at[cut.dim] for cut in self.dims)].tolist())

        labels = (
            ", ".join(word for word in self.label(dim, block) if word) or f"block {block}"
            for dim, block in fixed.items()
        )
        title = "; ".join(
            f"dim {dim}: {words}"
            for dim, words in zip(fixed, labels, strict=True)
            if self.dims[dim].blocks > 1
        )
        cells = tuple(tuple(cell(i, j) for j in across) for i in down)
        return Face(title, tuple(down), tuple(across), cells)

    def text(self, max_width: int = 100) -> str:
        """Draws it as text.

        Args:
            max_width: characters of a line; fewer columns are shown where they are too many.

        Returns:
            Lines, without a line break at the end.
        """
        columns = COLUMNS
        lines = _lines(self, columns)
        while columns > 3 and max(map(len, lines), default=0) > max_width:
            columns -= 1
            lines = _lines(self, columns)
        return "\n".join(line.rstrip() for line in lines)

    def rich(self, *, use_color: bool = True) -> Any:
        """Draws it for rich: something to ``print`` on a rich console.

        Args:
            use_color: whether blocks have colours.
        """
        return _to_rich(self, use_color=use_color)

    def svg(self) -> str:
        """Draws it as an SVG picture that needs nothing from outside."""
        return _to_svg(self)

    def __str__(self) -> str:
        return self.text()


def shown(count: int, limit: int) -> list[int | None]:
    """Lists what is shown of so many: all, or the first ones, a gap, and the last.

    Example:
        >>> shown(3, 4), shown(100, 4)
        ([0, 1, 2], [0, 1, 2, None, 99])
    """
    if count <= limit + 1:
        return list(range(count))
    return [*range(limit - 1), None, count - 1]


def picture_of(
    sharding: OpSharding,
    shape: Sequence[int] | None = None,
    mesh: Mesh | None = None,
    *,
    layout: Layout | None = None,
    root: Mesh | None = None,
    title: str = "",
    element_bytes: int | None = None,
    notes: Sequence[str] = (),
) -> ShardingPicture:
    """Makes a picture of a sharding.

    Args:
        sharding: how XLA is told that the tensor lies.
        shape: of the tensor; None shows blocks without their extent.
        mesh: whose axes are named; None names none.
        layout: the same in terms of the mesh, where it is known.
        root: the mesh by whose flat order partitions are numbered; that of `mesh` by default.
        title: what is shown.
        element_bytes: of one element.
        notes: further sentences.

    Returns:
        The picture.

    Raises:
        ReportError: a sharding of another rank than the shape, or one without blocks.

    Example:
        >>> from mesh_utils import Mesh
        >>> rows = OpSharding.parse("{devices=[2,1,4]<=[8] last_tile_dim_replicate}")
        >>> picture_of(rows, (8, 4), Mesh.arange((2, 4), ("dp", "tp"))).dims[0].words
        'dim 0: 8 in 2 blocks of 4 by dp'
    """
    ndim = sharding.tensor_ndim if shape is None else len(shape)
    if sharding.kind in ("manual", "unknown") or (
        sharding.is_tiled and (ndim != sharding.tensor_ndim)
    ):
        raise ReportError(
            f"A picture was asked for, of the sharding {sharding} of a tensor of shape="
            f"{None if shape is None else tuple(shape)}. It does not say which device has which "
            "block of such a tensor. Pass a tiled or replicated sharding of the tensor's rank."
        )
    base = root if root is not None else None if mesh is None else mesh.root
    ndim = ndim or 0
    grid = _grid(sharding, ndim, base)
    named = layout
    if named is None and mesh is not None and base is not None:
        named = layout_of_op_sharding(sharding.canonical(), mesh, ndim, base)
    axes = _axes(named, ndim)
    extents: Sequence[int | None] = (None,) * ndim if shape is None else shape
    dims = tuple(
        DimCut(dim, extents[dim], int(grid.shape[dim]), None if axes is None else axes[dim])
        for dim in range(ndim)
    )
    copies = None if axes is None or named is None else _copied(named, axes)
    return ShardingPicture(
        title=title,
        dims=dims,
        devices=grid,
        layout=str(sharding if named is None else named),
        mesh=mesh,
        copied_along=copies,
        element_bytes=element_bytes,
        notes=tuple(notes),
    )


def _grid(sharding: OpSharding, ndim: int, root: Mesh | None) -> NDArray[np.int64]:
    """The device ids by block, the copies of a block last."""
    ids = None if root is None else root.device_ids.reshape(-1)
    if sharding.is_tiled:
        grid = sharding.tile_assignment
        grid = grid.reshape(*grid.shape[:ndim], -1)
    elif sharding.kind == "maximal":
        return np.full((1,) * ndim + (1,), sharding.device or 0, np.int64)
    else:
        count = 1 if ids is None else ids.size
        grid = np.arange(count, dtype=np.int64).reshape((1,) * ndim + (count,))
    return grid if ids is None else np.asarray(ids, np.int64)[grid]


def _axes(layout: Layout | None, ndim: int) -> tuple[tuple[str, ...], ...] | None:
    if layout is None or layout.ndim != ndim:
        return None
    sizes = dict(zip(layout.mesh.axis_names, layout.mesh.mesh_shape, strict=True))
    names: list[tuple[str, ...]] = []
    for entries in layout.dims:
        if any(entry not in sizes for entry in entries):
            return None  # part of an axis, or a gap
        names.append(tuple(str(entry) for entry in entries if sizes[entry] > 1))  # pyright: ignore
    return tuple(names)


def _copied(layout: Layout, axes: tuple[tuple[str, ...], ...]) -> tuple[str, ...]:
    used = {axis for those in axes for axis in those}
    mesh = layout.mesh if layout.mesh.size() == layout.mesh.root.size() else layout.mesh.root
    return tuple(
        str(axis)
        for axis, size in zip(mesh.axis_names, mesh.mesh_shape, strict=True)
        if size > 1 and str(axis) not in used
    )


# ----------------------------------------------------------------------- A sharding for a terminal
#
# A grid of blocks, each with the devices that hold it.

_GAP = "..."
_COLOURS = ("blue", "green", "magenta", "cyan", "yellow", "red")


def _cell_text(devices: Sequence[int] | None, limit: int = 3) -> str:
    """The device ids of a block as runs, so many of them, and their count; None is a gap.

    Example:
        >>> _cell_text((0, 1, 2, 3)), _cell_text((0, 4)), _cell_text(tuple(range(0, 64, 4)))
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


def _heading(picture: ShardingPicture) -> str:
    """The first line: what is shown, and how it lies on which mesh."""
    words = [one_line(picture.title)] if picture.title else []
    if picture.layout:
        words.append(picture.layout)
    if picture.mesh is not None:
        names = zip(picture.mesh.axis_names, picture.mesh.mesh_shape, strict=True)
        words.append("on " + ", ".join(f"{name}={size}" for name, size in names))
    return " ".join(words)


def _lines(picture: ShardingPicture, columns: int) -> list[str]:
    lines = [_heading(picture)] if _heading(picture) else []
    lines += [f"  {line}" for line in picture.summary]
    for face in picture.faces(columns=columns):
        if face.hidden:
            lines += ["", f"{_GAP} and {face.hidden:,} more"]
            continue
        lines += ["", *([face.title] if face.title else [])]
        lines += _aligned(_cells(picture, face))
    return lines


def _cells(picture: ShardingPicture, face: Face) -> list[list[str]]:
    """The words of a face: two header rows, then a row of blocks each."""
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
        [*words, *(_cell_text(cell) for cell in cells)]
        for words, cells in zip(left, face.cells, strict=True)
    ]
    return [*head, *body]


def _label(
    picture: ShardingPicture, dim: int | None, block: int | None, gap: str = _GAP
) -> tuple[str, str]:
    if block is None:
        return "", gap
    return ("", "") if dim is None else picture.label(dim, block)


def _aligned(rows: list[list[str]]) -> list[str]:
    columns = [column for column in zip(*rows, strict=True) if any(column)]
    return table_lines(Table(("",) * len(columns), tuple(zip(*columns, strict=True))))


def _to_rich(picture: ShardingPicture, *, use_color: bool = True) -> Any:
    """A rich Group: heading, summary and tables, with a colour for each set of devices."""
    from rich.console import Group
    from rich.table import Table as RichTable
    from rich.text import Text

    parts: list[Any] = [Text(_heading(picture), style="bold")]
    parts += [Text(f"  {line}") for line in picture.summary]
    colours: dict[Any, str] = {}
    for face in picture.faces():
        if face.hidden:
            parts.append(Text(f"{_GAP} and {face.hidden:,} more"))
            continue
        words = _cells(picture, face)
        num_head = len(words) - len(face.rows)
        table = RichTable(show_header=False, title=face.title or None, title_justify="left")
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


# -------------------------------------------------------------------- A sharding as an SVG picture
#
# Self-contained.

_LINE, _LETTER, _PAD = 18.0, 7.0, 16.0
_CELL_HEIGHT = 34.0
_HUES = ("#cfe3f7", "#d5efd9", "#f7e3c5", "#ead7f0", "#f6d3d3", "#d2eeee")
"""Light colours, readable under black, in turn for each set of devices."""


def _to_svg(picture: ShardingPicture) -> str:
    """The text of an SVG file."""
    lines = [line for line in (_heading(picture), *picture.summary) if line]
    labels = [_label_at(_PAD, _PAD + 12 + i * _LINE, line) for i, line in enumerate(lines)]
    if _heading(picture):
        labels[0] = replace(labels[0], look={**labels[0].look, "font-weight": 600})
    boxes: list[Box] = []
    width = _PAD + max(map(len, lines), default=0) * _LETTER
    top = _PAD + len(lines) * _LINE
    colours: dict[tuple[int, ...], str] = {}
    for face in picture.faces():
        top += 10
        if face.hidden:
            words = f"\N{HORIZONTAL ELLIPSIS} and {face.hidden:,} more"
            labels.append(_label_at(_PAD, top + 12, words))
            top += _LINE
            continue
        drawn, written = _face(picture, face, top, colours)
        boxes += drawn
        labels += written
        width = max(width, drawn[-1].x + drawn[-1].width)
        top = drawn[-1].y + drawn[-1].height
    return fill(
        "sharding.svg.j2",
        heading=_heading(picture),
        boxes=[Box(0, 0, width + _PAD, top + _PAD, {"fill": "#ffffff"}), *boxes],
        labels=labels,
        width=width + _PAD,
        height=top + _PAD,
    )


def _face(
    picture: ShardingPicture, face: Face, top: float, colours: dict[tuple[int, ...], str]
) -> tuple[list[Box], list[Label]]:
    """The blocks of a face, the last one at the right and at the bottom, and what is written."""
    row, column = picture.sides
    left_words = [_label(picture, row, block, gap="") for block in face.rows]
    top_words = [_label(picture, column, block, gap="") for block in face.columns]
    texts = [[_cell_text(cell) for cell in cells] for cells in face.cells]
    cell = max(
        44.0, max(len(word) for line in (*texts, *top_words) for word in line) * _LETTER + 12
    )
    margin = max((len(word) for words in left_words for word in words), default=0)
    left = _PAD + (margin * _LETTER + 10 if margin else 0)
    boxes: list[Box] = []
    labels: list[Label] = []
    if face.title:
        labels.append(_label_at(_PAD, top + 12, face.title))
        top += _LINE
    if any(any(words) for words in top_words):
        for place, words in enumerate(top_words):
            labels += _stacked(left + (place + 0.5) * cell, top + 11, words, "middle")
        top += 2 * 13 + 4
    for i, (words, cells) in enumerate(zip(left_words, face.cells, strict=True)):
        y = top + i * _CELL_HEIGHT
        labels += _stacked(left - 6, y + _CELL_HEIGHT / 2 - 2, words, "end")
        for j, devices in enumerate(cells):
            colour = "#f4f4f4"
            if devices is not None:
                colour = colours.setdefault(devices, _HUES[len(colours) % len(_HUES)])
            x = left + j * cell
            boxes.append(Box(x, y, cell, _CELL_HEIGHT, {"fill": colour, "stroke": "#555555"}))
            middle = {"text-anchor": "middle"}
            labels.append(_label_at(x + cell / 2, y + _CELL_HEIGHT / 2 + 4, texts[i][j], middle))
    return boxes, labels


def _stacked(x: float, y: float, words: Sequence[str], anchor: str) -> list[Label]:
    lines = [word for word in words if word]
    start = y if len(lines) > 1 else y + 6
    look = {"text-anchor": anchor, "font-size": 11, "fill": "#444444"}
    return [Label(x, start + 13 * i, line, look) for i, line in enumerate(lines)]


def _label_at(x: float, y: float, words: str, look: Mapping[str, object] | None = None) -> Label:
    return Label(x, y, words, {"fill": "#111111", **(look or {})})
