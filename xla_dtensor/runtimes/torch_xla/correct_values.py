"""Values that torch_xla gets wrong: dtypes, extrema, functions, convolution, batch norm.

PyTorch computes an elementwise op in one dtype, which it finds from all operands. torch_xla 2.9
computes in that of some operand: ``uint8 < int8`` compares unsigned numbers, an int64 is clamped at
0 by ``clamp(min=0.5)``, ``where(mask, int64, float32)`` does not compile. So operands are cast::

    torch.maximum(uint8, int8)        both to int16
    int64.clamp(min=0.5)              to float32
    float32.mul_(float64)             computed in float64, then written into the float32

Other ops forget to widen what they return (``int8.cumsum(0)`` is an int8), or say a dtype that they
do not have. What they return is compared with what torch's meta device says of the call.

Invariants: what is of one dtype, float32 or float64, is passed on as it is, and nobody is asked.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from mesh_utils import Mesh
from xla_dtensor.core import Layout
from xla_dtensor.runtimes.functional import functional_form, smooth_l1_backward
from xla_dtensor.runtimes.nested import leaves, map_nested
from xla_dtensor.runtimes.op_meta import Meta, output_meta
from xla_dtensor.runtimes.torch_xla.annotations import xlac
from xla_dtensor.runtimes.torch_xla.correct_writes import (
    annotated,
    assign,
    has_manual,
    replicated,
    run_on_host,
)

__all__ = [
    "EXTREMA",
    "POINTWISE",
    "batch_norm",
    "convolution",
    "convolution_backward",
    "extreme_value",
    "has_other_statistics",
    "in_torchs_dtypes",
    "size_of",
]


# ---------------------------------------------------------- Operands and results in torch's dtypes

aten = torch.ops.aten
Run = Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]
_WIDE = frozenset({torch.float32, torch.float64})
_NO_OPERANDS = frozenset({"condition", "mask"})
_NUMBERS = frozenset({"self", "other"})
_ELEMENTWISE = frozenset(
    {aten._cdist_forward, aten.floor_divide, aten.masked_fill, aten.rsub, aten.where}
)


def in_torchs_dtypes(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], run: Run) -> Any:
    """Run an op in the dtype that torch computes it in, and return what torch would return.

    Args:
        func: An ``OpOverload``.
        args: Its positional arguments, payloads in place.
        kwargs: Its keyword arguments.
        run: Runs an op, corrected where torch_xla's values are wrong.
    """
    if _is_plain(args, kwargs):
        return run(func, args, kwargs)
    if _is_elementwise(func):
        return _run_elementwise(func, args, kwargs, run)
    output = run(func, args, kwargs)
    return output if func._schema.is_mutable else _in_meta_dtypes(func, args, kwargs, output, run)


def _is_plain(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether nothing can be promoted: all tensors are of one dtype, which is a wide one."""
    arguments = (*args, *kwargs.values())
    if any(isinstance(argument, (list, tuple)) for argument in arguments):
        arguments = tuple(leaves(arguments))
    dtypes = {argument.dtype for argument in arguments if isinstance(argument, torch.Tensor)}
    is_complex = any(isinstance(argument, complex) for argument in arguments)
    return len(dtypes) == 1 and dtypes <= _WIDE and not is_complex


@cache
def _is_elementwise(func: Any) -> bool:
    schema, packet = func._schema, func.overloadpacket
    is_one = len(schema.returns) == 1 and "out" not in {a.name for a in schema.arguments}
    listed = torch.Tag.pointwise in func.tags or packet in _ELEMENTWISE
    return listed and is_one and packet not in (aten.clone, aten._to_copy)


# ------------------------------------------------------------------ elementwise ops


