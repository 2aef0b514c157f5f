"""Ops that are made of other torch ops on JaxTensors.

    aten.ldexp(x, 3)                  x * 2.0 ** 3
    aten.as_strided_scatter(x, ...)   a copy of x, and a write to a view of it

Some depend on how a tensor is strided: a lowering sees no strides, these rules do. Of others
torch's own decomposition differs from what torch computes. The rest are whole layers that torch
calls as one op. A rule is looked for where an op has no lowering.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map

from xla_dtensor.runtimes.functional import FACTORED, smooth_l1_backward
from xla_dtensor.runtimes.jax.eager.tensor import JaxTensor
from xla_dtensor.runtimes.jax.lower.linalg import raise_if_failed

__all__ = ["COMPOSED"]


aten = torch.ops.aten

COMPOSED: dict[Any, Callable[..., Any]] = {
    **FACTORED,
    aten.smooth_l1_loss_backward.default: smooth_l1_backward,
}


# Since torch 2.15, which has a kernel of it; before it is a product with 2 to the exponent.
_LDEXP_IS_EXACT = not torch._C._dispatch_has_kernel_for_dispatch_key(
    aten.ldexp.Tensor.name(), torch._C.DispatchKey.CompositeImplicitAutograd
)


def _composed(func: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(rule: Callable[..., Any]) -> Callable[..., Any]:
        COMPOSED[func] = rule
        return rule

    return register


@_composed(aten._linalg_check_errors.default)
def _check_errors(info: JaxTensor, api_name: str, *, is_matrix: bool) -> None:
    raise_if_failed(info.raw(), api_name, is_matrix)


@_composed(aten.binary_cross_entropy.default)
def _binary_cross_entropy(
    x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None, reduction: int = 1
) -> torch.Tensor:
    from torch._decomp import decomposition_table

    # In a compiled step nobody has looked at its values.
    target = torch.where((target >= 0) & (target <= 1), target, torch.nan)
    return decomposition_table[aten.binary_cross_entropy.default](x, target, weight, reduction)


def _of_nothing(func: Any, grad: torch.Tensor, x: torch.Tensor, *others: Any) -> torch.Tensor:
    """Compute a gradient of a mean, which torch's decomposition divides by the number of rows."""
    from torch._decomp import decomposition_table

    return decomposition_table[func](grad, x, *others) if x.numel() else torch.zeros_like(x)


for _func in (aten.mse_loss_backward.default, aten.huber_loss_backward.default):
    COMPOSED[_func] = partial(_of_nothing, _func)


def _copy_of(view: Any, *args: Any, **kwargs: Any) -> Any:
    contiguous = partial(torch.clone, memory_format=torch.contiguous_format)
    return tree_map(contiguous, view(*args, **kwargs))


for _name in (
    *("alias", "detach", "diagonal", "permute", "select", "slice", "split", "split_with_sizes"),
    *("squeeze", "t", "transpose", "view_as_complex", "view_as_real"),
):
    for _form in getattr(aten, f"{_name}_copy").overloads():
        if not _form.endswith("out"):
            _view = getattr(getattr(aten, _name), _form)
            COMPOSED[getattr(getattr(aten, f"{_name}_copy"), _form)] = partial(_copy_of, _view)


