"""One array that holds the values of several storages: the same parameter in every layer.

A compiled step takes and returns such stacks, so that a loop over layers finds its parameters as it
wants them and nothing is copied. To everybody else each storage has its own array: reading or
writing one outside of the step *dissolves* the stack into its rows, and the next call of the step
makes a new one. A trace reads no values, so it leaves stacks whole: it is told what its rows are
like (``trace``). A storage is a row of one stack at most::

    call 1   storages 0, 1, 2 have arrays       stacked, the program runs    rows of stack A
    call 2   rows of A, in order                the program runs on A        rows of stack B
    print(layers[1].weight)                     B dissolves                  arrays again
    call 3   storages 0, 1, 2 have arrays       stacked, the program runs    rows of stack C

Neither form is kept beside the other: what memory holds is the values once.

With several processes only one of them may read a value, so nothing here runs a program over all
devices then: each device stacks its own tiles.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, SingleDeviceSharding

from xla_dtensor.runtimes.jax.arrays.values import x64
from xla_dtensor.runtimes.jax.compile.layers.layer_stacks import (
    row_sharding,
    stack_sharding,
    unstack_layers,
)

if TYPE_CHECKING:
    from xla_dtensor.runtimes.jax.arrays.storage import Storage

__all__ = ["Stack", "all_rows", "give_stack", "stack_of"]

# In the order in which they were made: programs must come out alike in every process.
_stacks: weakref.WeakKeyDictionary[Stack, None] = weakref.WeakKeyDictionary()


class Stack:
    """The values of storages as one array.

    Args:
        array: Their arrays along a new dim 0.
        storages: The storages, or None for one that nobody holds any more. They become its rows.
        row_sharding: How each of them lies.
    """

    def __init__(
        self, array: jax.Array, storages: Sequence[Storage | None], row_sharding: Any
    ) -> None:
        self.array = array
        self.row_sharding = row_sharding
        self._rows = [None if s is None else weakref.ref(s) for s in storages]
        self._is_dissolved = False
        for lane, storage in enumerate(storages):
            if storage is not None:
                storage.become_row(self, lane)
        _stacks[self] = None

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, lane: int) -> jax.Array:
        """Return one row; the stack stays."""
        with x64(), jax.ensure_compile_time_eval():
            if _is_here(self.row_sharding):
                return _reader(self.row_sharding)(self.array, np.int32(lane))
            return _unstacked(self.array, self.row_sharding)[lane]

    def read(self, storage: Storage, lane: int) -> jax.Array:
        """Return a row for who reads it alone; all rows are arrays from then on."""
        self.dissolve()
        return storage.array

    def take_back(self, storage: Storage, lane: int) -> None:
        """Make a storage the row again that it was."""
        storage.become_row(self, lane)
        if self._is_dissolved:  # by another thread, say
            self.dissolve()

    def dissolve(self) -> None:
        """Give each storage that is still a row an array of its own."""
        self._is_dissolved = True
        # Also in the middle of a trace, of which this is no part.
        with x64(), jax.ensure_compile_time_eval():
            arrays = _unstacked(self.array, self.row_sharding)
        for lane, (reference, array) in enumerate(zip(self._rows, arrays, strict=True)):
            storage = None if reference is None else reference()
            if storage is not None and storage.row == (self, lane):
                storage.array = array


def stack_of(storages: Sequence[Storage]) -> Stack:
    """Return a stack whose rows are these storages, in their order."""
    stack = storages[0].row[0] if storages[0].row is not None else None
    if (
        isinstance(stack, Stack)
        and len(stack) == len(storages)
        and all(s.row == (stack, lane) for lane, s in enumerate(storages))
    ):
        return stack
    arrays = [storage.array for storage in storages]
    sharding = arrays[0].sharding
    return Stack(_stacked(arrays, sharding), storages, sharding)


def give_stack(array: jax.Array, storages: Sequence[Storage | None]) -> None:
    """Make storages the rows of what a program returned; None for one that nobody holds any more.

    Where XLA has sharded its rows over devices, each storage is given an array of its own.
    """
    sharding = array.sharding
    if isinstance(sharding, NamedSharding) and tuple(sharding.spec)[:1] in ((), (None,)):
        Stack(array, storages, row_sharding(sharding))
    elif isinstance(sharding, SingleDeviceSharding):
        Stack(array, storages, sharding)
    else:
        for storage, row in zip(storages, unstack_layers(array), strict=True):
            if storage is not None:
                storage.array = row


def all_rows() -> list[tuple[Storage, Stack, int]]:
    """Return every storage that is a row, with its stack and its lane."""
    rows: list[tuple[Storage, Stack, int]] = []
    for stack in list(_stacks):
        for lane, reference in enumerate(stack._rows):
            storage = None if reference is None else reference()
            if storage is not None and storage.row == (stack, lane):
                rows.append((storage, stack, lane))
    return rows


# ---------------------------------------------------------------------- the arrays


# One small program per kind of row, whatever their number: it is told which.


def _stacked(arrays: Sequence[jax.Array], sharding: Any) -> jax.Array:
    first = arrays[0]
    shape = (len(arrays), *first.shape)
    if not _is_here(sharding):
        tiles = zip(*map(_tiles, arrays), strict=True)
        return _of_tiles(shape, stack_sharding(sharding), [jnp.stack(group) for group in tiles])
    stack = _maker(sharding, shape, first.dtype)()
    for lane, array in enumerate(arrays):
        stack = _writer(sharding)(stack, array, np.int32(lane))
    return stack


def _unstacked(stack: jax.Array, sharding: Any) -> list[jax.Array]:
    if _is_here(sharding):
        return [_reader(sharding)(stack, np.int32(lane)) for lane in range(stack.shape[0])]
    rows = zip(*(list(tile) for tile in _tiles(stack)), strict=True)
    return [_of_tiles(stack.shape[1:], sharding, row) for row in rows]


@lru_cache(maxsize=1024)
def _maker(sharding: Any, shape: tuple[int, ...], dtype: Any) -> Callable[[], jax.Array]:
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=stack_sharding(sharding))


@lru_cache(maxsize=1024)
def _writer(sharding: Any) -> Callable[[jax.Array, jax.Array, Any], jax.Array]:
    return jax.jit(
        lambda stack, row, lane: lax.dynamic_update_index_in_dim(stack, row, lane, 0),
        donate_argnums=0,
        out_shardings=stack_sharding(sharding),
    )


@lru_cache(maxsize=1024)
def _reader(sharding: Any) -> Callable[[jax.Array, Any], jax.Array]:
    return jax.jit(
        lambda stack, lane: lax.dynamic_index_in_dim(stack, lane, 0, keepdims=False),
        out_shardings=sharding,
    )


def _is_here(sharding: Any) -> bool:
    return sharding.is_fully_addressable


def _tiles(array: jax.Array) -> list[jax.Array]:
    """Return what each device of this process holds of an array."""
    return [shard.data for shard in sorted(array.addressable_shards, key=lambda s: s.device.id)]


def _of_tiles(shape: Sequence[int], sharding: Any, tiles: Sequence[jax.Array]) -> jax.Array:
    return jax.make_array_from_single_device_arrays(tuple(shape), sharding, list(tiles))
