"""Make an array where it lies: a program without inputs, each device computing its own tile.

Random values are counted from one key by the position in the global array (JAX's partitionable
generator), so that they do not depend on how the array is cut.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from xla_dtensor.runtimes.jax_lowering import random
from xla_dtensor.runtimes.jax_placing import padded

__all__ = ["make_array"]

_DRAWS = {"uniform": jax.random.uniform, "normal": jax.random.normal}


def make_array(
    fill: float | str, shape: tuple[int, ...], dtype: Any, sharding: NamedSharding
) -> jax.Array:
    """Make an array of a number, or of "uniform" or "normal" draws, padded to its tiles."""
    if isinstance(fill, str):
        return _drawer(fill, shape, jnp.dtype(dtype), sharding)(random.next_key())
    return _filler(shape, jnp.dtype(dtype), sharding)(jnp.asarray(fill, dtype))


@lru_cache(maxsize=1024)
def _filler(shape: tuple[int, ...], dtype: Any, sharding: NamedSharding) -> Any:
    return jax.jit(lambda x: padded(jnp.full(shape, x, dtype), sharding), out_shardings=sharding)


@lru_cache(maxsize=1024)
def _drawer(kind: str, shape: tuple[int, ...], dtype: Any, sharding: NamedSharding) -> Any:
    wide = jnp.promote_types(dtype, jnp.float32)
    draw = _DRAWS[kind]
    return jax.jit(
        lambda key: padded(draw(key, shape, wide).astype(dtype), sharding), out_shardings=sharding
    )
