"""The core against JAX, torch_xla and PyTorch themselves, on 8 virtual devices."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("NPROC", "64")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]
from jax.sharding import NamedSharding, PartitionSpec
from layout_strategies import (
    AXES,
    GROUPS,
    QUICK,
    SMALL_SHAPES,
    THOROUGH,
    Case,
    cases,
    meshes,
    op_shardings,
    placement_lists,
)
from torch.distributed.tensor import Partial as TorchPartial
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor import _utils as torch_utils
from torch.distributed.tensor.placement_types import _StridedShard

from mesh_utils import Mesh
from xla_dtensor.core import (
    OPEN,
    Gap,
    Layout,
    LayoutError,
    OpSharding,
    Partial,
    PlacementRecord,
    Replicate,
    Shard,
    StridedShard,
    local_shape,
)

ROOT = Path(__file__).resolve().parents[3]
NESTED_STRIDES = hasattr(torch_utils, "_get_shard_size_and_offsets")  # torch >= 2.10


# JAX.


def jax_sharding(layout: Layout) -> NamedSharding:
    """JAX's sharding for a layout of whole axes."""
    mesh = layout.mesh
    devices = np.array(jax.devices(), dtype=object)[mesh.device_ids]

    def entry_of_jax(entry: Any) -> Any:
        if entry is OPEN:
            return PartitionSpec.UNCONSTRAINED
        axes = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
        return tuple(map(str, axes)) or None

    entries = map(entry_of_jax, layout.to_partition_spec())
    names = tuple(map(str, mesh.axis_names))  # JAX has no axes without a name
    return NamedSharding(jax.sharding.Mesh(devices, names), PartitionSpec(*entries))


@pytest.mark.parametrize("group", GROUPS)
@THOROUGH
@given(data=st.data())
def test_op_sharding_is_jaxs(group: str, data: st.DataObject) -> None:
    """Same meaning, both ways; on JAX's own order, and by device where the order is permuted."""
    case = data.draw(cases(group))
    layout = case.layout.factored()
    hlo = jax_sharding(layout)._to_xla_hlo_sharding(layout.ndim)
    op = case.layout.op_sharding()
    assert OpSharding.parse(str(hlo)) == op
    assert xla_client.HloSharding.from_string(str(op)) == hlo
    assert str(op) == str(hlo)


@pytest.mark.parametrize("group", GROUPS[:4])
@THOROUGH
@given(data=st.data())
def test_shard_index_is_jaxs(group: str, data: st.DataObject) -> None:
    """Which elements each device has; partitions numbered by device id, whatever the mesh order."""
    case = data.draw(cases(group))
    indices = jax_sharding(case.layout.factored()).devices_indices_map(case.shape)
    op = case.layout.op_sharding(case.root)
    for device, index in indices.items():
        found = op.shard_index(device.id, case.shape)
        expected = [s.indices(n)[:2] for s, n in zip(index, case.shape, strict=True)]
        assert [(s.start, s.stop) for s in found] == expected


@QUICK
@given(data=st.data())
def test_open_dims_print_as_not_cut(data: st.DataObject) -> None:
    case = data.draw(cases("size-1 axes"))
    uncut = [dim for dim, entries in enumerate(case.layout.dims) if not entries]
    open_dims = frozenset(data.draw(st.sets(st.sampled_from(uncut)))) if uncut else frozenset()
    layout = Layout(case.layout.mesh, case.layout.dims, (), open_dims)
    hlo = jax_sharding(layout)._to_xla_hlo_sharding(layout.ndim)
    assert OpSharding.parse(str(hlo)) == layout.op_sharding()


def test_jaxs_partition_specs_are_read() -> None:
    mesh = Mesh.arange((2, 4), ("dp", "tp"))
    spec = PartitionSpec(("tp", "dp"), None, PartitionSpec.UNCONSTRAINED)
    layout = Layout.from_partition_spec(spec, mesh)
    assert str(layout) == "[tp.dp, -, -?]"
    assert layout.to_partition_spec() == (("tp", "dp"), None, OPEN)
    assert str(Layout.from_partition_spec(PartitionSpec("tp"), mesh, tensor_ndim=2)) == "[tp, -]"
    with pytest.raises(LayoutError, match="Its unreduced axes are pending sums"):
        Layout.from_partition_spec(PartitionSpec("dp", unreduced=frozenset({"tp"})), mesh)