def _run_elementwise(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], run: Run) -> Any:
    in_place = func._schema.is_mutable
    functional = functional_form(func) if in_place else func
    meta = None if functional is None else output_meta(functional, args, kwargs)
    if not isinstance(meta, Meta):
        return run(func, args, kwargs)
    args, kwargs = _within(functional, args, kwargs)
    dtype = _computed_in(functional, args, kwargs, meta.dtype)
    if dtype is None:
        output = run(func, args, kwargs)
        return output if in_place else _in_meta_dtypes(func, args, kwargs, output, run)
    operands = _cast(functional, args, kwargs, dtype)
    if not in_place:
        return _in_meta_dtypes(func, args, kwargs, run(func, *operands), run)
    if dtype == args[0].dtype:
        return run(func, (args[0], *operands[0][1:]), operands[1])
    return assign(args[0], run(functional, *operands).to(args[0].dtype))


def _within(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return arguments whose whole numbers are those of the tensors' dtype: -3 is 253 of uint8."""
    named = _named(func, args, kwargs)
    operands = [argument for name, argument in named if _is_operand(name, argument)]
    if len(operands) != 2 or not any(type(argument) is int for argument in operands):
        return args, kwargs
    dtype = torch.result_type(*operands)
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        return args, kwargs

    def within(name: str, argument: Any) -> Any:
        is_number = type(argument) is int and _is_operand(name, argument)
        return int(torch.tensor(argument).to(dtype)) if is_number else argument

    pairs = [(name, within(name, argument)) for name, argument in named]
    return tuple(argument for _, argument in pairs[: len(args)]), dict(pairs[len(args) :])


def _computed_in(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], dtype: torch.dtype
) -> torch.dtype | None:
    """Return the dtype that operands are to be cast to; None if they are fine."""
    named = _named(func, args, kwargs)
    operands = [operand for name, operand in named if _is_operand(name, operand)]
    tensors = [operand for operand in operands if isinstance(operand, torch.Tensor)]
    if dtype == torch.bool:
        if len(operands) != 2:
            return None
        dtype = torch.result_type(*operands)
    if any(tensor.is_complex() and not dtype.is_complex for tensor in tensors):
        return None
    return None if all(tensor.dtype == dtype for tensor in tensors) else dtype


