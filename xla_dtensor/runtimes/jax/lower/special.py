"""Special functions: incomplete gamma, zeta, normal quantiles, and numbers taken apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import torch
from jax import lax
from jax.scipy import special

from xla_dtensor.runtimes.jax.lower.table import elementwise, lower

__all__: list[str] = []


# ------------------------------------------------------------------------------ Bessel coefficients
#
# Coefficients of the Bessel and Airy functions, those of the Cephes library that torch uses.
#
# An array of them is a polynomial or a Chebyshev series, highest order first.

AI_AN = (
    0.346538101525629,
    12.007595273964581,
    76.27960536152345,
    168.08922493463058,
    159.75639135016442,
    70.53609068404442,
    14.026469116338967,
    1.0,
)
AI_AD = (
    0.5675945326387702,
    14.75625625848472,
    84.51389701414746,
    177.31808814540045,
    164.2346928715297,
    71.47784008255756,
    14.095913560783403,
    1.0,
)
AI_AFN = (
    -0.1316963234183318,
    -0.6264565444319123,
    -0.6931580360369335,
    -0.2797799815451191,
    -0.04919001326095003,
    -0.004062659235948854,
    -0.0001592764962392621,
    -2.776491081552329e-06,
    -1.6778769848911465e-08,
)
AI_AFD = (
    13.356042070655324,
    32.682503279522464,
    26.736704094149957,
    9.187074029072596,
    1.4752914677166642,
    0.11568717379518804,
    0.004402916416152112,
    7.547203482874142e-05,
    4.5185009297058035e-07,
)
AI_AGN = (
    0.01973399320916857,
    0.39110302961568827,
    1.0657989759959559,
    0.9391692298166502,
    0.35146565610554764,
    0.06338889196289255,
    0.005858041130483885,
    0.000282851600836737,
    6.98793669997261e-06,
    8.117892395543892e-08,
    3.415517847659236e-10,
)
AI_AGD = (
    9.30892908077442,
    19.835292871831214,
    15.564662893286462,
    5.476860694229755,
    0.9542936116189619,
    0.08645808263523921,
    0.004126565238242226,
    0.00010125908511650914,
    1.1716673321441352e-06,
    4.9183457006293e-09,
)
ORDER0_PP = (
    0.0007969367292973471,
    0.08283523921074408,
    1.239533716464143,
    5.447250030587687,
    8.74716500199817,
    5.303240382353949,
    1.0,
)
ORDER0_PQ = (
    0.0009244088105588637,
    0.08562884743544745,
    1.2535274390105895,
    5.470977403304171,
    8.761908832370695,
    5.306052882353947,
    1.0,
)
ORDER0_QP = (
    -0.011366383889846916,
    -1.2825271867050931,
    -19.553954425773597,
    -93.20601521237683,
    -177.68116798048806,
    -147.07750515495118,
    -51.41053267665993,
    -6.050143506007285,
)
ORDER0_QQ = (
    64.3178256118178,
    856.4300259769806,
    3882.4018360540163,
    7240.467741956525,
    5930.727011873169,
    2062.0933166032783,
    242.0057402402914,
)
J0_RP = (
    -4794432209.782018,
    1956174919465.5657,
    -249248344360967.72,
    9708622510473064.0,
)
J0_RQ = (
    499.563147152651,
    173785.4016763747,
    48440965.83399621,
    11185553704.535683,
    2112775201154.892,
    310518229857422.56,
    3.1812195594320496e16,
    1.7108629408104315e18,
)
ORDER1_PP = (
    0.0007621256162081731,
    0.07313970569409176,
    1.1271960812968493,
    5.112079511468076,
    8.424045901417724,
    5.214515986823615,
    1.0,
)
ORDER1_PQ = (
    0.0005713231280725487,
    0.06884559087544954,
    1.105142326340617,
    5.073863861286015,
    8.399855543276042,
    5.209828486823619,
    1.0,
)
ORDER1_QP = (
    0.05108625947501766,
    4.982138729512334,
    75.82382841325453,
    366.7796093601508,
    710.8563049989261,
    597.4896124006136,
    211.68875710057213,
    25.207020585802372,
)
ORDER1_QQ = (
    74.23732770356752,
    1056.4488603826283,
    4986.410583376536,
    9562.318924047562,
    7997.041604473507,
    2826.1927851763908,
    336.0936078106983,
)
J1_RP = (
    -899971225.7055594,
    452228297998.19403,
    -72749424522181.83,
    3682957328638529.0,
)
J1_RQ = (
    620.8364781180543,
    256987.25675774884,
    83514679.14319493,
    22151159547.97925,
    4749141220799.914,
    784369607876235.9,
    8.952223361846274e16,
    5.322786203326801e18,
)
Y0_YP = (
    15592.436785523574,
    -14663929.59039716,
    5435264770.518765,
    -982136065717.9115,
    87590639439536.7,
    -3466283033847297.0,
    4.4273326857256984e16,
    -1.8495080043698668e16,
)
Y0_YQ = (
    1041.2835366425984,
    626107.330137135,
    268919633.39381415,
    86400248710.3935,
    20297961275010.555,
    3171577528429750.5,
    2.5059625617265306e17,
)
Y1_YP = (
    1263204747.9017804,
    -647355876379.1603,
    114509511541823.73,
    -8127702555013251.0,
    2.024394757135949e17,
    -7.788771962659501e17,
)
Y1_YQ = (
    594.3015923461282,
    235564.09294306856,
    73481194.44597217,
    18760131610.870617,
    3882312774962.3857,
    620557727146953.8,
    6.871410873553005e16,
    3.9727060811656064e18,
)
K0_A = (
    1.374465435613523e-16,
    4.25981614279661e-14,
    1.0349695257633842e-11,
    1.904516377220209e-09,
    2.5347910790261494e-07,
    2.286212103119452e-05,
    0.001264615411446926,
    0.0359799365153615,
    0.3442898999246285,
    -0.5353273932339028,
)
K0_B = (
    5.300433772686263e-18,
    -1.6475804301524212e-17,
    5.2103915050390274e-17,
    -1.678231096805412e-16,
    5.512055978524319e-16,
    -1.848593377343779e-15,
    6.3400764774050706e-15,
    -2.2275133269916698e-14,
    8.032890775363575e-14,
    -2.9800969231727303e-13,
    1.140340588208475e-12,
    -4.514597883373944e-12,
    1.8559491149547177e-11,
    -7.957489244477107e-11,
    3.577397281400301e-10,
    -1.69753450938906e-09,
    8.574034017414225e-09,
    -4.660489897687948e-08,
    2.766813639445015e-07,
    -1.8317555227191195e-06,
    1.39498137188765e-05,
    -0.00012849549581627802,
    0.0015698838857300533,
    -0.0314481013119645,
    2.4403030820659555,
)
K1_A = (
    -7.023863479386288e-18,
    -2.427449850519366e-15,
    -6.666901694199329e-13,
    -1.4114883926335278e-10,
    -2.213387630734726e-08,
    -2.4334061415659684e-06,
    -0.0001730288957513052,
    -0.006975723859639864,
    -0.12261118082265715,
    -0.3531559607765449,
    1.5253002273389478,
)
K1_B = (
    -5.756744483665017e-18,
    1.7940508731475592e-17,
    -5.689462558442859e-17,
    1.838093544366639e-16,
    -6.057047248373319e-16,
    2.038703165624334e-15,
    -7.019837090418314e-15,
    2.4771544244813043e-14,
    -8.976705182324994e-14,
    3.3484196660784293e-13,
    -1.2891739609510289e-12,
    5.13963967348173e-12,
    -2.1299678384275683e-11,
    9.218315187605006e-11,
    -4.1903547593418965e-10,
    2.015049755197033e-09,
    -1.0345762465678097e-08,
    5.7410841254500495e-08,
    -3.5019606030878126e-07,
    2.406484947837217e-06,
    -1.936197974166083e-05,
    0.00019521551847135162,
    -0.002857816859622779,
    0.10392373657681724,
    2.7206261904844427,
)


# ------------------------------------------------------------------------------------------- Bessel
#
# Bessel and Airy functions, by the rational approximations of torch's own kernels.

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


def _ratio(x: Array, numerator: Sequence[float], denominator: Sequence[float]) -> Array:
    return _polynomial(x, numerator) / _polynomial(x, denominator)


def _series(x: Array, coefficients: Sequence[float]) -> Array:
    """Return the Chebyshev series, by Clenshaw's recurrence."""
    second_last = last = jnp.zeros_like(x)
    total = jnp.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        second_last, last = last, total
        total = x * last - second_last + jnp.asarray(coefficient, x.dtype)
    return 0.5 * (total - second_last)


