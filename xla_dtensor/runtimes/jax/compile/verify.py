"""Verifying a call: a new trace of the step, compared with the program that the call would run.

Programs are compared as traces (jaxprs), equation by equation, in the order of the step's Python::

    kept     b = mul a 0.1          now      b = mul a 0.2
             c = add b w                     c = add b w

    constant: 0.1 of mul in the program, 0.2 of mul now, train.py:14 (act)

A value is known by what makes it: an input by whose tensor it is, a constant by its bytes, anything
else by the equation, so that one change is one difference, whatever is computed of it. Equations
that only one trace has are found as a text's lines are (``difflib``).

Invariant: after it everything is what it was, by what a failed trace is taken back by
(``trace.Before``), what the step is seen to assign in Python among it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import partial
from itertools import zip_longest
from types import FunctionType
from typing import Any

import jax
import numpy as np
import torch
from jax.extend.core import Literal, Var

from xla_dtensor.core.errors import CompileError
from xla_dtensor.runtimes.base import Difference, Verification
from xla_dtensor.runtimes.host_work.steps import same_bytes
from xla_dtensor.runtimes.host_work.tape import TraceAgainError
from xla_dtensor.runtimes.jax.arrays.private import (
    constants_of,
    is_jaxpr,
    line_of_equation,
    open_jaxpr,
)
from xla_dtensor.runtimes.jax.arrays.storage import Storage
from xla_dtensor.runtimes.jax.compile.effects import Made
from xla_dtensor.runtimes.jax.compile.host_inputs import HostPart
from xla_dtensor.runtimes.jax.compile.program import KeptPrograms, Program
from xla_dtensor.runtimes.jax.compile.trace import Before, Call, TracedStep, traced_step
from xla_dtensor.runtimes.jax.compile.trace_values import Static
from xla_dtensor.runtimes.jax.eager.checks import Truths

__all__ = ["VARIABLE", "number_asked", "refuse_differences", "verification"]

VARIABLE = "XLA_DTENSOR_VERIFY_STEPS"
_MOST_SHOWN = 20


def number_asked(variable: str, meaning: str) -> int:
    """Return a number that the environment asks for; 0 for none.

    Args:
        variable: The variable.
        meaning: What the number says, for errors.

    Raises:
        CompileError: It is no whole number from 1 on.
    """
    text = os.environ.get(variable, "")
    if not text:
        return 0
    if not text.isdecimal() or int(text) < 1:
        raise CompileError(
            f"A step was compiled with {variable}={text!r}. It says {meaning}, a whole number from "
            f"1 on. Set {variable}=100, say, or unset it."
        )
    return int(text)


def verification(
    step: Callable[..., Any], call: Call, kept: KeptPrograms, known: Sequence[Any]
) -> Verification:
    """Compare the program that a call would run with a new trace.

    Args:
        step: The step.
        call: The call, with its payloads.
        kept: The programs that the step keeps.
        known: What a trace is told besides: see `traced_step`.
    """
    key, why = call.key(), ""
    for program in kept.under(key):
        program.watch.lending.give(call.leaves)
        change = program.stale() or program.unfit(call.storages())
        if change is None:
            break
        why = why or change.why
    else:
        why = why or kept.why_none(call, key)
        return Verification(False, note=f"the call would trace anew: {why}")
    with _left_as_it_is(step, call, program.watch.lending.names) as snapshot:
        try:
            differences = _differences(
                program, traced_step(step, call, snapshot, *known, truths=Truths(program.way))
            )
        except TraceAgainError as error:
            differences = (Difference("output", "nothing", f"one that {error}"),)
    return Verification(not differences, differences)


def refuse_differences(name: str, number: int, found: Verification) -> None:
    """Raise where a call would run a program that a new trace does not give.

    Args:
        name: What the step is called.
        number: Which call it is.
        found: What verifying it has found.
    """
    if not found.differences:
        return
    listed = "\n".join(f"  {difference}" for difference in found.differences[:_MOST_SHOWN])
    more = len(found.differences) - _MOST_SHOWN
    raise CompileError(
        f"Call {number} of {name} was verified ({VARIABLE}), and its program is not what the "
        f"step's Python gives now:\n{listed}\n{f'  and {more} more{chr(10)}' if more > 0 else ''}"
        "The program was traced before that changed, in a place that compiled steps are not known "
        "to read. Pass what changes as an argument, a tensor if it changes often, or compile the "
        "step anew after the change."
    )


@contextmanager
def _left_as_it_is(step: Callable[..., Any], call: Call, names: Set[Any]) -> Iterator[Before]:
    """Let a step be traced inside, and make everything what it was."""
    snapshot = Before.of(step, call, names)
    owned = [entry for _, table in snapshot.python.tables for entry in table.values()]
    leaves = [leaf for leaf, _ in snapshot.python.gradients]
    tensors = {id(t): t for t in (*leaves, *owned, *call.leaves) if _is_leaf(t)}
    traits = [(tensor, tensor.requires_grad, tensor.grad) for tensor in tensors.values()]
    try:
        yield snapshot
    finally:
        snapshot.restore()
        for tensor, requires_grad, grad in traits:
            if tensor.requires_grad != requires_grad:
                tensor.requires_grad_(requires_grad)
            if tensor.grad is not grad:
                tensor.grad = grad


def _is_leaf(value: Any) -> bool:
    try:
        return isinstance(value, torch.Tensor) and value.is_leaf
    except RuntimeError:  # A view whose base was written where autograd could not follow.
        return False


# ------------------------------------------------------------------------------------- Two programs


@dataclass
class _Side:
    """One of the two traces that are compared."""

    jaxpr: Any
    values: dict[Any, Any] = field(default_factory=dict)  # of constants
    inputs: dict[Any, tuple[str, Any]] = field(default_factory=dict)  # whose the others are
    results: dict[tuple[str, Any], Any] = field(default_factory=dict)  # by what they are
    makers: dict[Any, Any] = field(default_factory=dict)  # the equation that makes a value
    aliases: dict[Any, Any] = field(default_factory=dict)  # of what was left out

    @classmethod
    def of(
        cls,
        jaxpr: Any,
        owners: Sequence[Storage | None],
        constants: Sequence[Any],
        ends: tuple[Sequence[Storage], Sequence[Any], Sequence[int]],
        name: Callable[[Storage], tuple[str, Any]],
    ) -> _Side:
        """Say whose the inputs and results of a trace are, by names that both traces have."""
        side, values = cls(jaxpr), iter(constants)
        for variable, owner in zip(jaxpr.invars, owners, strict=False):
            if owner is None:
                side.values[variable] = next(values)
            else:
                side.inputs[variable] = name(owner)
        for place, variable in enumerate(jaxpr.invars[len(owners) :]):
            side.inputs[variable] = ("argument", place)
        state, lasting, written = ends
        last: list[tuple[str, Any]] = [("state", name(storage)) for storage in state]
        last += [("state made", place) for place in range(len(lasting))]
        last += [("argument written to", place) for place in written]
        num_results = len(jaxpr.outvars) - len(last)
        keys: list[tuple[str, Any]] = [("result", place) for place in range(num_results)]
        keys += last
        side.results = dict(zip(keys, jaxpr.outvars, strict=True))
        return side

    def enter(self, jaxpr: Any) -> None:
        """Take up a jaxpr's constants and equations."""
        inner = open_jaxpr(jaxpr)
        self.values.update(zip(inner.constvars, constants_of(jaxpr), strict=False))
        self.makers.update(
            (variable, equation) for equation in inner.eqns for variable in equation.outvars
        )

    def leave_out(self, equation: Any) -> None:
        """Take what an equation gives, which changes no value, for what it is given."""
        (output,), (operand,) = equation.outvars, equation.invars
        if isinstance(operand, Literal):
            self.values[output] = operand.val
            return
        for table in (self.values, self.inputs):
            if operand in table:
                table[output] = table[operand]
        self.aliases[output] = self.aliases.get(operand, operand)

    def fixed(self, atom: Any) -> _Constant | tuple[str, Any] | None:
        """Return what a value is by itself: a constant or an input; None if it is computed."""
        if isinstance(atom, Literal):
            return _Constant(atom.val)
        if atom in self.values:
            return _Constant(self.values[atom])
        return self.inputs.get(atom)

    def line(self, atom: Any) -> str:
        """Return the line that a value comes from; "" where nobody knows."""
        is_made = isinstance(atom, Var) and atom in self.makers
        return line_of_equation(self.makers[atom]) if is_made else ""

    def text(self, atom: Any) -> str:
        """Return how a message calls a value."""
        fixed = self.fixed(atom)
        if isinstance(fixed, _Constant):
            return str(fixed)
        if fixed is not None:
            kind, place = fixed
            what = f"{kind} {place}" if isinstance(place, int) else "a tensor found by name"
            return f"{what}, {atom.aval.str_short()}"
        return f"the result of {self.makers[atom].primitive}" if atom in self.makers else "a value"


