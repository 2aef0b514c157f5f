"""WeightFiles: tensors in safetensors files, of which any part can be read.

Bytes come by ``pread`` straight into the tensor that asked for them. A file that is mapped into
memory would count as memory of the process as far as it was read.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from mesh_utils.job import nearest
from xla_dtensor.core.errors import WeightsError
from xla_dtensor.dtensor.dcp import Index, extents_of
from xla_dtensor.hosts.hugging_face.format import FileTensor, read_header
from xla_dtensor.hosts.hugging_face.windows import relative, shifted, windows

__all__ = ["INDEX_NAME", "SINGLE_NAME", "WeightFiles"]

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_SCRATCH = 16 << 20  # bytes that are on the host besides, where values are converted
_PAGE = 4096  # a disk reads whole pages: to skip less than that saves nothing


class WeightFiles:
    """The tensors of one file, or of several that an index names.

    Args:
        path: A folder, a .safetensors file, or an index of such files.

    Raises:
        WeightsError: No such files, or they do not fit together.

    Example:
        >>> import tempfile
        >>> from xla_dtensor.hosts.hugging_face.format import header_bytes
        >>> folder = tempfile.TemporaryDirectory()
        >>> path = Path(folder.name, "model.safetensors")
        >>> _ = path.write_bytes(header_bytes([("w", torch.int8, (2, 2))]) + bytes([1, 2, 3, 4]))
        >>> with WeightFiles(folder.name) as files:
        ...     files.read("w", (slice(1, 2), slice(0, 2)), torch.empty(1, 2, dtype=torch.int8))
        ...     files.bytes_read
        tensor([[3, 4]], dtype=torch.int8)
        2
        >>> folder.cleanup()
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.tensors: dict[str, FileTensor] = _tensors_of_file(self.path)
        self.bytes_read = 0
        self._open: dict[Path, int] = {}

    def __enter__(self) -> WeightFiles:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all files."""
        while self._open:
            os.close(self._open.popitem()[1])

    def read(self, key: str, index: Index, out: torch.Tensor) -> torch.Tensor:
        """Read a part of a tensor.

        Args:
            key: Its name.
            index: One slice per dim.
            out: A CPU tensor of that part's extents. Where its dtype is another one, values are
                converted piece by piece.

        Returns:
            `out`.

        Raises:
            WeightsError: The file is shorter than its header says.
        """
        place, extents = self.tensors[key], extents_of(index)
        if out.dtype == place.dtype and out.is_contiguous():
            self._fill(place, index, out)
            return out
        for window in windows(extents, place.dtype.itemsize, _SCRATCH):
            scratch = torch.empty(extents_of(window), dtype=place.dtype)
            self._fill(place, shifted(window, index), scratch)
            out[window].copy_(scratch)
        return out

    def _fill(self, place: FileTensor, index: Index, out: torch.Tensor) -> None:
        """Read a part into a contiguous tensor of the same dtype."""
        if not out.numel():
            return
        wide = _without_small_gaps(index, place.shape, place.dtype.itemsize)
        if wide != index:
            inner = relative(index, wide)
            for window in windows(extents_of(wide)[:1], _row_bytes(wide, place), _SCRATCH):
                rows = slice(wide[0].start + window[0].start, wide[0].start + window[0].stop)
                part = (rows, *wide[1:])
                scratch = torch.empty(extents_of(part), dtype=place.dtype)
                self._fill(place, part, scratch)
                out[window[0]] = scratch[(slice(None), *inner[1:])]
            return
        # reshape: a number has no bytes to view.
        flat: Any = out.detach().reshape(-1).view(torch.uint8).numpy()
        data = memoryview(flat)
        fd, position = self._descriptor(place.file), 0
        for start, length in _runs(index, place):
            _read_exactly(fd, data[position : position + length], start, place.file)
            position += length
        self.bytes_read += position

    def _descriptor(self, file: Path) -> int:
        if file not in self._open:
            if len(self._open) >= 64:  # a job has other files open as well
                os.close(self._open.pop(next(iter(self._open))))
            self._open[file] = os.open(file, os.O_RDONLY)
        return self._open[file]


def _row_bytes(index: Index, place: FileTensor) -> int:
    return prod(extents_of(index)[1:]) * place.dtype.itemsize


def _without_small_gaps(index: Index, shape: Sequence[int], itemsize: int) -> Index:
    """Widen a part to whole rows where it skips less than a page between two of them.

    The first dim stays: what is read before and after the part is never more than was asked for.
    """
    row = itemsize
    wide = list(index)
    for dim in range(len(shape) - 1, 0, -1):
        skipped = (shape[dim] - (index[dim].stop - index[dim].start)) * row
        if skipped >= _PAGE:
            break
        wide[dim] = slice(0, shape[dim])
        row *= shape[dim]
    return tuple(wide)


def _runs(index: Index, place: FileTensor) -> Iterator[tuple[int, int]]:
    """Yield (first byte, bytes) of the parts of the file that make up a part of a tensor."""
    shape, extents = place.shape, extents_of(index)
    cut = len(shape)
    while cut and extents[cut - 1] == shape[cut - 1]:
        cut -= 1
    cut = max(cut - 1, 0)  # dims after this one are whole
    strides = [prod(shape[dim + 1 :]) * place.dtype.itemsize for dim in range(len(shape))]
    length = prod(extents[cut:]) * place.dtype.itemsize
    first = place.start + (index[cut].start * strides[cut] if shape else 0)
    outer = [
        range(part.start * stride, part.stop * stride, stride)
        for part, stride in zip(index[:cut], strides[:cut], strict=True)
    ]
    for offsets in itertools.product(*outer):
        yield first + sum(offsets), length


def _read_exactly(fd: int, data: memoryview, start: int, file: Path) -> None:
    done = 0
    while done < len(data):
        count = os.preadv(fd, [data[done:]], start + done)
        if count == 0:
            raise WeightsError(
                f"{len(data)} bytes of {str(file)!r} were to be read from byte {start}. The file "
                f"ends at byte {start + done}: it was cut short while it was read. Get the file "
                "again."
            )
        done += count


# ---------------------------------------------------------------------- which files


def _tensors_of_file(path: Path) -> dict[str, FileTensor]:
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
        return read_header(path)
    what = "The folder has no safetensors file" if path.is_dir() else "There is no such file"
    raise WeightsError(
        f"Weights were to be read from path={str(path)!r}. {what}. Pass a folder with "
        f"{SINGLE_NAME} or {INDEX_NAME}; a model of the Hub has to be downloaded first, e.g. by "
        "huggingface_hub.snapshot_download."
    )


def _of_files(files: Sequence[Path]) -> dict[str, FileTensor]:
    found: dict[str, FileTensor] = {}
    for file in files:
        for key, tensor in read_header(file).items():
            if key in found:
                raise WeightsError(
                    f"The weights of {str(file.parent)!r} were to be read without an index. Both "
                    f"{found[key].file.name} and {file.name} have {key!r}. Pass one of the files, "
                    "or remove what is not of this model."
                )
            found[key] = tensor
    return found


def _of_index(index: Path) -> dict[str, FileTensor]:
    try:
        read: Any = json.loads(index.read_text(encoding="utf-8"))
        places: dict[str, str] = dict(read["weight_map"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightsError(
            f"The index {str(index)!r} was to be read. It has no readable weight_map: {error!r}. "
            "Get the file again, or pass the path of a .safetensors file."
        ) from None
    headers: dict[str, dict[str, FileTensor]] = {}
    for name in dict.fromkeys(places.values()):
        if not (index.parent / name).is_file():
            raise WeightsError(
                f"The index {str(index)!r} names the file {name!r}. It is not there. Get the "
                "missing file; all of them have to be in one folder."
            )
        headers[name] = read_header(index.parent / name)
    for key, name in places.items():
        if key not in headers[name]:
            raise WeightsError(
                f"The index {str(index)!r} says that {name!r} has {key!r}. That file does not: it "
                f"has {nearest(key, headers[name], most=3)}. Get index and files of one model."
            )
    return {key: headers[name][key] for key, name in places.items()}
