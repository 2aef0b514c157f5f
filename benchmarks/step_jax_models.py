"""The models of `benchmarks.step` written by hand in JAX: what a JAX user would write.

Parameters in a dict under PyTorch's names, einsums that keep heads apart, and a function ``kept``
that places an activation, called where the PyTorch models are annotated.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.llama_model import Sizes
from benchmarks.mixtral_model import MixtralSizes
from benchmarks.resnet_model import ResNetSizes
from benchmarks.step_jax_resnet import resnet
from benchmarks.step_sizes import AnySizes
from benchmarks.vit_model import ViTSizes

__all__ = ["logits_of"]

Params = dict[str, Any]
Kept = Callable[[Any, str], Any]
_HIGHEST = jax.lax.Precision.HIGHEST


def logits_of(params: Params, inputs: Any, sizes: AnySizes, kept: Kept) -> tuple[Any, Params]:
    """Returns the logits of the model that has these sizes, and the buffers that it changes."""
    if isinstance(sizes, ResNetSizes):
        return resnet(params, inputs, sizes, kept)
    if isinstance(sizes, ViTSizes):
        return _vit(params, inputs, sizes, kept), {}
    return _llama(params, inputs, sizes, kept), {}


def _llama(params: Params, tokens: Any, sizes: Sizes, kept: Kept) -> Any:
    x = kept(params["tok_embeddings.weight"][tokens], "residual")
    for layer in range(sizes.num_layers):
        at = partial(_named, params, f"layers.{layer}")
        given = _rms_norm(x, at("attention_norm.weight"))
        x = x + kept(_grouped_attention(at, given, params["rotary"], sizes), "residual")
        given = _rms_norm(x, at("ffn_norm.weight"))
        routed = isinstance(sizes, MixtralSizes)
        found = _experts(at, given, sizes) if routed else _gated(at, given, "feed_forward")
        x = x + kept(found, "residual")
    x = _rms_norm(x, params["norm.weight"])
    return kept(_linear(x, params["output.weight"]), "logits")


def _vit(params: Params, images: Any, sizes: ViTSizes, kept: Kept) -> Any:
    x = kept(_patches(params, images, sizes), "residual")
    for layer in range(sizes.num_layers):
        at = partial(_named, params, f"layers.{layer}")
        x = x + kept(_full_attention(at, _layer_norm(at, "attention_norm", x), sizes), "residual")
        x = x + kept(_feed_forward(at, _layer_norm(at, "ffn_norm", x)), "residual")
    at = partial(_named, params, "")
    pooled = _layer_norm(at, "norm", x.mean(1))
    classes = jnp.einsum("bd,hd->bh", pooled, at("output.weight"), precision=_HIGHEST)
    return kept(classes + at("output.bias"), "classes")


def _named(params: Params, layer: str, name: str) -> Any:
    return params[f"{layer}.{name}" if layer else name]


def _linear(x: Any, weight: Any, bias: Any = None) -> Any:
    product = jnp.einsum("bld,hd->blh", x, weight, precision=_HIGHEST)
    return product if bias is None else product + bias


def _attended(q: Any, k: Any, v: Any, *, causal: bool) -> Any:
    """Attends: [batch, length, heads, head_dim]."""
    if jax.default_backend() == "gpu" and q.dtype == jnp.bfloat16:
        return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="cudnn")
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, precision=_HIGHEST) * q.shape[-1] ** -0.5
    if causal:
        seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        scores = jnp.where(seen, scores, -jnp.inf)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v, precision=_HIGHEST)


# ---------------------------------------------------------------------- Llama


def _rms_norm(x: Any, weight: Any) -> Any:
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-5)
    return (wide * scale).astype(x.dtype) * weight


def _grouped_attention(at: Callable[[str], Any], x: Any, rotary: Any, sizes: Sizes) -> Any:
    batch, length, _ = x.shape

    def heads(name: str) -> Any:
        shape = (batch, length, -1, sizes.dim // sizes.num_heads)
        return _linear(x, at(f"attention.{name}.weight")).reshape(shape)

    q, k, v = _rotated(heads("wq"), rotary), _rotated(heads("wk"), rotary), heads("wv")
    k, v = (jnp.repeat(t, sizes.num_heads // sizes.num_kv_heads, axis=2) for t in (k, v))
    out = _attended(q, k, v, causal=True)
    return _linear(out.reshape(batch, length, -1), at("attention.wo.weight"))


def _rotated(x: Any, table: Any) -> Any:
    cos, sin = table[:, : x.shape[1], None, :]
    front, back = jnp.split(x, 2, axis=-1)
    return x * cos + jnp.concatenate((-back, front), axis=-1) * sin


def _gated(at: Callable[[str], Any], x: Any, part: str) -> Any:
    w1, w2, w3 = (at(f"{part}.{name}.weight") for name in ("w1", "w2", "w3"))
    return _linear(jax.nn.silu(_linear(x, w1)) * _linear(x, w3), w2)


def _experts(at: Callable[[str], Any], x: Any, sizes: MixtralSizes) -> Any:
    scores = jax.nn.softmax(_linear(x, at("feed_forward.gate.weight")).astype(jnp.float32))
    best, which = jax.lax.top_k(scores, sizes.num_chosen)
    shares = (best / best.sum(-1, keepdims=True))[..., None]
    weights = (jax.nn.one_hot(which, sizes.num_experts) * shares).sum(-2).astype(x.dtype)
    each = [_gated(at, x, f"feed_forward.experts.{i}") for i in range(sizes.num_experts)]
    return (jnp.stack(each, -1) * weights[..., None, :]).sum(-1)


# ---------------------------------------------------------------------- ViT


def _patches(params: Params, images: Any, sizes: ViTSizes) -> Any:
    side, each = sizes.patch, sizes.image // sizes.patch
    cut = images.reshape(sizes.batch, sizes.channels, each, side, each, side)
    cut = cut.transpose(0, 2, 4, 1, 3, 5).reshape(sizes.batch, each * each, -1)
    at = partial(_named, params, "embedding")
    return _with_bias(at, "patches", cut) + at("position")


def _layer_norm(at: Callable[[str], Any], name: str, x: Any) -> Any:
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(-1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.mean(centred * centred, -1, keepdims=True) + 1e-6)
    return (centred * scale).astype(x.dtype) * at(f"{name}.weight") + at(f"{name}.bias")


def _full_attention(at: Callable[[str], Any], x: Any, sizes: ViTSizes) -> Any:
    batch, length, _ = x.shape

    def heads(name: str) -> Any:
        shape = (batch, length, -1, sizes.dim // sizes.num_heads)
        return _with_bias(at, f"attention.{name}", x).reshape(shape)

    out = _attended(heads("wq"), heads("wk"), heads("wv"), causal=False)
    return _with_bias(at, "attention.wo", out.reshape(batch, length, -1))


def _feed_forward(at: Callable[[str], Any], x: Any) -> Any:
    hidden = jax.nn.gelu(_with_bias(at, "feed_forward.w1", x), approximate=False)
    return _with_bias(at, "feed_forward.w2", hidden)


def _with_bias(at: Callable[[str], Any], name: str, x: Any) -> Any:
    return _linear(x, at(f"{name}.weight"), at(f"{name}.bias"))
