"""Storage: what torch calls a storage, a cell whose global array can be rebound.

Arrays are immutable and torch tensors are not. A tensor is a shape over a storage
(``eager.tensor``), and writing to it gives the storage another array.

Uneven tensors: JAX has no uneven global arrays. A pinned storage (one that was put on the devices
with a sharding) therefore holds an array padded with zeros to a multiple of its tiles, while
``shape`` stays logical. Only :meth:`Storage.read` and :meth:`Storage.write` know of the padding.

While a step is traced, every storage reports what happens to it to the :class:`~.trace.Trace`.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import jax
import jax.core
from jax.sharding import NamedSharding

from xla_dtensor.runtimes.jax.arrays.sharding import constrained, place, unpadded
from xla_dtensor.runtimes.jax.arrays.trace import active_trace, array_read, note_write

_MANY = 64  # aliases, after which those that are gone are looked for

__all__ = ["KeptStack", "Stack", "Storage"]


class Stack(Protocol):
    """Several storages' values as one array, along dim 0: see ``compile.layers``.

    Attributes:
        array: The values.
        row_sharding: How each of them is to lie; None leaves that to XLA.
    """

    array: Any
    row_sharding: Any

    def read(self, storage: Storage, lane: int) -> Any:
        """Return a row for who reads it alone."""
        ...


class KeptStack(Stack, Protocol):
    """A stack that stays between two calls of a step."""

    def row(self, lane: int) -> Any:
        """Return one row; the stack stays."""
        ...

    def take_back(self, storage: Storage, lane: int) -> None:
        """Make a storage the row again that it was."""
        ...


class Storage:
    """A rebindable cell for one global array.

    Args:
        array: The values, padded to the tiles of `sharding` when they divide unevenly.
        shape: The logical shape; the array's own when None.
        sharding: Where later writes have to lie; None leaves that to XLA.
        manual: The axes along which `array` stacks one tile per device; None for a global array.
    """

    __slots__ = (
        "__weakref__",
        "_array",
        "aliases",
        "constraint",
        "is_part",
        "manual",
        "row",
        "shape",
        "sharding",
        "unannotated",
    )

    def __init__(
        self,
        array: jax.Array,
        shape: tuple[int, ...] | None = None,
        sharding: NamedSharding | None = None,
        manual: Any = None,
    ) -> None:
        # Where a compiled step keeps the values of several storages as one array: see stacks,
        # and rows for the time of the trace.
        self.row: tuple[Stack, int] | None = None
        self._array: Any = array
        self.manual = manual
        self.is_part = False  # of an argument's, which a step is given without the rest
        # Of a gradient that a program fills anew: the tensors that were made over it meanwhile.
        self.aliases: list[weakref.ref[Any]] | None = None
        self.shape = tuple(array.shape) if shape is None else shape
        self.sharding = sharding
        # Set by an annotation, for the time of a traced step: what the step asks of a storage that
        # is older than it, and a value of its own as it was before it was annotated.
        self.constraint: NamedSharding | None = None
        self.unannotated: tuple[jax.Array, jax.Array] | None = None
        trace = active_trace()
        if trace is not None:
            trace.adopt(self)

    def note_alias(self, tensor: Any) -> None:
        """Take down a tensor that was made over it."""
        if self.aliases is not None:
            if len(self.aliases) > _MANY:
                self.aliases = [alias for alias in self.aliases if alias() is not None]
            self.aliases.append(weakref.ref(tensor))

    @property
    def array(self) -> jax.Array:
        """The values. A row of a stack between two calls takes them out of it for good."""
        return self._array if self.row is None else self.row[0].read(self, self.row[1])

    @array.setter
    def array(self, value: jax.Array) -> None:
        self.row = None
        self._array = value

    @property
    def dtype(self) -> Any:
        """The dtype of the values."""
        return (self._array if self.row is None else self.row[0].array).dtype

    def become_row(self, stack: Stack, lane: int) -> None:
        """Leave the values to a stack."""
        self.row = (stack, lane)
        self._array = None

    def read(self) -> jax.Array:
        """Return the logical value."""
        array = unpadded(array_read(self), self.shape, self.sharding)
        return array if self.constraint is None else constrained(array, self.constraint)

    def write(self, array: jax.Array) -> None:
        """Rebind to `array`, of the logical shape and dtype."""
        note_write(self)
        if self.sharding is not None and not isinstance(array, jax.core.Tracer):
            array = place(array, self.sharding)
        self.array = array

    @property
    def lies(self) -> Any:
        """How the array lies; where it has no values, how it is to lie, or None."""
        if self.row is not None:
            return self.row[0].row_sharding or self.sharding
        return self.sharding if isinstance(self._array, jax.core.Tracer) else self._array.sharding

    def check_valid(self) -> None:
        """Raise when the array cannot hold the logical shape."""
        if any(a < s for a, s in zip(self.array.shape, self.shape, strict=True)):
            raise RuntimeError(f"array {self.array.shape} is smaller than shape {self.shape}")
