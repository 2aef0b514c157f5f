"""ShardingSpec: what a data loader keeps of a mesh and a partition spec."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

import xla_dtensor as xd
import xla_dtensor.spmd as xs
from xla_dtensor.core import LayoutError, OpSharding
from xla_dtensor.errors import DistributeError, UnsupportedOpError
from xla_dtensor.runtimes import Runtime


def test_fields(dp_tp: xs.Mesh) -> None:
    rows = xs.ShardingSpec(dp_tp, ("dp", None))
    assert (rows.mesh, rows.partition_spec, rows.minibatch) == (dp_tp, ("dp", None), False)
    assert rows == xs.ShardingSpec(dp_tp, ("dp", None))
    assert rows != xs.ShardingSpec(dp_tp, ("dp", None), minibatch=True)


def test_can_apply(dp_tp: xs.Mesh) -> None:
    rows = xs.ShardingSpec(dp_tp, ("dp", None))
    assert [rows.can_apply(torch.ones(shape)) for shape in ((8,), (8, 2), (8, 2, 2), ())] == [
        False,
        True,
        False,
        False,
    ]


def test_apply(mesh: xd.DeviceMesh, dp_tp: xs.Mesh) -> None:
    on_host, distributed = torch.ones(8, 2), xd.distribute_tensor(torch.ones(8, 2), mesh, None)
    for tensor in (on_host, distributed):
        xs.ShardingSpec(dp_tp, ("tp", None)).apply(tensor)
        assert xs.wrap_as_sharded_tensor(tensor).local_shards[0].data.shape == (2, 2)
    with pytest.raises(DistributeError, match=r"Pass 1 entries"):
        xs.ShardingSpec(dp_tp, ("tp", None)).apply(torch.ones(8))


def test_a_wrong_partition_spec_is_told_at_once(dp_tp: xs.Mesh) -> None:
    for wrong in (("nowhere",), ("dp", "dp"), (9,)):
        with pytest.raises(LayoutError):
            xs.ShardingSpec(dp_tp, wrong)


@pytest.mark.only_on("jax")
def test_jax_has_no_such_loaders(dp_tp: xs.Mesh) -> None:
    with pytest.raises(
        UnsupportedOpError,
        match=r"The runtime 'jax' was asked for input shardings for data loaders of its own\. It "
        r"does not have them\. ",
    ):
        xs.ShardingSpec(dp_tp, ("dp", None)).xla_spec(torch.ones(8, 2))


@pytest.mark.only_on("torch_xla")
@pytest.mark.parametrize(
    ("shape", "spec", "sharding"),
    [
        ((8, 4), ("dp", "tp"), "{devices=[2,4]<=[8]}"),
        ((8, 4), ("tp", None), "{devices=[4,1,2]<=[2,4]T(1,0) last_tile_dim_replicate}"),
        ((8, 4), (("tp", "dp"), None), "{devices=[8,1]<=[2,4]T(1,0)}"),
        ((8,), ("dp",), "{devices=[2,4]<=[8] last_tile_dim_replicate}"),
        ((8,), (None,), "{replicated}"),
        ((8, 2, 2), (None, "dp", None), "{devices=[1,2,1,4]<=[8] last_tile_dim_replicate}"),
    ],
)
def test_torch_xlas_loaders_take_it(
    runtime: Runtime, dp_tp: xs.Mesh, shape: tuple[int, ...], spec: Any, sharding: str
) -> None:
    xla_model = importlib.import_module("torch_xla.core.xla_model")
    host = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    (sent,) = xla_model.send_cpu_data_to_device(
        [host], torch.device("xla"), input_sharding=xs.ShardingSpec(dp_tp, spec)
    )
    assert runtime.op_sharding(sent) == OpSharding.parse(sharding)
    assert torch.equal(sent.cpu(), host)


def test_none_for_another_rank(dp_tp: xs.Mesh) -> None:
    assert xs.ShardingSpec(dp_tp, ("dp", None)).xla_spec(torch.ones(8)) is None
