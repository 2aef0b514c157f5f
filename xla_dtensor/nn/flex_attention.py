"""FlexAttention on a mesh: attention with functions that change scores and mask them.

    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def causal(b, h, q_idx, kv_idx): return q_idx >= kv_idx
    def alibi(score, b, h, q_idx, kv_idx): return score + slopes[h] * (kv_idx - q_idx)

    mask = create_block_mask(causal, None, None, 1024, 1024, device="cpu")
    out = flex_attention(q, k, v, score_mod=alibi, block_mask=mask)      q, k, v: DTensors

torch's kernel is Triton's, for CUDA. Here ``install()`` puts :func:`flex_attention` in its place,
for tensors on a mesh: the functions are mapped (``torch.vmap``) over all places of the scores,
which lie as queries and keys do, rows and heads cut::

    mask only           scaled_dot_product_attention with a mask of bools
    score_mod, or sums  scores = q @ k.T * scale; score_mod; mask; softmax; @ v

What is made of indices alone is a part of the program, so a mask costs no memory before XLA asks
for it; scores are held whole, as by torch's own form without ``torch.compile``. No block is
skipped.

Invariants:

* Rows that see no key are 0, their sums -inf.
* Scores are in float32 at least, and the result in the dtype of the queries.
* A block that a BlockMask does not list is not seen, whatever its ``mask_mod`` says; one that it
  lists as full is seen whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.attention.flex_attention as torchs
import torch.nn.functional as F

from xla_dtensor.core.errors import ArgumentTypeError

__all__ = ["flex_attention"]


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., torch.Tensor] | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    """Compute attention of tensors on a mesh, as torch's function of this name does.

    Args:
        query: (batch, query heads, queries, size).
        key: (batch or 1, heads, keys, size).
        value: (batch or 1, heads, keys, value size).
        score_mod: Is given a score and its place (batch, head, query, key), each a tensor of shape
            (), and returns another score. It may read other tensors, with gradients.
        block_mask: Which keys a query sees; None for all.
        scale: What scores are multiplied by; None for ``size ** -0.5``.
        enable_gqa: Whether several query heads may share a head.
        return_lse: Whether to return the logarithms of the softmax's sums, too.
        kernel_options: Of torch's kernel; they change nothing here.
        return_aux: torch's ``AuxRequest``: which sums to return.

    Returns:
        (batch, query heads, queries, value size); with the sums, as torch's function says.

    Raises:
        ArgumentTypeError: Shapes or heads that do not fit.

    Example:
        >>> import torch, xla_dtensor as xd
        >>> from torch.distributed.tensor import Shard
        >>> mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
        >>> x = xd.distribute_tensor(torch.ones(2, 4, 8, 16), mesh, [Shard(0), Shard(1)])
        >>> flex_attention(x, x, x, lambda score, b, h, q, kv: score - (q - kv).abs()).placements
        (Shard(dim=0), Shard(dim=1))
    """
    _check(query, key, value, enable_gqa)
    batch = query.shape[0]
    key, value = (x.expand(batch, -1, -1, -1) for x in (key, value))
    places = [_places(query, n) for n in (*query.shape[:3], key.shape[2])]
    mask = None if block_mask is None else _mask(block_mask, places)
    asked = (
        return_lse or getattr(return_aux, "lse", False),
        getattr(return_aux, "max_scores", False),
    )
    if score_mod is None and not any(asked):
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scale, enable_gqa=enable_gqa
        )
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (key, value))
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    scores = query.to(dtype) @ key.to(dtype).mT
    scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
    if score_mod is not None:
        scores = _mapped(score_mod, scores, *places)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    weights = torch._safe_softmax(scores, -1)  # pyright: ignore[reportPrivateImportUsage]
    out = weights.to(query.dtype) @ value.to(query.dtype)
    sums = scores.logsumexp(-1) if asked[0] else None
    if return_aux is None:
        return (out, sums) if return_lse else out
    return out, torchs.AuxOutput(lse=sums, max_scores=scores.amax(-1) if asked[1] else None)


def _check(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool) -> None:
    shapes = [tuple(x.shape) for x in (query, key, value)]
    told = f"flex_attention was called with tensors of shapes {shapes}. "
    if any(x.ndim != 4 for x in (query, key, value)):
        raise ArgumentTypeError(f"{told}It takes (batch, heads, length, size) each.")
    heads, groups = query.shape[1], key.shape[1]
    if heads != groups and not (enable_gqa and groups and heads % groups == 0):
        raise ArgumentTypeError(
            f"{told}There are {heads} heads of queries and {groups} of keys. Pass enable_gqa=True, "
            "with a whole number of heads of queries for each of keys."
        )
    if key.shape[0] not in (1, query.shape[0]) or value.shape[:3] != key.shape[:3]:
        raise ArgumentTypeError(
            f"{told}Keys and values have one batch, heads and length; their batch is that of the "
            "queries, or 1."
        )


def _places(like: torch.Tensor, count: int) -> torch.Tensor:
    """Return 0, 1, ... as a tensor of the mesh: a part of the program, where a host's is given."""
    return like.new_ones(count, dtype=torch.int64).cumsum(0) - 1


def _mapped(function: Callable[..., Any], *scores_and_places: torch.Tensor) -> torch.Tensor:
    """Call a function of scalars for each of all places."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    *scores, _, _, _, _ = scores_and_places
    for dim in (3, 2, 1, 0):
        at = [0 if place == dim else None for place in range(4)]
        function = torch.vmap(function, in_dims=(*(0 for _ in scores), *at))
    with TransformGetItemToIndex():  # so that a tensor of shape () is an index
        return function(*scores_and_places)


def _mask(block_mask: Any, places: list[torch.Tensor]) -> torch.Tensor:
    """Return which keys each query sees, a tensor of bools."""
    mask_mod = block_mask.mask_mod
    mask = _mapped(mask_mod, *places)
    if max(block_mask.BLOCK_SIZE) >= torchs._LARGE_SPARSE_BLOCK_SIZE:
        return mask
    height, width = block_mask.BLOCK_SIZE
    columns = -(-len(places[3]) // width)
    block = (places[2] // height).unsqueeze(1), places[3] // width
    some = _listed(block_mask.kv_num_blocks, block_mask.kv_indices, columns)
    mask = mask & some[:, :, *block]
    if block_mask.full_kv_num_blocks is None:
        return mask
    full = _listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, columns)
    return mask | full[:, :, *block]


def _listed(counts: torch.Tensor, indices: torch.Tensor, columns: int) -> torch.Tensor:
    """Return which blocks are in a list: of each row of blocks the first `counts` columns."""
    is_listed = _places(indices, indices.shape[-1]) < counts.unsqueeze(-1)
    found = indices.new_zeros((*indices.shape[:-1], columns), dtype=torch.int64)
    return found.scatter_add(-1, indices.long(), is_listed.long()) > 0
