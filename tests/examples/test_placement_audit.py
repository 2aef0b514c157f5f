"""The audit passes a tensor that lies as asked, and finds each way in which one may not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor import Placement, Replicate, Shard

from examples.placement_audit import audit, render_audits
from mesh_utils import Mesh
from xla_dtensor.core import Layout

MESH = Mesh.arange((2, 4), ("dp", "tp"))
ASKED = (Shard(1), Shard(0))
# Rows of a (10, 6) float32 tensor that each tp coordinate holds: tiles of 3, the last one padded.
ROWS = (3, 3, 3, 1)


@dataclass(frozen=True)
class FakeShard:
    device_id: int
    data: torch.Tensor
    num_bytes_on_device: int


@dataclass(frozen=True)
class FakeDTensor:
    """What the audit reads of a DTensor, with an answer for everything that XLA is asked."""

    sharding: str
    shards: tuple[FakeShard, ...]
    mesh_layout: Layout
    shape: tuple[int, ...] = (10, 6)
    ndim: int = 2

    def xla_sharding(self) -> str:
        return self.sharding

    def addressable_shards(self) -> tuple[FakeShard, ...]:
        return self.shards

    def element_size(self) -> int:
        return 4

    def numel(self) -> int:
        return 60


def make_tensor() -> FakeDTensor:
    shards = tuple(FakeShard(i, torch.zeros(ROWS[i % 4], 3), 3 * 3 * 4) for i in range(8))
    layout = Layout.from_placements(ASKED, 2, MESH)
    return FakeDTensor("{devices=[4,2]<=[2,4]T(1,0)}", shards, layout)


def problems_of(tensor: Any, asked: Sequence[Placement] = ASKED) -> tuple[str, ...]:
    return audit("w", tensor, asked).problems


def test_tensor_that_lies_as_asked() -> None:
    row = audit("w", make_tensor(), ASKED)  # type: ignore[arg-type]
    assert row.problems == ()
    assert (row.device_bytes, row.total_bytes, row.shape) == (36, 240, (10, 6))
    assert row.mesh == MESH


def test_sharding_is_compared_by_meaning() -> None:
    listed = replace(make_tensor(), sharding="{devices=[4,2]0,4,1,5,2,6,3,7}")
    assert problems_of(listed) == ()


def test_replicated_tensor_is_found() -> None:
    found = problems_of(replace(make_tensor(), sharding="{replicated}"))
    assert found == ("w: XLA has {replicated}, asked was {devices=[4,2]<=[2,4]T(1,0)}.",)


def test_what_was_asked_counts_and_not_what_the_tensor_says_of_itself() -> None:
    found = problems_of(make_tensor(), (Replicate(), Shard(0)))
    assert len(found) == 9
    assert "last_tile_dim_replicate" in found[0]


def test_whole_tensor_on_one_device_is_found() -> None:
    tensor = make_tensor()
    whole = replace(tensor.shards[5], data=torch.zeros(10, 6), num_bytes_on_device=240)
    found = problems_of(replace(tensor, shards=(*tensor.shards[:5], whole, *tensor.shards[6:])))
    assert found == ("w: device 5 holds (10, 6) in 240 bytes, asked was (3, 3) in 36.",)


def test_buffer_larger_than_its_shard_is_found() -> None:
    tensor = make_tensor()
    shards = tuple(replace(shard, num_bytes_on_device=240) for shard in tensor.shards)
    assert len(problems_of(replace(tensor, shards=shards))) == 8


def test_table() -> None:
    text = render_audits([audit("w", make_tensor(), ASKED)] * 2)  # type: ignore[arg-type]
    assert text.splitlines() == [
        "parameter  shape   dp, tp      XLA's sharding                bytes/device  of bytes",
        "w          10 x 6  S(1), S(0)  {devices=[4,2]<=[2,4]T(1,0)}            36       240",
        "w          10 x 6  S(1), S(0)  {devices=[4,2]<=[2,4]T(1,0)}            36       240",
        "all                                                                    72       480",
    ]
