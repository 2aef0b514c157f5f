"""SliceTable: which slices of a chip there are, which dims of them wrap, which can be twisted.

A slice is a box of chips joined by ICI. Not every box can be had: Cloud sells a list of shapes. In
a shape, a dim either ends at its last chip (a mesh) or a link leads from there to the first (it
wraps: a torus). libtpu accepts any box with any wrap, and devices do not tell their wrap, so both
are looked up here:

    table = find_chip("v5p").slices
    table.is_real((4, 4, 8)), table.is_real((4, 4, 6))      True, False
    table.wrap((4, 4, 8))                                   (True, True, True)
    table.wrap((2, 2, 4))                                   (False, False, False)
    table.nearest((4, 4, 6))                                (4, 4, 4), (4, 4, 8), ...

Wrap rules (wrap_rule):

    all_if_multiples_of     every dim wraps if every dim is a multiple of wrap_size, else none does:
                            v4, v5p and tpu7x, whose wrap links are switches between cubes
    dims_of                 the dims of exactly wrap_size chips wrap: v5e and v6e, 16 of them
    whole_pod               the pod wraps; of smaller slices it is not known: v2 and v3
    switched                there is no torus: GPUs
"""

import math
from dataclasses import dataclass
from functools import cache

Shape3 = tuple[int, int, int]
Wrap3 = tuple[bool, bool, bool]

CUBE = 4
"""Chips of a cube along each dim: what optical switches join to larger slices."""


@dataclass(frozen=True)
class SliceTable:
    """The real slices of one chip.

    Attributes:
        shapes: the slices that a count of chips names, in ascending order of chips.
        max_cubes: shapes of up to so many whole cubes of 4x4x4 are real too; 0 for none.
        cubes_ascend: whether those have their dims in ascending order only.
        wrap_rule: which dims wrap: see above.
        wrap_size: the number in that rule.
        pod: the shape of the pod, for "whole_pod".
        wrap_reason: why the wrap of some slices is not known.
        can_twist: whether slices of k x k x 2k and k x 2k x 2k chips can be twisted tori.
        twist_reason: why one cannot say whether such a slice is twisted.
        source: who lists the shapes.

    Example:
        >>> table = SliceTable(((2, 2, 1), (16, 16, 1)), 0, True, "dims_of", 16, source="me")
        >>> table.is_real((16, 16, 1)), table.wrap((16, 16, 1))
        (True, (True, True, False))
    """

    shapes: tuple[Shape3, ...]
    max_cubes: int
    cubes_ascend: bool
    wrap_rule: str
    wrap_size: int
    pod: Shape3 | None = None
    wrap_reason: str = ""
    can_twist: bool = False
    twist_reason: str = ""
    source: str = ""

    def is_real(self, shape: Shape3) -> bool:
        """Whether there is such a slice.

        Args:
            shape: chips in x, y and z.

        Returns:
            True if it is listed, or made of whole cubes as the chip allows.
        """
        if self.wrap_rule == "switched":
            return shape[1:] == (1, 1) and shape[0] <= self.shapes[0][0]
        if shape in self.shapes:
            return True
        in_order = not self.cubes_ascend or tuple(sorted(shape)) == shape
        cubes = math.prod(size // CUBE for size in shape)
        whole = all(size % CUBE == 0 for size in shape)
        return whole and in_order and cubes <= self.max_cubes

    def wrap(self, shape: Shape3) -> Wrap3 | None:
        """Which dims of a real slice wrap.

        Args:
            shape: chips in x, y and z.

        Returns:
            A flag per dim; None where it is not known: for some slices of v2 and v3, and for most
            boxes that are no real slice. A dim of one or two chips never wraps.
        """
        if not self.is_real(shape):
            return self.part_wrap(shape)
        if self.wrap_rule == "all_if_multiples_of":
            every = all(size % self.wrap_size == 0 for size in shape)
            return (every, every, every)
        if self.wrap_rule == "whole_pod" and max(shape) > 2:
            return (True, True, False) if shape == self.pod else None
        return self.part_wrap(shape) or (False, False, False)

    def part_wrap(self, shape: Shape3) -> Wrap3 | None:
        """Which dims of a box wrap, whatever slice it is part of.

        Args:
            shape: chips in x, y and z.

        Returns:
            A flag per dim, where the dims of a chip wrap by their own length (v5e, v6e) or the box
            is too small to wrap; else None.

        Example:
            >>> table = SliceTable(((16, 16, 1),), 0, True, "dims_of", 16)
            >>> table.part_wrap((16, 4, 1))
            (True, False, False)
        """
        size = self.wrap_size
        if self.wrap_rule == "dims_of" and max(shape) <= size and shape[2] == 1:
            return (shape[0] == size, shape[1] == size, False)
        return (False, False, False) if max(shape) <= 2 else None

    def twists(self, shape: Shape3) -> bool:
        """Whether a slice of that shape can be a twisted torus.

        Args:
            shape: chips in x, y and z.

        Returns:
            True for k x k x 2k and k x 2k x 2k, in any order, where the chip has twisted tori.
        """
        low, middle, high = sorted(shape)
        fits = high == 2 * low and middle in (low, high)
        return self.can_twist and fits and self.wrap(shape) == (True, True, True)

    def of_chips(self, count: int) -> Shape3 | None:
        """The slice that a number of chips stands for in Cloud's accelerator types.

        Args:
            count: chips.

        Returns:
            Its shape; None where no listed slice has so many chips.
        """
        found = (shape for shape in self.shapes if math.prod(shape) == count)
        return next(found, None)

    def nearest(self, shape: Shape3, count: int = 3) -> tuple[Shape3, ...]:
        """The real slices most like a box.

        Args:
            shape: chips in x, y and z.
            count: how many to return.

        Returns:
            Real shapes, the most alike first: the same dims in another order, then by the ratios of
            their dims, all in ascending order.
        """
        ordered = sorted(shape)

        def unlikeness(real: Shape3) -> tuple[float, float, Shape3]:
            ratios = [abs(math.log2(a / b)) for a, b in zip(sorted(real), ordered, strict=True)]
            return (sum(ratios), abs(math.log2(math.prod(real) / math.prod(shape))), real)

        return tuple(sorted(_all_shapes(self), key=unlikeness)[:count])

    def nearest_twisted(self, shape: Shape3) -> Shape3 | None:
        """The slice most like a box that can be twisted.

        Args:
            shape: chips in x, y and z.

        Returns:
            Its shape; None if the chip has no twisted tori.
        """
        near = self.nearest(shape, len(_all_shapes(self)))
        return next((real for real in near if self.twists(real)), None)

    def nearest_counts(self, count: float) -> tuple[int, ...]:
        """The numbers of chips next to a number that no listed slice has.

        Args:
            count: chips; not a whole number where half of one was asked for.

        Returns:
            The next smaller and the next larger, where there are such.
        """
        counts = sorted(math.prod(shape) for shape in self.shapes)
        lower = [each for each in counts if each < count][-1:]
        higher = [each for each in counts if each > count][:1]
        return (*lower, *higher)


@cache
def _all_shapes(table: SliceTable) -> tuple[Shape3, ...]:
    """The listed shapes, and those of whole cubes with their dims in ascending order."""
    top = table.max_cubes
    cubes = [
        (CUBE * a, CUBE * b, CUBE * c)
        for a in range(1, top + 1)
        for b in range(a, top // a + 1)
        for c in range(b, top // (a * b) + 1)
    ]
    return tuple(dict.fromkeys((*table.shapes, *cubes)))
