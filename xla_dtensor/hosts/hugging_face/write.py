"""Writing files of weights: each by one process, piece by piece, seen when all are whole."""

from __future__ import annotations

import itertools
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from xla_dtensor.core.errors import WeightsError
from xla_dtensor.dtensor.dcp import Index
from xla_dtensor.hosts.hugging_face.files import INDEX_NAME
from xla_dtensor.hosts.hugging_face.gather import Team
from xla_dtensor.hosts.hugging_face.memory import FreedMemory
from xla_dtensor.hosts.hugging_face.plan import FilePlan, WrittenTensor, index_text, is_weights_name
from xla_dtensor.hosts.hugging_face.progress import progress_bar
from xla_dtensor.hosts.hugging_face.windows import windows

__all__ = ["write_files"]

_UNFINISHED = ".unfinished"


def write_files(
    folder: Path,
    files: Sequence[FilePlan],
    team: Team,
    texts: Mapping[str, str],
    progress: bool,
) -> None:
    """Write files of weights, and remove those of an earlier save that are not among them.

    Args:
        folder: Where to; made if it is not there. All processes see the same one.
        files: What to write. File number i is written by process i modulo their number.
        team: The processes, all of which call this alike.
        texts: Name -> text of what else is written, by the first process.
        progress: Whether to show a bar.

    Raises:
        WeightsError: The processes were called differently, or one could not write. What was in
            the folder is still there then.
    """
    _check_agreed(folder, files, team)
    error = _write_files(folder, files, team, progress)
    failed = team.numbers(int(error is not None))
    if not any(failed) and team.index == 0:
        try:
            _show(folder, files, texts)
        except OSError as found:
            error = found
    elif any(failed):
        _discard(folder, _own(files, team))
    failed = [a or b for a, b in zip(failed, team.numbers(int(error is not None)), strict=True)]
    if any(failed):
        who = ", ".join(str(team.members[i]) for i, value in enumerate(failed) if value)
        why = f"{type(error).__name__}: {error}" if error else "See what that process says"
        raise WeightsError(
            f"Weights were to be written to {str(folder)!r}. Process {who} could not: {why}. Make "
            "room or correct the path, which has to be the same folder for all processes, and "
            "save again."
        ) from error


def _check_agreed(folder: Path, files: Sequence[FilePlan], team: Team) -> None:
    plan = [(f.name, [(t.key, t.shape, str(t.dtype)) for t in f.tensors]) for f in files]
    marks = team.numbers(zlib.crc32(repr((str(folder), plan)).encode()))
    if len(set(marks)) > 1:
        raise WeightsError(
            f"Weights were to be written to {str(folder)!r} as {len(files)} files. The processes "
            f"{team.members} were called with different modules or arguments. Call save_hf alike "
            "in all of them."
        )


def _own(files: Sequence[FilePlan], team: Team) -> list[FilePlan]:
    return list(files[team.index :: team.count])


def _write_files(
    folder: Path, files: Sequence[FilePlan], team: Team, progress: bool
) -> Exception | None:
    """Write this process's files under names that no reader looks for; return what failed.

    After a failure this process still takes part, so that the others do not wait for it forever.
    """
    error: Exception | None = None
    sinks: dict[str, _Sink] = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as found:
        error = found
    total = sum(tensor.num_bytes for file in files for tensor in file.tensors)
    freed = FreedMemory()
    with progress_bar("save", total, progress and team.index == 0) as advance:
        for file, tensor, part in _turns(files, team.count):
            mine = error is None and file in _own(files, team)
            try:
                values = tensor.read(part, mine)
                if mine and values is not None:
                    if file.name not in sinks:
                        sinks[file.name] = _Sink(folder, file)
                    sinks[file.name].write(values)
            except Exception as found:
                error = error or found
            values = None
            advance(_num_bytes(tensor, part))
            freed.after(_num_bytes(tensor, part))
    try:
        for file in _own(files, team) if error is None else ():
            if file.name not in sinks:  # of tensors without elements only
                sinks[file.name] = _Sink(folder, file)
            sinks[file.name].finish()
    except OSError as found:
        error = found
    for sink in sinks.values():
        sink.close()
    return error


def _turns(
    files: Sequence[FilePlan], count: int
) -> Iterator[tuple[FilePlan, WrittenTensor, Index]]:
    """Yield pieces so that the processes write in turns: one piece of each one's file."""

    def of(index: int) -> Iterator[tuple[FilePlan, WrittenTensor, Index]]:
        for file in files[index::count]:
            for tensor in file.tensors:
                for part in windows(tensor.shape, tensor.dtype.itemsize):
                    yield file, tensor, part

    for row in itertools.zip_longest(*(of(index) for index in range(count))):
        yield from (turn for turn in row if turn is not None)


def _num_bytes(tensor: WrittenTensor, part: Index) -> int:
    count = 1
    for cut in part:
        count *= cut.stop - cut.start
    return count * tensor.dtype.itemsize


class _Sink:
    """A file that is written from its beginning to its end."""

    def __init__(self, folder: Path, file: FilePlan) -> None:
        self._fd = os.open(
            folder / (file.name + _UNFINISHED), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666
        )
        self._write(memoryview(file.header))

    def write(self, values: torch.Tensor) -> None:
        """Write a tensor's values."""
        # reshape: a number has no bytes to view.
        flat: Any = values.contiguous().reshape(-1).view(torch.uint8).numpy()
        self._write(memoryview(flat))

    def _write(self, data: memoryview) -> None:
        while data:
            data = data[os.write(self._fd, data) :]

    def finish(self) -> None:
        """Let the disk have it, and close it."""
        os.fsync(self._fd)
        self.close()

    def close(self) -> None:
        """Close it, if it is open."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _show(folder: Path, files: Sequence[FilePlan], texts: Mapping[str, str]) -> None:
    """Give all files their names; an index comes last, and what it does not name goes."""
    for file in files:
        os.replace(folder / (file.name + _UNFINISHED), folder / file.name)
    names = {file.name for file in files}
    if len(files) > 1:
        texts = {**texts, INDEX_NAME: index_text(files)}
        names.add(INDEX_NAME)
    for name, text in texts.items():
        unfinished = folder / (name + _UNFINISHED)
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, folder / name)
    for stale in list(folder.iterdir()):
        # Unfinished ones are of a save that was killed.
        if is_weights_name(stale.name.removesuffix(_UNFINISHED)) and stale.name not in names:
            stale.unlink()


def _discard(folder: Path, files: Sequence[FilePlan]) -> None:
    for file in files:
        (folder / (file.name + _UNFINISHED)).unlink(missing_ok=True)
