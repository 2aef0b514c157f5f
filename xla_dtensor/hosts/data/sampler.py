"""ShardedSampler: of every global batch, the rows that this process has to read."""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sized
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from xla_dtensor.core.argument_types import argument_types
from xla_dtensor.core.errors import DataError
from xla_dtensor.dtensor.mesh import as_device_mesh, current_mesh
from xla_dtensor.hosts.data.part import rows_part, rows_placements

__all__ = [
    "LastBatch",
    "ShardedSampler",
    "begin",
    "check_last",
    "has_state",
    "shuffled",
    "state_after",
]

_SORTED_UP_TO = 1 << 16
_ROUNDS = 6

LastBatch = Literal["drop", "pad", "error"]


def check_last(function: str, last: str) -> None:
    """Raise for an unknown policy of the last batch."""
    if last not in ("drop", "pad", "error"):
        raise DataError(
            f"{function} was called with last={last!r}. It says what becomes of a batch with too "
            "few rows. Pass 'drop', 'pad' or 'error'."
        )


@argument_types
class ShardedSampler(Sampler[list[int]]):
    """A batch sampler for data sets with `len` and `[i]`; pass it as ``batch_sampler=``.

    The order of an epoch is one permutation of the whole data set, cut into global batches. Of each
    a process gets the numbers of its own rows, so that the global batches are those of a single
    process, however many there are.

    Args:
        data: The data set, or its length.
        batch_size: Rows of a global batch.
        mesh: The mesh; that of the open ``with mesh:`` block when None.
        placements: How the batch lies, as for :func:`shard_batch`; only its rows count here.
        shuffle: Whether to permute.
        seed: Which permutations.
        last: What becomes of the rows left at the end: "drop", "pad" (the sampler gives fewer, and
            ``ShardedLoader(last="pad")`` fills up), or "error".

    Raises:
        DataError: Left rows with last="error", or no batch at all.

    Example:
        >>> import xla_dtensor as xd
        >>> from torch.distributed.tensor import Shard
        >>> mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("dp",))
        >>> list(ShardedSampler(5, 2, mesh, [Shard(0)], shuffle=False))
        [[0, 1], [2, 3]]
    """

    def __init__(
        self,
        data: int | Sized,
        batch_size: int,
        mesh: Any = None,
        placements: Any = None,
        *,
        shuffle: bool = True,
        seed: int = 0,
        last: LastBatch = "drop",
    ) -> None:
        check_last("ShardedSampler", last)
        self.length = data if isinstance(data, int) else len(data)
        if self.length < 0 or operator.index(batch_size) < 1:
            raise DataError(
                f"ShardedSampler was called with batch_size={batch_size} for {self.length} "
                "samples. A batch has a row or more. Pass positive numbers."
            )
        self.batch_size, self.shuffle, self.seed = batch_size, shuffle, seed
        self.last: LastBatch = last
        device_mesh = current_mesh("ShardedSampler") if mesh is None else as_device_mesh(mesh)
        self.part = rows_part(batch_size, device_mesh, rows_placements(placements, device_mesh))
        self.epoch = 0
        self._first_batch = 0
        extra = self.length % batch_size
        if len(self) == 0 or (extra and last == "error"):
            raise DataError(
                f"ShardedSampler was called with batch_size={batch_size} and last={last!r} for "
                f"{self.length} samples. That makes {self.length // batch_size} whole batches and "
                f"leaves {extra} rows. Pass another batch_size, last='pad', or last='drop' where "
                "whole batches remain."
            )

    def __len__(self) -> int:
        """Return the number of global batches of an epoch."""
        batches, extra = divmod(self.length, self.batch_size)
        return batches + bool(extra and self.last == "pad")

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the numbers of this process's rows, from where `load_state_dict` put it."""
        first, self._first_batch = self._first_batch, 0
        for batch in range(first, len(self)):
            yield self.own_samples(batch)

    def own_samples(self, batch: int) -> list[int]:
        """Return the samples of which this process reads the rows of a batch.

        In a padded last batch in which it has no rows, this is one sample of another's: a loader
        needs a pattern to make padding of.
        """
        positions = batch * self.batch_size + self.part.positions(0)[: self.own_rows(batch)]
        if len(positions) == 0:
            positions = np.array([batch * self.batch_size])
        if self.shuffle:
            positions = shuffled(positions, self.length, self.seed, self.epoch)
        return [int(sample) for sample in positions]

    def own_rows(self, batch: int) -> int:
        """Return how many real rows of a batch this process reads."""
        rows = min(self.batch_size, self.length - batch * self.batch_size)
        return int(np.searchsorted(self.part.positions(0), rows))

    def set_epoch(self, epoch: int) -> None:
        """Choose the order: each epoch has another."""
        self.epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        """Return what fixes the order, equal in all processes; the position is the loader's."""
        return {
            "length": self.length,
            "batch_size": self.batch_size,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "epoch": self.epoch,
            "batch": self._first_batch,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration begin at ``state["batch"]`` of ``state["epoch"]``.

        Raises:
            DataError: The state is of another order of batches.
        """
        own = self.state_dict()
        for key in ("length", "batch_size", "shuffle", "seed"):
            if state[key] != own[key]:
                raise DataError(
                    f"A ShardedSampler with {key}={own[key]} was given the state of one with "
                    f"{key}={state[key]}. Its batches are others, so that rows would be repeated "
                    "and left out. Make the sampler as it was, or begin a new epoch."
                )
        self.epoch, self._first_batch = int(state["epoch"]), int(state["batch"])


# -------------------------------------------------------------- The order of a data set in an epoch
#
# A permutation that is computed, not stored. The position of every sample follows from (length,
# seed, epoch) by integer arithmetic of our own: it is the same on every process, machine and
# version of the libraries, so that a resumed job goes on in the order in which it began. Small data
# sets are sorted by a hash. Large ones go through a Feistel network of six rounds, which permutes
# the numbers below the next power of four; a number that falls outside of the data set goes through
# again. A billion samples need no table of 8 GB.


def shuffled(positions: NDArray[np.int64], length: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return which samples stand at some positions of an epoch.

    Example:
        >>> sorted(shuffled(np.arange(5), 5, seed=1, epoch=0).tolist())
        [0, 1, 2, 3, 4]
    """
    key = _key(seed, epoch)
    if length <= _SORTED_UP_TO:
        return _sorted_order(length, key)[positions]
    half_bits = (int(length - 1).bit_length() + 1) // 2
    values = positions.astype(np.uint64)
    outside = np.ones(len(values), dtype=bool)
    while outside.any():
        values[outside] = _feistel(values[outside], half_bits, key)
        outside = values >= length
    return values.astype(np.int64)


@lru_cache(maxsize=4)
def _sorted_order(length: int, key: int) -> NDArray[np.int64]:
    hashed = _mixed(np.arange(length, dtype=np.uint64) + np.uint64(key))
    return np.argsort(hashed, kind="stable").astype(np.int64)


def _key(seed: int, epoch: int) -> int:
    first = _mixed(np.array([seed % 2**64], dtype=np.uint64))
    return int(_mixed(first + np.uint64(epoch % 2**64))[0])


def _feistel(values: NDArray[np.uint64], half_bits: int, key: int) -> NDArray[np.uint64]:
    mask, shift = np.uint64((1 << half_bits) - 1), np.uint64(half_bits)
    left, right = values >> shift, values & mask
    for turn in range(_ROUNDS):
        salt = _mixed(np.array([(key + turn) % 2**64], dtype=np.uint64))[0]
        left, right = right, left ^ (_mixed(right + salt) & mask)
    return (left << shift) | right


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a hash of each number: splitmix64."""
    with np.errstate(over="ignore"):
        z = values + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


# -------------------------------------------------------------- The state of somebody else's loader
#
# Two protocols are known. torchdata's StatefulDataLoader and torchdata.nodes.Loader have
# state_dict() and load_state_dict(state) on the loader; grain's iterators have get_state() and
# set_state(state). Both say where the loader is after the batch it gave last, which is why the
# state is taken right there, by the thread that reads, and travels with the batch. A loader with
# neither is read again up to the batch.


def has_state(loader: Any) -> bool:
    """Tell whether a loader says where it is; see `state_after` for those whose iterator does."""
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def begin(loader: Iterable[Any], state: Any, skip: int) -> Iterator[Any]:
    """Return an iterator over a loader, from a state on, of which it drops `skip` batches."""
    if state is not None and state["of"] == "loader":
        loader.load_state_dict(state["state"])  # pyright: ignore[reportAttributeAccessIssue]
    iterator = iter(loader)
    if state is not None and state["of"] == "iterator":
        iterator.set_state(state["state"])  # pyright: ignore[reportAttributeAccessIssue]
    for _ in itertools.islice(iterator, skip):
        pass
    return iterator


def state_after(loader: Any, iterator: Any) -> dict[str, Any] | None:
    """Return where a loader is after the batch that it gave last; None where it cannot tell."""
    if has_state(loader):
        return {"of": "loader", "state": copy.deepcopy(loader.state_dict())}
    if hasattr(iterator, "get_state"):
        return {"of": "iterator", "state": copy.deepcopy(iterator.get_state())}
    return None
