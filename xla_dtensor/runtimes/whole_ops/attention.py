"""Attention, whole: all scores at once, or a kernel that never holds them.

All scores of one head are queries x keys numbers, in float32: 4 MiB at length 1024, 256 MiB at
8192, for every head and sequence on the device. From length 1024 on they are left out
(``attention``); below, two matrix products and a softmax are faster, except where the device has
a kernel of its own: cuDNN's took a ViT of length 256 on an H200 from 61 to 51 ms a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, get_args

import torch

from xla_dtensor.core import Layout
from xla_dtensor.core.errors import ArgumentTypeError
from xla_dtensor.core.spanning import layout_on_span
from xla_dtensor.runtimes.functional import name_of
from xla_dtensor.runtimes.registry import current_runtime
from xla_dtensor.runtimes.state import register_setting
from xla_dtensor.runtimes.whole_ops.autograd import (
    OneResult,
    below,
    has_tangent,
    save,
    saved,
)

__all__ = [
    "AttentionKernel",
    "attention",
    "attention_grad",
    "attention_kernel",
    "is_lean",
    "lean",
    "lean_grad",
    "where_heads_lie",
]

aten: Any = torch.ops.aten


_definitions = torch.library.Library("xla_dtensor", "FRAGMENT")
_definitions.define(
    "sdpa_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor? attn_mask, "
    "bool is_causal, float? scale, bool enable_gqa) -> (Tensor, Tensor, Tensor)"
)
_definitions.define(
    "sdpa_lean(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, bool is_causal, "
    "float? scale, str layout) -> (Tensor, Tensor)"
)
_definitions.define(
    "sdpa_lean_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor? attn_mask, "
    "Tensor output, Tensor log_sum, bool is_causal, float? scale, str layout) "
    "-> (Tensor, Tensor, Tensor)"
)


@torch.library.impl(_definitions, "sdpa_lean", "Meta")
def _(query: Any, key: Any, value: Any, *_: Any) -> Any:
    wide = torch.promote_types(query.dtype, torch.float32)
    output = torch.empty((*query.shape[:-1], value.shape[-1]), dtype=value.dtype, device="meta")
    return output, torch.empty(query.shape[:-1], dtype=wide, device="meta")


@torch.library.impl(_definitions, "sdpa_lean_backward", "Meta")
@torch.library.impl(_definitions, "sdpa_backward", "Meta")
def _(grad: Any, query: Any, key: Any, value: Any, *_: Any) -> Any:
    return tuple(torch.empty(t.shape, dtype=t.dtype, device="meta") for t in (query, key, value))


attention_grad = torch.ops.xla_dtensor.sdpa_backward.default
lean = torch.ops.xla_dtensor.sdpa_lean.default
lean_grad = torch.ops.xla_dtensor.sdpa_lean_backward.default


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


def is_lean(q: Any, k: Any, v: Any, mask: Any = None, is_causal: bool = False) -> bool:
    """Tell whether this attention is computed without holding all scores.

    Args:
        q: (..., query heads, queries, dim), anything with a shape and a dtype.
        k: (..., key heads, keys, dim).
        v: (..., key heads, keys, value dim).
        mask: What is added to the scores, or None.
        is_causal: Whether a query sees no key behind it.
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
    if chosen == "lean" or q.shape[-2] * k.shape[-2] >= _LEAN_FROM:
        return True
    return mask is None and runtime.has_attention_kernel(q, k, v, is_causal)


def where_heads_lie(q: Any, k: Any, v: Any) -> str:
    """Return the name of a layout that cuts batch and heads as all three labels do.

    Args:
        q: (batch, query heads, queries, dim).
        k: (batch, key heads, keys, dim).
        v: (batch, key heads, keys, value dim).

    Returns:
        A name of ``functional``, or "" where the labels say nothing: no DTensors, other ranks,
        different meshes, or no dim that all three have cut evenly by the same axes.
    """
    layouts = [_layout(tensor) for tensor in (q, k, v)]
    first = layouts[0]
    if first is None or any(layout is None or layout.mesh != first.mesh for layout in layouts):
        return ""
    dims: list[Any] = [(), (), (), ()]
    for dim in (0, 1):
        alike = all(
            layout is not None and layout.dims[dim] == first.dims[dim] for layout in layouts
        )
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
    return layout_on_span(layout, spec.outer_cuts)


