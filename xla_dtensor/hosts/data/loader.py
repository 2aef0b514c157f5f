"""ShardedLoader: any loader of host batches, as one of global DTensors on the devices.

part of the rows     DataLoader(data, batch_sampler=ShardedSampler(data, 64, mesh, rows))
     |  read ahead by a thread; short batches dropped, padded or refused, alike everywhere
global batch         ShardedLoader(loader, mesh, rows)
     |  counted when it is taken
state                loader.state_dict(): equal in all processes, for any number of them

For each batch, in the thread that reads:

1. read the next host batch, and note where the loader is after it;
2. tell the other processes: whether there is one, whether it is short, its shapes, and where asked
   checksums; so all of them end, drop or pad at the same batch, and no program can hang;
3. pad it, cut this process's shards, and put them on its devices.
"""

from __future__ import annotations

import itertools
import json
import logging
import pickle
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch

from xla_dtensor.core.argument_types import argument_types
from xla_dtensor.core.errors import DataError
from xla_dtensor.dtensor.mesh import as_device_mesh, current_mesh
from xla_dtensor.hosts.data.batch import (
    Leaf,
    Whole,
    compare_feeds,
    digest,
    padded,
    resolve_leaf,
    rows_of,
    sharded_leaf,
    with_mask,
)
from xla_dtensor.hosts.data.part import (
    Path,
    PerLeaf,
    map_batch,
    placements_per_leaf,
    read_sharding_specs,
    rows_layout,
    rows_part,
    rows_placements,
    shape_per_leaf,
    tensors_of,
    tiles_of,
    with_tensors,
)
from xla_dtensor.hosts.data.prefetch import Ahead
from xla_dtensor.hosts.data.sampler import (
    LastBatch,
    ShardedSampler,
    begin,
    check_last,
    has_state,
    state_after,
)
from xla_dtensor.hosts.exchange import Exchange, exchange_name, feeding_processes

__all__ = ["MpDeviceLoader", "ShardedLoader"]

logger = logging.getLogger("xla_dtensor")

Check = Literal["off", "first", "always"]
_DROP: LastBatch = "drop"
_WHO = "ShardedLoader"
_STATE_VERSION = 1
# Numbers of loaders and of states per mesh: the names of their exchanges are used once.
_serials: dict[Any, itertools.count[int]] = {}
_state_turns: dict[Any, itertools.count[int]] = {}


@dataclass(frozen=True)
class Position:
    """Where a loader is."""

    epoch: int = 0
    batches: int = 0  # global batches given in this epoch
    read: int = 0  # batches read from the loader for them; more where short ones were dropped
    batch_size: int | None = None  # rows of a global batch; None before the first
    inner: dict[str, Any] | None = None  # what the loader itself said of where it is
    since: int = 0  # batches read since it said so


