"""``lax.scan`` with a 32-bit counter.

PyTorch's integers are 64 bits wide, so JAX runs with x64 here, and then ``lax.scan`` counts in
int64. A TPU has no such numbers: XLA takes them apart into pairs of uint32, after which no pass of
it knows how often the loop runs, and each index costs two words of carrying arithmetic. The
TPU program of a loop over layers shows it: ``compare(bitcast-convert(hi), 0)`` and a second
comparison of the low halves where ``compare(i, 32)`` would stand.

A loop made here is a ``while_loop`` that counts in int32. It has no derivative of its own; every
loop of this package has a backward pass written by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["counted_scan"]


def counted_scan(
    body: Callable[[Any, Any], tuple[Any, Any]], carry: Any, given: Any, *, reverse: bool = False
) -> tuple[Any, Any]:
    """Run `body` over the first dim of `given`.

    Args:
        body: Called with the carry and one row of each array; returns the next carry, of the same
            shapes and dtypes, and what is to be kept of this turn.
        carry: What the first turn is given.
        given: A tree of arrays that agree in their first dim, at least one array.
        reverse: Whether to begin with the last row.

    Returns:
        The last carry, and what was kept, stacked in the order of the rows.

    Example:
        >>> last, before = counted_scan(lambda a, x: (a + x, a), jnp.float32(0), jnp.ones(3))
        >>> before.tolist()
        [0.0, 1.0, 2.0]
    """
    length = jax.tree.leaves(given)[0].shape[0]
    if length == 0:
        first = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), given)
        _, kept = jax.eval_shape(body, carry, first)
        return carry, jax.tree.map(lambda x: jnp.zeros((0, *x.shape), x.dtype), kept)
    kept = _room(lambda: body(carry, jax.tree.map(lambda x: _row(x, 0), given))[1], length)

    def more(state: Any) -> Any:
        return state[0] < jnp.int32(length)

    def turn(state: Any) -> Any:
        count, carry, kept = state
        at = jnp.int32(length - 1) - count if reverse else count
        carry, new = body(carry, jax.tree.map(lambda x: _row(x, at), given))
        kept = jax.tree.map(lambda all_, one: _with_row(all_, one, at), kept, new)
        return count + jnp.int32(1), carry, kept

    _, carry, kept = lax.while_loop(more, turn, (jnp.int32(0), carry, kept))
    return carry, kept


def _room(row: Callable[[], Any], length: int) -> Any:
    """Arrays for the rows that a function gives, of their memory and their manual axes."""
    jaxpr, tree = jax.make_jaxpr(row, return_shape=True)()
    rooms = [_empty(aval, length) for aval in jaxpr.out_avals]
    return jax.tree.unflatten(jax.tree.structure(tree), rooms)


def _empty(aval: Any, length: int) -> Any:
    room = jnp.zeros((length, *aval.shape), aval.dtype)
    if aval.memory_space != jax.typeof(room).memory_space:
        room = jax.device_put(room, aval.memory_space)
    varying = tuple(aval.mat.varying)
    return lax.pcast(room, varying, to="varying") if varying else room


def _row(array: Any, at: Any) -> Any:
    return lax.dynamic_index_in_dim(array, at, 0, keepdims=False, allow_negative_indices=False)


def _with_row(array: Any, row: Any, at: Any) -> Any:
    return lax.dynamic_update_index_in_dim(array, row, at, 0, allow_negative_indices=False)
