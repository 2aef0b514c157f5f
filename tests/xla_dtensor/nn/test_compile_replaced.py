"""Tensors that Python replaces between two calls of a compiled step: the step uses the new ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import xla_dtensor as xd

STEPS = 6


class Scaled(nn.Module):
    """A linear layer and a buffer."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


def load(net: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def begin_anew(net: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state.clear()


def replace_one_moment(net: Any, optimizer: torch.optim.Optimizer) -> None:
    state = optimizer.state[net.linear.weight]
    state["exp_avg"] = state["exp_avg"] * 3


def replace_a_buffer(net: Any, optimizer: torch.optim.Optimizer) -> None:
    net.scale = net.scale * 2


def replace_a_parameter(net: Any, optimizer: torch.optim.Optimizer) -> None:
    # The optimizer goes on with the parameter that it knows, on both sides.
    net.linear.bias = nn.Parameter((net.linear.bias * 2).detach())


CHANGES = (load, begin_anew, replace_one_moment, replace_a_buffer, replace_a_parameter)


def trainer(net: nn.Module) -> tuple[Callable[[Any], torch.Tensor], torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-1)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = (net(x) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, optimizer


@pytest.mark.only_on("jax")
@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_a_step_uses_what_is_there(mesh: xd.DeviceMesh, change: Any) -> None:
    torch.manual_seed(0)
    plain = Scaled()
    net = xd.shard_module(copy.deepcopy(plain), mesh, {}, unmatched="replicate")
    (step, ours), (expected, theirs) = trainer(net), trainer(plain)
    compiled = xd.compile(step)
    for i in range(STEPS):
        x = torch.randn(4, 8)
        found = compiled(xd.distribute_tensor(x, mesh)).item()
        assert found == pytest.approx(expected(x).item(), rel=1e-5)
        if i in (0, 2, 3):
            change(net, ours)
            change(plain, theirs)
