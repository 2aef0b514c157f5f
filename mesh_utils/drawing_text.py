"""A mesh as text: planes of chips, each with its place in the mesh.

    z=0            z=1
        x   0   1      x   0   1
    y 0   0,0 0,1  y 0   1,0 1,1

Slices of more than 512 chips are abbreviated: the first chips and the last of a long dim are there,
with dots in between.
"""

from collections.abc import Iterator
from typing import TypeAlias

from mesh_utils.drawing_labels import LabelArray

Shown: TypeAlias = list[int | None]
"""The places of a dim that are written; None stands for those left out."""

MAX_CHIPS = 512
"""Slices of so many chips are written out."""

_FEW = (8, 8, 4)
"""Chips of a larger slice that are written, in x, y and z."""

_DOTS = "..."


def text_of_chips(labels: LabelArray, rank: int, width: int) -> str:
    """Writes the chips of a slice, plane by plane.

    Args:
        labels: what to write at each chip, [x, y, z].
        rank: 3 where planes are to be numbered, 2 where not, 0 where there is no torus.
        width: characters of a line; planes stand beside each other as far as it allows.

    Returns:
        The lines.

    Example:
        >>> import numpy as np
        >>> print(text_of_chips(np.array(["0", "1", "3", "2"]).reshape(2, 2, 1), 2, 80))
            x 0 1
        y 0   0 3
        y 1   1 2
    """
    cell = max(len(str(labels.shape[0] - 1)), *map(len, labels.reshape(-1).tolist()))
    if rank == 0:
        return "\n".join(_rows_of_switch(labels, cell))
    head = len(f"y {labels.shape[1] - 1}") + 2
    few = labels.shape if labels.size <= MAX_CHIPS else _FEW
    columns, rows, levels = (
        _shown(length, most) for length, most in zip(labels.shape, few, strict=True)
    )
    if labels.shape[2] == 1 and rank == 2:
        return "\n".join(_plane(labels, 0, columns, rows, cell, head))
    planes = [_titled(labels, z, columns, rows, cell, head) for z in levels]
    beside = max(width // (max(len(line) for line in planes[0]) + 2), 1)
    groups = [planes[first : first + beside] for first in range(0, len(planes), beside)]
    return "\n\n".join("\n".join(_beside(group)) for group in groups)


def _shown(length: int, most: int) -> Shown:
    """Which places of a dim are written: all, or so many, the dots counted."""
    if length <= most:
        return list(range(length))
    last = max((most - 1) // 4, 1)
    return [*range(most - 1 - last), None, *range(length - last, length)]


def _plane(
    labels: LabelArray, z: int, columns: Shown, rows: Shown, cell: int, head: int
) -> Iterator[str]:
    numbers = [_DOTS if x is None else str(x).rjust(cell) for x in columns]
    yield "x".rjust(head) + " " + " ".join(numbers)
    for y in rows:
        if y is None:
            yield f"  {_DOTS}"
            continue
        cells = [_DOTS if x is None else labels[x, y, z].item().rjust(cell) for x in columns]
        yield f"y {y}".ljust(head) + " " + " ".join(cells)


def _titled(
    labels: LabelArray, z: int | None, columns: Shown, rows: Shown, cell: int, head: int
) -> list[str]:
    if z is None:
        return [_DOTS]
    return [f"z={z}", *_plane(labels, z, columns, rows, cell, head)]


def _beside(planes: list[list[str]]) -> Iterator[str]:
    """The lines of planes beside each other."""
    height = max(map(len, planes))
    widths = [max(map(len, plane)) + 2 for plane in planes]
    for row in range(height):
        cells = [plane[row] if row < len(plane) else "" for plane in planes]
        line = "".join(text.ljust(wide) for text, wide in zip(cells, widths, strict=True))
        yield line.rstrip()


def _rows_of_switch(labels: LabelArray, cell: int) -> Iterator[str]:
    """The chips that a switch joins, in rows of 8."""
    chips = labels.reshape(-1)
    for first in range(0, len(chips), 8):
        row = " ".join(label.rjust(cell) for label in chips[first : first + 8].tolist())
        yield f"gpu {first}".ljust(8) + row
