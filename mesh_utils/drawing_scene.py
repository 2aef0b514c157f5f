"""A mesh as a picture, in boxes, lines and words: what drawing_svg.py writes.

Chips are squares, x to the right and y downwards, the planes of z beside and below each other. A
link is one line for each axis that uses it, side by side, or a thin grey one if none does:

    +---+     +---+
    |0,0|=====|0,1|     two axes use the link between the two chips
    +---+     +---+

Where a link leads out of the plane it is drawn at both ends, as a stub: straight for a dim that
wraps, with a dot at its end; slanted for z, from the upper right corner to the next plane, from the
lower left one to the plane before, with a dot where it wraps.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mesh_utils.drawing_labels import LabelArray
from mesh_utils.drawing_links import LinkFlags, link_ends, slice_links
from mesh_utils.network import Network
from mesh_utils.span import Shape3

UNUSED = -1
"""Stands for the axis of a link that no axis uses."""

_CHARACTER = 6.2
"""Width of a character of a label, in pixels."""
_GAP = 22.0
_STEP = 4.5
"""Between the lines of one link."""
_MARGIN = 24.0
_LINE = 20.0
_MAX_WIDTH = 1290.0
_HEAD = 22.0
"""Above a plane: its name and the numbers of its columns."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A chip: its place in the box, its square, and its label."""

    chip: Shape3
    x: float
    y: float
    side: float
    label: str


@dataclass(frozen=True, slots=True)
class Stroke:
    """A line from (x, y) to (to_x, to_y) in the colour of an axis; `dot` is at its end."""

    axis: int
    x: float
    y: float
    to_x: float
    to_y: float
    dot: bool = False


@dataclass(frozen=True, slots=True)
class Words:
    """Words at a place; `anchor` is "start", "middle" or "end"."""

    x: float
    y: float
    text: str
    size: float = 12.0
    anchor: str = "start"
    bold: bool = False


@dataclass(frozen=True)
class Scene:
    """All there is to draw.

    Attributes:
        width: of the picture, in pixels.
        height: of the picture, in pixels.
        title: what it shows.
        axis_names: the name of each axis.
        cells: the chips.
        strokes: the links, and the samples of the legend.
        words: everything written outside of chips.
        font_size: of the labels.
    """

    width: float
    height: float
    title: str
    axis_names: tuple[str, ...]
    cells: tuple[Cell, ...]
    strokes: tuple[Stroke, ...]
    words: tuple[Words, ...]
    font_size: float


def make_scene(
    network: Network,
    labels: LabelArray,
    uses: Sequence[LinkFlags],
    title: str,
    axis_names: Sequence[str],
    legend: Sequence[str],
    notes: Sequence[str],
) -> Scene:
    """Lays out a picture.

    Args:
        network: the links of a topology.
        labels: what to write at each chip, [x, y, z].
        uses: the links that each axis uses.
        title: the first line.
        axis_names: the name of each axis.
        legend: a line for each axis.
        notes: lines below the legend.

    Returns:
        The picture.
    """
    grid = _Grid.of(network, labels)
    strokes: list[Stroke] = []
    words = [Words(_MARGIN, _MARGIN + 8, title, 15, bold=True)]
    at = _MARGIN + 8 + 1.4 * _LINE
    for axis, line in enumerate(legend):
        strokes.append(Stroke(axis, _MARGIN, at - 4, _MARGIN + 28, at - 4))
        words.append(Words(_MARGIN + 38, at, line))
        at += _LINE
    for line in notes:
        words.append(Words(_MARGIN, at, line, 11))
        at += 0.8 * _LINE
    grid.top = at
    cells = [
        Cell((x, y, z), *grid.corner((x, y, z)), grid.side, labels[x, y, z].item())
        for z in range(labels.shape[2])
        for y in range(labels.shape[1])
        for x in range(labels.shape[0])
    ]
    words += grid.plane_words(network.switched)
    strokes += _link_strokes(network, grid, uses)
    # No picture is narrower than its words: a letter is 0.6 of its height.
    needed = max([len(line.text) * line.size * 0.61 + line.x for line in words], default=0)
    return Scene(
        width=round(max(grid.width, needed + _MARGIN)),
        height=round(grid.height),
        title=title,
        axis_names=tuple(axis_names),
        cells=tuple(cells),
        strokes=tuple(strokes),
        words=tuple(words),
        font_size=grid.font_size,
    )


