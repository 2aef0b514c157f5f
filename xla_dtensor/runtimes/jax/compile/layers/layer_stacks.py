"""Stacking the layers' arrays for a loop, as two JAX primitives that a program can be searched for.

``stack_layers`` is ``jnp.stack`` and ``unstack_layers`` its reverse. Being primitives of their own
they say which arrays of a traced step are layer 0, 1, 2, ... of one parameter (``lanes``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir

__all__ = ["stack_layers", "stack_p", "unstack_layers", "unstack_p"]

stack_p = Primitive("stack_layers")
unstack_p = Primitive("unstack_layers")
unstack_p.multiple_results = True


def stack_layers(arrays: Sequence[Any]) -> Any:
    """Return arrays of one shape and dtype as one, along a new dim 0."""
    return stack_p.bind(*arrays)


def unstack_layers(stack: Any) -> list[Any]:
    """Return the rows of an array."""
    return unstack_p.bind(stack)


def _stacked_layers(*arrays: Any) -> Any:
    return jnp.stack(arrays)


def _unstacked_layers(stack: Any) -> list[Any]:
    return [jax.lax.index_in_dim(stack, i, 0, keepdims=False) for i in range(stack.shape[0])]


def _stacked_type(*types: Any) -> Any:
    return types[0].update(shape=(len(types), *types[0].shape), weak_type=False)


def _unstacked_types(stack: Any) -> list[Any]:
    return [stack.update(shape=stack.shape[1:], weak_type=False)] * stack.shape[0]


stack_p.def_impl(_stacked_layers)
unstack_p.def_impl(_unstacked_layers)
stack_p.def_abstract_eval(_stacked_type)
unstack_p.def_abstract_eval(_unstacked_types)
mlir.register_lowering(stack_p, mlir.lower_fun(_stacked_layers, multiple_results=False))
mlir.register_lowering(unstack_p, mlir.lower_fun(_unstacked_layers, multiple_results=True))
