"""The cases of `benchmarks.mesh`: every slice, and every mesh shape that is asked of it.

    powers of two       all ordered shapes of 1 to 4 axes, each a power of two of 2 or more, on
                        every real slice of v4, v5p, v5e, v6e and tpu7x up to 4096 chips whose dims
                        are powers of two; twisted tori too, where the chip has them
    other v5p slices    all ordered shapes of 1 and 2 axes on the real v5p slices up to 4096 chips
                        with a dim that is no power of two; of 3 axes too on those that have a name
                        in Cloud ("v5p-1920"), not on other boxes of whole cubes

A slice is not asked twice under two names: v4 and v5p have the same slices with the same links, and
so have v5e and v6e. JAX makes the same meshes of them too, but for 2x2x2 chips that call themselves
"TPU v5p" (libtpu calls them "TPU v5"), which is asked by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from mesh_utils import find_chip
from mesh_utils.hardware import Shape3

MAX_CHIPS = 4096
GENERATIONS = {"v5p": ("v4",), "v5e": ("v6e",), "tpu7x": ()}
"""The chips that are asked, and those whose slices are the same."""


@dataclass(frozen=True)
class SliceCases:
    """The shapes to ask of one slice.

    Attributes:
        name: what `Topology.parse` reads.
        family: the chips that this stands for, as in "v4, v5p".
        is_power: whether all dims are powers of two.
        is_twisted: whether it is a twisted torus.
        shapes: the mesh shapes.
        jax_kind: the device_kind that JAX is shown; None for that of the topology's devices.
    """

    name: str
    family: str
    is_power: bool
    is_twisted: bool
    shapes: tuple[tuple[int, ...], ...]
    jax_kind: str | None = None


def is_power_of_two(number: int) -> bool:
    """Whether a number is 1, 2, 4, 8 ...

    Example:
        >>> [n for n in range(1, 20) if is_power_of_two(n)]
        [1, 2, 4, 8, 16]
    """
    return number > 0 and number & (number - 1) == 0


@lru_cache(maxsize=4096)
def shapes(count: int, num_axes: int) -> tuple[tuple[int, ...], ...]:
    """Every ordered way to write a count as a product of sizes of 2 or more.

    Args:
        count: 1 or more.
        num_axes: how many sizes.

    Returns:
        The shapes, in ascending order.

    Example:
        >>> shapes(12, 2)
        ((2, 6), (3, 4), (4, 3), (6, 2))
    """
    if num_axes == 1:
        return ((count,),) if count > 1 else ()
    return tuple(
        (size, *rest)
        for size in range(2, count // 2 + 1)
        if count % size == 0
        for rest in shapes(count // size, num_axes - 1)
    )


def real_slices(chip_name: str) -> list[Shape3]:
    """The real slices of a chip with 1 to 4096 chips.

    Args:
        chip_name: such as "v5p".

    Returns:
        Their shapes, by chips, then by dims.

    Example:
        >>> real_slices("v5e")[:4]
        [(1, 1, 1), (2, 2, 1), (2, 4, 1), (4, 4, 1)]
    """
    table = find_chip(chip_name).slices
    every = table.nearest((4, 4, 4), 1_000_000)
    small = [shape for shape in every if math.prod(shape) <= MAX_CHIPS]
    return sorted(small, key=lambda shape: (math.prod(shape), shape))


def power_shapes(num_devices: int) -> tuple[tuple[int, ...], ...]:
    """All shapes of 1 to 4 axes, of a power of two of devices.

    Example:
        >>> power_shapes(8)
        ((8,), (2, 4), (4, 2), (2, 2, 2))
    """
    return tuple(shape for axes in (1, 2, 3, 4) for shape in shapes(num_devices, axes))


def other_shapes(num_devices: int, most_axes: int) -> tuple[tuple[int, ...], ...]:
    """All shapes of 1 to so many axes.

    Example:
        >>> other_shapes(12, 2)
        ((12,), (2, 6), (3, 4), (4, 3), (6, 2))
    """
    return tuple(shape for axes in range(1, most_axes + 1) for shape in shapes(num_devices, axes))


def every_case() -> Iterator[SliceCases]:
    """All slices with their shapes: see the text of this module."""
    for chip, others in GENERATIONS.items():
        family = ", ".join(sorted([*others, chip]))
        table = find_chip(chip).slices
        for box in real_slices(chip):
            is_power = all(map(is_power_of_two, box))
            if not is_power and chip != "v5p":
                continue
            rank = find_chip(chip).torus_rank
            name = f"{chip}:{'x'.join(map(str, box[:rank]))}"
            devices = math.prod(box) * find_chip(chip).devices_per_chip
            most = 3 if box in table.shapes else 2
            asked = power_shapes(devices) if is_power else other_shapes(devices, most)
            if not asked:
                continue
            yield SliceCases(name, family, is_power, False, asked)
            if table.twists(box):
                yield SliceCases(f"{name}_twisted", family, is_power, True, asked)
            if name == "v5p:2x2x2":
                yield SliceCases(name, "v5p", is_power, False, asked, "TPU v5p")
