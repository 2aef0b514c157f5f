"""Attention that never holds the scores of all queries and keys: a kernel per kind of device.

==========  =======================================================  ===============================
device      kernel                                                   taken where
==========  =======================================================  ===============================
TPU         Pallas splash attention (``attention_splash``)           no mask, head dims of 128 n,
                                                                     lengths of 128 n, and labels
                                                                     that say where heads lie
NVIDIA GPU  cuDNN's, by ``jax.nn.dot_product_attention``             half precision, no mask, head
                                                                     dims of 8 n
any         blocks of keys (``attention_blocks``)                    everything else
==========  =======================================================  ===============================

The choice is made where the program is lowered, not where it is traced: a step that is compiled
for a TPU by a machine without one has the TPU's kernel. Its name is in the program's ``op_name``s.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax
from jax.sharding import NamedSharding

from xla_dtensor.runtimes import jax_devices
from xla_dtensor.runtimes import whole_ops as whole_ops  # defines torch.ops.xla_dtensor
from xla_dtensor.runtimes.jax_lowering import attention_blocks, attention_splash
from xla_dtensor.runtimes.jax_lowering.attention_blocks import Scores
from xla_dtensor.runtimes.jax_lowering.head_groups import HeadGroups
from xla_dtensor.runtimes.jax_lowering.table import lower
from xla_dtensor.runtimes.jax_sharding import named_sharding
from xla_dtensor.runtimes.layout_names import layout_names
from xla_dtensor.runtimes.registry import get_runtime

__all__ = ["lean_backward", "lean_forward"]

_WIDEST_CUDNN_HEAD = 128


def lean_forward(
    q: Any,
    k: Any,
    v: Any,
    mask: Any,
    is_causal: bool,
    scale: float,
    lies: NamedSharding | None = None,
) -> tuple[Any, Any]:
    """Return the output, and the logarithm of the sums of each query's exponentials.

    Args:
        q: (..., query heads, queries, dim).
        k: (..., key heads, keys, dim); query heads are a multiple of key heads.
        v: (..., key heads, keys, value dim).
        mask: Boolean or added, broadcast to (..., query heads, queries, keys); None for none.
        is_causal: Whether query i sees the keys 0...i only.
        scale: What the products are multiplied by.
        lies: How batch and heads lie on the devices, where that is known.
    """

    def blocks(q: Any, k: Any, v: Any, *mask: Any) -> tuple[Any, Any]:
        grouped = HeadGroups(q, k)
        scores = Scores(grouped.mask(*mask), is_causal, scale)
        with jax.named_scope("blockwise_attention"):
            output, log_sum = attention_blocks.blocks_forward(
                grouped.query(q), grouped.key(k), grouped.key(v), scores
            )
        return grouped.flat(output, 3), grouped.flat(log_sum, 2)

    def splash(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        assert lies is not None
        return attention_splash.Kernel(is_causal, scale, lies).forward(q, k, v)

    def cudnn(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        output = _cudnn(q, k, v, is_causal, scale)
        return output, jnp.zeros(q.shape[:-1], jnp.float32)

    kernels = _fitting(q, k, v, mask, is_causal, lies, splash, cudnn)
    return _by_platform((q, k, v), mask, blocks, kernels)


def lean_backward(
    grad: Any,
    q: Any,
    k: Any,
    v: Any,
    mask: Any,
    output: Any,
    log_sum: Any,
    is_causal: bool,
    scale: float,
    lies: NamedSharding | None = None,
) -> tuple[Any, Any, Any]:
    """Return the gradients of `q`, `k` and `v`.

    Args:
        grad: The gradient of the output.
        q: As in :func:`lean_forward`.
        k: As in :func:`lean_forward`.
        v: As in :func:`lean_forward`.
        mask: As in :func:`lean_forward`.
        output: What :func:`lean_forward` returned.
        log_sum: What :func:`lean_forward` returned.
        is_causal: As in :func:`lean_forward`.
        scale: As in :func:`lean_forward`.
        lies: As in :func:`lean_forward`.
    """

    def blocks(grad: Any, q: Any, k: Any, v: Any, output: Any, log_sum: Any, *mask: Any) -> Any:
        grouped = HeadGroups(q, k)
        scores = Scores(grouped.mask(*mask), is_causal, scale)
        with jax.named_scope("blockwise_attention_backward"):
            grads = attention_blocks.blocks_backward(
                grouped.query(grad),
                grouped.query(q),
                grouped.key(k),
                grouped.key(v),
                grouped.query(output),
                grouped.query(log_sum, 2),
                scores,
            )
        return tuple(g.reshape(t.shape) for g, t in zip(grads, (q, k, v), strict=True))

    def splash(grad: Any, q: Any, k: Any, v: Any, output: Any, log_sum: Any) -> Any:
        assert lies is not None
        kernel = attention_splash.Kernel(is_causal, scale, lies)
        return kernel.backward(grad, q, k, v, output, log_sum)

    def cudnn(grad: Any, q: Any, k: Any, v: Any, *_: Any) -> Any:
        # JAX gives no way to hand cuDNN's backward what its forward saved: it runs once more.
        return jax.vjp(lambda q, k, v: _cudnn(q, k, v, is_causal, scale), q, k, v)[1](grad)

    arguments = (grad.astype(output.dtype), q, k, v, output, log_sum)
    kernels = _fitting(q, k, v, mask, is_causal, lies, splash, cudnn)
    return _by_platform(arguments, mask, blocks, kernels)


def _fitting(
    q: Any, k: Any, v: Any, mask: Any, is_causal: bool, lies: Any, splash: Any, cudnn: Any
) -> dict[str, Any]:
    kernels = {}
    if lies is not None and attention_splash.fits(q, k, v, mask):
        kernels["tpu"] = splash
    if mask is None and _fits_cudnn(q, k, v, is_causal):
        kernels["cuda"] = cudnn
    return kernels


def _by_platform(arguments: Any, mask: Any, blocks: Any, kernels: dict[str, Any]) -> Any:
    if not kernels:
        return blocks(*arguments, *(() if mask is None else (mask,)))
    return lax.platform_dependent(*arguments, default=blocks, **kernels)


# ---------------------------------------------------------------------- cuDNN


def _fits_cudnn(q: Any, k: Any, v: Any, is_causal: bool) -> bool:
    """Tell whether cuDNN computes it; tracing its call takes a GPU."""
    widest = max(q.shape[-1], v.shape[-1])
    return (
        q.ndim == k.ndim == v.ndim == 4
        and q.dtype in (jnp.bfloat16, jnp.float16)
        and q.dtype == k.dtype == v.dtype
        and q.shape[-1] == v.shape[-1]
        and q.shape[-1] % 8 == 0
        and widest <= _WIDEST_CUDNN_HEAD
        # Where lengths differ, torch counts rows from the first key.
        and (not is_causal or q.shape[-2] == k.shape[-2])
        and jax_devices.platform() == "gpu"
    )


def _cudnn(q: Any, k: Any, v: Any, is_causal: bool, scale: float) -> Any:
    turned = (jnp.swapaxes(t, 1, 2) for t in (q, k, v))
    with jax.named_scope("cudnn_attention"):
        output: Any = jax.nn.dot_product_attention(
            *turned, scale=scale, is_causal=is_causal, implementation="cudnn"
        )
    return jnp.swapaxes(output, 1, 2)


# ---------------------------------------------------------------------- the ops


def _scale(q: Any, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def _lies(name: str) -> NamedSharding | None:
    if not name:
        return None
    layout = layout_names.value(name)
    root = get_runtime().root(layout.mesh)
    return named_sharding(layout.op_sharding(root), root, layout.ndim)


@lower(torch.ops.xla_dtensor.sdpa_lean.default)
def _sdpa_lean(
    q: Any, k: Any, v: Any, mask: Any, is_causal: bool, scale: float | None, lies: str
) -> Any:
    return lean_forward(q, k, v, mask, is_causal, _scale(q, scale), _lies(lies))


@lower(torch.ops.xla_dtensor.sdpa_lean_backward.default)
def _sdpa_lean_backward(
    grad: Any,
    q: Any,
    k: Any,
    v: Any,
    mask: Any,
    output: Any,
    log_sum: Any,
    is_causal: bool,
    scale: float | None,
    lies: str,
) -> Any:
    scale = _scale(q, scale)
    return lean_backward(grad, q, k, v, mask, output, log_sum, is_causal, scale, _lies(lies))