@THOROUGH
@given(op=op_shardings())
def test_xla_reads_our_text(op: OpSharding) -> None:
    """XLA's reading of our text, printed by XLA and read by us, is the same sharding."""
    assume(math.prod(op.tile_dims) > 1)  # XLA reads no grid of one device
    hlo = xla_client.HloSharding.from_string(str(op))
    assert OpSharding.parse(str(hlo)) == op
    assert OpSharding.parse(str(xla_client.HloSharding.from_string(str(op.canonical())))) == op


# torch_xla, in a process of its own.


def sampled_cases(count: int) -> list[Case]:
    """Layouts on all 8 devices, uneven shapes included, the same at each run."""
    rng = random.Random(0)
    shapes = [shape for shape in SMALL_SHAPES if math.prod(shape) == 8]
    found: list[Case] = []
    while len(found) < count:
        shape = rng.choice(shapes)
        ids = list(range(8))
        if rng.random() < 0.5:
            rng.shuffle(ids)
        mesh = Mesh(ids, shape, AXES[-len(shape) :])
        ndim = rng.randint(1, 4)
        dims: list[list[str | int]] = [[] for _ in range(ndim)]
        for axis in rng.sample(mesh.axis_names, mesh.ndim):
            if rng.random() < 0.8:
                rng.choice(dims).append(axis)
        extents = tuple(rng.randint(1, 11) for _ in range(ndim))
        layout = Layout(mesh, tuple(map(tuple, dims)))
        found.append(Case(layout, Mesh.arange((8,)), extents))
    return found


