"""Saving weights: files that transformers loads, each by one process, seen when all are whole.

    slots of the module  ->  pieces (names)  ->  tensors of files of at most so many bytes
    process i writes file i, i + n, ...; what others hold of it is gathered, a piece at a time
    NAME.unfinished, synced  ->  all processes agree  ->  NAME

A safetensors file is a length, a header in JSON, and the tensors' bytes without holes. The package
safetensors writes one from tensors that are all on the host; here none of them is.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from xla_dtensor.core.argument_types import argument_types
from xla_dtensor.core.errors import ArgumentTypeError, WeightsError
from xla_dtensor.dtensor.api import parts_of
from xla_dtensor.dtensor.dcp import Index, extents_of
from xla_dtensor.hosts.blocks import moving, shifted, windows
from xla_dtensor.hosts.hugging_face.files import INDEX_NAME, SINGLE_NAME
from xla_dtensor.hosts.hugging_face.gather import GATHERED_BYTES, Team, part_of
from xla_dtensor.hosts.hugging_face.module import Slot, model_type_of, slots_of
from xla_dtensor.hosts.hugging_face.names import (
    NameRules,
    Names,
    Piece,
    stored_by_transformers,
)

__all__ = ["save_hf"]

_UNFINISHED = ".unfinished"
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
}


@argument_types
def save_hf(
    path: str | os.PathLike[str],
    module: nn.Module,
    *,
    max_shard_bytes: int | str = "5GB",
    names: Names = None,
    dtype: torch.dtype | None = None,
    config: Any = None,
    progress: bool = True,
) -> tuple[str, ...]:
    """Write a module's weights as safetensors files that transformers reads.

    One file, or several with an index. Each is written by one process from its beginning to its
    end; what other processes hold of it is gathered in pieces of at most 128 MiB. Files get their
    names when all are whole, so a save that fails leaves the folder as it was. A tied tensor is
    written once, under its first name, as transformers does.

    Args:
        path: The folder. It is made; weights of an earlier save in it are replaced. Several
            processes need the same folder, on a file system that all of them see.
        module: The module. Several processes that hold parts of it all have to call this alike.
        max_shard_bytes: Most bytes of a file, or a text such as "5GB".
        names: As for :func:`load_hf`, so that what loads a module also saves it. Without it a
            model of a known type is written as transformers does, experts one by one.
        dtype: What floating-point tensors become in the files.
        config: For ``config.json``: a mapping, a config of transformers, or ModelSizes. None: that
            of the module, if it has one.
        progress: Show a bar, in the first process.

    Returns:
        The names of the files of weights.

    Raises:
        WeightsError: A tensor without values, a name twice, processes that are called differently,
            or one that cannot write. All of them raise then.
        ArgumentTypeError: Not a module, or `names` or `config` of another kind.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_hf(folder, nn.Linear(4, 8), max_shard_bytes=128)
        ('model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors')
    """
    slots = slots_of(module)
    text = _config_text(module, config, dtype)
    rules = NameRules(names, model_type_of(module, config), stored_by_transformers(module))
    tensors = [tensor for slot in slots for tensor in _written_tensors(slot, rules, dtype)]
    files = _files_for(tensors, _bytes_of(max_shard_bytes))
    team = Team(slot.tensor for slot in slots)
    texts = {} if text is None else {"config.json": text}
    if len(files) > 1:
        texts[INDEX_NAME] = _index_text(files)
    _write(Path(path), files, team, texts, progress)
    return tuple(file.name for file in files)


def _written_tensors(slot: Slot, rules: NameRules, dtype: torch.dtype | None) -> Iterator[_Tensor]:
    name, tensor = slot.names[0], slot.tensor
    if parts_of(tensor):
        raise WeightsError(
            f"The tensor {name!r} was to be written. It is a {type(tensor).__name__}, for which "
            "Transformers' files have no common form. Write the model before quantize_(), or "
            "write this one with xla_dtensor.checkpoint.save()."
        )
    if not _has_values(tensor):
        raise WeightsError(
            f"The tensor {name!r} on the meta device was to be written. It has no values. Load or "
            "materialise the module first."
        )
    target = dtype if dtype is not None and tensor.dtype.is_floating_point else tensor.dtype
    for piece in rules.pieces(name, tuple(tensor.shape)):
        yield _Tensor(piece.key, piece.shape, target, _tensor_reader(tensor, piece, target))


def _has_values(tensor: torch.Tensor) -> bool:
    return not getattr(tensor, "_local_tensor", tensor).is_meta


def _tensor_reader(
    tensor: torch.Tensor, piece: Piece, dtype: torch.dtype
) -> Callable[[Index, bool], torch.Tensor | None]:
    def read(part: Index, is_receiver: bool) -> torch.Tensor | None:
        inner = (slice(0, 1), *part) if piece.stacked else part
        values = part_of(tensor, shifted(inner, piece.at), is_receiver)
        return None if values is None else values.to(dtype)

    return read


# ------------------------------------------------------------------------------ Which file has what


@dataclass(frozen=True)
class _Tensor:
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
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class _File:
    """A file, with its tensors in the order of their bytes."""

    name: str
    tensors: tuple[_Tensor, ...]

    def header(self) -> bytes:
        """Return length and header, padded so that the values begin at a multiple of 8."""
        # transformers refuses a file that does not say its format.
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        place = 0
        for tensor in self.tensors:
            end = place + tensor.num_bytes
            entries[tensor.key] = {
                "dtype": _DTYPE_NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [place, end],
            }
            place = end
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


def _bytes_of(size: int | str) -> int:
    """Read a number of bytes, or a text such as "5GB"."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*([KMGT]i?B)\s*", str(size), re.IGNORECASE)
    try:
        size_bytes = int(float(match[1]) * _UNITS[match[2].upper()]) if match else int(size)
    except ValueError:
        size_bytes = 0
    if size_bytes < 1:
        raise WeightsError(
            f"Weights were to be written with max_shard_bytes={size!r}. A file needs some bytes. "
            "Pass a number, or a text such as '5GB'."
        )
    return size_bytes


