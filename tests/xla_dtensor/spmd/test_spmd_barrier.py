"""apply_backward_optimization_barrier: gradients as without it, and a barrier in the program."""

# torch types .grad as optional and a module's attributes as tensors or modules.
# pyright: reportOptionalMemberAccess=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportReturnType=false
# pyright: reportIndexIssue=false, reportOptionalSubscript=false, reportOptionalIterable=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import nn

import xla_dtensor as xd
import xla_dtensor.spmd as xs
from xla_dtensor.runtimes import Runtime


def two_layers(mesh: xd.DeviceMesh | None) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    return model if mesh is None else xd.distribute_module(model, mesh)


def test_gradients_are_as_without_it(mesh: xd.DeviceMesh) -> None:
    ours, reference = two_layers(mesh), two_layers(None)
    for layer in ours:
        xs.apply_backward_optimization_barrier(layer)
    x = torch.randn(4, 8)
    for _ in range(2):
        ours(xd.distribute_tensor(x, mesh, None).requires_grad_()).square().sum().backward()
        reference(x).square().sum().backward()
    for p, wanted in zip(ours.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad.cpu(), wanted.grad)


def test_the_program_has_it(
    runtime: Runtime, mesh: xd.DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looked for before XLA optimises: on CPU it takes barriers out first of all."""
    for barrier in (False, True):
        layer = nn.Tanh()
        if barrier:
            xs.apply_backward_optimization_barrier(layer)
        x = xd.distribute_tensor(torch.ones(4, 8), mesh, None).requires_grad_()

        def gradient(x: Any, layer: nn.Module = layer) -> Any:
            return torch.autograd.grad(layer(x).square().sum(), x)[0]

        text = (jax_program if runtime.name == "jax" else torch_xla_program)(
            gradient, x, monkeypatch
        )
        assert ("barrier" in text) == barrier


def jax_program(step: Any, x: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    module: Any = importlib.import_module("xla_dtensor.runtimes.jax.compile.step")
    finish, seen = module.JaxCompiledStep._finish, []

    def note(self: Any, found: Any) -> Any:
        seen.append(str(found.program[0]))
        return finish(self, found)

    monkeypatch.setattr(module.JaxCompiledStep, "_finish", note)
    xd.compile(step)(x)
    return seen[0]


def torch_xla_program(step: Any, x: Any, _: pytest.MonkeyPatch) -> str:
    xlac = importlib.import_module("torch_xla")._XLAC
    return xlac._get_xla_tensors_hlo([xs.wrap_as_sharded_tensor(step(x)).global_tensor])


def test_a_module_without_device_tensors_is_left_alone(runtime: Runtime) -> None:
    layer = nn.Linear(4, 4)
    xs.apply_backward_optimization_barrier(layer)
    layer(torch.ones(2, 4, requires_grad=True)).sum().backward()
    assert torch.equal(layer.bias.grad, torch.full((4,), 2.0))
