"""Stacking the layers' arrays for a loop, as two JAX primitives that a program can be searched for.

``stack_layers`` is ``jnp.stack`` and ``unstack_layers`` its reverse. Being primitives of their own
they say which arrays of a traced step are layer 0, 1, 2, ... of one parameter (``slots``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

__all__ = [
    "pinned_rows",
    "pinned_stack",
    "row_sharding",
    "stack_layers",
    "stack_p",
    "stack_sharding",
    "unstack_layers",
    "unstack_p",
]

stack_p = Primitive("stack_layers")
unstack_p = Primitive("unstack_layers")
unstack_p.multiple_results = True


def stack_layers(arrays: Sequence[Any]) -> Any:
    """Return arrays of one shape and dtype as one, along a new dim 0."""
    return stack_p.bind(*arrays)


def unstack_layers(stack: Any) -> list[Any]:
    """Return the rows of an array."""
    return unstack_p.bind(stack)


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


def _stacked_layers(*arrays: Any) -> Any:
    return jnp.stack(arrays)


def _unstacked_layers(stack: Any) -> list[Any]:
    return [lax.index_in_dim(stack, i, 0, keepdims=False) for i in range(stack.shape[0])]


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
