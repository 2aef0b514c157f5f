r"""The words of HLO text: lines, numbers, shapes, their bytes, and those of their layouts.

    bf16[4,256]{1,0:T(8,128)(2,1)}                 an array with its layout
    f32[<=5,3]                                     a dim of dynamic size, at most 5
    (f32[8], (s32[], token[]), /*index=2*/u32[])   a tuple

A shape is an ArrayShape or a tuple of shapes. Of the layout only the packing of elements matters
here: XLA gives an s4 element one byte, unless the layout says E(4).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

__all__ = [
    "DEVICE_SPACE",
    "HOST_SPACE",
    "HloError",
    "LaidArray",
    "LaidShape",
    "checked_devices",
    "closing_bracket",
    "entry_aliases",
    "entry_layouts",
    "laid_arrays",
    "parse_laid_shape",
    "read_number",
    "split_commas",
    "split_outside",
    "whole_lines",
]


class HloError(ValueError):
    """Text that is no HLO, or a part of it that cannot be read.

    Example:
        >>> from xla_dtensor.report import HloError, ReplicaGroups
        >>> try:
        ...     ReplicaGroups.parse("{{0,1},{1,2}}")
        ... except HloError as error:
        ...     print(str(error).split(". ")[0])
        The replica groups '{{0,1},{1,2}}' were given
    """


# -------------------------------------------------------------------------- Brackets and commas

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[(){}\[\],]|[^"(){}\[\],]+|"')


def split_commas(text: str) -> list[str]:
    """Splits at the commas that are in no brackets and no quotes.

    Args:
        text: a list as HLO prints it.

    Returns:
        Its parts, stripped, without the empty ones.

    Example:
        >>> split_commas('a={1,2}, b="x,y"')
        ['a={1,2}', 'b="x,y"']
    """
    parts, depth = [""], 0
    for token in _TOKEN.findall(text):
        depth += (token in "({[") - (token in ")}]")
        if token == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += token
    return [part.strip() for part in parts if part.strip()]


def split_outside(text: str, separator: str) -> list[str]:
    """Splits at a letter where no parenthesis is open.

    Args:
        text: names with calls in them, of which parentheses may be missing.
        separator: the letter.

    Returns:
        The parts that are not empty.

    Example:
        >>> split_outside("jit(f/g)/dot", "/")
        ['jit(f/g)', 'dot']
    """
    parts, depth = [""], 0
    for letter in text:
        depth = max(0, depth + (letter == "(") - (letter == ")"))
        if letter == separator and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part for part in parts if part]


def closing_bracket(text: str) -> int:
    """The place of the bracket that closes one opened before the text."""
    depth = 1
    for match in _TOKEN.finditer(text):
        depth += (match[0] in "({[") - (match[0] in ")}]")
        if depth == 0:
            return match.start()
    return len(text)


# ----------------------------- Instructions that XLA prints over several lines, put together again
#
# XLA writes an instruction into one line, except where an attribute holds line breaks of its own,
# as the metadata of a Pallas kernel does:
#
#     %a = f32[8]{0} custom-call(%p), frontend_attributes={kernel_metadata={
#     "xprof_metadata":"{\"block_q\": 512}"
#     }}, metadata={op_name="jit(f)/pallas_call"}
#
# A line whose brackets stay open goes on until they are closed. One that is never closed is left as
# it is, for who reads it to say so.

_BEGINS = re.compile(r"\s*(?:ROOT )?%?[\w.\-]+ = ")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_MOST_LINES = 256


def whole_lines(lines: Sequence[str]) -> Iterator[str]:
    """Puts the lines of an instruction together.

    Args:
        lines: those of a module.

    Yields:
        The lines, fewer of them.

    Example:
        >>> list(whole_lines(["%a = f32[] add(%b), x={y={", '"z": "}"', "}}, c=d", "}"]))
        ['%a = f32[] add(%b), x={y={ "z": "}" }}, c=d', '}']
    """
    at = 0
    while at < len(lines):
        size = _length(lines, at)
        yield lines[at] if size == 1 else " ".join(lines[at : at + size])
        at += size


def _length(lines: Sequence[str], at: int) -> int:
    """How many lines an instruction has; 1 for all else."""
    first = lines[at]
    if first.count("{") == first.count("}") or not _BEGINS.match(first):
        return 1
    depth = 0
    for size, line in enumerate(lines[at : at + _MOST_LINES], 1):
        if size > 1 and (_BEGINS.match(line) or line.strip() == "}"):
            return 1  # the next instruction, or the end of the computation
        bare = _QUOTED.sub("", line)
        depth += bare.count("{") - bare.count("}")
        if depth <= 0:
            return size
    return 1


# ---------------------------------------------- Numbers in HLO text, read so that no text can harm
#
# Not too long, and not too large.

MOST_DEVICES = 1 << 22
"""Devices of a program. The largest machine that libtpu takes has 2^18; a number beyond this is no
program's, and making its groups would take the memory of the machine that reads the report."""