@argument_types
class ShardedLoader:
    """Gives global DTensors, of which each process reads and holds its own part only.

    Iterating again begins the epoch after the one that was read to its end. All processes of the
    mesh iterate alike. A loop left by ``break`` stops the thread; so does :meth:`close`.

    Args:
        loader: Any iterable of host batches: a DataLoader, with a :class:`ShardedSampler` or not,
            torchdata's StatefulDataLoader, a grain loader, a generator function's object.
        mesh: The mesh; that of the open ``with mesh:`` block when None.
        placements: For all tensors or in the batch's structure, as for :func:`shard_batch`.
        input_sharding: In place of mesh and placements, a ``ShardingSpec`` as torch_xla's loaders
            take, or some in the batch's structure; ``minibatch`` says what each process passes.
        whole: What each process's loader gives whole, as for :func:`shard_batch`.
        global_shape: As for :func:`shard_batch`; the rows are known.
        batch_size: Rows of a global batch. None: the sampler's, or what follows from the loader's
            ``batch_size`` or its first batch.
        last: What becomes of a batch with too few rows in any process: "drop", "pad" or "error".
            None: the sampler's, else "drop". Where processes have different numbers of batches,
            "drop" ends with the first, "pad" feeds padding until all have ended.
        pad_value: What padding is filled with: a number, or numbers in the batch's structure.
        mask: Adds a bool tensor to each batch, True for rows that are no padding: under this name
            in a dict, behind the last entry of another batch.
        prefetch: Global batches that wait on the devices; 0 reads in the caller's thread.
        check: "first" compares shapes of each batch between processes, and checksums of the first;
            "always" checksums of each; "off" neither.
        snapshot_every: Batches between two questions to a stateful loader for its state.
        timeout_seconds: How long to wait for other processes.

    Raises:
        DistributeError: Wrong mesh or placements.
        DataError: Arguments that do not fit each other.

    Example:
        >>> import torch, xla_dtensor as xd
        >>> from torch.distributed.tensor import Shard
        >>> mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("dp",))
        >>> loader = ShardedLoader([torch.arange(16), torch.ones(16)], mesh, [Shard(0)])
        >>> [tuple(batch.shape) for batch in loader]
        [(16,), (16,)]
        >>> loader.state_dict()["epoch"]
        1
    """

    def __init__(
        self,
        loader: Iterable[Any],
        mesh: Any = None,
        placements: Any = None,
        *,
        input_sharding: Any = None,
        whole: Whole = False,
        global_shape: Any = None,
        batch_size: int | None = None,
        last: LastBatch | None = None,
        pad_value: Any = 0,
        mask: str | None = None,
        prefetch: int = 2,
        check: Check = "first",
        snapshot_every: int = 1,
        timeout_seconds: float = 600,
    ) -> None:
        if input_sharding is not None:
            if mesh is not None or placements is not None or whole is not False:
                raise DataError(
                    "ShardedLoader was called with input_sharding and with mesh, placements or "
                    "whole. A ShardingSpec says all of that. Pass one or the other."
                )
            device_mesh, whole = read_sharding_specs(input_sharding)
            placements = input_sharding
        else:
            device_mesh = current_mesh("ShardedLoader") if mesh is None else as_device_mesh(mesh)
        batch_sampler = getattr(loader, "batch_sampler", None)
        sampler = batch_sampler if isinstance(batch_sampler, ShardedSampler) else None
        policy = last or (sampler.last if sampler is not None else _DROP)
        check_last("ShardedLoader", policy)
        if check not in ("off", "first", "always") or prefetch < 0 or snapshot_every < 1:
            raise DataError(
                f"ShardedLoader was called with check={check!r}, prefetch={prefetch}, "
                f"snapshot_every={snapshot_every}. One of them is out of range. Pass check 'off', "
                "'first' or 'always', prefetch of 0 or more, snapshot_every of 1 or more."
            )
        self.loader, self.prefetch = loader, prefetch
        self._mesh, self._whole, self._last, self._mask = device_mesh, whole, policy, mask
        self._placements = placements_per_leaf(placements)
        self._shape = shape_per_leaf(global_shape)
        self._pad_value = PerLeaf(
            "pad_value", pad_value, lambda v: isinstance(v, (bool, int, float, complex))
        )
        self._check, self._snapshot_every = check, snapshot_every
        self._timeout_seconds, self._sampler = timeout_seconds, sampler
        self._rows = rows_placements(self._placements.tree, device_mesh)
        self._batch_size = batch_size
        self._serial = next(_serials.setdefault(device_mesh.value, itertools.count()))
        if sampler is not None:
            self._batch_size = sampler.batch_size
            self._check_sampler(sampler)
        self._position = Position(batch_size=self._batch_size)
        self._resumes = False
        self._turns = itertools.count()
        self._active: weakref.ref[_Epoch] | None = None

    @property
    def epoch(self) -> int:
        """The epoch in progress, or the next one."""
        return self._position.epoch

    def set_epoch(self, epoch: int) -> None:
        """Begin with this epoch at the next iteration."""
        self.close()
        self._position = Position(epoch=epoch, batch_size=self._batch_size)
        self._resumes = False

    def __len__(self) -> int:
        """Return the loader's own length, the batches of an epoch."""
        return len(self.loader)  # pyright: ignore[reportArgumentType]

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch, or go on where the loaded state was."""
        self.close()
        if not self._resumes:
            start = Position(self._position.epoch, batch_size=self._batch_size)
            self._position = start
        self._resumes = False
        epoch = _Epoch(self, self._position)
        self._active = weakref.ref(epoch)
        return epoch

    def close(self) -> None:
        """Stop reading ahead, and wait for the thread's end."""
        active = self._active() if self._active is not None else None
        if active is not None:
            active.close()
        self._active = None

    def __enter__(self) -> ShardedLoader:
        """Return the loader; it is closed at the end of the block."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close it."""
        self.close()

    def state_dict(self) -> dict[str, Any]:
        """Return where the loader is: after the batch that was taken last, whatever waits.

        With a :class:`ShardedSampler`, or a loader that gives each process the whole batch, the
        state is the same in all processes, and goes on with any number of them. A stateful loader
        of each process's own rows has a state per process: all processes then call this alike, get
        the states of all, and each takes up that of its rows.
        """
        return self._state_at(self._position)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the batch after which `state` was taken, at the next iteration.

        Raises:
            DataError: The state is of another order of batches, or has none for this process's
                rows.
        """
        self.close()
        self._position = self._position_of(state)
        self._resumes = True

    # ------------------------------------------------------------------ One pass over the loader

    @property
    def _rows_are_whole(self) -> bool:
        """Whether each process passes all rows."""
        return self._whole if isinstance(self._whole, bool) else 0 in self._whole

    def _target_rows(self, batch_size: int) -> int:
        """Return how many rows this process passes of a full batch."""
        if self._rows_are_whole:
            return batch_size
        return rows_part(batch_size, self._mesh, self._rows).shape[0]

    def _size_from(self, rows: int) -> int:
        """Return the rows of a global batch of which this process passes `rows`."""
        if self._rows_are_whole:
            return rows
        tiles, own = tiles_of(rows_layout(self._mesh, self._rows), 0)
        if tiles == own or rows % own == 0:
            return rows if tiles == own else rows // own * tiles
        raise DataError(
            f"A loader gave this process {rows} rows. They are to fill {own} of the {tiles} tiles "
            f"into which the placements cut the batch on {self._mesh}, and do not divide by that. "
            "Pass batch_size, the rows of a global batch."
        )

    def _first_size(self, rows: int) -> int:
        if self._batch_size is not None:
            return self._batch_size
        size = getattr(self.loader, "batch_size", None)
        return self._size_from(size if isinstance(size, int) else rows)

    def _check_sampler(self, sampler: ShardedSampler) -> None:
        """Refuse a sampler that reads other rows than the loader passes on."""
        count = self._target_rows(sampler.batch_size)
        rows = rows_part(sampler.batch_size, self._mesh, self._rows)
        if count != sampler.part.shape[0] or rows.runs != sampler.part.runs:
            raise DataError(
                f"ShardedLoader was called with a ShardedSampler that reads the rows "
                f"{sampler.part.text()} of {sampler.batch_size}, and is to pass on {rows.text()} "
                f"as {count} rows. Other rows would be trained on than were meant. Give both the "
                "same mesh and placements, and leave out whole."
            )

    def _batches(
        self, start: Position, turn: int, stopped: Callable[[], bool]
    ) -> Iterator[tuple[Any, Position]]:
        """Yield global batches, each with the position after it."""
        name = f"loader/{exchange_name(self._mesh.value)}/{self._serial}/{turn}"
        exchange = Exchange(name, self._mesh.value, self._timeout_seconds)
        host_batches = self._host_batches(start)
        position, count = start, 0
        pattern: Any = None
        try:
            while True:
                batches, rows, place = next(host_batches, ([None], 0, {}))
                host = batches.pop()
                position = replace(position, **place)
                count += host is not None
                if host is not None and position.batch_size is None:
                    position = replace(position, batch_size=self._first_size(rows))
                size = position.batch_size
                target = 0 if size is None else self._target_rows(size)
                leaves = self._leaves(host, size)
                is_short = host is not None and rows < target
                ended, all_ended, short = self._agree(
                    exchange, host, leaves, is_short, position.read, count == 1, stopped
                )
                if host is not None and self._last == "pad":
                    pattern = host
                if all_ended or (ended and self._last == "drop"):
                    if count and position.batches == start.batches == 0:
                        self._refuse_all_dropped(count, size)
                    return
                if (short or ended) and self._last == "error":
                    self._refuse_short(rows, target, position.read)
                if short and self._last == "drop":
                    continue
                if host is None:
                    host = self._padding_like(pattern, position.read)
                    rows, leaves = 0, self._leaves(host, size)
                    position = replace(position, read=position.read + 1)
                batch = self._sharded(host, leaves, rows, target, size or 0)
                host = None
                position = replace(position, batches=position.batches + 1)
                yield batch, position
                del batch  # it is the taker's now
        except Exception as error:
            exchange.fail(_to_json({"failed": f"{type(error).__name__}: {error}"}))
            raise
        finally:
            host_batches.close()

    def _host_batches(self, start: Position) -> Generator[tuple[list[Any], int, dict[str, Any]]]:
        """Yield each batch in a list, how many of its rows are real, and the place after it."""
        for source in _with_epochs(self.loader):
            source.set_epoch(start.epoch)
        sampler, read, inner, since = self._sampler, start.read, start.inner, start.since
        if sampler is None:
            iterator = begin(self.loader, inner, since)
        else:
            place = {"epoch": start.epoch, "batch": read}
            sampler.load_state_dict(sampler.state_dict() | place)
            iterator = iter(self.loader)
        try:
            for host in map(with_tensors, iterator):
                rows = rows_of(host)
                if sampler is not None:
                    rows = min(rows, sampler.own_rows(read))
                read, since = read + 1, since + 1
                if sampler is None and since >= self._snapshot_every:
                    inner = state_after(self.loader, iterator)
                    since = since if inner is None else 0
                batches = [host]
                del host  # who takes it out of the list is the only one to hold it
                yield batches, rows, {"read": read, "inner": inner, "since": since}
        finally:
            close = getattr(iterator, "close", None)  # of a generator, whose file is to be closed
            if callable(close):
                close()

    def _leaves(self, host: Any, size: int | None) -> dict[Path, Leaf]:
        leaves: dict[Path, Leaf] = {}
        rows = None if host is None else rows_of(host)
        for path, tensor in tensors_of(host).items():
            global_shape = self._shape.at(path)
            shape: list[Any] = [None] * tensor.ndim if global_shape is None else list(global_shape)
            if shape and shape[0] is None and tensor.shape[0] == rows:
                shape[0] = size
            spec = self._placements.at(path)
            leaves[path] = resolve_leaf(_WHO, path, tensor, self._mesh, spec, shape, self._whole)
        return leaves

    def _agree(
        self,
        exchange: Exchange,
        host: Any,
        leaves: dict[Path, Leaf],
        is_short: bool,
        read: int,
        is_first: bool,
        stopped: Callable[[], bool],
    ) -> tuple[bool, bool, bool]:
        """Tell whether a process has no batch, whether none has one, whether a batch is short."""
        has_equal_rows = self._sampler is not None or self._rows_are_whole
        if exchange.is_alone or (self._check == "off" and has_equal_rows):
            return host is None, host is None, is_short
        own: dict[str, Any] = {"ended": host is None, "short": is_short}
        if host is not None:
            with_sums = self._check == "always" or (self._check == "first" and is_first)
            own["digest"] = digest(tensors_of(host), leaves, with_sums=with_sums and not is_short)
        what = f"batch {read + (host is None)} of its loader"
        answers = exchange.all(_to_json(own), what, stopped)
        reports = {process: json.loads(text) for process, text in answers.items()}
        for process, report in reports.items():
            if "failed" in report:
                raise DataError(
                    f"The loader of process {process} failed at {what}: {report['failed']}. No "
                    "global batch can be made without its part. Its own error has the traceback; "
                    "mend what it says."
                )
        if self._check != "off":
            digests = {p: report["digest"] for p, report in reports.items() if "digest" in report}
            compare_feeds(digests, f"{_WHO}, batch {read}")
        ended = [report["ended"] for report in reports.values()]
        return any(ended), all(ended), any(report["short"] for report in reports.values())

    def _sharded(
        self, host: Any, leaves: dict[Path, Leaf], rows: int, target: int, size: int
    ) -> Any:
        if rows < target or rows_of(host) != rows:  # a pattern is no row, even where none is due
            host = padded(host, rows, target, self._pad_value)
        batch = map_batch(
            lambda path, tensor: sharded_leaf(_WHO, path, tensor, leaves[path], self._mesh), host
        )
        if self._mask is None:
            return batch
        layout = rows_layout(self._mesh, self._rows)
        leaf = Leaf(layout, self._rows, (size,), (0,) if self._rows_are_whole else ())
        real = torch.arange(target) < rows
        mask = sharded_leaf(_WHO, (self._mask,), real, leaf, self._mesh)
        return with_mask(batch, mask, self._mask)

    def _padding_like(self, pattern: Any, read: int) -> Any:
        if pattern is None:
            raise DataError(
                f"This process has no batch {read} where another has one, and last='pad' was asked "
                "for. Padding is made like the batch before, and there was none. Give each process "
                "one batch at least, or pass last='drop'."
            )
        return pattern

    def _refuse_short(self, rows: int, target: int, read: int) -> None:
        raise DataError(
            f"ShardedLoader was called with last='error', and batch {read} has too few rows in a "
            f"process; this one has {rows} of its {target}. A short batch would be another "
            "program. Pass last='drop' or last='pad', or give the processes equally many rows."
        )

    def _refuse_all_dropped(self, count: int, size: int | None) -> None:
        raise DataError(
            f"A loader gave {count} batches, and each had too few rows for batch_size={size} on "
            f"{self._mesh}. All were dropped. Pass the batch_size that it gives, whole=True where "
            "it gives whole batches, or last='pad'."
        )

    # -------------------------------------------------------------------------------- The state
    #
    # version, epoch, batches, read, batch_size     numbers
    # sampler   of a ShardedSampler, which is all that is needed; else None
    # parts     ["0:32", "32:64"], the rows of the processes that fed; ["whole"] where each fed all
    # inner     {"0:32": {"state": ..., "since": 0}, ...}, what the loader of each part said

    def _parts(self, batch_size: int) -> tuple[str, list[str]]:
        """Return the rows that this process feeds, and those of all processes, as texts."""
        if self._rows_are_whole:
            return "whole", ["whole"]
        processes = (None, *feeding_processes(self._mesh.value))
        own, *parts = (rows_part(batch_size, self._mesh, self._rows, p) for p in processes)
        runs = sorted({part.runs[0]: part.text() for part in parts}.items())
        return own.text(), [text for _, text in runs]

    def _state_at(self, position: Position) -> dict[str, Any]:
        """Return the state at a position; all processes call it where each has its own rows."""
        size = position.batch_size
        state: dict[str, Any] = {
            "version": _STATE_VERSION,
            "epoch": position.epoch,
            "batches": position.batches,
            "read": position.read,
            "batch_size": size,
            "sampler": None,
            "parts": None,
            "inner": None,
        }
        if self._sampler is not None:
            place = {"epoch": position.epoch, "batch": position.read}
            return state | {"sampler": self._sampler.state_dict() | place}
        if size is None or position.read == 0:
            return state
        own, state["parts"] = self._parts(size)
        state["inner"] = {own: {"state": position.inner, "since": position.since}}
        if len(state["parts"]) == 1 or position.inner is None:
            return state
        turn = next(_state_turns.setdefault(self._mesh.value, itertools.count()))
        name = f"state/{exchange_name(self._mesh.value)}/{turn}"
        exchange = Exchange(name, self._mesh.value, self._timeout_seconds)
        message = pickle.dumps((position.read, state["inner"]))
        answers = exchange.all(message, "the state of its loader")
        states = {process: pickle.loads(answer) for process, answer in answers.items()}
        batches_read = {process: batches for process, (batches, _) in states.items()}
        if len(set(batches_read.values())) > 1:
            raise DataError(
                "The state of a ShardedLoader was asked for after different batches, by process "
                f"{batches_read}. A job that resumes there would mix rows of several batches. Call "
                "state_dict after the same batch in all processes."
            )
        return state | {"inner": {k: v for _, inner in states.values() for k, v in inner.items()}}

    def _position_of(self, state: Mapping[str, Any]) -> Position:
        """Return the position that a state stands for."""
        if state.get("version") != _STATE_VERSION:
            raise DataError(
                f"A ShardedLoader was given a state of version={state.get('version')!r}. It reads "
                f"version={_STATE_VERSION}. Pass what ShardedLoader.state_dict returned."
            )
        size, expected = state["batch_size"], self._batch_size
        if expected is not None and size is not None and expected != size:
            raise DataError(
                f"A ShardedLoader with batch_size={expected} was given the state of one with "
                f"batch_size={size}. Its batches are others, so that rows would be repeated or "
                "left out. Make the loader as it was, or begin a new epoch with set_epoch."
            )
        position = Position(int(state["epoch"]), int(state["batches"]), int(state["read"]), size)
        if (state["sampler"] is None) != (self._sampler is None) and position.read:
            raise DataError(
                f"A ShardedLoader {'with' if self._sampler is not None else 'without'} a "
                "ShardedSampler was given the state of one of the other kind. Their batches come "
                "in different orders. Make the loader as it was."
            )
        if self._sampler is not None and state["sampler"] is not None:
            self._sampler.load_state_dict(state["sampler"])
        if self._sampler is not None or position.read == 0:
            return position
        own, parts = self._parts(state["batch_size"])
        if parts != state["parts"]:
            raise DataError(
                f"A ShardedLoader whose processes read the rows {parts} was given the state of one "
                f"with {state['parts']}. Each has a loader of its own rows, whose state says "
                "nothing of others. Use a ShardedSampler, or whole=True, to resume on other "
                "processes."
            )
        inner = state["inner"].get(own, {"state": None})
        if inner["state"] is not None:
            return replace(position, inner=inner["state"], since=int(inner["since"]))
        if not has_state(self.loader):
            logger.warning(
                "A %s has no state of its own: its first %d batches are read again and left out. "
                "That is the right place only if it gives the same batches in the same order.",
                type(self.loader).__name__,
                position.read,
            )
        return replace(position, since=position.read)


def _to_json(report: dict[str, Any]) -> bytes:
    return json.dumps(report, sort_keys=True).encode()


def _with_epochs(loader: Any) -> Iterator[Any]:
    """What shuffles by epoch: the loader, its samplers, its data set."""
    names = ("batch_sampler", "sampler", "dataset")
    for source in (loader, *(getattr(loader, name, None) for name in names)):
        if hasattr(source, "set_epoch"):
            yield source


# ------------------------------------------------------------------------------------ Reading ahead


class _Epoch(Iterator[Any]):
    """One pass. The loader knows it weakly, so that a loop left by `break` ends it."""

    def __init__(self, loader: ShardedLoader, start: Position) -> None:
        self._loader = loader
        run = partial(loader._batches, start, next(loader._turns))
        self._ahead = Ahead(run, loader.prefetch)

    def __next__(self) -> Any:
        try:
            batch, position = next(self._ahead)
        except StopIteration:
            if self._loader._active is not None and self._loader._active() is self:
                end = self._loader._position
                self._loader._position = Position(end.epoch + 1, batch_size=end.batch_size)
                self._loader._active = None
            raise
        self._loader._position = position
        return batch

    def close(self) -> None:
        self._ahead.close()


# ----------------------------------- torch_xla's loader by its name and arguments, on every runtime


class MpDeviceLoader(ShardedLoader):
    """Gives DTensors where torch_xla's class of this name gives annotated device tensors.

    Args:
        loader: Any iterable of host batches.
        device: Accepted for torch_xla's signature: the mesh of `input_sharding` says where.
        input_sharding: A ``ShardingSpec``, or some in the batch's structure. With
            ``minibatch=True`` each process's loader gives its own rows, else the whole batch.
        device_prefetch_size: Global batches that wait on the devices.
        **options: torch_xla's other options, which have nothing to set here, and those of
            :class:`ShardedLoader`.

    A batch with too few rows is dropped; pass `last` for something else.

    Raises:
        DataError: No input_sharding, or a batches_per_execution other than 1.

    Example:
        >>> import torch, xla_dtensor.spmd as xs
        >>> rows = xs.ShardingSpec(xs.Mesh(range(8), (8,), ("data",)), ("data", None))
        >>> loader = MpDeviceLoader([torch.ones(16, 4)], "xla", input_sharding=rows)
        >>> [tuple(batch.shape) for batch in loader]
        [(16, 4)]
    """

    def __init__(
        self,
        loader: Iterable[Any],
        device: Any = None,
        *,
        input_sharding: Any = None,
        device_prefetch_size: int = 8,
        **options: Any,
    ) -> None:
        batches = options.pop("batches_per_execution", 1)
        if input_sharding is None or batches != 1:
            raise DataError(
                f"MpDeviceLoader was called with input_sharding={input_sharding!r} and "
                f"batches_per_execution={batches}. It has to know "
                "on which mesh a batch lies, and a step ends where the program says so. Pass a "
                "ShardingSpec; put several batches into one compiled step by hand."
            )
        for name in ("loader_prefetch_size", "host_to_device_transfer_threads", "batchdim"):
            options.pop(name, None)
        super().__init__(
            loader, input_sharding=input_sharding, prefetch=device_prefetch_size, **options
        )
