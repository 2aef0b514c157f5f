"""What the arrays of a step take on one device, by what they are for.

Two figures are kept apart: what the elements take (`Held.device_bytes`, from the shape of the shard
alone), and what the layout of the compiled program adds (tiles that are filled up).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from xla_dtensor.report.evidence import ROLES, Evidence, Held
from xla_dtensor.report.hlo_layout import (
    HOST_SPACE,
    LaidArray,
    entry_aliases,
    entry_layouts,
    laid_arrays,
)

__all__ = [
    "COPIES",
    "TABLE",
    "TABLE_OF_INPUTS",
    "UNNAMED",
    "EntryBytes",
    "MemoryPart",
    "memory_parts",
]

COPIES = "state not updated in place"
TABLE, TABLE_OF_INPUTS = "table of results", "table of inputs"
UNNAMED = "unnamed"


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """The arrays of one role on one device.

    Attributes:
        role: a role of the evidence; or "state not updated in place", which is there a second time
            as a result; "table of results", the addresses that the program gives back, and "table
            of inputs", those that it takes; "unnamed", what the program takes or gives and the
            evidence does not name.
        count: how many arrays.
        device_bytes: what their elements take.
        padding_bytes: what the memory layout adds. Negative where it packs elements of 4 bits.
        elsewhere_bytes: of both, what takes no memory of the device: it lies in the host's memory,
            or takes the place of an array of another role.
    """

    role: str
    count: int
    device_bytes: int
    padding_bytes: int = 0
    elsewhere_bytes: int = 0

    @property
    def memory_bytes(self) -> int:
        """What they take of the device's memory."""
        return self.device_bytes + self.padding_bytes - self.elsewhere_bytes


@dataclass(frozen=True)
class EntryBytes:
    """What goes in and out of the program, by its own layouts, in bytes of the device's memory.

    Attributes:
        inputs: the arrays by number.
        outputs: the results by number.
        aliased: the numbers of the results that take the place of inputs.
        is_tuple: whether the results come as a tuple, for which there is a table of addresses.
        is_tupled: whether the inputs do.
    """

    inputs: tuple[LaidArray, ...] = ()
    outputs: tuple[LaidArray, ...] = ()
    aliased: frozenset[int] = frozenset()
    is_tuple: bool = False
    is_tupled: bool = False

    @classmethod
    def of(cls, hlo_text: str) -> EntryBytes:
        """Reads the first line of a program.

        Args:
            hlo_text: the program.

        Returns:
            What it says; nothing at all if it has no layouts.
        """
        layouts = entry_layouts(hlo_text)
        if layouts is None:
            return cls()
        outputs = laid_arrays(layouts.result)
        aliased = frozenset(entry_aliases(hlo_text)) & set(range(len(outputs)))
        is_tuple = isinstance(layouts.result, tuple)
        return cls(layouts.inputs, outputs, aliased, is_tuple, layouts.is_tupled)

    @property
    def argument_bytes(self) -> int:
        """What the inputs take."""
        return sum(_device_bytes(one) for one in self.inputs)

    @property
    def result_bytes(self) -> int:
        """What the results take, without their table."""
        return sum(_device_bytes(one) for one in self.outputs)

    @property
    def aliased_bytes(self) -> int:
        """What those results take that take the place of inputs."""
        return sum(_device_bytes(self.outputs[number]) for number in self.aliased)

    def could_be_table(self, size: int) -> bool:
        """Whether so many bytes can be the table of the results' addresses.

        Args:
            size: bytes.

        Returns:
            True if each result has 4 or 8 bytes in it, filled up to at most 512.
        """
        return self.is_tuple and _are_addresses(len(self.outputs), size)

    def could_be_table_of_inputs(self, size: int) -> bool:
        """Whether so many bytes can be the table of the inputs' addresses: as `could_be_table`.

        Args:
            size: bytes.

        Returns:
            True if each input has 4 or 8 bytes in it.
        """
        return self.is_tupled and _are_addresses(len(self.inputs), size)


@dataclass
class _Sum:
    count: int = 0
    logical: int = 0
    physical: int = 0
    elsewhere: int = 0

    def part(self, role: str) -> MemoryPart:
        padding = self.physical - self.logical
        return MemoryPart(role, self.count, self.logical, padding, self.elsewhere)


@dataclass
class _Parts:
    entry: EntryBytes
    sums: dict[str, _Sum] = field(default_factory=dict[str, _Sum])

    def add(
        self, role: str, logical: int, array: LaidArray | None, elsewhere: bool = False
    ) -> None:
        found = self.sums.setdefault(role, _Sum())
        physical = logical if array is None else array.padded_bytes
        found.count += 1
        found.logical += logical
        found.physical += physical
        if elsewhere or (array is not None and array.space == HOST_SPACE):
            found.elsewhere += physical

    def add_held(self, one: Held) -> None:
        given = _at(self.entry.inputs, one.input)
        result = _at(self.entry.outputs, one.output)
        in_place = one.output in self.entry.aliased
        if one.input is not None or one.output is None:
            self.add(one.role, one.device_bytes, given)
            if one.output is not None and not in_place:
                self.add(COPIES, one.device_bytes, result)
        else:
            self.add(one.role, one.device_bytes, result, elsewhere=in_place)

    def add_unnamed(self, held: Iterable[Held]) -> None:
        held = tuple(held)
        inputs, outputs = {one.input for one in held}, {one.output for one in held}
        for number, array in enumerate(self.entry.inputs):
            if number not in inputs:
                self.add(UNNAMED, array.bytes, array)
        for number, array in enumerate(self.entry.outputs):
            if number not in outputs and number not in self.entry.aliased:
                self.add(UNNAMED, array.bytes, array)


def memory_parts(evidence: Evidence, entry: EntryBytes) -> tuple[MemoryPart, ...]:
    """Sums the arrays of a step by role.

    Args:
        evidence: the compiled step.
        entry: what its program's first line says.

    Returns:
        A part for each role that has arrays, in the order of the roles, then what has none. The
        sum of `device_bytes` of a role is that of its arrays' `device_bytes`, exactly.
    """
    parts = _Parts(entry)
    for one in evidence.held:
        parts.add_held(one)
    parts.add_unnamed(evidence.held)
    order = (*ROLES, COPIES, UNNAMED)
    return tuple(parts.sums[role].part(role) for role in order if role in parts.sums)


def _are_addresses(count: int, size: int) -> bool:
    return 4 * count <= size <= -(-8 * count // 512) * 512 and size % 4 == 0


def _device_bytes(array: LaidArray) -> int:
    return 0 if array.space == HOST_SPACE else array.padded_bytes


def _at(arrays: tuple[LaidArray, ...], number: int | None) -> LaidArray | None:
    return arrays[number] if number is not None and 0 <= number < len(arrays) else None