_SIGNED_NUMBER = re.compile(r"-?[0-9]{1,18}")


def read_number(text: str | None, otherwise: int = 0) -> int:
    """Reads a number.

    Args:
        text: what should be one.
        otherwise: what to take where it is none.

    Returns:
        The number.

    Example:
        >>> read_number("12"), read_number("twelve"), read_number(None)
        (12, 0, 0)
    """
    match = None if text is None else _SIGNED_NUMBER.fullmatch(text.strip())
    return otherwise if match is None else int(match[0])


def checked_devices(count: int, text: str) -> int:
    """Refuses numbers of devices that no program has.

    Args:
        count: how many.
        text: where that was read.

    Returns:
        The number.

    Raises:
        HloError: it is more than MOST_DEVICES.
    """
    if count > MOST_DEVICES:
        raise HloError(
            f"{text[:80]!r} was given. It has {count:.3g} devices, more than any machine. "
            "Pass HLO text as XLA prints it."
        )
    return count


# ------------------------------------------------------ Shapes as HLO prints them, and their bytes

_BITS = {"pred": 8, "token": 0, "opaque": 0, "bf16": 16, "c64": 64, "c128": 128}

_COMMENT = re.compile(r"/\*.*?\*/")
_ARRAY = re.compile(r"([a-z]\w*)\[([^\]]*)\](?:\{([^{}]*)\})?")
_NUMBER_DTYPE = re.compile(r"(?:[suf]([0-9]{1,4})|f([0-9])e[0-9]+m[0-9]+\w*)$")
_ELEMENT_BITS = re.compile(r"E\(([0-9]{1,6})\)")
_DIM = re.compile(r"\s*(?:<=)?([0-9]{1,18})\s*")
_SEPARATOR = re.compile(r"\s*,\s*|\s*(?=\))")
_MOST_BYTES = 1 << 60
"""More than all memory there is: no array of a program."""
_MOST_NESTED = 50
"""Tuples in tuples; XLA nests a few deep."""


@dataclass(frozen=True, slots=True)
class ArrayShape:
    """The dtype and dims of one array on one device.

    Attributes:
        dtype: XLA's name, "bf16", "s32", "pred", "token", ...
        dims: the extent of each dim; of a dynamic dim its bound.
        bytes: what the elements take, without the padding of tiles.

    Example:
        >>> shape = parse_shape("bf16[4,256]{1,0}")
        >>> str(shape), shape.bytes
        ('bf16[4,256]', 2048)
    """

    dtype: str
    dims: tuple[int, ...]
    bytes: int

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


Shape: TypeAlias = "ArrayShape | tuple[Shape, ...]"


def parse_shape(text: str) -> Shape:
    """Reads a shape.

    Args:
        text: as HLO prints it, with or without layouts.

    Returns:
        An ArrayShape, or a tuple of shapes.

    Raises:
        HloError: text that is no shape, or a dtype whose size is unknown.

    Example:
        >>> [str(part) for part in parse_shape("(f32[8]{0}, /*index=1*/pred[])")]
        ['f32[8]', 'pred[]']
    """
    return _whole_shape(text, _array)


def element_bytes(dtype: str) -> int:
    """The bytes of one element, unpacked.

    Args:
        dtype: XLA's name.

    Returns:
        The bytes.

    Raises:
        HloError: a dtype whose size is unknown.

    Example:
        >>> element_bytes("bf16"), element_bytes("pred")
        (2, 1)
    """
    return _storage_bits(dtype) // 8


def arrays(shape: Shape) -> tuple[ArrayShape, ...]:
    """Lists the arrays of a shape, tuples within tuples opened.

    Args:
        shape: an array or a tuple.

    Returns:
        Its arrays, tokens left out.

    Example:
        >>> [str(array) for array in arrays(parse_shape("((f32[8], s32[]), token[])"))]
        ['f32[8]', 's32[]']
    """
    if isinstance(shape, ArrayShape):
        return () if shape.dtype == "token" else (shape,)
    return tuple(array for part in shape for array in arrays(part))


def _whole_shape(text: str, array: Callable[[re.Match[str], str], Any]) -> Any:
    """An array, as `array` makes it of a match of _ARRAY and the text, or a tuple of them."""
    clean = _COMMENT.sub("", text).strip()
    shape, end = _parse(clean, 0, array)
    if clean[end:].strip():
        raise _not_a_shape(text)
    return shape


def _parse(
    text: str, start: int, array: Callable[[re.Match[str], str], Any], depth: int = 0
) -> tuple[Any, int]:
    if not text.startswith("(", start) or depth >= _MOST_NESTED:
        match = _ARRAY.match(text, start)
        if match is None:
            raise _not_a_shape(text)
        return array(match, text), match.end()
    parts: list[Any] = []
    position = start + 1
    while not text.startswith(")", position):
        part, position = _parse(text, position, array, depth + 1)
        parts.append(part)
        separator = _SEPARATOR.match(text, position)
        if separator is None:
            raise _not_a_shape(text)
        position = separator.end()
    return tuple(parts), position + 1


