"""How the storages of a traced step travel into its program and out of it: alone, or as rows.

A slot is a tuple of storages' numbers: ``(4,)`` is an array, ``(0, 9, 18)`` a stack of three, layer
by layer. The packs of the trace (``lanes``) decide: storages that are a pack's constants, and
whose new values are a pack as well, are one slot, so that nothing is stacked or taken apart in the
program.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.core
import numpy as np
from jax.extend.core import Literal

from xla_dtensor.runtimes.jax.compile.layers.lanes import Packs, packs_of
from xla_dtensor.runtimes.jax.compile.layers.packed import PackedTrace, row_sharding, stack_sharding

__all__ = ["Holding", "Slot", "Slots", "program_of", "row_type", "slots_of", "stacked_types"]

Slot = tuple[int, ...]


@dataclass(frozen=True)
class Slots:
    """The slots of a program.

    Attributes:
        state: of the storages that are read and written.
        read: of those that are only read, numbered from 0 as well.
        lasting: of those that the step makes.
    """

    state: tuple[Slot, ...]
    read: tuple[Slot, ...]
    lasting: tuple[Slot, ...]


@dataclass
class Holding:
    """What the constants and results of a trace are.

    Attributes:
        places: for each constant its number among the state and what is read; None for one that is
            no storage's.
        sizes: how many arguments were written, results last, and storages are state: the ends of
            the trace's results, the last first.
        kinds: for each storage of the state and of what is read what all rows of a stack have in
            common; None for one that is to stay alone.
        shardings: how each of these lies.
    """

    places: Sequence[int | None]
    sizes: Sequence[int]
    kinds: Sequence[Hashable | None]
    shardings: Sequence[Any]
    _packs: tuple[Any, Packs] | None = field(default=None, init=False)

    def constants(self, jaxpr: Any) -> list[tuple[Any, int | None]]:
        """Pair the variables of the constants, a trace's first inputs, with their places."""
        return list(zip(jaxpr.invars[: len(self.places)], self.places, strict=True))

    def ends(self, flat: Sequence[Any]) -> list[Sequence[Any]]:
        """Divide the trace's results: the step's, state, what lasts, written arguments."""
        ends = np.cumsum([0, *self.sizes]).tolist()
        a, b, c = (len(flat) - end for end in ends[1:])
        return [flat[:c], flat[c:b], flat[b:a], flat[a:]]

    def packs(self, jaxpr: Any) -> Packs:
        """Return the packs of the trace; those of the trace asked for last are kept."""
        if self._packs is None or self._packs[0] is not jaxpr:
            self._packs = jaxpr, self._found_packs(jaxpr)
        return self._packs[1]

    def _found_packs(self, jaxpr: Any) -> Packs:
        kinds: dict[Any, Hashable] = {}
        often = {place for place, count in Counter(self.places).items() if count > 1}
        for variable, place in self.constants(jaxpr):
            if place is not None and place not in often and self.kinds[place] is not None:
                kinds[variable] = (str(variable.aval), self.kinds[place])
        return packs_of(jaxpr, kinds)


def slots_of(jaxpr: Any, holding: Holding) -> Slots:
    """Choose the slots of a traced step.

    Args:
        jaxpr: The trace; its constants are its first inputs.
        holding: What its constants and results are.
    """
    packs = holding.packs(jaxpr)
    num_state = holding.sizes[2]
    _, state_out, lasting_out, _ = holding.ends(jaxpr.outvars)
    place_of = {v: place for v, place in holding.constants(jaxpr) if place is not None}
    found: list[Slot] = []
    for pack in packs.used(jaxpr):
        if pack.origin != "const":
            continue
        slot = tuple(place_of[pack.rows[lane]] for lane in range(pack.num_lanes))
        is_state = slot[0] < num_state
        if is_state and packs.whole([state_out[place] for place in slot]) is None:
            continue
        found.append(slot)
    state = [slot for slot in found if slot[0] < num_state]
    read = [tuple(place - num_state for place in slot) for slot in found if slot not in state]
    num_read = len(holding.kinds) - num_state
    return Slots(
        _with_singles(state, num_state),
        _with_singles(read, num_read),
        _with_singles(_whole_packs(lasting_out, packs), len(lasting_out)),
    )


