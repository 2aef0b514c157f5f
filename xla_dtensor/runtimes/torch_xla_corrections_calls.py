"""Calls that torch_xla 2.9 gets wrong, or fails to compile long after they were made.

An error at the call itself is dealt with in `torch_xla_corrections_recovery`. What is listed here
would be noticed too late: a wrong value never, a failed compilation only when a result is read.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.runtimes.functional_ops import functional_form
from xla_dtensor.runtimes.torch_xla_corrections_autograd import (
    is_overlapping,
    read_places,
)
from xla_dtensor.runtimes.torch_xla_corrections_batch_norm import batch_norm, has_other_statistics
from xla_dtensor.runtimes.torch_xla_corrections_convolution import (
    convolution,
    convolution_backward,
)
from xla_dtensor.runtimes.torch_xla_corrections_extrema import extreme_value
from xla_dtensor.runtimes.torch_xla_corrections_host import has_manual, run_on_host
from xla_dtensor.runtimes.torch_xla_corrections_points import assign
from xla_dtensor.runtimes.torch_xla_corrections_pointwise import POINTWISE, size_of
from xla_dtensor.runtimes.torch_xla_corrections_recovery import decomposed

__all__ = ["call_correction", "has_call_rule", "told_in_full"]

aten = torch.ops.aten
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
        return _REWRITTEN[packet](*args, **kwargs)
    if packet in _DECOMPOSED and _DECOMPOSED[packet](*args, **kwargs):
        return lambda: decomposed(func, args, kwargs)
    if packet in _ON_HOST and _ON_HOST[packet](*args, **kwargs):
        return None if has_manual(args, kwargs) else lambda: run_on_host(func, args, kwargs)
    functional = _functional(func)
    found = None if functional is None else call_correction(functional, args, kwargs)
    return None if found is None else lambda: assign(args[0], found())


@functools.cache
def _functional(func: Any) -> Any:
    return functional_form(func) if func._schema.is_mutable else None


def has_call_rule(func: Any) -> bool:
    """Tell whether :func:`call_correction` has something to say of an op, for some arguments."""
    packet = func.overloadpacket
    return any(packet in table for table in (_REDUCTIONS, _REWRITTEN, _DECOMPOSED, _ON_HOST))


def told_in_full(
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
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    if given.get("dim") not in ([], ()) or args[0].ndim == 0:
        return args, kwargs
    given |= {"dim": list(range(args[0].ndim))}
    return args[:1], {name: value for name, value in given.items() if name != names[0]}


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
        result = torch.where(wide, values, x.expand(shape))
        return x.copy_(result) if in_place else result

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
    """Read places that overlap one by one; PyTorch lets nobody write to such a view either."""
    last = (offset or 0) + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if 0 not in size and last >= x.numel():
        raise UnsupportedOpError(
            f"as_strided was called with size={tuple(size)}, stride={tuple(stride)}, "
            f"storage_offset={offset} on a tensor of {x.numel()} elements. Element {last} is "
            "beyond its end. Pass sizes and strides that stay within it."
        )
    overlapping = is_overlapping(size, stride)
    return (lambda: read_places(x, size, stride, offset)) if overlapping else None


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
        found = decomposed(aten.linalg_vector_norm.default, (x - y, p), {})
        return found.to(torch.result_type(x, y).to_real())

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
    given = dict(zip([a.name for a in func._schema.arguments], args, strict=False)) | kwargs
    return any(given.get(name) is not None for name in ("scales", "scales_h", "scales_w"))


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