@dataclass
class _Grid:
    """Where each chip is."""

    shape: Shape3
    side: float
    font_size: float
    columns: int
    rows_of: int = 0
    top: float = 0.0
    _size: tuple[float, float] = field(default=(0.0, 0.0))

    @classmethod
    def of(cls, network: Network, labels: LabelArray) -> "_Grid":
        longest = max(map(len, labels.reshape(-1).tolist()), default=1)
        side = min(max(longest * _CHARACTER + 8, 26.0), 60.0)
        font_size = min(10.0, (side - 6) / (longest * 0.62))
        x, y, z = network.shape
        # A switch joins GPUs in any order: rows of 8, which is no plane of a torus.
        rows_of = 8 if network.switched else 0
        across = min(x, 8) if rows_of else x
        down = -(-x // 8) if rows_of else y
        size = (across * (side + _GAP) + _GAP, down * (side + _GAP) + _GAP + _HEAD)
        columns = min(max(int((_MAX_WIDTH - _MARGIN) // (size[0] + _GAP)), 1), z)
        return cls(network.shape, side, font_size, columns, rows_of, 0.0, size)

    def plane(self, z: int) -> tuple[float, float]:
        """The corner of a plane."""
        wide, high = self._size
        return (
            _MARGIN + (z % self.columns) * (wide + _GAP),
            self.top + (z // self.columns) * (high + _GAP / 2),
        )

    def corner(self, chip: Sequence[int]) -> tuple[float, float]:
        """The upper left corner of a chip's square."""
        x, y, z = chip
        if self.rows_of:
            x, y = x % self.rows_of, x // self.rows_of
        left, top = self.plane(z)
        pitch = self.side + _GAP
        return left + _GAP + x * pitch, top + _HEAD + _GAP + y * pitch

    @property
    def width(self) -> float:
        """Up to the right edge of the last plane."""
        return self.plane(self.columns - 1)[0] + self._size[0] + _MARGIN

    @property
    def height(self) -> float:
        """Down to the lower edge of the last plane."""
        return self.plane(self.shape[2] - 1)[1] + self._size[1] + _MARGIN

    def plane_words(self, switched: bool) -> list[Words]:
        """The names of the planes, and the numbers of their rows and columns."""
        words: list[Words] = []
        if switched:
            return words
        middle = self.side / 2
        for z in range(self.shape[2]):
            left, top = self.plane(z)
            if self.shape[2] > 1:
                words.append(Words(left, top + 12, f"z={z}", 11, bold=True))
            for x in range(self.shape[0]):
                name = f"x={x}" if x == 0 else str(x)
                at = self.corner((x, 0, z))[0] + middle
                words.append(Words(at, top + _HEAD + 4, name, 9, "middle"))
            for y in range(self.shape[1]):
                name = f"y={y}" if y == 0 else str(y)
                at = self.corner((0, y, z))[1] + middle + 12
                words.append(Words(left + 2, at, name, 9, "middle"))
        return words


def _link_strokes(network: Network, grid: _Grid, uses: Sequence[LinkFlags]) -> list[Stroke]:
    """The lines of every link, axis by axis; those that nobody uses first, below the others."""
    there = slice_links(network)
    unused = there.copy()
    for flags in uses:
        unused &= ~flags
    shared = np.sum([there & flags for flags in uses], axis=0)
    strokes: list[Stroke] = []
    placed = np.zeros(there.shape, np.int64)  # lines that a link has by now
    for axis, flags in [(UNUSED, unused), *enumerate(uses)]:
        shown = there & flags
        starts, ends, dims = link_ends(network, shown)
        rows: list[list[int]] = np.column_stack([starts, ends, dims]).tolist()
        for row in rows:
            start, end, dim = row[:3], row[3:6], row[6]
            link = (*start, dim)
            across = (placed[link] - (max(int(shared[link]), 1) - 1) / 2) * _STEP
            wraps = start[dim] == network.shape[dim] - 1
            strokes += _one_link(grid, axis, start, end, dim, wraps, float(across))
        placed += shown
    return strokes


def _one_link(
    grid: _Grid,
    axis: int,
    start: Sequence[int],
    end: Sequence[int],
    dim: int,
    wraps: bool,
    across: float,
) -> list[Stroke]:
    """One line between two chips, or a stub at each of them."""
    side, half = grid.side, grid.side / 2
    (x, y), (to_x, to_y) = grid.corner(start), grid.corner(end)
    if dim == 2:
        # Parallel to each other: shifted along the other diagonal.
        shift, reach = across / 2**0.5, 0.42 * _GAP
        a, b = x + side + shift, y + shift
        c, d = to_x + shift, to_y + side + shift
        return [
            Stroke(axis, a, b, a + reach, b - reach, wraps),
            Stroke(axis, c, d, c - reach, d + reach, wraps),
        ]
    if dim == 0:
        a, b = x + side, y + half + across
        c, d = to_x, to_y + half + across
        reach_x, reach_y = 0.4 * _GAP, 0.0
    else:
        a, b = x + half + across, y + side
        c, d = to_x + half + across, to_y
        reach_x, reach_y = 0.0, 0.4 * _GAP
    if not wraps:
        return [Stroke(axis, a, b, c, d)]
    return [
        Stroke(axis, a, b, a + reach_x, b + reach_y, True),
        Stroke(axis, c, d, c - reach_x, d - reach_y, True),
    ]