def _array(match: re.Match[str], text: str) -> ArrayShape:
    dtype, dims_text, layout = match.groups()
    try:
        dims = tuple(_dim(dim) for dim in dims_text.split(",") if dim)
    except ValueError:
        raise _not_a_shape(text) from None
    packed = _ELEMENT_BITS.search(layout or "")
    bits = int(packed[1]) if packed else _storage_bits(dtype)
    size = -(-math.prod(dims) * bits // 8)
    if size > _MOST_BYTES:
        raise _not_a_shape(text)
    return ArrayShape(dtype, dims, size)


def _dim(text: str) -> int:
    match = _DIM.fullmatch(text)
    if match is None:
        raise ValueError(text)
    return int(match[1])


def _storage_bits(dtype: str) -> int:
    if dtype in _BITS:
        return _BITS[dtype]
    match = _NUMBER_DTYPE.match(dtype)
    if match is None:
        raise HloError(
            f"A shape of dtype {dtype!r} was given. The size of its elements is not known. "
            "Pass HLO text with XLA's dtypes, such as bf16, f32, s64, pred or f8e4m3fn."
        )
    return max(8, int(match[1] or match[2]))


def _not_a_shape(text: str) -> HloError:
    return HloError(
        f"The shape {text[:80]!r} was given. It is no array dtype[dims] and no tuple of them. "
        "Pass HLO text as XLA prints it."
    )


# -------------------- The bytes that an array takes in memory, by the layout beside its shape
#
#     bf16[5,300]{1,0:T(8,128)(2,1)}     dim 1 is the minor one; 5 x 300 elements are cut into
#                                        tiles of 8 x 128, the last ones filled up: 8 x 384
#     f32[]{:T(128)}                     a number takes a tile too: 128 elements
#     s4[64,128]{1,0:T(64,128)(8,1)E(4)} elements of 4 bits
#     bf16[8,128]{1,0:T(8,128)S(1)}      in memory space 1
#
# Tiles apply one after the other, each to the minor dims of what the one before has made of the
# array: T(8,128)(2,1) cuts [5,300] into [1,3] tiles of [8,128], and each of those into [4,128]
# tiles of [2,1]. A dim that is no multiple of its tile is filled up. Without tiles, as on CPU and
# GPU, nothing is added.
#
# Memory spaces as libtpu numbers them: 0 is the device's main memory (HBM), 1 the TensorCore's own
# (VMEM), 2 and 4 those of semaphores and scalars, 5 the host's.

DEVICE_SPACE, HOST_SPACE = 0, 5

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
        bits = 8 * element_bytes(self.shape.dtype) if self.bits is None else self.bits
        return -(-count * bits // 8) + self.prefix_bytes

    @property
    def padding_bytes(self) -> int:
        """What the layout adds."""
        return self.padded_bytes - self.bytes


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
    return _whole_shape(text, _laid_array)


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
    inputs_text, arrow, result_text = text[: closing_bracket(text)].partition("->")
    if not arrow:
        raise HloError(
            f"The program's first line has the layout {inputs_text[:80]!r}. It names no result. "
            "Pass HLO text as XLA prints it, unabridged."
        )
    parameters = [
        parse_laid_shape(shape_text) for shape_text in split_commas(inputs_text.strip()[1:-1])
    ]
    if len(parameters) == 1 and isinstance(parameters[0], tuple):
        return EntryLayouts(laid_arrays(parameters[0]), parse_laid_shape(result_text), True)
    arrays = [parameter for parameter in parameters if isinstance(parameter, LaidArray)]
    if len(arrays) != len(parameters):
        raise HloError(
            f"The program's first line has {len(parameters)} parameters. One of them is a tuple, "
            "whose arrays have no number. Compile the step with arrays as parameters."
        )
    return EntryLayouts(tuple(arrays), parse_laid_shape(result_text), False)


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
    matches = _ALIAS.findall(text[: closing_bracket(text)])
    return {int(output or 0): int(place or parameter) for output, parameter, place in matches}


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


def _laid_array(match: re.Match[str], shape_text: str) -> LaidArray:
    shape, text = _array(match, shape_text), match[3] or ""
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
        tuple(_tile(tile) for tile in _TILE.findall(tiles[1])) if tiles else (),
        int(bits[1]) if bits else None,
        int(space[1]) if space else DEVICE_SPACE,
        max(1, int(tail[1])) if tail else 1,
        int(prefix[1]) if prefix else 0,
    )


def _tile(text: str) -> tuple[int, ...]:
    sizes = (size for size in text.split(",") if size)
    return tuple(int(size) if _DIM_NUMBER.fullmatch(size) else 0 for size in sizes)