def _files_for(tensors: Iterable[_Tensor], max_shard_bytes: int) -> tuple[_File, ...]:
    """Distribute tensors over files, in order, as transformers does.

    A tensor of more than `max_shard_bytes` has a file of its own.
    """
    groups: list[list[_Tensor]] = [[]]
    filled_bytes, keys = 0, set[str]()
    for tensor in tensors:
        _check(tensor, keys)
        if groups[-1] and filled_bytes + tensor.num_bytes > max_shard_bytes:
            groups.append([])
            filled_bytes = 0
        groups[-1].append(tensor)
        filled_bytes += tensor.num_bytes
    # Wide dtypes first, so that every value is aligned, as the package safetensors writes them.
    ordered = [sorted(group, key=lambda tensor: -tensor.dtype.itemsize) for group in groups]
    if len(ordered) == 1:
        return (_File(SINGLE_NAME, tuple(ordered[0])),)
    return tuple(
        _File(f"model-{i:05d}-of-{len(ordered):05d}.safetensors", tuple(group))
        for i, group in enumerate(ordered, 1)
    )


def _check(tensor: _Tensor, keys: set[str]) -> None:
    if tensor.key in keys:
        raise WeightsError(
            f"Two tensors were to be written as {tensor.key!r}. A name is in the files once. "
            "Correct names=, so that each tensor has a name of its own."
        )
    keys.add(tensor.key)
    if tensor.dtype not in _DTYPE_NAMES:
        raise WeightsError(
            f"The tensor {tensor.key!r} was to be written with dtype={tensor.dtype}. The "
            "safetensors format has no such dtype. Pass dtype=, or convert it first."
        )


def _index_text(files: Sequence[_File]) -> str:
    """Return the index of several files, as transformers writes it."""
    tensors = [tensor for file in files for tensor in file.tensors]
    places = {tensor.key: file.name for file in files for tensor in file.tensors}
    total: dict[str, Any] = {
        "total_parameters": sum(prod(tensor.shape) for tensor in tensors),
        "total_size": sum(tensor.num_bytes for tensor in tensors),
    }
    index = {"metadata": total, "weight_map": dict(sorted(places.items()))}
    return json.dumps(index, indent=2) + "\n"


def _is_weights_name(name: str) -> bool:
    """Tell whether a file of this name is one that a save of weights makes."""
    numbered = re.fullmatch(r"model-\d{5}-of-\d{5}\.safetensors", name)
    return bool(numbered) or name in (SINGLE_NAME, INDEX_NAME)


# ------------------------------------------------------------------------------------------ Writing


def _write(
    folder: Path,
    files: Sequence[_File],
    team: Team,
    texts: Mapping[str, str],
    progress: bool,
) -> None:
    """Write files, and remove those of an earlier save that are not among them.

    File number i is written by process i modulo their number. If the processes were called
    differently, or one could not write, all of them raise, and what was in the folder is still
    there.
    """
    _check_agreed(folder, files, team)
    error = _write_files(folder, files, team, progress)
    failed = team.numbers(int(error is not None))
    if not any(failed) and team.index == 0:
        try:
            _show(folder, files, texts)
        except OSError as failure:
            error = failure
    elif any(failed):
        _discard(folder, _own(files, team))
    failed = [a or b for a, b in zip(failed, team.numbers(int(error is not None)), strict=True)]
    if any(failed):
        processes = ", ".join(str(team.members[i]) for i, flag in enumerate(failed) if flag)
        reason = f"{type(error).__name__}: {error}" if error else "See what that process says"
        raise WeightsError(
            f"Weights were to be written to {str(folder)!r}. Process {processes} could not: "
            f"{reason}. Make room or correct the path, which has to be the same folder for all "
            "processes, and save again."
        ) from error


def _check_agreed(folder: Path, files: Sequence[_File], team: Team) -> None:
    plan = [(f.name, [(t.key, t.shape, str(t.dtype)) for t in f.tensors]) for f in files]
    marks = team.numbers(zlib.crc32(repr((str(folder), plan)).encode()))
    if len(set(marks)) > 1:
        raise WeightsError(
            f"Weights were to be written to {str(folder)!r} as {len(files)} files. The processes "
            f"{team.members} were called with different modules or arguments. Call save_hf alike "
            "in all of them."
        )


