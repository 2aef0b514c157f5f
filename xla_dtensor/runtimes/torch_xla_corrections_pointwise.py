"""Pointwise ops that torch_xla 2.9 gets wrong, or runs on the host where a compiled step cannot.

A rule takes an op's arguments and returns what to run in its place; None where torch_xla is right.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["POINTWISE", "size_of"]

aten = torch.ops.aten
Rule = Callable[..., Callable[[], torch.Tensor] | None]


def _logarithm(base: float) -> Callable[..., Callable[[], torch.Tensor] | None]:
    """torch_xla's constants have the precision of float32."""

    def rule(x: torch.Tensor) -> Callable[[], torch.Tensor] | None:
        return (lambda: torch.log(x) / math.log(base)) if x.dtype == torch.float64 else None

    return rule


def _conjugated(slope: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """torch_xla forgets to conjugate the derivative of complex numbers."""

    def rule(grad: torch.Tensor, y: torch.Tensor) -> Callable[[], torch.Tensor] | None:
        return (lambda: grad * slope(y).conj().resolve_conj()) if y.is_complex() else None

    return rule


def _sign(x: torch.Tensor) -> Callable[[], torch.Tensor] | None:
    """XLA has none of bools, and its sign of NaN is NaN; PyTorch's is 0."""
    if x.dtype == torch.bool:
        return lambda: x.clone()
    found = aten.sign.default
    return (lambda: found(x).masked_fill(x != x, 0)) if x.is_floating_point() else None


def _logit(x: torch.Tensor, eps: float | None = None) -> Callable[[], torch.Tensor] | None:
    """torch_xla does not clamp."""
    return None if eps is None else lambda: torch.logit(x.clamp(eps, 1 - eps))


def _is_nan(x: torch.Tensor) -> Callable[[], torch.Tensor] | None:
    """XLA asks real numbers alone."""
    if x.is_complex():
        return lambda: torch.isnan(x.real) | torch.isnan(x.imag)
    return None if x.is_floating_point() else lambda: torch.zeros_like(x, dtype=torch.bool)


def _is_close(
    a: torch.Tensor,
    b: torch.Tensor,
    rtol: float = 1e-05,
    atol: float = 1e-08,
    equal_nan: bool = False,
) -> Callable[[], torch.Tensor] | None:
    """torch_xla has no parts of complex numbers as a view, which PyTorch asks for."""
    if not a.is_complex():
        return None

    def close() -> torch.Tensor:
        off = size_of(a - b)
        near = (a == b) | ((off <= atol + size_of(b * rtol)) & torch.isfinite(off))
        return near | (torch.isnan(a) & torch.isnan(b)) if equal_nan else near

    return close


def _all_close(*args: Any, **kwargs: Any) -> Callable[[], Any] | None:
    close = _is_close(*args, **kwargs)
    return None if close is None else lambda: bool(close().all())


def _is_an_infinity(x: torch.Tensor) -> Callable[[], torch.Tensor] | None:
    """torch_xla takes the smallest whole number for an infinity."""
    whole = not x.is_floating_point()
    return (lambda: torch.zeros_like(x, dtype=torch.bool)) if whole else None


def _remainder(func: Any, x: Any, y: Any) -> Callable[[], torch.Tensor] | None:
    """torch_xla takes the dtype of an int8 for that of a uint8, which XLA refuses."""
    tensors = [value for value in (x, y) if isinstance(value, torch.Tensor)]
    if torch.int8 not in {tensor.dtype for tensor in tensors}:
        return None
    wide = [v.to(torch.int32) if isinstance(v, torch.Tensor) else v for v in (x, y)]
    return lambda: func(*wide).to(torch.int8)


def _length(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The square root of a * a + b * b, whose squares may overflow where it does not."""
    a, b = a.abs(), b.abs()
    large, small = torch.maximum(a, b), torch.minimum(a, b)
    ratio = torch.where((large == 0) | (large == math.inf), 0, small / large)
    length = large * torch.sqrt(1 + ratio * ratio)
    length = torch.where((a != a) | (b != b), math.nan, length)
    return torch.where((a == math.inf) | (b == math.inf), math.inf, length)


def size_of(x: torch.Tensor) -> torch.Tensor:
    """Return the absolute values of a payload; torch_xla says that those of complex ones are so.

    The gradient of an extreme norm goes to the elements that equal it: they are found as here.
    """
    return _length(x.real, x.imag) if x.is_complex() else x.abs()


def _hypot(a: torch.Tensor, b: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: _length(a, b)


def _abs(x: torch.Tensor) -> Callable[[], torch.Tensor] | None:
    return (lambda: size_of(x)) if x.is_complex() else None


def _quotient(a: Any, b: Any) -> Callable[[], torch.Tensor] | None:
    """torch_xla says that a quotient of complex numbers is real."""
    tensors = [value for value in (a, b) if isinstance(value, torch.Tensor)]
    dtype = torch.result_type(a, b)
    if not dtype.is_complex:
        return None

    def divide() -> torch.Tensor:
        top, below = (
            value.to(dtype)
            if isinstance(value, torch.Tensor)
            else torch.full_like(tensors[0], value, dtype=dtype)
            for value in (a, b)
        )
        # Scaled, since a square may overflow where the quotient does not.
        scale = torch.maximum(below.real.abs(), below.imag.abs()).reciprocal()
        real, imag = below.real * scale, below.imag * scale
        inverse = (scale / (real * real + imag * imag)).to(dtype)
        return top * (below * scale.to(dtype)).conj().resolve_conj() * inverse

    return divide


def _copysign(x: torch.Tensor, sign: Any) -> Callable[[], torch.Tensor]:
    def copy() -> torch.Tensor:
        if not isinstance(sign, torch.Tensor):
            return x.abs() if math.copysign(1.0, sign) > 0 else -x.abs()
        is_negative = (sign < 0) | ((sign == 0) & (1 / sign < 0))
        return torch.where(is_negative, -x.abs(), x.abs())

    return copy


def _exp2(x: torch.Tensor) -> Callable[[], torch.Tensor] | None:
    return (lambda: torch.pow(2.0, x)) if x.is_floating_point() else None


def _log1p(x: torch.Tensor) -> Callable[[], torch.Tensor] | None:
    """XLA's loses digits in float64 where x is small: it takes log(1 + x) from 1e-4 on."""
    if x.dtype != torch.float64:
        return None

    def log() -> torch.Tensor:
        found = aten.log1p.default(x)
        better = found - (torch.expm1(found) - x) / (1 + x)  # a step of Newton's
        return torch.where(x.abs() < 0.5, better, found)

    return log


def _atanh(x: torch.Tensor) -> Callable[[], torch.Tensor] | None:
    log = _log1p(2 * x.abs() / (1 - x.abs())) if x.dtype == torch.float64 else None
    return None if log is None else lambda: torch.sign(x) * log() / 2


def _logaddexp2(a: torch.Tensor, b: torch.Tensor) -> Callable[[], torch.Tensor]:
    def add() -> torch.Tensor:
        large, small = torch.where(a >= b, a, b), torch.where(a >= b, b, a)
        total = large + torch.log1p(torch.pow(2.0, small - large)) / math.log(2)
        total = torch.where((large == small) & (large.abs() == math.inf), large, total)
        return torch.where((a != a) | (b != b), math.nan, total)

    return add


def _fmin(a: torch.Tensor, b: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: torch.where((b != b) | (a <= b), a, b)


def _fmax(a: torch.Tensor, b: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: torch.where((b != b) | (a >= b), a, b)


POINTWISE: dict[Any, Rule] = {
    aten.abs: _abs,
    aten.allclose: _all_close,
    aten.atanh: _atanh,
    aten.copysign: _copysign,
    aten.div: _quotient,
    aten.exp2: _exp2,
    aten.fmax: _fmax,
    aten.fmin: _fmin,
    aten.hypot: _hypot,
    aten.isclose: _is_close,
    aten.isnan: _is_nan,
    aten.isneginf: _is_an_infinity,
    aten.isposinf: _is_an_infinity,
    aten.log10: _logarithm(10),
    aten.log1p: _log1p,
    aten.log2: _logarithm(2),
    aten.logit: _logit,
    aten.logaddexp2: _logaddexp2,
    aten.remainder: functools.partial(_remainder, torch.remainder),
    aten.sgn: _sign,
    aten.sigmoid_backward: _conjugated(lambda y: y * (1 - y)),
    aten.sign: _sign,
    aten.tanh_backward: _conjugated(lambda y: 1 - y * y),
}
