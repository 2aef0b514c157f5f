"""Special functions: incomplete gamma, zeta, normal quantiles, and numbers taken apart."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import torch
from jax.scipy import special

from xla_dtensor.runtimes.jax_lowering.elementwise import elementwise
from xla_dtensor.runtimes.jax_lowering.table import lower

__all__: list[str] = []

aten = torch.ops.aten

elementwise("special_i0e")(special.i0e)
elementwise("special_i1e")(special.i1e)
elementwise("special_ndtri")(special.ndtri)


@elementwise("special_zeta", "special_zeta.self_scalar", "special_zeta.other_scalar")
def _zeta(x: Any, q: Any) -> Any:
    is_pole = (x > 1) & (q <= 0) & (q == jnp.floor(q))
    return jnp.where(is_pole, jnp.inf, special.zeta(x, q))


@elementwise("special_erfcx")
def _erfcx(x: Any) -> Any:
    if x.dtype == jnp.float64:
        return special.erfcx(x)
    # JAX's float32 one (0.10) underflows to 0 between 9.2 and 9.4; here five terms are exact.
    far = jnp.where(x > 8, x, 8)
    at = 1 / (2 * far * far)
    series = 1 - at * (1 - 3 * at * (1 - 5 * at * (1 - 7 * at)))
    return jnp.where(x > 8, series / (far * math.sqrt(math.pi)), special.erfcx(x))


@elementwise("special_log_ndtr")
def _log_ndtr(x: Any) -> Any:
    # JAX's takes the logarithm of what is all but 1 up to x = 5, where few of its digits are left.
    low, high = jnp.where(x < -1, x, -1), jnp.where(x < -1, -1, x)
    tail = jnp.log(_erfcx(-low * math.sqrt(0.5)) / 2) - low * low / 2
    return jnp.where(x < -1, tail, jnp.log1p(-special.erfc(high * math.sqrt(0.5)) / 2))


@elementwise("igamma")
def _igamma(a: Any, x: Any) -> Any:
    return _at_the_ends(special.gammainc(a, x), a, x, at_zero=0.0)


@elementwise("igammac")
def _igammac(a: Any, x: Any) -> Any:
    return _at_the_ends(special.gammaincc(a, x), a, x, at_zero=1.0)


def _at_the_ends(found: Any, a: Any, x: Any, at_zero: float) -> Any:
    """Put in what torch returns where `a` or `x` is zero, infinite, negative or NaN."""
    found = jnp.where(jnp.isnan(a) | jnp.isnan(x), jnp.nan, found)
    found = jnp.where(jnp.isinf(x), 1 - at_zero, found)
    found = jnp.where(jnp.isinf(a), jnp.where(jnp.isinf(x), jnp.nan, at_zero), found)
    found = jnp.where(x == 0, at_zero, found)
    found = jnp.where(a == 0, jnp.where(x > 0, 1 - at_zero, jnp.nan), found)
    return jnp.where((a < 0) | (x < 0), jnp.nan, found)


@lower(aten.angle.default)
def _angle(x: Any) -> Any:
    if x.dtype.kind == "c":
        return jnp.angle(x)
    x = x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.float32)
    return jnp.where(jnp.isnan(x), x, jnp.where(x < 0, jnp.pi, 0).astype(x.dtype))


@lower(aten.frexp.Tensor)
def _frexp(x: Any) -> Any:
    return jnp.frexp(x)


@lower(aten._conj_physical.default)
def _conj_physical(x: Any) -> Any:
    return jnp.conj(x)
