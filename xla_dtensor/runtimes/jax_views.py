"""View ops: a new JaxTensor over the same storage, one more step in its chain.

Each rule gives the two halves of a :class:`~xla_dtensor.runtimes.jax_tensor.ViewStep`. The common
views have exact ones that keep sharded dims apart. Everything else that torch calls a view
(diagonal, unfold, as_strided, ...) goes by positions: torch itself applies the view to an integer
tensor of positions on the CPU, and reading and writing index the flat value by the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.runtimes import jax_manual_ops
from xla_dtensor.runtimes.jax_lowering.slices import cut, write_index, write_slice
from xla_dtensor.runtimes.jax_scalar import unwrap_number
from xla_dtensor.runtimes.jax_tensor import JaxTensor, ViewStep
from xla_dtensor.runtimes.op_meta import Meta, output_meta, raise_torchs_error

__all__ = ["view_rule"]

aten = torch.ops.aten
Array = jax.Array


def _reshaped(x: JaxTensor, meta: Meta) -> ViewStep:
    return ViewStep(
        lambda base: base.reshape(meta.shape), lambda base, new: new.reshape(base.shape)
    )


def _permuted(perm: Sequence[int]) -> ViewStep:
    inverse = tuple(int(i) for i in np.argsort(perm))
    return ViewStep(
        lambda base: jnp.transpose(base, tuple(perm)), lambda base, new: jnp.transpose(new, inverse)
    )


def _identity(x: JaxTensor, meta: Meta, *_: Any, **__: Any) -> ViewStep | None:
    return None


def _view(x: JaxTensor, meta: Meta, *_: Any, **__: Any) -> ViewStep:
    return _reshaped(x, meta)


def _t(x: JaxTensor, meta: Meta) -> ViewStep | None:
    return _permuted((1, 0)) if x.ndim == 2 else None


def _transpose(x: JaxTensor, meta: Meta, dim0: int, dim1: int) -> ViewStep | None:
    if x.ndim == 0:
        return None
    perm = list(range(x.ndim))
    perm[dim0], perm[dim1] = perm[dim1], perm[dim0]
    return _permuted(perm)


def _permute(x: JaxTensor, meta: Meta, dims: Sequence[int]) -> ViewStep:
    return _permuted([d % x.ndim for d in dims])


def _expand(x: JaxTensor, meta: Meta, *_: Any, **__: Any) -> ViewStep:
    shape = (1,) * (len(meta.shape) - x.ndim) + tuple(x.shape)
    repeated = tuple(
        dim for dim, (own, size) in enumerate(zip(shape, meta.shape, strict=True)) if own != size
    )

    def write(base: Array, new: Array) -> Array:
        if not repeated:
            return new.reshape(base.shape)
        # Elements that share one place have the value of those that were written to. If several
        # were, they are alike: `refuse_overlap` has let nothing else through.
        old = jnp.broadcast_to(base, new.shape)
        changed = ~((new == old) | ((new != new) & (old != old)))
        for dim in repeated:
            first = jnp.argmax(changed, axis=dim, keepdims=True)
            new = jnp.take_along_axis(new, first, axis=dim)
            changed = jnp.any(changed, axis=dim, keepdims=True)
        return new.reshape(base.shape)

    return ViewStep(lambda base: jnp.broadcast_to(base, meta.shape), write)


def _slice_step(dim: int, start: int, stop: int, step: int = 1) -> ViewStep:
    return ViewStep(
        lambda base: cut(base, dim, start, stop, step),
        lambda base, new: write_slice(base, new, dim, start, step),
    )


def _select(x: JaxTensor, meta: Meta, dim: int, index: Any) -> ViewStep:
    dim %= max(x.ndim, 1)
    number = unwrap_number(index)
    if not isinstance(number, int):
        return ViewStep(
            lambda base: jax.lax.dynamic_index_in_dim(base, number, dim, keepdims=False),
            lambda base, new: write_index(base, new, dim, number),
        )
    number %= x.shape[dim]
    return ViewStep(
        lambda base: jax.lax.squeeze(cut(base, dim, number, number + 1), [dim]),
        lambda base, new: write_index(base, new, dim, number),
    )


def _slice(
    x: JaxTensor,
    meta: Meta,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> ViewStep:
    dim %= max(x.ndim, 1)
    first, last, _ = slice(start, end, step).indices(x.shape[dim])
    return _slice_step(dim, first, max(first, last), step)


def _split_steps(x: JaxTensor, sizes: Sequence[int], dim: int) -> list[ViewStep]:
    ends = np.cumsum(sizes).tolist()
    return [
        _slice_step(dim % max(x.ndim, 1), end - size, end)
        for size, end in zip(sizes, ends, strict=True)
    ]


def _split(x: JaxTensor, metas: Any, size: int, dim: int = 0) -> list[ViewStep]:
    return _split_steps(x, [m.shape[dim] for m in metas], dim)


def _split_with_sizes(x: JaxTensor, metas: Any, sizes: Any, dim: int = 0) -> list[ViewStep]:
    return _split_steps(x, list(sizes), dim)


def _unbind(x: JaxTensor, metas: Any, dim: int = 0) -> list[ViewStep]:
    return [_select(x, m, dim, i) for i, m in enumerate(metas)]


def _conj(x: JaxTensor, meta: Meta) -> ViewStep:
    return ViewStep(jnp.conj, lambda base, new: jnp.conj(new))


def _neg_view(x: JaxTensor, meta: Meta) -> ViewStep:
    return ViewStep(jnp.negative, lambda base, new: -new)


def _real_pairs(value: Array) -> Array:
    return jnp.stack([value.real, value.imag], axis=-1)


def _complex_numbers(pairs: Array) -> Array:
    return jax.lax.complex(pairs[..., 0], pairs[..., 1])


def _view_as_real(x: JaxTensor, meta: Meta) -> ViewStep:
    return ViewStep(_real_pairs, lambda base, new: _complex_numbers(new))


def _view_as_complex(x: JaxTensor, meta: Meta) -> ViewStep:
    return ViewStep(_complex_numbers, lambda base, new: _real_pairs(new))


_RULES: dict[Any, Callable[..., Any]] = {
    aten._conj.default: _conj,
    aten._neg_view.default: _neg_view,
    aten.view_as_real.default: _view_as_real,
    aten.view_as_complex.default: _view_as_complex,
    aten.alias.default: _identity,
    aten.detach.default: _identity,
    aten.lift_fresh.default: _identity,
    aten.view.default: _view,
    aten.unsqueeze.default: _view,
    aten.squeeze.default: _view,
    aten.squeeze.dim: _view,
    aten.squeeze.dims: _view,
    aten.t.default: _t,
    aten.transpose.int: _transpose,
    aten.permute.default: _permute,
    aten.expand.default: _expand,
    aten.select.int: _select,
    aten.slice.Tensor: _slice,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split_with_sizes,
    aten.unbind.int: _unbind,
}


@cache
def view_rule(func: Any) -> Callable[[Any, Sequence[Any], Mapping[str, Any]], Any] | None:
    """Return the function that runs `func` as a view, or None when it is no view op."""
    if func in _RULES:
        return _run_rule
    return _run_by_positions if _is_view(func) else None


def _is_view(func: Any) -> bool:
    if func._schema.is_mutable or func._schema.name in ("aten::reshape", "aten::contiguous"):
        return False
    first = func._schema.arguments[0] if func._schema.arguments else None
    returns = func._schema.returns
    return (
        first is not None
        and first.alias_info is not None
        and bool(returns)
        and all(r.alias_info is not None for r in returns)
        and func is not aten.view.dtype
        and not torch._C._dispatch_has_kernel_for_dispatch_key(
            func.name(), torch._C.DispatchKey.CompositeImplicitAutograd
        )
    )


def _run_rule(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    x = args[0]
    meta = output_meta(func, args, kwargs)
    if meta is None:
        raise_torchs_error(func, args, kwargs)
    return _all_viewed(func, args, kwargs, _RULES[func](x, meta, *args[1:], **kwargs), meta)


def _all_viewed(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], steps: Any, meta: Any
) -> Any:
    x, several = args[0], isinstance(steps, list)
    each, metas = (steps, meta) if several else ([steps], [meta])
    if x._storage.manual is not None:
        each = [jax_manual_ops.keyed(step, func, args, kwargs, i) for i, step in enumerate(each)]
    views = [_viewed(x, step, m) for step, m in zip(each, metas, strict=True)]
    return views if several else views[0]


def _viewed(x: JaxTensor, step: ViewStep | None, meta: Meta) -> JaxTensor:
    return JaxTensor(
        x._storage,
        x._steps if step is None else (*x._steps, step),
        shape=meta.shape,
        stride=meta.stride,
        storage_offset=meta.storage_offset,
        dtype=meta.dtype,
    )


def _run_by_positions(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    x = args[0]
    meta = output_meta(func, args, kwargs)
    if func is aten.as_strided.default:
        found = _strided_positions(x, *args[1:], **kwargs)
    else:
        found = func(torch.arange(x.numel()).reshape(x.shape), *args[1:], **kwargs)
    several = isinstance(found, (list, tuple))
    steps = [_by_positions(f) for f in found] if several else _by_positions(found)
    return _all_viewed(func, args, kwargs, steps, meta)


def _strided_positions(
    x: JaxTensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> torch.Tensor:
    """Positions in `x` of the elements of ``x.as_strided``, with x laid out as torch believes."""
    start = 0 if storage_offset is None else storage_offset - x.storage_offset()
    last = start + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    held = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    memory = np.full(held if x.numel() else 0, -1)
    places = sum(
        np.arange(n).reshape((-1,) + (1,) * (x.ndim - d - 1)) * s
        for d, (n, s) in enumerate(zip(x.shape, x.stride(), strict=True))
    )
    memory[places] = np.arange(x.numel()).reshape(tuple(x.shape))
    if 0 in size:
        return torch.empty(tuple(size), dtype=torch.int64)
    found = None
    if start >= 0 and last < memory.size:
        found = torch.from_numpy(memory).as_strided(tuple(size), tuple(stride), start)
    if found is None or bool((found < 0).any()):
        raise UnsupportedOpError(
            f"as_strided was called with size={tuple(size)}, stride={tuple(stride)}, "
            f"storage_offset={storage_offset} on a tensor of shape={tuple(x.shape)}, "
            f"stride={x.stride()}. It reaches memory outside that tensor, and a tensor of the JAX "
            "runtime is no memory. Take the view from the tensor that holds those elements."
        )
    return found


def _by_positions(found: torch.Tensor) -> ViewStep:
    index = found.contiguous().numpy()
    return ViewStep(
        lambda base: base.ravel()[index],
        lambda base, new: base.ravel().at[index].set(new).reshape(base.shape),
    )
