"""The compiled program says of each op which module and which line of the model it is of."""

from __future__ import annotations

import inspect
import re
import sys

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.utils.checkpoint import checkpoint

import xla_dtensor as xd
from xla_dtensor.report.finding import origin_of
from xla_dtensor.report.hlo import HloModule, SourceLine, StackFrames
from xla_dtensor.runtimes import Runtime

pytestmark = [pytest.mark.only_on("jax"), pytest.mark.usefixtures("runtime")]


class Inner(nn.Module):
    """Two lines, each with a product of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.second = nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).sin()  # the first line
        return self.second(x)  # the second line


class Outer(nn.Module):
    """A list of two of them, the last one computed again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Inner(), Inner()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        again = checkpoint(self.layers[1], x, use_reentrant=False)
        assert isinstance(again, torch.Tensor)
        return again


def line_of(text: str) -> int:
    lines, first = inspect.getsourcelines(sys.modules[__name__])
    return next(n for n, line in enumerate(lines, max(first, 1)) if f"# {text}" in line)


@pytest.fixture(scope="module")
def products(runtime: Runtime, mesh: xd.DeviceMesh) -> dict[tuple[str, str | None], set[int]]:
    """The lines of this file that products come from, by phase and module."""
    torch.manual_seed(0)
    model = Outer()
    for name, parameter in list(model.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        placed = xd.distribute_tensor(parameter.data, mesh, [Replicate(), Shard(0)])
        setattr(model.get_submodule(owner), leaf, nn.Parameter(placed))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()  # the update
        optimizer.zero_grad()
        return loss

    compiled = xd.compile(step)
    x = xd.distribute_tensor(torch.ones(8, 16), mesh, [Shard(0), Replicate()])
    for _ in range(2):
        compiled(x)
    return lines_by_origin(compiled.hlo())


def lines_by_origin(hlo: str) -> dict[tuple[str, str | None], set[int]]:
    frames = StackFrames.parse(hlo.splitlines())
    found: dict[tuple[str, str | None], set[int]] = {}
    for computation in HloModule.parse(hlo).computations.values():
        for instruction in computation.instructions.values():
            name = re.search(r'op_name="([^"]*)"', instruction.rest)
            frame = re.search(r"stack_frame_id=(\d+)", instruction.rest)
            if name is None or frame is None:
                continue
            source: tuple[SourceLine, ...] = frames.stack(int(frame[1]))
            origin = origin_of(name[1], source)
            if source and source[0].file == __file__:
                found.setdefault((origin.phase, origin.module), set()).add(source[0].line)
    return found


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize(
    ("leaf", "text"), [("first", "the first line"), ("second", "the second line")]
)
def test_each_product_is_on_its_line(
    products: dict[tuple[str, str | None], set[int]], phase: str, leaf: str, text: str
) -> None:
    for layer in (0, 1):
        module = f"layers.{layer}.{leaf}"
        assert line_of(text) in products[phase, module], sorted(products)


def test_the_backward_is_on_no_line_of_its_own(
    products: dict[tuple[str, str | None], set[int]],
) -> None:
    allowed = {line_of("the first line"), line_of("the second line")}
    for (phase, module), lines in products.items():
        if phase == "backward" and (module or "").startswith("layers.0"):
            assert lines <= allowed, (module, lines)


def test_the_optimizer_is_on_its_line(products: dict[tuple[str, str | None], set[int]]) -> None:
    lines = {
        line for (phase, _), found in products.items() if phase == "optimizer" for line in found
    }
    assert lines == {line_of("the update")}


def test_frames_of_torch_and_of_ours_are_left_out(
    products: dict[tuple[str, str | None], set[int]],
) -> None:
    assert {phase for phase, _ in products} >= {"forward", "backward", "optimizer"}
