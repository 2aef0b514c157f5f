"""M, N and O. The annotation API, a runtime that starts late, and HybridMesh."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

import xla_dtensor as xd
import xla_dtensor.spmd as xs
from mesh_utils import HybridMesh, synthetic_devices
from xla_dtensor.errors import AlreadyAnnotatedError, DistributeError
from xla_dtensor.runtimes import Runtime

needs_torch_xla = pytest.mark.skipif(
    importlib.util.find_spec("torch_xla") is None, reason="torch_xla is not installed here"
)


# ---------------------------------------------------------------- M. annotations


def test_marking_twice(dp_tp: xs.Mesh) -> None:
    x = torch.arange(32.0).reshape(8, 4)
    xs.mark_sharding(x, dp_tp, ("dp", None))
    xs.mark_sharding(x, dp_tp, ("dp", None))
    with pytest.raises(AlreadyAnnotatedError, match="annotation"):
        xs.mark_sharding(x, dp_tp, (None, "tp"))
    again = xs.mark_sharding(xs.clear_sharding(x), dp_tp, (None, "tp"))
    assert {tuple(shard.data.shape) for shard in again.local_shards} == {(8, 1)}
    assert torch.equal(again.cpu(), torch.arange(32.0).reshape(8, 4))


def test_partition_spec_has_full_rank(dp_tp: xs.Mesh) -> None:
    with pytest.raises(ValueError, match=r"2"):
        xs.mark_sharding(torch.ones(8, 4), dp_tp, ("dp",))


def test_sharding_spec_of_lower_rank_than_the_mesh(runtime: Runtime) -> None:
    cube = xs.Mesh(range(8), (2, 2, 2), ("a", "b", "c"))
    marked = xs.ShardingSpec(cube, ("c",)).apply(torch.arange(8.0))
    cube_marked = xs.mark_sharding(torch.arange(8.0), cube, ("c",))
    assert cube_marked.local_shards[0].data.tolist() == [0, 1, 2, 3]
    assert marked is None
    spec = xs.ShardingSpec(cube, ("c",), minibatch=False)
    assert spec.can_apply(torch.ones(8))


def test_silent_equal_meshes_miss_the_cache(dp_tp: xs.Mesh) -> None:
    again = xs.Mesh(list(range(8)), (2, 4), ("dp", "tp"))
    assert again == dp_tp
    assert hash(again) == hash(dp_tp)
    assert {dp_tp: 1}[again] == 1
    assert xs.Mesh(range(8), (4, 2), ("dp", "tp")) != dp_tp


@pytest.mark.only_on("jax")
def test_jax_arrays_of_a_marked_tensor_need_no_jax_mesh(mesh: xd.DeviceMesh) -> None:
    import jax.numpy as jnp
    from torch.distributed.tensor import Replicate, Shard

    rows = [Shard(0), Replicate()]
    double = xd.call_jax(lambda x: jnp.sin(x) * 2, (rows,), rows)
    x = torch.randn(8, 4)
    found: Any = double(xd.distribute_tensor(x, mesh, rows))
    torch.testing.assert_close(found.cpu(), torch.sin(x) * 2)


# ---------------------------------------------------------------- N. started late


@needs_torch_xla
@pytest.mark.parametrize("early", ["torch.ones(2).to('xla')", "torch_xla.device()"], ids=str)
def test_silent_segmentation_fault_where_torch_xla_started_without_spmd(
    run_child: Callable[..., Any], early: str
) -> None:
    status, _, errors = run_child(
        f"import torch, torch_xla\nearly = {early}\n"
        "import xla_dtensor as xd\n"
        "mesh = xd.init_device_mesh('xla', (8,))\n"
        "xd.ones(8, device_mesh=mesh).sum().item()\n",
        XLA_DTENSOR_RUNTIME="torch_xla",
    )
    assert status == 1, (status, errors)  # and not -11
    last = errors.strip().splitlines()[-1]
    assert last.startswith("xla_dtensor.core.errors.RuntimeSetupError: Runtime 'torch_xla'")


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="jax is not installed here")
def test_jax_started_with_fewer_devices(run_child: Callable[..., Any]) -> None:
    status, _, errors = run_child(
        "import jax\nearly = jax.devices()\n"
        "import xla_dtensor as xd\n"
        "xd.get_runtime('jax', num_cpu_devices=8)\n",
        XLA_DTENSOR_RUNTIME="jax",
    )
    assert status == 1, (status, errors)
    assert "xla_dtensor.core.errors.RuntimeSetupError" in errors.strip().splitlines()[-1]


# ---------------------------------------------------------------- O. HybridMesh


def test_hybrid_mesh_on_cpu(runtime: Runtime) -> None:
    mesh = xs.HybridMesh(ici_mesh_shape=(2, 4), axis_names=("a", "b"))
    assert mesh.get_logical_mesh().tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    marked = xs.mark_sharding(torch.arange(8.0), mesh, ("b",))
    assert marked.local_shards[1].data.tolist() == [2.0, 3.0]


def test_hybrid_mesh_with_dcn_on_one_slice(runtime: Runtime) -> None:
    with pytest.raises(DistributeError, match="Invalid dcn_mesh_shape for single slice mesh"):
        xs.HybridMesh(ici_mesh_shape=(1, 4), dcn_mesh_shape=(2, 1))
    mesh = xs.HybridMesh(ici_mesh_shape=(2, 2), dcn_mesh_shape=(2, 1), granule=4)
    assert mesh.get_logical_mesh().tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]


def tpus(cores_per_chip: int, slices: int) -> list[Mapping[str, Any]]:
    """The attributes of 8 TPU cores, in slices that are 2 chips wide."""
    per_slice = 8 // slices
    return [
        {
            "name": f"TPU:{i}",
            "coords": [*reversed(divmod(i % per_slice // cores_per_chip, 2)), 0],
            "core_on_chip": i % cores_per_chip,
        }
        | ({"slice_index": i // per_slice} if slices > 1 else {})
        for i in range(8)
    ]


def test_hybrid_mesh_of_two_slices(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "device_attributes", lambda: tpus(1, slices=2))
    mesh = xs.HybridMesh(ici_mesh_shape=(2, 2), dcn_mesh_shape=(2, 1), axis_names=("a", "b"))
    assert mesh.get_logical_mesh().tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    marked = xs.mark_sharding(torch.arange(4.0), mesh, ("a",))
    assert [shard.data.item() for shard in marked.local_shards] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_hybrid_mesh_of_two_slices_needs_a_dcn_shape(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "device_attributes", lambda: tpus(1, slices=2))
    with pytest.raises(DistributeError, match="Provide dcn_mesh_shape to create a mesh for"):
        xs.HybridMesh(ici_mesh_shape=(2, 4))


def test_hybrid_mesh_of_two_cores_per_chip(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "device_attributes", lambda: tpus(2, slices=1))
    mesh = xs.HybridMesh(ici_mesh_shape=(4, 2), axis_names=("a", "b"))
    pairs = {tuple(sorted(pair)) for pair in mesh.get_logical_mesh().tolist()}
    assert pairs == {(0, 1), (2, 3), (4, 5), (6, 7)}  # the inner axis stays on a chip


def test_hybrid_mesh_of_synthetic_devices() -> None:
    devices = synthetic_devices((4, 4), num_slices=2, kind="TPU v5 lite")
    mesh = HybridMesh(
        devices, ici_mesh_shape=(4, 4), dcn_mesh_shape=(2, 1), axis_names=("dp", "tp"), order="jax"
    )
    assert (mesh.size("dp"), mesh.size("tp"), mesh.dcn_axes) == (8, 4, ("dp",))
    slices = [{mesh.granule_index(int(i)) for i in row} for row in mesh.device_ids]
    assert slices == [{0}] * 4 + [{1}] * 4
