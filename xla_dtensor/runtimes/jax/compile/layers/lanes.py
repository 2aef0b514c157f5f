"""Which values of a traced step are the same thing in layer 0, 1, 2, ... of a loop.

The optimizer's part of a step is written out layer by layer, though the layers' parameters enter
the loop as one stack and their gradients leave it as one::

    s  = stack_layers w0 w1 w2              g0 g1 g2 = unstack_layers gs
    a0 = mul m0 0.9     a1 = mul m1 0.9     a2 = mul m2 0.9
    b0 = mul g0 0.1     b1 = mul g1 0.1     b2 = mul g2 0.1
    c0 = add a0 b0      c1 = add a1 b1      c2 = add a2 b2

Rows of a *pack* are values that one op computes alike in every layer: (b0, b1, b2) is the pack
``mul (g0, g1, g2) 0.1``. A pack needs one equation, on stacks. Packs are found from the top down:

1. A value gets a *lane*, (3, i) for layer i of 3, from the loop's primitives, and hands it on.
2. A constant of the trace, such as m1, gets the one lane that what is made of it meets: a1 meets b1
   in c1. What meets several lanes (a learning rate) has none: it is *shared*.
3. Equations of one primitive, with equal parameters, on rows of the same packs and equal shared
   values, are a pack if there is one in every lane.
4. Where there is not, the first such equations were no rows: ``add s n2``, the end of the sum
   ``n0 + n1 + n2`` over all layers, looks like one of layer 2. They are shared, and it begins anew.

Invariants:

* Whether a constant was given the right lane decides how much is packed and nothing else: whatever
  the rows, a pack computes in each what its equation does.
* No pack waits for itself. Lanes are handed on within one layer only; a way from a pack back to
  itself would lead through shared values, and be one in the program of the single equations too.
* Equations that have an effect, or of a primitive that is not named in `ROW_BY_ROW`, are no part of
  a pack.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.extend.core import Literal

from xla_dtensor.runtimes.jax.arrays.private import constants_of, is_jaxpr, open_jaxpr
from xla_dtensor.runtimes.jax.compile.layers.layer_stacks import stack_p, unstack_p

__all__ = ["Pack", "Packs", "packs_of"]

Lane = tuple[int, int]

_MOST_PENDING = 4
_TURNS = 3
_MOST_ROUNDS = 10

_ARITHMETIC = "abs add add_any div integer_pow mul neg pow rem sign square sub"
_FUNCTIONS = """cbrt ceil cos erf erf_inv exp exp2 expm1 floor log log1p logistic round rsqrt sin
sqrt tan tanh"""
_CHOICES = "and clamp eq ge gt is_finite le lt max min ne not or select_n xor"
_REDUCTIONS = """argmax argmin dot_general reduce_and reduce_max reduce_min reduce_or reduce_prod
reduce_sum"""
_FORMS = """broadcast_in_dim concatenate convert_element_type copy expand_dims imag nextafter pad
real reduce_precision reshape rev sharding_constraint slice squeeze transpose"""
ROW_BY_ROW = frozenset(
    " ".join((_ARITHMETIC, _FUNCTIONS, _CHOICES, _REDUCTIONS, _FORMS, "atan2")).split()
)
"""Primitives that do to each row of a stack what they do to one array."""


@dataclass(eq=False)
class Pack:
    """One equation of every lane, or one constant.

    Attributes:
        num_lanes: how many rows.
        rows: by lane: of an equation its number, of a constant its variable.
        origin: "const", "eqn", or "loop": what `unstack_layers` gives.
        variables: by lane, then by result: the variables of the trace.
    """

    num_lanes: int
    origin: str
    rows: dict[int, Any] = field(default_factory=dict)
    variables: dict[int, Sequence[Any]] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Whether it has a row in every lane."""
        return len(self.rows) == self.num_lanes


@dataclass(eq=False)
class Packs:
    """The packs of a trace.

    Attributes:
        of: the pack, lane and place among the results of each variable that is a row of a complete
            one.
        of_equation: the complete pack of each equation that has one, by its number.
        same: for a shared variable the first one of the same value.
    """

    of: dict[Any, tuple[Pack, int, int]] = field(default_factory=dict)
    of_equation: dict[int, Pack] = field(default_factory=dict)
    same: dict[Any, Any] = field(default_factory=dict)

    def used(self, jaxpr: Any) -> list[Pack]:
        """Return the packs that something reads whole, in the order of their first such use."""
        found: dict[Pack, None] = {}
        for number, equation in enumerate(jaxpr.eqns):
            if equation.primitive is stack_p:
                whole = self.whole(equation.invars)
                found |= {} if whole is None else {whole[0]: None}
            elif number in self.of_equation:
                given = [v for v in equation.invars if not isinstance(v, Literal)]
                found |= {self.of[v][0]: None for v in given if v in self.of}
        return list(found)

    def whole(self, variables: Sequence[Any]) -> tuple[Pack, int] | None:
        """Return the pack, and which of its results, whose rows are these variables in order."""
        found = [None if isinstance(v, Literal) else self.of.get(v) for v in variables]
        first = found[0] if found else None
        if first is None or first[0].num_lanes != len(found):
            return None
        alike = all(f == (first[0], lane, first[2]) for lane, f in enumerate(found))
        return (first[0], first[2]) if alike else None