class _Constant:
    """A constant; equal to one of the same bytes."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Constant) and _is_same_array(self._value, other._value)

    def __hash__(self) -> int:
        return 0

    def __str__(self) -> str:
        shards = _local(self._value)
        if not shards:
            return "a constant of other processes"
        array = shards[0]
        if array.ndim == 0:
            return str(array[()])
        return np.array2string(array, threshold=8, edgeitems=3).replace("\n", "")


def _differences(program: Program, outcome: TracedStep) -> tuple[Difference, ...]:
    storages = [*program.state, *program.read]
    old = _Side.of(
        program.blueprint.jaxpr,
        [None if place is None else storages[place] for place in program.places],
        program.constants,
        (program.state, program.lasting, program.written),
        _namer(program.numbers, program.host_storages()),
    )
    new = _Side.of(
        outcome.program.jaxpr,
        outcome.program.owners,
        outcome.program.constants,
        ([*outcome.trace.state], outcome.lasting, outcome.written),
        _namer(outcome.numbers, outcome.host_storages()),
    )
    comparison = _Comparison(old, new)
    comparison.jaxprs(old.jaxpr, new.jaxpr)
    comparison.results()
    comparison.nesting((program.out_tree, program.out_static), (outcome.tree, outcome.static))
    comparison.layouts(program.blueprint.out_shardings[0], outcome.pinned)
    comparison.host(program.host, outcome.host)
    return tuple(dict.fromkeys(comparison.found))


def _namer(numbers: Sequence[Any], host: Sequence[Storage]) -> Callable[[Storage], tuple[str, Any]]:
    """Return what names storages: those that each trace makes anew by their places."""
    names: dict[Storage, tuple[str, Any]] = {s: ("number", i) for i, (s, _) in enumerate(numbers)}
    names |= {storage: ("host tensor", i) for i, storage in enumerate(host)}
    return lambda storage: names.get(storage, ("tensor", storage))


class _Comparison:
    """Goes through two traces side by side, and notes what differs."""

    def __init__(self, kept: _Side, now: _Side) -> None:
        self._kept, self._now = kept, now
        self._same: dict[Any, Any] = {}  # the value of the one for each of the other
        self._explained: set[Any] = set()  # made by equations that differ
        self._compared: set[tuple[int, int]] = set()
        self.found: list[Difference] = []

    def jaxprs(self, kept: Any, now: Any) -> None:
        """Compare two jaxprs whose inputs are known to be the same."""
        self._kept.enter(kept)
        self._now.enter(now)
        for old, new in _paired(open_jaxpr(kept).eqns, open_jaxpr(now).eqns):
            self._equations(old, new)

    def results(self) -> None:
        """Compare what comes out of the two programs."""
        old_results, new_results = self._kept.results, self._now.results
        for key in dict.fromkeys((*old_results, *new_results)):
            line = self._now.line(new_results.get(key)) or self._kept.line(old_results.get(key))
            if key in old_results and key in new_results:
                self._atoms(old_results[key], new_results[key], line, "output")
                continue
            what = _output_text(key, old_results.get(key, new_results.get(key)))
            old, new = (
                what if key in results else "nothing" for results in (old_results, new_results)
            )
            self.found.append(Difference("output", old, new, line))

    def nesting(self, kept: tuple[Any, Sequence[Any]], now: tuple[Any, Sequence[Any]]) -> None:
        """Compare how the results nest, and those that are no tensors."""
        if kept[0] != now[0]:
            self.found.append(Difference("output", _short(kept[0]), _short(now[0])))
            return
        for old, new in zip(kept[1], now[1], strict=True):
            both = isinstance(old, Static) and isinstance(new, Static)
            is_same = _is_same(old.value, new.value) if both else _kind(old) == _kind(new)
            if isinstance(old, Made) and isinstance(new, Made):
                is_same = _is_same(old.constants, new.constants)
            if not is_same:
                self.found.append(Difference("output", _kind(old), _kind(new)))

    def layouts(self, kept: Sequence[Any], now: Sequence[Any]) -> None:
        """Compare how results have to lie."""
        for place, (old, new) in enumerate(zip(kept, now, strict=False)):
            if old != new:
                texts = (f"result {place} lying as {getattr(s, 'spec', s)}" for s in (old, new))
                self.found.append(Difference("output", *texts))

    def host(self, kept: HostPart | None, now: HostPart | None) -> None:
        """Compare what is done on the host before each run."""
        old_steps, new_steps = (_described(() if p is None else p.work.steps) for p in (kept, now))
        for old, new in zip_longest(old_steps, new_steps, fillvalue=("nothing", {})):
            if not _is_same(old, new):
                self.found.append(Difference("host op", *map(_host_text, (old, new))))

    def _equations(self, old: Any, new: Any) -> None:
        if old is None or new is None or _shape_of(old) != _shape_of(new):
            present = next(equation for equation in (new, old) if equation is not None)
            if None in (old, new) and str(present.primitive) == _TOLD:
                (self._now if old is None else self._kept).leave_out(present)
                return
            line = line_of_equation(present)
            self.found.append(Difference("op", _equation_text(old), _equation_text(new), line))
            self._explain(old, new)
            return
        line, name = line_of_equation(new), str(new.primitive)
        for a, b in zip(old.invars, new.invars, strict=True):
            self._atoms(a, b, line, name)
        for param in dict.fromkeys((*old.params, *new.params)):
            if param not in _NOT_RUN:
                self._params(old.params.get(param), new.params.get(param), f"{name} {param}", line)
        self._same.update(zip(old.outvars, new.outvars, strict=True))

    def _explain(self, old: Any, new: Any) -> None:
        outvars = [() if equation is None else equation.outvars for equation in (old, new)]
        self._explained.update(*outvars)
        if len(outvars[0]) == len(outvars[1]):
            self._same.update(zip(*outvars, strict=True))

    def _atoms(self, a: Any, b: Any, line: str, of: str) -> None:
        old, new = self._kept.fixed(a), self._now.fixed(b)
        if old is None and new is None:
            a, b = self._kept.aliases.get(a, a), self._now.aliases.get(b, b)
        is_same = old == new if old is not None or new is not None else self._same.get(a) is b
        if not is_same and not any(isinstance(v, Var) and v in self._explained for v in (a, b)):
            both = isinstance(old, _Constant) and isinstance(new, _Constant)
            was, is_now = f"{self._kept.text(a)} of {of}", f"{self._now.text(b)} of {of}"
            is_now = "another one" if is_now == was else is_now
            self.found.append(Difference("constant" if both else "input", was, is_now, line))

    def _params(self, old: Any, new: Any, name: str, line: str) -> None:
        bodies = [param if isinstance(param, tuple | list) else (param,) for param in (old, new)]
        if all(map(is_jaxpr, (*bodies[0], *bodies[1]))) and len(bodies[0]) == len(bodies[1]):
            for old_body, new_body in zip(*bodies, strict=True):
                self._body(old_body, new_body, line)
        elif not _is_same(old, new):
            was, is_now = (f"{name}={_short(param)}" for param in (old, new))
            self.found.append(Difference("op", was, is_now, line))

    def _body(self, old_jaxpr: Any, new_jaxpr: Any, line: str) -> None:
        if old_jaxpr is new_jaxpr or (id(old_jaxpr), id(new_jaxpr)) in self._compared:
            return
        self._compared.add((id(old_jaxpr), id(new_jaxpr)))
        old, new = open_jaxpr(old_jaxpr), open_jaxpr(new_jaxpr)
        self._same.update(zip(old.invars, new.invars, strict=False))
        self.jaxprs(old_jaxpr, new_jaxpr)
        for a, b in zip(old.outvars, new.outvars, strict=False):
            self._atoms(a, b, line, "output")


# Of an equation what is there for derivatives and names: no program has it.
_NOT_RUN = frozenset({"jvp_jaxpr_fun", "jvp_jaxpr_thunk", "fwd_jaxpr_thunk", "bwd", "name"})
# What only one trace tells a value is no difference: an argument that somebody has placed is told
# how it lies, one that an op has computed is not, and both have one program.
_TOLD = "sharding_constraint"
_MOST_MATCHED = 2000


def _paired(old: Sequence[Any], new: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """Pair the equations of two jaxprs; None for one that only the other has."""
    keys = [*map(_shape_of, old)], [*map(_shape_of, new)]
    unlike = (i for i, (a, b) in enumerate(zip(*keys, strict=False)) if a != b)
    first = next(unlike, min(map(len, keys)))
    yield from zip(old[:first], new[:first], strict=True)
    old, new = old[first:], new[first:]
    if max(len(old), len(new)) > _MOST_MATCHED:
        yield from zip_longest(old[:_MOST_MATCHED], new[:_MOST_MATCHED])
        return
    matcher = SequenceMatcher(None, keys[0][first:], keys[1][first:], autojunk=False)
    for _, a, b, c, d in matcher.get_opcodes():
        yield from zip_longest(old[a:b], new[c:d])


def _shape_of(equation: Any) -> Hashable:
    outs = tuple(variable.aval.str_short() for variable in equation.outvars)
    return equation.primitive, outs, len(equation.invars)


# ------------------------------------------------------------------------------- Values and texts


def _is_same_array(a: Any, b: Any) -> bool:
    return _contents(a) == _contents(b)


def _contents(constant: Any) -> list[tuple[Any, ...]]:
    return [(shard.dtype, shard.shape, shard.tobytes()) for shard in _local(constant)]


def _local(constant: Any) -> list[np.ndarray[Any, Any]]:
    """Return what this process has of a constant."""
    if isinstance(constant, jax.Array) and not constant.is_fully_addressable:
        return [np.asarray(shard.data) for shard in constant.addressable_shards]
    return [np.asarray(constant)]


def _is_same(a: Any, b: Any, depth: int = 8) -> bool:
    """Tell whether two parameters do the same; where nobody can tell, they do not."""
    if a is b or (isinstance(a, torch.Generator) and isinstance(b, torch.Generator)):
        return True
    if type(a) is not type(b) or depth == 0:
        return False
    if isinstance(a, torch.Tensor):
        return same_bytes(a, b)
    if isinstance(a, np.ndarray | np.generic | jax.Array):
        return _is_same_array(a, b)
    if isinstance(a, float | complex) or is_jaxpr(a):
        return repr(a) == repr(b)
    parts, other_parts = _parts(a), _parts(b)
    if parts is not None and other_parts is not None:
        pairs = zip_longest(parts, other_parts, fillvalue=_NOTHING)
        return all(_is_same(x, y, depth - 1) for x, y in pairs)
    try:
        return bool(a == b)
    except Exception:
        return False


_NOTHING = object()


def _parts(value: Any) -> list[Any] | None:
    """Return what a parameter is made of; None for one that is compared as a whole."""
    if isinstance(value, tuple | list):
        return list(value)
    if isinstance(value, dict):
        return [part for pair in value.items() for part in pair]
    if isinstance(value, FunctionType):
        cells = [getattr(cell, "cell_contents", None) for cell in value.__closure__ or ()]
        return [value.__code__, value.__defaults__, value.__kwdefaults__, *cells]
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    has_its_own = type(value).__eq__ is not object.__eq__ or not hasattr(value, "__dict__")
    return None if has_its_own else [vars(value)]


def _short(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def _equation_text(equation: Any) -> str:
    if equation is None:
        return "nothing"
    outs = ", ".join(variable.aval.str_short() for variable in equation.outvars)
    return f"{equation.primitive} giving {outs}"


def _output_text(key: Any, atom: Any) -> str:
    name, place = key
    what = f"{name} {place}" if isinstance(place, int) else "a write to a tensor"
    return f"{what}, {atom.aval.str_short()}"


def _kind(leaf: Any) -> str:
    if isinstance(leaf, Made):
        return f"an object with {_short(leaf.constants)}"
    return f"the value {_short(leaf.value)}" if isinstance(leaf, Static) else "a tensor"


_OF_ONE_TAPE = frozenset({"writes", "kept", "generator", "place"})


def _described(steps: Sequence[Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return of each step on the host what two traces have in common."""
    return [
        (type(s).__name__, {k: v for k, v in vars(s).items() if k not in _OF_ONE_TAPE})
        for s in steps
    ]


def _host_text(described: tuple[str, Mapping[str, Any]]) -> str:
    name, fields = described
    shown = fields.get("given", fields.get("value", ""))
    return _short(f"{fields.get('func', name)} {shown}".strip())
