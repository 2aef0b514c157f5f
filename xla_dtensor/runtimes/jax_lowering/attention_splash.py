"""Attention on TPUs by the Pallas splash kernel that ships with JAX, on each device's own heads.

XLA cannot cut a Pallas kernel, and libtpu takes no partitioning rule for one either. So the kernel
runs in a manual region: batch rows and heads lie as the labels of q, k and v agree that they do,
each device computes its own, and there is nothing to communicate::

    q [dp, tp, -, -]   k [dp, tp, -, -]   v [dp, tp, -, -]   ->   output [dp, tp, -, -]

The kernel holds scores of 512 x 512 at a time, leaves out what a causal mask hides, and keeps the
logarithm of the sums for its backward, like ``attention_blocks``.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

__all__ = ["Kernel", "fits"]

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
        lies: How the first two dims of q, k and v lie; it divides them evenly.
        interpret: Run by JAX instead of Mosaic: on any device, slowly.
    """

    is_causal: bool
    scale: float
    lies: NamedSharding
    interpret: bool = False

    def forward(self, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        """Return the output and the logarithm of the sums (batch, heads, queries), float32."""
        splash = _splash(self.is_causal, q.shape[2], k.shape[2], self.interpret)

        def one(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
            output, (log_sum,) = splash(q, k, v)
            return output, log_sum

        def tiles(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
            with jax.named_scope("splash_attention"), _narrow_indices():
                return jax.vmap(one)(self._scaled(q), k, v)

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

        def one(grad: Any, q: Any, k: Any, v: Any, output: Any, log_sum: Any) -> Any:
            tables = splash.dq_mask_info, splash.dkv_mask_info
            saved = (q, k, v, None, None, output, log_sum, *tables)
            return kernels._splash_attention_bwd(res=saved, do=grad, **options)[3:6]

        def tiles(grad: Any, q: Any, k: Any, v: Any, output: Any, log_sum: Any) -> Any:
            with jax.named_scope("splash_attention_backward"), _narrow_indices():
                found = jax.vmap(one)(grad, self._scaled(q), k, v, output, log_sum)
            return (self._scaled(found[0]), *found[1:])

        call = self._by_device(tiles, (4, 4, 4, 4, 4, 3), (4, 4, 4))
        return call(grad, q, k, v, output, log_sum)

    def _scaled(self, q: Any) -> Any:
        return q * jnp.asarray(self.scale, q.dtype)

    def _by_device(self, tiles: Any, given: tuple[int, ...], made: tuple[int, ...]) -> Any:
        """Return `tiles` on each device, for arguments and results of so many dims."""

        def specs(ranks: tuple[int, ...]) -> tuple[PartitionSpec, ...]:
            heads = (*self.lies.spec, None, None)[:2]
            return tuple(PartitionSpec(*heads, *(None,) * (rank - 2)) for rank in ranks)

        return jax.shard_map(
            tiles,
            mesh=self.lies.mesh,
            in_specs=specs(given),
            out_specs=specs(made),
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
        made = kernels.make_splash_mha(
            masks.MultiHeadMask([kind((queries, keys))]),
            block_sizes=sizes,
            save_residuals=True,
            head_shards=1,
            q_seq_shards=1,
            interpret=interpret,
        )
    return jax.tree.map(np.asarray, made)


def _narrow_indices() -> Any:
    """Steps are traced with 64-bit integers on; the kernel's index arithmetic is 32-bit."""
    return jax.enable_x64(False)
