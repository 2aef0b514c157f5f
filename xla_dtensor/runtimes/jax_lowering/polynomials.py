"""Orthogonal polynomials of an order that may differ by element.

All of them follow a recurrence of three terms, ``p[k + 1] = f(k, p[k], p[k - 1])``. Inside of
[-1, 1] the Chebyshev polynomials of higher orders are trigonometric functions of acos(x), as
torch computes them: there the recurrence would lose digits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from xla_dtensor.runtimes.jax_lowering.elementwise import elementwise

__all__: list[str] = []

Array = Any


def _recurrence(n: Array, first: Array, step: Callable[..., Array], x: Array) -> Array:
    """Return the polynomial of order `n`: 1 for 0, `first` for 1, 0 below."""

    def more(state: Any) -> Any:
        k, _, q = state
        return jnp.any((k < n) & ~jnp.isnan(q))

    def advance(state: Any) -> Any:
        k, p, q = state
        following = step(k.astype(x.dtype), x, q, p)
        active = (k < n) & ~jnp.isnan(q)
        return k + 1, jnp.where(active, q, p), jnp.where(active, following, q)

    start = (jnp.ones((), n.dtype), jnp.ones_like(x), first)
    _, _, last = lax.while_loop(more, advance, start)
    return jnp.where(n < 0, 0, jnp.where(n == 0, 1, last)).astype(x.dtype)


def _orders(x: Array, n: Array) -> tuple[Array, Array]:
    """Return x and the whole orders, of one shape. An order that is no number counts as none."""
    x, n = jnp.broadcast_arrays(x, n)
    return x, jnp.where(jnp.isfinite(n), jnp.trunc(n), -1).astype(jnp.int64)


def _named(name: str) -> tuple[str, str, str]:
    return name, f"{name}.x_scalar", f"{name}.n_scalar"


def _register_recurrence(
    name: str, first: Callable[[Array], Array], step: Callable[..., Array]
) -> None:
    def polynomial(x: Array, n: Array) -> Array:
        x, n = _orders(x, n)
        return _recurrence(n, first(x), step, x)

    elementwise(*_named(f"special_{name}"))(polynomial)


_register_recurrence(
    "legendre_polynomial_p", lambda x: x, lambda k, x, q, p: ((2 * k + 1) * x * q - k * p) / (k + 1)
)
_register_recurrence(
    "laguerre_polynomial_l",
    lambda x: 1 - x,
    lambda k, x, q, p: ((2 * k + (1 - x)) * q - k * p) / (k + 1),
)


def _hermite(scale: int) -> Callable[[Array, Array], Array]:
    """Return the physicists' polynomials for scale=2, the probabilists' for scale=1."""

    def polynomial(x: Array, n: Array) -> Array:
        x, n = _orders(x, n)
        limit = 512 if x.dtype == jnp.float64 else 128
        found = _recurrence(
            jnp.minimum(n, limit), scale * x, lambda k, x, q, p: scale * (x * q - k * p), x
        )
        return jnp.where(n > limit, jnp.nan, found)  # torch computes none beyond

    return polynomial


elementwise(*_named("special_hermite_polynomial_h"))(_hermite(2))
elementwise(*_named("special_hermite_polynomial_he"))(_hermite(1))


# ------------------------------------------------------------------ Chebyshev's


def _sign_of_power(n: Array) -> Array:
    return jnp.where(n % 2 == 0, 1, -1)


def _by_angle_t(x: Array, n: Array) -> Array:
    return jnp.cos(n * jnp.arccos(x))


def _by_angle_u(x: Array, n: Array) -> Array:
    angle = jnp.arccos(x)
    sine = jnp.sin(angle)
    at_end = (n + 1) * jnp.cos((n + 1) * angle) / x
    return jnp.where(sine != 0, jnp.sin((n + 1) * angle) / jnp.where(sine != 0, sine, 1), at_end)


def _by_angle_v(x: Array, n: Array) -> Array:
    angle = jnp.arccos(x)
    inside = jnp.cos((n + 0.5) * angle) / jnp.cos(angle / 2)
    return jnp.where(jnp.sin(angle / 2) != 1, inside, _sign_of_power(n) * (2 * n + 1))


def _by_angle_w(x: Array, n: Array) -> Array:
    angle = jnp.arccos(x)
    inside = jnp.sin((n + 0.5) * angle) / jnp.sin(angle / 2)
    return jnp.where(
        jnp.cos(angle / 2) != 1, inside, jnp.where(x > 0, 2 * n + 1, _sign_of_power(n))
    )


# Of each kind: the polynomial of order 1, those at 1 and at -1, by the angle, and from which order
# on torch goes by the angle, for the plain and for the shifted polynomials.
_CHEBYSHEV: dict[str, tuple[Any, Any, Any, Any, tuple[int, int]]] = {
    "t": (lambda x: x, lambda n: 1, _sign_of_power, _by_angle_t, (6, 6)),
    "u": (
        lambda x: x + x,
        lambda n: n + 1,
        lambda n: _sign_of_power(n) * (n + 1),
        _by_angle_u,
        (8, 6),
    ),
    "v": (
        lambda x: x + x - 1,
        lambda n: 1,
        lambda n: _sign_of_power(n) * (2 * n + 1),
        _by_angle_v,
        (8, 6),
    ),
    "w": (lambda x: x + x + 1, lambda n: 2 * n + 1, _sign_of_power, _by_angle_w, (8, 4)),
}


def _chebyshev(kind: str, shifted: bool) -> Callable[[Array, Array], Array]:
    first, at_one, at_minus_one, by_angle, thresholds = _CHEBYSHEV[kind]

    def polynomial(x: Array, n: Array) -> Array:
        x, n = _orders(x, n)
        x = x + x - 1 if shifted else x
        # Where the angle serves the recurrence would run for as long as the order is high.
        turned = (n > thresholds[shifted]) & (jnp.abs(x) < 1)
        ends = jnp.abs(x) == 1
        steps = jnp.where(turned | ends, 0, n)
        found = _recurrence(steps, first(x), lambda k, x, q, p: (x + x) * q - p, x)
        found = jnp.where(turned, by_angle(jnp.where(turned, x, 0.5), n.astype(x.dtype)), found)
        found = jnp.where(x == 1, at_one(n), found)
        found = jnp.where(x == -1, at_minus_one(n), found)
        return jnp.where(n < 0, 0, found).astype(x.dtype)

    return polynomial


for _kind in _CHEBYSHEV:
    elementwise(*_named(f"special_chebyshev_polynomial_{_kind}"))(_chebyshev(_kind, False))
    elementwise(*_named(f"special_shifted_chebyshev_polynomial_{_kind}"))(_chebyshev(_kind, True))
