"""What every runtime guarantees; the methods are those of `runtimes.base.Runtime`."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mesh_utils import Mesh
from xla_dtensor import DeviceMesh, distribute_tensor
from xla_dtensor.core import Layout, OpSharding, local_shape
from xla_dtensor.runtimes import Runtime

DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)
MESHES = ((8,), (2, 4), (4, 2), (2, 2, 2), (1, 8), (2, 1, 4))
PROPERTY = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    values = torch.arange(int(np.prod(shape))).reshape(shape) % 100
    return values.to(dtype)


def layout_of(spec: tuple[Any, ...], mesh_shape: tuple[int, ...] = (2, 4)) -> Layout:
    names = ("dp", "tp", "ep")[: len(mesh_shape)]
    return Layout.from_partition_spec(spec, Mesh.arange(mesh_shape, names))


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Layout, tuple[int, ...]]:
    """A layout with each axis on some dim or none, in any nesting order, and an uneven shape."""
    mesh_shape = draw(st.sampled_from(MESHES))
    names = ("a", "b", "c")[: len(mesh_shape)]
    ndim = draw(st.integers(0, 4))
    dims: list[list[str]] = [[] for _ in range(ndim)]
    for name in draw(st.permutations(names)):
        dim = draw(st.integers(-1, ndim - 1))
        if dim >= 0:
            dims[dim].append(name)
    spec = tuple(tuple(d) if d else None for d in dims)
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=ndim, max_size=ndim)))
    return Layout.from_partition_spec(spec, Mesh.arange(mesh_shape, names)), shape


def test_there_are_eight_devices_and_all_are_addressable(runtime: Runtime) -> None:
    assert len(runtime.device_ids()) == 8
    assert runtime.addressable_device_ids() == runtime.device_ids()


def test_a_runtime_describes_itself_in_strings(runtime: Runtime) -> None:
    described = runtime.describe()
    assert described
    assert all(isinstance(v, str) for pair in described.items() for v in pair)


def test_a_payload_is_known_and_a_plain_tensor_is_none(runtime: Runtime) -> None:
    payload = runtime.put(torch.ones(8), layout_of(("tp",)))
    assert runtime.is_payload(payload)
    assert not runtime.is_payload(torch.ones(8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_and_dtype_survive_the_round_trip(runtime: Runtime, dtype: torch.dtype) -> None:
    host = numbers(8, 6, dtype=dtype)
    payload = runtime.put(host, layout_of(("dp", None)))
    assert payload.dtype == dtype
    back = runtime.to_host(payload)
    assert back.device.type == "cpu"
    assert torch.equal(back, host)


def test_int64_keeps_all_its_bits(runtime: Runtime) -> None:
    host = torch.tensor([2**40, -(2**62), 2**63 - 1])
    payload = runtime.put(host, layout_of((None,)))
    assert torch.equal(runtime.to_host(payload), host)
    assert runtime.to_host(payload - 1).tolist() == [2**40 - 1, -(2**62) - 1, 2**63 - 2]


def test_float64_keeps_its_precision(runtime: Runtime) -> None:
    host = torch.tensor([1.0 + 2**-50], dtype=torch.float64)
    payload = runtime.put(host, layout_of((None,)))
    assert torch.equal(runtime.to_host(payload * 3), host * 3)


def test_putting_copies(runtime: Runtime) -> None:
    host = numbers(8, 4)
    before = host.clone()
    payload = runtime.put(host, layout_of(("tp", None)))
    host.fill_(-1)
    assert torch.equal(runtime.to_host(payload), before)
    host.copy_(before)
    with torch.no_grad():
        payload.add_(1)
    assert torch.equal(host, before)


@PROPERTY
@given(layouts())
def test_a_payload_lies_as_its_layout_says(runtime: Runtime, case: Any) -> None:
    layout, shape = case
    host = numbers(*shape)
    payload = runtime.put(host, layout)
    assert runtime.op_sharding(payload) == layout.op_sharding(runtime.root(layout.mesh))
    assert torch.equal(runtime.to_host(payload), host)
    check_shards(runtime, payload, host, layout)


def check_shards(runtime: Runtime, payload: Any, host: torch.Tensor, layout: Layout) -> None:
    """Each device's shard: the extent, the values, and the bytes it takes with padding."""
    shards = {s.device_id: s for s in runtime.addressable_shards(payload)}
    mesh = layout.mesh
    tile = [-(-n // layout.num_shards(d)) for d, n in enumerate(host.shape)]
    for coordinate in itertools.product(*map(range, mesh.mesh_shape)):
        shard = shards[int(mesh.device_ids[coordinate])]
        expected = local_shape(layout, tuple(host.shape), coordinate)
        index = tuple(slice(o, o + n) for o, n in zip(expected.offset, expected.shape, strict=True))
        assert tuple(shard.data.shape) == expected.shape
        assert torch.equal(shard.data, host[index])
        if shard.data.numel():
            assert shard.index == index
        assert shard.num_bytes_on_device == int(np.prod(tile)) * host.element_size()


@PROPERTY
@given(layouts(), st.randoms(use_true_random=False))
def test_constraining_moves_a_copy_and_leaves_the_source(
    runtime: Runtime, case: Any, random: Any
) -> None:
    layout, shape = case
    host = numbers(*shape)
    names = list(layout.mesh.axis_names)
    random.shuffle(names)
    spec = tuple(names[d] if d < len(names) else None for d in range(len(shape)))
    target = Layout.from_partition_spec(spec, layout.mesh)
    source = runtime.put(host, layout)
    moved = runtime.constrain(source, target)
    root = runtime.root(layout.mesh)
    assert runtime.op_sharding(moved) == target.op_sharding(root)
    assert torch.equal(runtime.to_host(moved), host)
    assert runtime.op_sharding(source) == layout.op_sharding(root)
    with torch.no_grad():
        moved.add_(1)
    assert torch.equal(runtime.to_host(source), host)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16], ids=str)
