"""Random ops.

Shapes, dtypes and distributions are torch's; the values are another generator's
(:mod:`xla_dtensor.runtimes.jax_generator`) and do not depend on how the tensor lies.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch

from xla_dtensor.runtimes.jax_convert import jax_dtype
from xla_dtensor.runtimes.jax_generator import lent, next_key, next_key_data
from xla_dtensor.runtimes.jax_lowering.table import Lowering, lower

__all__ = ["draws", "lent", "next_key", "next_key_data"]

aten = torch.ops.aten


def draws(lowering: Lowering) -> bool:
    """Tell whether a lowering takes a key."""
    return lowering.function.__module__ == __name__


def _float(meta: Any) -> Any:
    return jnp.promote_types(jax_dtype(meta.dtype), jnp.float32)


# ------------------------------------------------------------------ continuous


@lower(aten.rand_like.default, wants_meta=True)
def _rand_like(*_: Any, meta: Any, **__: Any) -> Any:
    return jax.random.uniform(next_key(), meta.shape, _float(meta))


@lower(aten.randn_like.default, wants_meta=True)
def _randn_like(*_: Any, meta: Any, **__: Any) -> Any:
    return jax.random.normal(next_key(), meta.shape, _float(meta))


@lower(aten.normal_functional.default, wants_meta=True)
def _normal(x: Any, mean: Any = 0, std: Any = 1, *, generator: Any = None, meta: Any) -> Any:
    return mean + std * jax.random.normal(next_key(generator), meta.shape, _float(meta))


@lower(aten.normal.Tensor_float, aten.normal.float_Tensor, aten.normal.Tensor_Tensor)
def _normal_of(mean: Any, std: Any = 1, *, generator: Any = None) -> Any:
    shape = jnp.broadcast_shapes(jnp.shape(mean), jnp.shape(std))
    dtype = jnp.result_type(mean, std)
    wide = jnp.promote_types(dtype, jnp.float32)
    return (mean + std * jax.random.normal(next_key(generator), shape, wide)).astype(dtype)


@lower(aten.log_normal.default, wants_meta=True)
def _log_normal(x: Any, mean: Any = 1, std: Any = 2, *, generator: Any = None, meta: Any) -> Any:
    return jnp.exp(mean + std * jax.random.normal(next_key(generator), meta.shape, _float(meta)))


@lower(aten.cauchy.default, wants_meta=True)
def _cauchy(x: Any, median: Any = 0, sigma: Any = 1, *, generator: Any = None, meta: Any) -> Any:
    return median + sigma * jax.random.cauchy(next_key(generator), meta.shape, _float(meta))


@lower(aten.uniform.default, wants_meta=True)
def _uniform(x: Any, low: Any = 0, high: Any = 1, *, generator: Any = None, meta: Any) -> Any:
    return low + (high - low) * jax.random.uniform(next_key(generator), meta.shape, _float(meta))


@lower(aten.exponential.default, wants_meta=True)
def _exponential(x: Any, lambd: Any = 1, *, generator: Any = None, meta: Any) -> Any:
    return jax.random.exponential(next_key(generator), meta.shape, _float(meta)) / lambd


@lower(aten._standard_gamma.default)
def _standard_gamma(x: Any, generator: Any = None) -> Any:
    return jax.random.gamma(next_key(generator), x, dtype=x.dtype)


@lower(aten._sample_dirichlet.default)
def _sample_dirichlet(x: Any, generator: Any = None) -> Any:
    drawn = jax.random.gamma(next_key(generator), x, dtype=x.dtype)
    return drawn / drawn.sum(-1, keepdims=True)


# ------------------------------------------------------------------ discrete


@lower(aten.bernoulli.default)
def _bernoulli(x: Any, *, generator: Any = None) -> Any:
    drawn = jax.random.bernoulli(next_key(generator), x).astype(x.dtype)
    return jnp.where((x >= 0) & (x <= 1), drawn, jnp.nan)


@lower(aten.bernoulli.p, aten.bernoulli.Tensor)
def _bernoulli_p(x: Any, p: Any = 0.5, *, generator: Any = None) -> Any:
    return jax.random.bernoulli(next_key(generator), p, x.shape).astype(x.dtype)


@lower(aten.randint_like.default, wants_meta=True)
def _randint_like(x: Any, high: Any, *, meta: Any, **_: Any) -> Any:
    return jax.random.randint(next_key(), meta.shape, 0, high, jnp.int64)


@lower(aten.randint_like.low_dtype, wants_meta=True)
def _randint_like_from(x: Any, low: Any, high: Any, *, meta: Any, **_: Any) -> Any:
    return jax.random.randint(next_key(), meta.shape, low, high, jnp.int64)


@lower(aten.random.default, aten.random.to)
def _random(x: Any, to: Any = None, *, generator: Any = None) -> Any:
    return _random_from(x, 0, to, generator=generator)


@lower(getattr(aten.random, "from"))
def _random_from(x: Any, low: Any, to: Any = None, *, generator: Any = None) -> Any:
    key = next_key(generator)
    if to is None and jnp.issubdtype(x.dtype, jnp.floating):
        to = 2 ** (jnp.finfo(x.dtype).nmant + 1) + 1  # integers that the dtype holds exactly
    elif to is None and x.dtype == jnp.int64:
        if low == 0:
            return (jax.random.bits(key, x.shape, jnp.uint64) >> 1).astype(x.dtype)
        to = 2**63 - 1
    elif to is None:
        to = 2 if x.dtype == jnp.bool_ else jnp.iinfo(x.dtype).max + 1
    return jax.random.randint(key, x.shape, low, to, jnp.int64).astype(x.dtype)


@lower(aten.geometric.default, wants_meta=True)
def _geometric(x: Any, p: Any, *, generator: Any = None, meta: Any) -> Any:
    drawn = jax.random.uniform(next_key(generator), meta.shape, _float(meta))
    return jnp.ceil(jnp.log1p(-drawn) / jnp.log1p(-p)).clip(1)


@lower(aten.poisson.default)
def _poisson(x: Any, generator: Any = None) -> Any:
    return jax.random.poisson(next_key(generator), x, dtype=jnp.int64).astype(x.dtype)


@lower(aten.binomial.default)
def _binomial(count: Any, prob: Any, generator: Any = None) -> Any:
    wide = jnp.promote_types(count.dtype, jnp.float32)
    drawn = jax.random.binomial(next_key(generator), count, prob, dtype=wide)
    return drawn.astype(count.dtype)


@lower(aten.multinomial.default)
def _multinomial(
    x: Any, num_samples: Any, replacement: Any = False, *, generator: Any = None
) -> Any:
    logits = jnp.log(x.astype(jnp.promote_types(x.dtype, jnp.float32)))
    key = next_key(generator)
    if replacement:
        shape = (num_samples, *x.shape[:-1])
        return jnp.moveaxis(jax.random.categorical(key, logits, shape=shape), 0, -1)
    return jax.lax.top_k(logits + jax.random.gumbel(key, x.shape, logits.dtype), num_samples)[1]


# ------------------------------------------------------------------ in networks


@lower(aten.native_dropout.default)
def _dropout(x: Any, p: float, train: bool | None) -> Any:
    if train is False or p == 0:
        return x, jnp.ones(x.shape, jnp.bool_)
    kept = jax.random.bernoulli(next_key(), 1 - p, x.shape)
    return jnp.where(kept, x / (1 - p), 0).astype(x.dtype), kept


@lower(aten.rrelu_with_noise_functional.default)
def _rrelu(
    x: Any,
    noise: Any,
    lower: Any = 1 / 8,
    upper: Any = 1 / 3,
    training: Any = False,
    generator: Any = None,
) -> Any:
    if not training:
        return jnp.where(x <= 0, x * ((lower + upper) / 2), x).astype(x.dtype), noise
    drawn = jax.random.uniform(next_key(generator), x.shape, jnp.float32, lower, upper)
    slope = jnp.where(x <= 0, drawn.astype(x.dtype), 1).astype(x.dtype)
    return x * slope, slope
