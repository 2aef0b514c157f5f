"""Ops that need tensors rather than arrays: copies between host and devices, reading, rebinding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import torch

from xla_dtensor.runtimes.jax_convert import in_dtype, jax_dtype
from xla_dtensor.runtimes.jax_manual import refuse_value
from xla_dtensor.runtimes.jax_number_rows import number_of_row
from xla_dtensor.runtimes.jax_placing import host_value
from xla_dtensor.runtimes.jax_scalar import sym_number
from xla_dtensor.runtimes.jax_tensor import JaxTensor, Storage
from xla_dtensor.runtimes.jax_trace import active_trace, is_tracer, refuse_read
from xla_dtensor.runtimes.jax_traced_stacks import row_of
from xla_dtensor.runtimes.op_meta import output_meta

__all__ = ["SPECIAL"]

aten = torch.ops.aten
SPECIAL: dict[Any, Callable[..., Any]] = {}


def _special(*funcs: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(rule: Callable[..., Any]) -> Callable[..., Any]:
        SPECIAL.update(dict.fromkeys(funcs, rule))
        return rule

    return register


@_special(aten._local_scalar_dense.default)
def _item(x: JaxTensor) -> Any:
    row = row_of(x)
    if row is not None and x.ndim == 0 and not (x.dtype == torch.bool or x.is_complex()):
        return number_of_row(*row)
    value = x.value()
    trace = active_trace()
    # An older tensor holds an array even now, though it is an input of the program like any other.
    if is_tracer(value) or (trace is not None and not trace.owns(x._storage)):
        if x.dtype == torch.bool:
            refuse_read("turned into a Python bool")
        return sym_number(value.reshape(()))
    return host_value(value).item()


@_special(aten.is_pinned.default)
def _is_pinned(x: JaxTensor, device: Any = None) -> bool:
    return False  # asked by torch.distributed.checkpoint; the values lie on the devices


@_special(aten.copy_.default, torch.ops.prims.copy_to.default)
def _copy_(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    from xla_dtensor.runtimes.jax_ops import write

    write(target, source)
    return target


@_special(aten._has_same_storage_numel.default)
def _has_same_storage_numel(x: torch.Tensor, other: torch.Tensor) -> bool:
    return x.numel() == other.numel()  # forward mode asks whether a tangent may lie as its primal


@_special(aten.eye.m_out)
def _eye_out(n: int, m: int, *, out: torch.Tensor) -> torch.Tensor:
    from xla_dtensor.runtimes.jax_ops import write

    write(out, torch.eye(n, m, dtype=out.dtype, device="cpu"))
    return out


@_special(aten._to_copy.default)
def _to_copy(
    x: JaxTensor, *, dtype: torch.dtype | None = None, device: Any = None, **kwargs: Any
) -> Any:
    if device is not None and torch.device(device).type == "meta":
        return torch.empty_strided(x.shape, x.stride(), dtype=dtype or x.dtype, device="meta")
    meta = output_meta(aten._to_copy.default, (x,), {"dtype": dtype, **kwargs})
    value = jnp.array(in_dtype(x.raw(), jax_dtype(dtype or x.dtype)), copy=True)
    storage = Storage(value, manual=x._storage.manual)
    return JaxTensor(storage, shape=x.shape, stride=meta.stride, dtype=dtype or x.dtype)


@_special(aten.equal.default)
def _equal(a: JaxTensor, b: JaxTensor) -> bool:
    from xla_dtensor.runtimes.jax_ops import as_array

    if tuple(a.shape) != tuple(b.shape):
        return False
    same = jnp.all(as_array(a) == as_array(b))
    if is_tracer(same):
        refuse_read("compared with torch.equal")
    return bool(host_value(same))


@_special(aten.allclose.default)
def _allclose(a: JaxTensor, b: JaxTensor, *args: Any, **kwargs: Any) -> bool:
    close = torch.isclose(a, b, *args, **kwargs).all()
    if is_tracer(close.value()):  # pyright: ignore
        refuse_read("compared with torch.allclose")
    return bool(close.item())


@_special(aten.set_.source_Tensor)
def _set_(target: JaxTensor, source: JaxTensor) -> JaxTensor:
    if target._storage.manual != source._storage.manual:
        refuse_value(target if target._storage.manual is not None else source)
    if target.shape != source.shape or target.dtype != source.dtype:
        raise RuntimeError(
            f"set_ was called with a source of shape={tuple(source.shape)}, dtype={source.dtype} "
            f"on a tensor of shape={tuple(target.shape)}, dtype={target.dtype}. The JAX runtime "
            "cannot change a tensor's shape or dtype in place. Make a new tensor."
        )
    target._storage, target._steps, target._cached = source._storage, source._steps, None
    return target
