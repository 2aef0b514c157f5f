"""What is done on the host before each run of a step's program."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from xla_dtensor.runtimes.host_work.generators import Place, address_of
from xla_dtensor.runtimes.host_work.steps import (
    Deliver,
    Draw,
    Memory,
    OtherwiseError,
    Restore,
    Run,
    Slot,
    Step,
    same_bytes,
)

__all__ = ["HostWork", "OtherwiseError", "Written", "needed"]


class Written:
    """The memory of host tensors as it was before it was written to."""

    def __init__(self) -> None:
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []

    def note(self, tensor: torch.Tensor) -> None:
        """Note all memory of which `tensor` shows some."""
        memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        self._before.append((memory, memory.clone()))

    def put_back(self) -> None:
        """Make it so again."""
        for memory, before in reversed(self._before):
            memory.copy_(before)


@dataclass
class HostWork:
    """A tape that is done.

    Args:
        steps: What is done again, in order.
        older: The tensors that are older than the tape, by slot.
        constants: Other tensors that the steps only read, and that are always the same.
        written: Of these, those whose memory the steps write to.
        generators: Those that the steps draw from, or set.
    """

    steps: Sequence[Step]
    older: Mapping[Slot, torch.Tensor]
    constants: Mapping[Slot, torch.Tensor]
    written: Sequence[torch.Tensor]
    generators: Sequence[torch.Generator]
    _seen: dict[Slot, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        delivers = any(isinstance(step, Deliver) for step in self.steps)
        self._always = bool(self.written or self.generators or delivers)
        if not self._always:
            self._remember()

    def _remember(self) -> None:
        self._seen = {slot: tensor.detach().clone() for slot, tensor in self.older.items()}

    def _is_as_seen(self) -> bool:
        return all(same_bytes(self.older[slot], seen) for slot, seen in self._seen.items())

    def redo(self) -> Run | None:
        """Do it again.

        Returns:
            What came of it; None where nothing can have changed since the last time.

        Raises:
            OtherwiseError: What the step has read came out otherwise. Nothing has been done then.
        """
        if not self._always and self._is_as_seen():
            return None
        run = Run({**self.older, **self.constants})
        written, before = Written(), [generator.get_state() for generator in self.generators]
        for tensor in self.written:
            written.note(tensor)
        for generator in self.generators:
            run.states.note(Place.beginning(generator), generator)
        try:
            with torch.no_grad():
                for step in self.steps:
                    step.redo(run)
        except BaseException:
            written.put_back()
            for generator, state in zip(self.generators, before, strict=True):
                generator.set_state(state)
            raise
        if not self._always:
            self._remember()
        return run


def needed(steps: Sequence[Step], memory_of: Mapping[Slot, Memory]) -> tuple[list[Step], set[Slot]]:
    """Return the steps that have to be done again: those that are kept, and what they need.

    A constant is not made again, unless a step needs it as it was before a later write.

    Returns:
        The steps in order; the slots of constants that they need, which are as they are.
    """
    remade: set[int] = set()
    while True:
        kept, slots, constants = _needed(steps, memory_of, remade)
        made_again = {id(memory_of[slot]) for slot in slots} - remade
        clashing = made_again & {id(memory_of[slot]) for slot in constants}
        if not clashing:
            return kept, constants
        remade |= clashing


def _needed(
    steps: Sequence[Step], memory_of: Mapping[Slot, Memory], remade: Container[int]
) -> tuple[list[Step], set[Slot], set[Slot]]:
    last_write = {id(memory): at for at, step in enumerate(steps) for memory in step.writes}
    slots: set[Slot] = set()
    memories: set[int] = set()
    constants: set[Slot] = set()
    kept: list[Step] = []
    for at, step in reversed(list(enumerate(steps))):
        is_needed = step.kept or not slots.isdisjoint(step.gives)
        if not is_needed and memories.isdisjoint(map(id, step.writes)):
            continue
        kept.append(step)
        for slot in step.needs:
            memory = memory_of[slot]
            is_done = memory.is_constant and last_write[id(memory)] < at
            if is_done and id(memory) not in remade:
                constants.add(slot)
            else:
                slots.add(slot)
                memories.add(id(memory))
    return kept[::-1], slots, constants


def drawn_from(steps: Sequence[Step]) -> list[torch.Generator]:
    """Return the generators of some steps, each once."""
    found = [step.generator for step in steps if isinstance(step, Draw | Restore)]
    return list({address_of(generator): generator for generator in found}.values())
