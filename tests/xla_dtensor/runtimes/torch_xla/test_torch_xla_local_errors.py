"""What local views on torch_xla refuse, and how they say so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from mesh_utils import Mesh
from tests.xla_dtensor.runtimes.torch_xla.torch_xla_locals import (
    REFUSED,
    TABLE,
    localized,
    on_devices,
)
from tests.xla_dtensor.runtimes.torch_xla.torch_xla_tiles import MESH, layout
from xla_dtensor.core import ManualRegion
from xla_dtensor.errors import DistributeError, LocalViewError, UnsupportedOpError
from xla_dtensor.runtimes.base import Runtime

pytest.importorskip("torch_xla")
pytestmark = pytest.mark.only_on("torch_xla")

WHOLE = ManualRegion.over(MESH)


def numbers(region: ManualRegion, *shape: int) -> torch.Tensor:
    return torch.randn(*region.sizes, *shape, generator=torch.Generator().manual_seed(0))


def test_reading_inside_is_refused(runtime: Runtime) -> None:
    x = localized(runtime, numbers(WHOLE, 4), WHOLE)
    for call in (lambda: x[0].item(), lambda: bool(x[0] > 0)):
        with pytest.raises(UnsupportedOpError, match=r"_local_scalar_dense.*shapes=\[\(\)\]"):
            call()


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_local_is_refused(runtime: Runtime, name: str) -> None:
    host = numbers(WHOLE, 8, 8)
    x = localized(runtime, host, WHOLE)
    text = r"was called on a local view, with shapes=\[\(8.*on the host, or has no rule"
    with pytest.raises(UnsupportedOpError, match=text):
        REFUSED[name](x)
    assert torch.equal(on_devices(runtime, x, WHOLE), host)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x[x > 0],
        lambda x: x[x[0] > 0],
        lambda x: x.nonzero(),
        lambda x: x.masked_select(x > 0),
        lambda x: x.unique(),
        lambda x: x.argmax(-1).bincount(),
        lambda x: x.index_put((x > 0,), TABLE[0]),
    ],
)
def test_shapes_that_depend_on_values_are_refused(runtime: Runtime, call: Any) -> None:
    x = localized(runtime, numbers(WHOLE, 8, 8), WHOLE)
    with pytest.raises(UnsupportedOpError, match=r"depends on the values.*torch\.where"):
        call(x)


@pytest.mark.parametrize("axes", [("dp", "tp"), ("tp",)])
def test_a_class_that_is_out_of_range_has_no_loss(runtime: Runtime, axes: tuple[str, ...]) -> None:
    region = ManualRegion.over(MESH, axes)
    x = localized(runtime, numbers(region, 4, 8), region)
    classes = torch.tensor([0, 7, 8, -3]).expand(*region.sizes, 4)
    target = localized(runtime, classes, region)
    losses = on_devices(runtime, F.cross_entropy(x, target, reduction="none"), region)
    assert torch.equal(losses.isnan(), classes.ne(0) & classes.ne(7))
    assert on_devices(runtime, F.cross_entropy(x, target), region).isnan().all()


def test_a_mask_of_another_shape_is_refused(runtime: Runtime) -> None:
    x = localized(runtime, numbers(WHOLE, 8, 8), WHOLE)
    with pytest.raises(IndexError, match=r"mask \[4\] at index 0 .* tensor \[8, 8\] at index 0"):
        x[x[:4, 0] > 0] = 1.0


@pytest.mark.parametrize("call", [torch.zeros_like, torch.ones_like, torch.empty_like])
def test_copies_of_another_device_are_refused(runtime: Runtime, call: Any) -> None:
    x = localized(runtime, numbers(WHOLE, 8, 8), WHOLE)
    with pytest.raises(UnsupportedOpError, match="cannot run it on each device by itself"):
        call(x, device="cpu")


def test_writing_into_host_tensors_is_refused(runtime: Runtime) -> None:
    x = localized(runtime, numbers(WHOLE, 4), WHOLE)
    for call in (lambda: torch.zeros(4).add_(x), lambda: torch.add(x, 1, out=torch.zeros(4))):
        with pytest.raises(LocalViewError, match=r"shape=\(4,\) that is none.*Write into"):
            call()


def test_wrong_shapes_say_those_of_one_device(runtime: Runtime) -> None:
    x = localized(runtime, numbers(WHOLE, 4, 3), WHOLE)
    with pytest.raises((RuntimeError, ValueError), match=r"\[?4, ?3\]?"):
        torch.add(x, x.t())
    with pytest.raises(RuntimeError, match="shape"):
        x.view(5, 5)


def test_payloads_of_others_are_refused(runtime: Runtime) -> None:
    region, other = ManualRegion.over(MESH, ["tp"]), WHOLE
    x = localized(runtime, numbers(region, 4), region).payload
    whole = runtime.put(torch.zeros(2, 4), layout(MESH, None, None))
    with pytest.raises(LocalViewError, match=r"one over axes=\('tp',\)"):
        runtime.leave_local(x, layout(MESH, "tp"), other)
    with pytest.raises(LocalViewError, match=r"shape=\(2, 4\) given, which is none"):
        runtime.local_collective("all_reduce", whole, other, ("tp",), op="sum")
    with pytest.raises(DistributeError, match=r"shape=\(2, 4\).*Pad it first"):
        runtime.enter_local(whole, layout(MESH, "tp", None), other)
    with pytest.raises(UnsupportedOpError, match=r"all 8 devices.*over all of them"):
        runtime.enter_local(whole, layout(MESH["tp"], None, "tp"), ManualRegion.over(MESH["tp"]))
    few = Mesh.arange((4,), ("x",))
    with pytest.raises(DistributeError, match=r"devices 0\.\.7"):
        runtime.enter_local(whole, layout(few, None, "x"), ManualRegion.over(few))
    assert repr(x) == "LocalPayload(shape=(4,), dtype=torch.float32)"
