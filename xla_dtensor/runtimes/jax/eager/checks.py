"""Flags of a compiled step for values that it checks: JAX's checkify, at the end of a trace.

While the step is traced, ``flag`` notes a check where an op runs, in loops and checkpoints too, and
``truth`` one that Python makes. Afterwards ``with_flags`` writes the trace anew so that what came
of all checks is its first results; ``raise_flagged`` reads them after a run::

    traced     (rows, i) -> (rows[i],)
    with_flags (rows, i) -> (failed, code, 8, rows[i])        8: the index, for the message

A branch, ``if loss > 3``, is a check as well: its trace goes one way and takes for granted that
Python would. A run that finds it otherwise changes nothing, and tells which of the branches was the
first: the step is run again by a program that goes the other way there::

    if a > 0:    way (True,)          the run finds a = -1: OtherWayError(0)
    if b > 0:    way (False, True)    the next trace is told the first answer, and guesses the rest
"""

from __future__ import annotations

import contextlib
import functools
import re
import traceback
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import torch
from jax.experimental import checkify
from jax.tree_util import tree_flatten, tree_unflatten

from xla_dtensor.core.errors import CheckFailedError, IndexRangeError
from xla_dtensor.runtimes.bounds import Bound, are_left_out
from xla_dtensor.runtimes.guards.assertions import Question, question_here
from xla_dtensor.runtimes.jax.arrays.constants import TracedProgram
from xla_dtensor.runtimes.jax.arrays.private import constants_of, inputs_only, raised_shapes
from xla_dtensor.runtimes.jax.arrays.sharding import host_value
from xla_dtensor.runtimes.jax.arrays.trace import active_trace, refuse_read
from xla_dtensor.versions import PACKAGE_FOLDER

__all__ = [
    "Branch",
    "OtherWayError",
    "Truths",
    "expect",
    "flag",
    "is_flagged",
    "raise_flagged",
    "truth",
    "with_flags",
]

# What checkify writes around a message: with local tensors one line per device, and always an end.
_ON_DEVICE, _FAILED = re.compile(r"^at mapped index [\d, ]+: "), " (`check` failed)"
_OF_PYTHON, _OF_BRANCH = "A compiled step's check failed: ", "branch "
_MOST_BRANCHES = 256  # of one trace
_NOT_OF_USERS = (
    *(f"{Path(module.__file__ or '').parent}/" for module in (torch, jax)),
    *(f"{PACKAGE_FOLDER}/", contextlib.__file__, "<"),
)


def flag(bound: Bound, name: str, extremes: Any) -> None:
    """Note a check of a traced op.

    Args:
        bound: What is checked.
        name: The op's, for the message.
        extremes: The smallest and the largest number, traced; where there is none, the former is
            the larger one.
    """
    low, high = extremes
    kind = jnp.float64 if jnp.issubdtype(low.dtype, jnp.floating) else jnp.int64
    low, high = low.astype(kind), high.astype(kind)
    is_right = (low > high) | ((bound.low <= low) & (high < bound.high))
    wrong = jnp.where(low >= bound.low, high, low)
    text = bound.complaint(name, "{wrong}")
    checkify.check(is_right, f"{text} The op is that of {_line_of_user()}.", wrong=wrong)


class Branch(NamedTuple):
    """One way that a trace has gone where its Python has two.

    Attributes:
        line: The line of source.
        place: Where it stands.
        answer: The truth value that it was given.
        times: How often Python has asked there before: a loop, or C++ that asks several things.
    """

    line: str
    place: str
    answer: bool
    times: int

    def __str__(self) -> str:
        return f"`{self.line}` at {self.place}"


@dataclass
class Truths:
    """The truth values that a trace takes for granted.

    Args:
        way: The answers to the first branches, as runs have told them.
        guesses: What later ones are answered, by their places, or by these and how often they were
            asked before; others are taken to be true.

    Attributes:
        checks: Those that Python has made.
        branches: Those that Python has come to.
    """

    way: Sequence[bool] = ()
    guesses: Mapping[Any, bool] = field(default_factory=dict)
    _asked: Counter[tuple[str, int]] = field(default_factory=Counter)
    _told: Counter[tuple[str, int]] = field(default_factory=Counter)
    _again: list[bool] = field(default_factory=list)
    checks: list[Any] = field(default_factory=list)
    branches: list[Branch] = field(default_factory=list)

    @contextlib.contextmanager
    def first(self, region: Any) -> Iterator[None]:
        """Note what is answered inside, where a region of torch's checkpoint is computed."""
        begin = len(self.branches)
        try:
            yield
        finally:
            # With the region, which holds tensors: nobody else is to keep it.
            region.xla_dtensor_way = [branch.answer for branch in self.branches[begin:]]

    @contextlib.contextmanager
    def again(self, region: Any) -> Iterator[None]:
        """Answer the same inside, where it is computed again."""
        outer = self._again
        self._again = list(reversed(getattr(region, "xla_dtensor_way", ())))
        try:
            yield
        finally:
            self._again = outer

    def answer(self, question: Question) -> bool:
        """Answer a branch."""
        number = len(self.branches)
        if number == _MOST_BRANCHES:
            refuse_read(f"turned into a Python bool {number} times")
        loop = question.place, question.frame
        if self._again:
            answer = self._again.pop()
        elif number < len(self.way):
            answer = self.way[number]
            self._told[loop] += 1
        else:
            # A loop that waits for a value ends after twice as many times as a run has told.
            is_over = self._asked[loop] >= max(1, 2 * self._told[loop])
            guess = not is_over and self.guesses.get(question.place, True)
            answer = self.guesses.get((question.place, self._asked[loop]), guess)
        self.branches.append(Branch(question.line, question.place, answer, self._asked[loop]))
        self._asked[loop] += 1
        return answer


