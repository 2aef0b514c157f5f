"""explain: what is said of placed, computed, padded and reported tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import xla_dtensor as xd
from xla_dtensor.debug.explain import explain, padding_words
from xla_dtensor.errors import ArgumentTypeError
from xla_dtensor.plan.live import report_of
from xla_dtensor.report import ReportError
from xla_dtensor.runtimes import Runtime

pytestmark = pytest.mark.usefixtures("runtime")
ROWS_ON_TP = [Replicate(), Shard(0)]


def placed(mesh: xd.DeviceMesh) -> Any:
    return xd.distribute_tensor(torch.ones(10, 6), mesh, ROWS_ON_TP)


def test_a_placed_tensor(mesh: xd.DeviceMesh) -> None:
    found = explain(placed(mesh))
    assert str(found).splitlines() == [
        "A float32 tensor of shape (10, 6) on the mesh (dp=2, tp=4).",
        "It is labelled (Replicate(), Shard(dim=0)), that is [tp, -]; it was placed so as asked.",
        "It lies as labelled: {devices=[4,1,2]<=[2,4]T(1,0) last_tile_dim_replicate}.",
        "A device holds (3, 6), 72 B of 240 B.",
        "Dim 0 of 10 in 4 blocks is padded to 12.",
        "To change it: dp copies it; Shard(1) on dp would leave 1/2 of it on each device.",
        "To change it: 12 in place of 10 along dim 0 needs no padding.",
    ]
    assert found.agrees is True


def test_a_computed_tensor_tells_its_op_and_rule(mesh: xd.DeviceMesh) -> None:
    w = placed(mesh)
    doubled = explain(w * 2)
    assert any("aten.mul.Tensor of (10, 6) [tp, -] made it" in line for line in doubled.asked)
    assert any("PyTorch's rule for this op" in line for line in doubled.asked)
    product = explain(w.t() @ w)
    assert "sum over tp is pending" in product.real
    assert product.agrees is None
    assert any("redistribute to Replicate()" in line for line in product.advice)
    copies = xd.distribute_tensor(torch.ones(4, 4), mesh)
    assert any("labelled as copies" in line for line in explain(copies + copies).asked)
    same = explain(w.detach())
    assert any("labelled as its argument" in line for line in same.asked)


def test_a_redistributed_tensor(mesh: xd.DeviceMesh) -> None:
    moved = placed(mesh).redistribute(placements=[Shard(1), Replicate()])
    found = explain(moved)
    assert "redistribute of (10, 6) [tp, -] made it, and it was placed so as asked" in str(found)
    assert found.agrees is True
    assert not found.held[1:]  # no padding


def test_what_xla_chose_otherwise_is_said(mesh: xd.DeviceMesh) -> None:
    """A label is not enforced: here the tensor is told otherwise behind its back."""
    x = xd.distribute_tensor(torch.ones(8, 8), mesh, ROWS_ON_TP)
    other = xd.distribute_tensor(torch.ones(8, 8), mesh, [Shard(0), Replicate()])
    lied = type(x)._wrapping(other._local_tensor, mesh, tuple(ROWS_ON_TP))
    found = explain(lied)
    assert found.agrees is False
    assert found.real.startswith("It does NOT lie as labelled: XLA chose {devices=[2,1,4]<=[8] ")
    assert "that is [dp, -]" in found.real
    assert "redistribute tells XLA how it is to lie." in found.advice
    assert found.held[0].startswith("A device holds (4, 8)")  # of how it lies, not of the label


@pytest.mark.only_on("jax")
def test_inside_and_after_a_compiled_step(mesh: xd.DeviceMesh) -> None:
    told: list[str] = []

    def step(x: Any) -> Any:
        y = x * 2
        told.append(str(explain(y)))
        return y

    result = xd.compile(step)(placed(mesh))
    assert "How it really lies is not known" in told[0]
    assert "aten.mul.Tensor" in str(explain(result))


def test_a_parameter_of_a_report(runtime: Runtime, mesh: xd.DeviceMesh) -> None:
    model = xd.shard_module(
        nn.Sequential(nn.Linear(6, 10, bias=False)), mesh, {"0.weight": ["tp", None]}
    )
    step = xd.compile(lambda x: model(x).sum())
    step(xd.distribute_tensor(torch.ones(4, 6), mesh))
    report = report_of(step, mesh, model)
    if runtime.name == "torch_xla":  # Its programs name no tensors.
        with pytest.raises(ReportError, match="names no tensors"):
            explain(report, "0.weight")
        return
    found = explain(report, "0.weight")
    assert found.what.startswith("0.weight (frozen parameter)") or "(parameter)" in found.what
    assert found.asked == ("Asked for was [tp, -].",)
    assert found.real == "The compiled program lays it out so."
    assert found.agrees is True
    assert "A device holds (3, 6), 72 B of 240 B." in found.held
    assert any("dp copies it" in line for line in found.advice)


def test_padding() -> None:
    assert padding_words((8, 6), (4, 6)) == []
    assert padding_words((0, 5), (0, 2)) == ["Dim 1 of 5 in 3 blocks is padded to 6."]


def test_refusals(mesh: xd.DeviceMesh) -> None:
    with pytest.raises(ArgumentTypeError, match="of type=Tensor"):
        explain(torch.ones(3))
    step = xd.compile(lambda x: x + 1)
    step(placed(mesh))
    with pytest.raises(ArgumentTypeError, match="no name"):
        explain(report_of(step, mesh))
