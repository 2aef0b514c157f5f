"""Manual regions on torch_xla, on 8 CPU devices: the way in and out, and every error."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from itertools import permutations
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from mesh_utils import Mesh
from tests.xla_dtensor.runtimes.torch_xla.torch_xla_tiles import (
    DTYPES,
    MESH,
    MESHES,
    Tiles,
    aten,
    layout,
    on_each,
    op,
    region,
    spread,
    stacked,
    values,
)
from xla_dtensor.core import LayoutError, ManualRegion
from xla_dtensor.errors import DistributeError, ManualRegionError, UnsupportedOpError
from xla_dtensor.runtimes.base import Runtime

pytest.importorskip("torch_xla")
pytestmark = pytest.mark.only_on("torch_xla")


@pytest.fixture(params=MESHES)
def any_mesh(request: pytest.FixtureRequest) -> Mesh:
    return MESHES[request.param]


def entries_of_two_dims(mesh: Mesh) -> Iterator[tuple[Any, Any]]:
    for count in range(mesh.ndim + 1):
        for order in permutations(mesh.axis_names, count):
            for cut in range(count + 1):
                yield order[:cut] or None, order[cut:] or None


def tile_of(mesh: Mesh, host: torch.Tensor, entries: tuple[Any, Any], at: Any) -> torch.Tensor:
    """What lies at the coordinates `at`, counted by hand: outer axes first."""
    for dim, entry in enumerate(entries):
        for axis in entry or ():
            place = mesh.axis_index(axis)
            host = host.chunk(mesh.mesh_shape[place], dim)[at[place]]
    return host


def test_tiles_and_way_back(runtime: Runtime, any_mesh: Mesh) -> None:
    host = values(16, 24)
    source = runtime.put(host, layout(any_mesh, None, None))
    cases = list(entries_of_two_dims(any_mesh))
    assert len(cases) >= 3
    tiles, back, layouts = [], [], [layout(any_mesh, *entries) for entries in cases]
    for asked in layouts:
        manual = runtime.enter_manual(source, asked, region(any_mesh))
        assert tuple(manual.shape) == region(any_mesh).tile_shape(asked, host.shape)
        tiles.append(stacked(runtime, any_mesh, manual))
        back.append(runtime.leave_manual(manual, asked, region(any_mesh)))
    coordinates = torch.cartesian_prod(*map(torch.arange, any_mesh.mesh_shape)).reshape(8, -1)
    for entries, found, returned, asked in zip(cases, tiles, back, layouts, strict=True):
        for tile, at in zip(runtime.to_host(found), coordinates.tolist(), strict=True):
            assert torch.equal(tile, tile_of(any_mesh, host, entries, at)), entries
        assert torch.equal(runtime.to_host(returned), host)
        assert runtime.op_sharding(returned) == asked.op_sharding(runtime.root(any_mesh))
    # Its source has been annotated by no one.
    assert runtime.op_sharding(source).kind == "replicated"


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16, torch.uint8, torch.complex64])
def test_dtypes_cross(runtime: Runtime, dtype: torch.dtype) -> None:
    asked = layout(MESH, "tp", ("dp",))
    host = values(8, 8, dtype=torch.bool).to(dtype)
    manual = runtime.enter_manual(runtime.put(host, asked), asked, region(MESH))
    assert (manual.dtype, tuple(manual.shape)) == (dtype, (2, 4))
    returned = runtime.to_host(runtime.leave_manual(manual, asked, region(MESH)))
    assert returned.dtype == dtype
    assert torch.equal(returned, host)


@pytest.mark.parametrize(
    ("shape", "entries"),
    [
        ((), ()),
        ((0, 8), ("dp", "tp")),
        ((8, 0), ("dp", "tp")),
        ((2, 1, 4, 1, 1, 3), ("dp", None, "tp", None, None, None)),
    ],
)
def test_shapes_cross(runtime: Runtime, shape: tuple[int, ...], entries: tuple[Any, ...]) -> None:
    asked, host = layout(MESH, *entries), values(*shape)
    manual = runtime.enter_manual(runtime.put(host, asked), asked, region(MESH))
    assert tuple(manual.shape) == region(MESH).tile_shape(asked, shape)
    returned = runtime.leave_manual(op(runtime, aten.mul.Tensor, manual, 2), asked, region(MESH))
    assert torch.equal(runtime.to_host(returned), host * 2)
    assert runtime.op_sharding(returned) == asked.op_sharding(runtime.root(MESH))


def test_axes_of_size_one_need_not_be_manual(runtime: Runtime) -> None:
    mesh = Mesh.arange((1, 8), ("one", "x"))
    partly = ManualRegion.over(mesh, ["x"])
    asked, host = layout(mesh, "x"), values(16)
    manual = runtime.enter_manual(runtime.put(host, asked), asked, partly)
    summed = runtime.manual_collective("all_reduce", manual, partly, ("x",), op="sum")
    returned = runtime.leave_manual(summed, layout(mesh, None), partly)
    assert torch.equal(runtime.to_host(returned), host.reshape(8, 2).sum(0))


# ---------------------------------------------------------------------- errors


def manual_tensor(runtime: Runtime) -> torch.Tensor:
    return spread(runtime, MESH, values(2, 4, 4, 4))


def test_partial_regions_are_refused(runtime: Runtime) -> None:
    x, asked = runtime.put(values(8, 8), layout(MESH, "tp", None)), layout(MESH, "tp", None)
    partly, manual = ManualRegion.over(MESH, ["tp"]), manual_tensor(runtime)
    text = r"axes=\('tp',\).*dp=2, tp=4.*use the runtime 'jax'"
    for call in (
        lambda: runtime.enter_manual(x, asked, partly),
        lambda: runtime.leave_manual(manual, asked, partly),
        lambda: runtime.manual_collective("all_reduce", manual, partly, ("tp",), op="sum"),
        lambda: runtime.enter_manual(x, layout(MESH["tp"], "tp", None), region(MESH["tp"])),
    ):
        with pytest.raises(UnsupportedOpError, match=text):
            call()


def test_meshes_over_other_devices_are_refused(runtime: Runtime) -> None:
    few = Mesh.arange((4,), ("x",))
    x, manual = runtime.put(values(8), layout(MESH, None)), manual_tensor(runtime)
    for call in (
        lambda: runtime.enter_manual(x, layout(few, "x"), region(few)),
        lambda: runtime.leave_manual(manual, layout(few, "x", None), region(few)),
        lambda: runtime.manual_collective("all_gather", manual, region(few), ("x",), dim=0),
    ):
        with pytest.raises(DistributeError, match=r"devices 0\.\.7"):
            call()


def test_wrong_layouts_are_refused(runtime: Runtime) -> None:
    x, manual = runtime.put(values(10, 8), layout(MESH, None, None)), manual_tensor(runtime)
    with pytest.raises(DistributeError, match=r"shape=\(10, 8\).*dims \[0\].*Pad them"):
        runtime.enter_manual(x, layout(MESH, "tp", "dp"), region(MESH))
    other = MESHES["2d_permuted"]
    for call in (
        lambda: runtime.enter_manual(x, layout(other, None, "dp"), region(MESH)),
        lambda: runtime.leave_manual(manual, layout(other, None, "dp"), region(MESH)),
    ):
        with pytest.raises(LayoutError, match="other mesh"):
            call()
    for call in (
        lambda: runtime.enter_manual(x, layout(MESH, "dp"), region(MESH)),
        lambda: runtime.leave_manual(manual, layout(MESH, "dp"), region(MESH)),
    ):
        with pytest.raises(DistributeError, match="tensor's rank"):
            call()


def test_wrong_collectives_are_refused(runtime: Runtime) -> None:
    manual = manual_tensor(runtime)
    for name, options, error, text in (
        ("broadcast", {}, UnsupportedOpError, r"name='broadcast'.*'axis_index'"),
        ("all_reduce", {"op": "prod"}, UnsupportedOpError, r"op='prod'.*float32.*none of"),
        ("all_gather", {"dim": 2}, DistributeError, r"along dim=2.*shape=\(4, 4\).*has 2 dims"),
        ("reduce_scatter", {"dim": -3}, DistributeError, r"along dim=-3.*has 2 dims"),
        ("all_to_all", {"split_dim": 0, "concat_dim": 5}, DistributeError, "along dim=5"),
        ("permute", {"pairs": [(0, 4)]}, DistributeError, r"pairs=\[\(0, 4\)\] among 4.*0\.\.3"),
        ("permute", {"pairs": [(0, 1), (2, 1)]}, DistributeError, "receives from one"),
        ("permute", {"pairs": [(1, 0), (1, 2)]}, DistributeError, "sends to one"),
    ):
        with pytest.raises(error, match=text):
            runtime.manual_collective(name, manual, region(MESH), ("tp",), **options)
    odd = op(runtime, aten.slice.Tensor, manual, 0, 0, 3)
    for name, options in (
        ("reduce_scatter", {"dim": 0}),
        ("all_to_all", {"split_dim": 0, "concat_dim": 1}),
    ):
        with pytest.raises(DistributeError, match=r"4 devices.*shape=\(3, 4\).*no 4 equal blocks"):
            runtime.manual_collective(name, odd, region(MESH), ("tp",), **options)
    numbers = op(runtime, aten._to_copy.default, manual, dtype=torch.complex64)
    with pytest.raises(UnsupportedOpError, match="complex"):
        runtime.manual_collective("all_reduce", numbers, region(MESH), ("tp",), op="max")


def test_global_and_manual_do_not_mix(runtime: Runtime) -> None:
    """Each of these aborts in torch_xla, or mixes values of other devices in."""
    manual, asked = manual_tensor(runtime), layout(MESH, None, None)
    whole = runtime.put(values(4, 4), asked)
    for call in (
        lambda: op(runtime, aten.add.Tensor, manual, whole),
        lambda: op(runtime, aten.cat.default, [manual, whole]),
        lambda: op(runtime, aten.add_.Tensor, manual, whole),
        lambda: runtime.leave_manual(whole, asked, region(MESH)),
        lambda: runtime.manual_collective("all_gather", whole, region(MESH), ("tp",), dim=0),
    ):
        with pytest.raises(
            ManualRegionError, match=r"global tensor of shape=\(4, 4\).*as a manual"
        ):
            call()
    for call in (
        lambda: runtime.run_op(aten.add.Tensor, (whole, manual), {}),
        lambda: runtime.run_op(aten.cat.default, ([whole, manual],), {}),
        lambda: runtime.enter_manual(manual, asked, region(MESH)),
        lambda: runtime.constrain(manual, asked),
        lambda: runtime.annotate(manual, asked),
        lambda: runtime.clear_annotation(manual),
        lambda: runtime.op_sharding(manual),
        lambda: runtime.addressable_shards(manual),
        lambda: runtime.to_host(manual),
        lambda: runtime.to_plain(manual),
    ):
        with pytest.raises(ManualRegionError, match=r"manual tensor of shape=\(4, 4\).*global one"):
            call()
    with pytest.raises(
        ManualRegionError, match="write into a tensor of shape=\\(4, 4\\) that is none"
    ):
        op(runtime, aten.add_.Tensor, whole, manual)
    assert repr(manual) == "ManualPayload(shape=(4, 4), dtype=torch.float32)"
    # Nothing was lost.
    assert torch.equal(on_each(runtime, MESH, manual), values(2, 4, 4, 4))


@pytest.mark.parametrize(
    "read",
    [
        lambda x: aten._local_scalar_dense.default(x.sum()),
        lambda x: x.nonzero(),
        lambda x: torch.equal(x, x),
        lambda x: aten._to_copy.default(x, device=torch.device("cpu")),
        lambda x: torch.zeros(4, 4).copy_(x),
        lambda x: aten._foreach_copy_.default([torch.zeros(4, 4)], [x]),
        lambda x: torch.zeros(4, 4, device="xla").add_(x),
        lambda x: torch.add(x, x, out=torch.zeros(4, 4)),
        lambda x: x.unique(),
        lambda x: x[x > 0],
        lambda x: torch.linalg.qr(x),
        lambda x: F.interpolate(x.view(1, 4, 4), scale_factor=2),
        lambda x: x.bernoulli().multinomial(2),
    ],
)
def test_reading_is_refused(runtime: Runtime, read: Callable[[torch.Tensor], Any]) -> None:
    payload = manual_tensor(runtime)
    with pytest.raises(
        (ManualRegionError, UnsupportedOpError), match=r"called on a manual tensor.*Leave"
    ):
        read(Tiles(payload, runtime))
    assert torch.equal(on_each(runtime, MESH, payload), values(2, 4, 4, 4))


def test_a_sync_ends_manual_tensors(runtime: Runtime) -> None:
    asked, manual = layout(MESH, None, None), manual_tensor(runtime)
    kept = {
        "entered": manual,
        "result": op(runtime, aten.mul.Tensor, manual, 2),
        "view": op(runtime, aten.t.default, manual),
        "constant": op(runtime, aten.zeros_like.default, manual),
        "gathered": runtime.manual_collective("all_gather", manual, region(MESH), ("tp",), dim=0),
        "moved": runtime.manual_collective(
            "permute", manual, region(MESH), ("tp",), pairs=[(0, 1)]
        ),
    }
    op(runtime, aten.add_.Tensor, kept["view"], 1)
    runtime.synchronize()
    for name, payload in kept.items():
        for call in (
            lambda payload=payload: op(runtime, aten.add.Tensor, payload, 1),
            lambda payload=payload: op(runtime, aten.add_.Tensor, payload, 1),
            lambda payload=payload: runtime.leave_manual(payload, asked, region(MESH)),
            lambda payload=payload: runtime.manual_collective(
                "all_reduce", payload, region(MESH), ("tp",), op="sum"
            ),
        ):
            with pytest.raises(ManualRegionError, match=r"had been run.*within one step"):
                call()
        with pytest.raises(ManualRegionError, match="global one"):
            runtime.to_host(payload)
        assert repr(payload).startswith("ManualPayload("), name
    # The process goes on, with the spent tensors still alive.
    assert torch.equal(on_each(runtime, MESH, manual_tensor(runtime)), values(2, 4, 4, 4))


def test_steps_do_not_hand_manual_tensors_on(runtime: Runtime) -> None:
    compiled = runtime.compile(lambda payload: op(runtime, aten.add.Tensor, payload, 1))
    with pytest.raises(ManualRegionError, match="had been run"):
        compiled(manual_tensor(runtime))
    made = runtime.compile(lambda: manual_tensor(runtime))()
    with pytest.raises(ManualRegionError, match="had been run"):
        stacked(runtime, MESH, made)


def test_execution_is_allowed_again(runtime: Runtime) -> None:
    xlac: Any = importlib.import_module("torch_xla")._XLAC
    manual = manual_tensor(runtime)
    assert xlac._get_allow_execution()
    with pytest.raises(RuntimeError, match=r"shape|size"):
        op(runtime, aten.mm.default, manual, torch.ones(3, 3))
    assert xlac._get_allow_execution()