# --------------------------------------------------------------------- Of the first and second kind


def _far(x: Array, order: int, turn: Callable[[Array, Array, Array], Array]) -> Array:
    """Return the function for x > 5, as a wave of the phase `x` that `turn` makes."""
    tables = (
        (ORDER0_PP, ORDER0_PQ, ORDER0_QP, ORDER0_QQ),
        (ORDER1_PP, ORDER1_PQ, ORDER1_QP, ORDER1_QQ),
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
        * _ratio(square, J0_RP, J0_RQ)
    )
    near = jnp.where(x < 1e-5, 1 - square / 4, near)
    return jnp.where(x <= 5, near, _far(jnp.where(x <= 5, 5, x), 0, _first_kind))


@elementwise("special_bessel_j1")
def _j1(x: Array) -> Array:
    size = jnp.abs(x)
    square = size * size
    near = (
        _ratio(square, J1_RP, J1_RQ)
        * size
        * (square - 1.46819706421238932572e01)
        * (square - 4.92184563216946036703e01)
    )
    y = jnp.where(size <= 5, near, _far(jnp.where(size <= 5, 5, size), 1, _first_kind))
    return jnp.where(x < 0, -y, y)


def _of_positive(x: Array, at_zero: float, y: Array) -> Array:
    return jnp.where(x == 0, at_zero, jnp.where(x < 0, jnp.nan, y))


