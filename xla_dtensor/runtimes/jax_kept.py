"""The programs that a compiled step keeps, and whether the next call finds what the last one left.

Programs are kept under what a call is given, and under which leaves have gradients. Under one key
there may be several, such as one for training and one for evaluation; the newest comes first.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch

from xla_dtensor.runtimes.jax_calls import Call, Key
from xla_dtensor.runtimes.jax_gradients import KnownLeaves
from xla_dtensor.runtimes.jax_program import Program
from xla_dtensor.runtimes.jax_step_values import inner
from xla_dtensor.runtimes.jax_tensor import Storage

__all__ = ["KeptPrograms"]

_PROGRAMS_PER_KEY = 4
_MOST_KEYS = 1024


class KeptPrograms:
    """See the module docstring."""

    def __init__(self) -> None:
        self._programs: dict[tuple[Key, frozenset[int]], list[Program]] = {}
        self._leaves = KnownLeaves()
        self._made: weakref.WeakSet[Storage] = weakref.WeakSet()

    @property
    def made(self) -> weakref.WeakSet[Storage]:
        """The storages that the programs' traces made, and that are still there."""
        return self._made

    def under(self, key: Key) -> Sequence[Program]:
        """Return the programs that may fit a call."""
        return self._programs.get((key, self._leaves.having()), ())

    def why_none(self, call: Call, key: Key) -> str:
        """Return why there is no program under a key."""
        others = [other for other, _ in self._programs]
        if not others:
            return "first call"
        if key in others:
            return "gradients are there that were not, or the other way round"
        return call.difference(key, others[-1])

    def place(
        self, key: Key, program: Program, before: Sequence[tuple[torch.Tensor, Any]]
    ) -> tuple[Key, frozenset[int]]:
        """Return what a new program is to be kept under.

        Args:
            key: What its call was given.
            program: The program.
            before: Every leaf, with the gradient that it had before the trace.
        """
        self._leaves.add(program.gradients)
        return key, self._leaves.had(before)

    def add(
        self, place: tuple[Key, frozenset[int]], program: Program, named: Collection[int]
    ) -> None:
        """Keep a new program, when nothing but the step holds what the trace has made.

        Args:
            place: What it is to be kept under.
            program: The program.
            named: The ids of what the trace assigned to names that premises look after.
        """
        kept = self._programs.setdefault(place, [])
        made = [each for each in (reference() for reference in program.lasting) if each is not None]
        if self._makes_new_state(program, kept[0] if kept else None, made, named):
            program.again = "the call before made new state"
        self._made.update(made)
        kept.insert(0, program)

    def let_go(self, newest: Program) -> None:
        """Let go of programs that no call fits any more, and of those that nobody has used."""
        for kept in self._programs.values():
            changes = ((each, None if each is newest else each.stale()) for each in kept)
            fitting = [each for each, change in changes if change is None or not change.for_good]
            kept[:] = fitting[:_PROGRAMS_PER_KEY]
        used = {key: max(p.last_call for p in kept) for key, kept in self._programs.items() if kept}
        latest = sorted(used, key=used.__getitem__)[-_MOST_KEYS:]
        self._programs = {key: self._programs[key] for key in latest}

    def executables(self) -> Iterator[Any]:
        """Yield what the programs run."""
        return (program.executable for kept in self._programs.values() for program in kept)

    def _makes_new_state(
        self,
        program: Program,
        previous: Program | None,
        made: Sequence[Storage],
        named: Collection[int],
    ) -> bool:
        """Tell whether the next call finds state that this trace did not find.

        It does when the trace made tensors that last, an optimizer's moments, say. It does not when
        they take the place of those that the trace before made: gradients, or a cache that the step
        makes anew each time; nor where the step reads nothing that an earlier call has made.
        """
        grads = program.gradients.storages()
        made = [each for each in made if id(each) not in grads and id(each) not in named]
        if previous is None or not made:
            return bool(made)
        moments = map(inner, program.watch.inputs.moments())
        of_optimizers = {id(each._storage) for each in moments if each is not None}
        if any(id(storage) in of_optimizers for storage in made):
            return True
        if not any(storage in self._made for storage in program.read):
            return False
        gc.collect()
        return len(made) != sum(reference() is None for reference in previous.lasting)
