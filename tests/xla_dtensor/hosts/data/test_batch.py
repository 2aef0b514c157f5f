"""shard_batch on one process: structures, placements, what it refuses."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import xla_dtensor as xd
import xla_dtensor.spmd as xs
from xla_dtensor.errors import ArgumentTypeError, DataError, DistributeError

ROWS = [Shard(0), Replicate()]


class Pair(NamedTuple):
    x: Any
    y: Any


def test_every_tensor_of_a_batch(mesh: xd.DeviceMesh) -> None:
    x, y = torch.arange(24.0).reshape(8, 3), torch.arange(8)
    batch = {"pair": Pair(x, [y, (x.bfloat16(), "text")]), "n": 3, "none": None, "s": x[0, 0]}
    placements = {"pair": ROWS, "s": None, "n": None, "none": None}
    found = xd.shard_batch(batch, mesh, placements)
    assert isinstance(found["pair"], Pair)
    assert isinstance(found["pair"].y, list)
    assert isinstance(found["pair"].y[1], tuple)
    assert (found["n"], found["none"], found["pair"].y[1][1]) == (3, None, "text")
    made = [found["pair"].x, found["pair"].y[0], found["pair"].y[1][0], found["s"]]
    for tensor, source in zip(made, (x, y, x.bfloat16(), x[0, 0]), strict=True):
        assert isinstance(tensor, xd.DTensor)
        assert tensor.dtype == source.dtype
        assert torch.equal(tensor.full_tensor(), source)
    assert found["pair"].x.placements == tuple(ROWS)
    assert found["s"].placements == (Replicate(), Replicate())
    assert {s.data.shape for s in found["pair"].x.addressable_shards()} == {(4, 3)}


def test_placements_in_the_batchs_structure(mesh: xd.DeviceMesh) -> None:
    x = torch.arange(32).reshape(8, 4)
    found = xd.shard_batch((x, {"y": x}), mesh, [ROWS, {"y": ("tp", "dp")}])
    assert found[0].placements == tuple(ROWS)
    assert found[1]["y"].placements == (Shard(1), Shard(0))
    assert xd.shard_batch(x, mesh, (("dp", "tp"), None)).placements == (Shard(0), Shard(0))
    assert xd.shard_batch((x, x[0]), mesh).__len__() == 2


def test_arrays_are_tensors(mesh: xd.DeviceMesh) -> None:
    import ml_dtypes

    fixed = np.arange(8)
    fixed.flags.writeable = False
    batch = {
        "fixed": fixed,
        "back": np.arange(8)[::-1],
        "brain": np.arange(8).astype(ml_dtypes.bfloat16),
        "words": np.array(["a", "b"]),
    }
    found = xd.shard_batch(batch, mesh, ROWS)
    assert found["fixed"].tolist() == list(range(8))
    assert found["back"].tolist() == list(range(8))[::-1]
    assert found["brain"].dtype == torch.bfloat16
    assert found["words"] is batch["words"]


def test_the_batch_is_copied_and_may_require_grad(mesh: xd.DeviceMesh) -> None:
    source = torch.ones(8, 2, requires_grad=True)
    found = xd.shard_batch(source, mesh, ROWS)
    assert found.is_leaf
    assert found.requires_grad
    with torch.no_grad():
        source.zero_()
    assert found.full_tensor().sum().item() == 16


def test_uneven_and_empty(mesh: xd.DeviceMesh) -> None:
    for rows in (0, 1, 3, 5):
        source = torch.arange(rows * 2).reshape(rows, 2)
        found = xd.shard_batch(source, mesh, [Shard(0), Shard(0)], global_shape=(rows, None))
        assert torch.equal(found.full_tensor(), source)


def test_one_process_holds_everything(mesh: xd.DeviceMesh) -> None:
    part = xd.process_part((8, 6), mesh, [Shard(1), Shard(0)])
    assert part.runs == (((0, 8),), ((0, 6),))
    assert part.shape == (8, 6)
    assert (part.text(), part.positions(1).tolist()) == ("0:8", list(range(6)))
    assert len(part.blocks) == 8


@pytest.mark.parametrize(
    ("batch", "placements", "options", "text"),
    [
        (
            {"x": torch.ones(8), "y": torch.ones(8)},
            {"x": ROWS},
            {},
            "placements was passed in a structure that has nothing for the batch's leaf ['y'].",
        ),
        ([torch.ones(8)], ROWS, {"global_shape": (8, 2)}, "global_shape=(8, 2) for the batch's"),
        ([torch.ones(8)], ROWS, {"global_shape": (6,)}, "this process has to pass (6,). Pass"),
        ({"x": torch.ones(8)}, [Shard(0)], {}, "shard_batch, at the batch's leaf ['x'], was"),
        ({"x": torch.ones(8)}, [Shard(0), Shard(1)], {}, "The dim 1 does not exist."),
    ],
)
def test_refused(mesh: xd.DeviceMesh, batch: Any, placements: Any, options: Any, text: str) -> None:
    with pytest.raises(DistributeError) as raised:
        xd.shard_batch(batch, mesh, placements, **options)
    assert text in str(raised.value)


def test_refused_tensors(mesh: xd.DeviceMesh) -> None:
    for wrong in (torch.ones(8, device="meta"), torch.ones(8, 2).to_sparse()):
        with pytest.raises(ArgumentTypeError, match=r"Values are taken from dense host memory"):
            xd.shard_batch([wrong], mesh, ROWS)
    with pytest.raises(ArgumentTypeError, match="A mesh was expected"):
        xd.shard_batch(torch.ones(8), "mesh", ROWS)


def test_sharding_specs(mesh: xd.DeviceMesh) -> None:
    values = xs.Mesh(mesh.value.device_ids.ravel().tolist(), (2, 4), ("dp", "tp"))
    rows, columns = xs.ShardingSpec(values, ("dp", None)), xs.ShardingSpec(values, (None, "tp"))
    batch = {"x": torch.ones(8, 4), "y": torch.ones(8, 4), "z": torch.ones(3)}
    specs = {"x": rows, "y": columns, "z": rows}
    (found,) = xd.ShardedLoader([batch], input_sharding=specs)
    assert found["x"].placements == (Shard(0), Replicate())
    assert found["y"].placements == (Replicate(), Shard(1))
    assert found["z"].placements == (Replicate(), Replicate())
    mixed = {"x": rows, "y": xs.ShardingSpec(values, ("dp", None), minibatch=True)}
    with pytest.raises(DataError, match=r"2 specs on 1 meshes with minibatch=\[False, True\]\. "):
        xd.ShardedLoader([batch], input_sharding=mixed)
    with pytest.raises(ArgumentTypeError, match="input_sharding holds an object of type=int"):
        xd.ShardedLoader([batch], input_sharding={"x": 1})
    with pytest.raises(DataError, match="with input_sharding and with mesh, placements or whole"):
        xd.ShardedLoader([batch], mesh, input_sharding=rows)
    with pytest.raises(DataError, match=r"MpDeviceLoader was called with input_sharding=None and"):
        xd.MpDeviceLoader([batch], "xla")
    with pytest.raises(DataError, match=r"batches_per_execution=2\. It has to know on which mesh"):
        xd.MpDeviceLoader([batch], "xla", input_sharding=rows, batches_per_execution=2)


@pytest.mark.only_on("jax")
def test_a_batch_is_put_in_a_compiled_step(mesh: xd.DeviceMesh) -> None:
    step = xd.compile(lambda batch: xd.shard_batch(batch, mesh, ROWS)["x"] * 2)
    for value in (1.0, 2.0):
        result = step({"x": torch.full((16, 4), value)})
        assert result.placements == tuple(ROWS)
        assert torch.equal(result.full_tensor(), torch.full((16, 4), 2 * value))
    assert step.stats()["traces"] == 1