@elementwise("special_bessel_y0")
def _y0(x: Array) -> Array:
    square = x * x
    near = _ratio(square, Y0_YP, Y0_YQ) + _TWO_BY_PI * jnp.log(x) * _j0(x)
    y = jnp.where(x <= 5, near, _far(jnp.where(x <= 5, 5, x), 0, _second_kind))
    return _of_positive(x, -jnp.inf, y)


@elementwise("special_bessel_y1")
def _y1(x: Array) -> Array:
    square = x * x
    near = x * _ratio(square, Y1_YP, Y1_YQ) + _TWO_BY_PI * (_j1(x) * jnp.log(x) - 1 / x)
    y = jnp.where(x <= 5, near, _far(jnp.where(x <= 5, 5, x), 1, _second_kind))
    return _of_positive(x, -jnp.inf, y)


@elementwise("special_spherical_bessel_j0")
def _spherical_j0(x: Array) -> Array:
    inverse_factorials = [(-1) ** k / math.factorial(2 * k + 1) for k in range(6, -1, -1)]
    near = _polynomial(x * x, inverse_factorials)
    far = jnp.where(jnp.isinf(x), 0, jnp.sin(x) / x)
    return jnp.where(jnp.abs(x) < 0.5, near, far)


# ------------------------------------------------------------------ modified


def _scaled_k0(x: Array) -> Array:
    near = _series(x * x - 2, K0_A) - jnp.log(0.5 * x) * special.i0(x)
    far = _series(8 / x - 2, K0_B) / jnp.sqrt(x)
    y = jnp.where(x <= 2, near * jnp.exp(jnp.minimum(x, 2)), far)
    return _of_positive(x, jnp.inf, y)


def _scaled_k1(x: Array) -> Array:
    near = jnp.log(0.5 * x) * special.i1(x) + _series(x * x - 2, K1_A) / x
    far = _series(8 / x - 2, K1_B) / jnp.sqrt(x)
    y = jnp.where(x <= 2, near * jnp.exp(jnp.minimum(x, 2)), far)
    return _of_positive(x, jnp.inf, y)


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
    even = 1 + square * _ratio(square, AI_AFN, AI_AFD)
    odd = z * _ratio(square, AI_AGN, AI_AGD)
    return _AIRY_SCALE / jnp.sqrt(jnp.sqrt(size)) * (jnp.sin(wave) * even - jnp.cos(wave) * odd)


def _airy_right(x: Array) -> Array:
    """For x >= 2.09, where it decays."""
    zeta = 2 * x * jnp.sqrt(x) / 3
    ratio = _ratio(1 / zeta, AI_AN, AI_AD)
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

    ones = jnp.ones_like(x)
    f, g, _, _ = lax.fori_loop(0, _AIRY_TERMS, add_term, (ones, x, ones, x))
    return _AIRY_AT_ZERO[0] * f - _AIRY_AT_ZERO[1] * g