def _named(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    names = [argument.name for argument in func._schema.arguments]
    return [*zip(names, args, strict=False), *kwargs.items()]


def _is_operand(name: str, argument: Any) -> bool:
    """Tell whether an op computes with an argument: a tensor, or a number in the place of one."""
    if isinstance(argument, torch.Tensor):
        return name not in _NO_OPERANDS
    return isinstance(argument, bool | int | float | complex) and name in _NUMBERS


def _cast(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], dtype: torch.dtype
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    cast = [
        (name, _widened(argument, dtype) if _is_operand(name, argument) else argument)
        for name, argument in _named(func, args, kwargs)
    ]
    return tuple(argument for _, argument in cast[: len(args)]), dict(cast[len(args) :])


# ------------------------------------------------------------------ results


def _in_meta_dtypes(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any, run: Run
) -> Any:
    """Return the result in torch's dtypes."""
    meta = output_meta(func, args, kwargs)
    pairs = zip(leaves((output,)), leaves((meta,)), strict=False)
    wrong = [
        (tensor.dtype, like.dtype)
        for tensor, like in pairs
        if isinstance(tensor, torch.Tensor)
        and isinstance(like, Meta)
        and tensor.dtype != like.dtype
    ]
    if not wrong:
        return output
    actual, expected = wrong[0]
    if expected.is_complex and not actual.is_complex:
        return run_on_host(func, args, kwargs)
    if expected == torch.int64 and not isinstance(output, tuple | list):
        widened = map_nested(lambda tensor: _widened(tensor, expected), tuple(args))
        output = run(func, widened, kwargs)
    return _as(output, meta)


def _widened(argument: Any, dtype: torch.dtype) -> Any:
    return argument.to(dtype) if isinstance(argument, torch.Tensor) else argument


def _as(output: Any, meta: Any) -> Any:
    if isinstance(output, tuple | list):
        return type(output)(_as(*pair) for pair in zip(output, meta, strict=True))
    if not isinstance(meta, Meta) or output.dtype == meta.dtype:
        return output
    is_too_wide = output.is_complex() and not meta.dtype.is_complex
    return (torch.real(output) if is_too_wide else output).to(meta.dtype)


# --------------------------------------------------------------------- Largest and smallest values
#
# torch_xla 2.9 is wrong on infinities, NaNs and ties.
#
# It starts from the largest finite number, so that the maximum of ``-inf`` alone is -3.4e38; where
# XLA was started without our flag it passes over NaNs on the CPU (``annotations``); the places that
# it gives are wrong where a dim with NaNs or infinities is cut; and of equal values in ``cummax``
# it gives the first place, PyTorch the last. ``amax`` and ``amin`` without dims return their input
# unchanged.
#
# Here a place is the least one at which the extremum stands, which is a minimum of whole numbers.

Replacement = Callable[[], Any] | None


def _extremum(
    largest: bool, x: torch.Tensor, dim: Sequence[int] = (), keepdim: bool = False
) -> Replacement:
    if x.numel() == 0:
        return None
    return lambda: extreme_value(largest, x, list(dim) or list(range(x.ndim)), keepdim)


def extreme_value(largest: bool, x: torch.Tensor, dims: list[int], keepdim: bool) -> torch.Tensor:
    """Return the largest or smallest values along `dims`, infinities and NaNs as PyTorch has it.

    Raises:
        IndexError: There is no such dim.
    """
    number = max(x.ndim, 1)
    for dim in dims:
        if not -number <= dim < number:
            raise IndexError(
                "Dimension out of range (expected to be in range of "
                f"[{-number}, {number - 1}], but got {dim})"
            )
    if x.ndim == 0:
        return x.clone()
    extremum = (aten.amax if largest else aten.amin).default(x, dims, keepdim)
    if not x.is_floating_point():
        return extremum
    least = -math.inf if largest else math.inf
    only_least = (x != least).to(torch.int32).sum(dims, keepdim) == 0
    any_nan = (x != x).to(torch.int32).sum(dims, keepdim) > 0
    return extremum.masked_fill(only_least, least).masked_fill(any_nan, math.nan)


def _place(largest: bool, x: torch.Tensor, dim: int, keepdim: bool) -> torch.Tensor:
    extremum = extreme_value(largest, x, [dim], True)
    if x.ndim == 0:
        return torch.zeros_like(x, dtype=torch.int64)
    stands = (x == extremum) | ((x != x) & (extremum != extremum))
    size = x.shape[dim]
    places = torch.where(stands, _counted(x, dim), size)
    return aten.amin.default(places, [dim], keepdim)


def _counted(x: torch.Tensor, dim: int) -> torch.Tensor:
    shape = [1] * x.ndim
    shape[dim] = x.shape[dim]
    return torch.arange(x.shape[dim], device=x.device).reshape(shape).expand(x.shape)


def _whole(largest: bool, x: torch.Tensor) -> Replacement:
    return _extremum(largest, x)


def _with_place(largest: bool, x: torch.Tensor, dim: int, keepdim: bool = False) -> Replacement:
    if x.numel() == 0:
        return None
    return lambda: (extreme_value(largest, x, [dim], keepdim), _place(largest, x, dim, keepdim))


def _place_alone(
    largest: bool, x: torch.Tensor, dim: int | None = None, keepdim: bool = False
) -> Replacement:
    if x.numel() == 0:
        return None

    def place() -> torch.Tensor:
        if dim is not None:
            return _place(largest, x, dim, keepdim)
        index = _place(largest, x.reshape(-1), 0, False)
        return index.reshape([1] * x.ndim) if keepdim else index

    return place


def _running(largest: bool, x: torch.Tensor, dim: int) -> Replacement:
    if x.numel() == 0 or x.ndim == 0:
        return None
    run = (aten.cummax if largest else aten.cummin).default

    def running() -> tuple[torch.Tensor, torch.Tensor]:
        values = run(x, dim)[0]
        if x.is_floating_point():
            values = values.masked_fill((x != x).to(torch.int32).cumsum(dim) > 0, math.nan)
        stands = (x == values) | (x != x)
        places = torch.where(stands, _counted(x, dim), -1)
        return values, aten.cummax.default(places, dim)[0]

    return running


def _sorted(func: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Replacement:
    """XLA orders NaNs by their sign, which 0 / 0 has on a CPU, and in bfloat16 before all else."""
    if not x.is_floating_point():
        return None

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        wide = x if x.dtype in _WIDE else x.float()
        values, places = func(wide.masked_fill(wide != wide, math.nan), *args, **kwargs)
        return values.to(x.dtype), places

    return run


def _both(rule: Callable[..., Replacement], largest: Any, smallest: Any) -> dict[Any, Any]:
    return {
        largest: lambda *args, **kwargs: rule(True, *args, **kwargs),
        smallest: lambda *args, **kwargs: rule(False, *args, **kwargs),
    }


EXTREMA: dict[Any, Callable[..., Replacement]] = {
    **_both(_extremum, aten.amax.default, aten.amin.default),
    **_both(_whole, aten.max.default, aten.min.default),
    **_both(_with_place, aten.max.dim, aten.min.dim),
    **_both(_place_alone, aten.argmax.default, aten.argmin.default),
    **_both(_running, aten.cummax.default, aten.cummin.default),
    **{
        func: functools.partial(_sorted, func)
        for func in (aten.sort.default, aten.sort.stable, aten.topk.default, aten.kthvalue.default)
    },
}


# ---------------------------------------------------------------------------------------- Pointwise
#
# Pointwise ops that torch_xla 2.9 gets wrong, or runs on the host where a compiled step cannot.
#
# A rule takes an op's arguments and returns what to run in its place; None where torch_xla is
# right.

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
    sign = aten.sign.default
    return (lambda: sign(x).masked_fill(x != x, 0)) if x.is_floating_point() else None


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
    is_integer = not x.is_floating_point()
    return (lambda: torch.zeros_like(x, dtype=torch.bool)) if is_integer else None


def _remainder(func: Any, x: Any, y: Any) -> Callable[[], torch.Tensor] | None:
    """torch_xla takes the dtype of an int8 for that of a uint8, which XLA refuses.

    Of a number by an infinity it gives NaN.
    """
    tensors = [operand for operand in (x, y) if isinstance(operand, torch.Tensor)]
    if torch.result_type(x, y).is_floating_point:

        def remainder() -> torch.Tensor:
            residue = torch.fmod(x if isinstance(x, torch.Tensor) else torch.full_like(y, x), y)
            return torch.where((residue != 0) & ((residue < 0) != (y < 0)), residue + y, residue)

        return remainder
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
    tensors = [operand for operand in (a, b) if isinstance(operand, torch.Tensor)]
    dtype = torch.result_type(a, b)
    if not dtype.is_complex:
        return None

    def divide() -> torch.Tensor:
        top, below = (
            operand.to(dtype)
            if isinstance(operand, torch.Tensor)
            else torch.full_like(tensors[0], operand, dtype=dtype)
            for operand in (a, b)
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
        logarithm = aten.log1p.default(x)
        better = logarithm - (torch.expm1(logarithm) - x) / (1 + x)  # a step of Newton's
        return torch.where(x.abs() < 0.5, better, logarithm)

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


def _threshold(x: torch.Tensor, threshold: Any, value: Any) -> Callable[[], torch.Tensor] | None:
    """XLA compares with NaN, which is neither more nor less, and so takes the value for it."""
    is_passed_on = not x.is_floating_point() or x.dtype == torch.float64
    return None if is_passed_on else lambda: torch.where(x <= threshold, value, x)


def _softshrink(x: torch.Tensor, width: Any = 0.5) -> Callable[[], torch.Tensor]:
    """As for `_threshold`: NaN was 0."""
    return lambda: torch.where(x > width, x - width, torch.where(x < -width, x + width, x * 0))


def _clamp(x: torch.Tensor, low: Any = None, high: Any = None) -> Callable[[], Any] | None:
    """torch_xla takes the largest finite number for a bound that is not given."""
    if not x.is_floating_point() or isinstance(low, torch.Tensor) or isinstance(high, torch.Tensor):
        return None
    if high is None:
        return lambda: torch.where(x < low, low, x)
    return (lambda: torch.where(x > high, high, x)) if low is None else None


def _log_sigmoid(x: torch.Tensor) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """torch_xla gives NaN for -inf, and computes half precision as it is."""

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        wide = x if x.dtype in _WIDE else x.float()
        output, buffer = aten.log_sigmoid_forward.default(wide)
        output = output.masked_fill(x == -math.inf, -math.inf)
        return output.to(x.dtype), buffer.to(x.dtype)

    return run


def _log_sigmoid_backward(
    grad: torch.Tensor, x: torch.Tensor, buffer: torch.Tensor
) -> Callable[[], torch.Tensor]:
    return lambda: grad * torch.sigmoid(-x)


def _nan_to_num(
    x: torch.Tensor, nan: Any = None, posinf: Any = None, neginf: Any = None
) -> Callable[[], torch.Tensor] | None:
    """torch_xla takes the largest number of float32 for that of bfloat16, where it is infinite."""
    if x.dtype != torch.bfloat16 or (posinf is not None and neginf is not None):
        return None
    largest, least = torch.finfo(x.dtype).max, torch.finfo(x.dtype).min
    ends = (largest if posinf is None else posinf, least if neginf is None else neginf)
    return lambda: aten.nan_to_num.default(x, nan, *ends)


def _gelu(x: torch.Tensor, *, approximate: str = "none") -> Callable[[], torch.Tensor] | None:
    """torch computes half precision in float32, torch_xla each step in half precision."""
    if x.dtype in _WIDE:
        return None
    return lambda: aten.gelu.default(x.float(), approximate=approximate).to(x.dtype)


def _fmax(a: torch.Tensor, b: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: torch.where((b != b) | (a >= b), a, b)


POINTWISE: dict[Any, Rule] = {
    aten.abs: _abs,
    aten.allclose: _all_close,
    aten.atanh: _atanh,
    aten.clamp: _clamp,
    aten.clamp_max: lambda x, high: _clamp(x, None, high),
    aten.clamp_min: _clamp,
    aten.copysign: _copysign,
    aten.div: _quotient,
    aten.exp2: _exp2,
    aten.fmax: _fmax,
    aten.fmin: _fmin,
    aten.gelu: _gelu,
    aten.hypot: _hypot,
    aten.isclose: _is_close,
    aten.isnan: _is_nan,
    aten.isneginf: _is_an_infinity,
    aten.isposinf: _is_an_infinity,
    aten.log10: _logarithm(10),
    aten.log1p: _log1p,
    aten.log2: _logarithm(2),
    aten.log_sigmoid_backward: _log_sigmoid_backward,
    aten.log_sigmoid_forward: _log_sigmoid,
    aten.logit: _logit,
    aten.logaddexp2: _logaddexp2,
    aten.nan_to_num: _nan_to_num,
    aten.remainder: functools.partial(_remainder, torch.remainder),
    aten.sgn: _sign,
    aten.sigmoid_backward: _conjugated(lambda y: y * (1 - y)),
    aten.sign: _sign,
    aten.smooth_l1_loss_backward: lambda *args: functools.partial(smooth_l1_backward, *args),
    aten.softshrink: _softshrink,
    aten.tanh_backward: _conjugated(lambda y: 1 - y * y),
    aten.threshold: _threshold,
}


# -------------------------------------------------------------------------------------- Convolution
#
# Convolutions whose operands XLA's partitioner may cut in ways that it then computes wrongly.
#
# In torch_xla 2.9's XLA a convolution is silently wrong when its weight is cut along a window dim,
# when channels are cut unevenly, and in the gradient of a grouped weight even when only the batch
# is cut. Right, and the usual way to train: the batch cut evenly, the weight whole. So that is what
# a convolution is told here, whatever its operands were told; the gradient of a grouped weight is
# computed whole on every device.


def convolution(
    x: torch.Tensor, weight: torch.Tensor, *options: Any
) -> Callable[[], torch.Tensor] | None:
    """Return the call of ``aten.convolution`` with the batch cut and the weight whole.

    None in a manual region, where nothing is cut.
    """
    if has_manual(x, weight):
        return None

    def convolve() -> torch.Tensor:
        return _cut(aten.convolution.default(_cut(x), replicated(weight), *options))

    return convolve


def convolution_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias_sizes: Sequence[int] | None,
    *options: Any,
) -> Callable[[], Sequence[torch.Tensor | None]] | None:
    """Return the call of ``aten.convolution_backward`` that is right; see the module.

    None in a manual region, where nothing is cut.
    """
    if has_manual(grad, x, weight):
        return None
    *described, groups, mask = options

    def run(place: Callable[..., torch.Tensor], *flags: bool) -> Any:
        return aten.convolution_backward.default(
            place(grad), place(x), replicated(weight), bias_sizes, *described, groups, list(flags)
        )

    def backward() -> Sequence[torch.Tensor | None]:
        to_x, to_weight, to_bias = mask
        apart = groups > 1 and to_weight
        by_batch = run(_cut, to_x, to_weight and not apart, to_bias)
        grad_weight = run(replicated, False, True, False)[1] if apart else by_batch[1]
        return (
            _cut(by_batch[0]) if to_x else None,
            replicated(grad_weight) if to_weight else None,
            by_batch[2] if to_bias else None,
        )

    return backward


def _cut(tensor: torch.Tensor) -> torch.Tensor:
    """Cut dim 0 over as many devices as divide it."""
    num_devices = xlac()._xla_num_global_devices()
    tiles = math.gcd(tensor.shape[0], num_devices)
    if tiles == 1:
        return replicated(tensor)
    mesh = Mesh.arange((tiles, num_devices // tiles), ("batch", "rest"))
    layout = Layout.from_partition_spec(("batch",), mesh, tensor_ndim=tensor.ndim)
    return annotated(tensor, layout.op_sharding())


# --------------------------------------------------------------------------------------- Batch norm
#
# Batch norm, of which torch_xla 2.9 forgets that the running variance is the unbiased one.
#
# In float64 XLA takes eps in the precision of float32: there it is made of other ops.

_OTHER_DTYPES = (torch.float16, torch.bfloat16, torch.float64)


def batch_norm(
    func: Any,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None,
    variance: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Callable[[], Any] | None:
    """Return what to run in place of batch norm, which is `func`; None where torch_xla is right."""
    if x.numel() == 0:
        return None
    if x.dtype == torch.float64:
        return lambda: _batch_norm_in_float64(
            x, weight, bias, mean, variance, training, momentum, eps
        )
    if not training or variance is None:
        return None

    def norm() -> Any:
        old = variance.clone()
        outputs = func(x, weight, bias, mean, variance, training, momentum, eps)
        number = x.numel() // x.shape[1]
        unbiased = (outputs[2].square().reciprocal() - eps) * (number / max(number - 1, 1))
        variance.copy_((1 - momentum) * old + momentum * unbiased)
        return outputs

    return norm


def _batch_norm_in_float64(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None,
    variance: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dims = [dim for dim in range(x.ndim) if dim != 1]
    shape = [-1 if dim == 1 else 1 for dim in range(x.ndim)]
    if training or mean is None or variance is None:
        center = x.mean(dims)
        spread = (x - center.reshape(shape)).square().mean(dims)
        number = x.numel() // x.shape[1]
        unbiased = spread * (number / max(number - 1, 1))
        for to, new in ((mean, center), (variance, unbiased)):
            if training and to is not None:
                to.copy_((1 - momentum) * to + momentum * new)
    else:
        center, spread = mean, variance
    scale = (spread + eps).rsqrt()
    output = (x - center.reshape(shape)) * scale.reshape(shape)
    output = output if weight is None else output * weight.reshape(shape)
    output = output if bias is None else output + bias.reshape(shape)
    if training:
        return output, center, scale
    return output, x.new_empty(0), x.new_empty(0)


def has_other_statistics(*args: Any, **_: Any) -> bool:
    """Whether the backward is not for XLA's kernel.

    That needs the batch's own statistics, as in training, and in the input's dtype.

    In float64 it would take another eps than the forward.
    """
    return not args[7] or args[1].dtype in _OTHER_DTYPES
