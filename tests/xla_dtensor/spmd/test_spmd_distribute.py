"""xla_distribute_tensor, xla_distribute_module and auto_policy."""

# torch types .grad as optional and a module's attributes as tensors or modules.
# pyright: reportOptionalMemberAccess=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportReturnType=false
# pyright: reportIndexIssue=false, reportOptionalSubscript=false, reportOptionalIterable=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import xla_dtensor as xd
import xla_dtensor.spmd as xs
from xla_dtensor.errors import DistributeError, UnsupportedOpError


def test_a_tensor(mesh: xd.DeviceMesh) -> None:
    source = torch.arange(32.0).reshape(8, 4)
    made = xs.xla_distribute_tensor(source, mesh, [Shard(0), Shard(1)])
    assert type(made) is xs.XLAShardedTensor
    assert made.sharding_spec == "{devices=[2,4]<=[8]}"
    assert torch.equal(made.cpu(), source)
    assert type(source) is torch.Tensor
    assert xs.xla_distribute_tensor(source, mesh).placements == (Replicate(), Replicate())
    assert xs.xla_distribute_tensor(source, mesh, ("tp", None)).local_shards[0].data.shape == (2, 4)


def test_wrong_placements(mesh: xd.DeviceMesh) -> None:
    with pytest.raises(DistributeError, match="placements"):
        xs.xla_distribute_tensor(torch.ones(8), mesh, [Shard(0)])


def test_a_module(mesh: xd.DeviceMesh) -> None:
    def shard(name: str, module: nn.Module, mesh: Any) -> None:
        for key, parameter in list(module.named_parameters(recurse=False)):
            made = xs.xla_distribute_tensor(parameter.detach(), mesh, [Replicate(), Shard(0)])
            module.register_parameter(key, nn.Parameter(made))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    x = torch.randn(4, 8)
    expected = model(x).detach()
    assert xs.xla_distribute_module(model, mesh, shard) is model
    assert type(model[0].weight) is xs.XLAShardedTensor
    assert model[0].weight.local_shards[0].data.shape == (2, 8)
    result = model(xs.xla_distribute_tensor(x, mesh))
    torch.testing.assert_close(result.detach().cpu(), expected)
    result.sum().backward()
    assert model[2].weight.grad.shape == (4, 8)


def test_without_a_function_a_module_is_replicated(mesh: xd.DeviceMesh) -> None:
    model = xs.xla_distribute_module(nn.Linear(8, 8), mesh)
    assert isinstance(model.weight, xd.DTensor)
    assert model.weight.placements == (Replicate(), Replicate())


def test_input_and_output_functions(mesh: xd.DeviceMesh) -> None:
    def put(_: Any, inputs: Any, mesh: Any) -> Any:
        return (xs.xla_distribute_tensor(inputs[0], mesh, [Shard(0), Replicate()]),)

    model = xs.xla_distribute_module(
        nn.Linear(8, 8), mesh, None, put, lambda _, output, mesh: output.full_tensor()
    )
    assert model(torch.ones(4, 8)).shape == (4, 8)


def test_auto_policy_is_refused(mesh: xd.DeviceMesh) -> None:
    message = (
        "auto_policy was passed as partition_fn. XLA's auto-sharding pass is not part of the "
        "compilers that xla_dtensor uses. Pass a function that marks the parameters, or None to "
        "replicate them."
    )
    model = nn.Linear(8, 8)
    for call in (
        lambda: xs.xla_distribute_module(model, mesh, xs.auto_policy),
        lambda: xs.auto_policy("", model, mesh),
    ):
        with pytest.raises(UnsupportedOpError, match=re.escape(message)):
            call()
    assert type(model.weight) is nn.Parameter
