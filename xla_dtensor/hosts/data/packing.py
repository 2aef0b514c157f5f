"""Sequences of many lengths, packed into batches of one shape.

    lengths 3, 4, 2, 1 in 2 rows of 6    tokens        a a a c c d     segment_ids   1 1 1 2 2 3
                                                       b b b b - -                   1 1 1 1 0 0
                                         position_ids  0 1 2 0 1 0     (0 in padding, too)
                                                       0 1 2 3 0 0

A token may attend to those of its own segment: ``segment_ids[:, :, None] == segment_ids[:, None]``.
Segments are numbered from 1 in each row, 0 is padding.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import torch

from xla_dtensor.core.argument_types import argument_types
from xla_dtensor.core.errors import DataError
from xla_dtensor.hosts.data.sampler import begin, state_after

__all__ = ["PackedBatches", "pack_sequences"]

TooLong = Literal["error", "cut", "split"]
Fields = dict[str, torch.Tensor]
_OWN_FIELDS = ("segment_ids", "position_ids")


class _Packing:
    """A batch in the making: which sequences stand in which row."""

    def __init__(self, rows: int, length: int) -> None:
        self.rows: list[list[Fields]] = [[] for _ in range(rows)]
        self.free = [length] * rows
        self.length = length

    def place(self, fields: Fields) -> bool:
        """Put a sequence into the first row with room; False where there is none."""
        size = _length_of(fields)
        for row, free in enumerate(self.free):
            if size <= free:
                self.rows[row].append(fields)
                self.free[row] -= size
                return True
        return False

    def batch(self, pattern: Fields, pad_value: Any) -> Fields:
        """Return the batch; `pattern` is a sequence with its fields."""
        shape = (len(self.rows), self.length)
        batch = {
            name: _padding(name, (*shape, *values.shape[1:]), values.dtype, pad_value)
            for name, values in pattern.items()
        }
        segments = torch.zeros(shape, dtype=torch.int32)
        positions = torch.zeros(shape, dtype=torch.int32)
        for row, sequences in enumerate(self.rows):
            start = 0
            for number, fields in enumerate(sequences, start=1):
                stop = start + _length_of(fields)
                for name, values in fields.items():
                    batch[name][row, start:stop] = values
                segments[row, start:stop] = number
                positions[row, start:stop] = torch.arange(stop - start, dtype=torch.int32)
                start = stop
        return batch | dict(zip(_OWN_FIELDS, (segments, positions), strict=True))


@argument_types
def pack_sequences(
    sequences: Iterable[Any],
    rows: int,
    length: int,
    *,
    pad_value: complex | Mapping[str, complex] = 0,
    too_long: TooLong = "error",
) -> tuple[Fields, list[Any]]:
    """Pack sequences into one batch, each into the first row that has room.

    Args:
        sequences: Tensors whose first dim is their length, or dicts of such of one length.
        rows: Rows of the batch.
        length: Length of a row, tokens.
        pad_value: What padding is filled with, or numbers by field name.
        too_long: What becomes of a sequence longer than `length`: "error", "cut", or "split" into
            several.

    Returns:
        The batch, with the fields (of bare tensors "tokens"), "segment_ids" and "position_ids",
        each of shape (rows, length, ...); and the sequences that found no room.

    Raises:
        DataError: No sequence, one of another kind than the first, or one that is too long.

    Example:
        >>> batch, left = pack_sequences([torch.ones(3), torch.ones(2), torch.ones(4)], 1, 6)
        >>> batch["segment_ids"].tolist(), len(left)
        ([[1, 1, 1, 2, 2, 0]], 1)
    """
    packing, leftover = _Packing(rows, length), list[Any]()
    pattern: Fields | None = None
    for sequence in sequences:
        for fields in _pieces(sequence, length, too_long):
            pattern = pattern or fields
            _check_fields(fields, pattern)
            if not packing.place(fields):
                leftover.append(fields if isinstance(sequence, Mapping) else fields["tokens"])
    if pattern is None:
        raise DataError(
            f"pack_sequences was called without a sequence for {rows} rows of {length}. Fields and "
            "dtypes are those of the first one. Pass one sequence at least."
        )
    return packing.batch(pattern, pad_value), leftover


@argument_types
class PackedBatches:
    """Packs the sequences that a loader gives into batches of one shape, and keeps its place.

    Each process packs its own sequences into its own rows; the batches then depend on which
    sequences a process reads. Where they are to be the same for any number of processes, let each
    pack all rows, and pass ``whole=True`` to :class:`ShardedLoader`.

    Args:
        loader: Gives sequences, or lists of them; see :func:`pack_sequences`. With torchdata's or
            grain's state methods it resumes without reading again.
        rows: Rows of a batch in this process: ``process_part(shape, mesh, placements).shape[0]``.
        length: Length of a row, tokens.
        lookahead: How many sequences may wait for the next batch while shorter ones fill this one.
        pad_value: As for :func:`pack_sequences`.
        too_long: As for :func:`pack_sequences`.

    Example:
        >>> sequences = [torch.full((n,), n) for n in (3, 4, 2, 1)]
        >>> [batch["tokens"].tolist() for batch in PackedBatches(sequences, 2, 6)]
        [[[3, 3, 3, 2, 2, 1], [4, 4, 4, 4, 0, 0]]]
    """

    def __init__(
        self,
        loader: Iterable[Any],
        rows: int,
        length: int,
        *,
        lookahead: int = 16,
        pad_value: complex | Mapping[str, complex] = 0,
        too_long: TooLong = "error",
    ) -> None:
        self.loader, self.rows, self.length = loader, rows, length
        self.lookahead, self.pad_value = lookahead, pad_value
        self.too_long: TooLong = too_long
        self._state: dict[str, Any] | None = None
        self._iterator: Any = None
        self._read = 0
        self._waiting: deque[Fields] = deque()

    def __iter__(self) -> Iterator[Fields]:
        """Begin, or go on where the loaded state was."""
        state = self._state or {"inner": None, "read": 0, "waiting": []}
        self._state = None
        skip = state["read"] if state["inner"] is None else 0
        self._iterator = begin(self.loader, state["inner"], skip)
        self._read, self._waiting = state["read"], deque(state["waiting"])
        return self._batches()

    def _batches(self) -> Iterator[Fields]:
        pattern: Fields | None = self._waiting[0] if self._waiting else None
        ended = False
        while not ended:
            packing = _Packing(self.rows, self.length)
            waiting = deque(f for f in self._waiting if not packing.place(f))
            self._waiting = waiting
            while len(waiting) <= self.lookahead and max(packing.free) > 0:
                sequences = next(self._iterator, None)
                if sequences is None:
                    ended = not waiting
                    break
                self._read += 1
                for sequence in sequences if isinstance(sequences, (list, tuple)) else [sequences]:
                    for fields in _pieces(sequence, self.length, self.too_long):
                        pattern = pattern or fields
                        _check_fields(fields, pattern)
                        if not packing.place(fields):
                            waiting.append(fields)
            if pattern is not None and any(packing.rows):
                yield packing.batch(pattern, self.pad_value)

    def set_epoch(self, epoch: int) -> None:
        """Tell the loader, if it wants to know."""
        if hasattr(self.loader, "set_epoch"):
            self.loader.set_epoch(epoch)  # pyright: ignore[reportAttributeAccessIssue]

    def state_dict(self) -> dict[str, Any]:
        """Return where it is after the batch given last, waiting sequences included."""
        inner = None if self._iterator is None else state_after(self.loader, self._iterator)
        return {"inner": inner, "read": self._read, "waiting": list(self._waiting)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state at the next iteration."""
        self._state = dict(state)


