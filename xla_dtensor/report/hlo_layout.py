"""The bytes that an array takes in memory, by the layout that HLO prints beside its shape.

    bf16[5,300]{1,0:T(8,128)(2,1)}     dim 1 is the minor one; 5 x 300 elements are cut into tiles
                                       of 8 x 128, the last ones filled up: 8 x 384 elements
    f32[]{:T(128)}                     a number takes a tile too: 128 elements
    s4[64,128]{1,0:T(64,128)(8,1)E(4)} elements of 4 bits
    bf16[8,128]{1,0:T(8,128)S(1)}      in memory space 1

Tiles apply one after the other, each to the minor dims of what the one before has made of the
array: T(8,128)(2,1) cuts [5,300] into [1,3] tiles of [8,128], and each of those into [4,128] tiles
of [2,1]. A dim that is no multiple of its tile is filled up. Without tiles, as on CPU and GPU,
nothing is added.

Memory spaces as libtpu numbers them: 0 is the device's main memory (HBM), 1 the TensorCore's own
(VMEM), 2 and 4 those of semaphores and scalars, 5 the host's.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from xla_dtensor.report.errors import HloError
from xla_dtensor.report.hlo import split_commas
from xla_dtensor.report.hlo_text import ArrayShape, Shape, element_bytes, parse_shape

__all__ = [
    "DEVICE_SPACE",
    "HOST_SPACE",
    "LaidArray",
    "LaidShape",
    "entry_aliases",
    "entry_layouts",
    "laid_arrays",
    "parse_laid_shape",
]

DEVICE_SPACE, HOST_SPACE = 0, 5

_COMMENT = re.compile(r"/\*.*?\*/")
_ARRAY_WITH_LAYOUT = re.compile(r"[a-z]\w*\[[^\]]*\](?:\{([^{}]*)\})?")
_TILES = re.compile(r"(?<![A-Z*#])T((?:\([0-9,*]*\))+)")
_TILE = re.compile(r"\(([0-9,*]*)\)")
_SPACE = re.compile(r"(?<![A-Z])S\(([0-9]{1,9})\)")
_BITS_OF_LAYOUT = re.compile(r"(?<![A-Z])E\(([0-9]{1,9})\)")
_TAIL = re.compile(r"(?<![A-Z])L\(([0-9]{1,9})\)")
_PREFIX = re.compile(r"(?<![A-Z])M\(([0-9]{1,9})\)")
_DIM_NUMBER = re.compile(r"[0-9]{1,9}")
_HEADER, _ALIASES = "entry_computation_layout={", "input_output_alias={"
_ALIAS = re.compile(r"\{([0-9]{0,9})[0-9, ]*\}: \(([0-9]{1,9}), \{([0-9]{0,9})[0-9, ]*\}")


@dataclass(frozen=True, slots=True)
class LaidArray:
    """An array with its layout.

    Attributes:
        shape: dtype and dims.
        minor_to_major: the dims, the one first whose elements lie side by side; empty where the
            text has no layout.
        tiles: the extents of each tile, the coarsest first; 0 stands for "*", a dim that is merged
            into the next minor one.
        bits: of an element; None where the dtype says it.
        space: the memory space.
        tail: the number of elements is filled up to a multiple of this.
        prefix_bytes: what lies before the elements (the extents of dynamic dims).

    Example:
        >>> array = parse_laid_shape("bf16[5,300]{1,0:T(8,128)(2,1)}")
        >>> array.bytes, array.padded_bytes, array.padding_bytes
        (3000, 6144, 3144)
    """

    shape: ArrayShape
    minor_to_major: tuple[int, ...] = ()
    tiles: tuple[tuple[int, ...], ...] = ()
    bits: int | None = None
    space: int = DEVICE_SPACE
    tail: int = 1
    prefix_bytes: int = 0

    @property
    def bytes(self) -> int:
        """What the elements take, packed as the layout says, without any filling."""
        return self.shape.bytes

    @property
    def padded_bytes(self) -> int:
        """What the array takes in memory."""
        dims = self.shape.dims
        order = self.minor_to_major
        # The text leaves the order out of dims that have the default one.
        physical = [dims[dim] for dim in reversed(order)] if order else list(dims)
        for tile in self.tiles:
            physical = _tiled(physical, tile)
        count = math.prod(physical)
        count = -(-count // self.tail) * self.tail
        return -(-count * self._element_bits() // 8) + self.prefix_bytes

    @property
    def padding_bytes(self) -> int:
        """What the layout adds."""
        return self.padded_bytes - self.bytes

    def _element_bits(self) -> int:
        if self.bits is not None:
            return self.bits
        return 8 * element_bytes(self.shape.dtype)


LaidShape: TypeAlias = "LaidArray | tuple[LaidShape, ...]"


def parse_laid_shape(text: str) -> LaidShape:
    """Reads a shape with its layouts.

    Args:
        text: as HLO prints it, an array or a tuple.

    Returns:
        A LaidArray, or a tuple of them.

    Raises:
        HloError: text that is no shape.

    Example:
        >>> parse_laid_shape("(f32[]{:T(128)}, s32[4])")[0].padded_bytes
        512
    """
    layouts = (match[1] or "" for match in _ARRAY_WITH_LAYOUT.finditer(_COMMENT.sub("", text)))
    return _laid(parse_shape(text), layouts)


def laid_arrays(shape: LaidShape) -> tuple[LaidArray, ...]:
    """Lists the arrays of a shape, tuples within tuples opened, tokens included.

    Args:
        shape: an array or a tuple.

    Returns:
        Its arrays in order.
    """
    if isinstance(shape, LaidArray):
        return (shape,)
    return tuple(array for part in shape for array in laid_arrays(part))


class EntryLayouts(NamedTuple):
    """What goes in and out of a program.

    Attributes:
        inputs: the arrays by number.
        result: an array or a tuple.
        is_tupled: whether the inputs come as one tuple: a program of more arrays than a runtime
            hands over one by one (2,000 on TPU). They are numbered as they lie in it.
    """

    inputs: tuple[LaidArray, ...]
    result: LaidShape
    is_tupled: bool


def entry_layouts(hlo_text: str) -> EntryLayouts | None:
    """Reads what goes in and out of a program, as its first line has it.

    Args:
        hlo_text: the text of a module.

    Returns:
        Inputs and result; None where the line does not say.

    Raises:
        HloError: a line that breaks off, or one tuple among several parameters.

    Example:
        >>> entry_layouts("HloModule m, entry_computation_layout={(f32[8]{0})->f32[]}").inputs
        (LaidArray(shape=ArrayShape(dtype='f32', ...
    """
    header = _COMMENT.sub("", hlo_text.lstrip().partition("\n")[0])
    start = header.find(_HEADER)
    if start < 0:
        return None
    text = header[start + len(_HEADER) :]
    given, arrow, result = text[: _closing_brace(text)].partition("->")
    if not arrow:
        raise HloError(
            f"The program's first line has the layout {given[:80]!r}. It names no result. "
            "Pass HLO text as XLA prints it, unabridged."
        )
    parameters = [parse_laid_shape(each) for each in split_commas(given.strip()[1:-1])]
    if len(parameters) == 1 and isinstance(parameters[0], tuple):
        return EntryLayouts(laid_arrays(parameters[0]), parse_laid_shape(result), True)
    arrays = [each for each in parameters if isinstance(each, LaidArray)]
    if len(arrays) != len(parameters):
        raise HloError(
            f"The program's first line has {len(parameters)} parameters. One of them is a tuple, "
            "whose arrays have no number. Compile the step with arrays as parameters."
        )
    return EntryLayouts(tuple(arrays), parse_laid_shape(result), False)


def entry_aliases(hlo_text: str) -> dict[int, int]:
    """Reads which results of a program take the place of inputs: of donated ones.

    Args:
        hlo_text: the text of a module.

    Returns:
        The number of the input, as in `entry_layouts`, by that of the result; 0 for a result that
        is no tuple.

    Example:
        >>> entry_aliases("HloModule m, input_output_alias={ {1}: (2, {}, may-alias) }")
        {1: 2}
    """
    header = hlo_text.lstrip().partition("\n")[0]
    start = header.find(_ALIASES)
    if start < 0:
        return {}
    text = header[start + len(_ALIASES) :]
    found = _ALIAS.findall(text[: _closing_brace(text)])
    return {int(output or 0): int(place or given) for output, given, place in found}


def _tiled(dims: list[int], tile: tuple[int, ...]) -> list[int]:
    """What one tile makes of the dims of an array, the major ones first."""
    # Of an array with fewer dims than the tile, the missing ones have the extent 1.
    dims = [1] * (len(tile) - len(dims)) + dims
    major, cut = dims[: len(dims) - len(tile)], dims[len(dims) - len(tile) :]
    merged: list[tuple[int, int]] = []
    carried = 1
    for extent, size in zip(cut, tile, strict=True):
        carried *= extent
        if size:
            merged.append((carried, size))
            carried = 1
    counts = [-(-extent // size) for extent, size in merged]
    return [*major, *counts, *(size for _, size in merged)]


def _laid(shape: Shape, layouts: Iterator[str]) -> LaidShape:
    if isinstance(shape, tuple):
        return tuple(_laid(part, layouts) for part in shape)
    text = next(layouts, "")
    order, _, properties = text.partition(":")
    tiles = _TILES.search(properties)
    bits, space = _BITS_OF_LAYOUT.search(properties), _SPACE.search(properties)
    tail, prefix = _TAIL.search(properties), _PREFIX.search(properties)
    minor_to_major = tuple(int(dim) for dim in _DIM_NUMBER.findall(order))
    if minor_to_major and sorted(minor_to_major) != list(range(len(shape.dims))):
        raise HloError(
            f"The shape {shape} was given with the layout {text[:80]!r}. It does not order the "
            "dims of the shape. Pass HLO text as XLA prints it."
        )
    return LaidArray(
        shape,
        minor_to_major,
        tuple(_tile(each) for each in _TILE.findall(tiles[1])) if tiles else (),
        int(bits[1]) if bits else None,
        int(space[1]) if space else DEVICE_SPACE,
        max(1, int(tail[1])) if tail else 1,
        int(prefix[1]) if prefix else 0,
    )


def _tile(text: str) -> tuple[int, ...]:
    sizes = (size for size in text.split(",") if size)
    return tuple(int(size) if _DIM_NUMBER.fullmatch(size) else 0 for size in sizes)


def _closing_brace(text: str) -> int:
    """The place of the brace that closes one opened before the text."""
    depth = 1
    for place, letter in enumerate(text):
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return place
    return len(text)
