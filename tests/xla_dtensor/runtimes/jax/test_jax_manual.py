"""Manual regions on the JAX runtime: every device's own tile, and what passes between them."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

import xla_dtensor as xd
from tests.xla_dtensor.runtimes.manual_regions import COLLECTIVE, MESHES, ROOT, Region, groups
from xla_dtensor.core import Layout, ManualRegion
from xla_dtensor.errors import CompileError, ManualRegionError, UnsupportedOpError
from xla_dtensor.runtimes import Runtime

FOREACH: Any = torch
SUPPRESSED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
pytestmark = pytest.mark.only_on("jax")


@pytest.fixture(params=list(MESHES))
def whole(request: pytest.FixtureRequest, runtime: Runtime) -> Region:
    return Region(runtime, MESHES[request.param])


@pytest.fixture
def region(runtime: Runtime) -> Region:
    return Region(runtime, ROOT)


# ---------------------------------------------------------------------- the border


def test_each_device_gets_its_own_tile(whole: Region) -> None:
    axes = whole.region.axes
    x = torch.arange(8.0 * 16).reshape(8, 16)
    spec = (axes[-1], axes[:-1] or None)
    manual = whole.enter(x, *spec)
    layout = whole.layout(*spec, ndim=2)
    assert tuple(manual.shape) == whole.region.tile_shape(layout, x.shape)
    stacked = manual._storage.array
    sharding, root = layout.op_sharding(ROOT), ROOT.device_ids.ravel().tolist()
    for shard in stacked.addressable_shards:
        # The oracle: what a plain tensor of this layout has on that device.
        index = sharding.shard_index(root.index(shard.device.id), (8, 16))
        np.testing.assert_array_equal(np.asarray(shard.data).reshape(manual.shape), x[index])
    assert torch.equal(whole.leave(manual, *spec), x)


def test_leaving_gives_the_sharding_that_was_asked_for(whole: Region) -> None:
    axes = whole.region.axes
    left = whole.left(whole.enter(torch.ones(8, 3), axes, None), axes, None)
    assert whole.runtime.op_sharding(left) == whole.layout(axes, None).op_sharding(ROOT)


def test_a_tensor_is_copied_along_axes_without_a_place(region: Region) -> None:
    x = torch.arange(12.0).reshape(4, 3)
    manual = region.enter(x, "tp", None)
    assert tuple(manual.shape) == (1, 3)
    rows = region.gather(manual)
    assert torch.equal(rows, torch.cat([x[:, None], x[:, None]]))


def test_the_source_stays_as_it_is(region: Region) -> None:
    payload: Any = region.runtime.put(torch.ones(8), region.layout(None))
    manual = region.runtime.enter_manual(payload, region.layout("tp"), region.region)
    region.run("mul_.Scalar", manual, 3)
    assert torch.equal(payload.host(), torch.ones(8))


def test_parts_of_an_axis_cross_the_border(region: Region) -> None:
    layout = Layout.parse("[tp/2%2.dp.tp%2, -]", ROOT)
    payload = region.runtime.put(torch.arange(16.0).reshape(8, 2), Layout.replicated(ROOT, 2))
    manual = region.runtime.enter_manual(payload, layout, region.region)
    positions = [int(layout.op_sharding().shard_index(i, (8, 2))[0].start) for i in range(8)]
    assert region.gather(manual)[:, 0, 0].tolist() == [2.0 * p for p in positions]
    back = region.runtime.leave_manual(manual, layout, region.region)
    assert torch.equal(region.runtime.to_host(back), torch.arange(16.0).reshape(8, 2))


def test_leaving_another_region_is_refused(region: Region) -> None:
    manual = region.enter(torch.ones(8), "tp")
    other = ManualRegion.over(ROOT, ["tp"])
    with pytest.raises(ManualRegionError, match="It is not in that region"):
        region.runtime.leave_manual(manual, region.layout("tp"), other)


# ---------------------------------------------------------------------- ops


def _set_items(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[1:3] = x[0:2] * 2
    x[0] = 5.0
    x[:, -1].add_(1)
    return x


def _adam(x: torch.Tensor) -> torch.Tensor:
    mean, square = torch.zeros_like(x), torch.zeros_like(x)
    FOREACH._foreach_lerp_([mean], [x], 0.1)
    FOREACH._foreach_addcmul_([square], [x], [x], 0.01)
    return FOREACH._foreach_addcdiv([x], [mean], [square.sqrt() + 1e-3], -0.02)[0]


_INDEX = torch.tensor([[0, 2, 1, 1, 0], [3, 3, 0, 1, 2], [1, 0, 2, 3, 1], [2, 1, 3, 0, 3]])
OPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "pointwise": lambda x: torch.where(x > 2, x.exp(), -x) + 0.5,
    "topk": lambda x: x.topk(2, -1)[0],
    "sort": lambda x: x.sort(0)[0],
    "argmax": lambda x: x.argmax(1),
    "cumsum": lambda x: x.cumsum(1),
    "matmul": lambda x: x @ x.T,
    "linear": lambda x: F.linear(x, torch.arange(10.0).reshape(2, 5), torch.ones(2)),
    "softmax": lambda x: x.softmax(-1),
    "layer_norm": lambda x: F.layer_norm(x, (5,)),
    "sdpa": lambda x: F.scaled_dot_product_attention(
        x[None, None], x[None, None], x[None, None], is_causal=True
    ),
    "gather": lambda x: x.gather(0, _INDEX),
    "scatter": lambda x: x.scatter(0, _INDEX, 9.0),
    "scatter_add": lambda x: x.scatter_add(0, _INDEX, x * 2),
    "index_select": lambda x: x.index_select(1, torch.tensor([4, 0])),
    "index by tensors": lambda x: x[torch.tensor([1, 2]), torch.tensor([0, 4])],
    "set items": _set_items,
    "masked_fill": lambda x: x.masked_fill(x > 3, -1.0),
    "diagonal": lambda x: x.diagonal() * 2,
    "as_strided": lambda x: x.as_strided((2, 2), (6, 1)).contiguous(),
    "unbind": lambda x: x.unbind(1)[1] + x.split([2, 3], 1)[1][:, 0],
    "cat": lambda x: torch.cat([x, x.flip(0)], 1),
    "roll": lambda x: x.roll(1, 0),
    "std": lambda x: x.std(1),
    "norm": lambda x: torch.linalg.vector_norm(x, 2, 0),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "to int64": lambda x: x.to(torch.int64) << 40,
    "bfloat16": lambda x: (x.to(torch.bfloat16) * 0.3).float(),
    "factories": lambda x: torch.zeros_like(x) + x.new_ones(5),
    "optimizer": _adam,
    "in place": lambda x: x.clone().mul_(0.25).add_(x, alpha=0.5).t_(),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", list(OPS))
def test_an_op_acts_on_each_tile(name: str, region: Region) -> None:
    values = region.stacked(4, 5)
    found = region.gather(OPS[name](region.scatter(values)))
    expected = torch.stack([OPS[name](row) for row in values])
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected)


@pytest.mark.thorough
@pytest.mark.parametrize("name", list(OPS))
def test_an_op_communicates_nothing(name: str, region: Region) -> None:
    def step(x: Any) -> Any:
        manual = region.runtime.enter_manual(
            x._local_tensor, region.layout(("dp", "tp"), None), region.region
        )
        result = OPS[name](manual)
        result = result if result.ndim else result[None]
        return region.left(result, ("dp", "tp"))

    mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
    values = region.stacked(4, 5)
    x = xd.distribute_tensor(values.reshape(32, 5), mesh, (("dp", "tp"), "None"))
    compiled: Any = xd.compile(step)
    found = compiled(x).host()
    expected = torch.cat([OPS[name](row) for row in values])
    torch.testing.assert_close(found, expected)
    assert not COLLECTIVE.findall(compiled.hlo())


@settings(max_examples=15, deadline=None, suppress_health_check=SUPPRESSED)
@given(
    st.integers(0, 2),
    st.lists(st.sampled_from([0, 1, 2]), min_size=1, max_size=3),
    st.sampled_from([torch.float32, torch.bool, torch.int8, torch.int64, torch.float16]),
)
def test_chains_of_views_read_and_write(
    runtime: Runtime, start: int, chain: list[int], dtype: torch.dtype
) -> None:
    region = Region(runtime, ROOT)
    views: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: x.transpose(0, -1),
        lambda x: x[start : start + 1],
        lambda x: x.unsqueeze(0),
    ]

    def written(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        view = x
        for number in chain:
            view = views[number](view)
        if view.numel():
            view.copy_(torch.ones(()).to(dtype))
        return x

    values = region.stacked(3, 3, dtype=dtype)
    found = region.gather(written(region.scatter(values)))
    assert torch.equal(found, torch.stack([written(row) for row in values]))


def test_a_learning_rate_makes_no_new_program(region: Region) -> None:
    from xla_dtensor.runtimes.jax.eager import manual as jax_manual

    x = region.scatter(region.stacked(3))
    region.gather(x.mul(0.5).add(x, alpha=0.25))
    before = len(jax_manual._programs)
    for rate in (0.1, 0.2, 0.3):
        expected = region.stacked(3).mul(rate).add(region.stacked(3), alpha=rate / 2)
        assert torch.equal(region.gather(x.mul(rate).add(x, alpha=rate / 2)), expected)
    assert len(jax_manual._programs) == before


def test_each_device_draws_its_own_numbers(region: Region) -> None:
    x = region.scatter(torch.ones(8, 64))
    torch.manual_seed(3)
    first = region.gather(torch.rand_like(x))
    torch.manual_seed(3)
    assert torch.equal(first, region.gather(torch.rand_like(x)))
    assert len({tuple(row.tolist()) for row in first}) == 8
    kept = region.gather(F.dropout(x, 0.5))
    assert set(kept.unique().tolist()) == {0.0, 2.0}
    assert len({tuple(row.tolist()) for row in kept}) == 8


def test_a_compiled_step_draws_anew_in_each_call(region: Region) -> None:
    def step(x: Any) -> Any:
        manual = region.runtime.enter_manual(x._local_tensor, region.layout("tp"), region.region)
        return region.left(torch.rand_like(manual)[None], ("dp", "tp"))

    mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
    compiled: Any = xd.compile(step)
    x = xd.distribute_tensor(torch.ones(64), mesh, [Replicate(), Shard(0)])
    rows = [tuple(row.tolist()) for _ in range(3) for row in compiled(x).host()]
    assert len(set(rows)) == 24
    assert compiled.stats()["traces"] == 1


# ---------------------------------------------------------------------- some axes only


def test_the_other_axes_stay_xla_s(runtime: Runtime) -> None:
    region = Region(runtime, ROOT, ["tp"])
    weight = torch.randn(16, 8)

    def step(x: Any, w: Any) -> Any:
        tile = runtime.enter_manual(x._local_tensor, region.layout(None, None, "tp"), region.region)
        rows = runtime.enter_manual(w._local_tensor, region.layout("tp", None), region.region)
        part = torch.matmul(tile, rows).softmax(-1)
        whole: Any = runtime.manual_collective("all_reduce", part, region.region, ("tp",), op="sum")
        return x.rewrapped(region.left(whole, None, None, None))

    mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
    x = torch.randn(4, 6, 16)
    dx = xd.distribute_tensor(x, mesh, ("dp", "None", "tp"))
    dw = xd.distribute_tensor(weight, mesh, ("tp", "None"))
    compiled: Any = xd.compile(step)
    found = compiled(dx, dw)
    expected = sum(
        torch.matmul(x[..., i : i + 4], weight[i : i + 4]).softmax(-1) for i in range(0, 16, 4)
    )
    torch.testing.assert_close(found.cpu(), expected)
    # Each device keeps its half of the batch, all the way: nothing is gathered or exchanged over
    # dp, the product is of half the batch, and the result still lies so.
    hlo = compiled.hlo()
    assert Counter(COLLECTIVE.findall(hlo)) == {"all-reduce": 1}
    assert "f32[2,6,8]" in hlo
    assert "f32[4,6,8]" not in hlo
    assert found._local_tensor._storage.array.sharding.shard_shape((4, 6, 8)) == (2, 6, 8)
    # The same without a step.
    eager = step(dx, dw)
    torch.testing.assert_close(eager.cpu(), expected)
    assert eager._local_tensor._storage.array.sharding.shard_shape((4, 6, 8)) == (2, 6, 8)


@pytest.mark.thorough
@pytest.mark.parametrize("name", list(OPS))
def test_with_some_axes_manual_nothing_passes_over_them(name: str, runtime: Runtime) -> None:
    region = Region(runtime, ROOT, ["tp"])
    # Plain JAX 0.10 on CPU gets a.at[1:3].set(a[:2] * 2).at[0].set(5) wrong where the rows of a are
    # sharded, without any region.
    rows = "None" if name == "set items" else "dp"

    def step(x: Any) -> Any:
        manual = runtime.enter_manual(x._local_tensor, region.layout(None, "tp"), region.region)
        return region.left(OPS[name](manual)[None], "tp")

    mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
    values = region.stacked(4, 5)
    x = xd.distribute_tensor(torch.cat(list(values), 1), mesh, (rows, "tp"))
    compiled: Any = xd.compile(step)
    found = compiled(x).host()
    torch.testing.assert_close(found, torch.stack([OPS[name](row) for row in values]))
    # Over dp XLA may communicate, where an op goes along a dim that it has sharded.
    for members in groups(compiled.hlo()):
        assert len({member % 4 for member in members}) == 1


@pytest.mark.parametrize("name", ["matmul", "topk", "set items", "cumsum", "optimizer"])
def test_ops_with_some_axes_manual(name: str, runtime: Runtime) -> None:
    region = Region(runtime, ROOT, ["dp"])
    values = region.stacked(4, 5)
    found = region.gather(OPS[name](region.scatter(values)))
    torch.testing.assert_close(found, torch.stack([OPS[name](row) for row in values]))


# ---------------------------------------------------------------------- what is refused


def test_a_manual_tensor_has_no_one_value(region: Region) -> None:
    manual = region.scatter(region.stacked(2, 3))
    runtime = region.runtime
    reads: list[Callable[[], Any]] = [
        manual.host,
        manual.cpu,
        manual.numpy,
        manual.tolist,
        manual.value,
        lambda: manual.sum().item(),
        lambda: bool(manual.sum() > 0),
        lambda: torch.equal(manual, manual),
        lambda: torch.allclose(manual, manual),
        lambda: runtime.to_host(manual),
        lambda: runtime.op_sharding(manual),
        lambda: runtime.op_sharding(manual[0]),
        lambda: runtime.addressable_shards(manual),
        lambda: runtime.constrain(manual, region.layout("dp", None)),
        lambda: runtime.enter_manual(manual, region.layout(None, None), region.region),
        lambda: torch.ones(2, 3).copy_(manual),
    ]
    for read in reads:
        with pytest.raises(ManualRegionError, match=r"Call disable_manual_sharding first"):
            read()


def test_mixing_is_refused(runtime: Runtime) -> None:
    region, other = Region(runtime, ROOT), Region(runtime, ROOT, ["tp"])
    manual = region.scatter(region.stacked(3))
    tensor = runtime.put(torch.ones(3), region.layout(None))
    with pytest.raises(ManualRegionError, match=r"aten.add.Tensor .* shape=\(3,\) that is global"):
        manual.add(tensor)
    with pytest.raises(ManualRegionError, match="that is in another region"):
        manual.add(other.scatter(other.stacked(3)))
    with pytest.raises(ManualRegionError, match="disable_manual_sharding"):
        tensor.copy_(manual)
    with pytest.raises(ManualRegionError, match="is global"):
        manual.copy_(tensor)


def test_shapes_that_depend_on_values_are_refused(region: Region) -> None:
    manual = region.scatter(region.stacked(3))
    with pytest.raises(UnsupportedOpError, match="depends on values, which differ between the dev"):
        manual[manual > 2]


def test_copies_stay_manual(region: Region) -> None:
    values = region.stacked(3)
    manual = region.scatter(values)
    copied = copy.deepcopy(manual)
    manual.zero_()
    assert torch.equal(region.gather(copied), values)


def test_a_compiled_step_takes_and_returns_no_manual_tensor(region: Region) -> None:
    manual = region.scatter(region.stacked(3)).clone()
    identity: Any = xd.compile(lambda x: x)
    with pytest.raises(CompileError, match=r"called with a manual .* Call disable_manual_sharding"):
        identity(manual)
    mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
    x = xd.distribute_tensor(torch.ones(8), mesh, ("tp",))
    entering: Any = xd.compile(
        lambda x: region.runtime.enter_manual(x._local_tensor, region.layout("tp"), region.region)
    )
    with pytest.raises(CompileError, match="about to return a manual tensor of shape=\\(2,\\)"):
        entering(x)


def test_a_manual_tensor_s_wrapper_answers_for_it(region: Region) -> None:
    class Wrapper(torch.Tensor):
        _is_per_device = True

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            return "answered"

    payload: Any = region.runtime.put(torch.ones(3), region.layout(None))
    wrapper = torch.Tensor._make_wrapper_subclass(Wrapper, (3,))
    assert (
        type(payload).__torch_dispatch__(
            torch.ops.aten.add.Tensor, (type(payload), Wrapper), (payload, wrapper)
        )
        is NotImplemented
    )
