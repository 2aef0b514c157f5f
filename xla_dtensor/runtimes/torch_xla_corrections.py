"""Ops that torch_xla 2.9 computes wrongly, in silence, said with ops that it computes right.

Integer division goes through float32, so that ``2**40 // 3`` is 10,923 off; a quotient in half
precision is rounded before it is cut off. A shift to the right rounds to zero, and is 0 by a
tensor. Of an exponent only the last six bits are read.

Extrema are in `torch_xla_corrections_extrema`, writes by index in `torch_xla_corrections_writes`,
other calls in `torch_xla_corrections_calls`.

Whole ops, whose sharded dims it would flatten, are in `torch_xla_whole_ops`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from xla_dtensor.runtimes.functional_ops import functional_form
from xla_dtensor.runtimes.torch_xla_corrections_calls import call_correction, has_call_rule
from xla_dtensor.runtimes.torch_xla_corrections_extrema import EXTREMA
from xla_dtensor.runtimes.torch_xla_corrections_points import assign
from xla_dtensor.runtimes.torch_xla_corrections_writes import has_write_rule, write_correction
from xla_dtensor.runtimes.torch_xla_whole_ops import whole_op
from xla_dtensor.runtimes.whole_ops import WHOLE_OPS

__all__ = ["correction", "may_be_corrected"]

aten = torch.ops.aten
_DIVISIONS = {
    aten.floor_divide.default,
    aten.floor_divide.Scalar,
    aten.div.Tensor_mode,
    aten.div.Scalar_mode,
}
_DIVISIONS_IN_PLACE = {
    aten.floor_divide_.Tensor,
    aten.floor_divide_.Scalar,
    aten.div_.Tensor_mode,
    aten.div_.Scalar_mode,
}
_POWERS = {aten.pow, aten.pow_}
_SHIFTS = {aten.bitwise_right_shift, aten.__rshift__}
_SHIFTS_IN_PLACE = {aten.bitwise_right_shift_, aten.__irshift__}


def correction(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Callable[[], torch.Tensor] | None:
    """Return what to run in place of the op; None where torch_xla is right.

    Args:
        func: An ``OpOverload``.
        args: Its positional arguments, payloads in place.
        kwargs: Its keyword arguments.
    """
    if not _is_listed(func):
        return None
    if func in EXTREMA:
        return EXTREMA[func](*args, **kwargs)
    if func in _DIVISIONS or func in _DIVISIONS_IN_PLACE:
        in_place = func in _DIVISIONS_IN_PLACE
        return _rounded_division(in_place, *args, **kwargs)
    if func.overloadpacket in _SHIFTS | _SHIFTS_IN_PLACE and "out" not in kwargs:
        return _right_shift(func.overloadpacket in _SHIFTS_IN_PLACE, *args)
    if func.overloadpacket in _POWERS and "out" not in kwargs:
        return _integer_power(func.overloadpacket is aten.pow_, *args)
    if func in WHOLE_OPS:
        return whole_op(func, args, kwargs)
    return write_correction(func, args, kwargs) or call_correction(func, args, kwargs)


def may_be_corrected(func: Any) -> bool:
    """Tell whether :func:`correction` has something to say of an aten op, for some arguments."""
    divisions = func in _DIVISIONS or func in _DIVISIONS_IN_PLACE
    integers = _SHIFTS | _SHIFTS_IN_PLACE | _POWERS
    divisions = divisions or func.overloadpacket in integers
    whole = func in WHOLE_OPS and func.namespace == "aten"
    listed = divisions or func in EXTREMA or whole
    return listed or has_write_rule(func) or has_call_rule(func)


@cache
def _is_listed(func: Any) -> bool:
    """Whether an op, or the op that returns what it writes, is in one of the tables."""
    functional = functional_form(func) if func._schema.is_mutable else None
    listed = func in WHOLE_OPS or may_be_corrected(func)
    return listed or (functional is not None and may_be_corrected(functional))


def _rounded_division(
    in_place: bool, first: Any, b: Any, rounding_mode: str | None = "floor"
) -> Callable[[], torch.Tensor] | None:
    dtype = torch.result_type(first, b)
    if rounding_mode is None or dtype in (torch.float32, torch.float64) or dtype.is_complex:
        return None

    def divide() -> torch.Tensor:
        a = first if isinstance(first, torch.Tensor) else torch.full_like(b, first)
        if dtype.is_floating_point:
            wide = b.float() if isinstance(b, torch.Tensor) else b
            quotient = torch.div(a.float(), wide, rounding_mode=rounding_mode).to(dtype)
        else:
            # By the remainder that is nearer to zero: a - rest cannot overflow.
            rest = torch.fmod(a, b)
            quotient = _exact_quotient(a - rest, b, dtype)
            if rounding_mode == "floor":
                quotient = quotient - ((rest != 0) & ((rest < 0) != (b < 0))).to(dtype)
        return assign(a, quotient) if in_place else quotient

    return divide


def _right_shift(in_place: bool, first: Any, second: Any) -> Callable[[], torch.Tensor]:
    """A division by a power of two, rounded down; torch takes what is no bit for all of them."""

    def shift() -> torch.Tensor:
        like = first if isinstance(first, torch.Tensor) else second
        dtype = torch.result_type(first, second)
        a, bits = (
            value.to(torch.int64)
            if isinstance(value, torch.Tensor)
            else torch.full_like(like, value, dtype=torch.int64)
            for value in (first, second)
        )
        number = torch.iinfo(dtype).bits
        by_some = (bits >= 0) & (bits < min(number, 63))
        divisor = torch.ones_like(bits) << torch.where(by_some, bits, 0)
        divide = _rounded_division(False, a, divisor)
        assert divide is not None
        result = torch.where(by_some, divide(), -(a < 0).to(torch.int64)).to(dtype)
        return assign(first, result) if in_place else result

    return shift


def _integer_power(in_place: bool, base: Any, exponent: Any) -> Callable[[], torch.Tensor] | None:
    """Take an exponent six bits at a time: of x**64, x**4096 and so on up to the 63rd power."""
    dtype = torch.result_type(base, exponent)
    is_whole = not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
    if not is_whole or (not isinstance(exponent, torch.Tensor) and exponent < 64):
        return None
    like = base if isinstance(base, torch.Tensor) else exponent

    def power() -> torch.Tensor:
        x, rest = (
            value.to(dtype)
            if isinstance(value, torch.Tensor)
            else torch.full_like(like, value, dtype=dtype)
            for value in (base, exponent)
        )
        negative, result = torch.pow(x, rest), torch.ones_like(x)
        for bits in range(0, torch.iinfo(dtype).bits - 1, 6):
            result = result * torch.pow(x, torch.clamp(rest >> bits, min=0) & 63)
            x = torch.pow(torch.pow(x, torch.full_like(x, 32)), torch.full_like(x, 2))
        result = torch.where(rest < 0, negative, result)
        return assign(base, result) if in_place else result

    return power


def _exact_quotient(a: torch.Tensor, b: Any, dtype: torch.dtype) -> torch.Tensor:
    """`a / b` where `b` divides `a`: float64's answer, and what it is off for long integers."""
    divisor = b.double() if isinstance(b, torch.Tensor) else float(b)
    quotient = (a.double() / divisor).round().to(dtype)
    if dtype != torch.int64:
        return quotient
    return quotient + ((a - quotient * b).double() / divisor).round().to(dtype)
