"""Keep linear, matmul and attention whole: one op forward, one backward, no flattening.

torch runs these three as composites: their kernels reshape batch, sequence or head dims together
before anything below autograd can see the op. A tensor that carries the dispatch key
``AutogradPrivateUse3`` meets the kernels of this module first. Ordinary CPU tensors do not carry
it and are not affected; checkpoint, autocast and hooks all work, because this is torch's own
dispatcher and no mode.

The backward formulas are written with ops that are themselves whole. Two have no name in
aten and are defined here: ``xla_dtensor::linear_weight_grad`` and ``xla_dtensor::sdpa_backward``.
Attention over long sequences is a pair of ops of its own, ``xla_dtensor::sdpa_lean`` and its
backward, which hands on the logarithm of the softmax's sums.
"""

from __future__ import annotations

from typing import Any

import torch

from xla_dtensor.runtimes.attention_choice import is_lean, where_heads_lie
from xla_dtensor.runtimes.whole_autograd import OneResult, below, contract, has_tangent, save, saved
from xla_dtensor.runtimes.whole_einsum import einsum

__all__ = ["WHOLE_OPS", "register"]

_KEY = "AutogradPrivateUse3"
_definitions = torch.library.Library("xla_dtensor", "DEF")
_definitions.define("linear_weight_grad(Tensor grad, Tensor input) -> Tensor")
_definitions.define(
    "sdpa_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor? attn_mask, "
    "bool is_causal, float? scale, bool enable_gqa) -> (Tensor, Tensor, Tensor)"
)
_definitions.define(
    "sdpa_lean(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, bool is_causal, "
    "float? scale, str lies) -> (Tensor, Tensor)"
)
_definitions.define(
    "sdpa_lean_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor? attn_mask, "
    "Tensor output, Tensor log_sum, bool is_causal, float? scale, str lies) "
    "-> (Tensor, Tensor, Tensor)"
)


