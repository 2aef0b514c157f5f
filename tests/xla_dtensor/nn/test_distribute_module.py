"""distribute_module: every parameter and buffer lands on the mesh, and nothing else changes."""

from __future__ import annotations

import copy
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import xla_dtensor as xd
from mesh_utils import Mesh
from xla_dtensor.errors import DistributeError
from xla_dtensor.runtimes import Runtime
from xla_dtensor.spmd import mark_sharding


class Tied(nn.Module):
    """An embedding whose weight is the output head's too, and a buffer under two names."""

    scale: torch.Tensor
    alias: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.full((8,), 0.5))
        self.register_buffer("alias", self.scale, persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(tokens) * self.scale)


def test_without_partition_fn_all_is_replicated(mesh: xd.DeviceMesh) -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2, bias=False))
    reference = copy.deepcopy(module)
    assert xd.distribute_module(module, mesh) is module
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    assert len(tensors) == 8
    for name, tensor in tensors.items():
        assert isinstance(tensor, xd.DTensor), name
        assert tensor.placements == (Replicate(), Replicate())
        assert torch.equal(tensor.cpu(), reference.state_dict()[name])
    assert all(isinstance(p, nn.Parameter) for p in module.parameters())
    x = torch.randn(8, 4)
    y = module(xd.distribute_tensor(x, mesh, [Shard(0), Replicate()]))
    torch.testing.assert_close(y.cpu(), reference(x))
    norm = cast("Any", module[1])
    torch.testing.assert_close(norm.running_mean.cpu(), reference[1].running_mean)
    assert norm.num_batches_tracked.item() == 1


def test_partition_fn_sees_every_submodule_and_the_mesh(mesh: xd.DeviceMesh) -> None:
    seen = []

    def shard_rows(name: str, module: nn.Module, device_mesh: xd.DeviceMesh) -> None:
        seen.append((name, type(module).__name__, device_mesh))
        if isinstance(module, nn.Linear):
            weight = xd.distribute_tensor(module.weight, device_mesh, [Replicate(), Shard(0)])
            module.weight = nn.Parameter(weight)

    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    linear = cast("Any", module[0])
    weight = linear.weight.detach().clone()
    xd.distribute_module(module, mesh, shard_rows)
    assert seen == [("", "Sequential", mesh), ("0", "Linear", mesh), ("1", "ReLU", mesh)]
    assert linear.weight.placements == (Replicate(), Shard(0))
    assert linear.bias.placements == (Replicate(), Replicate())
    assert {s.data.shape for s in linear.weight.addressable_shards()} == {(2, 4)}
    assert torch.equal(linear.weight.cpu(), weight)


def test_tied_weights_stay_tied(mesh: xd.DeviceMesh) -> None:
    module = Tied()
    reference = copy.deepcopy(module)
    xd.distribute_module(module, mesh)
    assert module.head.weight is module.embedding.weight
    assert module.alias is module.scale
    assert len(list(module.parameters())) == 1
    tokens = torch.arange(8)
    module(xd.distribute_tensor(tokens, mesh, [Shard(0), Replicate()])).square().sum().backward()
    reference(tokens).square().sum().backward()
    assert module.head.weight.grad is not None
    torch.testing.assert_close(module.head.weight.grad.cpu(), reference.head.weight.grad)


def test_frozen_parameters_stay_frozen(mesh: xd.DeviceMesh) -> None:
    module = nn.Linear(4, 4)
    module.weight.requires_grad_(False)
    xd.distribute_module(module, mesh)
    assert not module.weight.requires_grad
    assert module.bias.requires_grad
    module(torch.ones(2, 4)).sum().backward()
    assert module.weight.grad is None
    assert module.bias.grad is not None
    assert torch.equal(module.bias.grad.cpu(), torch.full((4,), 2.0))


def test_hooks_with_three_arguments(mesh: xd.DeviceMesh) -> None:
    seen = []

    def spread(module: nn.Module, inputs: Any, device_mesh: xd.DeviceMesh) -> Any:
        seen.append((module, device_mesh))
        return xd.distribute_tensor(inputs[0], device_mesh, [Shard(0), Replicate()])

    def gather(module: nn.Module, outputs: Any, device_mesh: xd.DeviceMesh) -> Any:
        seen.append((module, device_mesh))
        return outputs.full_tensor().cpu()

    module = nn.Linear(4, 2)
    reference = copy.deepcopy(module)
    xd.distribute_module(module, mesh, None, spread, gather)
    x = torch.randn(4, 4)
    y = module(x)
    assert type(y) is torch.Tensor
    torch.testing.assert_close(y, reference(x).detach())
    assert seen == [(module, mesh), (module, mesh)]


