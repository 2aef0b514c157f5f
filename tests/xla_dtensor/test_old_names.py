"""Files that name modules as they were called before the files of the packages were merged."""

from __future__ import annotations

import importlib
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard

import xla_dtensor as xd
from mesh_utils import Device, Mesh, Topology
from xla_dtensor import spmd

FOLDER = Path(__file__).parent / "before_the_move"


def load(name: str) -> Any:
    return pickle.loads((FOLDER / f"{name}.pkl").read_bytes())


def test_values() -> None:
    assert load("mesh_value") == Mesh(list(range(8)), (2, 4), ("dp", "tp"))
    assert load("topology") == Topology.parse("v5e:2x4")
    assert load("layout") == xd.Layout.parse("[dp, tp]", load("mesh_value"))
    assert load("op") == xd.OpSharding.replicated()
    assert [(type(device), device.id) for device in load("devices")] == [
        (Device, number) for number in range(8)
    ]


@pytest.mark.usefixtures("runtime")
def test_meshes_and_specs() -> None:
    assert load("mesh") == xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
    assert load("xs_mesh").shape() == {"a": 2, "b": 4}
    spec = load("xs_spec")
    assert isinstance(spec, spmd.ShardingSpec)
    assert spec.partition_spec == ("a", None)


@pytest.mark.usefixtures("runtime")
@pytest.mark.parametrize("way", ["pickle", "torch.load"])
def test_tensors(way: str) -> None:
    if way == "pickle":
        x, parameter = load("dtensor"), load("parameter")
    else:  # With weights_only=True, which asks for each name whether it is safe.
        x, parameter = torch.load(FOLDER / "saved.pt").values()
    assert x.placements == (Shard(0), Shard(1))
    assert torch.equal(x.full_tensor(), torch.arange(32.0).reshape(8, 4))
    assert parameter.requires_grad
    assert torch.equal(parameter.full_tensor(), torch.ones(8, 4))


@pytest.mark.parametrize(
    ("public", "source"),
    [
        ("xla_dtensor.checkpoint", "xla_dtensor.hosts.checkpoint"),
        ("xla_dtensor.data", "xla_dtensor.hosts.data"),
        ("xla_dtensor.errors", "xla_dtensor.core.errors"),
    ],
)
def test_what_users_import_is_all_that_there_is(public: str, source: str) -> None:
    ours, theirs = importlib.import_module(public), importlib.import_module(source)
    assert set(ours.__all__) == set(theirs.__all__)
    assert all(getattr(ours, name) is getattr(theirs, name) for name in ours.__all__)


def test_a_module_that_never_was() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"xla_dtensor\.never"):
        importlib.import_module("xla_dtensor.never")
