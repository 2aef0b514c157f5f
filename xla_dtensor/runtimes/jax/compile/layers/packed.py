"""A traced step run with one equation for each pack of rows (``lanes``).

What `jax.core.eval_jaxpr` does equation by equation, this does pack by pack: an equation that
stands there once per layer is bound once, under ``jax.vmap``, on stacks. Rows are taken out of a
stack only where something reads one by itself, and a loop's ``stack_layers`` of a pack is the pack.

    packed = PackedTrace(jaxpr, packs, singles={w: array, ...}, stacks=[((m0, m1, m2), array), ...])
    packed.value(variable)                one array
    packed.stack((n0, n1, n2))            the rows of a pack as one
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import Literal
from jax.sharding import NamedSharding, PartitionSpec

from xla_dtensor.runtimes.jax.arrays.private import frames_of_equation
from xla_dtensor.runtimes.jax.compile.layers.lanes import Pack, Packs
from xla_dtensor.runtimes.jax.compile.layers.layer_stacks import (
    stack_layers,
    stack_p,
    unstack_layers,
    unstack_p,
)

__all__ = ["PackedTrace", "pinned_rows", "pinned_stack", "row_sharding", "stack_sharding"]


def stack_sharding(sharding: Any) -> Any:
    """Return how a stack of arrays lies that lie so: dim 0 is never sharded."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    return NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))


def row_sharding(sharding: Any) -> Any:
    """Return how the rows lie of a stack that lies so, with dim 0 unsharded."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    return NamedSharding(sharding.mesh, PartitionSpec(*tuple(sharding.spec)[1:]))


def pinned_stack(stack: Any, row_sharding: Any) -> Any:
    """Return a stack, told to lie as its rows are to; as it is where they are told nothing."""
    if not isinstance(row_sharding, NamedSharding):
        return stack
    return lax.with_sharding_constraint(stack, stack_sharding(row_sharding))


def pinned_rows(stack: Any, row_sharding: Any) -> list[Any]:
    """Return the rows of a stack, each told to lie so."""
    rows = unstack_layers(stack)
    if not isinstance(row_sharding, NamedSharding):
        return rows
    return [lax.with_sharding_constraint(row, row_sharding) for row in rows]


class PackedTrace:
    """One evaluation of a trace.

    Args:
        jaxpr: The trace; its constants are inputs.
        packs: Its packs.
        singles: Values of constants and arguments.
        stacks: Constants whose values come as one array: a pack's, in the order of the lanes.
        shardings: How constants lie, as far as that is known.
    """

    def __init__(
        self,
        jaxpr: Any,
        packs: Packs,
        singles: Mapping[Any, Any],
        stacks: Sequence[tuple[Sequence[Any], Any]],
        shardings: Mapping[Any, Any],
    ) -> None:
        self._equations = jaxpr.eqns
        self._packs = packs
        self._values = dict(singles)
        self._shardings = shardings
        self._stacks: dict[tuple[Pack, int], Any] = {}
        for variables, array in stacks:
            whole = packs.whole(variables)
            assert whole is not None, "only packs travel as stacks"
            self._stacks[whole] = array
        self._made_by = {v: number for number, e in enumerate(self._equations) for v in e.outvars}
        for step in self._order():
            self._run(step)

    # ------------------------------------------------------------------ reading

    def value(self, variable: Any) -> Any:
        """Return the value of a variable or literal."""
        if isinstance(variable, Literal):
            return variable.val
        variable = self._packs.same.get(variable, variable)
        if variable not in self._values:
            pack, lane, result = self._packs.of[variable]
            row = lax.index_in_dim(self._stack_of(pack, result), lane, 0, keepdims=False)
            sharding = self._shardings.get(variable)
            if isinstance(sharding, NamedSharding):
                row = lax.with_sharding_constraint(row, sharding)
            self._values[variable] = row
        return self._values[variable]

    def stack(self, variables: Sequence[Any]) -> Any:
        """Return the values of variables as one array, along a new dim 0."""
        whole = self._packs.whole(variables)
        if whole is not None:
            return self._stack_of(*whole)
        return stack_layers([self.value(v) for v in variables])

    def _stack_of(self, pack: Pack, result: int) -> Any:
        key = (pack, result)
        if key not in self._stacks:
            variables = [pack.variables[lane][result] for lane in range(pack.num_lanes)]
            if pack.origin == "loop":
                self._stacks[key] = self.value(self._equations[pack.rows[0]].invars[0])
            else:
                assert pack.origin == "const", "the packs of equations are made in their order"
                stack = stack_layers([self._values[v] for v in variables])
                self._stacks[key] = pinned_stack(stack, self._shardings.get(variables[0]))
        return self._stacks[key]

    # ------------------------------------------------------------------ the order

    def _order(self) -> Iterator[int | Pack]:
        """Yield equations and packs so that each comes after what it reads."""
        done: set[Any] = set()
        for number in range(len(self._equations)):
            waiting: list[tuple[Any, bool]] = [(self._step_of(number), False)]
            while waiting:
                step, is_ready = waiting.pop()
                if step in done:
                    continue
                if is_ready:
                    done.add(step)
                    yield step
                    continue
                waiting.append((step, True))
                waiting.extend((other, False) for other in self._before(step) if other not in done)

    def _step_of(self, number: int) -> int | Pack:
        return self._packs.of_equation.get(number, number)

    def _before(self, step: int | Pack) -> list[int | Pack]:
        """Return what has to run before a step. One row of a pack stands for all."""
        equation = self._equations[step.rows[0] if isinstance(step, Pack) else step]
        found = []
        for v in equation.invars:
            if isinstance(v, Literal):
                continue
            v = self._packs.same.get(v, v)
            if v in self._packs.of and self._packs.of[v][0].origin == "loop":
                found.append(self._packs.of[v][0].rows[0])
            elif v in self._made_by:
                found.append(self._step_of(self._made_by[v]))
        return found

    # ------------------------------------------------------------------ one step

    def _run(self, step: int | Pack) -> None:
        equation = self._equations[step.rows[0] if isinstance(step, Pack) else step]
        outvars = equation.outvars
        if not isinstance(step, Pack):
            is_known = all(self._packs.same.get(v, v) is not v for v in outvars)
            if equation.primitive is unstack_p or (outvars and is_known and not equation.effects):
                return  # Rows are taken when they are read; the same value stands there already.
        with frames_of_equation(equation), equation.ctx.manager:
            if isinstance(step, Pack):
                found = self._packed(equation)
                self._stacks |= {(step, i): array for i, array in enumerate(found)}
                return
            if equation.primitive is stack_p:
                found = [self.stack(equation.invars)]
            else:
                found = _bound(equation, [self.value(v) for v in equation.invars])
        self._values |= dict(zip(outvars, found, strict=True))

    def _packed(self, equation: Any) -> Sequence[Any]:
        """Bind the equation of lane 0 once for all lanes."""
        given, axes = [], []
        for v in equation.invars:
            row = None if isinstance(v, Literal) else self._packs.of.get(v)
            given.append(self.value(v) if row is None else self._stack_of(row[0], row[2]))
            axes.append(None if row is None else 0)
        if equation.primitive.name == "sharding_constraint":
            told = stack_sharding(equation.params["sharding"])
            return [lax.with_sharding_constraint(given[0], told)]
        return jax.vmap(lambda *values: _bound(equation, values), in_axes=axes)(*given)


def _bound(equation: Any, values: Sequence[Any]) -> Sequence[Any]:
    parameters = equation.primitive.get_bind_params(equation.params)
    found = equation.primitive.bind(*values, **parameters)
    return found if equation.primitive.multiple_results else [found]