@pytest.fixture(scope="module")
def torch_xla_answers() -> list[tuple[Case, dict[str, Any]]]:
    """What torch_xla makes of the sampled cases."""
    if importlib.util.find_spec("torch_xla") is None:
        pytest.skip("torch_xla is not installed: it pairs with torch 2.9 only")
    sample = sampled_cases(200)
    asked = [
        {
            "device_ids": case.layout.mesh.device_ids.reshape(-1).tolist(),
            "mesh_shape": case.layout.mesh.mesh_shape,
            "axis_names": case.layout.mesh.axis_names,
            "spec": case.layout.to_partition_spec(),
            "shape": case.shape,
        }
        for case in sample
    ]
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("torch_xla_shards.py"))],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=False,
        env={**env, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8"},
        cwd=ROOT,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return list(zip(sample, json.loads(done.stdout), strict=True))


def test_op_sharding_is_torch_xlas(
    torch_xla_answers: list[tuple[Case, dict[str, Any]]],
) -> None:
    for case, answer in torch_xla_answers:
        assert OpSharding.parse(answer["text"]) == case.layout.op_sharding(case.root), case


def test_shard_index_is_torch_xlas(
    torch_xla_answers: list[tuple[Case, dict[str, Any]]],
) -> None:
    """Uneven shapes too: XLA's tiles, the last ones shorter or empty."""
    uneven = 0
    for case, answer in torch_xla_answers:
        op = case.layout.op_sharding(case.root)
        counts = [case.layout.num_shards(dim) for dim in range(case.layout.ndim)]
        uneven += any(n % count for n, count in zip(case.shape, counts, strict=True))
        for device, index in enumerate(answer["indices"]):
            found = [[s.start, s.stop] for s in op.shard_index(device, case.shape)]
            assert found == (index or [[0, n] for n in case.shape]), (case, device)
    assert uneven > 50


# PyTorch.


def as_torch(record: PlacementRecord) -> Any:
    """The placement object of the torch that is installed."""
    match record:
        case Shard(dim):
            return TorchShard(dim)
        case StridedShard(dim, split_factor):
            return _StridedShard(dim, split_factor=split_factor)
        case Replicate():
            return TorchReplicate()
        case Partial(reduce_op):
            return TorchPartial(reduce_op)


@pytest.mark.parametrize("group", GROUPS)
@QUICK
@given(data=st.data())
def test_torchs_objects_are_read_as_the_records(group: str, data: st.DataObject) -> None:
    mesh = data.draw(meshes(group))
    tensor_ndim = data.draw(st.integers(0, 5))
    records = data.draw(placement_lists(mesh, tensor_ndim))
    objects = [as_torch(record) for record in records]
    try:
        expected = Layout.from_placements(records, tensor_ndim, mesh)
    except LayoutError:
        with pytest.raises(LayoutError):
            Layout.from_placements(objects, tensor_ndim, mesh)
        return
    assert Layout.from_placements(objects, tensor_ndim, mesh) is expected


@pytest.mark.parametrize("group", GROUPS)
@THOROUGH
@given(data=st.data())
def test_torch_rule_is_torchs(group: str, data: st.DataObject) -> None:
    """Shape and offset of PyTorch's own function.

    torch 2.9 knows strided placements only where later axes take the split factor whole, and cuts
    those in the order of the cuts, which on an uneven dim is not always what it scatters.
    """
    mesh = data.draw(meshes(group))
    tensor_ndim = data.draw(st.integers(1, 3))
    records = data.draw(placement_lists(mesh, tensor_ndim, strided=NESTED_STRIDES))
    shape = tuple(data.draw(st.integers(0, 30)) for _ in range(tensor_ndim))
    try:
        layout = Layout.from_placements(records, tensor_ndim, mesh)
    except LayoutError:
        return
    objects = [as_torch(record) for record in layout.to_placements()]
    coordinate = [data.draw(st.integers(0, size - 1)) for size in mesh.mesh_shape]
    expected = torch_utils._compute_local_shape_and_global_offset(
        shape, mesh.mesh_shape, coordinate, objects
    )
    found = local_shape(layout, shape, coordinate, rule="torch")
    assert (found.shape, found.offset) == (tuple(expected[0]), tuple(expected[1]))


@THOROUGH
@given(data=st.data())
def test_torch_rule_is_torchs_on_even_strides(data: st.DataObject) -> None:
    """FSDP over tensor parallelism, in both versions of PyTorch."""
    mesh = data.draw(meshes("strided"))
    assume(NESTED_STRIDES or 1 not in mesh.mesh_shape)  # torch 2.9 refuses some of these
    extent = mesh.size() * data.draw(st.integers(1, 3))
    layout = Layout(mesh, (tuple(reversed(mesh.axis_names)),))
    objects = [as_torch(record) for record in layout.to_placements()]
    coordinate = [data.draw(st.integers(0, size - 1)) for size in mesh.mesh_shape]
    found = local_shape(layout, (extent,), coordinate, rule="torch")
    shape, offset = torch_utils._compute_local_shape_and_global_offset(
        (extent,), mesh.mesh_shape, coordinate, objects
    )
    assert found.shape == tuple(shape)
    if NESTED_STRIDES or mesh.ndim <= 2:  # torch 2.9 adds up three nested offsets wrongly
        assert found.offset == tuple(offset)
    assert found == local_shape(layout, (extent,), coordinate)


def test_torchs_strided_shard_is_no_shard() -> None:
    """In torch 2.9 they compare equal, with different hashes; here they never meet in a cache."""
    mesh = Mesh.arange((2, 4), ("dp", "tp"))
    plain = Layout.from_placements([TorchShard(0), TorchReplicate()], 1, mesh)
    strided = Layout.from_placements([_StridedShard(0, split_factor=3), TorchReplicate()], 1, mesh)
    assert plain.dims == (("dp",),)
    assert strided.dims == ((Gap(3), "dp"),)


def test_fsdp_over_tensor_parallelism_as_torch_writes_it() -> None:
    mesh = Mesh.arange((2, 4), ("dp", "tp"))
    objects = [_StridedShard(0, split_factor=4), TorchShard(-2)]
    layout = Layout.from_placements(objects, 2, mesh)
    assert str(layout) == "[tp.dp, -]"
    assert str(layout.op_sharding()) == "{devices=[8,1]<=[2,4]T(1,0)}"
    assert torch.empty(8, 6)[local_shape(layout, (8, 6), (1, 2)).offset[0]].shape == (6,)
