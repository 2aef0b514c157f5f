"""Shardings for torch_xla 2.9, both ways, and what else its programs need to know of a tensor.

torch_xla's constructor takes neither an iota nor subgroup types: a tiling is a nested list of
partition ids, copies are a list of groups. It reads nested lists of at most five levels and takes
deeper ones for zeros. A sixth tensor dim is reached otherwise: a small tensor is tiled over the
dims that are cut, reshaped, and asked how the partitioner laid out the result.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from xla_dtensor.core import OpSharding
from xla_dtensor.errors import DistributeError

__all__ = [
    "DEVICE",
    "execution_allowed",
    "input_sharding",
    "parse_annotation",
    "to_annotation",
    "xlac",
]

DEVICE = torch.device("xla:0")

_REPLICATED, _TILED, _PARTIAL = 0, 3, 5
_MAX_LISTED_RANK = 5


@lru_cache(1)
def xlac() -> Any:
    """Return torch_xla's own C++ module, which is imported on the first call."""
    return importlib.import_module("torch_xla")._XLAC


@lru_cache(4096)
def parse_annotation(text: str) -> OpSharding:
    """Read what torch_xla says of a tensor; the empty text of a tensor without a sharding too."""
    return OpSharding.parse(text).canonical() if text else OpSharding.replicated()


@lru_cache(4096)
def to_annotation(op_sharding: OpSharding) -> Any:
    """Write an OpSharding as torch_xla's own object.

    Args:
        op_sharding: Replicated, or tiled with or without copies.

    Returns:
        A ``torch_xla._XLAC.OpSharding``.

    Raises:
        DistributeError: torch_xla has no such sharding.
    """
    sharding = op_sharding.canonical()
    if sharding.kind == "replicated":
        return xlac().OpSharding([], [], [], _REPLICATED)
    if not sharding.is_tiled or set(sharding.subgroup_types) - {"replicated"}:
        raise DistributeError(
            f"The sharding {sharding} was asked for on torch_xla. It can only tile a tensor, with "
            "or without copies. Pass placements of Shard and Replicate."
        )
    if (sharding.tensor_ndim or 0) > _MAX_LISTED_RANK:
        return _reshaped_annotation(sharding)
    return _listed_annotation(sharding)


def input_sharding(tensor: torch.Tensor, sharding: OpSharding, minibatch: bool) -> Any:
    """Write an OpSharding as the XlaShardingSpec that torch_xla's data loaders use.

    Args:
        tensor: The host tensor that is to be sent.
        sharding: How it is to lie.
        minibatch: Whether each process passes its own part of the batch.

    Returns:
        A ``torch_xla._XLAC.XlaShardingSpec``.
    """
    sharding = sharding.canonical()
    lists = ([], [], [], _REPLICATED) if sharding.kind == "replicated" else _lists(sharding)
    return xlac().XlaShardingSpec(tensor, *lists, minibatch)


def _listed_annotation(sharding: OpSharding) -> Any:
    return xlac().OpSharding(*_lists(sharding))


def _lists(sharding: OpSharding) -> tuple[Any, Any, Any, int]:
    """torch_xla's tile assignment, group assignment, replication groups and type."""
    assignment = sharding.tile_assignment
    if not sharding.subgroup_types:
        return assignment.tolist(), [], [], _TILED
    tiles = assignment.shape[: sharding.tensor_ndim]
    groups = assignment.reshape(int(np.prod(tiles)), -1)
    numbered = np.arange(len(groups)).reshape(tiles)
    return [], numbered.tolist(), groups.tolist(), _PARTIAL


def _reshaped_annotation(sharding: OpSharding) -> Any:
    tiles = sharding.tile_dims[: sharding.tensor_ndim]
    cut = tuple(size for size in tiles if size > 1)
    if len(cut) > _MAX_LISTED_RANK:
        raise DistributeError(
            f"The sharding {sharding} was asked for on torch_xla, which cuts {len(cut)} dims. "
            f"torch_xla 2.9 can say it for {_MAX_LISTED_RANK} at most. Shard fewer dims."
        )
    copies = sharding.tile_dims[len(tiles) :]
    assignment = sharding.tile_assignment.reshape(*cut, *copies)
    small = torch.zeros(cut).to(DEVICE)
    listed = OpSharding.from_assignment(assignment, sharding.subgroup_types)
    xlac()._xla_mark_sharding(small, to_annotation(listed))
    with execution_allowed():
        shaped = (small + 0).reshape(tiles)
        xlac()._xla_sync_multi([shaped], [])
    found = parse_annotation(xlac()._get_xla_sharding_spec(shaped))
    if found != sharding:
        raise DistributeError(
            f"The sharding {sharding} was asked for on torch_xla. Its partitioner made {found} of "
            f"it, and torch_xla 2.9 cannot be told otherwise for {len(tiles)} dims. Reshape the "
            f"tensor to {_MAX_LISTED_RANK} dims, or shard fewer."
        )
    return xlac()._get_xla_op_sharding(shaped)


def cut_unevenly(payload: torch.Tensor, sharding: OpSharding) -> bool:
    """Tell whether `sharding` cuts a dim of `payload` into tiles that do not fill it."""
    return any(extent % sharding.num_tiles(dim) for dim, extent in enumerate(payload.shape))


@contextmanager
def execution_allowed() -> Iterator[None]:
    """Let the body run a program of its own, also while a step is traced as one program."""
    before = xlac()._get_allow_execution()
    xlac()._set_allow_execution(True)
    try:
        yield
    finally:
        xlac()._set_allow_execution(before)
