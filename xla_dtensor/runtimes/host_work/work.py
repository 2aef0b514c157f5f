"""What is done on the host before each run of a step's program."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from xla_dtensor.runtimes.host_work.generators import Place, address_of
from xla_dtensor.runtimes.host_work.steps import (
    Alias,
    Answer,
    Call,
    Deliver,
    Draw,
    Memory,
    OtherwiseError,
    ReadSeed,
    ReadState,
    Restore,
    Run,
    Seed,
    SetState,
    Slot,
    Step,
    Take,
    same_bytes,
    storage_of,
)

__all__ = ["HostWork", "OtherwiseError", "Written", "needed"]


class Written:
    """The memory of host tensors as it was before it was written to."""

    def __init__(self) -> None:
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []

    def note(self, tensor: torch.Tensor) -> None:
        """Note all memory of which `tensor` shows some."""
        memory = torch.empty(0, dtype=torch.uint8).set_(storage_of(tensor))
        self._before.append((memory, memory.clone()))

    def put_back(self) -> None:
        """Make it so again."""
        for memory, snapshot in reversed(self._before):
            memory.copy_(snapshot)


@dataclass
class HostWork:
    """A tape that is done.

    Args:
        steps: What is done again, in order.
        older: The tensors that are older than the tape, by slot.
        constants: Other tensors that the steps only read, and that are always the same.
        written: Of these, those whose memory the steps write to.
        generators: Those that the steps draw from, or set.

    Attributes:
        may_be_taken_back: Whether `take_back` may be asked for; what it needs is kept then.
    """

    steps: Sequence[Step]
    older: Mapping[Slot, torch.Tensor]
    constants: Mapping[Slot, torch.Tensor]
    written: Sequence[torch.Tensor]
    generators: Sequence[torch.Generator]
    _seen: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    may_be_taken_back: bool = False
    _put_back: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        delivers = any(isinstance(step, Deliver) for step in self.steps)
        numbers = any(isinstance(step, Call) and step.has_numbers for step in self.steps)
        self._always = bool(self.written or self.generators or delivers or numbers)
        # Where nothing that is read can come out otherwise, there is nothing to be taken back.
        self._may_fail = any(_may_fail(step) for step in self.steps)
        if not self._always:
            self._remember()

    def _read(self) -> list[torch.Tensor]:
        """Return the tensors that are older, and others over their memory that the steps read."""
        run = Run({**self.older, **self.constants})
        for step in self.steps:
            if isinstance(step, Alias) and step.needs[0] in self.older:
                step.redo(run)
        return [tensor for slot, tensor in run.env.items() if slot not in self.constants]

    def _remember(self) -> None:
        self._seen = [(tensor, tensor.detach().clone()) for tensor in self._read()]

    def rebind(self, slot: Slot, tensor: torch.Tensor) -> None:
        """Let another tensor stand for one that is older than the tape, which is only read."""
        if self.older.get(slot, tensor) is not tensor:
            self.older = {**self.older, slot: tensor}
            self._seen = []

    def _is_as_seen(self) -> bool:
        return bool(self._seen) and all(same_bytes(*pair) for pair in self._seen)

    def redo(self) -> Run | None:
        """Do it again.

        Returns:
            What came of it; None where nothing can have changed since the last time.

        Raises:
            OtherwiseError: What the step has read came out otherwise. Nothing has been done then.
        """
        self._put_back = None
        if not self._always and self._is_as_seen():
            return None
        run = self._run(is_for_good=True)
        if not self._always:
            self._remember()
        return run

    def take_back(self) -> None:
        """Make memory and generators what they were before the last `redo`."""
        if self._put_back is not None:
            self._put_back()

    def otherwise(self) -> str | None:
        """Return what would come out otherwise if it were done again now; nothing is done."""
        if not self._always and self._is_as_seen():
            return None
        try:
            self._run(is_for_good=False)
        except OtherwiseError as otherwise:
            return str(otherwise)
        return None

    def _run(self, is_for_good: bool) -> Run:
        run = Run({**self.older, **self.constants})
        written, states = Written(), [generator.get_state() for generator in self.generators]
        is_noted = self._may_fail or self.may_be_taken_back or not is_for_good
        for tensor in self.written if is_noted else ():
            written.note(tensor)

        def put_back() -> None:
            written.put_back()
            for generator, state in zip(self.generators, states, strict=True):
                generator.set_state(state)

        for generator in self.generators:
            run.states.note(Place.beginning(generator), generator)
        stays = False
        try:
            # As when they were written down: some kernels return less where no gradient is wanted.
            with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():
                for step in self.steps:
                    step.redo(run)
            stays = is_for_good
        finally:
            if not stays:
                put_back()
        self._put_back = put_back if self.may_be_taken_back else None
        return run


def _may_fail(step: Step) -> bool:
    if isinstance(step, Answer | ReadSeed | Take):
        return True
    return isinstance(step, Call) and (bool(step.found) or step.shapes is not None)


def needed(steps: Sequence[Step], memory_of: Mapping[Slot, Memory]) -> tuple[list[Step], set[Slot]]:
    """Return the steps that have to be done again: those that are kept, and what they need.

    A constant is not made again, unless a step needs it as it was before a later write.

    Returns:
        The steps in order; the slots of constants that they need, which are as they are.
    """
    remade: set[int] = set()
    while True:
        needed_steps, slots, constants = _needed(steps, memory_of, remade)
        made_again = {id(memory_of[slot]) for slot in slots} - remade
        clashing = made_again & {id(memory_of[slot]) for slot in constants}
        if not clashing:
            return needed_steps, constants
        remade |= clashing


def _needed(
    steps: Sequence[Step], memory_of: Mapping[Slot, Memory], remade: Container[int]
) -> tuple[list[Step], set[Slot], set[Slot]]:
    last_write = {id(memory): at for at, step in enumerate(steps) for memory in step.writes}
    slots: set[Slot] = set()
    memories: set[int] = set()
    constants: set[Slot] = set()
    needed_steps: list[Step] = []
    for at, step in reversed(list(enumerate(steps))):
        is_needed = step.kept or not slots.isdisjoint(step.gives)
        if not is_needed and memories.isdisjoint(map(id, step.writes)):
            continue
        needed_steps.append(step)
        for slot in step.needs:
            memory = memory_of[slot]
            is_done = memory.is_constant and last_write[id(memory)] < at
            if is_done and id(memory) not in remade:
                constants.add(slot)
            else:
                slots.add(slot)
                memories.add(id(memory))
    return needed_steps[::-1], slots, constants


def drawn_from(steps: Sequence[Step]) -> list[torch.Generator]:
    """Return the generators of some steps, each once."""
    generators = [step.generator for step in steps if isinstance(step, Draw | Restore)]
    if any(isinstance(step, Seed | SetState | ReadState | ReadSeed) for step in steps):
        generators.append(torch.default_generator)
    return list({address_of(generator): generator for generator in generators}.values())
