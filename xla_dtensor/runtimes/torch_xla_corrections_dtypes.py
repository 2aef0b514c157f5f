"""Operands and results in torch's dtypes.

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

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from xla_dtensor.nested import leaves, map_nested
from xla_dtensor.runtimes.functional_ops import functional_form
from xla_dtensor.runtimes.op_meta import Meta, output_meta
from xla_dtensor.runtimes.torch_xla_corrections_host import run_on_host
from xla_dtensor.runtimes.torch_xla_corrections_points import assign

__all__ = ["in_torchs_dtypes"]

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
    result = run(func, args, kwargs)
    return result if func._schema.is_mutable else _held(func, args, kwargs, result, run)


def _is_plain(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether nothing can be promoted: all tensors are of one dtype, which is a wide one."""
    given = (*args, *kwargs.values())
    if any(isinstance(value, (list, tuple)) for value in given):
        given = tuple(leaves(given))
    dtypes = {value.dtype for value in given if isinstance(value, torch.Tensor)}
    is_complex = any(isinstance(value, complex) for value in given)
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
        result = run(func, args, kwargs)
        return result if in_place else _held(func, args, kwargs, result, run)
    given = _cast(functional, args, kwargs, dtype)
    if not in_place:
        return _held(func, args, kwargs, run(func, *given), run)
    if dtype == args[0].dtype:
        return run(func, (args[0], *given[0][1:]), given[1])
    return assign(args[0], run(functional, *given).to(args[0].dtype))


def _within(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return arguments whose whole numbers are those of the tensors' dtype: -3 is 253 of uint8."""
    named = _named(func, args, kwargs)
    operands = [value for name, value in named if _is_operand(name, value)]
    if len(operands) != 2 or not any(type(value) is int for value in operands):
        return args, kwargs
    dtype = torch.result_type(*operands)
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        return args, kwargs

    def within(name: str, value: Any) -> Any:
        is_number = type(value) is int and _is_operand(name, value)
        return int(torch.tensor(value).to(dtype)) if is_number else value

    held = [(name, within(name, value)) for name, value in named]
    return tuple(value for _, value in held[: len(args)]), dict(held[len(args) :])


def _computed_in(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: torch.dtype
) -> torch.dtype | None:
    """Return the dtype that operands are to be cast to; None if they are fine."""
    named = _named(func, args, kwargs)
    operands = [value for name, value in named if _is_operand(name, value)]
    tensors = [value for value in operands if isinstance(value, torch.Tensor)]
    if result == torch.bool:
        if len(operands) != 2:
            return None
        result = torch.result_type(*operands)
    if any(tensor.is_complex() and not result.is_complex for tensor in tensors):
        return None
    return None if all(tensor.dtype == result for tensor in tensors) else result


def _named(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    names = [argument.name for argument in func._schema.arguments]
    return [*zip(names, args, strict=False), *kwargs.items()]


def _is_operand(name: str, value: Any) -> bool:
    """Tell whether an op computes with an argument: a tensor, or a number in the place of one."""
    if isinstance(value, torch.Tensor):
        return name not in _NO_OPERANDS
    return isinstance(value, bool | int | float | complex) and name in _NUMBERS


def _cast(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], dtype: torch.dtype
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    cast = [
        (name, _widened(value, dtype) if _is_operand(name, value) else value)
        for name, value in _named(func, args, kwargs)
    ]
    return tuple(value for _, value in cast[: len(args)]), dict(cast[len(args) :])


# ------------------------------------------------------------------ results


def _held(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, run: Run) -> Any:
    """Return the result in torch's dtypes."""
    meta = output_meta(func, args, kwargs)
    pairs = zip(leaves((result,)), leaves((meta,)), strict=False)
    wrong = [
        (value.dtype, said.dtype)
        for value, said in pairs
        if isinstance(value, torch.Tensor) and isinstance(said, Meta) and value.dtype != said.dtype
    ]
    if not wrong:
        return result
    has, is_wanted = wrong[0]
    if is_wanted.is_complex and not has.is_complex:
        return run_on_host(func, args, kwargs)
    if is_wanted == torch.int64 and not isinstance(result, tuple | list):
        widened = map_nested(lambda value: _widened(value, is_wanted), tuple(args))
        result = run(func, widened, kwargs)
    return _as(result, meta)


def _widened(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) else value


def _as(result: Any, meta: Any) -> Any:
    if isinstance(result, tuple | list):
        return type(result)(_as(*pair) for pair in zip(result, meta, strict=True))
    if not isinstance(meta, Meta) or result.dtype == meta.dtype:
        return result
    is_too_wide = result.is_complex() and not meta.dtype.is_complex
    return (torch.real(result) if is_too_wide else result).to(meta.dtype)