def test_constraining_keeps_the_dtype(runtime: Runtime, dtype: torch.dtype) -> None:
    host = numbers(8, 8, dtype=dtype)
    moved = runtime.constrain(runtime.put(host, layout_of(("dp", None))), layout_of((None, "tp")))
    assert moved.dtype == dtype
    assert torch.equal(runtime.to_host(moved), host)


@pytest.mark.parametrize(
    ("shape", "spec"), [((10, 7), (("tp", "dp"), None)), ((), ()), ((3,), ("tp",))], ids=str
)
def test_building_from_shards_is_the_inverse_of_taking_them(
    runtime: Runtime, shape: tuple[int, ...], spec: tuple[Any, ...]
) -> None:
    host = numbers(*shape)
    layout = layout_of(spec)
    shards = runtime.addressable_shards(runtime.put(host, layout))
    built = runtime.from_shards({s.device_id: s.data for s in shards}, host.shape, layout)
    assert torch.equal(runtime.to_host(built), host)
    assert runtime.op_sharding(built) == layout.op_sharding(runtime.root(layout.mesh))


def test_an_uneven_embedding_is_really_cut(runtime: Runtime) -> None:
    host = torch.zeros(50257, 64)
    payload = runtime.put(host, layout_of(("tp", None)))
    shards = runtime.addressable_shards(payload)
    assert {s.num_bytes_on_device for s in shards} == {12_565 * 64 * 4}
    assert sum(s.data.shape[0] for s in shards) == 2 * 50257


def test_ops_run_on_payloads(runtime: Runtime) -> None:
    host = numbers(8, 8)
    payload = runtime.put(host, layout_of(("dp", "tp")))
    result = runtime.run_op(torch.ops.aten.mm.default, (payload, payload), {})
    assert torch.equal(runtime.to_host(result), host @ host)


def test_a_plain_tensor_among_the_arguments_stands_for_its_value(runtime: Runtime) -> None:
    payload = runtime.put(numbers(8, 4), layout_of(("dp", None)))
    result = runtime.run_op(torch.ops.aten.add.Tensor, (payload, torch.ones(4)), {})
    assert torch.equal(runtime.to_host(result), numbers(8, 4) + 1)


def test_writing_in_place_keeps_the_sharding(runtime: Runtime) -> None:
    layout = layout_of(("tp", None))
    payload = runtime.put(numbers(10, 4), layout)
    with torch.no_grad():
        for _ in range(3):
            payload.mul_(2).add_(1)
    assert runtime.op_sharding(payload) == layout.op_sharding(runtime.root(layout.mesh))
    check_shards(runtime, payload, numbers(10, 4) * 8 + 7, layout)


def test_a_permuted_order_reaches_the_devices(runtime: Runtime) -> None:
    permuted = Mesh([0, 4, 1, 5, 2, 6, 3, 7], (4, 2), ("x", "y"))
    layout = Layout.from_partition_spec(("x", "y"), permuted)
    host = numbers(8, 4)
    payload = runtime.put(host, layout)
    assert runtime.op_sharding(payload) == layout.op_sharding(runtime.root(permuted))
    check_shards(runtime, payload, host, layout)


def test_shardings_are_read_as_values(runtime: Runtime) -> None:
    read = runtime.op_sharding(runtime.put(torch.ones(8, 4), layout_of(("tp", "dp"))))
    assert isinstance(read, OpSharding)
    assert OpSharding.parse(str(read)) == read


def test_a_compiled_step_is_called_like_the_function(runtime: Runtime, mesh: DeviceMesh) -> None:
    step = runtime.compile(lambda x, scale, *, shift: {"y": x * scale + shift, "n": 3})
    x = distribute_tensor(numbers(8, 4), mesh, ("dp", None))
    for scale in (2.0, 3.0):
        result = step(x, scale, shift=1.0)
        assert result["n"] == 3
        assert torch.equal(result["y"].full_tensor().cpu(), numbers(8, 4) * scale + 1)
    stats = step.stats()
    assert stats["calls"] == 2


def test_the_same_seed_gives_the_same_numbers(runtime: Runtime) -> None:
    payload = runtime.put(torch.zeros(64), layout_of((None,)))
    draws = []
    for seed in (1, 1, 2):
        runtime.manual_seed(seed)
        draws.append(runtime.to_host(torch.rand_like(payload)))
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert draws[0].min() >= 0
    assert draws[0].max() < 1