def _pieces(sequence: Any, length: int, too_long: TooLong) -> Iterator[Fields]:
    """A sequence as fields, in as many pieces as it is to have."""
    fields = dict(sequence) if isinstance(sequence, Mapping) else {"tokens": sequence}
    try:
        fields = {name: torch.as_tensor(values) for name, values in fields.items()}
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"A sequence of type {type(sequence).__name__} was to be packed. PyTorch makes no "
            f"tensor of it: {error}. Pass a tensor, or a dict of such."
        ) from error
    sizes = {name: tuple(values.shape[:1]) for name, values in fields.items()}
    if len(set(sizes.values())) != 1 or () in sizes.values() or set(sizes) & set(_OWN_FIELDS):
        raise DataError(
            f"A sequence with the lengths {sizes} was to be packed. Its fields are tensors of one "
            f"length, and {' and '.join(_OWN_FIELDS)} are made here. Pass a tensor, or a dict of "
            "such."
        )
    size = _length_of(fields)
    if size <= length or too_long == "cut":
        yield {name: values[:length] for name, values in fields.items()}
    elif too_long == "split":
        for start in range(0, size, length):
            yield {name: values[start : start + length] for name, values in fields.items()}
    else:
        raise DataError(
            f"A sequence of {size} tokens was to be packed into rows of {length}. It does not fit "
            "into any. Pass a greater length, or too_long='cut' or 'split'."
        )


def _check_fields(fields: Fields, pattern: Fields) -> None:
    kinds = {n: (v.dtype, v.shape[1:]) for n, v in fields.items()}
    expected = {n: (v.dtype, v.shape[1:]) for n, v in pattern.items()}
    if kinds != expected:
        raise DataError(
            f"A sequence with the fields {kinds} was to be packed behind one with {expected}. A "
            "batch has one set of fields, with one dtype each. Give all sequences the same."
        )


def _length_of(fields: Fields) -> int:
    return int(next(iter(fields.values())).shape[0])


def _padding(name: str, shape: tuple[int, ...], dtype: torch.dtype, pad_value: Any) -> torch.Tensor:
    pad = pad_value.get(name, 0) if isinstance(pad_value, Mapping) else pad_value
    try:
        return torch.full(shape, pad, dtype=dtype)
    except (TypeError, RuntimeError) as error:
        raise DataError(
            f"The field {name!r} of {dtype} was to be filled up with pad_value={pad!r}. It has no "
            "such number. Pass one of that dtype."
        ) from error
