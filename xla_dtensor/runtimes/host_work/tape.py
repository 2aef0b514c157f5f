"""Writing the tape: every op on plain CPU tensors while a step is traced, as it is done.

A tensor that no op on the tape has made is *older* than the tape, or was made where no op is seen:
of Python's numbers, or inside of an op on the mesh. What is older was there when the trace began;
memory that came from NumPy counts as older too, as NumPy may have written to it since.

Invariant: a slot's memory varies exactly if doing the tape again, after older tensors have changed
or generators have moved on, can give it other values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from xla_dtensor.runtimes.host_work.generators import Places, Unmarked, generator_of, is_default
from xla_dtensor.runtimes.host_work.steps import (
    Alias,
    Answer,
    Call,
    Deliver,
    Draw,
    Fresh,
    Memory,
    ReadSeed,
    ReadState,
    Restore,
    Seed,
    SetState,
    Slot,
    Step,
    Take,
    storage_of,
)
from xla_dtensor.runtimes.host_work.work import HostWork, Written, drawn_from, needed
from xla_dtensor.runtimes.nested import leaves, map_nested
from xla_dtensor.runtimes.same_program import user_frame
from xla_dtensor.runtimes.scalars import as_now, stands_for

__all__ = ["DRAWS", "HostTape", "TraceAgainError", "is_host", "memory_key"]

DRAWS = torch.Tag.nondeterministic_seeded
_OPEN_SHAPES = torch.Tag.dynamic_output_shape
_lift = torch.ops.aten.lift_fresh.default
_efficient_zeros = torch.ops.aten._efficientzerotensor.default
_zeros = torch.ops.aten.zeros.default
_as_number = torch.ops.aten._local_scalar_dense.default
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class TraceAgainError(Exception):
    """What a trace has found calls for another one, which knows it from the start."""


def is_host(value: Any) -> bool:
    """Tell whether a value is an ordinary CPU tensor, and stands for nothing else."""
    return type(value) in _PLAIN and value.device.type == "cpu" and value.layout == torch.strided


def memory_key(tensor: torch.Tensor) -> int:
    """Return what tells a tensor's memory from any other that lives."""
    return storage_of(tensor)._cdata


