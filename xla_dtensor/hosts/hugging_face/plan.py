"""Which tensor is written to which file, at which byte, and by which process."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from xla_dtensor.core.errors import WeightsError
from xla_dtensor.dtensor.dcp import Index
from xla_dtensor.hosts.hugging_face.files import INDEX_NAME, SINGLE_NAME
from xla_dtensor.hosts.hugging_face.format import DTYPE_NAMES, header_bytes

__all__ = ["FilePlan", "WrittenTensor", "bytes_of", "files_for", "index_text", "is_weights_name"]

_METADATA = {"format": "pt"}  # transformers refuses a file that does not say so
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


@dataclass(frozen=True)
class WrittenTensor:
    """A tensor of a file.

    Args:
        key: Its name there.
        shape: Its shape.
        dtype: Its dtype.
        read: Called with a part of it; returns the values as a CPU tensor, or None in a process
            that only takes part.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[Index, bool], torch.Tensor | None]

    @property
    def num_bytes(self) -> int:
        """How many bytes it takes."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class FilePlan:
    """A file.

    Args:
        name: Its name.
        tensors: In the order of their bytes.
    """

    name: str
    tensors: tuple[WrittenTensor, ...]

    @property
    def header(self) -> bytes:
        """What it begins with."""
        return header_bytes([(t.key, t.dtype, t.shape) for t in self.tensors], _METADATA)


def bytes_of(size: int | str) -> int:
    """Read a number of bytes, or a text such as "5GB".

    Raises:
        WeightsError: It is not positive, or no such text.

    Example:
        >>> bytes_of("1.5GB")
        1500000000
    """
    match = re.fullmatch(r"\s*([0-9.]+)\s*([KMGT]i?B)\s*", str(size), re.IGNORECASE)
    try:
        found = int(float(match[1]) * _UNITS[match[2].upper()]) if match else int(size)
    except ValueError:
        found = 0
    if found < 1:
        raise WeightsError(
            f"Weights were to be written with max_shard_bytes={size!r}. A file needs some bytes. "
            "Pass a number, or a text such as '5GB'."
        )
    return found


def files_for(tensors: Iterable[WrittenTensor], max_shard_bytes: int) -> tuple[FilePlan, ...]:
    """Distribute tensors over files, in order, as transformers does.

    Args:
        tensors: The tensors.
        max_shard_bytes: Most bytes of the tensors of a file. A larger tensor has a file of its own.

    Returns:
        The files: one of the name for that, or numbered ones.

    Raises:
        WeightsError: A name twice, or a dtype that the format does not have.
    """
    groups: list[list[WrittenTensor]] = [[]]
    taken, seen = 0, set[str]()
    for tensor in tensors:
        _check(tensor, seen)
        if groups[-1] and taken + tensor.num_bytes > max_shard_bytes:
            groups.append([])
            taken = 0
        groups[-1].append(tensor)
        taken += tensor.num_bytes
    # Wide dtypes first, so that every value is aligned, as the package safetensors writes them.
    ordered = [sorted(group, key=lambda tensor: -tensor.dtype.itemsize) for group in groups]
    if len(ordered) == 1:
        return (FilePlan(SINGLE_NAME, tuple(ordered[0])),)
    return tuple(
        FilePlan(f"model-{i:05d}-of-{len(ordered):05d}.safetensors", tuple(group))
        for i, group in enumerate(ordered, 1)
    )


def _check(tensor: WrittenTensor, seen: set[str]) -> None:
    if tensor.key in seen:
        raise WeightsError(
            f"Two tensors were to be written as {tensor.key!r}. A name is in the files once. "
            "Correct names=, so that each tensor has a name of its own."
        )
    seen.add(tensor.key)
    if tensor.dtype not in DTYPE_NAMES:
        raise WeightsError(
            f"The tensor {tensor.key!r} was to be written with dtype={tensor.dtype}. The "
            "safetensors format has no such dtype. Pass dtype=, or convert it first."
        )


def index_text(files: Sequence[FilePlan]) -> str:
    """Return the index of several files, as transformers writes it."""
    tensors = [tensor for file in files for tensor in file.tensors]
    places = {tensor.key: file.name for file in files for tensor in file.tensors}
    total: dict[str, Any] = {
        "total_parameters": sum(prod(tensor.shape) for tensor in tensors),
        "total_size": sum(tensor.num_bytes for tensor in tensors),
    }
    index = {"metadata": total, "weight_map": dict(sorted(places.items()))}
    return json.dumps(index, indent=2) + "\n"


def is_weights_name(name: str) -> bool:
    """Tell whether a file of this name is one that a save of weights makes."""
    numbered = re.fullmatch(r"model-\d{5}-of-\d{5}\.safetensors", name)
    return bool(numbered) or name in (SINGLE_NAME, INDEX_NAME)