def packs_of(jaxpr: Any, kinds: Mapping[Any, Hashable]) -> Packs:
    """Find the packs of a trace.

    Args:
        jaxpr: The trace; its constants are inputs.
        kinds: The constants that may be rows, each with what all rows of a pack have in common:
            shape, dtype, and whatever else the caller wants.

    Returns:
        The packs; none where the trace has no loop over layers.
    """
    finder = _Finder(jaxpr, kinds)
    return finder.packs() if finder.has_loop else Packs()


class _Finder:
    def __init__(self, jaxpr: Any, kinds: Mapping[Any, Hashable]) -> None:
        self._equations = jaxpr.eqns
        self._kinds = kinds
        self._texts: dict[int, tuple[Any, str]] = {}
        self._row_by_row: dict[int, bool] = {}
        self._no_rows: set[int] = set()
        self._uses = Counter(
            v for e in self._equations for v in e.invars if not isinstance(v, Literal)
        )
        self.has_loop = any(e.primitive is stack_p and len(e.invars) > 1 for e in self._equations)

    # ------------------------------------------------------------------ lanes of constants

    def _lanes_of_constants(self) -> dict[Any, Lane]:
        """Return the lane of each constant that meets one only."""
        known: dict[Any, Lane] = {}
        shared: set[Any] = set()
        for _ in range(_TURNS):
            met = self._meetings(known, shared)
            shared |= {constant for constant, lanes in met.items() if len(lanes) > 1}
            new = {c: min(lanes) for c, lanes in met.items() if len(lanes) == 1}
            new = {c: lane for c, lane in new.items() if c not in known}
            if not new:
                break
            known |= new
        return {c: lane for c, lane in known.items() if c not in shared}

    def _meetings(self, known: Mapping[Any, Lane], shared: set[Any]) -> dict[Any, set[Lane]]:
        met: dict[Any, set[Lane]] = defaultdict(set)
        lane_of: dict[Any, Lane] = dict(known)
        pending = {c: frozenset((c,)) for c in self._kinds if c not in known and c not in shared}
        nothing: frozenset[Any] = frozenset()
        for number, equation in enumerate(self._equations):
            given = [v for v in equation.invars if not isinstance(v, Literal)]
            if equation.primitive is stack_p:
                for i, v in enumerate(given):
                    for constant in pending.get(v, nothing):
                        met[constant].add((len(given), i))
                continue
            if equation.primitive is unstack_p:
                count = len(equation.outvars)
                lane_of |= {v: (count, i) for i, v in enumerate(equation.outvars)}
                continue
            lanes = {lane_of[v] for v in given if v in lane_of}
            if lanes and number in self._no_rows:
                continue
            waiting = nothing.union(*(pending[v] for v in given if v in pending))
            if len(lanes) == 1:
                lane = next(iter(lanes))
                for constant in waiting:
                    met[constant].add(lane)
                lane_of |= dict.fromkeys(equation.outvars, lane)
            elif not lanes and 0 < len(waiting) <= _MOST_PENDING:
                pending |= dict.fromkeys(equation.outvars, waiting)
        return met

    # ------------------------------------------------------------------ packs

    def packs(self) -> Packs:
        """Return the packs."""
        for _ in range(_MOST_ROUNDS):
            found, incomplete = self._round()
            if not incomplete:
                break
            self._no_rows |= incomplete
        return found

    def _round(self) -> tuple[Packs, set[int]]:
        """Return the packs, and the equations that look like rows and have no like."""
        lanes = self._lanes_of_constants()
        packs: dict[Hashable, Pack] = {}
        row_of: dict[Any, tuple[Pack, int, int]] = {}
        same: dict[Any, Any] = {}
        values: dict[Hashable, Sequence[Any]] = {}

        def join(key: Hashable, lane: Lane, origin: str, row: Any, variables: Any) -> None:
            pack = packs.setdefault(key, Pack(lane[0], origin))
            if lane[1] in pack.rows:  # The same value once more, in the same layer.
                variables_there = pack.variables[lane[1]]
                same.update(zip(variables, variables_there, strict=True))
            else:
                pack.rows[lane[1]], pack.variables[lane[1]] = row, variables
            row_of.update({v: (pack, lane[1], i) for i, v in enumerate(variables)})

        for constant, key in self._constant_keys(lanes):
            join(key, lanes[constant], "const", constant, [constant])

        def described(value: Any) -> Hashable:
            if isinstance(value, Literal):
                return ("literal", value.aval, _literal(value.val))
            if value in row_of:
                pack, _, i = row_of[value]
                return ("row", id(pack), i)
            return ("shared", id(same.get(value, value)))

        for number, equation in enumerate(self._equations):
            if equation.primitive is unstack_p:
                count = len(equation.outvars)
                for i, v in enumerate(equation.outvars):
                    join(("loop", number), (count, i), "loop", number, [v])
                continue
            if equation.effects or equation.primitive is stack_p:
                continue
            given = [v for v in equation.invars if not isinstance(v, Literal)]
            found = {(row_of[v][0].num_lanes, row_of[v][1]) for v in given if v in row_of}
            is_row = len(found) == 1 and number not in self._no_rows
            is_row = is_row and self._is_row_by_row(equation)
            if found and not is_row:
                continue
            operands = tuple(map(described, equation.invars))
            context = (equation.ctx.compute_type, str(equation.ctx.xla_metadata))
            key = (equation.primitive.name, context, self._parameters(equation.params), operands)
            if is_row:
                join(key, next(iter(found)), "eqn", number, equation.outvars)
            elif self._may_merge(equation):
                first = values.setdefault(key, equation.outvars)
                same.update(zip(equation.outvars, first, strict=True))
        complete = {v: row for v, row in row_of.items() if row[0].is_complete}
        numbers = {
            row: pack
            for pack in packs.values()
            if pack.is_complete and pack.origin == "eqn"
            for row in pack.rows.values()
        }
        return Packs(complete, numbers, same), self._lone(packs.values(), row_of)

    def _lone(self, packs: Iterable[Pack], row_of: Mapping[Any, tuple[Pack, int, int]]) -> set[int]:
        """Return the first equations, on every way, that look like rows and have no like.

        With them all that is sure to be no row once they are none. Of what else comes behind them
        nothing is known before the next round.
        """
        alone = {
            row for p in packs if p.origin == "eqn" and not p.is_complete for row in p.rows.values()
        }
        lone: set[int] = set()
        freed: set[Any] = set()  # values that are shared from the next round on
        unsure: set[Any] = set()
        for number, equation in enumerate(self._equations):
            given = [v for v in equation.invars if not isinstance(v, Literal)]
            rows = [row_of[v][0] for v in given if v in row_of and v not in freed]
            fewest = min((self._uses[v] for v in given if v in freed), default=None)
            if any(v in unsure for v in given):
                unsure.update(equation.outvars)
            elif fewest is None and number not in alone:
                continue
            elif not rows or fewest is None or fewest < rows[0].num_lanes:
                lone.add(number)
                freed.update(equation.outvars)
            else:
                unsure.update(equation.outvars)
        return lone

    def _constant_keys(self, lanes: Mapping[Any, Lane]) -> Iterator[tuple[Any, Hashable]]:
        """Yield each constant that has a lane with what it has in common with its like.

        Those are the constants of one kind whose first use is the same; where a layer has several,
        the first goes with the first.
        """
        uses: dict[Any, Hashable] = {}
        for equation in self._equations:
            for place, v in enumerate(equation.invars):
                if not isinstance(v, Literal) and v in lanes and v not in uses:
                    is_stack = equation.primitive is stack_p
                    literals = tuple(str(o.val) for o in equation.invars if isinstance(o, Literal))
                    use = (equation.primitive.name, -1 if is_stack else place, literals)
                    uses[v] = use if is_stack else (*use, self._parameters(equation.params))
        counts: dict[Hashable, int] = defaultdict(int)
        for constant in self._kinds:
            if constant not in lanes or constant not in uses:
                continue
            count, lane = lanes[constant]
            key = (count, self._kinds[constant], uses[constant])
            counts[key, lane] += 1
            yield constant, ("const", key, counts[key, lane])

    def _may_merge(self, equation: Any) -> bool:
        return not equation.effects and equation.primitive.name != "optimization_barrier"

    def _is_row_by_row(self, equation: Any) -> bool:
        if equation.primitive.name not in ("jit", "pjit"):
            return equation.primitive.name in ROW_BY_ROW
        inner = open_jaxpr(equation.params["jaxpr"])
        if id(inner) not in self._row_by_row:
            self._row_by_row[id(inner)] = all(
                self._is_row_by_row(e) and e.primitive.name != "sharding_constraint"
                for e in inner.eqns
            )
        return self._row_by_row[id(inner)]

    def _parameters(self, value: Any) -> Hashable:
        """Return something that is equal for equal parameters of equations."""
        if is_jaxpr(value):
            inner = open_jaxpr(value)
            if id(inner) not in self._texts:
                self._texts[id(inner)] = (inner, str(inner))
            return (self._texts[id(inner)][1], tuple(map(id, constants_of(value))))
        if isinstance(value, dict):
            return tuple((name, self._parameters(value[name])) for name in sorted(value))
        if isinstance(value, (tuple, list)):
            return tuple(map(self._parameters, value))
        try:
            hash(value)
        except TypeError:
            return ("by identity", id(value))
        return (type(value), value)


def _literal(value: Any) -> Hashable:
    # As text: a NaN is not equal to itself, and 0.0 is to -0.0.
    return (type(value).__name__, repr(value))
