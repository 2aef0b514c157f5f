"""The safetensors format: a length, a header in JSON, and the tensors' bytes without holes.

    8 bytes    length of the header, little-endian
    header     {"__metadata__": {...}, NAME: {"dtype": "BF16", "shape": [...], "data_offsets":
               [first, last + 1]}, ...}, offsets counted from the end of the header
    bytes      row-major values, little-endian

It is read and written here rather than by the package safetensors, which maps a file into memory:
the pages that were touched count as the process's memory, and a file that is cut short while it is
read ends the process by a signal. What is needed here is the header and ranges of bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from xla_dtensor.core.errors import WeightsError

__all__ = ["DTYPE_NAMES", "FileTensor", "header_bytes", "read_header"]

_DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in _DTYPES.items()}
_LONGEST_HEADER = 100_000_000  # as in the package safetensors


@dataclass(frozen=True, slots=True)
class FileTensor:
    """Where a tensor is in a file.

    Args:
        file: The file.
        dtype: Of the values.
        shape: Of the tensor.
        start: Its first byte, counted from the beginning of the file.
    """

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def num_bytes(self) -> int:
        """How many bytes its values take."""
        return prod(self.shape) * self.dtype.itemsize


def read_header(file: Path) -> dict[str, FileTensor]:
    """Read which tensors a safetensors file has.

    Args:
        file: The file.

    Returns:
        Name -> place, in the order of the header.

    Raises:
        WeightsError: The file cannot be read, is cut short, or its header is damaged: nothing of
            it may be trusted then.
    """
    try:
        with file.open("rb") as stream:
            size = file.stat().st_size
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, _LONGEST_HEADER):
                raise _damaged(file, f"It has {size} bytes, and names a header of {length}")
            header: Any = json.loads(stream.read(length))
    except (OSError, ValueError) as error:
        if isinstance(error, WeightsError):
            raise
        raise _damaged(file, f"Its header cannot be read: {error}") from None
    if not isinstance(header, dict):
        raise _damaged(file, f"Its header is a {type(header).__name__}, not an object")
    header.pop("__metadata__", None)
    found: dict[str, FileTensor] = {}
    spans: list[tuple[int, int]] = []
    for name, entry in header.items():
        found[name], last = _tensor(file, name, entry, 8 + length)
        spans.append((found[name].start, last))
    _check_spans(file, spans, 8 + length, size)
    return found


def _tensor(file: Path, name: str, entry: Any, base: int) -> tuple[FileTensor, int]:
    try:
        dtype, shape = str(entry["dtype"]), tuple(map(int, entry["shape"]))
        first, last = map(int, entry["data_offsets"])
    except (TypeError, KeyError, ValueError):
        raise _damaged(file, f"Its header says of {name!r}: {entry!r}") from None
    if dtype not in _DTYPES:
        raise WeightsError(
            f"The file {str(file)!r} has {name!r} with dtype={dtype!r}. torch has no such dtype. "
            "Convert the file to one of "
            f"{', '.join(_DTYPES)}."
        )
    tensor = FileTensor(file, _DTYPES[dtype], shape, base + first)
    if min(shape, default=0) < 0 or first < 0 or last - first != tensor.num_bytes:
        raise _damaged(
            file, f"Its header gives {last - first} bytes to {name!r} of shape={shape}, {dtype}"
        )
    return tensor, base + last


def _check_spans(file: Path, spans: list[tuple[int, int]], base: int, size: int) -> None:
    place = base
    for first, last in sorted(spans):
        if first != place:
            raise _damaged(file, f"Its tensors leave a hole or overlap at byte {place}")
        place = last
    if place != size:
        raise _damaged(file, f"It has {size} bytes, and its header describes {place}")


def _damaged(file: Path, why: str) -> WeightsError:
    return WeightsError(
        f"The weights in {str(file)!r} were to be read. {why}. Get the file again: it is damaged, "
        "cut short, or no safetensors file."
    )


def header_bytes(
    tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]],
    metadata: Mapping[str, str] | None = None,
) -> bytes:
    """Make what a safetensors file begins with; the tensors' bytes follow in the same order.

    Args:
        tensors: Name, dtype and shape of each. Wide dtypes come first, or values are not aligned.
        metadata: Texts to be kept with them; transformers looks for ``{"format": "pt"}``.

    Returns:
        Length and header, padded so that the values begin at a multiple of 8.

    Example:
        >>> header_bytes([("w", torch.int8, (2,))])[8:].decode().strip()
        '{"w":{"dtype":"I8","shape":[2],"data_offsets":[0,2]}}'
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    place = 0
    for name, dtype, shape in tensors:
        end = place + prod(shape) * dtype.itemsize
        entry = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [place, end]}
        header[name], place = entry, end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