@elementwise("special_airy_ai")
def _airy(x: Array) -> Array:
    is_left, is_right = x < -2.09, x >= 2.09
    y = _airy_middle(jnp.where(is_left | is_right, 0, x))
    y = jnp.where(is_left, _airy_left(jnp.where(is_left, x, -3)), y)
    y = jnp.where(is_right, _airy_right(jnp.where(is_right, x, 3)), y)
    return jnp.where(jnp.isinf(x), jnp.nan, jnp.where(x > 103.892, 0, y))


# ----------------------------------- Orthogonal polynomials of an order that may differ by element
#
# All of them follow a recurrence of three terms, ``p[k + 1] = f(k, p[k], p[k - 1])``. Inside of
# [-1, 1] the Chebyshev polynomials of higher orders are trigonometric functions of acos(x), as
# torch computes them: there the recurrence would lose digits.


def _recurrence(n: Array, first: Array, step: Callable[..., Array], x: Array) -> Array:
    """Return the polynomial of order `n`: 1 for 0, `first` for 1, 0 below."""

    def has_next(state: Any) -> Any:
        k, _, q = state
        return jnp.any((k < n) & ~jnp.isnan(q))

    def advance(state: Any) -> Any:
        k, p, q = state
        following = step(k.astype(x.dtype), x, q, p)
        active = (k < n) & ~jnp.isnan(q)
        return k + 1, jnp.where(active, q, p), jnp.where(active, following, q)

    start = (jnp.ones((), n.dtype), jnp.ones_like(x), first)
    _, _, last = lax.while_loop(has_next, advance, start)
    return jnp.where(n < 0, 0, jnp.where(n == 0, 1, last)).astype(x.dtype)


def _orders(x: Array, n: Array) -> tuple[Array, Array]:
    """Return x and the whole orders, of one shape. An order that is no number counts as none."""
    x, n = jnp.broadcast_arrays(x, n)
    return x, jnp.where(jnp.isfinite(n), jnp.trunc(n), -1).astype(jnp.int64)


def _overloads(name: str) -> tuple[str, str, str]:
    return name, f"{name}.x_scalar", f"{name}.n_scalar"


def _register_recurrence(
    name: str, first: Callable[[Array], Array], step: Callable[..., Array]
) -> None:
    def polynomial(x: Array, n: Array) -> Array:
        x, n = _orders(x, n)
        return _recurrence(n, first(x), step, x)

    elementwise(*_overloads(f"special_{name}"))(polynomial)


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
        y = _recurrence(
            jnp.minimum(n, limit), scale * x, lambda k, x, q, p: scale * (x * q - k * p), x
        )
        return jnp.where(n > limit, jnp.nan, y)  # torch computes none beyond

    return polynomial


elementwise(*_overloads("special_hermite_polynomial_h"))(_hermite(2))
elementwise(*_overloads("special_hermite_polynomial_he"))(_hermite(1))


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
        y = _recurrence(steps, first(x), lambda k, x, q, p: (x + x) * q - p, x)
        y = jnp.where(turned, by_angle(jnp.where(turned, x, 0.5), n.astype(x.dtype)), y)
        y = jnp.where(x == 1, at_one(n), y)
        y = jnp.where(x == -1, at_minus_one(n), y)
        return jnp.where(n < 0, 0, y).astype(x.dtype)

    return polynomial


for _kind in _CHEBYSHEV:
    elementwise(*_overloads(f"special_chebyshev_polynomial_{_kind}"))(_chebyshev(_kind, False))
    elementwise(*_overloads(f"special_shifted_chebyshev_polynomial_{_kind}"))(
        _chebyshev(_kind, True)
    )


# ------------------------------------------------------------------------------- Special functions

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


def _at_the_ends(y: Any, a: Any, x: Any, at_zero: float) -> Any:
    """Put in what torch returns where `a` or `x` is zero, infinite, negative or NaN."""
    y = jnp.where(jnp.isnan(a) | jnp.isnan(x), jnp.nan, y)
    y = jnp.where(jnp.isinf(x), 1 - at_zero, y)
    y = jnp.where(jnp.isinf(a), jnp.where(jnp.isinf(x), jnp.nan, at_zero), y)
    y = jnp.where(x == 0, at_zero, y)
    y = jnp.where(a == 0, jnp.where(x > 0, 1 - at_zero, jnp.nan), y)
    return jnp.where((a < 0) | (x < 0), jnp.nan, y)


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
