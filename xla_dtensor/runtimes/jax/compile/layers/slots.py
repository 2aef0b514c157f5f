"""How the storages of a traced step travel into its program and out of it: alone, or as rows.

A slot is a tuple of storages' numbers: ``(4,)`` is an array, ``(0, 9, 18)`` a stack of three, layer
by layer. What a trace does with its constants and results decides (``rows``)::

    trace                                           program
    s = stack_layers w0 w1 w2                       is given s
    t = add s g                                     t = add s g
    v0 v1 v2 = unstack_layers t, the new w0 w1 w2   returns t

Storages that are stacked and get the rows of a stack are one slot, so that nothing is stacked or
taken apart in the program.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import Literal

from xla_dtensor.runtimes.jax.arrays.private import frames_of_equation
from xla_dtensor.runtimes.jax.compile.layers.layer_stacks import (
    pinned_rows,
    row_sharding,
    stack_p,
    stack_sharding,
    unstack_p,
)
from xla_dtensor.runtimes.jax.eager.checks import is_flagged

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
        donated: the places of the arguments whose memory the program takes over, for what it writes
            to them. They are its last input.
        written: the places of the arguments that were written.
        num_flags: how many of the step's results, the first, are flags of its checks.
    """

    places: Sequence[int | None]
    sizes: Sequence[int]
    kinds: Sequence[Hashable | None]
    shardings: Sequence[Any]
    donated: Sequence[int] = ()
    written: Sequence[int] = ()
    num_flags: int = 0

    def constants(self, jaxpr: Any) -> list[tuple[Any, int | None]]:
        """Pair the variables of the constants, a trace's first inputs, with their places."""
        return list(zip(jaxpr.invars[: len(self.places)], self.places, strict=True))

    def ends(self, flat: Sequence[Any]) -> list[Sequence[Any]]:
        """Divide the trace's results: the step's, state, what lasts, written arguments."""
        ends = np.cumsum([0, *self.sizes]).tolist()
        a, b, c = (len(flat) - end for end in ends[1:])
        return [flat[:c], flat[c:b], flat[b:a], flat[a:]]

    def divided(self, arguments: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Divide what belongs to the arguments: those that stay the caller's, those donated."""
        stay = [argument for place, argument in enumerate(arguments) if place not in self.donated]
        return stay, [arguments[place] for place in self.donated]


def slots_of(jaxpr: Any, holding: Holding) -> Slots:
    """Choose the slots of a traced step.

    Args:
        jaxpr: The trace; its constants are its first inputs.
        holding: What its constants and results are.
    """
    num_state = holding.sizes[2]
    results = _Rows(jaxpr)
    _, state_out, lasting_out, _ = holding.ends(jaxpr.outvars)
    state: list[Slot] = []
    read: list[Slot] = []
    for slot in _stacked(jaxpr, holding):
        if slot[0] >= num_state:
            read.append(tuple(place - num_state for place in slot))
        elif results.stack([state_out[place] for place in slot]) is not None:
            state.append(slot)
    lasting = [slot for slot in results.all_of(lasting_out) if len(slot) > 1]
    num_read = len(holding.kinds) - num_state
    return Slots(
        _with_singles(state, num_state),
        _with_singles(read, num_read),
        _with_singles(lasting, len(lasting_out)),
    )


def _stacked(jaxpr: Any, holding: Holding) -> Iterator[Slot]:
    """Yield the places of storages of one kind that the trace stacks, each place once."""
    often = Counter(holding.places)
    place_of = {
        variable: place
        for variable, place in holding.constants(jaxpr)
        if place is not None and often[place] == 1 and holding.kinds[place] is not None
    }
    places: set[int] = set()
    for equation in jaxpr.eqns:
        if equation.primitive is not stack_p or len(equation.invars) < 2:
            continue
        operand_places = [
            None if isinstance(v, Literal) else place_of.get(v) for v in equation.invars
        ]
        slot = tuple(place for place in operand_places if place is not None)
        kinds = {holding.kinds[place] for place in slot}
        is_new = len(set(slot)) == len(slot) and places.isdisjoint(slot)
        if len(slot) == len(operand_places) and len(kinds) == 1 and is_new:
            places.update(slot)
            yield slot


class _Rows:
    """Which variables of a trace are the rows of a stack."""

    def __init__(self, jaxpr: Any) -> None:
        self._of = {
            variable: (equation.invars[0], lane, len(equation.outvars))
            for equation in jaxpr.eqns
            if equation.primitive is unstack_p
            for lane, variable in enumerate(equation.outvars)
        }

    def stack(self, variables: Sequence[Any]) -> Any | None:
        """Return the stack whose rows these are, all of them and in this order; None for none."""
        origins = [None if isinstance(v, Literal) else self._of.get(v) for v in variables]
        if origins[0] is None or origins[0][2] != len(origins):
            return None
        stack = origins[0][0]
        is_whole = all(origin == (stack, lane, len(origins)) for lane, origin in enumerate(origins))
        return stack if is_whole else None

    def all_of(self, variables: Sequence[Any]) -> list[Slot]:
        """Return where whole stacks' rows stand among variables, each of them once."""
        places: dict[Any, list[int]] = {}
        for place, variable in enumerate(variables):
            if not isinstance(variable, Literal) and variable in self._of:
                places.setdefault(self._of[variable][0], []).append(place)
        slots = [
            tuple(sorted(of_stack, key=lambda place: self._of[variables[place]][1]))
            for of_stack in places.values()
        ]
        return [slot for slot in slots if self.stack([variables[p] for p in slot]) is not None]


def _with_singles(slots: Sequence[Slot], count: int) -> tuple[Slot, ...]:
    places = {place for slot in slots for place in slot}
    return tuple(sorted([*slots, *((place,) for place in range(count) if place not in places)]))


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
    num_state = holding.sizes[2]
    rows = _Rows(jaxpr)
    slots_in = (*slots.state, *(tuple(p + num_state for p in slot) for slot in slots.read))

    def program(
        state_in: Any, read_in: Any, constants_in: Any, arguments_in: Any, donated_in: Any
    ) -> Any:
        constants = holding.constants(jaxpr)
        arrays = iter(constants_in)
        values = {variable: next(arrays) for variable, place in constants if place is None}
        stay, donated = holding.divided(jaxpr.invars[len(constants) :])
        values |= zip(stay, arguments_in, strict=True)
        values |= zip(donated, donated_in, strict=True)
        variables_of: dict[int, list[Any]] = defaultdict(list)
        for variable, place in constants:
            if place is not None:
                variables_of[place].append(variable)
        stacks: dict[tuple[Any, ...], Any] = {}
        for slot, array in zip(slots_in, (*state_in, *read_in), strict=True):
            if len(slot) == 1:  # which may be a constant of the trace several times
                values |= dict.fromkeys(variables_of[slot[0]], array)
            else:
                variables = tuple(variables_of[place][0] for place in slot)
                stacks[variables] = array
                # For who reads a row alone; XLA drops what nobody reads.
                rows_in = pinned_rows(array, holding.shardings[slot[0]])
                values |= zip(variables, rows_in, strict=True)
        _run(jaxpr, values, stacks)

        def read(variable: Any) -> Any:
            return variable.val if isinstance(variable, Literal) else values[variable]

        def out(variables: Sequence[Any], slots: Sequence[Slot]) -> list[Any]:
            groups = ([variables[place] for place in slot] for slot in slots)
            return [read(v[0] if len(v) == 1 else rows.stack(v)) for v in groups]

        results, state, lasting, written = holding.ends(jaxpr.outvars)
        ends = (
            [read(v) for v in results],
            out(state, slots.state),
            out(lasting, slots.lasting),
            [read(v) for v in written],
        )
        if not holding.num_flags:
            return ends
        arguments = [values[v] for v in jaxpr.invars[len(constants) :]]
        return _unless_flagged(ends, holding, state_in, [arguments[p] for p in holding.written])

    return program


def _unless_flagged(ends: Any, holding: Holding, state: Any, arguments: Any) -> Any:
    """Return what a program returns, with the values of before where a check has failed."""
    results, new_state, lasting, written = ends
    is_up = is_flagged(results[: holding.num_flags])

    def selected(old: Sequence[Any], new: Sequence[Any]) -> list[Any]:
        return [lax.select_n(is_up, n, o) for o, n in zip(old, new, strict=True)]

    return results, selected(state, new_state), lasting, selected(arguments, written)


def _run(jaxpr: Any, values: dict[Any, Any], stacks: Mapping[tuple[Any, ...], Any]) -> None:
    """Run a trace; what it stacks that came in as a stack is that one."""
    for equation in jaxpr.eqns:
        operands = tuple(equation.invars)
        if equation.primitive is stack_p and operands in stacks:
            values[equation.outvars[0]] = stacks[operands]
            continue
        arrays = [v.val if isinstance(v, Literal) else values[v] for v in operands]
        parameters = equation.primitive.get_bind_params(equation.params)
        with frames_of_equation(equation), equation.ctx.manager:
            outputs = equation.primitive.bind(*arrays, **parameters)
        outputs = outputs if equation.primitive.multiple_results else [outputs]
        values |= zip(equation.outvars, outputs, strict=True)