def test_hooks_with_two_arguments_warn(mesh: xd.DeviceMesh) -> None:
    module = nn.Linear(4, 2)
    with pytest.warns(FutureWarning) as warned:
        xd.distribute_module(
            module,
            mesh,
            input_fn=lambda inputs, m: (xd.distribute_tensor(inputs[0], m, [Shard(0), Shard(1)]),),
            output_fn=lambda outputs, m: outputs.redistribute(m, [Shard(0), Replicate()]),
        )
    assert [str(w.message).split(" that")[0] for w in warned] == [
        "Deprecating input_fn",
        "Deprecating output_fn",
    ]
    assert {w.filename for w in warned} == {__file__}
    y = module(torch.ones(4, 4))
    assert y.placements == (Shard(0), Replicate())


@pytest.mark.parametrize("name", ["input_fn", "output_fn"])
def test_hooks_with_other_arguments_are_refused(mesh: xd.DeviceMesh, name: str) -> None:
    module = nn.Linear(4, 2)
    hook: dict[str, Any] = {name: lambda value: value}
    with pytest.raises(DistributeError, match=f"{name} that takes 1 arguments"):
        xd.distribute_module(module, mesh, **hook)
    # Refused before anything was changed.
    assert type(module.weight) is nn.Parameter
    xd.distribute_module(module, mesh)


def test_second_call_is_refused(mesh: xd.DeviceMesh) -> None:
    module = nn.Linear(4, 2)
    xd.distribute_module(module, mesh)
    weight = module.weight
    with pytest.raises(DistributeError, match="called on a Linear that it was called on before"):
        xd.distribute_module(module, mesh)
    assert module.weight is weight


def test_mesh_from_the_block(mesh: xd.DeviceMesh) -> None:
    module = nn.Linear(4, 2)
    with mesh:
        xd.distribute_module(module)
    assert cast("Any", module.weight).device_mesh is mesh


def test_state_dict_round_trip(mesh: xd.DeviceMesh) -> None:
    source, target = nn.Linear(4, 8), nn.Linear(4, 8)
    for module in (source, target):
        xd.distribute_module(module, mesh)
    assert target.load_state_dict(source.state_dict()).missing_keys == []
    assert torch.equal(target.weight.cpu(), source.weight.cpu())
    target.load_state_dict({"weight": torch.ones(8, 4), "bias": torch.zeros(8)})
    assert isinstance(target.weight, xd.DTensor)
    assert torch.equal(target.weight.cpu(), torch.ones(8, 4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_conversion_keeps_parameters(mesh: xd.DeviceMesh, dtype: torch.dtype) -> None:
    module = nn.Linear(4, 8)
    xd.distribute_module(module, mesh)
    weight, values = module.weight, module.weight.cpu()
    module.to(dtype)
    assert isinstance(module.weight, nn.Parameter)
    assert module.weight.dtype == dtype
    assert cast("Any", module.weight).placements == cast("Any", weight).placements
    assert torch.equal(module.weight.cpu(), values.to(dtype))


def test_what_was_marked_before_stays_so(runtime: Runtime, mesh: xd.DeviceMesh) -> None:
    layer: Any = nn.Linear(16, 8)
    mark_sharding(layer.weight, mesh, ("tp", None))
    asked = runtime.op_sharding(layer.weight)
    xd.distribute_module(layer, mesh)
    assert isinstance(layer.weight, xd.DTensor)
    assert layer.weight.xla_sharding() == asked
    assert layer.weight.placements == (Replicate(), Shard(0))
    assert layer.bias.placements == (Replicate(), Replicate())


def test_what_was_marked_on_another_mesh_is_refused(runtime: Runtime, mesh: xd.DeviceMesh) -> None:
    layer: Any = nn.Linear(16, 8)
    mark_sharding(layer.weight, Mesh.arange((8,), ("x",)), ("x", None))
    xd.distribute_module(layer, mesh)  # 8 tiles are both axes
    assert layer.weight.placements == (Shard(0), Shard(0))
    layer: Any = nn.Linear(16, 8)
    mark_sharding(layer.weight, mesh, ("dp", None))
    with pytest.raises(DistributeError, match=r"\(x=8\).*No axes of this mesh cut it so"):
        xd.distribute_module(layer, Mesh.arange((8,), ("x",)))
