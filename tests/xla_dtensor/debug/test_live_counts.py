"""What each module communicates in a step that runs here."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import xla_dtensor as xd
from tests.xla_dtensor import trained_steps
from xla_dtensor.debug.explain import comm_counts
from xla_dtensor.errors import ArgumentTypeError
from xla_dtensor.plan.live import evidence_of, report_of
from xla_dtensor.runtimes import Runtime

pytestmark = pytest.mark.usefixtures("runtime")


class Block(nn.Module):
    """A Megatron MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 32, bias=False)
        self.down = nn.Linear(32, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """Two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture(scope="module")
def trained(mesh: xd.DeviceMesh) -> xd.CompiledStep:
    """A training step of the net, after two calls."""
    plan = {"layers.*.up.weight": ["tp", None], "layers.*.down.weight": [None, "tp"]}
    return trained_steps.trained(mesh, plan, Net(), momentum=0)[1]


def test_sums_are_the_reports(mesh: xd.DeviceMesh, trained: xd.CompiledStep) -> None:
    counts, report = comm_counts(trained, mesh), report_of(trained, mesh)
    assert counts.get_total_bytes() == report.collective_bytes > 0
    assert counts.get_total_counts() == sum(line.executions for line in report.collectives)
    assert comm_counts(report).get_comm_counts() == counts.get_comm_counts()
    assert comm_counts(evidence_of(trained, mesh)).root == counts.root


def test_modules_and_phases(
    runtime: Runtime, mesh: xd.DeviceMesh, trained: xd.CompiledStep
) -> None:
    counts = comm_counts(trained, mesh)
    if runtime.name == "torch_xla":  # Its programs name no modules, and the table says so.
        assert set(counts.comm_module_counts) == {"Global"}
        assert "torch_xla's never do" in str(counts)
        return
    # The Megatron pattern: one sum over tp forward in each down, and one backward in each up but
    # the first, whose input needs no gradient. Gradients of both weights are summed over dp.
    for layer in range(2):
        down, up = (counts.module(f"layers.{layer}.{name}") for name in ("down", "up"))
        assert down is not None
        assert up is not None
        forward = [(e.kind, e.axes, e.bytes) for e in down.entries() if e.phase == "forward"]
        assert forward == [("all-reduce", "tp", 4 * 16 * 4)]
        backward = {(e.axes, e.bytes) for e in up.entries() if e.phase == "backward"}
        assert backward == {("dp", 8 * 16 * 4), *([("tp", 4 * 16 * 4)] if layer else [])}
        assert not [e for e in up.entries() if e.phase == "forward"]


def test_refusals() -> None:
    with pytest.raises(ArgumentTypeError, match="of type=int"):
        comm_counts(3)  # type: ignore[arg-type]
