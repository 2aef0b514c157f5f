"""Batches with too few rows: how many there are, padding, and the mask that tells them apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from xla_dtensor.core.errors import DataError
from xla_dtensor.hosts.data.nested import Path, Said, map_batch, tensors_of

__all__ = ["padded_batch", "rows_of", "with_mask"]


def rows_of(batch: Any) -> int:
    """Return the rows of a batch: the first dim of its first tensor that has one.

    Raises:
        DataError: It has no such tensor.
    """
    for _, tensor in tensors_of(batch):
        if tensor.ndim:
            return int(tensor.shape[0])
    raise DataError(
        f"A loader gave a batch of type={type(batch).__name__} without a tensor that has rows. "
        "There is nothing to shard. Let it give tensors, alone or in dicts, lists or tuples."
    )


def padded_batch(batch: Any, rows: int, target: int, pad_value: Said) -> Any:
    """Return a batch of `target` rows of which the first `rows` are those of `batch`.

    Args:
        batch: A host batch; of tensors whose first dim is not its number of rows nothing is padded.
        rows: How many of its rows are real.
        target: How many rows there are to be.
        pad_value: What fills the others.
    """
    found = rows_of(batch)

    def pad(path: Path, tensor: torch.Tensor, value: Any) -> torch.Tensor:
        if tensor.ndim == 0 or tensor.shape[0] != found:
            return tensor
        result = tensor.new_full((target, *tensor.shape[1:]), value)
        result[:rows] = tensor[:rows]
        return result

    return map_batch(pad, batch, pad_value)


def with_mask(batch: Any, mask: Any, name: str) -> Any:
    """Return a batch with a mask: under a name in a dict, else behind its last entry.

    Raises:
        DataError: The batch has such a name already, or is a named tuple.
    """
    if isinstance(batch, Mapping):
        if name in batch:
            raise DataError(
                f"ShardedLoader was called with mask={name!r}, and the loader's batches have that "
                "key. One of them would be lost. Pass another name."
            )
        return {**batch, name: mask}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        raise DataError(
            f"ShardedLoader was called with mask={name!r} for batches of type "
            f"{type(batch).__name__}. A named tuple has no place for another entry. Let the loader "
            "give dicts, or plain tuples."
        )
    if isinstance(batch, (list, tuple)):
        return type(batch)([*batch, mask])
    return batch, mask
