"""Backward passes and optimizers give what plain torch gives, and state lies as its parameter."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import xla_dtensor as xd
from xla_dtensor.runtimes import Runtime

R = Replicate()
COLUMNWISE, ROWWISE = [R, Shard(0)], [R, Shard(1)]


class Attention(nn.Module):
    """Causal self-attention with a residual and a norm, two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.qkv = nn.Linear(8, 24, bias=False)
        self.out = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            t.view(*t.shape[:2], 2, 4).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(x.shape))


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)
    )


def embedding() -> nn.Module:
    return nn.Sequential(nn.Embedding(11, 8, padding_idx=0), nn.Linear(8, 4))


def layer_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.LayerNorm(8, bias=False))


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "mlp": (mlp, lambda: torch.randn(8, 6, dtype=torch.float64)),
    "attention": (Attention, lambda: torch.randn(4, 5, 8, dtype=torch.float64)),
    "embedding": (embedding, lambda: torch.randint(11, (8, 3))),
    "layer_norm": (layer_norm, lambda: torch.randn(8, 6, dtype=torch.float64)),
}


def shard_linears(name: str, module: nn.Module, mesh: xd.DeviceMesh) -> None:
    """Every second linear rowwise, the others and embeddings columnwise."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        rowwise = isinstance(module, nn.Linear) and module.out_features in (4, 8)
        placements = ROWWISE if rowwise else COLUMNWISE
        module.weight = nn.Parameter(xd.distribute_tensor(module.weight, mesh, placements))


def assert_gradients(distributed: nn.Module, plain: nn.Module, tolerance: float) -> None:
    expected = dict(plain.named_parameters())
    for name, parameter in distributed.named_parameters():
        assert isinstance(parameter.grad, xd.DTensor), name
        found, wanted = parameter.grad.cpu(), expected[name].grad
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("name", MODULES)
def test_backward_in_float64(name: str, mesh: xd.DeviceMesh, runtime: Runtime) -> None:
    # torch_xla takes the constants of gelu in float32.
    tolerance = 1e-8 if (name, runtime.name) == ("mlp", "torch_xla") else 1e-10
    torch.manual_seed(0)
    make, make_input = MODULES[name]
    plain = make().double()
    x = make_input()
    distributed = xd.distribute_module(copy.deepcopy(plain), mesh, shard_linears)
    d = xd.distribute_tensor(x, mesh, [Shard(0), R])
    if x.is_floating_point():
        x.requires_grad_()
        d.requires_grad_()
    expected, found = plain(x), distributed(d)
    torch.testing.assert_close(found.cpu(), expected.detach(), rtol=tolerance, atol=tolerance)
    expected.square().mean().backward()
    found.square().mean().backward()
    assert_gradients(distributed, plain, tolerance)
    if x.is_floating_point():
        assert d.grad is not None
        torch.testing.assert_close(d.grad.cpu(), x.grad, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "placements", [[Shard(0), R], [Shard(0), Shard(1)], [Shard(0), Shard(0)]], ids=str
)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy(mesh: xd.DeviceMesh, placements: Any, reduction: str) -> None:
    x = torch.randn(8, 12, dtype=torch.float64, requires_grad=True)
    target = torch.randint(12, (8,))
    target[3] = -100
    d = xd.distribute_tensor(x.detach(), mesh, placements).requires_grad_()
    expected = F.cross_entropy(x, target, reduction=reduction, label_smoothing=0.1)
    spread = xd.distribute_tensor(target, mesh, [Shard(0), R])
    found = F.cross_entropy(d, spread, reduction=reduction, label_smoothing=0.1)
    torch.testing.assert_close(found.cpu(), expected.detach(), rtol=1e-10, atol=1e-10)
    expected.sum().backward()
    found.sum().backward()
    assert d.grad is not None
    torch.testing.assert_close(d.grad.cpu(), x.grad, rtol=1e-10, atol=1e-10)


def test_second_derivative_and_accumulation(mesh: xd.DeviceMesh) -> None:
    x = torch.randn(8, dtype=torch.float64)
    p = cast("Any", xd.distribute_tensor(x, mesh, [Shard(0), Shard(0)]).requires_grad_())
    (first,) = torch.autograd.grad((p**4).sum(), p, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), p)
    torch.testing.assert_close(second.cpu(), 12 * x**2)
    for _ in range(3):
        (p**2).sum().backward()
    torch.testing.assert_close(p.grad.cpu(), 6 * x)
    assert p.grad.placements == p.placements


def test_checkpoint_and_hooks(mesh: xd.DeviceMesh) -> None:
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    plain = mlp()
    distributed = xd.distribute_module(copy.deepcopy(plain), mesh, shard_linears)
    x = torch.randn(8, 6)
    seen = []
    next(distributed.parameters()).register_hook(lambda grad: seen.append(type(grad)))
    d = xd.distribute_tensor(x, mesh, [Shard(0), R])
    cast("Any", checkpoint(distributed, d, use_reentrant=False)).sum().backward()
    plain(x).sum().backward()
    assert_gradients(distributed, plain, 1e-5)
    assert seen == [xd.DTensor]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adamw_loop": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False, amsgrad=True),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_three_steps(name: str, mesh: xd.DeviceMesh) -> None:
    torch.manual_seed(0)
    plain = mlp()
    distributed = xd.distribute_module(copy.deepcopy(plain), mesh, shard_linears)
    x = torch.randn(8, 6)
    optimizers = []
    for module, batch in (
        (plain, x),
        (distributed, xd.distribute_tensor(x, mesh, [Shard(0), R])),
    ):
        optimizer = OPTIMIZERS[name](module.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            module(batch).square().mean().backward()
            nn.utils.clip_grad_norm_(module.parameters(), 0.1)
            optimizer.step()
        optimizers.append(optimizer)
    for p, d in zip(plain.parameters(), distributed.parameters(), strict=True):
        torch.testing.assert_close(d.cpu(), p.detach(), rtol=1e-5, atol=1e-6)
    assert_state_lies_as_its_parameter(optimizers[1])


def assert_state_lies_as_its_parameter(optimizer: torch.optim.Optimizer) -> None:
    checked = 0
    for parameter, state in cast("dict[Any, Any]", optimizer.state).items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                # SGD's momentum starts as a clone of the gradient, and lies as that does.
                model = parameter.grad if key == "momentum_buffer" else parameter
                assert isinstance(value, xd.DTensor), key
                assert value.placements == model.placements, key
                assert value.xla_sharding() == model.xla_sharding(), key
                assert bytes_on_devices(value) == bytes_on_devices(model), key
                checked += 1
    assert checked >= 6


def bytes_on_devices(tensor: xd.DTensor) -> list[int]:
    return [shard.num_bytes_on_device for shard in tensor.addressable_shards()]


def test_parameters_keep_their_sharding_over_steps(mesh: xd.DeviceMesh) -> None:
    module = xd.distribute_module(mlp(), mesh, shard_linears)
    parameters: list[Any] = list(module.parameters())
    before = [p.xla_sharding() for p in parameters]
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.randn(8, 6)).sum().backward()
    optimizer.step()
    parameters = list(module.parameters())
    assert [p.xla_sharding() for p in parameters] == before
    assert {p.placements for p in parameters} == {(R, Shard(0)), (R, Shard(1)), (R, R)}


def test_optimizer_state_dict_round_trip(mesh: xd.DeviceMesh) -> None:
    torch.manual_seed(0)
    modules = [xd.distribute_module(mlp(), mesh, shard_linears) for _ in range(2)]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in modules]
    modules[0](torch.randn(8, 6)).sum().backward()
    optimizers[0].step()
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    for a, b in zip(*(o.state.values() for o in optimizers), strict=True):
        assert torch.equal(a["exp_avg"].cpu(), b["exp_avg"].cpu())
        assert b["exp_avg"].placements == a["exp_avg"].placements
    assert_state_lies_as_its_parameter(optimizers[1])


def test_clip_grad_norm(mesh: xd.DeviceMesh) -> None:
    torch.manual_seed(0)
    plain = mlp()
    distributed = xd.distribute_module(copy.deepcopy(plain), mesh, shard_linears)
    x = torch.randn(8, 6)
    (plain(x) * 100).sum().backward()
    (distributed(x) * 100).sum().backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    found = nn.utils.clip_grad_norm_(distributed.parameters(), 1.0)
    torch.testing.assert_close(found.cpu(), expected)
    assert_gradients(distributed, plain, 1e-5)
