"""Find processes that feed what is no global batch, before a program hangs or learns from it.

Three mistakes give no error by themselves: processes disagree on shapes (the program hangs), two
that hold copies of the same rows pass different ones (the copies differ for ever), or two that hold
different rows pass the same ones (the job trains on a part of its data). Each process publishes a
*digest*: shapes and dtypes, and where asked a checksum per block; all compare all.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from itertools import combinations
from typing import TYPE_CHECKING, Any

import torch

from xla_dtensor.core.errors import FeedMismatchError
from xla_dtensor.hosts.data.nested import Path, path_text
from xla_dtensor.hosts.data.part import part_of

if TYPE_CHECKING:
    from xla_dtensor.hosts.data.batch import Leaf

__all__ = ["checksum", "compare_feeds", "digest"]

Digest = dict[str, dict[str, Any]]


def checksum(tensor: torch.Tensor) -> int:
    """Return the CRC-32 of a host tensor's bytes."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj()).reshape(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().data)


def digest(
    tensors: Mapping[Path, torch.Tensor], leaves: Mapping[Path, Leaf], *, with_sums: bool
) -> Digest:
    """Return what this process says of its batch; JSON can write it.

    Args:
        tensors: The process's own tensors.
        leaves: How each is to lie.
        with_sums: Whether to add checksums, which reads the tensors.
    """
    said: Digest = {}
    for path, tensor in tensors.items():
        leaf = leaves[path]
        said[path_text(path)] = {
            "shape": list(leaf.shape),
            "dtype": str(tensor.dtype),
            "layout": str(leaf.layout),
        } | (_sums(tensor, leaf) if with_sums else {})
    return said


def _sums(tensor: torch.Tensor, leaf: Leaf) -> dict[str, Any]:
    if len(leaf.whole) == tensor.ndim and tensor.ndim:
        return {"blocks": {"whole": checksum(tensor)}, "rows": "whole", "constant": True}
    part = part_of(leaf.shape, leaf.layout)
    own = part.take(tensor.detach(), leaf.whole)
    blocks: dict[str, int] = {}
    for block in part.blocks.values():
        name = ",".join(f"{s.start}:{s.stop}" for s in block)
        if name not in blocks and all(s.start < s.stop for s in block):
            blocks[name] = checksum(own[part.own_index(block)] if own.ndim else own)
    return {
        "blocks": blocks,
        "rows": part.text(0) if own.ndim else "",
        "constant": bool(own.numel() == 0 or (own == own.reshape(-1)[0]).all()),
    }


def compare_feeds(said: Mapping[int, Digest], what: str) -> None:
    """Compare what processes say of one batch.

    Args:
        said: A digest per process.
        what: Who asks, for the message.

    Raises:
        FeedMismatchError: They cannot be parts of one batch.
    """
    for first, second in combinations(sorted(said), 2):
        _compare_shapes(first, said[first], second, said[second], what)
        _compare_copies(first, said[first], second, said[second], what)
        _compare_others(first, said[first], second, said[second], what)


def _compare_shapes(first: int, one: Digest, second: int, other: Digest, what: str) -> None:
    for path in {**one, **other}:
        a, b = one.get(path), other.get(path)
        for key in ("shape", "dtype", "layout"):
            x, y = (a or {}).get(key), (b or {}).get(key)
            if x != y:
                raise FeedMismatchError(
                    f"{what}: at the batch's leaf {path} process {first} has a tensor of global "
                    f"{key}={x}, process {second} of {key}={y}. They would run different programs, "
                    "and wait for each other for ever. Feed equal parts, or pass global_shape."
                )


def _compare_copies(first: int, one: Digest, second: int, other: Digest, what: str) -> None:
    for path, said in one.items():
        theirs = other[path].get("blocks", {})
        for block, found in said.get("blocks", {}).items():
            if theirs.get(block, found) != found:
                raise FeedMismatchError(
                    f"{what}: at the batch's leaf {path} the processes {first} and {second} both "
                    f"hold the block [{block}] and pass different values. Copies would differ in "
                    "silence. Let both read the same rows: see process_part, or ShardedSampler."
                )


def _compare_others(first: int, one: Digest, second: int, other: Digest, what: str) -> None:
    apart = [
        (said, other[path])
        for path, said in one.items()
        if said.get("rows", "") and other[path].get("rows", said["rows"]) != said["rows"]
    ]
    telling = [pair for pair in apart if not pair[0]["constant"]]
    if not telling or any(
        list(a["blocks"].values()) != list(b["blocks"].values()) for a, b in apart
    ):
        return
    raise FeedMismatchError(
        f"{what}: process {first} passes as its rows {telling[0][0]['rows']} what process {second} "
        f"passes as {telling[0][1]['rows']}, in every tensor. The job would train on the same rows "
        "twice. Let each read its own rows: see ShardedSampler; check='off' if it is meant so."
    )
