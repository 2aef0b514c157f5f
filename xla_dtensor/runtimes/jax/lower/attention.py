"""Scaled dot product attention on (..., heads, length, head_dim), kept in that shape throughout.

Scores are computed in float32 for half-precision inputs. The backward is JAX's derivative of the
forward, so that it keeps the same dims apart. Long sequences take the kernels of
the lean ones instead, which never hold all scores.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from xla_dtensor.runtimes.functional import layout_names
from xla_dtensor.runtimes.jax.arrays import values
from xla_dtensor.runtimes.jax.arrays.sharding import named_sharding
from xla_dtensor.runtimes.jax.arrays.values import counted_scan
from xla_dtensor.runtimes.jax.lower.matmul import precision
from xla_dtensor.runtimes.jax.lower.table import lower
from xla_dtensor.runtimes.registry import get_runtime
from xla_dtensor.runtimes.whole_ops import is_lean

__all__ = ["Kernel", "fits"]


# ------------------------------------------------------------------- Attention over blocks of keys
#
# The scores of one block at a time, never length x length.
#
# The softmax is carried along: the maximum so far, the sum of exponentials so far, and the output
# so far, which shrinks when a later block has a larger maximum. The backward computes each block's
# scores again from the saved logarithm of the sum::
#
#     forward     m' = max(m, s),  l' = l e^(m-m') + sum e^(s-m'),  o' = o e^(m-m') + e^(s-m') v
#     saved       o / l,  m + log l
#     backward    p = e^(s - saved),  dv = p^T do,  ds = p (do v^T - sum(do o)),
#                 dq += ds k,  dk = ds^T q
#
# Batch and head dims are never merged or reshaped, so that they stay sharded. A row that may see no
# key is 0, as in torch, not NaN.
#
# Reference:
#     Rabe and Staats, "Self-attention Does Not Need O(n^2) Memory", arXiv:2112.05682; Dao et al.,
#     "FlashAttention", arXiv:2205.14135.

BLOCK = 512


class Scores(NamedTuple):
    """What the scores are made of besides queries and keys.

    Args:
        mask: Boolean or added, broadcast to (..., queries, keys); None for none.
        is_causal: Whether query i sees the keys 0...i only.
        scale: What the products are multiplied by.
    """

    mask: Any
    is_causal: bool
    scale: float

    def of(self, q: Any, k: Any, first_key: Any, n_keys: int) -> Any:
        """Return masked scores of all queries and some keys, float32 or wider.

        Args:
            q: (..., queries, dim).
            k: (..., block, dim).
            first_key: Index of the first key of the block.
            n_keys: Number of all keys; what lies beyond is padding.
        """
        wide = jnp.promote_types(q.dtype, jnp.float32)
        products = jnp.einsum(
            "...qd,...kd->...qk", q, k, precision=precision(), preferred_element_type=wide
        )
        scores = products * jnp.asarray(self.scale, wide)
        columns = first_key + lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1)
        visible = columns < n_keys
        if self.is_causal:
            rows = lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 2)
            visible = visible & (columns <= rows)
        mask = self._block_of_mask(first_key, k.shape[-2])
        if mask is not None and mask.dtype == jnp.bool_:
            visible = visible & mask
        elif mask is not None:
            scores = scores + mask
        return jnp.where(visible, scores, -jnp.inf)

    def _block_of_mask(self, first_key: Any, size: int) -> Any:
        mask = self.mask
        if mask is None or mask.shape[-1] == 1:
            return mask
        missing = -mask.shape[-1] % size
        mask = jnp.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, missing)])
        return lax.dynamic_slice_in_dim(mask, first_key, size, axis=-1)


def _padded(tensor: Any, block: int) -> Any:
    missing = -tensor.shape[-2] % block
    if not missing:
        return tensor
    return jnp.pad(tensor, [(0, 0)] * (tensor.ndim - 2) + [(0, missing), (0, 0)])


def _block(tensor: Any, first: Any, block: int) -> Any:
    return lax.dynamic_slice_in_dim(tensor, first, block, axis=-2)


def blocks_forward(q: Any, k: Any, v: Any, scores: Scores, block: int = BLOCK) -> tuple[Any, Any]:
    """Return the output (..., queries, value dim), and the logarithm of the sums (..., queries).

    Args:
        q: (..., queries, dim).
        k: (..., keys, dim); the dims before are broadcast to those of `q`.
        v: (..., keys, value dim).
        scores: Mask and scale.
        block: Number of keys of which scores are held at a time.
    """
    n_keys = k.shape[-2]
    block = min(block, n_keys)
    wide = jnp.promote_types(q.dtype, jnp.float32)
    batch = jnp.broadcast_shapes(q.shape[:-2], k.shape[:-2])
    rows = (*batch, q.shape[-2])
    padded_k, padded_v = _padded(k, block), _padded(v, block)

    def body(state: Any, index: Any) -> Any:
        output, largest, total = state
        first = index * block
        s = scores.of(q, _block(padded_k, first, block), first, n_keys)
        maximum = jnp.maximum(largest, s.max(-1))
        # -inf - -inf is no number; where nothing was seen so far every weight is 0 anyway.
        base = jnp.where(jnp.isneginf(maximum), 0, maximum)
        weights, shrink = jnp.exp(s - base[..., None]), jnp.exp(largest - base)
        added = jnp.einsum(
            "...qk,...kd->...qd",
            weights.astype(v.dtype),
            _block(padded_v, first, block),
            precision=precision(),
            preferred_element_type=wide,
        )
        state = output * shrink[..., None] + added, maximum, total * shrink + weights.sum(-1)
        return state, None

    start = (
        jnp.zeros((*rows, v.shape[-1]), wide),
        jnp.full(rows, -jnp.inf, wide),
        jnp.zeros(rows, wide),
    )
    blocks = jnp.arange(padded_k.shape[-2] // block, dtype=jnp.int32)
    (output, largest, total), _ = counted_scan(body, start, blocks)
    is_visible = total > 0
    total = jnp.where(is_visible, total, 1)
    output = (output / total[..., None]).astype(v.dtype)
    return output, jnp.where(is_visible, largest + jnp.log(total), 0)


def blocks_backward(
    grad: Any,
    q: Any,
    k: Any,
    v: Any,
    output: Any,
    log_sum: Any,
    scores: Scores,
    block: int = BLOCK,
) -> tuple[Any, Any, Any]:
    """Return the gradients of `q`, `k` and `v`.

    Args:
        grad: The gradient of the output.
        q: As in :func:`forward`.
        k: As in :func:`forward`.
        v: As in :func:`forward`.
        output: What :func:`forward` returned.
        log_sum: What :func:`forward` returned.
        scores: Mask and scale.
        block: Number of keys at a time.
    """
    n_keys = k.shape[-2]
    block = min(block, n_keys)
    wide = log_sum.dtype
    padded_k, padded_v = _padded(k, block), _padded(v, block)
    along = (grad.astype(wide) * output.astype(wide)).sum(-1)

    def product(equation: str, a: Any, b: Any) -> Any:
        return jnp.einsum(equation, a, b, precision=precision(), preferred_element_type=wide)

    def body(grad_q: Any, index: Any) -> Any:
        first = index * block
        k_block, v_block = _block(padded_k, first, block), _block(padded_v, first, block)
        weights = jnp.exp(scores.of(q, k_block, first, n_keys) - log_sum[..., None])
        of_v = product("...qk,...qd->...kd", weights.astype(grad.dtype), grad)
        of_weights = product("...qd,...kd->...qk", grad, v_block)
        of_scores = weights * (of_weights - along[..., None]) * jnp.asarray(scores.scale, wide)
        of_scores = of_scores.astype(q.dtype)
        grad_q = grad_q + product("...qk,...kd->...qd", of_scores, k_block)
        of_k = product("...qk,...qd->...kd", of_scores, q)
        return grad_q, (_summed(of_k, k).astype(k.dtype), _summed(of_v, v).astype(v.dtype))

    start = jnp.zeros((*log_sum.shape, q.shape[-1]), wide)
    blocks = jnp.arange(padded_k.shape[-2] // block, dtype=jnp.int32)
    grad_q, (grads_k, grads_v) = counted_scan(body, start, blocks)
    grad_k, grad_v = _concatenate_blocks(grads_k, n_keys), _concatenate_blocks(grads_v, n_keys)
    return _summed(grad_q, q).astype(q.dtype), grad_k, grad_v


def _summed(gradient: Any, like: Any) -> Any:
    """Sum over the batch dims along which `like` was broadcast."""
    extra = gradient.ndim - like.ndim
    wide = [
        i
        for i, n in enumerate(gradient.shape[:-2])
        if i < extra or (like.shape[i - extra] == 1 and n != 1)
    ]
    if not wide:
        return gradient
    return gradient.sum(wide, keepdims=True).reshape(*like.shape[:-2], *gradient.shape[-2:])


def _concatenate_blocks(blocks: Any, n_keys: int) -> Any:
    """Return (blocks, ..., block, dim) as (..., keys, dim)."""
    ordered = jnp.moveaxis(blocks, 0, -3)
    joined = ordered.reshape(*ordered.shape[:-3], -1, ordered.shape[-1])
    return lax.slice_in_dim(joined, 0, n_keys, axis=joined.ndim - 2)


# --------------------------------------------------------------------------------- Attention splash
#
# Attention on TPUs by the Pallas splash kernel that ships with JAX, on each device's own heads.
#
# XLA cannot cut a Pallas kernel, and libtpu takes no partitioning rule for one either. So the
# kernel runs in a manual region: batch rows and heads lie as the labels of q, k and v agree that
# they do, each device computes its own, and there is nothing to communicate::
#
#     q [dp, tp, -, -]   k [dp, tp, -, -]   v [dp, tp, -, -]   ->   output [dp, tp, -, -]
#
# The kernel holds scores of 512 x 512 at a time, leaves out what a causal mask hides, and keeps the
# logarithm of the sums for its backward, like the blocks above.

_LANES = 128
_BLOCKS = (512, 256, 128)
# A TPU's vector memory holds a block of each operand; the kernel was tried up to this width.
_WIDEST_HEAD = 256


def _block_size(length: int) -> int | None:
    return next((block for block in _BLOCKS if length % block == 0), None)


def fits(q: Any, k: Any, v: Any, mask: Any) -> bool:
    """Tell whether the kernel computes this attention.

    Args:
        q: (batch, query heads, queries, dim).
        k: (batch, key heads, keys, dim).
        v: (batch, key heads, keys, value dim).
        mask: A mask beside the causal one; the kernel takes none.
    """
    if mask is not None or not q.ndim == k.ndim == v.ndim == 4:
        return False
    if q.dtype not in (jnp.bfloat16, jnp.float32) or not q.dtype == k.dtype == v.dtype:
        return False
    dims = {q.shape[-1], v.shape[-1]}
    return (
        None not in (_block_size(q.shape[-2]), _block_size(k.shape[-2]))
        and all(dim % _LANES == 0 and dim <= _WIDEST_HEAD for dim in dims)
        and q.shape[1] % k.shape[1] == 0
        and q.shape[0] == k.shape[0]
    )


class Kernel(NamedTuple):
    """One attention's static facts.

    Args:
        is_causal: Whether query i sees the keys 0...i only.
        scale: What the products are multiplied by.
        sharding: How the first two dims of q, k and v lie; it divides them evenly.
        interpret: Run by JAX instead of Mosaic: on any device, slowly.
    """

    is_causal: bool
    scale: float
    sharding: NamedSharding
    interpret: bool = False

    def forward(self, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        """Return the output and the logarithm of the sums (batch, heads, queries), float32."""
        splash = _splash(self.is_causal, q.shape[2], k.shape[2], self.interpret)

        def one_sequence(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
            output, (log_sum,) = splash(q, k, v)
            return output, log_sum

        def tiles(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
            with jax.named_scope("splash_attention"), _narrow_indices():
                return jax.vmap(one_sequence)(self._scaled(q), k, v)

        return self._by_device(tiles, (4, 4, 4), (4, 3))(q, k, v)

    def backward(
        self, grad: Any, q: Any, k: Any, v: Any, output: Any, log_sum: Any
    ) -> tuple[Any, Any, Any]:
        """Return the gradients of `q`, `k` and `v`."""
        from jax.experimental.pallas.ops.tpu.splash_attention import (
            splash_attention_kernel as kernels,
        )

        splash = _splash(self.is_causal, q.shape[2], k.shape[2], self.interpret)
        options = {**splash.kwargs, "save_residuals": False}

        def one_sequence(grad: Any, q: Any, k: Any, v: Any, output: Any, log_sum: Any) -> Any:
            tables = splash.dq_mask_info, splash.dkv_mask_info
            saved = (q, k, v, None, None, output, log_sum, *tables)
            return kernels._splash_attention_bwd(res=saved, do=grad, **options)[3:6]

        def tiles(grad: Any, q: Any, k: Any, v: Any, output: Any, log_sum: Any) -> Any:
            with jax.named_scope("splash_attention_backward"), _narrow_indices():
                grads = jax.vmap(one_sequence)(grad, self._scaled(q), k, v, output, log_sum)
            return (self._scaled(grads[0]), *grads[1:])

        call = self._by_device(tiles, (4, 4, 4, 4, 4, 3), (4, 4, 4))
        return call(grad, q, k, v, output, log_sum)

    def _scaled(self, q: Any) -> Any:
        return q * jnp.asarray(self.scale, q.dtype)

    def _by_device(self, tiles: Any, in_ranks: tuple[int, ...], out_ranks: tuple[int, ...]) -> Any:
        """Return `tiles` on each device, for arguments and results of so many dims."""

        def specs(ranks: tuple[int, ...]) -> tuple[PartitionSpec, ...]:
            heads = (*self.sharding.spec, None, None)[:2]
            return tuple(PartitionSpec(*heads, *(None,) * (rank - 2)) for rank in ranks)

        return jax.shard_map(
            tiles,
            mesh=self.sharding.mesh,
            in_specs=specs(in_ranks),
            out_specs=specs(out_ranks),
            check_vma=False,  # Pallas calls say nothing of the axes over which results vary.
        )


@functools.lru_cache(maxsize=64)
def _splash(is_causal: bool, queries: int, keys: int, interpret: bool) -> Any:
    """Return JAX's kernel, with the tables of blocks that are seen as host arrays."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    a, b = _block_size(queries), _block_size(keys)
    assert a is not None
    assert b is not None
    sizes = kernels.BlockSizes(
        block_q=a,
        block_kv=b,
        block_kv_compute=b,
        block_q_dkv=a,
        block_kv_dkv=b,
        block_kv_dkv_compute=b,
        block_q_dq=a,
        block_kv_dq=b,
    )
    # The mask is the same for each head: its tables have one row, whatever the heads are.
    kind = masks.CausalMask if is_causal else masks.FullMask
    with jax.ensure_compile_time_eval(), _narrow_indices():
        kernel = kernels.make_splash_mha(
            masks.MultiHeadMask([kind((queries, keys))]),
            block_sizes=sizes,
            save_residuals=True,
            head_shards=1,
            q_seq_shards=1,
            interpret=interpret,
        )
    return jax.tree.map(np.asarray, kernel)