@_composed(aten.view_copy.default)
def _view_copy(x: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    return x.reshape(size).clone()  # also where no view has this shape


@_composed(aten.ldexp.Tensor)
def _ldexp(x: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    is_whole = not (exponent.is_floating_point() or exponent.is_complex())
    if not (_LDEXP_IS_EXACT and x.is_floating_point() and is_whole):
        return x * torch.pow(2.0, exponent)  # torch's decomposition takes the 2.0 for a float32
    wide = x if x.dtype == torch.float64 else x.float()
    # By steps that are no infinities themselves; what is beyond the limit ends at one, or at zero.
    limit = 2200 if wide.dtype == torch.float64 else 300
    exponent = exponent.to(torch.int64).clamp(-limit, limit)
    third = torch.div(exponent, 3, rounding_mode="trunc")
    for step in (third, third, exponent - 2 * third):
        wide = wide * torch.pow(2.0, step.to(wide.dtype))
    return wide.to(x.dtype)


@_composed(aten.as_strided_scatter.default)
def _as_strided_scatter(
    x: torch.Tensor, source: torch.Tensor, size: Any, stride: Any, storage_offset: Any = None
) -> torch.Tensor:
    # PyTorch counts in the whole memory of which `x` may be a part, such as every second element.
    own = x.shape, x.stride(), x.storage_offset()
    last = sum((n - 1) * step for n, step in zip(*own[:2], strict=True)) if x.numel() else -1
    memory = x.new_zeros(own[2] + last + 1)
    aten.as_strided.default(memory, *own).copy_(x)
    where = own[2] if storage_offset is None else storage_offset
    aten.as_strided.default(memory, size, stride, where).copy_(source)
    return aten.as_strided.default(memory, *own).clone()


# ------------------------------------------------------------------ eval's fast path


@_composed(aten._native_multi_head_attention.default)
def _multi_head_attention(
    query: Any,
    key: Any,
    value: Any,
    embed_dim: int,
    num_head: int,
    qkv_weight: Any,
    qkv_bias: Any,
    proj_weight: Any,
    proj_bias: Any,
    mask: Any = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> Any:
    """What ``nn.MultiheadAttention`` calls in eval, without gradients.

    `mask` says with True, or -inf, what is left out: (queries, keys) for a `mask_type` of 0,
    (batch, keys) for 1, (batch, heads, queries, keys) for 2.
    """
    q, k, v = (
        F.linear(x, weight, bias).unflatten(-1, (num_head, -1)).transpose(1, 2)
        for x, weight, bias in zip(
            (query, key, value), qkv_weight.chunk(3), qkv_bias.chunk(3), strict=True
        )
    )
    if mask is not None and mask_type == 1:
        mask = mask[:, None, None, :]
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=query.dtype).masked_fill(mask, float("-inf"))
    if not need_weights:
        heads, weights = F.scaled_dot_product_attention(q, k, v, mask), None
    else:
        scores = q @ k.mT / (embed_dim // num_head) ** 0.5
        weights = (scores if mask is None else scores + mask).softmax(-1)
        heads = weights @ v
        weights = weights.mean(1) if average_attn_weights else weights
    return F.linear(heads.transpose(1, 2).flatten(2), proj_weight, proj_bias), weights


@_composed(aten._transformer_encoder_layer_fwd.default)
def _encoder_layer(
    src: Any,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Any,
    qkv_bias: Any,
    proj_weight: Any,
    proj_bias: Any,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Any,
    norm_bias_1: Any,
    norm_weight_2: Any,
    norm_bias_2: Any,
    ffn_weight_1: Any,
    ffn_bias_1: Any,
    ffn_weight_2: Any,
    ffn_bias_2: Any,
    mask: Any = None,
    mask_type: int | None = None,
) -> Any:
    """What ``nn.TransformerEncoderLayer`` calls in eval, without gradients: the layer as one op."""
    activation = F.gelu if use_gelu else F.relu

    def attention(x: Any) -> Any:
        weights = (qkv_weight, qkv_bias, proj_weight, proj_bias)
        return aten._native_multi_head_attention.default(
            x, x, x, embed_dim, num_heads, *weights, mask, False, True, mask_type
        )[0]

    def mlp(x: Any) -> Any:
        hidden = activation(F.linear(x, ffn_weight_1, ffn_bias_1))
        return F.linear(hidden, ffn_weight_2, ffn_bias_2)

    def norm_1(x: Any) -> Any:
        return F.layer_norm(x, (embed_dim,), norm_weight_1, norm_bias_1, eps)

    def norm_2(x: Any) -> Any:
        return F.layer_norm(x, (embed_dim,), norm_weight_2, norm_bias_2, eps)

    if norm_first:
        x = src + attention(norm_1(src))
        return x + mlp(norm_2(x))
    x = norm_1(src + attention(src))
    return norm_2(x + mlp(x))
