"""Ops that torch_xla 2.9 computes wrongly, in silence, said with ops that it computes right.

`correction` is asked before an op runs, and returns what to run in its place, or None::

    2**40 // 3              torch_xla: 10,923 off, it divides in float32      a rule of this file
    amax of infinities      torch_xla: the largest finite number              `correct_values`
    x[i] = y, i uneven      GSPMD: other rows                                 `correct_writes`
    the gradient of amax    torch_xla: of one of equal values                 `correct_derivatives`

To add one, write a function that takes what the op takes and returns such a call, and name it in
the table of its file: `_REWRITTEN`, `_DECOMPOSED` or `_ON_HOST` here. Its case is a row of
tests/xla_dtensor/test_mended_faults.py.

Here are what is wrong by value (integer division and shifts, powers beyond six bits, quotients in
half precision), and what torch_xla raises that PyTorch does not (`recovered`). Whole ops, whose
sharded dims it would flatten, are in `whole_ops`.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch.utils._pytree import tree_map

from xla_dtensor.core.errors import UnsupportedOpError
from xla_dtensor.runtimes.functional import functional_form
from xla_dtensor.runtimes.nested import map_nested
from xla_dtensor.runtimes.op_meta import hosts_error
from xla_dtensor.runtimes.torch_xla.correct_derivatives import read_places
from xla_dtensor.runtimes.torch_xla.correct_values import (
    EXTREMA,
    POINTWISE,
    batch_norm,
    convolution,
    convolution_backward,
    extreme_value,
    has_other_statistics,
    size_of,
)
from xla_dtensor.runtimes.torch_xla.correct_writes import (
    assign,
    has_manual,
    has_write_rule,
    run_on_host,
    write_correction,
)
from xla_dtensor.runtimes.torch_xla.whole_ops import whole_op
from xla_dtensor.runtimes.whole_ops import WHOLE_OPS
from xla_dtensor.runtimes.written import may_overlap

__all__ = ["correction", "full_arguments", "may_be_corrected", "recovered"]

aten = torch.ops.aten


# -------------------------------------------------------------------------------------- Corrections

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
    is_whole_op = func in WHOLE_OPS and func.namespace == "aten"
    listed = divisions or func in EXTREMA or is_whole_op
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
    if rounding_mode is None or dtype.is_complex:
        return None

    def divide() -> torch.Tensor:
        a = first if isinstance(first, torch.Tensor) else torch.full_like(b, first)
        if dtype.is_floating_point:
            quotient = _rounded_quotient(a, b, dtype, rounding_mode)
        else:
            # By the remainder that is nearer to zero: a - remainder cannot overflow.
            remainder = torch.fmod(a, b)
            quotient = _exact_quotient(a - remainder, b, dtype)
            if rounding_mode == "floor":
                quotient = quotient - ((remainder != 0) & ((remainder < 0) != (b < 0))).to(dtype)
        return assign(a, quotient) if in_place else quotient

    return divide


def _rounded_quotient(
    a: torch.Tensor, b: Any, dtype: torch.dtype, rounding_mode: str
) -> torch.Tensor:
    """As torch does: the floor by the remainder, so that 0.3 by -inf is -1, and -0.0 by 2 is -0.0.

    torch rounds a quotient in half precision before it cuts off, but that by a number.
    """
    wide = dtype if dtype in (torch.float32, torch.float64) else torch.float32
    many = isinstance(b, torch.Tensor) and b.numel() > 1
    a = a.to(wide)
    b = b.to(wide) if isinstance(b, torch.Tensor) else torch.full_like(a, b)
    quotient = a / b
    if rounding_mode == "trunc":
        return torch.trunc(quotient.to(dtype) if many else quotient).to(dtype)
    remainder = torch.fmod(a, b)
    exact = (a - remainder) / b
    exact = exact - ((remainder != 0) & ((remainder < 0) != (b < 0))).to(wide)
    floor = torch.floor(exact)
    floor = floor + (exact - floor > 0.5).to(wide)
    is_minus = (quotient < 0) | (1 / quotient < 0)
    floor = torch.where(exact == 0, torch.where(is_minus, -0.0, 0.0), floor)
    return torch.where(b == 0, quotient, floor).to(dtype)


def _right_shift(in_place: bool, first: Any, second: Any) -> Callable[[], torch.Tensor]:
    """A division by a power of two, rounded down; torch takes what is no bit for all of them."""

    def shift() -> torch.Tensor:
        like = first if isinstance(first, torch.Tensor) else second
        dtype = torch.result_type(first, second)
        a, bits = (
            operand.to(torch.int64)
            if isinstance(operand, torch.Tensor)
            else torch.full_like(like, operand, dtype=torch.int64)
            for operand in (first, second)
        )
        number = torch.iinfo(dtype).bits
        by_some = (bits >= 0) & (bits < min(number, 63))
        divisor = torch.ones_like(bits) << torch.where(by_some, bits, 0)
        divide = _rounded_division(False, a, divisor)
        assert divide is not None
        output = torch.where(by_some, divide(), -(a < 0).to(torch.int64)).to(dtype)
        return assign(first, output) if in_place else output

    return shift


def _integer_power(in_place: bool, base: Any, exponent: Any) -> Callable[[], torch.Tensor] | None:
    """Take an exponent six bits at a time: of x**64, x**4096 and so on up to the 63rd power."""
    dtype = torch.result_type(base, exponent)
    is_whole = not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
    if not is_whole or (not isinstance(exponent, torch.Tensor) and exponent < 64):
        return None
    like = base if isinstance(base, torch.Tensor) else exponent

    def power() -> torch.Tensor:
        x, exponents = (
            operand.to(dtype)
            if isinstance(operand, torch.Tensor)
            else torch.full_like(like, operand, dtype=dtype)
            for operand in (base, exponent)
        )
        negative, output = torch.pow(x, exponents), torch.ones_like(x)
        for bits in range(0, torch.iinfo(dtype).bits - 1, 6):
            output = output * torch.pow(x, torch.clamp(exponents >> bits, min=0) & 63)
            x = torch.pow(torch.pow(x, torch.full_like(x, 32)), torch.full_like(x, 2))
        output = torch.where(exponents < 0, negative, output)
        return assign(base, output) if in_place else output

    return power


def _exact_quotient(a: torch.Tensor, b: Any, dtype: torch.dtype) -> torch.Tensor:
    """`a / b` where `b` divides `a`: float64's answer, and what it is off for long integers."""
    divisor = b.double() if isinstance(b, torch.Tensor) else float(b)
    quotient = (a.double() / divisor).round().to(dtype)
    if dtype != torch.int64:
        return quotient
    return quotient + ((a - quotient * b).double() / divisor).round().to(dtype)


