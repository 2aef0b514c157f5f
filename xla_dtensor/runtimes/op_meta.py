"""What torch says an op returns: shape, stride, offset and dtype, asked of torch's meta device.

Both runtimes are held to this answer. On JAX a result of another dtype is cast (JAX promotes by
other rules than torch), one of another shape is an error: a lowering that is wrong in shape must
never be broadcast into a plausible value. On torch_xla operands are promoted as torch would, and
its tensors, which have no strides, get torch's. Answers of torch's ops and ours are cached per op,
argument description and default dtype. Another library's op is asked each time: the rule that its
user registered for it is Python, and may say something else when a global that it reads changes.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any, NamedTuple, cast

import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from xla_dtensor.runtimes import scalars
from xla_dtensor.runtimes.guards import off_the_record

__all__ = [
    "Meta",
    "error_of",
    "hosts_error",
    "ignores_floats",
    "of_tensor",
    "output_meta",
    "raise_torchs_error",
    "small",
]

_CACHE: dict[Any, Any] = {}
_CACHE_LIMIT = 50_000
# Their rules read nothing but the arguments and the default dtype.
_NAMESPACES = frozenset({"aten", "prims", "xla_dtensor"})


class Meta(NamedTuple):
    """The description of one tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int
    dtype: torch.dtype


def of_tensor(tensor: torch.Tensor) -> Meta:
    """Return the description of `tensor`."""
    offset = cast("int", tensor.storage_offset())
    return Meta(tuple(tensor.shape), tuple(tensor.stride()), offset, tensor.dtype)


def output_meta(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the op's result with each tensor replaced by its :class:`Meta`.

    Returns:
        The same structure as the op's result, or None where torch cannot tell without values
        (nonzero, masked_select, ops without a meta kernel).
    """
    if func.namespace not in _NAMESPACES:
        return _ask(func, args, kwargs)
    try:
        by_value = not ignores_floats(func)
        dtype = torch.get_default_dtype()
        key = (func, _key(args, by_value), _key(kwargs, by_value), dtype)
        if key in _CACHE:
            return _CACHE[key]
    except TypeError:
        return _ask(func, args, kwargs)
    if len(_CACHE) >= _CACHE_LIMIT:
        _CACHE.clear()
    _CACHE[key] = answer = _ask(func, args, kwargs)
    return answer


@cache
def ignores_floats(func: Any) -> bool:
    """Whether what an op returns lies alike for every float: an optimizer's are new each step."""
    return func._schema.is_mutable or torch.Tag.pointwise in func.tags


def _key(value: Any, by_value: bool) -> Any:
    if isinstance(value, torch.Tensor):
        return ("tensor", of_tensor(value))
    if isinstance(value, (torch.SymFloat, torch.SymInt)):
        return type(value)
    if isinstance(value, float) and not by_value:
        return float
    if isinstance(value, (tuple, list)):
        return (type(value), tuple(_key(v, by_value) for v in value))
    if isinstance(value, Mapping):
        return tuple((k, _key(v, by_value)) for k, v in value.items())
    # bool, int and float compare equal across types but mean different dtypes.
    hash(value)
    return (type(value), value)


def raise_torchs_error(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise what torch says of arguments that an op cannot take, if it says anything."""
    try:
        _called(func, args, kwargs)
    except (NotImplementedError, DynamicOutputShapeException):
        return
    except (RuntimeError, IndexError) as error:
        # Of the meta device itself, which has no values: repeat_interleave, Tensor.item().
        if "meta tensor" not in str(error):
            of_host = hosts_error(func, args, kwargs)
            raise of_host if isinstance(of_host, IndexError) else error from None
        return
    # Some meta kernels do not look at the dim that they are told (sort).
    of_host = hosts_error(func, args, kwargs)
    if isinstance(of_host, IndexError) and "Dimension out of range" in str(of_host):
        raise of_host


def hosts_error(func: Any, args: Any, kwargs: Any) -> Exception | None:
    """Return what the host's kernel raises on tensors of as many dims, of one element each.

    Args:
        func: An ``OpOverload``.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    positional, named = tree_map(small, (tuple(args), dict(kwargs)))
    return error_of(func, positional, named)


def small(value: Any) -> Any:
    """Return a stand-in of at most one element for a tensor; for a computed number, one."""
    if isinstance(value, torch.Tensor):
        return torch.ones([min(size, 1) for size in value.shape], dtype=value.dtype)
    return scalars.stand_in(value)


def error_of(func: Any, args: Any, kwargs: Any) -> Exception | None:
    """Return what an op raises on stand-ins; None where it takes them."""
    try:
        with _disable_current_modes(), warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            func(*args, **kwargs)
    except Exception as error:
        # With its traceback it would keep every frame up to here alive, and itself among them: a
        # cycle, whose collection would clear the gradients that some frame refers to.
        return error.with_traceback(None)
    return None


def _called(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    def stand_in(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            meta = of_tensor(value)
            return _meta_tensor(meta)
        if isinstance(value, torch.device):
            return torch.device("meta")
        return scalars.stand_in(value)

    meta_args, meta_kwargs = tree_map(stand_in, (tuple(args), dict(kwargs)))
    if any(a.name == "device" for a in func._schema.arguments):
        meta_kwargs["device"] = torch.device("meta")
    with torch.no_grad():
        return func(*meta_args, **meta_kwargs)


def _ask(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    # The shape rule of another library's op is Python of the user's, whose reads count.
    unheard = off_the_record() if func.namespace in _NAMESPACES else nullcontext()
    try:
        with unheard:
            output = _called(func, args, kwargs)
    except (NotImplementedError, RuntimeError, DynamicOutputShapeException):
        return None
    return tree_map(lambda v: of_tensor(v) if isinstance(v, torch.Tensor) else v, output)


def _meta_tensor(meta: Meta) -> torch.Tensor:
    if meta.storage_offset == 0:
        return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")
    last = sum((n - 1) * s for n, s in zip(meta.shape, meta.stride, strict=True) if n)
    flat = torch.empty(meta.storage_offset + last + 1, dtype=meta.dtype, device="meta")
    return flat.as_strided(meta.shape, meta.stride, meta.storage_offset)
