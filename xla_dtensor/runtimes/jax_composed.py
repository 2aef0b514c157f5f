"""Ops as other ops on JaxTensors.

Some depend on how a tensor is strided: a lowering sees no strides; these rules do. The others are
whole layers and steps that torch calls as one op.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map

from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.runtimes.jax_lowering.factorizations import raise_if_failed
from xla_dtensor.runtimes.jax_special import SPECIAL
from xla_dtensor.runtimes.jax_tensor import JaxTensor
from xla_dtensor.runtimes.strided_factors import FACTORED

__all__ = ["COMPOSED"]

aten = torch.ops.aten
COMPOSED: dict[Any, Callable[..., Any]] = {**FACTORED}


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
    right = torch.where((target >= 0) & (target <= 1), target, torch.nan)
    return decomposition_table[aten.binary_cross_entropy.default](x, right, weight, reduction)


def _copy_of(view: Any, *args: Any, **kwargs: Any) -> Any:
    return tree_map(torch.clone, view(*args, **kwargs))


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
def _ldexp(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return x * torch.pow(2.0, other)  # torch's decomposition takes the 2.0 for a float32


# ------------------------------------------------------------------ strides


@_composed(aten.as_strided_scatter.default)
def _as_strided_scatter(
    x: torch.Tensor, source: torch.Tensor, size: Any, stride: Any, storage_offset: Any = None
) -> torch.Tensor:
    if storage_offset is not None and x.storage_offset():
        raise UnsupportedOpError(
            f"as_strided_scatter was called with storage_offset={storage_offset} on a part of a "
            f"tensor, which begins at {x.storage_offset()} of it. PyTorch counts from the "
            "beginning of the whole, so that little of what is written is in the part. Leave "
            "storage_offset out, or call it on the whole."
        )
    result = x.clone()
    aten.as_strided.default(result, size, stride, storage_offset).copy_(source)
    return result


def _resized(x: JaxTensor, size: Sequence[int], memory_format: Any) -> JaxTensor:
    is_plain = memory_format in (None, torch.contiguous_format, torch.preserve_format)
    if prod(size) != x.numel() or not is_plain:
        raise UnsupportedOpError(
            f"resize_ was called with size={tuple(size)}, memory_format={memory_format} on a "
            f"tensor of shape={tuple(x.shape)}. A tensor of the JAX runtime keeps its number of "
            "elements. Pass a size with as many, or make a new tensor."
        )
    if x.is_contiguous():
        view: Any = aten.view.default(x, size)
    else:
        stride = torch.empty(tuple(size), device="meta").stride()
        view = aten.as_strided.default(x, size, stride, x.storage_offset())
    torch.Tensor.data.__set__(x, view)  # pyright: ignore
    x._steps, x._cached = view._steps, None
    return x


def _resize_(x: JaxTensor, size: Sequence[int], *, memory_format: Any = None) -> JaxTensor:
    return _resized(x, size, memory_format)


def _resize_as_(x: JaxTensor, template: torch.Tensor, *, memory_format: Any = None) -> JaxTensor:
    return _resized(x, template.shape, memory_format)


SPECIAL[aten.resize_.default] = _resize_
SPECIAL[aten.resize_as_.default] = _resize_as_


# ------------------------------------------------------------------ gradient scaling


def _check_and_unscale(
    grads: Sequence[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor
) -> None:
    """``GradScaler.unscale_``: `found_inf` is 1 after a gradient with a NaN or an infinity."""
    finite = torch.stack([grad.isfinite().all() for grad in grads]).all()
    found_inf.copy_(torch.where(finite, found_inf, 1.0))
    for grad in grads:
        grad.mul_(inv_scale)


SPECIAL[aten._amp_foreach_non_finite_check_and_unscale_.default] = _check_and_unscale

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
        mixed, weights = F.scaled_dot_product_attention(q, k, v, mask), None
    else:
        scores = q @ k.mT / (embed_dim // num_head) ** 0.5
        weights = (scores if mask is None else scores + mask).softmax(-1)
        mixed = weights @ v
        weights = weights.mean(1) if average_attn_weights else weights
    return F.linear(mixed.transpose(1, 2).flatten(2), proj_weight, proj_bias), weights


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
    act = F.gelu if use_gelu else F.relu

    def attended(x: Any) -> Any:
        weights = (qkv_weight, qkv_bias, proj_weight, proj_bias)
        return aten._native_multi_head_attention.default(
            x, x, x, embed_dim, num_heads, *weights, mask, False, True, mask_type
        )[0]

    def fed(x: Any) -> Any:
        return F.linear(act(F.linear(x, ffn_weight_1, ffn_bias_1)), ffn_weight_2, ffn_bias_2)

    def first(x: Any) -> Any:
        return F.layer_norm(x, (embed_dim,), norm_weight_1, norm_bias_1, eps)

    def second(x: Any) -> Any:
        return F.layer_norm(x, (embed_dim,), norm_weight_2, norm_bias_2, eps)

    if norm_first:
        x = src + attended(first(src))
        return x + fed(second(x))
    x = first(src + attended(src))
    return second(x + fed(x))