class OtherWayError(Exception):
    """A run has found branches otherwise than its program takes them; it has changed nothing.

    Args:
        number: Of the first one.
        numbers: Of all of them: what the others found may hold on the other way, too.
    """

    def __init__(self, number: int, numbers: Collection[int]) -> None:
        super().__init__(f"branch {number} goes the other way")
        self.number, self.numbers = number, numbers


def truth(is_true: Any) -> bool:
    """Return the truth value that the step's Python goes on with; the program checks it.

    Args:
        is_true: The truth value in the program, 0-dim.

    Raises:
        CompileError: Nobody looks at the flags of the trace, or there are too many branches.
    """
    trace, question = active_trace(), question_here()
    if trace is None or trace.truths is None or question is None:
        refuse_read("turned into a Python bool")
    if question.expected is None:
        answer, number = trace.truths.answer(question), len(trace.truths.branches) - 1
        # By the shape of what it tells, each has a flag of its own.
        mark = jnp.zeros(number, jnp.int8)
        checkify.check(is_true == answer, f"{_OF_BRANCH}{number}", mark=mark)
        return answer
    if not are_left_out():
        trace.truths.checks.append(question)
        where = f"`{question.line}` at {question.place}{trace.sources.of_backward()}"
        text = f"{_OF_PYTHON}{where}.".replace("{", "{{").replace("}", "}}")
        checkify.check(is_true == question.expected, text)
    return question.expected


def expect(is_true: Any, what: str) -> None:
    """Note a check that the program makes of itself.

    Args:
        is_true: The truth value in the program, 0-dim.
        what: Is expected.
    """
    trace = active_trace()
    if trace is None or trace.truths is None:
        refuse_read("turned into a Python bool")
    trace.truths.checks.append(what)
    checkify.check(is_true, f"{_OF_PYTHON}{what}, at {_line_of_user()}.")


def with_flags(program: TracedProgram) -> tuple[TracedProgram, Any]:
    """Return a trace with the flags of its checks as its first results, and how those nest."""
    checked = checkify.checkify(
        lambda *inputs: jax.core.eval_jaxpr(program.jaxpr, (), *inputs), checkify.user_checks
    )
    trees: list[Any] = []

    def flagged(*inputs: Any) -> list[Any]:
        error, results = checked(*inputs)
        flags, tree = tree_flatten(error)
        trees.append(tree)
        return [*flags, *results]

    types = [variable.aval for variable in program.jaxpr.invars]
    closed = jax.make_jaxpr(flagged)(
        *(jax.ShapeDtypeStruct(t.shape, t.dtype, weak_type=t.weak_type) for t in types)
    )
    more = constants_of(closed)
    owners, constants = [*[None] * len(more), *program.owners], [*more, *program.constants]
    return TracedProgram(inputs_only(closed), owners, constants), trees[0]


def raise_flagged(flags: Any, results: Sequence[jax.Array]) -> None:
    """Raise where a check of a run has failed.

    Args:
        flags: How the flags nest: a PyTreeDef.
        results: The program's results, flags first.

    Raises:
        OtherWayError: The first one that failed is a branch.
        IndexRangeError: It is an op's.
        CheckFailedError: It is one that the step's Python makes.
    """
    error = tree_unflatten(flags, [host_value(array) for array in results[: flags.num_leaves]])
    text = error.get()
    if text is None:
        return
    text = _ON_DEVICE.sub("", text.splitlines()[0]).removesuffix(_FAILED)
    if text.startswith(_OF_BRANCH):
        number = int(text.removeprefix(_OF_BRANCH))
        raise OtherWayError(number, {shape[0] for shape in raised_shapes(error) if shape})
    if not text.startswith(_OF_PYTHON):
        raise IndexRangeError(text)
    raise CheckFailedError(
        f"{text} PyTorch raises there; a program runs to its end, and what it writes to stays as "
        "it was. Call the step without xd.compile to see the values, or leave such checks out: "
        "xd.check_values(False), or validate_args=False of torch.distributions."
    )


def is_flagged(flags: Sequence[Any]) -> Any:
    """Return whether a check has failed, in the program that computes the flags."""
    is_up = [jnp.any(flag) for flag in flags if flag.dtype == jnp.bool_]
    return functools.reduce(jnp.logical_or, is_up)


def _line_of_user() -> str:
    """Return the innermost line that is not torch's, JAX's or ours."""
    for frame, line in traceback.walk_stack(None):
        if not frame.f_code.co_filename.startswith(_NOT_OF_USERS):
            return f"{frame.f_code.co_filename}:{line}"
    return "an unknown line"
