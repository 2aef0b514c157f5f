"""The ResNet of `benchmarks.step` written by hand in JAX; see `benchmarks.step_jax_models`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.resnet_model import ResNetSizes

__all__ = ["resnet"]

Params = dict[str, Any]
_HIGHEST = jax.lax.Precision.HIGHEST
_MOMENTUM = 0.1


def resnet(
    params: Params, images: Any, sizes: ResNetSizes, kept: Callable[[Any, str], Any]
) -> tuple[Any, Params]:
    """Returns the logits, and the buffers of batch norm as this step changes them."""
    changed: Params = {}

    def norm(name: str, x: Any) -> Any:
        return _batch_norm(params, changed, name, x)

    x = _convolved(params["stem.conv.weight"], images, 1)
    x = kept(jax.nn.relu(norm("stem.norm", x)), "features")
    for layer, (before, width, stride) in enumerate(sizes.layers()):
        at = f"layers.{layer}"
        found = norm(f"{at}.norm1", _convolved(params[f"{at}.conv1.weight"], x, stride))
        found = _convolved(params[f"{at}.conv2.weight"], jax.nn.relu(found), 1)
        found = norm(f"{at}.norm2", found)
        if before != width or stride != 1:
            x = _convolved(params[f"{at}.shortcut.weight"], x, stride)
            x = norm(f"{at}.shortcut_norm", x)
        x = kept(jax.nn.relu(found + x), "features")
    pooled = x.mean((2, 3))
    classes = jnp.einsum("bd,hd->bh", pooled, params["output.weight"], precision=_HIGHEST)
    return kept(classes + params["output.bias"], "classes"), changed


def _convolved(weight: Any, x: Any, stride: int) -> Any:
    padding = weight.shape[-1] // 2
    return jax.lax.conv_general_dilated(
        x,
        weight,
        (stride, stride),
        [(padding, padding)] * 2,
        dimension_numbers=("NCHW", "OIHW", "NCHW"),
        precision=_HIGHEST,
    )


def _batch_norm(params: Params, changed: Params, name: str, x: Any) -> Any:
    wide = x.astype(jnp.float32)
    mean, variance = wide.mean((0, 2, 3)), wide.var((0, 2, 3))
    # The running variance is the unbiased one, as in PyTorch.
    count = x.size // x.shape[1]
    for kind, value in (("mean", mean), ("var", variance * (count / (count - 1)))):
        buffer = params[f"{name}.running_{kind}"]
        kept = (1 - _MOMENTUM) * buffer + _MOMENTUM * value
        changed[f"{name}.running_{kind}"] = jax.lax.stop_gradient(kept).astype(buffer.dtype)
    changed[f"{name}.num_batches_tracked"] = params[f"{name}.num_batches_tracked"] + 1
    mean, scale = (v[:, None, None] for v in (mean, jax.lax.rsqrt(variance + 1e-5)))
    weight, bias = (params[f"{name}.{kind}"][:, None, None] for kind in ("weight", "bias"))
    return ((wide - mean) * scale).astype(x.dtype) * weight + bias
