"""Tensors of other libraries that are made of tensors: they stay what they are, of DTensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import xla_dtensor as xd
from xla_dtensor.errors import DistributeError
from xla_dtensor.runtimes import Runtime

pytestmark = pytest.mark.on_runtime


class Scaled(torch.Tensor):
    """A matrix as int8 and a scale for each row, as libraries of quantization have it."""

    def __new__(cls, ints: torch.Tensor, scale: torch.Tensor) -> Any:
        make: Any = torch.Tensor._make_wrapper_subclass  # pyright: ignore[reportAttributeAccessIssue]
        return make(cls, ints.shape, dtype=scale.dtype, device=ints.device)

    def __init__(self, ints: torch.Tensor, scale: torch.Tensor) -> None:
        self.ints, self.scale = ints, scale

    @classmethod
    def of(cls, matrix: torch.Tensor) -> Scaled:
        scale = matrix.abs().amax(1, keepdim=True) / 127
        return cls((matrix / scale).round().to(torch.int8), scale)

    def __tensor_flatten__(self) -> Any:
        return ["ints", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, parts: Any, form: Any, size: Any, stride: Any) -> Scaled:
        return cls(parts["ints"], parts["scale"])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            x, weight = args[:2]
            return (x @ weight.ints.to(x.dtype).t()) * weight.scale.to(x.dtype).flatten()
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].ints.detach(), args[0].scale.detach())
        raise NotImplementedError(func)


@pytest.fixture
def mesh(runtime: Runtime) -> xd.DeviceMesh:
    return xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))


def text(tensor: Any) -> list[str]:
    return [tensor.ints.mesh_layout.text(), tensor.scale.mesh_layout.text()]


def test_parts_lie_as_the_tensor_was_told(mesh: xd.DeviceMesh) -> None:
    matrix = Scaled.of(torch.randn(16, 24))

    def told(*placements: Any) -> Any:
        return xd.distribute_tensor(matrix, mesh, placements)

    assert type(told(Shard(0), Shard(1))) is Scaled
    assert text(told(Shard(0), Shard(1))) == ["[dp, tp]", "[dp, -]"]
    assert text(told(Shard(1), Shard(0))) == ["[tp, dp]", "[tp, -]"]
    assert text(told(Shard(0), Shard(0))) == ["[dp.tp, -]", "[dp.tp, -]"]
    assert text(told(Replicate(), Replicate())) == ["[-, -]", "[-, -]"]
    part = told(Shard(0), Shard(1)).ints
    assert torch.equal(part.full_tensor().cpu(), matrix.ints)
    assert {shard.num_bytes_on_device for shard in part.addressable_shards()} == {16 * 24 // 8}
    # Again: it lies so already, or it is an error.
    again = xd.distribute_tensor(told(Shard(0), Shard(1)), mesh, [Shard(0), Shard(1)])
    assert text(again) == ["[dp, tp]", "[dp, -]"]
    with pytest.raises(DistributeError, match="otherwise than asked"):
        xd.distribute_tensor(again, mesh, [Shard(1), Shard(0)])


@pytest.mark.parametrize("rows", [16, 10])  # 10 rows are cut unevenly, and so are their scales
@pytest.mark.parametrize("compiled", [False, True])
def test_a_module_with_such_a_weight(mesh: xd.DeviceMesh, rows: int, compiled: bool) -> None:
    plain = nn.Linear(24, rows, bias=False)
    plain.weight = nn.Parameter(Scaled.of(plain.weight.detach()), requires_grad=False)
    x = torch.randn(8, 24, requires_grad=True)
    expected = plain(x)
    expected.sum().backward()
    model = nn.Linear(24, rows, bias=False)
    model.weight = plain.weight
    xd.shard_module(model, mesh, {"weight": ("tp", "dp")})
    assert text(model.weight) == ["[tp, dp]", "[tp, -]"]
    given = xd.distribute_tensor(x.detach(), mesh, [Shard(0), Replicate()]).requires_grad_()

    def step(given: Any) -> Any:
        y = model(given)
        y.sum().backward()
        return y.detach()

    y = (xd.compile(step) if compiled else step)(given)
    torch.testing.assert_close(y.full_tensor().cpu(), expected.detach(), atol=1e-6, rtol=1e-5)
    gradient: Any = given.grad
    torch.testing.assert_close(gradient.full_tensor().cpu(), x.grad, atol=1e-6, rtol=1e-5)