@torch.library.impl(_definitions, "linear_weight_grad", "Meta")
def _(grad: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    return grad.new_empty((grad.shape[-1], input.shape[-1]))


@torch.library.impl(_definitions, "sdpa_lean", "Meta")
def _(query: Any, key: Any, value: Any, *_: Any) -> Any:
    wide = torch.promote_types(query.dtype, torch.float32)
    output = torch.empty((*query.shape[:-1], value.shape[-1]), dtype=value.dtype, device="meta")
    return output, torch.empty(query.shape[:-1], dtype=wide, device="meta")


@torch.library.impl(_definitions, "sdpa_lean_backward", "Meta")
@torch.library.impl(_definitions, "sdpa_backward", "Meta")
def _(grad: Any, query: Any, key: Any, value: Any, *_: Any) -> Any:
    return tuple(torch.empty(t.shape, dtype=t.dtype, device="meta") for t in (query, key, value))


_registrations: list[torch.library.Library] = []
aten = torch.ops.aten
_weight_grad = torch.ops.xla_dtensor.linear_weight_grad.default
_attention_grad = torch.ops.xla_dtensor.sdpa_backward.default
_lean = torch.ops.xla_dtensor.sdpa_lean.default
_lean_grad = torch.ops.xla_dtensor.sdpa_lean_backward.default


def register() -> None:
    """Install the kernels; calling it again does nothing."""
    if _registrations:
        return
    # Ops of other libraries have no kernel for this key; they pass through to the next one.
    fallback = torch.library.Library("_", "IMPL")
    fallback.fallback(torch.library.fallthrough_kernel, _KEY)
    kernels = torch.library.Library("aten", "IMPL")
    _registrations.extend((fallback, kernels))
    for name, kernel in (
        ("linear", _linear),
        ("matmul", _matmul),
        ("scaled_dot_product_attention", _attention),
        ("einsum", einsum),
        ("lstm.input", _lstm),
        ("one_hot", _one_hot),
        ("tensor_split.tensor_indices_or_sections", _tensor_split),
    ):
        kernels.impl(name, kernel, _KEY)


def _tensor_split(x: torch.Tensor, places: torch.Tensor, dim: int = 0) -> Any:
    """torch reads the memory of the tensor that says where to split."""
    return torch.tensor_split(x, places.tolist(), dim)


def _lstm(*args: Any) -> Any:
    """torch's LSTM of its own ops, not of oneDNN, which reads the memory of CPU tensors."""
    before = torch.backends.mkldnn.is_available() and torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        return aten.lstm.input.decompose(*args)
    finally:
        torch._C._set_mkldnn_enabled(before)


def _one_hot(index: Any, num_classes: int = -1) -> Any:
    """As one op, whose range is looked at; torch compares with all classes instead."""
    if num_classes == -1:
        num_classes = int(index.max().item()) + 1
    return below(aten.one_hot.default, index, num_classes)


class _Linear(OneResult):
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any) -> Any:
        save(ctx, x, weight)
        return below(aten.linear.default, x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, weight = saved(ctx)
        to_x, to_weight, to_bias = ctx.needs_input_grad
        if weight.ndim == 1:
            grad_x = grad.unsqueeze(-1) * weight.conj() if to_x else None
            products = grad.unsqueeze(-1) * x.conj()
            leading = list(range(x.ndim - 1))  # sum over no dims is one over all
            grad_weight = (products.sum(leading) if leading else products) if to_weight else None
        else:
            grad_x = torch.matmul(grad, weight.conj()) if to_x else None
            grad_weight = contract(grad, x.conj()) if to_weight else None
        grad_bias = grad.sum(list(range(x.ndim - 1))) if to_bias and x.ndim > 1 else None
        if to_bias and x.ndim == 1:
            grad_bias = grad
        return grad_x, grad_weight, grad_bias


def _linear(x: Any, weight: Any, bias: Any = None) -> Any:
    if has_tangent(x, weight, bias):
        return aten.linear.default.decompose(x, weight, bias)
    return _Linear.apply(x, weight, bias)


class _Matmul(OneResult):
    @staticmethod
    def forward(ctx: Any, a: Any, b: Any) -> Any:
        save(ctx, a, b)
        return below(aten.matmul.default, a, b)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        a, b = saved(ctx)
        # Vectors are matrices with one row or column; matmul only hides it.
        matrix_a = a.unsqueeze(0) if a.ndim == 1 else a
        matrix_b = b.unsqueeze(1) if b.ndim == 1 else b
        grad = grad.unsqueeze(-1) if b.ndim == 1 else grad
        grad = grad.unsqueeze(-2) if a.ndim == 1 else grad
        grad_a = grad_b = None
        if ctx.needs_input_grad[0]:
            grad_a = torch.matmul(grad, matrix_b.mH).sum_to_size(matrix_a.shape).view(a.shape)
        if ctx.needs_input_grad[1]:
            if matrix_b.ndim == 2 and matrix_a.ndim > 2:
                grad_b = contract(matrix_a.conj(), grad).view(b.shape)
            else:
                product = torch.matmul(matrix_a.mH, grad)
                grad_b = product.sum_to_size(matrix_b.shape).view(b.shape)
        return grad_a, grad_b


def _matmul(a: Any, b: Any) -> Any:
    if has_tangent(a, b):
        return aten.matmul.default.decompose(a, b)
    return _Matmul.apply(a, b)


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
            grads = below(_attention_grad, grad, q, k, v, mask, *ctx.options)
        needed = [g if n else None for g, n in zip(grads, ctx.needs_input_grad, strict=False)]
        return (*needed, None, None, None, None)


class _LeanAttention(OneResult):
    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, mask: Any, is_causal: bool, scale: Any) -> Any:
        ctx.options = (is_causal, scale, where_heads_lie(q, k, v))
        ctx.gqa = q.shape[:-2] != k.shape[:-2]
        output, log_sum = below(_lean, q, k, v, mask, *ctx.options)
        save(ctx, q, k, v, mask, output, log_sum)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        q, k, v, mask, output, log_sum = saved(ctx)
        if torch.is_grad_enabled():
            is_causal, scale, _ = ctx.options
            grads = _attention_grad_by_parts(grad, q, k, v, mask, is_causal, scale, ctx.gqa)
        else:
            grads = below(_lean_grad, grad, q, k, v, mask, output, log_sum, *ctx.options)
        needed = [g if n else None for g, n in zip(grads, ctx.needs_input_grad, strict=False)]
        return (*needed, None, None, None)


def _attention(
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
    kind = query.device.type
    if torch.is_autocast_enabled(kind):  # On a device for which torch has no autocast kernel.
        dtype = torch.get_autocast_dtype(kind)
        q, k, v, mask = (_cast(tensor, dtype) for tensor in (query, key, value, attn_mask))
        with torch.autocast(kind, enabled=False):
            return _attention(
                q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
    if attn_mask is not None and is_causal and _REFUSAL is not None:
        raise RuntimeError(_REFUSAL)
    is_mask_needed = attn_mask is not None and attn_mask.requires_grad
    if dropout_p > 0.0 or is_mask_needed or has_tangent(query, key, value, attn_mask):
        return _attention_by_parts(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
        )
    if (enable_gqa or query.shape[:-2] == key.shape[:-2]) and is_lean(query, key, value):
        return _LeanAttention.apply(query, key, value, attn_mask, is_causal, scale)
    return _Attention.apply(query, key, value, attn_mask, is_causal, scale, enable_gqa)


def _refusal_of_a_mask_and_causal() -> str | None:
    """Return how torch refuses a mask beside ``is_causal``: 2.15 does, 2.9 takes both on a CPU."""
    one, mask = torch.ones(1, 1, 1, 1, device="cpu"), torch.ones(1, 1, device="cpu")
    try:
        aten.scaled_dot_product_attention.default(one, one, one, mask, is_causal=True)
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


WHOLE_OPS = frozenset(
    {
        aten.linear.default,
        aten.matmul.default,
        aten.scaled_dot_product_attention.default,
        _weight_grad,
        _attention_grad,
        _lean,
        _lean_grad,
    }
)
