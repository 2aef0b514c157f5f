"""Flags of a compiled step for values that it checks: JAX's checkify, at the end of a trace.

While the step is traced, ``flag`` notes a check where an op runs, in loops and checkpoints too, and
``truth`` one that Python makes. Afterwards ``with_flags`` writes the trace anew so that what came
of all checks is its first results; ``raise_flagged`` reads them after a run::

    traced     (rows, i) -> (rows[i],)
    with_flags (rows, i) -> (failed, code, 8, rows[i])        8: the index, for the message
"""

from __future__ import annotations

import contextlib
import functools
import re
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import torch
from jax.experimental import checkify
from jax.tree_util import tree_flatten, tree_unflatten

from xla_dtensor.core.errors import CheckFailedError, IndexRangeError
from xla_dtensor.runtimes.bounds import Bound, are_left_out
from xla_dtensor.runtimes.guards.assertions import assertion_here
from xla_dtensor.runtimes.jax.arrays.constants import TracedProgram
from xla_dtensor.runtimes.jax.arrays.private import constants_of, inputs_only
from xla_dtensor.runtimes.jax.arrays.sharding import host_value
from xla_dtensor.runtimes.jax.arrays.trace import active_trace, refuse_read
from xla_dtensor.versions import PACKAGE_FOLDER

__all__ = ["flag", "is_flagged", "raise_flagged", "truth", "with_flags"]

# What checkify writes around a message: with local tensors one line per device, and always an end.
_ON_DEVICE, _FAILED = re.compile(r"^at mapped index [\d, ]+: "), " (`check` failed)"
_OF_PYTHON = "A compiled step's check failed: "
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


def truth(is_true: Any) -> bool:
    """Return the truth value that a check of the step's Python expects, and note the check.

    Args:
        is_true: The truth value in the program, 0-dim.

    Raises:
        CompileError: It is no check: what Python does next depends on the value.
    """
    trace, assertion = active_trace(), assertion_here()
    if trace is None or trace.assertions is None or assertion is None:
        refuse_read("turned into a Python bool")
    if not are_left_out():
        trace.assertions.append(assertion)
        where = f"`{assertion.line}` at {assertion.place}{trace.sources.of_backward()}"
        text = f"{_OF_PYTHON}{where}.".replace("{", "{{").replace("}", "}}")
        checkify.check(is_true == assertion.expected, text)
    return assertion.expected


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
        IndexRangeError: The first one that failed is an op's.
        CheckFailedError: It is one that the step's Python makes.
    """
    error = tree_unflatten(flags, [host_value(array) for array in results[: flags.num_leaves]])
    text = error.get()
    if text is None:
        return
    text = _ON_DEVICE.sub("", text.splitlines()[0]).removesuffix(_FAILED)
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
