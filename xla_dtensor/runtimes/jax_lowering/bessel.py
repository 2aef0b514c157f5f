"""Bessel and Airy functions, by the rational approximations of torch's own kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.scipy import special

from xla_dtensor.runtimes.jax_lowering import bessel_coefficients as c
from xla_dtensor.runtimes.jax_lowering.elementwise import elementwise

__all__: list[str] = []

Array = Any
_TWO_BY_PI = 2 / math.pi
_ROOT_OF_TWO_BY_PI = math.sqrt(2 / math.pi)
# One over the root of pi, and Ai(0) and -Ai'(0).
_AIRY_SCALE = 5.64189583547756286948e-01
_AIRY_AT_ZERO = (0.355028053887817239260, 0.258819403792806798405)
_AIRY_TERMS = 30  # of the series for |x| < 2.09; it ends at the 20th in float64

elementwise("special_modified_bessel_i0")(special.i0)
elementwise("special_modified_bessel_i1")(special.i1)


def _polynomial(x: Array, coefficients: Sequence[float]) -> Array:
    total = jnp.zeros_like(x)
    for coefficient in coefficients:
        total = total * x + jnp.asarray(coefficient, x.dtype)
    return total


def _ratio(x: Array, above: Sequence[float], below: Sequence[float]) -> Array:
    return _polynomial(x, above) / _polynomial(x, below)


def _series(x: Array, coefficients: Sequence[float]) -> Array:
    """Return the Chebyshev series, by Clenshaw's recurrence."""
    before = last = jnp.zeros_like(x)
    total = jnp.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        before, last = last, total
        total = x * last - before + jnp.asarray(coefficient, x.dtype)
    return 0.5 * (total - before)


# ------------------------------------------------------------------ of the first and second kind


def _far(x: Array, order: int, turn: Callable[[Array, Array, Array], Array]) -> Array:
    """Return the function for x > 5, as a wave of the phase `x` that `turn` makes."""
    tables = (
        (c.ORDER0_PP, c.ORDER0_PQ, c.ORDER0_QP, c.ORDER0_QQ),
        (c.ORDER1_PP, c.ORDER1_PQ, c.ORDER1_QP, c.ORDER1_QQ),
    )[order]
    at = 25 / (x * x)
    p, q = _ratio(at, *tables[:2]), 5 / x * _ratio(at, *tables[2:])
    phase = x - (0.25 + 0.5 * order) * math.pi
    return turn(p, q, phase) * _ROOT_OF_TWO_BY_PI / jnp.sqrt(x)


def _first_kind(p: Array, q: Array, phase: Array) -> Array:
    return p * jnp.cos(phase) - q * jnp.sin(phase)


def _second_kind(p: Array, q: Array, phase: Array) -> Array:
    return p * jnp.sin(phase) + q * jnp.cos(phase)


@elementwise("special_bessel_j0")
def _j0(x: Array) -> Array:
    x = jnp.abs(x)
    square = x * x
    near = (
        (square - 5.78318596294678452118e00)
        * (square - 3.04712623436620863991e01)
        * _ratio(square, c.J0_RP, c.J0_RQ)
    )
    near = jnp.where(x < 1e-5, 1 - square / 4, near)
    return jnp.where(x <= 5, near, _far(jnp.where(x <= 5, 5, x), 0, _first_kind))


@elementwise("special_bessel_j1")
def _j1(x: Array) -> Array:
    size = jnp.abs(x)
    square = size * size
    near = (
        _ratio(square, c.J1_RP, c.J1_RQ)
        * size
        * (square - 1.46819706421238932572e01)
        * (square - 4.92184563216946036703e01)
    )
    found = jnp.where(size <= 5, near, _far(jnp.where(size <= 5, 5, size), 1, _first_kind))
    return jnp.where(x < 0, -found, found)


def _of_positive(x: Array, at_zero: float, found: Array) -> Array:
    return jnp.where(x == 0, at_zero, jnp.where(x < 0, jnp.nan, found))


@elementwise("special_bessel_y0")
def _y0(x: Array) -> Array:
    square = x * x
    near = _ratio(square, c.Y0_YP, c.Y0_YQ) + _TWO_BY_PI * jnp.log(x) * _j0(x)
    found = jnp.where(x <= 5, near, _far(jnp.where(x <= 5, 5, x), 0, _second_kind))
    return _of_positive(x, -jnp.inf, found)


