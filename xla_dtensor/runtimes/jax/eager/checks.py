"""Flags of a compiled step for numbers out of range: JAX's checkify, at the end of a trace.

While the step is traced, ``flag`` notes a check where an op runs, in loops and checkpoints too.
Afterwards ``with_flags`` writes the trace anew so that what came of all checks is its first
results; ``raise_flagged`` reads them after a run::

    traced     (rows, i) -> (rows[i],)
    with_flags (rows, i) -> (failed, code, 8, rows[i])        8: the index, for the message
"""

from __future__ import annotations

import contextlib
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

from xla_dtensor.core.errors import IndexRangeError
from xla_dtensor.runtimes.bounds import Bound
from xla_dtensor.runtimes.jax.arrays.constants import TracedProgram
from xla_dtensor.runtimes.jax.arrays.private import constants_of, inputs_only
from xla_dtensor.runtimes.jax.arrays.sharding import host_value
from xla_dtensor.versions import PACKAGE_FOLDER

__all__ = ["flag", "raise_flagged", "with_flags"]

# What checkify writes around a message: with local tensors one line per device, and always an end.
_ON_DEVICE, _FAILED = re.compile(r"^at mapped index [\d, ]+: "), " (`check` failed)"
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
        IndexRangeError: The first one that failed.
    """
    error = tree_unflatten(flags, [host_value(array) for array in results[: flags.num_leaves]])
    text = error.get()
    if text is not None:
        raise IndexRangeError(_ON_DEVICE.sub("", text.splitlines()[0]).removesuffix(_FAILED))


def _line_of_user() -> str:
    """Return the innermost line that is not torch's, JAX's or ours."""
    for frame, line in traceback.walk_stack(None):
        if not frame.f_code.co_filename.startswith(_NOT_OF_USERS):
            return f"{frame.f_code.co_filename}:{line}"
    return "an unknown line"
