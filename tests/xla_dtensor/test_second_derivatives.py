"""Derivatives of derivatives: right to the third order, or refused by name.

Gradient penalties, MAML, influence functions and Hessian-vector products differentiate a gradient.
Each function below is differentiated three times on the mesh, all of them in one compiled step, and
compared with plain PyTorch in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.utils.checkpoint import checkpoint

import xla_dtensor as xd
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.runtimes import Runtime

R = Replicate()
Function = Callable[[Any, Any], Any]


def whole(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, xd.DTensor) else x


def moved(x: Any) -> Any:
    return x.redistribute(placements=[R, Shard(0)]) if isinstance(x, xd.DTensor) else x


def through_local(x: Any) -> Any:
    if not isinstance(x, xd.DTensor):
        return x
    return xd.DTensor.from_local(x.to_local(), x.device_mesh, x.placements)


FUNCTIONS: dict[str, Function] = {
    "linear": lambda x, w: F.linear(x, w, w[:, 0]).sin(),
    "linear_of_a_vector": lambda x, w: F.linear(x, w[0]).sin(),
    "matmul": lambda x, w: (x @ w).sin(),
    "matmul_of_three_dims": lambda x, w: (x.view(2, 4, 4) @ w).sin(),
    "einsum": lambda x, w: torch.einsum("bi,ij->bj", x, w).sin(),
    "einsum_over_two_dims": lambda x, w: torch.einsum(
        "bsi,bsj->ij", (x * w[0]).view(2, 4, 4), x.view(2, 4, 4)
    ),
    "conv": lambda x, w: F.conv1d(x.view(2, 4, 4), w.view(4, 4, 1)).sin(),
    "layer_norm": lambda x, w: F.layer_norm(x, (4,), w[0]).sin(),
    "rms_norm": lambda x, w: F.rms_norm(x, (4,), w[0]).sin(),
    "cross_entropy": lambda x, w: F.cross_entropy(x @ w, torch.arange(8) % 4),
    "full_tensor": lambda x, w: whole((x * w[0]).sin()),
    "redistribute": lambda x, w: moved((x * w[0]).sin()).cos(),
    "from_local": lambda x, w: through_local((x * w[0]).sin()).cos(),
    "sgn": lambda x, w: x.abs() ** w[0].abs(),
}


def attention(x: Any, w: Any) -> Any:
    q = (x @ w).view(1, 2, 4, 4)
    return F.scaled_dot_product_attention(q, q.sin(), q.cos(), is_causal=True)


def attention_by_parts(x: Any, w: Any) -> Any:
    """Plain torch's own kernel on the CPU has no second derivative."""
    q = (x @ w).view(1, 2, 4, 4)
    scores = (q @ q.sin().mT / 2).masked_fill(torch.ones(4, 4).tril() == 0, float("-inf"))
    return scores.softmax(-1) @ q.cos()


def derivatives(function: Function, x: Any, w: Any) -> list[Any]:
    """Those of the first three orders, of both arguments."""
    found: list[Any] = []
    value: Any = function(x, w).sum()
    for order in range(3):
        grads = torch.autograd.grad(value, (x, w), create_graph=order < 2)
        found += grads
        value = sum((grad * grad).sum() for grad in grads)
    return found


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.sin(torch.arange(1.0, 33.0).double() * 0.7).reshape(8, 4)
    return x, torch.cos(torch.arange(16.0).double() * 1.3).reshape(4, 4)


def expected(name: str) -> list[torch.Tensor]:
    function = attention_by_parts if name == "attention" else FUNCTIONS[name]
    x, w = (value.requires_grad_() for value in inputs())
    return derivatives(function, x, w)


def placed(mesh: xd.DeviceMesh, *placements: Any) -> tuple[Any, Any]:
    x, w = inputs()
    made = (xd.distribute_tensor(x, mesh, placements), xd.distribute_tensor(w, mesh, [R, Shard(1)]))
    return made[0].requires_grad_(), made[1].requires_grad_()


ALL: dict[str, Function] = {**FUNCTIONS, "attention": attention}


def compare(found: list[Any], name: str) -> None:
    for order, (mine, right) in enumerate(zip(found, expected(name), strict=True)):
        value = whole(mine).cpu()
        torch.testing.assert_close(value, right, msg=lambda m, o=order: f"{name}, {o}: {m}")


def test_all_in_one_step(mesh: xd.DeviceMesh) -> None:
    step: Any = xd.compile(lambda x, w: [derivatives(f, x, w) for f in ALL.values()])
    for name, found in zip(ALL, step(*placed(mesh, Shard(0), R)), strict=True):
        compare(found, name)


@pytest.mark.thorough
@pytest.mark.parametrize("placements", [(Shard(0), R), (R, R), (Shard(1), Shard(0))])
@pytest.mark.parametrize("name", ALL)
def test_eager(name: str, placements: Any, mesh: xd.DeviceMesh) -> None:
    compare(derivatives(ALL[name], *placed(mesh, *placements)), name)