class HostTape:
    """What a step computes on the host, while it is traced.

    Args:
        older: The memories, by `memory_key`, that there were when the trace began.

    Attributes:
        put: What puts on the mesh what a line of the program (its file and number) makes.
        missed: The same for lines that turned out meanwhile to make what is to lie there.
    """

    def __init__(self, older: Container[int] = ()) -> None:
        self._older = older
        self.put: Mapping[tuple[str, int], Callable[[torch.Tensor], torch.Tensor]] = {}
        self.missed: dict[tuple[str, int], Callable[[torch.Tensor], torch.Tensor]] = {}
        self._stale: set[int] = set()  # memories with values that this trace does not compute
        self._lines: dict[int, tuple[str, int]] = {}  # that made memories, by `memory_key`
        self.made_generators: set[int] = set()  # the addresses of those that the step makes
        self._places = Places(self.made_generators)
        self._first_state = torch.default_generator.get_state()
        self._unmarked = Unmarked()
        self._steps: list[Step] = []
        self._tensors: list[torch.Tensor] = []  # by slot; they keep their ids
        self._slots: dict[int, Slot] = {}
        self._memories: dict[int, Memory] = {}
        self._memory_of: dict[Slot, Memory] = {}
        self._taken: dict[tuple[Slot, int], int] = {}
        self._delivered: list[torch.Tensor] = []
        self._written = Written()

    # ------------------------------------------------------------------ ops

    def call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an op on plain tensors, and write it down if it is one of the host's.

        Args:
            func: The ``OpOverload``.
            args: Its arguments.
            kwargs: Its keyword arguments.

        Returns:
            What the op returns.
        """
        if func is _efficient_zeros:  # Whatever is multiplied with them is zero, infinity too.
            return func(*args, **kwargs)
        args, kwargs = map_nested(self._with_memory, (tuple(args), dict(kwargs)))
        arguments, (args, kwargs) = (args, kwargs), map_nested(as_now, (args, kwargs))
        tensors = [v for v in leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
        if not isinstance(func, torch._ops.OpOverload) or not all(map(is_host, tensors)):
            return func(*args, **kwargs)
        is_stale = self._stale and not self._stale.isdisjoint(map(memory_key, tensors))
        if is_stale and func is _as_number:  # A loop that waits for it would never end.
            raise TraceAgainError("reads a number that it writes on the mesh")
        if func is _lift:
            return self._lies(self._lifted(func(*args, **kwargs)))
        arguments = map_nested(self._as_slot, arguments)
        needs = tuple(v for v in leaves(arguments) if isinstance(v, Slot))
        targets = [self._memory_of[slot] for slot in self._targets(func, arguments)]
        for memory in targets:
            if memory.older and not memory.writes:
                self._written.note(self._tensors[memory.slot])
        if DRAWS in func.tags:
            output = self._draw(func, args, kwargs, (arguments, needs, targets))
        else:
            output = self._noted(func, func(*args, **kwargs), (arguments, needs, targets))
        if is_stale:
            self._stale.update(map(memory_key, filter(is_host, leaves(output))))
        return output if targets or not isinstance(output, torch.Tensor) else self._lies(output)

    def _lies(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what an op has made: on the mesh, where what its line makes is to lie there."""
        memory = self._memories.get(memory_key(tensor)) if is_host(tensor) else None
        if memory is None or memory.older or memory.slot != self._slots.get(id(tensor)):
            return tensor  # It is no new memory, or somebody else's too.
        frame = user_frame()
        if frame is None:
            return tensor
        line = self._lines[memory_key(tensor)] = frame.f_code.co_filename, frame.f_lineno
        return self.put[line](tensor) if line in self.put else tensor

    def note(self, tensor: torch.Tensor, put: Callable[[torch.Tensor], torch.Tensor]) -> bool:
        """Note that a plain tensor is to lie on the mesh; tell whether a line here has made it.

        Args:
            tensor: The tensor.
            put: What puts it there.
        """
        key = memory_key(tensor) if is_host(tensor) else None
        line = None if key is None else self._lines.get(key)
        if key is None or line is None or line in self.put:
            return False
        self.missed[line] = put
        self._stale.add(key)
        return True

    def _draw(self, func: Any, args: Any, kwargs: Any, accesses: Any) -> Any:
        generator = generator_of(kwargs, args)
        self._follow(generator)
        with self._unmarked.drawing() if is_default(generator) else contextlib.nullcontext():
            output = func(*args, **kwargs)
        number = self._places.drawn(generator)
        return self._noted(func, output, accesses, generator=generator, number=number)

    def _follow(self, generator: torch.Generator) -> None:
        place = self._places.set_from(generator)
        if place is not None:
            self._steps.append(Restore((), kept=True, generator=generator, place=place))

    def _noted(self, func: Any, output: Any, accesses: Any, **drawn: Any) -> Any:
        arguments, needs, targets = accesses
        values = list(leaves(output))
        tensors = [leaf for leaf in values if isinstance(leaf, torch.Tensor)]
        if not all(map(is_host, tensors)):
            return output
        varies = bool(drawn) or any(self._memory_of[slot].varies for slot in needs)
        varies |= any(map(stands_for, leaves(arguments)))
        gives = tuple(self._given_slot(tensor, varies) for tensor in tensors)
        for memory in targets:
            memory.writes += 1
            memory.varies |= varies
        non_tensors = tuple(leaf for leaf in values if not isinstance(leaf, torch.Tensor))
        read = varies and any(leaf is not None for leaf in non_tensors)
        self._steps.append(
            (Draw if drawn else Call)(
                needs,
                gives,
                (*targets, *(self._memory_of[slot] for slot in gives)),
                bool(drawn) or read or any(memory.older for memory in targets),
                func=func,
                given=arguments,
                found=non_tensors if read else (),
                shapes=tuple(t.shape for t in tensors) if _OPEN_SHAPES in func.tags else None,
                **drawn,
            )
        )
        if varies and _OPEN_SHAPES in func.tags:
            self._steps[-1].kept = True  # Python may have asked for the shape.
        return output

    def _targets(self, func: Any, arguments: Any) -> list[Slot]:
        """Return the slots that an op writes to."""
        if not func._schema.is_mutable:
            return []
        args, kwargs = arguments
        slots: list[Slot] = []
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            operand = args[position] if position < len(args) else kwargs.get(argument.name)
            slots += [v for v in leaves(operand) if isinstance(v, Slot)]
        return slots

    # ------------------------------------------------------------------ tensors

    def _with_memory(self, leaf: Any) -> Any:
        """Return a value; zeros without memory as ordinary ones, which ops can read."""
        if not isinstance(leaf, torch.Tensor) or not leaf._is_zerotensor():
            return leaf
        return self.call(_zeros, (leaf.shape,), {"dtype": leaf.dtype})

    def _as_slot(self, leaf: Any) -> Any:
        return self._slot(leaf) if isinstance(leaf, torch.Tensor) else leaf

    def _slot(self, tensor: torch.Tensor, is_new: bool = False) -> Slot:
        """Return the slot of a tensor; one that the tape does not know is taken up."""
        old_slot = self._slots.get(id(tensor))
        if old_slot is not None:
            return old_slot
        key = memory_key(tensor)
        memory = self._memories.get(key)
        slot = self._new_slot(tensor)
        if memory is None:
            # Memory that torch does not own is NumPy's, which may write to it.
            is_numpys = not storage_of(tensor).resizable()
            older = is_numpys or (key in self._older and not is_new)
            self._memories[key] = self._memory_of[slot] = Memory(slot, older, older)
            if not older:
                self._steps.append(_fresh(tensor, slot, self._memory_of[slot]))
            return slot
        self._memory_of[slot] = memory
        offset = int(tensor.storage_offset())
        like = (tuple(tensor.shape), tensor.stride(), offset, tensor.dtype)
        bits = (tensor.is_conj(), tensor.is_neg())
        self._steps.append(Alias((memory.slot,), (slot,), like=like, bits=bits))
        return slot

    def _new_slot(self, tensor: torch.Tensor) -> Slot:
        slot = Slot(len(self._tensors))
        self._tensors.append(tensor)
        self._slots[id(tensor)] = slot
        return slot

    def _given_slot(self, tensor: torch.Tensor, varies: bool) -> Slot:
        """Return the slot of what an op has returned."""
        old_slot = self._slots.get(id(tensor))
        if old_slot is not None:
            return old_slot
        slot = self._new_slot(tensor)
        new_memory = Memory(slot, older=False, varies=varies)
        self._memory_of[slot] = self._memories.setdefault(memory_key(tensor), new_memory)
        return slot

    def _lifted(self, tensor: torch.Tensor) -> torch.Tensor:
        """Take up what Python has just made: of numbers, or over NumPy's memory."""
        if is_host(tensor):
            self._slot(tensor, is_new=True)
        return tensor

    # ------------------------------------------------------------------ what leaves the host

    def writes_to_older(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Tell whether an op writes to plain tensors that are older than the tape."""
        if not isinstance(func, torch._ops.OpOverload) or not func._schema.is_mutable:
            return False
        arguments = map_nested(
            lambda v: self._slot(v) if is_host(v) else v, (tuple(args), dict(kwargs))
        )
        return any(self._memory_of[slot].older for slot in self._targets(func, arguments))

    def reads(self, tensor: torch.Tensor) -> bool:
        """Tell whether a plain tensor that is older than the tape was used."""
        return id(tensor) in self._slots or memory_key(tensor) in self._memories

    def only_slot(self, tensor: torch.Tensor) -> Slot | None:
        """Return the slot of an older tensor that is read only, and its memory by it alone."""
        slot = self._slots.get(id(tensor))
        memory = None if slot is None else self._memory_of[slot]
        if memory is None or not memory.older or memory.writes or memory.slot != slot:
            return None
        aliases = (s for s in self._steps if isinstance(s, Alias) and s.needs[0] == slot)
        return None if any(True for _ in aliases) else slot

    def shares(self, array: np.ndarray[Any, Any]) -> bool:
        """Tell whether a tensor that is older than the tape lies in a NumPy array's memory."""
        begin, end = np.lib.array_utils.byte_bounds(array)
        firsts = (self._tensors[m.slot] for m in self._memories.values() if m.older)
        return any(begin <= storage_of(tensor).data_ptr() < end for tensor in firsts)

    def varies(self, tensor: torch.Tensor) -> bool:
        """Tell whether a plain tensor can have other values on the next call."""
        return is_host(tensor) and self._memory_of[self._slot(tensor)].varies

    def take(self, tensor: torch.Tensor) -> int | None:
        """Note that a tensor goes into the program.

        Returns:
            The number of the input; None for a constant.
        """
        if not self.varies(tensor):
            return None
        slot = self._slots[id(tensor)]
        key = (slot, self._memory_of[slot].writes)
        if key not in self._taken:
            number = self._taken[key] = len(self._taken)
            like = (tensor.shape, tensor.dtype)
            self._steps.append(Take((slot,), kept=True, number=number, like=like))
        return self._taken[key]

    def deliver(self, tensor: torch.Tensor) -> int | None:
        """Note that the step returns a tensor.

        Returns:
            The number of the result; None where it is the same tensor on every call.
        """
        if not is_host(tensor) or self._memory_of[self._slot(tensor)].older:
            return None
        number = len(self._delivered)
        self._delivered.append(tensor)
        slot = self._slots[id(tensor)]
        is_copy = not self._memory_of[slot].varies
        self._steps.append(Deliver((slot,), kept=True, number=number, is_copy=is_copy))
        return number

    def note_read(self, tensor: torch.Tensor) -> None:
        """Note that Python has read all values of a plain tensor."""
        if self.varies(tensor):
            snapshot = tensor.detach().clone()
            self._steps.append(Answer((self._slots[id(tensor)],), kept=True, value=snapshot))

    # ------------------------------------------------------------------ generators

    def mark(self) -> int:
        """Draw a number from torch's own generator that is none of the host's draws."""
        return self._unmarked.mark()

    def note_generator(self, generator: torch.Generator) -> None:
        """Follow a generator that is older than the tape, from before the step uses it."""
        self._places.note(generator)

    def seeded(self, seed: int | None) -> None:
        """Note that torch's own generator was seeded; None: anew, with whatever there is."""
        self._steps.append(Seed((), kept=True, seed=seed))

    def state_was_read(self, state: torch.Tensor) -> None:
        """Note that somebody has asked for the state of torch's own generator."""
        slot = self._new_slot(state)
        memory = Memory(slot, older=False, varies=True)
        self._memories[memory_key(state)] = self._memory_of[slot] = memory
        self._steps.append(ReadState((), (slot,), (memory,)))

    def state_is_set(self, state: torch.Tensor) -> None:
        """Note that torch's own generator is given a state."""
        self._steps.append(SetState((self._slot(state),), kept=True))

    def seed_was_read(self, seed: int) -> None:
        """Note that somebody has asked for the seed of torch's own generator."""
        self._steps.append(ReadSeed((), kept=True, seed=seed))

    # ------------------------------------------------------------------ the end

    def finish(self) -> tuple[HostWork | None, list[torch.Tensor]]:
        """End the tape.

        Returns:
            What is done again before each run, None if nothing is; and what was delivered.
        """
        for generator in self._places.generators:
            self._follow(generator)
        torch.default_generator.set_state(self._unmarked.state())
        steps, constants = needed(self._steps, self._memory_of)
        needs = {slot for step in steps for slot in step.needs}
        firsts = (memory.slot for memory in self._memories.values() if memory.older)
        older = {slot: self._tensors[slot] for slot in firsts if slot in needs}
        memories = {id(m): m for step in steps for m in step.writes if m.older}
        written = [self._tensors[memory.slot] for memory in memories.values()]
        if not steps:
            return None, self._delivered
        # Copies: who was given a constant may write to it.
        same = {slot: self._tensors[slot].detach().clone() for slot in constants}
        return HostWork(steps, older, same, written, drawn_from(steps)), self._delivered

    def put_back(self) -> None:
        """Make host tensors and generators what they were before the tape."""
        self._written.put_back()
        self._places.put_back()
        torch.default_generator.set_state(self._first_state)


def _fresh(tensor: torch.Tensor, slot: Slot, memory: Memory) -> Step:
    return Fresh((), (slot,), (memory,), value=tensor.detach().clone())