@elementwise("special_bessel_y1")
def _y1(x: Array) -> Array:
    square = x * x
    near = x * _ratio(square, c.Y1_YP, c.Y1_YQ) + _TWO_BY_PI * (_j1(x) * jnp.log(x) - 1 / x)
    found = jnp.where(x <= 5, near, _far(jnp.where(x <= 5, 5, x), 1, _second_kind))
    return _of_positive(x, -jnp.inf, found)


@elementwise("special_spherical_bessel_j0")
def _spherical_j0(x: Array) -> Array:
    inverse_factorials = [(-1) ** k / math.factorial(2 * k + 1) for k in range(6, -1, -1)]
    near = _polynomial(x * x, inverse_factorials)
    far = jnp.where(jnp.isinf(x), 0, jnp.sin(x) / x)
    return jnp.where(jnp.abs(x) < 0.5, near, far)


# ------------------------------------------------------------------ modified


def _scaled_k0(x: Array) -> Array:
    near = _series(x * x - 2, c.K0_A) - jnp.log(0.5 * x) * special.i0(x)
    far = _series(8 / x - 2, c.K0_B) / jnp.sqrt(x)
    found = jnp.where(x <= 2, near * jnp.exp(jnp.minimum(x, 2)), far)
    return _of_positive(x, jnp.inf, found)


def _scaled_k1(x: Array) -> Array:
    near = jnp.log(0.5 * x) * special.i1(x) + _series(x * x - 2, c.K1_A) / x
    far = _series(8 / x - 2, c.K1_B) / jnp.sqrt(x)
    found = jnp.where(x <= 2, near * jnp.exp(jnp.minimum(x, 2)), far)
    return _of_positive(x, jnp.inf, found)


elementwise("special_scaled_modified_bessel_k0")(_scaled_k0)
elementwise("special_scaled_modified_bessel_k1")(_scaled_k1)


@elementwise("special_modified_bessel_k0")
def _k0(x: Array) -> Array:
    return _of_positive(x, jnp.inf, _scaled_k0(x) * jnp.exp(-x))


@elementwise("special_modified_bessel_k1")
def _k1(x: Array) -> Array:
    return _of_positive(x, jnp.inf, _scaled_k1(x) * jnp.exp(-x))


# ------------------------------------------------------------------ Airy


def _airy_left(x: Array) -> Array:
    """For x < -2.09, where it is a wave."""
    size = -x
    zeta = 2 * size * jnp.sqrt(size) / 3
    z = 1 / zeta
    square = z * z
    wave = zeta + 0.25 * math.pi
    even = 1 + square * _ratio(square, c.AI_AFN, c.AI_AFD)
    odd = z * _ratio(square, c.AI_AGN, c.AI_AGD)
    return _AIRY_SCALE / jnp.sqrt(jnp.sqrt(size)) * (jnp.sin(wave) * even - jnp.cos(wave) * odd)


def _airy_right(x: Array) -> Array:
    """For x >= 2.09, where it decays."""
    zeta = 2 * x * jnp.sqrt(x) / 3
    ratio = _ratio(1 / zeta, c.AI_AN, c.AI_AD)
    return _AIRY_SCALE * ratio / (2 * jnp.sqrt(jnp.sqrt(x)) * jnp.exp(zeta))


def _airy_middle(x: Array) -> Array:
    """Taylor's series about 0."""
    cube = x * x * x

    def add_term(i: Array, state: Any) -> Any:
        f, g, m, n = state
        k = 3 * i.astype(x.dtype)
        m = m * cube / ((k + 2) * (k + 3))
        n = n * cube / ((k + 3) * (k + 4))
        return f + m, g + n, m, n

    one = jnp.ones_like(x)
    f, g, _, _ = lax.fori_loop(0, _AIRY_TERMS, add_term, (one, x, one, x))
    return _AIRY_AT_ZERO[0] * f - _AIRY_AT_ZERO[1] * g


@elementwise("special_airy_ai")
def _airy(x: Array) -> Array:
    is_left, is_right = x < -2.09, x >= 2.09
    found = _airy_middle(jnp.where(is_left | is_right, 0, x))
    found = jnp.where(is_left, _airy_left(jnp.where(is_left, x, -3)), found)
    found = jnp.where(is_right, _airy_right(jnp.where(is_right, x, 3)), found)
    return jnp.where(jnp.isinf(x), jnp.nan, jnp.where(x > 103.892, 0, found))