def test_a_gradient_penalty(mesh: xd.DeviceMesh) -> None:
    """What WGAN-GP trains with, on layers whose weights are sharded."""

    def grads(model: nn.Module, x: Any) -> list[Any]:
        out = model(x)
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        loss = out.square().mean() + 10 * ((grad.norm(dim=1) - 1) ** 2).mean()
        return list(torch.autograd.grad(loss, list(model.parameters())))

    def made() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()

    right = grads(made(), inputs()[0].requires_grad_())
    found = grads(xd.distribute_module(made(), mesh), placed(mesh, Shard(0), R)[0])
    for mine, theirs in zip(found, right, strict=True):
        torch.testing.assert_close(whole(mine).cpu(), theirs)


# ------------------------------------------------------------------ what is refused


def refused(value: Any, *leaves: Any) -> str:
    (grad, *_) = torch.autograd.grad(value.sum(), leaves, create_graph=True)
    with pytest.raises(UnsupportedOpError) as error:
        torch.autograd.grad((grad * grad).sum(), leaves)
    return str(error.value)


@pytest.mark.only_on("jax")
def test_call_jax_refuses(mesh: xd.DeviceMesh) -> None:
    import jax.numpy as jnp

    x, _ = placed(mesh, Shard(0), R)
    y = xd.call_jax(jnp.sin, ([Shard(0), R],), [Shard(0), R])(x)
    assert refused(y, x).startswith("A second derivative of call_jax was asked for. ")


@pytest.mark.only_on("jax")
def test_linear_cross_entropy_refuses(mesh: xd.DeviceMesh) -> None:
    x, w = placed(mesh, Shard(0), R)
    loss = xd.linear_cross_entropy(x, w, xd.distribute_tensor(torch.arange(8) % 4, mesh))
    assert "linear_cross_entropy" in refused(loss, x, w)


def test_a_parameter_inside_of_checkpoint_refuses(mesh: xd.DeviceMesh) -> None:
    x, w = placed(mesh, Shard(0), R)
    y: Any = checkpoint(lambda v: torch.matmul(v, w).sin(), x, use_reentrant=False)
    with pytest.raises(UnsupportedOpError, match=r"inside of torch\.utils\.checkpoint"):
        torch.autograd.grad(y.sum(), (x, w), create_graph=True)


def test_fully_shard_refuses_second_derivatives(runtime: Runtime) -> None:
    model = nn.Linear(4, 4).double()
    xd.fully_shard(model, mesh=xd.init_device_mesh("xla", (8,)))
    x, _ = inputs()
    loss: Any = model(x).square().sum()
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    right = nn.Linear(4, 4).double()
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), right.parameters(), strict=True):
            theirs.copy_(whole(mine).cpu())
    right(x).square().sum().backward()
    for mine, theirs in zip(gradients, right.parameters(), strict=True):
        torch.testing.assert_close(whole(mine.detach()).cpu(), theirs.grad)
    with pytest.raises(UnsupportedOpError, match="of the parameters of fully_shard was asked for"):
        torch.autograd.grad(gradients[0].sum(), list(model.parameters()))


# ------------------------------------------------------------------ undefined gradients


class Half(torch.autograd.Function):
    """Gives no gradient to its second argument."""

    @staticmethod
    def forward(ctx: Any, x: Any, y: Any) -> Any:
        ctx.set_materialize_grads(False)
        return x * 2, y * 3

    @staticmethod
    def backward(ctx: Any, first: Any, second: Any) -> Any:
        return first * 2, second


MADE: dict[str, Callable[[Any, Any], Any]] = {
    "from_local_of_a_plain_tensor": lambda x, mesh: xd.DTensor.from_local(
        torch.ones(8, 4, requires_grad=True).double(), mesh, [R, R]
    ),
    "from_local_with_one_value": lambda x, mesh: xd.DTensor.from_local(
        torch.ones(8, 4, requires_grad=True).double(),
        mesh,
        [Shard(0), R],
        same_on_every_device=True,
    ),
    "from_local": lambda x, mesh: through_local(x),
    "redistribute": lambda x, mesh: moved(x),
    "full_tensor": lambda x, mesh: whole(x),
    "linear": lambda x, mesh: F.linear(x, torch.eye(4).double()),
}


@pytest.mark.parametrize("name", MADE)
def test_an_undefined_gradient_stays_so(name: str, mesh: xd.DeviceMesh) -> None:
    x, _ = placed(mesh, Shard(0), R)
    first: Any = Half.apply(MADE[name](x, mesh), MADE[name](x, mesh))[0]  # pyright: ignore
    first.sum().backward()
    assert name.startswith("from_local_") or bool((whole(x.grad) == 2).all())