def _own(files: Sequence[_File], team: Team) -> list[_File]:
    return list(files[team.index :: team.count])


def _write_files(
    folder: Path, files: Sequence[_File], team: Team, progress: bool
) -> Exception | None:
    """Write this process's files under names that no reader looks for; return what failed.

    After a failure this process still takes part, so that the others do not wait for it forever.
    """
    error: Exception | None = None
    values: torch.Tensor | None
    sinks: dict[str, _Sink] = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        error = failure
    total = sum(tensor.num_bytes for file in files for tensor in file.tensors)
    with moving("saving", total, None if progress and team.index == 0 else False) as advance:
        for file, tensor, part in _turns(files, team.count):
            is_own = error is None and file in _own(files, team)
            try:
                values = tensor.read(part, is_own)
                if is_own and values is not None:
                    if file.name not in sinks:
                        sinks[file.name] = _Sink(folder, file)
                    sinks[file.name].write(values)
            except Exception as failure:
                error = error or failure
            values = None
            advance(prod(extents_of(part)) * tensor.dtype.itemsize)
    try:
        for file in _own(files, team) if error is None else ():
            if file.name not in sinks:  # of tensors without elements only
                sinks[file.name] = _Sink(folder, file)
            sinks[file.name].finish()
    except OSError as failure:
        error = failure
    for sink in sinks.values():
        sink.close()
    return error


def _turns(files: Sequence[_File], count: int) -> Iterator[tuple[_File, _Tensor, Index]]:
    """Yield pieces so that the processes write in turns: one piece of each one's file."""

    def turns_of(index: int) -> Iterator[tuple[_File, _Tensor, Index]]:
        for file in files[index::count]:
            for tensor in file.tensors:
                for part in windows(tensor.shape, tensor.dtype.itemsize, GATHERED_BYTES):
                    yield file, tensor, part

    for row in itertools.zip_longest(*(turns_of(index) for index in range(count))):
        yield from (turn for turn in row if turn is not None)


class _Sink:
    """A file that is written from its beginning to its end."""

    def __init__(self, folder: Path, file: _File) -> None:
        self._fd = os.open(
            folder / (file.name + _UNFINISHED), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666
        )
        self._write(memoryview(file.header()))

    def write(self, values: torch.Tensor) -> None:
        """Write a tensor's values."""
        # reshape: a number has no bytes to view.
        flat: Any = values.contiguous().reshape(-1).view(torch.uint8).numpy()
        self._write(memoryview(flat))

    def _write(self, buffer: memoryview) -> None:
        while buffer:
            buffer = buffer[os.write(self._fd, buffer) :]

    def finish(self) -> None:
        """Let the disk have it, and close it."""
        os.fsync(self._fd)
        self.close()

    def close(self) -> None:
        """Close it, if it is open."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _show(folder: Path, files: Sequence[_File], texts: Mapping[str, str]) -> None:
    """Give all files their names; an index comes last, and what it does not name goes."""
    for file in files:
        os.replace(folder / (file.name + _UNFINISHED), folder / file.name)
    names = {*(file.name for file in files), *texts}
    for name, text in texts.items():
        unfinished = folder / (name + _UNFINISHED)
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, folder / name)
    for stale in list(folder.iterdir()):
        # Unfinished ones are of a save that was killed.
        if _is_weights_name(stale.name.removesuffix(_UNFINISHED)) and stale.name not in names:
            stale.unlink()


def _discard(folder: Path, files: Sequence[_File]) -> None:
    for file in files:
        (folder / (file.name + _UNFINISHED)).unlink(missing_ok=True)


# -------------------------------------------------------------------------------------- config.json


def _config_text(module: nn.Module, config: Any, dtype: torch.dtype | None) -> str | None:
    """Return the text of a config.json, None where nothing is known of the model."""
    if config is None:
        config = getattr(module, "config", None)
        if not hasattr(config, "to_dict"):
            sizes = (getattr(part, "sizes", None) for part in module.modules())
            config = next((size for size in sizes if hasattr(size, "hugging_face_config")), None)
            if config is None:
                return None
    if isinstance(config, Mapping):
        values = dict(config)
    elif hasattr(config, "hugging_face_config"):  # ModelSizes
        values = config.hugging_face_config()
    elif hasattr(config, "to_dict"):
        values = dict(config.to_dict())
        values["architectures"] = values.get("architectures") or [type(module).__name__]
    else:
        raise ArgumentTypeError(
            f"config={config!r} was passed, of type={type(config).__name__}. A config.json is made "
            "of names and values. Pass a mapping, a config of transformers, or ModelSizes."
        )
    if dtype is not None:
        values["dtype"] = str(dtype).removeprefix("torch.")
        values.pop("torch_dtype", None)
    return json.dumps(values, indent=2, sort_keys=True, default=str) + "\n"
