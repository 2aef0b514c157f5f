"""Which attention is taken: all scores at once, or a kernel that never holds them.

All scores of one head are queries x keys numbers, in float32: 4 MiB at length 1024, 256 MiB at
8192, for every head and sequence on the device. From length 1024 on they are left out
(``jax_lowering.attention_lean``); below, two matrix products and a softmax are faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, get_args

from xla_dtensor.core import Layout
from xla_dtensor.core.spanning import layout_on_span
from xla_dtensor.errors import ArgumentTypeError
from xla_dtensor.runtimes.layout_names import name_of
from xla_dtensor.runtimes.registry import current_runtime
from xla_dtensor.runtimes.trace_settings import register_setting

__all__ = ["AttentionKernel", "attention_kernel", "is_lean", "where_heads_lie"]

AttentionKernel = Literal["auto", "plain", "lean"]
_LEAN_FROM = 1024 * 1024
_chosen: ContextVar[AttentionKernel] = ContextVar("attention_kernel", default="auto")
register_setting("attention_kernel", _chosen.get)


@contextmanager
def attention_kernel(name: AttentionKernel) -> Iterator[None]:
    """Choose how ``scaled_dot_product_attention`` is computed, on the JAX runtime.

    Args:
        name: "lean": never hold the scores of all queries and keys (TPU: Pallas splash attention;
            NVIDIA GPU: cuDNN; elsewhere, and where those do not fit: blocks of 512 keys). "plain":
            hold them. "auto", as it is outside: "lean" where queries x keys are at least 1024 x
            1024. A compiled step is traced anew under another choice. With dropout, and with a
            mask that needs a gradient, it is "plain" whatever is chosen; so it is on torch_xla.

    Yields:
        None. The choice before it is back afterwards.

    Raises:
        ArgumentTypeError: Another name.

    Example:
        >>> import torch, xla_dtensor as xd
        >>> mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
        >>> q = xd.distribute_tensor(torch.randn(2, 4, 16, 8), mesh, ("dp", "tp", None, None))
        >>> with xd.attention_kernel("lean"):
        ...     out = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        >>> out.shape
        torch.Size([2, 4, 16, 8])
    """
    if name not in get_args(AttentionKernel):
        raise ArgumentTypeError(
            f"attention_kernel was called with name={name!r}. It chooses whether all scores are "
            "held at once. Pass 'auto', 'plain' or 'lean'."
        )
    token = _chosen.set(name)
    try:
        yield
    finally:
        _chosen.reset(token)


def is_lean(q: Any, k: Any, v: Any) -> bool:
    """Tell whether this attention is computed without holding all scores.

    Args:
        q: (..., query heads, queries, dim), anything with a shape.
        k: (..., key heads, keys, dim).
        v: (..., key heads, keys, value dim).
    """
    chosen = _chosen.get()
    runtime = current_runtime()
    if chosen == "plain" or runtime is None or not runtime.has_loops:
        return False
    if not (len(q.shape) == len(k.shape) == len(v.shape) >= 2 and k.shape[:-1] == v.shape[:-1]):
        return False
    if tuple(q.shape[:-3]) != tuple(k.shape[:-3]):
        return False
    if 0 in (*q.shape, *k.shape) or (len(q.shape) > 2 and q.shape[-3] % k.shape[-3]):
        return False
    return chosen == "lean" or q.shape[-2] * k.shape[-2] >= _LEAN_FROM


def where_heads_lie(q: Any, k: Any, v: Any) -> str:
    """Return the name of a layout that cuts batch and heads as all three labels do.

    Args:
        q: (batch, query heads, queries, dim).
        k: (batch, key heads, keys, dim).
        v: (batch, key heads, keys, value dim).

    Returns:
        A name of ``layout_names``, or "" where the labels say nothing: no DTensors, other ranks,
        different meshes, or no dim that all three have cut evenly by the same axes.
    """
    layouts = [_layout(tensor) for tensor in (q, k, v)]
    first = layouts[0]
    if first is None or any(one is None or one.mesh != first.mesh for one in layouts):
        return ""
    dims: list[Any] = [(), (), (), ()]
    for dim in (0, 1):
        alike = all(one is not None and one.dims[dim] == first.dims[dim] for one in layouts)
        if alike and all(tensor.shape[dim] % first.num_shards(dim) == 0 for tensor in (q, k, v)):
            dims[dim] = first.dims[dim]
    if not any(dims) and first.mesh.size() > 1:
        return ""
    return name_of(Layout(first.mesh, tuple(dims)))


def _layout(tensor: Any) -> Layout | None:
    spec = getattr(tensor, "_spec", None)
    if spec is None or tensor.ndim != 4:
        return None
    layout = Layout.from_placements(spec.placements, 4, spec.mesh.value)
    return layout_on_span(layout, spec.known)