def _narrow_indices() -> Any:
    """Steps are traced with 64-bit integers on; the kernel's index arithmetic is 32-bit."""
    return jax.enable_x64(False)


# ------------------------------------------------------------- Several query heads to one key head
#
# The group is a dim of its own, keys are not repeated.
#
# q [b, (g r), q, d]  ->  [b, g, r, q, d]        k [b, g, k, d]  ->  [b, g, 1, k, d]


class HeadGroups:
    """How query heads share key heads; where there are as many, everything stays as it is.

    Args:
        q: (..., query heads, queries, dim).
        k: (..., key heads, keys, dim).
    """

    def __init__(self, q: Any, k: Any) -> None:
        self._heads = None
        if q.ndim > 2 and k.ndim > 2 and q.shape[-3] != k.shape[-3]:
            self._heads = k.shape[-3], q.shape[-3] // k.shape[-3]

    def query(self, tensor: Any, num_after: int = 3) -> Any:
        """Split the heads of a tensor that has them `num_after` dims from its end."""
        if self._heads is None:
            return tensor
        head_dim = tensor.ndim - num_after
        return tensor.reshape(*tensor.shape[:head_dim], *self._heads, *tensor.shape[head_dim + 1 :])

    def key(self, tensor: Any) -> Any:
        """Give keys or values a dim of size 1 for the group."""
        return tensor if self._heads is None else tensor[..., None, :, :]

    def mask(self, mask: Any = None) -> Any:
        """Give a mask the same dims, if it has heads."""
        if mask is None or self._heads is None or mask.ndim < 3:
            return mask
        return mask[..., None, :, :] if mask.shape[-3] == 1 else self.query(mask)

    def flat(self, tensor: Any, num_after: int) -> Any:
        """Put the heads of a result together, `num_after` dims from its end."""
        if self._heads is None:
            return tensor
        head_dim = tensor.ndim - num_after - 1
        heads = self._heads[0] * self._heads[1]
        return tensor.reshape(*tensor.shape[:head_dim], heads, *tensor.shape[head_dim + 2 :])


