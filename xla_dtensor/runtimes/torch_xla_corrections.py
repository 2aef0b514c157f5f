"""Ops that torch_xla 2.9 computes wrongly, in silence, said with ops that it computes right.

Integer division goes through float32, so that ``2**40 // 3`` is 10,923 off.

Extrema are in `torch_xla_corrections_extrema`, writes by index in `torch_xla_corrections_writes`,
other calls in `torch_xla_corrections_calls`.

Whole ops, whose sharded dims it would flatten, are in `torch_xla_whole_ops`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

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


def correction(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Callable[[], torch.Tensor] | None:
    """Return what to run in place of the op; None where torch_xla is right.

    Args:
        func: An ``OpOverload``.
        args: Its positional arguments, payloads in place.
        kwargs: Its keyword arguments.
    """
    if func in EXTREMA:
        return EXTREMA[func](*args, **kwargs)
    if func in _DIVISIONS or func in _DIVISIONS_IN_PLACE:
        in_place = func in _DIVISIONS_IN_PLACE
        return _integer_division(in_place, *args, **kwargs)
    if func in WHOLE_OPS:
        return whole_op(func, args, kwargs)
    return write_correction(func, args, kwargs) or call_correction(func, args, kwargs)


def may_be_corrected(func: Any) -> bool:
    """Tell whether :func:`correction` has something to say of an aten op, for some arguments."""
    divisions = func in _DIVISIONS or func in _DIVISIONS_IN_PLACE
    whole = func in WHOLE_OPS and func.namespace == "aten"
    listed = divisions or func in EXTREMA or whole
    return listed or has_write_rule(func) or has_call_rule(func)


def _integer_division(
    in_place: bool, a: torch.Tensor, b: Any, rounding_mode: str | None = "floor"
) -> Callable[[], torch.Tensor] | None:
    dtype = torch.result_type(a, b)
    if dtype.is_floating_point or dtype.is_complex or rounding_mode is None:
        return None

    def divide() -> torch.Tensor:
        # By the remainder that is nearer to zero: a - rest cannot overflow.
        rest = torch.fmod(a, b)
        quotient = _exact_quotient(a - rest, b, dtype)
        if rounding_mode == "floor":
            quotient = quotient - ((rest != 0) & ((rest < 0) != (b < 0))).to(dtype)
        return assign(a, quotient) if in_place else quotient

    return divide


def _exact_quotient(a: torch.Tensor, b: Any, dtype: torch.dtype) -> torch.Tensor:
    """`a / b` where `b` divides `a`: float64's answer, and what it is off for long integers."""
    divisor = b.double() if isinstance(b, torch.Tensor) else float(b)
    quotient = (a.double() / divisor).round().to(dtype)
    if dtype != torch.int64:
        return quotient
    return quotient + ((a - quotient * b).double() / divisor).round().to(dtype)
