"""The calls of special functions, polynomials and Fourier transforms: test_jax_lowering_special."""

from __future__ import annotations

import math
from typing import Any

import torch

from tests.xla_dtensor.runtimes.lowering_cases import Case, draw_anew, f, flags, ints, named, pos

draw_anew()
_ends = torch.tensor([0.0, 2.0, 5.0, -1.0, 1.0, 0.5, math.inf, -math.inf, math.nan, 110.0])
LINE = torch.cat([torch.linspace(-12, 12, 97), _ends, torch.linspace(8, 13, 23)])
RIGHT = LINE[~(LINE <= 0)]
KINDS = torch.tensor([0.0, 1.0, 2.5, -1.0, math.inf, 0.3, 7.0, math.nan, 20.0])
FIRST, SECOND = (v.contiguous() for v in torch.meshgrid(KINDS, KINDS, indexing="ij"))
POINTS = torch.tensor([-2.0, -1.0, -0.999, -0.5, 0.0, 0.3, 0.77, 1.0, 1.4, 0.0001, 0.9999])
ORDERS = torch.tensor([-1.0, 0.0, 1.0, 2.0, 3.7, 5.0, 7.0, 8.0, 9.0, 12.0, math.nan])
X, N = (v.contiguous() for v in torch.meshgrid(POINTS, ORDERS, indexing="ij"))
KINDS_OF_POLYNOMIALS = (
    *(f"{shift}chebyshev_polynomial_{k}" for shift in ("", "shifted_") for k in "tuvw"),
    "hermite_polynomial_h",
    "hermite_polynomial_he",
    "laguerre_polynomial_l",
    "legendre_polynomial_p",
)
SPECIAL: dict[Any, list[Case]] = {
    **named(
        "special_i0e special_i1e special_erfcx special_log_ndtr special_airy_ai special_bessel_j0 "
        "special_bessel_j1 special_spherical_bessel_j0 special_modified_bessel_i0 "
        "special_modified_bessel_i1",
        Case(LINE),
        Case(ints(5, 6)),
    ),
    **named(
        "special_bessel_y0 special_bessel_y1 special_modified_bessel_k0 special_modified_bessel_k1 "
        "special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1",
        Case(RIGHT),
        Case(torch.tensor([0.0, -1.0])),
    ),
    **named("special_ndtri", Case(torch.linspace(-0.1, 1.1, 49)), Case(torch.tensor([0.0, 1.0]))),
    **named("special_zeta", Case(pos(5, 6) + 1, pos(6)), Case(f(5, 6) * 3, ints(6).float())),
    **named("special_zeta.self_scalar", Case(2.5, pos(5, 6))),
    **named("special_zeta.other_scalar", Case(pos(5, 6) + 1, 2)),
    **named("igamma igammac", Case(FIRST, SECOND), Case(pos(5, 6), pos(6)), Case(KINDS, pos(9))),
    **named(
        "angle",
        Case(LINE),
        Case(ints(5, 6)),
        Case(flags(5, 6)),
        Case(torch.complex(f(5, 6), f(5, 6))),
    ),
    **named("_conj_physical", Case(torch.complex(f(5, 6), f(5, 6)))),
    **named("frexp.Tensor", Case(f(5, 6) * 100), Case(torch.tensor([0.0, 1.0, -0.25]))),
    **named(" ".join(f"special_{k}" for k in KINDS_OF_POLYNOMIALS), Case(X, N)),
    **named(" ".join(f"special_{k}.n_scalar" for k in KINDS_OF_POLYNOMIALS), Case(X, 4)),
    **named(" ".join(f"special_{k}.x_scalar" for k in KINDS_OF_POLYNOMIALS), Case(0.4, N)),
}
REAL = f(5, 6, 7)
COMPLEX = torch.complex(f(5, 6, 7), f(5, 6, 7))
FOURIER: dict[Any, list[Case]] = {
    **named(
        "_fft_c2c",
        *(Case(COMPLEX, [2], norm, forward) for norm in (0, 1, 2) for forward in (True, False)),
        Case(COMPLEX, [0, 1], 2, True),
        Case(COMPLEX, [2, 0, 1], 1, False),
    ),
    **named(
        "_fft_r2c",
        *(Case(REAL, [0], norm, True) for norm in (0, 1, 2)),
        Case(REAL, [1, 2], 0, False),
        Case(REAL, [2, 0, 1], 1, True),
    ),
    **named(
        "_fft_c2r",
        *(Case(COMPLEX, [0], norm, 8) for norm in (0, 1, 2)),
        Case(COMPLEX, [1, 2], 0, 13),
        Case(COMPLEX, [2, 0, 1], 1, 11),
    ),
}
ALL = SPECIAL | FOURIER
