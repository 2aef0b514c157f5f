"""A traced block cut into the part that runs forward and the part that runs backward.

The cut is JAX's own partial evaluation, with which ``jax.checkpoint`` works: given a policy, it
says which values of the forward part are saved for the backward one, and which are computed there
once more::

    one program     consts, inputs, gradients        -> outputs, rng, gradients
    forward         consts, inputs                   -> outputs, rng, saved values
    backward        saved values, inputs, gradients  -> gradients
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.core
from jax.extend.core import jaxprs_in_params
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import NamedSharding

from xla_dtensor.runtimes.jax.arrays.private import inputs_only, partial_evaluation
from xla_dtensor.runtimes.jax.compile.layers.block import BlockTrace

__all__ = ["SplitBlock", "names_in", "split"]

SavePolicy = Callable[..., Any]


@dataclass(frozen=True)
class SplitBlock:
    """A block's two programs.

    Args:
        forward_jaxpr: Takes constants and inputs; returns outputs, rng state and saved values.
        backward_jaxpr: Takes those of the saved values, constants, inputs and gradients that
            `used` names; returns the gradients.
        used: One flag for each constant, input and gradient; all saved values are used.
        n_results: Number of outputs, the rng state counted.
    """

    forward_jaxpr: Any
    backward_jaxpr: Any
    used: tuple[bool, ...]
    n_results: int

    def forward(self, consts: Sequence[Any], inputs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Return the outputs with the rng state, and the saved values."""
        values = jax.core.eval_jaxpr(self.forward_jaxpr, (), *consts, *inputs)
        return values[: self.n_results], values[self.n_results :]

    def backward(
        self,
        saved: Sequence[Any],
        consts: Sequence[Any],
        inputs: Sequence[Any],
        grads: Sequence[Any],
    ) -> list[Any]:
        """Return the gradients; inputs that are not used may be anything."""
        pairs = zip((*consts, *inputs, *grads), self.used, strict=True)
        operands = [value for value, used in pairs if used]
        return jax.core.eval_jaxpr(self.backward_jaxpr, (), *saved, *operands)

    @cached_property
    def text(self) -> tuple[Any, ...]:
        """What tells two blocks apart: their programs as text, and the shardings they name."""
        programs = (self.forward_jaxpr, self.backward_jaxpr)
        shardings = tuple(s for p in programs if p is not None for s in _shardings(p))
        return str(programs[0]), str(programs[1]), self.used, shardings


def split(trace: BlockTrace, n_inputs: int, policy: SavePolicy) -> SplitBlock:
    """Cut a block in two.

    Args:
        trace: The block.
        n_inputs: Number of its inputs, without constants and gradients.
        policy: One of ``jax.checkpoint_policies``, or a function like them.
    """
    jaxpr = inputs_only(trace.jaxpr)
    n_consts, n_grads, n_results = len(trace.consts), len(trace.grad_of), len(trace.outputs) + 1
    if not trace.wanted:
        is_result = [True] * n_results + [False] * (len(jaxpr.outvars) - n_results)
        forward, _ = dce_jaxpr(jaxpr, is_result, instantiate=True)
        return SplitBlock(forward, None, (), n_results)
    unknown = [False] * (n_consts + n_inputs) + [True] * n_grads
    is_gradient = [False] * n_results + [True] * len(trace.wanted)
    parts = partial_evaluation(jaxpr, unknown, is_gradient, _recomputing_random(policy))
    used_outputs = [w for w, there in zip(is_gradient, parts.is_staged, strict=True) if there]
    backward, used = dce_jaxpr(parts.staged, used_outputs, instantiate=False)
    saved = used[: parts.num_saved]
    forward, _ = dce_jaxpr(parts.known, [True] * n_results + list(saved), instantiate=True)
    return SplitBlock(forward, backward, tuple(used[parts.num_saved :]), n_results)


def names_in(trace: BlockTrace) -> set[str]:
    """Return the names that the block gave to values."""
    return {eqn.params["name"] for eqn in _equations(trace.jaxpr) if eqn.primitive.name == "name"}


def _recomputing_random(policy: SavePolicy) -> SavePolicy:
    def saveable(prim: Any, *avals: Any, **params: Any) -> Any:
        # Keys are no arrays that torch could hold; made from the state again they are the same.
        return False if prim.name.startswith("random_") else policy(prim, *avals, **params)

    return saveable


def _equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from _equations(inner)


def _shardings(jaxpr: Any) -> Iterator[NamedSharding]:
    for eqn in _equations(jaxpr):
        yield from (v for v in eqn.params.values() if isinstance(v, NamedSharding))
