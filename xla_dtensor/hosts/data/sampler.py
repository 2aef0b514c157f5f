"""ShardedSampler: of every global batch, the rows that this process has to read."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sized
from typing import Any, Literal

import numpy as np
from torch.utils.data import Sampler

from xla_dtensor.core.argument_types import argument_types
from xla_dtensor.core.errors import DataError
from xla_dtensor.dtensor.mesh import as_device_mesh, current_mesh
from xla_dtensor.hosts.data.order import shuffled
from xla_dtensor.hosts.data.rows import rows_part, rows_placements

__all__ = ["LastBatch", "ShardedSampler", "check_last"]

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
        left = self.length % batch_size
        if len(self) == 0 or (left and last == "error"):
            raise DataError(
                f"ShardedSampler was called with batch_size={batch_size} and last={last!r} for "
                f"{self.length} samples. That makes {self.length // batch_size} whole batches and "
                f"leaves {left} rows. Pass another batch_size, last='pad', or last='drop' where "
                "whole batches remain."
            )

    def __len__(self) -> int:
        """Return the number of global batches of an epoch."""
        whole, left = divmod(self.length, self.batch_size)
        return whole + bool(left and self.last == "pad")

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
