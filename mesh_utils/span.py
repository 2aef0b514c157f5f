"""Span: where one mesh axis lies on the chips.

In each physical dim of a slice an axis takes some chips, a fixed stride apart. A group of the axis
is the product of those rows, and the groups tile the box:

    a dim of 8 chips, size 2, stride 2:     0 2 | 1 3 | 4 6 | 5 7

Which device of a group follows which is the order; only `permute` depends on it. It counts through
the dims of `order` from outer to inner, and in a snake turns around at the end of each row.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Shape3 = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Span:
    """Where one axis lies.

    Attributes:
        sizes: chips that it takes in x, y and z.
        strides: chips from one of them to the next, in x, y and z.
        cores: devices that it takes on each chip.
        slices: slices that it takes, all or 1: the DCN part, which is the outer one.
        order: the dims from outer to inner.
        snake: whether it turns around at the end of each row.

    Example:
        >>> Span((2, 4, 1), (1, 2, 1)).num_devices
        8
    """

    sizes: Shape3
    strides: Shape3 = (1, 1, 1)
    cores: int = 1
    slices: int = 1
    order: Shape3 = (2, 1, 0)
    snake: bool = False

    @property
    def num_chips(self) -> int:
        """Chips of one group in one slice."""
        return math.prod(self.sizes)

    @property
    def num_devices(self) -> int:
        """Devices of one group, over all its slices: the size of the axis."""
        return self.num_chips * self.cores * self.slices

    def __str__(self) -> str:
        dims = [
            f"{name}{size}" + (f"@{stride}" if stride > 1 else "")
            for name, size, stride in zip("xyz", self.sizes, self.strides, strict=True)
            if size > 1
        ]
        cores = ["core"] if self.cores > 1 else []
        slices = [f"slice{self.slices}"] if self.slices > 1 else []
        return f"Span({' '.join([*slices, *dims, *cores]) or '1'})"


def span_members(span: Span) -> NDArray[np.int64]:
    """The chips of the group that begins at the first chip, in the order of the axis.

    Args:
        span: where the axis lies.

    Returns:
        x, y, z of each, [chips, 3].

    Example:
        >>> span_members(Span((2, 2, 1), snake=True)).tolist()
        [[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0]]
    """
    outer_first = tuple(span.sizes[dim] for dim in span.order)
    digits = np.indices(outer_first).reshape(3, -1)
    if span.snake:
        row_digits = digits.copy()
        for place in (1, 2):
            # A row is walked backwards where its number, counted through all outer dims, is odd.
            number = np.ravel_multi_index(tuple(row_digits[:place]), outer_first[:place])
            flipped = outer_first[place] - 1 - row_digits[place]
            digits[place] = np.where(number % 2 == 1, flipped, row_digits[place])
    members = np.zeros((digits.shape[1], 3), np.int64)
    for place, dim in enumerate(span.order):
        members[:, dim] = digits[place] * span.strides[dim]
    return members


def span_groups(span: Span, shape: Shape3) -> NDArray[np.int64]:
    """All groups of an axis in one slice.

    Args:
        span: where the axis lies; its sizes times strides divide the shape.
        shape: the chips of the slice.

    Returns:
        x, y, z of each member, [groups, chips, 3].

    Example:
        >>> span_groups(Span((2, 1, 1), (2, 1, 1)), (4, 1, 1))[:, :, 0].tolist()
        [[0, 2], [1, 3]]
    """
    starts = [
        [block + offset for block in range(0, length, size * stride) for offset in range(stride)]
        for size, stride, length in zip(span.sizes, span.strides, shape, strict=True)
    ]
    grid = np.stack(np.meshgrid(*starts, indexing="ij"), axis=-1).reshape(-1, 1, 3)
    return np.asarray(grid, np.int64) + span_members(span)
