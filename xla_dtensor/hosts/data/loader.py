"""ShardedLoader: any loader of host batches, as one of global DTensors on the devices.

part of the rows     DataLoader(data, batch_sampler=ShardedSampler(data, 64, mesh, rows))
     |  read ahead by a thread; short batches dropped, padded or refused, alike everywhere
global batch         ShardedLoader(loader, mesh, rows)
     |  counted when it is taken
state                loader.state_dict(): equal in all processes, for any number of them
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from xla_dtensor.core.argument_types import argument_types
from xla_dtensor.core.errors import DataError
from xla_dtensor.dtensor.mesh import as_device_mesh, current_mesh
from xla_dtensor.hosts.data.batch import Whole
from xla_dtensor.hosts.data.feed import Check, Feed, Position
from xla_dtensor.hosts.data.loader_state import read_state, written_state
from xla_dtensor.hosts.data.nested import said_number, said_placements, said_shape
from xla_dtensor.hosts.data.prefetch import Ahead
from xla_dtensor.hosts.data.rows import rows_part
from xla_dtensor.hosts.data.sampler import LastBatch, ShardedSampler, check_last
from xla_dtensor.hosts.data.sharding_spec import read_sharding_specs

__all__ = ["ShardedLoader"]

_DROP: LastBatch = "drop"
_serials: dict[Any, itertools.count[int]] = {}


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
        found = getattr(loader, "batch_sampler", None)
        sampler = found if isinstance(found, ShardedSampler) else None
        policy = last or (sampler.last if sampler is not None else _DROP)
        check_last("ShardedLoader", policy)
        if check not in ("off", "first", "always") or prefetch < 0 or snapshot_every < 1:
            raise DataError(
                f"ShardedLoader was called with check={check!r}, prefetch={prefetch}, "
                f"snapshot_every={snapshot_every}. One of them is out of range. Pass check 'off', "
                "'first' or 'always', prefetch of 0 or more, snapshot_every of 1 or more."
            )
        self.loader, self.prefetch = loader, prefetch
        self._feed = Feed(
            loader=loader,
            mesh=device_mesh,
            placements=said_placements(placements),
            shape=said_shape(global_shape),
            pad_value=said_number("pad_value", pad_value),
            whole=whole,
            last=policy,
            mask=mask,
            check=check,
            snapshot_every=snapshot_every,
            timeout_seconds=timeout_seconds,
            batch_size=batch_size,
            serial=next(_serials.setdefault(device_mesh.value, itertools.count())),
            sampler=sampler,
        )
        if sampler is not None:
            _check_sampler(sampler, self._feed)
        self._position = Position(batch_size=self._feed.batch_size)
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
        self._position = Position(epoch=epoch, batch_size=self._feed.batch_size)
        self._resumes = False

    def __len__(self) -> int:
        """Return the loader's own length, the batches of an epoch."""
        return len(self.loader)  # pyright: ignore[reportArgumentType]

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch, or go on where the loaded state was."""
        self.close()
        if not self._resumes:
            start = Position(self._position.epoch, batch_size=self._feed.batch_size)
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
        return written_state(self._feed, self._position)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the batch after which `state` was taken, at the next iteration.

        Raises:
            DataError: The state is of another order of batches, or has none for this process's
                rows.
        """
        self.close()
        self._position = read_state(self._feed, state)
        self._resumes = True


def _check_sampler(sampler: ShardedSampler, feed: Feed) -> None:
    """Raise where a sampler reads other rows than the loader passes on."""
    passed = feed.target_rows(sampler.batch_size)
    rows = rows_part(sampler.batch_size, feed.mesh, feed.rows)
    if passed != sampler.part.shape[0] or rows.runs != sampler.part.runs:
        raise DataError(
            f"ShardedLoader was called with a ShardedSampler that reads the rows "
            f"{sampler.part.text()} of {sampler.batch_size}, and is to pass on {rows.text()} as "
            f"{passed} rows. Other rows would be trained on than were meant. Give both the same "
            "mesh and placements, and leave out whole."
        )


class _Epoch(Iterator[Any]):
    """One pass. The loader knows it weakly, so that a loop left by `break` ends it."""

    def __init__(self, loader: ShardedLoader, start: Position) -> None:
        self._loader = loader
        feed, turn = loader._feed, next(loader._turns)
        self._ahead = Ahead(partial(feed.run, start, turn), loader.prefetch)

    def __next__(self) -> Any:
        try:
            batch, position = next(self._ahead)
        except StopIteration:
            if self._loader._active is not None and self._loader._active() is self:
                ended = self._loader._position
                self._loader._position = Position(ended.epoch + 1, batch_size=ended.batch_size)
                self._loader._active = None
            raise
        self._loader._position = position
        return batch

    def close(self) -> None:
        self._ahead.close()