class _Attention(OneResult):
    @staticmethod
    def forward(
        ctx: Any, q: Any, k: Any, v: Any, mask: Any, is_causal: bool, scale: Any, gqa: bool
    ) -> Any:
        save(ctx, q, k, v, mask)
        ctx.options = (is_causal, scale, gqa)
        return below(
            aten.scaled_dot_product_attention.default,
            q,
            k,
            v,
            mask,
            0.0,
            is_causal,
            scale=scale,
            enable_gqa=gqa,
        )

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        q, k, v, mask = saved(ctx)
        if torch.is_grad_enabled():
            grads = _attention_grad_by_parts(grad, q, k, v, mask, *ctx.options)
        else:
            grads = below(attention_grad, grad, q, k, v, mask, *ctx.options)
        needed = [g if n else None for g, n in zip(grads, ctx.needs_input_grad, strict=False)]
        return (*needed, None, None, None, None)


class _LeanAttention(OneResult):
    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, mask: Any, is_causal: bool, scale: Any) -> Any:
        ctx.options = (is_causal, scale, where_heads_lie(q, k, v))
        ctx.gqa = q.shape[:-2] != k.shape[:-2]
        output, log_sum = below(lean, q, k, v, mask, *ctx.options)
        save(ctx, q, k, v, mask, output, log_sum)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        q, k, v, mask, output, log_sum = saved(ctx)
        if torch.is_grad_enabled():
            is_causal, scale, _ = ctx.options
            grads = _attention_grad_by_parts(grad, q, k, v, mask, is_causal, scale, ctx.gqa)
        else:
            grads = below(lean_grad, grad, q, k, v, mask, output, log_sum, *ctx.options)
        needed = [g if n else None for g, n in zip(grads, ctx.needs_input_grad, strict=False)]
        return (*needed, None, None, None)


def attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Run aten's scaled_dot_product_attention; the kernel that is registered for it."""
    kind = query.device.type
    if torch.is_autocast_enabled(kind):  # On a device for which torch has no autocast kernel.
        dtype = torch.get_autocast_dtype(kind)
        q, k, v, mask = (_cast(tensor, dtype) for tensor in (query, key, value, attn_mask))
        with torch.autocast(kind, enabled=False):
            return attention(
                q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
    if attn_mask is not None and is_causal and _REFUSAL is not None:
        raise RuntimeError(_REFUSAL)
    is_mask_needed = attn_mask is not None and attn_mask.requires_grad
    if dropout_p > 0.0 or is_mask_needed or has_tangent(query, key, value, attn_mask):
        return _attention_by_parts(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
        )
    if (enable_gqa or query.shape[:-2] == key.shape[:-2]) and is_lean(
        query, key, value, attn_mask, is_causal
    ):
        return _LeanAttention.apply(query, key, value, attn_mask, is_causal, scale)
    return _Attention.apply(query, key, value, attn_mask, is_causal, scale, enable_gqa)


def _refusal_of_a_mask_and_causal() -> str | None:
    """Return how torch refuses a mask beside ``is_causal``: 2.15 does, 2.9 takes both on a CPU."""
    q, mask = torch.ones(1, 1, 1, 1, device="cpu"), torch.ones(1, 1, device="cpu")
    try:
        aten.scaled_dot_product_attention.default(q, q, q, mask, is_causal=True)
    except RuntimeError as error:
        return str(error)
    return None


_REFUSAL = _refusal_of_a_mask_and_causal()


def _cast(tensor: Any, dtype: torch.dtype) -> Any:
    """What autocast makes of an argument; it leaves float64 alone."""
    if tensor is None or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(dtype)


def _attention_by_parts(
    q: Any, k: Any, v: Any, mask: Any, dropout_p: float, is_causal: bool, scale: Any, gqa: bool
) -> Any:
    """The definition in torch's documentation, for dropout and for masks that need gradients."""
    if gqa:
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
        v = v.repeat_interleave(q.shape[-3] // v.shape[-3], -3)
    scores = torch.matmul(q, k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(mask.logical_not(), float("-inf"))
    elif mask is not None:
        scores = scores + mask
    weights = torch.dropout(torch.softmax(scores, -1), dropout_p, True)
    return torch.matmul(weights, v)


def _attention_grad_by_parts(
    grad: Any, q: Any, k: Any, v: Any, mask: Any, is_causal: bool, scale: Any, gqa: bool
) -> Any:
    """The gradients of attention, in ops that can be differentiated again."""
    q, k, v = (tensor.view_as(tensor).requires_grad_() for tensor in (q, k, v))
    output = _attention_by_parts(q, k, v, mask, 0.0, is_causal, scale, gqa)
    return torch.autograd.grad(output, (q, k, v), grad, create_graph=True)
