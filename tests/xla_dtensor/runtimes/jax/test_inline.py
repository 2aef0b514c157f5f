"""Ops that a traced step calls often are traced once for each description of their arguments."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard

import xla_dtensor as xd

pytestmark = pytest.mark.only_on("jax")


def put(value: torch.Tensor, mesh: xd.DeviceMesh) -> Any:
    return xd.distribute_tensor(value, mesh, [Shard(0), Replicate()])


def ops(x: Any, y: Any) -> list[Any]:
    """Ops whose arguments differ in nothing but a number, its sign, its type or a dtype."""
    z = torch.zeros_like(x)
    return [
        *(torch.lerp(x, y, weight) for weight in (0.1, 0.7, 0.1, 0.5, 1)),
        *(x.mul(number) for number in (2, 2.0, True, -2.0, 2)),
        *(torch.copysign(y, number) for number in (0.0, -0.0, 0.0)),
        *(x.add(y, alpha=alpha) for alpha in (1, 2, 1.0, -0.5)),
        *(torch.addcdiv(x, y, y, value=value) for value in (1, -1, 0.5)),
        *(x.div(number) for number in (3, 3.0, 2, 7)),
        *(x.to(torch.int64).div(number) for number in (3, 3.0)),
        *(F.gelu(y, approximate=kind) for kind in ("none", "tanh", "none")),
        *(torch.linalg.vector_norm(y, p, 0, keep) for p in (1, 2, 2.0) for keep in (True, False)),
        *(v.pow(2) for v in (x, y, x.double(), x.bfloat16(), x[:3])),
        *(torch.where(x > y, x, number) for number in (0.0, 1)),
        torch.atan2(z, -z - 1),
    ]


def test_values_are_those_of_each_op_alone(mesh: xd.DeviceMesh) -> None:
    x, y = torch.linspace(-3, 3, 32).reshape(8, 4), torch.linspace(2, -5, 32).reshape(8, 4)
    step: Any = xd.compile(ops)
    found = [each.full_tensor().cpu() for each in step(put(x, mesh), put(y, mesh))]
    for number, (one, expected) in enumerate(zip(found, ops(x, y), strict=True)):
        torch.testing.assert_close(one, expected, msg=lambda text, n=number: f"{n}: {text}")


def attention_loss(q: Any) -> Any:
    return F.scaled_dot_product_attention(q, q, q).square().sum()


def test_the_precision_of_products_is_the_one_in_force(mesh: xd.DeviceMesh) -> None:
    """It is no argument of an op: two steps that differ in nothing else are two programs."""
    q = put(torch.linspace(-1, 1, 256).reshape(8, 2, 4, 4), mesh).requires_grad_()
    texts = []
    before = torch.get_float32_matmul_precision()
    try:
        for setting in ("highest", "medium", "highest"):
            torch.set_float32_matmul_precision(setting)
            step: Any = xd.compile(lambda q: torch.autograd.grad(attention_loss(q), q))
            step(q)
            texts.append("highest" in step.hlo())
    finally:
        torch.set_float32_matmul_precision(before)
    assert texts == [True, False, True]


def test_source_lines_are_those_of_each_call(mesh: xd.DeviceMesh) -> None:
    """Equations that are inlined are of the place that calls, not of the one that called first."""

    def step(x: Any) -> Any:
        y = torch.lerp(x, x + 1, 0.25)
        return torch.lerp(y, y + 1, 0.25)

    compiled: Any = xd.compile(step)
    compiled(put(torch.ones(8, 4), mesh))
    first = step.__code__.co_firstlineno
    text = compiled.hlo()
    assert all(re.search(rf"line={first + line}\b", text) for line in (1, 2))