# ----------------------------------- Attention that never holds the scores of all queries and keys
#
# A kernel per kind of device.
#
# ==========  =======================================================  =============================
# device      kernel                                                   taken where
# ==========  =======================================================  =============================
# TPU         Pallas splash attention                                  no mask, head dims of 128 n,
#                                                                      lengths of 128 n, and labels
#                                                                      that say where heads lie
# NVIDIA GPU  cuDNN's, by ``jax.nn.dot_product_attention``             half precision, no mask, head
#                                                                      dims of 8 n
# any         blocks of keys                                           everything else
# ==========  =======================================================  =============================
#
# The choice is made where the program is lowered, not where it is traced: a step that is compiled
# for a TPU by a machine without one has the TPU's kernel. Its name is in the program's
# ``op_name``s.

_WIDEST_CUDNN_HEAD = 128


def lean_forward(
    q: Any,
    k: Any,
    v: Any,
    mask: Any,
    is_causal: bool,
    scale: float,
    sharding: NamedSharding | None = None,
) -> tuple[Any, Any]:
    """Return the output, and the logarithm of the sums of each query's exponentials.

    Args:
        q: (..., query heads, queries, dim).
        k: (..., key heads, keys, dim); query heads are a multiple of key heads.
        v: (..., key heads, keys, value dim).
        mask: Boolean or added, broadcast to (..., query heads, queries, keys); None for none.
        is_causal: Whether query i sees the keys 0...i only.
        scale: What the products are multiplied by.
        sharding: How batch and heads lie on the devices, where that is known.
    """

    def blocks(q: Any, k: Any, v: Any, *mask: Any) -> tuple[Any, Any]:
        grouped = HeadGroups(q, k)
        scores = Scores(grouped.mask(*mask), is_causal, scale)
        with jax.named_scope("blockwise_attention"):
            output, log_sum = blocks_forward(
                grouped.query(q), grouped.key(k), grouped.key(v), scores
            )
        return grouped.flat(output, 3), grouped.flat(log_sum, 2)

    def splash(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        assert sharding is not None
        return Kernel(is_causal, scale, sharding).forward(q, k, v)

    def cudnn(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        output = _cudnn(q, k, v, is_causal, scale)
        return output, jnp.zeros(q.shape[:-1], jnp.float32)

    kernels = _kernels_that_fit(q, k, v, mask, is_causal, sharding, splash, cudnn)
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
    sharding: NamedSharding | None = None,
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
        sharding: As in :func:`lean_forward`.
    """

    def blocks(grad: Any, q: Any, k: Any, v: Any, output: Any, log_sum: Any, *mask: Any) -> Any:
        grouped = HeadGroups(q, k)
        scores = Scores(grouped.mask(*mask), is_causal, scale)
        with jax.named_scope("blockwise_attention_backward"):
            grads = blocks_backward(
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
        assert sharding is not None
        kernel = Kernel(is_causal, scale, sharding)
        return kernel.backward(grad, q, k, v, output, log_sum)

    def cudnn(grad: Any, q: Any, k: Any, v: Any, *_: Any) -> Any:
        # JAX gives no way to hand cuDNN's backward what its forward saved: it runs once more.
        return jax.vjp(lambda q, k, v: _cudnn(q, k, v, is_causal, scale), q, k, v)[1](grad)

    arguments = (grad.astype(output.dtype), q, k, v, output, log_sum)
    kernels = _kernels_that_fit(q, k, v, mask, is_causal, sharding, splash, cudnn)
    return _by_platform(arguments, mask, blocks, kernels)


def _kernels_that_fit(
    q: Any, k: Any, v: Any, mask: Any, is_causal: bool, sharding: Any, splash: Any, cudnn: Any
) -> dict[str, Any]:
    kernels = {}
    if sharding is not None and fits(q, k, v, mask):
        kernels["tpu"] = splash
    if mask is None and fits_cudnn(q, k, v, is_causal):
        kernels["cuda"] = cudnn
    return kernels


def _by_platform(arguments: Any, mask: Any, blocks: Any, kernels: dict[str, Any]) -> Any:
    if not kernels:
        return blocks(*arguments, *(() if mask is None else (mask,)))
    return lax.platform_dependent(*arguments, default=blocks, **kernels)


# ---------------------------------------------------------------------- cuDNN


def fits_cudnn(q: Any, k: Any, v: Any, is_causal: bool) -> bool:
    """Tell whether cuDNN computes it, of arrays or of tensors; tracing its call takes a GPU."""
    return (
        values.platform() == "gpu"
        and len(q.shape) == len(k.shape) == len(v.shape) == 4
        and str(q.dtype).removeprefix("torch.") in ("bfloat16", "float16")
        and q.dtype == k.dtype == v.dtype
        and q.shape[-1] == v.shape[-1]
        and q.shape[-1] % 8 == 0
        and q.shape[-1] <= _WIDEST_CUDNN_HEAD
        # Where lengths differ, torch counts rows from the first key.
        and (not is_causal or q.shape[-2] == k.shape[-2])
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


def _sharding_of(name: str) -> NamedSharding | None:
    if not name:
        return None
    layout = layout_names.value(name)
    root = get_runtime().root(layout.mesh)
    return named_sharding(layout.op_sharding(root), root, layout.ndim)


@lower(torch.ops.xla_dtensor.sdpa_lean.default)
def _sdpa_lean(
    q: Any, k: Any, v: Any, mask: Any, is_causal: bool, scale: float | None, layout: str
) -> Any:
    return lean_forward(q, k, v, mask, is_causal, _scale(q, scale), _sharding_of(layout))


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
    layout: str,
) -> Any:
    scale = _scale(q, scale)
    return lean_backward(
        grad, q, k, v, mask, output, log_sum, is_causal, scale, _sharding_of(layout)
    )


# ---------------------------------------------------------------------------------------- Attention

aten = torch.ops.aten


def attention(
    q: Any, k: Any, v: Any, mask: Any, is_causal: bool, scale: float | None, gqa: bool
) -> Any:
    """Return softmax(q k^T * scale + mask) v."""
    if gqa and q.shape[-3] != k.shape[-3]:
        groups = HeadGroups(q, k)
        tensors = groups.query(q), groups.key(k), groups.key(v), groups.mask(mask)
        return groups.flat(attention(*tensors, is_causal, scale, False), 3)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    wide = jnp.promote_types(q.dtype, jnp.float32)
    scores = jnp.einsum(
        "...qd,...kd->...qk", q, k, precision=precision(), preferred_element_type=wide
    )
    weights = _softmax(_masked(scores * jnp.asarray(scale, wide), mask, is_causal), mask)
    return jnp.einsum("...qk,...kd->...qd", weights.astype(v.dtype), v, precision=precision())


def _softmax(scores: Any, mask: Any) -> Any:
    """Return weights; those of a row that may see nothing are 0, as in torch, not 0 / 0."""
    if mask is None:
        return jax.nn.softmax(scores, axis=-1)
    is_blind = jnp.isneginf(scores).all(-1, keepdims=True)
    # The scores too: a gradient that is multiplied by 0 is no number if the softmax is none.
    weights = jax.nn.softmax(jnp.where(is_blind, 0, scores), axis=-1)
    return jnp.where(is_blind, 0, weights)


def _masked(scores: Any, mask: Any, is_causal: bool) -> Any:
    if is_causal:
        rows = jax.lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 2)
        columns = jax.lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1)
        scores = jnp.where(columns <= rows, scores, -jnp.inf)
    if mask is None:
        return scores
    return jnp.where(mask, scores, -jnp.inf) if mask.dtype == jnp.bool_ else scores + mask


@lower(aten.scaled_dot_product_attention.default)
def _sdpa(
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
    if dropout_p:
        raise NotImplementedError("attention with dropout is written out above this lowering")
    same = enable_gqa or query.shape[:-2] == key.shape[:-2]
    if same and is_lean(query, key, value, attn_mask, is_causal):
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        return lean_forward(query, key, value, attn_mask, is_causal, factor)[0]
    return attention(query, key, value, attn_mask, is_causal, scale, enable_gqa)


@lower(torch.ops.xla_dtensor.sdpa_backward.default)
def _sdpa_backward(
    grad: Any, q: Any, k: Any, v: Any, mask: Any, is_causal: bool, scale: Any, gqa: bool
) -> Any:
    _, pull = jax.vjp(lambda q, k, v: attention(q, k, v, mask, is_causal, scale, gqa), q, k, v)
    return pull(grad.astype(q.dtype))
