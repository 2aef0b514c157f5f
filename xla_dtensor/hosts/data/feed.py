"""The feed behind a ShardedLoader: host batches in, global batches and positions out.

For each batch, in the thread that reads:

1. read the next host batch, and note where the loader is after it;
2. tell the other processes: whether there is one, whether it is short, its shapes, and where asked
   checksums; so all of them end, drop or pad at the same batch, and no program can hang;
3. pad it, cut this process's shards, and put them on its devices.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from xla_dtensor.core.errors import DataError
from xla_dtensor.dtensor.mesh import DeviceMesh
from xla_dtensor.hosts.data.batch import Leaf, Whole, resolve_leaf, sharded_leaf
from xla_dtensor.hosts.data.check import compare_feeds, digest
from xla_dtensor.hosts.data.exchange import Exchange, exchange_name
from xla_dtensor.hosts.data.last import padded_batch, rows_of, with_mask
from xla_dtensor.hosts.data.nested import Path, Said, map_batch, tensors_of, with_tensors
from xla_dtensor.hosts.data.part import tiles_of
from xla_dtensor.hosts.data.rows import rows_layout, rows_part, rows_placements
from xla_dtensor.hosts.data.sampler import LastBatch, ShardedSampler
from xla_dtensor.hosts.data.state import begin, state_after

__all__ = ["Check", "Feed", "Position"]

Check = Literal["off", "first", "always"]
_WHO = "ShardedLoader"
_END = object()


@dataclass(frozen=True)
class Position:
    """Where a loader is.

    Args:
        epoch: Which epoch.
        batches: Global batches given in this epoch.
        read: Batches read from the loader for them; more where short ones were dropped.
        batch_size: Rows of a global batch; None before the first.
        inner: What the loader itself said of where it is; None where it says nothing.
        since: Batches read since it said so.
    """

    epoch: int = 0
    batches: int = 0
    read: int = 0
    batch_size: int | None = None
    inner: dict[str, Any] | None = None
    since: int = 0


@dataclass
class Feed:
    """What a ShardedLoader was asked for; its arguments are explained there."""

    loader: Any
    mesh: DeviceMesh
    placements: Said
    shape: Said
    pad_value: Said
    whole: Whole
    last: LastBatch
    mask: str | None
    check: Check
    snapshot_every: int
    timeout_seconds: float
    batch_size: int | None
    serial: int
    sampler: ShardedSampler | None
    rows: tuple[Any, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.rows = rows_placements(self.placements.value, self.mesh)
        if self.sampler is not None:
            self.batch_size = self.sampler.batch_size

    @property
    def rows_are_whole(self) -> bool:
        """Whether each process passes all rows."""
        return self.whole is True or (not isinstance(self.whole, bool) and 0 in self.whole)

    def target_rows(self, batch_size: int) -> int:
        """Return how many rows this process passes of a full batch."""
        if self.rows_are_whole:
            return batch_size
        return rows_part(batch_size, self.mesh, self.rows).shape[0]

    def _size_from(self, rows: int) -> int:
        """The rows of a global batch of which this process passes `rows`."""
        if self.rows_are_whole:
            return rows
        tiles, own = tiles_of(rows_layout(self.mesh, self.rows), 0)
        if tiles == own or rows % own == 0:
            return rows if tiles == own else rows // own * tiles
        raise DataError(
            f"A loader gave this process {rows} rows. They are to fill {own} of the {tiles} tiles "
            f"into which the placements cut the batch on {self.mesh}, and do not divide by that. "
            "Pass batch_size, the rows of a global batch."
        )

    def run(
        self, start: Position, turn: int, stopped: Callable[[], bool]
    ) -> Iterator[tuple[Any, Position]]:
        """Yield global batches, each with the position after it."""
        name = f"loader/{exchange_name(self.mesh.value)}/{self.serial}/{turn}"
        exchange = Exchange(name, self.mesh.value, self.timeout_seconds)
        reader = _Reader(self, start)
        pattern: Any = None
        try:
            while True:
                host, rows = reader.next()
                size = reader.position.batch_size
                if host is not None and size is None:
                    size = self._first_size(rows)
                    reader.position = replace(reader.position, batch_size=size)
                target = self.target_rows(size) if size is not None else 0
                leaves = {} if host is None else self._leaves(host, size)
                own = _Said(host is None, host is not None and rows < target)
                anyone = self._agree(own, host, leaves, reader, exchange, stopped)
                if host is not None and self.last == "pad":
                    pattern = host
                if anyone.all_ended or (anyone.ended and self.last == "drop"):
                    reader.check_some_given()
                    return
                if (anyone.short or anyone.ended) and self.last != "pad":
                    if self.last == "error":
                        self._refuse_short(rows, target, reader.position.read)
                    continue
                if host is None:
                    host, leaves = self._nothing_left(pattern, size, reader.position.read)
                    rows = reader.pass_over()
                batch = self._sharded(host, leaves, rows, target, size or 0)
                host = None
                reader.given()
                yield batch, reader.position
                del batch  # it is the taker's now
        except Exception as error:
            exchange.fail(_written({"failed": f"{type(error).__name__}: {error}"}))
            raise
        finally:
            reader.close()

    def _first_size(self, rows: int) -> int:
        given = self.batch_size
        own = getattr(self.loader, "batch_size", None)
        if given is None and isinstance(own, int):
            given = self._size_from(own)
        return self._size_from(rows) if given is None else given

    def _leaves(self, host: Any, size: int | None) -> dict[Path, Leaf]:
        found: dict[Path, Leaf] = {}
        rows = rows_of(host)

        def look(path: Path, tensor: torch.Tensor, asked: Any, shape: Any) -> None:
            given: list[int | None] = [None] * tensor.ndim if shape is None else list(shape)
            if given and given[0] is None and tensor.shape[0] == rows:
                given[0] = size
            found[path] = resolve_leaf(_WHO, path, tensor, self.mesh, asked, given, self.whole)

        map_batch(look, host, self.placements, self.shape)
        return found

    def _agree(
        self,
        own: _Said,
        host: Any,
        leaves: dict[Path, Leaf],
        reader: _Reader,
        exchange: Exchange,
        stopped: Callable[[], bool],
    ) -> _Heard:
        alike = self.sampler is not None or self.rows_are_whole
        if exchange.is_alone or (self.check == "off" and alike):
            return _Heard(own.ended, own.ended, own.short)
        full, first = not (own.ended or own.short), reader.count == 1
        with_sums = self.check == "always" or (self.check == "first" and first)
        said: dict[str, Any] = {"ended": own.ended, "short": own.short}
        if not own.ended:
            tensors = dict(tensors_of(host))
            said["digest"] = digest(tensors, leaves, with_sums=with_sums and full)
        what = f"batch {reader.position.read + own.ended} of its loader"
        heard = _talk(exchange, said, what, stopped)
        digests = {p: each["digest"] for p, each in heard.items() if "digest" in each}
        if self.check != "off":
            compare_feeds(digests, f"{_WHO}, batch {reader.position.read}")
        ended = [each["ended"] for each in heard.values()]
        return _Heard(any(ended), all(ended), any(each["short"] for each in heard.values()))

    def _refuse_short(self, rows: int, target: int, read: int) -> None:
        raise DataError(
            f"ShardedLoader was called with last='error', and batch {read} has too few rows in a "
            f"process; this one has {rows} of its {target}. A short batch would be another "
            "program. Pass last='drop' or last='pad', or give the processes equally many rows."
        )

    def _nothing_left(
        self, pattern: Any, size: int | None, read: int
    ) -> tuple[Any, dict[Path, Leaf]]:
        if pattern is None:
            raise DataError(
                f"This process has no batch {read} where another has one, and last='pad' was asked "
                "for. Padding is made like the batch before, and there was none. Give each process "
                "one batch at least, or pass last='drop'."
            )
        return pattern, self._leaves(pattern, size)

    def _sharded(
        self, host: Any, leaves: dict[Path, Leaf], rows: int, target: int, size: int
    ) -> Any:
        if rows < target or rows_of(host) != rows:  # a pattern is no row, even where none is due
            host = padded_batch(host, rows, target, self.pad_value)
        batch = map_batch(
            lambda path, tensor: sharded_leaf(_WHO, path, tensor, leaves[path], self.mesh), host
        )
        if self.mask is None:
            return batch
        real = torch.arange(target) < rows
        layout = rows_layout(self.mesh, self.rows)
        leaf = Leaf(layout, self.rows, (size,), (0,) if self.rows_are_whole else ())
        return with_mask(batch, sharded_leaf(_WHO, (self.mask,), real, leaf, self.mesh), self.mask)


@dataclass(frozen=True)
class _Said:
    """What a process says of a batch: there is none, or it has too few rows."""

    ended: bool
    short: bool


@dataclass(frozen=True)
class _Heard:
    """What is true of a batch in all processes together."""

    ended: bool
    all_ended: bool
    short: bool


def _talk(
    exchange: Exchange, said: dict[str, Any], what: str, stopped: Callable[[], bool]
) -> dict[int, dict[str, Any]]:
    heard = {p: json.loads(e) for p, e in exchange.all(_written(said), what, stopped).items()}
    failed = {p: each["failed"] for p, each in heard.items() if "failed" in each}
    if failed:
        process, text = next(iter(failed.items()))
        raise DataError(
            f"The loader of process {process} failed at {what}: {text}. No global batch can be "
            "made without its part. Its own error has the traceback; mend what it says."
        )
    return heard


def _written(said: dict[str, Any]) -> bytes:
    return json.dumps(said, sort_keys=True).encode()


class _Reader:
    """Host batches from a position on, and the position after each."""

    def __init__(self, feed: Feed, start: Position) -> None:
        self._feed, self._start = feed, start
        self.position = start
        self.count = 0  # batches read in this pass
        for each in _with_epochs(feed.loader):
            each.set_epoch(start.epoch)
        if feed.sampler is not None:
            state = feed.sampler.state_dict()
            feed.sampler.load_state_dict(state | {"epoch": start.epoch, "batch": start.read})
            self._iterator = iter(feed.loader)
        else:
            self._iterator = begin(feed.loader, start.inner, start.since)

    def next(self) -> tuple[Any, int]:
        """Return the next host batch and how many of its rows are real; None at the end."""
        sampler, before = self._feed.sampler, self.position
        host = next(self._iterator, _END)
        if host is _END:
            return None, 0
        host = with_tensors(host)
        rows = rows_of(host)
        if sampler is not None:
            rows = min(rows, sampler.own_rows(before.read))
        self.count += 1
        self._note(before)
        return host, rows

    def _note(self, before: Position) -> None:
        feed, since, inner = self._feed, before.since + 1, before.inner
        if feed.sampler is None and since >= feed.snapshot_every:
            found = state_after(feed.loader, self._iterator)
            inner, since = (found, 0) if found is not None else (None, since)
        self.position = replace(before, read=before.read + 1, inner=inner, since=since)

    def pass_over(self) -> int:
        """Count a batch that only other processes have; return its rows here."""
        self.position = replace(self.position, read=self.position.read + 1)
        return 0

    def check_some_given(self) -> None:
        """Raise where each batch was too short to be given.

        Raises:
            DataError: It was so: the loader gives other batches than were asked for.
        """
        size = self.position.batch_size
        if self.count and self.position.batches == self._start.batches == 0:
            raise DataError(
                f"A loader gave {self.count} batches, and each had too few rows for "
                f"batch_size={size} on {self._feed.mesh}. All were dropped. Pass the batch_size "
                "that it gives, whole=True where it gives whole batches, or last='pad'."
            )

    def given(self) -> None:
        """Count the batch that was read as given."""
        self.position = replace(self.position, batches=self.position.batches + 1)

    def close(self) -> None:
        """End what the iterator holds open, such as a generator's file."""
        close = getattr(self._iterator, "close", None)
        if callable(close):
            close()


def _with_epochs(loader: Any) -> Iterator[Any]:
    """What shuffles by epoch: the loader, its samplers, its data set."""
    names = ("batch_sampler", "sampler", "dataset")
    for each in (loader, *(getattr(loader, name, None) for name in names)):
        if hasattr(each, "set_epoch"):
            yield each