def _with_singles(slots: Sequence[Slot], count: int) -> tuple[Slot, ...]:
    taken = {place for slot in slots for place in slot}
    return tuple(sorted([*slots, *((place,) for place in range(count) if place not in taken)]))


def _whole_packs(variables: Sequence[Any], packs: Packs) -> list[Slot]:
    """Return the packs among variables of which each row stands there just once."""
    by_pack: dict[Any, dict[int, int]] = {}
    spoilt: set[Any] = set()
    for place, variable in enumerate(variables):
        if isinstance(variable, Literal) or variable not in packs.of:
            continue
        pack, lane, result = packs.of[variable]
        lanes = by_pack.setdefault((pack, result), {})
        if lane in lanes:
            spoilt.add((pack, result))
        lanes[lane] = place
    return [
        tuple(lanes[lane] for lane in range(key[0].num_lanes))
        for key, lanes in by_pack.items()
        if key not in spoilt and len(lanes) == key[0].num_lanes
    ]


def stacked_types(slots: Sequence[Slot], held: Sequence[Any]) -> list[Any]:
    """Return what a program is given for each slot: the array itself, or the type of a stack.

    Args:
        slots: The slots.
        held: The storages' arrays, or their types.
    """

    def of(slot: Slot) -> Any:
        first = held[slot[0]]
        if len(slot) == 1:
            return first
        shape, sharding = (len(slot), *first.shape), stack_sharding(first.sharding)
        return jax.ShapeDtypeStruct(shape, first.dtype, sharding=sharding)

    return [of(slot) for slot in slots]


def row_type(stack: Any) -> Any:
    """Return the type of a row of a stack; the other way round than `stacked_types`."""
    sharding = row_sharding(stack.sharding)
    return jax.ShapeDtypeStruct(stack.shape[1:], stack.dtype, sharding=sharding)


def program_of(jaxpr: Any, *, holding: Holding, slots: Slots) -> Callable[..., Any]:
    """Return the function that XLA compiles.

    Args:
        jaxpr: The trace; its constants are its first inputs.
        holding: What its constants and results are.
        slots: How storages travel.
    """
    packs = holding.packs(jaxpr)
    num_state = holding.sizes[2]

    def program(state_in: Any, read_in: Any, constants_in: Any, arguments_in: Any) -> Any:
        singles: dict[int, Any] = {}
        stacks: list[tuple[Slot, Any]] = []
        of_read = (tuple(place + num_state for place in slot) for slot in slots.read)
        for slot, array in zip((*slots.state, *of_read), (*state_in, *read_in), strict=True):
            if len(slot) == 1:
                singles[slot[0]] = array
            else:
                stacks.append((slot, array))
        rest = iter(constants_in)
        if not packs.of:
            consts = [next(rest) if p is None else singles[p] for p in holding.places]
            flat = jax.core.eval_jaxpr(jaxpr, (), *consts, *arguments_in)
            return tuple(map(list, holding.ends(flat)))
        constants = holding.constants(jaxpr)
        variable_of = {place: variable for variable, place in constants}
        known = dict(zip(jaxpr.invars[len(constants) :], arguments_in, strict=True))
        for variable, place in constants:
            if place is None:
                known[variable] = next(rest)
            elif place in singles:
                known[variable] = singles[place]
        lying = {v: holding.shardings[place] for v, place in constants if place is not None}
        of_stacks = [([variable_of[p] for p in slot], array) for slot, array in stacks]
        trace = PackedTrace(jaxpr, packs, known, of_stacks, lying)
        results, state, lasting, written = holding.ends(jaxpr.outvars)

        def out(variables: Sequence[Any], slots: Sequence[Slot]) -> list[Any]:
            return [
                trace.value(variables[slot[0]])
                if len(slot) == 1
                else trace.stack([variables[place] for place in slot])
                for slot in slots
            ]

        return (
            [trace.value(v) for v in results],
            out(state, slots.state),
            out(lasting, slots.lasting),
            [trace.value(v) for v in written],
        )

    return program
