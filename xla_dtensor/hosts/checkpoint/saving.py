"""Saving: what a state is made of when it is asked for, and how the processes write it.

`Save` is made in the thread of the training loop and takes everything from the state; `run` then
needs neither the state nor the devices, and may run in a thread of its own. The processes agree
twice: on what to write where (one process's plain values may differ from another's), and, when all
files are written and synced, on the checkpoint being whole.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import pickle
import uuid
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from xla_dtensor.core import Layout
from xla_dtensor.core.errors import CheckpointError
from xla_dtensor.dtensor.dtensor import DTensor
from xla_dtensor.hosts.blocks import moving
from xla_dtensor.hosts.checkpoint.exchange import Exchange
from xla_dtensor.hosts.checkpoint.folders import begin, commit, discard, prune
from xla_dtensor.hosts.checkpoint.manifest import (
    Chunk,
    Entry,
    Manifest,
    check_covered,
    metadata_bytes,
    own_name,
)
from xla_dtensor.hosts.checkpoint.pieces import Piece, pickled, pieces_of, write_file
from xla_dtensor.hosts.checkpoint.state import Leaf, Walk, is_stored_as_tensor
from xla_dtensor.hosts.checkpoint.storage import Storage

__all__ = ["Save"]


class Save:
    """One save.

    Args:
        storage: Where checkpoints lie.
        state: The nested state.
        step: Its step.
        keep: How many checkpoints may stay. None: all.
        exchange: How the processes agree.
        copied: Whether to copy everything to the host now, so that the state may change.
        show: Whether to show progress.
    """

    def __init__(
        self,
        storage: Storage,
        state: Mapping[str, Any],
        *,
        step: int,
        keep: int | None,
        exchange: Exchange,
        copied: bool,
        show: bool,
    ) -> None:
        self._storage, self._step, self._keep = storage, step, keep
        self._exchange, self._show = exchange, show
        leaves = Walk(state).leaves
        self._entries = {name: _entry(leaf) for name, leaf in leaves.items()}
        self._same = {name: leaf.same_as for name, leaf in leaves.items() if leaf.same_as}
        stored = [leaf for leaf in leaves.values() if not leaf.same_as]
        self._values = {x.name: _pickled(x) for x in stored if not is_stored_as_tensor(x.value)}
        tensors = {x.name: x.value for x in stored if is_stored_as_tensor(x.value)}
        self._plain = {n: t for n, t in tensors.items() if not isinstance(t, DTensor)}
        self._pieces: Iterable[Piece] = (
            piece for name, t in tensors.items() for piece in pieces_of(name, t, exchange.index)
        )
        # A plain tensor as another process than the first saves it, if its own is another.
        own = self._plain if exchange.index else {}
        self._own_pieces = {name: list(pieces_of(name, t, 0)) for name, t in own.items()}
        self._digests = self._digests_of_plain()
        if copied:
            self._pieces = _draining(deque(_copied(piece) for piece in self._pieces))
            self._own_pieces = {n: [_copied(p) for p in ps] for n, ps in self._own_pieces.items()}

    def run(self) -> str:
        """Write the checkpoint and return its folder.

        Raises:
            CheckpointError: A process could not write it. There is no trace of it then.
        """
        save_id = uuid.uuid4().hex[:8]
        plan = self._exchange.agree(
            "begin", lambda: self._digests, lambda digests: self._begin(save_id, digests)
        )
        place, save_id, differing = plan["place"], plan["save_id"], plan["differing"]
        try:
            folder = self._exchange.agree(
                "write",
                lambda: self._write_own(place, save_id, set(differing)),
                lambda reports: self._commit(place, save_id, set(differing), reports),
            )
        except BaseException:
            if self._exchange.index == 0:
                discard(self._storage, place, save_id)
            raise
        if self._exchange.index == 0:
            prune(self._storage, self._step, self._keep, save_id)
        return self._storage.text(folder)

    # ------------------------------------------------------------------- The first agreement

    def _digests_of_plain(self) -> dict[str, Any]:
        """What has to be the same in all processes, and what may differ."""
        if self._exchange.count == 1:
            return {}
        digests: dict[str, Any] = {n: zlib.crc32(record) for n, record in self._values.items()}
        for name, tensor in self._plain.items():
            digests[name] = zlib.crc32(pickled(tensor.detach().cpu().contiguous()))
        for name, entry in self._entries.items():
            if name not in digests:
                digests[name] = [entry.shape, entry.dtype, entry.layout]
        return digests

    def _begin(self, save_id: str, digests: list[dict[str, Any]]) -> dict[str, Any]:
        first = digests[0]
        differing: set[str] = set()
        for process, digest in enumerate(digests[1:], 1):
            for name in first.keys() | digest.keys():
                expected, actual = first.get(name), digest.get(name)
                if isinstance(expected, int) and isinstance(actual, int):
                    differing |= {name} if expected != actual else set()
                elif _plain_json(expected) != _plain_json(actual):
                    raise _unequal(name, process, expected, actual)
        place = begin(self._storage, self._step, save_id)
        return {"place": place, "save_id": save_id, "differing": sorted(differing)}

    # ------------------------------------------------------------------------- The second

    def _write_own(self, place: str, save_id: str, differing: set[str]) -> dict[str, Any]:
        index = self._exchange.index
        pieces: Iterable[Piece] = self._pieces
        values: Mapping[str, bytes] = self._values
        if index:
            own = [p for name in sorted(differing) for p in self._own_pieces.get(name, ())]
            pieces = itertools.chain(pieces, own)
            values = {n: record for n, record in values.items() if n in differing}
        file = f"{save_id}_{index:05d}.distcp"
        total = sum(e.num_bytes for e in self._entries.values()) // self._exchange.count
        with moving("saving", total, self._show and not index) as advance:
            size, chunks = write_file(self._storage, f"{place}/{file}", pieces, values, advance)
        rows = [(own_name(n, index if n in differing else 0), c.to_row()) for n, c in chunks]
        return {"file": file, "size": size, "rows": rows}

    def _commit(
        self, place: str, save_id: str, differing: set[str], reports: list[dict[str, Any]]
    ) -> str:
        chunks: dict[str, list[Chunk]] = {}
        for report in reports:
            for name, row in report["rows"]:
                chunks.setdefault(name, []).append(Chunk.from_row(row))
        count = self._exchange.count
        entries: dict[str, Entry] = {}
        for name, entry in self._entries.items():
            for process in range(count if name in differing else 1):
                own = own_name(name, process)
                parts = tuple(chunks.get(own_name(self._same.get(name, name), process), ()))
                _check_written(own, entry, parts)
                marks: dict[str, Any] = {}
                if name in differing:
                    marks = {"of_process": process, "copies": count if process == 0 else None}
                if entry.shape is None:
                    marks["num_bytes"] = parts[0].length
                entries[own] = dataclasses.replace(entry, chunks=parts, **marks)
        files = {report["file"]: report["size"] for report in reports if report["size"]}
        manifest = Manifest(self._step, save_id, count, files, entries)
        return commit(self._storage, place, manifest, metadata_bytes(manifest))


def _entry(leaf: Leaf) -> Entry:
    """The entry of a leaf, without its chunks."""
    tensor = leaf.value
    if not is_stored_as_tensor(tensor):
        return Entry(leaf.path, 0)
    layout = mesh = None
    if isinstance(tensor, DTensor):
        spec = tensor._spec
        mesh = spec.mesh.value.axes_text()
        layout = Layout.from_placements(spec.placements, tensor.ndim, spec.mesh.value).text()
    dtype = str(tensor.dtype).removeprefix("torch.")
    num_bytes = tensor.numel() * tensor.element_size()
    return Entry(leaf.path, num_bytes, tuple(tensor.shape), dtype, layout, mesh)


def _check_written(name: str, entry: Entry, chunks: tuple[Chunk, ...]) -> None:
    if entry.shape is not None:
        check_covered(name, entry.shape, chunks)
    elif len(chunks) != 1:
        raise CheckpointError(
            f"The value {name!r} was to be saved. It was written {len(chunks)} times, not once. "
            "Save the same state in every process."
        )


def _pickled(leaf: Leaf) -> bytes:
    """A plain value as bytes that can be loaded without running code of theirs."""
    try:
        record = pickled(leaf.value)
        torch.load(io.BytesIO(record), weights_only=True)
    except (pickle.PicklingError, pickle.UnpicklingError, TypeError, AttributeError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(
            f"The value {leaf.name!r} of type={type(leaf.value).__name__} was to be saved. It "
            f"cannot be loaded without running code that is in it: {reason}. Pass it as "
            "tensors, numbers, strings, lists and dicts, or name its classes to "
            "torch.serialization.add_safe_globals."
        ) from error
    return record


def _copied(piece: Piece) -> Piece:
    values = piece.read().clone()
    return dataclasses.replace(piece, read=lambda: values)


def _draining(pieces: deque[Piece]) -> Iterator[Piece]:
    while pieces:
        yield pieces.popleft()


def _plain_json(value: Any) -> Any:
    """As it comes back from another process."""
    return json.loads(json.dumps(value))


def _unequal(name: str, process: int, expected: Any, actual: Any) -> CheckpointError:
    def words(digest: Any) -> str:
        if isinstance(digest, int):
            return "has one of its own"
        return "has none" if digest is None else f"has {', '.join(map(str, _plain_json(digest)))}"

    return CheckpointError(
        f"A state with {name!r} was to be saved. Process 0 {words(expected)}, process {process} "
        f"{words(actual)}. Save the same state in every process."
    )
