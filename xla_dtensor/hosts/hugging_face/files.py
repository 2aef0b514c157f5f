"""WeightFiles: tensors in safetensors files, of which any part can be read."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from mesh_utils.job import nearest
from xla_dtensor.core.errors import WeightsError
from xla_dtensor.dtensor.dcp import Index, extents_of
from xla_dtensor.hosts.blocks import shifted, windows

__all__ = ["INDEX_NAME", "SINGLE_NAME", "FileTensor", "WeightFiles"]

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_MAPPED_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor of a file.

    Args:
        file: The file.
        dtype: Of the values.
        shape: Of the tensor.
        place: Its place among the tensors of the file.
    """

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    place: int

    @property
    def num_bytes(self) -> int:
        """How many bytes its values take."""
        return prod(self.shape) * self.dtype.itemsize


class WeightFiles:
    """The tensors of one file, or of several that an index names.

    The package safetensors maps a file into memory, and what was touched of it counts as memory of
    the process until it is closed. So a file is opened anew after each 8 MiB.

    Args:
        path: A folder, a .safetensors file, or an index of such files.

    Raises:
        WeightsError: No such files, they do not fit together, or safetensors is not installed.

    Example:
        >>> import tempfile
        >>> from safetensors.torch import save_file
        >>> folder = tempfile.TemporaryDirectory()
        >>> save_file({"w": torch.tensor([[1, 2], [3, 4]])}, f"{folder.name}/model.safetensors")
        >>> with WeightFiles(folder.name) as files:
        ...     files.read("w", (slice(1, 2), slice(0, 2)), torch.empty(1, 2, dtype=torch.int64))
        ...     files.bytes_read
        tensor([[3, 4]])
        16
        >>> folder.cleanup()
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.tensors: dict[str, FileTensor] = _tensors_at(self.path)
        self.bytes_read = 0
        self._open: Any = None
        self._file: Path | None = None
        self._mapped = 0

    def __enter__(self) -> WeightFiles:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open = None

    def read(self, key: str, index: Index, out: torch.Tensor) -> torch.Tensor:
        """Read a part of a tensor.

        Args:
            key: Its name.
            index: One slice per dim.
            out: A CPU tensor of that part's extents, to whose dtype values are converted.

        Returns:
            `out`.
        """
        if not out.numel():
            return out
        tensor = self.tensors[key]
        self.bytes_read += out.numel() * tensor.dtype.itemsize
        if not index:
            self._map(tensor.file, tensor.num_bytes)
            return out.copy_(self._open.get_tensor(key))
        # Narrow columns are on every page of the rows that have them.
        row_bytes = prod(tensor.shape[1:]) * tensor.dtype.itemsize
        for rows in windows(extents_of(index[:1]), row_bytes, _MAPPED_BYTES):
            self._map(tensor.file, prod(extents_of(rows)) * row_bytes)
            part = (*shifted(rows, index[:1]), *index[1:])
            # A view of what is mapped: only what is copied is read.
            out[rows].copy_(self._open.get_slice(key)[part])
        return out

    def _map(self, file: Path, num_bytes: int) -> None:
        """Have a file open, of which so many bytes are about to be touched."""
        self._mapped += num_bytes
        if self._file != file or self._mapped > _MAPPED_BYTES:
            self._open, self._file, self._mapped = _open_file(file), file, num_bytes


def _open_file(file: Path) -> Any:
    try:
        safetensors: Any = importlib.import_module("safetensors")
    except ImportError as error:
        raise WeightsError(
            f"The weights in {str(file)!r} were to be read. The package safetensors, which reads "
            "them, is not installed. Install it: pip install safetensors."
        ) from error
    try:
        return safetensors.safe_open(file, "pt")
    except (OSError, safetensors.SafetensorError) as error:
        raise WeightsError(
            f"The weights in {str(file)!r} were to be read. safetensors refuses the file: {error}. "
            "Get it again: it is damaged, cut short, or no safetensors file."
        ) from None


def _tensors_of(file: Path) -> dict[str, FileTensor]:
    """The tensors of a file, in the order of their bytes."""
    reader = _open_file(file)
    from safetensors import SafetensorError

    tensors: dict[str, FileTensor] = {}
    for place, key in enumerate(reader.offset_keys()):
        part = reader.get_slice(key)
        shape = tuple(part.get_shape())
        try:
            dtype = (
                part[(slice(0, 0),) * len(shape)].dtype if shape else reader.get_tensor(key).dtype
            )
        except (RuntimeError, SafetensorError) as error:
            raise WeightsError(
                f"The file {str(file)!r} has {key!r} with dtype={part.get_dtype()!r}. It cannot be "
                f"read as a tensor of torch: {error}. Convert the file to a dtype that torch has."
            ) from None
        tensors[key] = FileTensor(file, dtype, shape, place)
    return tensors


# -------------------------------------------------------------------------------------- Which files


def _tensors_at(path: Path) -> dict[str, FileTensor]:
    if path.is_dir():
        indices = [path / INDEX_NAME, *sorted(path.glob("*.safetensors.index.json"))]
        index = next((file for file in indices if file.is_file()), None)
        single = path / SINGLE_NAME
        files = [single] if single.is_file() else sorted(path.glob("*.safetensors"))
        # As in transformers: a single file comes before an index.
        if index is not None and not single.is_file():
            return _of_index(index)
        if files:
            return _of_files(files)
    elif path.name.endswith(".json") and path.is_file():
        return _of_index(path)
    elif path.is_file():
        return _tensors_of(path)
    what = "The folder has no safetensors file" if path.is_dir() else "There is no such file"
    raise WeightsError(
        f"Weights were to be read from path={str(path)!r}. {what}. Pass a folder with "
        f"{SINGLE_NAME} or {INDEX_NAME}; a model of the Hub has to be downloaded first, e.g. by "
        "huggingface_hub.snapshot_download."
    )


def _of_files(files: Sequence[Path]) -> dict[str, FileTensor]:
    tensors: dict[str, FileTensor] = {}
    for file in files:
        for key, tensor in _tensors_of(file).items():
            if key in tensors:
                raise WeightsError(
                    f"The weights of {str(file.parent)!r} were to be read without an index. Both "
                    f"{tensors[key].file.name} and {file.name} have {key!r}. Pass one of the "
                    "files, or remove what is not of this model."
                )
            tensors[key] = tensor
    return tensors


def _of_index(index: Path) -> dict[str, FileTensor]:
    try:
        places: dict[str, str] = dict(json.loads(index.read_text("utf-8"))["weight_map"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightsError(
            f"The index {str(index)!r} was to be read. It has no readable weight_map: {error!r}. "
            "Get the file again, or pass the path of a .safetensors file."
        ) from None
    files: dict[str, dict[str, FileTensor]] = {}
    for name in dict.fromkeys(places.values()):
        if not (index.parent / name).is_file():
            raise WeightsError(
                f"The index {str(index)!r} names the file {name!r}. It is not there. Get the "
                "missing file; all of them have to be in one folder."
            )
        files[name] = _tensors_of(index.parent / name)
    for key, name in places.items():
        if key not in files[name]:
            raise WeightsError(
                f"The index {str(index)!r} says that {name!r} has {key!r}. That file does not: it "
                f"has {nearest(key, files[name], most=3)}. Get index and files of one model."
            )
    return {key: files[name][key] for key, name in places.items()}
