r"""The words of HLO text: lines, numbers, shapes and their bytes.

    bf16[4,256]{1,0:T(8,128)(2,1)}                 an array with its layout
    f32[<=5,3]                                     a dim of dynamic size, at most 5
    (f32[8], (s32[], token[]), /*index=2*/u32[])   a tuple

A shape is an ArrayShape or a tuple of shapes. Of the layout only the packing of elements matters
here: XLA gives an s4 element one byte, unless the layout says E(4).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from xla_dtensor.report.errors import HloError

__all__ = ["checked_devices", "read_number", "whole_lines"]


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
    found = None if text is None else _SIGNED_NUMBER.fullmatch(text.strip())
    return otherwise if found is None else int(found[0])


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
    clean = _COMMENT.sub("", text).strip()
    shape, end = _parse(clean, 0)
    if clean[end:].strip():
        raise _not_a_shape(text)
    return shape


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
    return tuple(_arrays(shape))


def _arrays(shape: Shape) -> Iterator[ArrayShape]:
    if isinstance(shape, tuple):
        for part in shape:
            yield from _arrays(part)
    elif shape.dtype != "token":
        yield shape


def _parse(text: str, start: int, depth: int = 0) -> tuple[Shape, int]:
    if text.startswith("(", start) and depth < _MOST_NESTED:
        return _parse_tuple(text, start, depth + 1)
    match = _ARRAY.match(text, start)
    if match is None:
        raise _not_a_shape(text)
    return _array(match, text), match.end()


def _parse_tuple(text: str, start: int, depth: int) -> tuple[Shape, int]:
    parts: list[Shape] = []
    position = start + 1
    while not text.startswith(")", position):
        part, position = _parse(text, position, depth)
        parts.append(part)
        separator = re.compile(r"\s*,\s*|\s*(?=\))").match(text, position)
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
