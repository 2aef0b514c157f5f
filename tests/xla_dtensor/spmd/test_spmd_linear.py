"""EinsumLinear and XLAPatchedLinear: nn.Linear's values and gradients, no dim flattened."""

# torch types .grad as optional and a module's attributes as tensors or modules.
# pyright: reportOptionalMemberAccess=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportReturnType=false
# pyright: reportIndexIssue=false, reportOptionalSubscript=false, reportOptionalIterable=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import xla_dtensor as xd
import xla_dtensor.spmd as xs
from xla_dtensor.core import OpSharding
from xla_dtensor.errors import ArgumentTypeError

Plain = Callable[[torch.Tensor], Any]


def on_host(tensor: Any) -> torch.Tensor:
    return tensor.detach().cpu()


@pytest.mark.parametrize("kind", ["dtensor", "plain"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(8,), (4, 8), (2, 4, 8)], ids=str)
def test_values_and_gradients(
    mesh: xd.DeviceMesh, plain: Plain, kind: str, bias: bool, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    put = plain if kind == "plain" else lambda t: xd.distribute_tensor(t, mesh, None)
    given = [torch.randn(shape), torch.randn(12, 8), *([torch.randn(12)] if bias else [])]
    expected = [t.clone().requires_grad_() for t in given]
    ours = [put(t.clone()).requires_grad_() for t in given]
    result: Any = xs.XLAPatchedLinear.apply(*ours)
    reference = nn.functional.linear(*expected)
    torch.testing.assert_close(on_host(result), reference.detach())
    result.square().sum().backward()
    reference.square().sum().backward()
    for t, wanted in zip(ours, expected, strict=True):
        torch.testing.assert_close(on_host(t.grad), wanted.grad)


def test_the_shardings_of_all_dims_are_kept(mesh: xd.DeviceMesh) -> None:
    """A batch on dp and a sequence on tp: flattened into one dim, tp would be lost."""
    x = xd.distribute_tensor(torch.randn(4, 8, 16), mesh, [Shard(0), Shard(1)])
    layer = xd.distribute_module(nn.Linear(16, 16), mesh)
    xs.apply_xla_patch_to_nn_linear(layer)
    result = layer(x)
    assert result.xla_sharding() == OpSharding.parse("{devices=[2,4,1]<=[8]}")
    assert result.placements == (Shard(0), Shard(1))


def test_the_patch_is_in_place(mesh: xd.DeviceMesh) -> None:
    class Own(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.ModuleList([nn.Linear(8, 8)]), Own(8, 8))
    weight = model[0].weight
    assert xs.apply_xla_patch_to_nn_linear(model) is model
    assert [type(m).__name__ for m in (model[0], model[2][0], model[3])] == [
        "EinsumLinear",
        "EinsumLinear",
        "Own",
    ]
    assert model[0].weight is weight
    assert set(model.state_dict()) == {
        f"{name}.{kind}" for name in ("0", "2.0", "3") for kind in ("weight", "bias")
    }


def test_a_patched_model_trains(dp_tp: xs.Mesh) -> None:
    torch.manual_seed(0)
    ours, reference = nn.Linear(8, 8), nn.Linear(8, 8)
    reference.load_state_dict(ours.state_dict())
    xs.apply_xla_patch_to_nn_linear(ours)
    xs.mark_sharding(ours.weight, dp_tp, ("tp", None))
    xs.mark_sharding(ours.bias, dp_tp, ("tp",))
    x = torch.randn(2, 4, 8)
    marked = xs.mark_sharding(x.clone(), dp_tp, ("dp", None, None))
    ours(marked).square().sum().backward()
    reference(x).square().sum().backward()
    torch.testing.assert_close(on_host(ours.weight.grad), reference.weight.grad)
    torch.testing.assert_close(on_host(ours.bias.grad), reference.bias.grad)
    assert xs.xla_patched_nn_linear_forward(ours, marked).shape == (2, 4, 8)


def test_frozen_weights_get_no_gradient(mesh: xd.DeviceMesh) -> None:
    x, weight = (xd.distribute_tensor(torch.ones(4, 4), mesh, None) for _ in range(2))
    result: Any = xs.XLAPatchedLinear.apply(x.requires_grad_(), weight, None)
    result.sum().backward()
    assert weight.grad is None
    assert torch.equal(x.grad.cpu(), torch.full((4, 4), 4.0))


@pytest.mark.only_on("jax")
def test_under_autocast(mesh: xd.DeviceMesh) -> None:
    x = xd.distribute_tensor(torch.randn(4, 8), mesh, [Replicate(), Replicate()])
    layer = xs.apply_xla_patch_to_nn_linear(xd.distribute_module(nn.Linear(8, 8), mesh))
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        result = layer(x)
    assert result.dtype == torch.bfloat16
    result.float().sum().backward()
    assert layer.weight.grad.dtype == torch.float32
    expected = x.cpu().sum(0).expand(8, 8)
    torch.testing.assert_close(layer.weight.grad.cpu(), expected, atol=0.05, rtol=0.02)


def test_host_tensors_are_refused(mesh: xd.DeviceMesh) -> None:
    message = (
        "XLAPatchedLinear was called with tensors of shapes [(4, 8), (2, 8)] on the host. It keeps "
        "shardings, and these have none. Use torch.nn.functional.linear, or mark_sharding first."
    )
    with pytest.raises(ArgumentTypeError, match=re.escape(message)):
        xs.XLAPatchedLinear.apply(torch.ones(4, 8), torch.ones(2, 8), None)