# -------------------------------------------------------------------------------------------- Calls
#
# Calls that torch_xla 2.9 gets wrong, or fails to compile long after they were made.
#
# An error at the call itself is dealt with below. What is listed here
# would be noticed too late: a wrong value never, a failed compilation only when a result is read.

_LAST_TWO = (-2, -1)
_HALF = (torch.float16, torch.bfloat16)


def call_correction(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Callable[[], Any] | None:
    """Return what to run in place of a call; None where torch_xla is right.

    Args:
        func: An ``OpOverload``.
        args: Its positional arguments, payloads in place.
        kwargs: Its keyword arguments.
    """
    packet = func.overloadpacket
    if packet in _REWRITTEN and func._overloadname not in ("out", "no_stats"):
        rewritten = _REWRITTEN[packet](*args, **kwargs)
        if rewritten is not None:
            return rewritten
    if packet in _DECOMPOSED and _DECOMPOSED[packet](*args, **kwargs):
        return lambda: decomposed(func, args, kwargs)
    if packet in _ON_HOST and _ON_HOST[packet](*args, **kwargs):
        return None if has_manual(args, kwargs) else lambda: run_on_host(func, args, kwargs)
    functional = _functional(func)
    replacement = None if functional is None else call_correction(functional, args, kwargs)
    return None if replacement is None else lambda: assign(args[0], replacement())


@functools.cache
def _functional(func: Any) -> Any:
    return functional_form(func) if func._schema.is_mutable else None


def has_call_rule(func: Any) -> bool:
    """Tell whether :func:`call_correction` has something to say of an op, for some arguments."""
    packet = func.overloadpacket
    return any(packet in table for table in (_REDUCTIONS, _REWRITTEN, _DECOMPOSED, _ON_HOST))


def full_arguments(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return arguments as torch_xla has to be told them.

    All dims of a reduction where none is named, which means all in PyTorch: torch_xla reduces none
    then. Targets of a loss that are int64.

    Args:
        func: An ``OpOverload``.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    if func.overloadpacket in _LOSSES:
        at = [argument.name for argument in func._schema.arguments].index("target")
        return [*args[:at], args[at].to(torch.int64), *args[at + 1 :]], kwargs
    if func.overloadpacket not in _REDUCTIONS:
        return args, kwargs
    names = [argument.name for argument in func._schema.arguments]
    named = dict(zip(names, args, strict=False)) | dict(kwargs)
    if named.get("dim") not in ([], ()) or args[0].ndim == 0:
        return args, kwargs
    named |= {"dim": list(range(args[0].ndim))}
    return args[:1], {name: option for name, option in named.items() if name != names[0]}


def _always(*_: Any, **__: Any) -> bool:
    return True


def _is_double(x: torch.Tensor, *_: Any, **__: Any) -> bool:
    return x.dtype == torch.float64


def _diagonal(
    x: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Callable[[], torch.Tensor] | None:
    """torch_xla mixes up the dims that are left when the two are not the last."""
    if x.ndim < 3 or {dim1 % x.ndim, dim2 % x.ndim} == {x.ndim - 2, x.ndim - 1}:
        return None
    return lambda: torch.diagonal(x.movedim((dim1, dim2), _LAST_TWO), offset, *_LAST_TWO)


def _copied(func: Any) -> Callable[..., Callable[[], Any]]:
    """What torch_xla returns is a view: ``copy_`` into it would write to the tensor."""

    def rule(*args: Any, **kwargs: Any) -> Callable[[], Any]:
        return lambda: tree_map(torch.clone, func(*args, **kwargs))

    return rule


def _expand(
    x: torch.Tensor, size: Sequence[int], *, implicit: bool = False
) -> Callable[[], torch.Tensor] | None:
    """What is written to it is found by differences, which are NaN where there was one."""
    new = len(size) - x.ndim
    sizes = [x.shape[at - new] if n == -1 else n for at, n in enumerate(size)]
    return (lambda: x.view(sizes)) if math.prod(sizes) == x.numel() else None


def _diagonal_copy(
    x: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Callable[[], torch.Tensor] | None:
    view = _diagonal(x, offset, dim1, dim2)
    return lambda: (aten.diagonal_copy(x, offset, dim1, dim2) if view is None else view()).clone()


def _diagonal_scatter(
    x: torch.Tensor, src: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Callable[[], torch.Tensor] | None:
    if x.numel() == 0:
        return lambda: x.clone()  # XLA divides by its sizes
    if _diagonal(x, offset, dim1, dim2) is None:
        return None

    def scatter() -> torch.Tensor:
        front = x.movedim((dim1, dim2), _LAST_TWO)
        return front.diagonal_scatter(src, offset, *_LAST_TWO).movedim(_LAST_TWO, (dim1, dim2))

    return scatter


def _diagonal_backward(
    grad: torch.Tensor, sizes: Sequence[int], offset: int, dim1: int, dim2: int
) -> Callable[[], torch.Tensor]:
    """torch_xla raises: it would write into a view without functionalization."""
    zeros = grad.new_zeros(sizes)
    scatter = _diagonal_scatter(zeros, grad, offset, dim1, dim2)
    return scatter or (lambda: torch.diagonal_scatter(zeros, grad, offset, dim1, dim2))


def _masked_scatter(
    in_place: bool, x: torch.Tensor, mask: torch.Tensor, source: torch.Tensor
) -> Callable[[], torch.Tensor]:
    """torch_xla's result has a dynamic shape, which XLA then fails to compile."""

    def scatter() -> torch.Tensor:
        shape = torch.broadcast_shapes(x.shape, mask.shape)
        wide = mask.expand(shape)
        if source.numel() == 0 or wide.numel() == 0:
            return x if in_place else x.expand(shape).clone()
        order = (wide.reshape(-1).to(torch.int64).cumsum(0) - 1).clamp(min=0)
        order = order.clamp(max=source.numel() - 1)
        values = source.reshape(-1)[order].reshape(shape).to(x.dtype)
        output = torch.where(wide, values, x.expand(shape))
        return x.copy_(output) if in_place else output

    return scatter


def _unfold(x: torch.Tensor, dim: int, size: int, step: int) -> Callable[[], torch.Tensor] | None:
    """Windows apart from each other as a view of another kind.

    PyTorch's functionalization writes zeros to what is in none of the windows.
    """
    if not x.ndim or step < size:
        return None  # a view that overlaps is not written to
    dim = dim % x.ndim
    number = (x.shape[dim] - size) // step + 1
    if number * step > x.shape[dim]:
        if not x.is_contiguous():
            return None
        shape, stride = list(x.shape), list(x.stride())
        shape[dim], stride[dim] = number, stride[dim] * step
        return lambda: x.as_strided([*shape, size], [*stride, x.stride(dim)])

    def windows() -> torch.Tensor:
        rows = x.narrow(dim, 0, number * step).unflatten(dim, (number, step))
        return rows.narrow(dim + 1, 0, size).movedim(dim + 1, -1)

    return windows


def _unsafe_split(x: torch.Tensor, sizes: Any, dim: int = 0) -> Callable[[], Any]:
    """What it returns are views, which only autograd does not take for some."""
    return lambda: torch.split(x, sizes, dim)


def _truth(func: Any) -> Callable[..., Callable[[], Any] | None]:
    """torch_xla reduces numbers where PyTorch reduces what is true of them; XLA refuses that."""

    def rule(x: torch.Tensor, *args: Any, **kwargs: Any) -> Callable[[], Any] | None:
        return None if x.dtype == torch.bool else lambda: func(x != 0, *args, **kwargs)

    return rule


def _count_nonzero(x: torch.Tensor, dim: Any = None) -> Callable[[], torch.Tensor]:
    dims = list(range(x.ndim)) if dim is None else [dim] if isinstance(dim, int) else list(dim)
    return lambda: (x != 0).to(torch.int64).sum(dims or None)


def _is_divided_otherwise(*args: Any, **kwargs: Any) -> bool:
    """torch_xla forgets the divisor of an average pooling: the last argument, also backward."""
    has_all = len(args) > 6 and args[-1] is not None and not isinstance(args[-1], bool)
    return has_all or kwargs.get("divisor_override") is not None


def _as_strided(
    x: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> Callable[[], torch.Tensor] | None:
    """Read places that overlap one by one: nobody may write to such a view (`refuse_overlap`)."""
    last = (offset or 0) + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if 0 not in size and last >= x.numel():
        raise UnsupportedOpError(
            f"as_strided was called with size={tuple(size)}, stride={tuple(stride)}, "
            f"storage_offset={offset} on a tensor of {x.numel()} elements. Element {last} is "
            "beyond its end. Pass sizes and strides that stay within it."
        )
    if not may_overlap(size, stride):
        return None
    return lambda: read_places(x, size, stride, offset)


def _as_strided_scatter(
    x: torch.Tensor, src: torch.Tensor, *where: Any
) -> Callable[[], torch.Tensor] | None:
    """torch_xla does not cast what is written."""
    if src.dtype == x.dtype:
        return None
    return lambda: torch.as_strided_scatter(x, src.to(x.dtype), *where)


def _vector_norm(
    x: torch.Tensor, p: Any = 2, dim: Any = None, keepdim: bool = False, **kwargs: Any
) -> Callable[[], torch.Tensor] | None:
    """torch_xla takes the infinite norm for a finite one."""
    if not math.isinf(p):
        return None
    dims = [dim] if isinstance(dim, int) else dim or list(range(x.ndim))

    def extremum() -> torch.Tensor:
        sizes = size_of(x.to(kwargs.get("dtype") or x.dtype))
        return extreme_value(p > 0, sizes, list(dims), keepdim)

    return extremum


def _norm(
    x: torch.Tensor, p: Any = 2, dim: Any = None, keepdim: bool = False, **kwargs: Any
) -> Callable[[], torch.Tensor] | None:
    """torch_xla adds up the squares of complex numbers, not of their sizes."""
    p = 2 if p is None else p
    if not x.is_complex() or math.isinf(p):
        return _vector_norm(x, p, dim, keepdim, **kwargs)
    return lambda: decomposed(aten.linalg_vector_norm.default, (x, p, dim, keepdim), kwargs)


def _dist(x: torch.Tensor, y: torch.Tensor, p: Any = 2) -> Callable[[], torch.Tensor] | None:
    """The norm of a difference, of which torch_xla gets what :func:`_norm` says wrong as well."""
    if math.isinf(p):
        return _vector_norm(x - y, p)

    def norm() -> torch.Tensor:
        length = decomposed(aten.linalg_vector_norm.default, (x - y, p), {})
        return length.to(torch.result_type(x, y).to_real())

    dtype = torch.result_type(x, y)
    # A square of half precision may be infinite where the norm is not.
    return norm if dtype.is_complex or dtype in _HALF else None


def _zeros_with_the_meta_of(
    x: torch.Tensor, other: torch.Tensor, *, self_num_batch_dims: int = 0
) -> Callable[[], torch.Tensor]:
    """PyTorch makes a storage, and torch_xla has none."""
    return lambda: x.new_zeros([*x.shape[:self_num_batch_dims], *other.shape])


def _is_scaled(func: Any, *args: Any, **kwargs: Any) -> bool:
    """torch_xla goes by the sizes alone, and forgets the scales that PyTorch goes by."""
    arguments = dict(zip([a.name for a in func._schema.arguments], args, strict=False)) | kwargs
    return any(arguments.get(name) is not None for name in ("scales", "scales_h", "scales_w"))


def _has_another_power(_: torch.Tensor, *args: Any, **__: Any) -> bool:
    """torch_xla takes a root where PyTorch takes the largest, or counts."""
    return any(isinstance(p, float) and (math.isinf(p) or p == 0) for p in args)


def _is_unbatched(x: torch.Tensor, *_: Any, **__: Any) -> bool:
    """The loss of one sample, without a batch dim, ends the process."""
    return x.ndim == 1


def _is_unbatched_backward(_: torch.Tensor, x: torch.Tensor, *__: Any, **___: Any) -> bool:
    return x.ndim == 1


def _is_batched(x: torch.Tensor, *_: Any, **__: Any) -> bool:
    return x.ndim != 2 or x.numel() == 0


def _of_nothing(
    x: torch.Tensor, *_: Any, dtype: torch.dtype | None = None, **__: Any
) -> Callable[[], torch.Tensor] | None:
    """XLA has no window over a dim without elements; a roll divides by its size."""
    return (lambda: x.to(dtype or x.dtype).clone()) if x.numel() == 0 else None


def _pool_with_indices(func: Any) -> Callable[..., Callable[[], Any]]:
    """torch_xla says int64 of indices that are int32 in XLA, which fails where they are cast."""

    def rule(*args: Any, **kwargs: Any) -> Callable[[], Any]:
        def pool() -> Any:
            values, indices = func(*args, **kwargs)
            return values, indices + torch.zeros_like(indices)

        return pool

    return rule


def _one_hot(x: torch.Tensor, num_classes: int = -1) -> Callable[[], torch.Tensor] | None:
    """torch_xla scatters; where that is cut unevenly the process ends."""
    if x.numel() == 0 or num_classes == 0:
        return None  # which raises, or has nothing to cut

    def compare() -> torch.Tensor:
        number = int(x.max()) + 1 if num_classes == -1 else num_classes
        return (x.unsqueeze(-1) == torch.arange(number, device=x.device)).to(torch.int64)

    return compare


def _is_complex_or_batched(x: torch.Tensor, *_: Any, **__: Any) -> bool:
    return x.is_complex() or _is_batched(x)


_LOSSES = frozenset(
    {
        aten.nll_loss_forward,
        aten.nll_loss_backward,
        aten.nll_loss2d_forward,
        aten.nll_loss2d_backward,
    }
)
_REDUCTIONS = frozenset(
    {
        aten.amax,
        aten.amin,
        aten.linalg_vector_norm,
        aten.logsumexp,
        aten.mean,
        aten.norm,
        aten.std,
        aten.std_mean,
        aten.sum,
        aten.var,
        aten.var_mean,
    }
)
_COPIES_OF_VIEWS = (
    *(aten.alias_copy, aten.detach_copy, aten.permute_copy, aten.select_copy, aten.squeeze_copy),
    *(aten.t_copy, aten.transpose_copy, aten.unbind_copy, aten.unsqueeze_copy, aten.view_copy),
)
_REWRITTEN: dict[Any, Callable[..., Callable[[], Any] | None]] = {
    aten.diagonal: _diagonal,
    aten.diagonal_copy: _diagonal_copy,
    aten.expand: _expand,
    **{packet: _copied(packet) for packet in _COPIES_OF_VIEWS},
    aten.diagonal_scatter: _diagonal_scatter,
    aten.diagonal_backward: _diagonal_backward,
    aten.native_batch_norm: functools.partial(batch_norm, aten.native_batch_norm.default),
    aten._native_batch_norm_legit: functools.partial(
        batch_norm, aten._native_batch_norm_legit.default
    ),
    aten.linalg_vector_norm: _vector_norm,
    aten.norm: _norm,
    aten.dist: _dist,
    aten.all: _truth(torch.all),
    aten.any: _truth(torch.any),
    aten.count_nonzero: _count_nonzero,
    aten.as_strided: _as_strided,
    aten.as_strided_scatter: _as_strided_scatter,
    aten.unfold: _unfold,
    aten.unsafe_split: _unsafe_split,
    aten.unsafe_split_with_sizes: _unsafe_split,
    aten.convolution: convolution,
    aten.convolution_backward: convolution_backward,
    aten._new_zeros_with_same_feature_meta: _zeros_with_the_meta_of,
    **POINTWISE,
    aten.one_hot: _one_hot,
    aten.roll: _of_nothing,
    aten.cumsum: _of_nothing,
    aten.cumprod: _of_nothing,
    aten.logcumsumexp: _of_nothing,
    aten.max_pool2d_with_indices: _pool_with_indices(aten.max_pool2d_with_indices.default),
    aten.max_pool3d_with_indices: _pool_with_indices(aten.max_pool3d_with_indices.default),
    aten.masked_scatter: lambda *args: _masked_scatter(False, *args),
    aten.masked_scatter_: lambda *args: _masked_scatter(True, *args),
}
_DECOMPOSED: dict[Any, Callable[..., bool]] = {
    # torch_xla flattens all dims but the normalized ones; for the backward it asks the host.
    aten.native_layer_norm: _always,
    aten.native_layer_norm_backward: _always,
    aten.native_group_norm: _always,
    aten.native_group_norm_backward: _always,
    aten.elu_backward: _always,
    # Both: PyTorch's and torch_xla's hand other numbers from one to the other.
    aten.log_sigmoid_forward: lambda x: x.dtype in _HALF,
    aten.log_sigmoid_backward: lambda grad, x, buffer: x.dtype in _HALF,
    # torch_xla asks the host.
    aten.logaddexp: lambda *args: not any(x.is_complex() for x in args),
    aten.special_xlog1py: _always,
    # At a border torch_xla lets a gradient through, and PyTorch does not.
    aten.hardsigmoid_backward: _always,
    aten.hardtanh_backward: _always,
    # torch_xla's constants have the precision of float32.
    aten.gelu: _is_double,
    aten.gelu_backward: _is_double,
    aten.threshold: _is_double,
    aten.threshold_backward: _is_double,
    aten.nll_loss_forward: _is_unbatched,
    aten.nll_loss_backward: _is_unbatched_backward,
    aten.native_batch_norm_backward: has_other_statistics,
}
_ON_HOST: dict[Any, Callable[..., bool]] = {
    **dict.fromkeys(
        (
            aten._embedding_bag,
            aten._embedding_bag_backward,
            aten._embedding_bag_forward_only,
            aten._linalg_slogdet,
            aten._unsafe_masked_index,
            aten._unsafe_masked_index_put_accumulate,
            aten.adaptive_max_pool2d,
            aten.adaptive_max_pool2d_backward,
            aten.linalg_inv_ex,
            aten.linalg_lu,
            aten.linalg_lu_factor_ex,
            aten.masked_select,
            aten.max_unpool2d,
            aten.max_unpool3d,
            aten.nonzero,
        ),
        _always,
    ),
    **dict.fromkeys(
        (
            aten.avg_pool2d,
            aten.avg_pool2d_backward,
            aten.avg_pool3d,
            aten.avg_pool3d_backward,
        ),
        _is_divided_otherwise,
    ),
    **{
        packet: functools.partial(_is_scaled, packet.default)
        for packet in (
            aten.upsample_nearest2d,
            aten.upsample_nearest2d_backward,
        )
    },
    aten.upsample_bilinear2d_backward: lambda grad, *args, **kwargs: (
        grad.dtype == torch.float64
        or _is_scaled(aten.upsample_bilinear2d_backward.default, grad, *args, **kwargs)
    ),
    aten.upsample_bilinear2d: lambda x, *args, **kwargs: (
        # Bytes it cuts off where PyTorch rounds, and its scales have the precision of float32.
        x.dtype in (torch.uint8, torch.float64)
        or _is_scaled(aten.upsample_bilinear2d.default, x, *args, **kwargs)
    ),
    **dict.fromkeys((aten._pdist_forward, aten._pdist_backward), _has_another_power),
    aten._linalg_svd: _is_complex_or_batched,
}


# ------------------------ What is done when torch_xla raises an error that PyTorch would not raise
#
# torch_xla 2.9 refuses calls that are right: reductions over the one dim that PyTorch lends to a
# number, negative padding, operands of different ranks, ops that it has only under its own
# functionalization. PyTorch's meta device tells such a call from one that is wrong. What it accepts
# is said in other words (a number as a tensor of one dim, PyTorch's own decomposition of the op),
# or else run on the host.

# What torch_xla says where a compiled step reads a value: there is no way around that.
_READ_IN_STEP = "Unexpected execution happens inside the compiled function"
Run = Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]


def recovered(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], error: Exception, run: Run
) -> Any:
    """Return the result of an op that torch_xla has refused.

    Args:
        func: An ``OpOverload``.
        args: Its positional arguments, payloads in place.
        kwargs: Its keyword arguments.
        error: What torch_xla raised.
        run: Runs an op, corrected where torch_xla is wrong.

    Raises:
        Exception: `error`, where PyTorch refuses the call as well, and in a manual region.
        UnsupportedOpError: PyTorch accepts it, and the host cannot run it either, or must not,
            because a step is being compiled.
    """
    if has_manual(args, kwargs) or _READ_IN_STEP in str(error):
        raise error
    try:
        meta = _on_meta(func, args, kwargs)
    except NotImplementedError:
        meta = None
    except Exception as torchs:
        # Some of what PyTorch checks is asserted there; and torch_xla's classes are often others.
        kind = RuntimeError if isinstance(torchs, AssertionError) else type(torchs)
        of_host = hosts_error(func, args, kwargs)
        if isinstance(of_host, IndexError):
            raise of_host from None
        raise (error if isinstance(error, kind | IndexError) else kind(str(torchs))) from None
    if not func._schema.is_mutable:
        # torch_xla's errors are of many types.
        with contextlib.suppress(Exception):
            return _with_a_dim(func, args, kwargs, meta, run)
        with contextlib.suppress(Exception):
            return decomposed(func, args, kwargs)
    try:
        return run_on_host(func, args, kwargs)
    except (UnsupportedOpError, IndexError):
        raise
    except Exception:
        raise UnsupportedOpError(
            f"The op {func} was called on tensors of the torch_xla runtime. torch_xla refuses it "
            f"({_first_words(error)}), and its result cannot be brought back from the host. Write "
            "it with other ops, or move the tensor to the host with .full_tensor().cpu()."
        ) from error


def _first_words(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:80]


def decomposed(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run PyTorch's own decomposition of an op.

    Raises:
        NotImplementedError: There is none.
    """
    from torch._decomp import decomposition_table

    decomposition = decomposition_table.get(func)
    if decomposition is None:
        raise NotImplementedError(str(func))
    output = decomposition(*args, **kwargs)
    # Some are named tuples, which cannot be made from a list of their items.
    return tuple(output) if isinstance(output, tuple) else output


def _with_a_dim(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], meta: Any, run: Run
) -> Any:
    first = args[0] if args else None
    if meta is None or not isinstance(first, torch.Tensor) or first.ndim:
        raise NotImplementedError(str(func))

    def raised(tensor: Any) -> Any:
        is_number = isinstance(tensor, torch.Tensor) and tensor.ndim == 0
        return tensor.reshape(1) if is_number else tensor

    output = run(func, map_nested(raised, tuple(args)), map_nested(raised, dict(kwargs)))
    return tree_map(
        lambda tensor, like: (
            tensor.reshape(like.shape) if isinstance(like, torch.Tensor) else tensor
        ),
        output,
        meta,
    )


def _on_meta(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    def stand_in(argument: Any) -> Any:
        if isinstance(argument, torch.device):
            return torch.device("meta")
        if not isinstance(argument, torch.Tensor):
            return argument
        return torch.empty_strided(
            argument.shape, argument.stride(), dtype=argument.dtype, device="meta"
        )

    meta_args, meta_kwargs = map_nested(stand_in, (tuple(args), dict(kwargs)))
    return func(*meta_args, **meta_kwargs)
