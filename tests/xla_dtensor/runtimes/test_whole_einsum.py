"""einsum on DTensors: values and gradients for many equations, and no axis given up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import xla_dtensor as xd
from xla_dtensor.report import collectives

SIZES = {"b": 4, "h": 8, "q": 6, "k": 5, "d": 3, "e": 7, "s": 6}
EQUATIONS = [
    "bhqd,bhkd->bhqk",
    "bhqk,bhkd->bhqd",
    "bhqk,bhkd->bqhd",
    "bsd,dhk->bshk",
    "dhk,bsd->bshk",
    "bshd,de->bshe",
    "bqd,bhkd->bhqk",
    "bhqd,bd->bhq",
    "qd,kd->kq",
    "bqd, bkd -> bqk",
    "bhqd,bhkd",
    "bshk,hkd->bsd",
    "hkd,bshk->dbs",
    "bhqd,bhkd->qk",
    "...qd,...kd->...qk",
    "...qd,...kd",
    # Left to torch's kernel.
    "...qd,kd->...qk",
    "bh,bh->bh",
    "bhq,bhd->bhqd",
    "bqd,bkd->bk",
    "bqq,bkq->bk",
    "q,k->qk",
]


def operands(equation: str) -> list[torch.Tensor]:
    inputs = equation.replace(" ", "").partition("->")[0].replace("...", "bh")
    return [torch.randn([SIZES[letter] for letter in each]) for each in inputs.split(",")]


@pytest.mark.thorough
@pytest.mark.parametrize("equation", EQUATIONS)
def test_values_and_gradients(mesh: xd.DeviceMesh, equation: str) -> None:
    plain = operands(equation)
    placements: list[Any] = [Shard(0), Replicate()]
    ours = [xd.distribute_tensor(t, mesh, placements).requires_grad_() for t in plain]
    found: Any = torch.einsum(equation, *ours)
    expected = torch.einsum(equation, *(t.requires_grad_() for t in plain))
    torch.testing.assert_close(found.detach().cpu(), expected.detach(), rtol=1e-4, atol=1e-5)
    weights = torch.randn(expected.shape)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    for one, other in zip(ours, plain, strict=True):
        grad: Any = one.grad
        torch.testing.assert_close(grad.cpu(), other.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("equation", ["bhqd,bhkd->bhqk", "...qd,...kd->...qk"])
def test_batch_and_heads_stay_sharded(mesh: xd.DeviceMesh, equation: str) -> None:
    heads = [Shard(0), Shard(1)]
    q, k = (xd.distribute_tensor(t, mesh, heads) for t in operands(equation))
    step: Any = xd.compile(lambda q, k: torch.einsum(equation, q, k))
    assert str(step(q, k).xla_sharding()) == "{devices=[2,4,1,1]<=[8]}"
    assert collectives(step.hlo()) == ()


def test_heads_are_projected_where_they_are(mesh: xd.DeviceMesh) -> None:
    """The sum over a device's own heads, and one all-reduce of it."""
    equation = "bshk,hkd->bsd"
    x, weight = operands(equation)
    given = [
        xd.distribute_tensor(x, mesh, [Shard(0), Shard(2)]),
        xd.distribute_tensor(weight, mesh, [Replicate(), Shard(0)]),
    ]
    step: Any = xd.compile(lambda x, weight: torch.einsum(equation, x, weight))
    torch.testing.assert_close(step(*given).cpu(), torch.einsum(equation, x, weight))
    found = collectives(step.hlo(), mesh.value)
    assert [(c.kind, c.axes) for c in found] == [("all-reduce", ("tp",))]


def test_two_sharded_dims_are_contracted_where_they_are(mesh: xd.DeviceMesh) -> None:
    equation = "bhqd,bhkd->qk"
    plain = operands(equation)
    given = [xd.distribute_tensor(t, mesh, [Shard(0), Shard(1)]) for t in plain]
    step: Any = xd.compile(lambda a, b: torch.einsum(equation, a, b))
    torch.testing.assert_close(step(*given).cpu(), torch.einsum(equation, *plain))
    assert {c.kind for c in collectives(step.hlo())} == {"all-reduce"}


def test_operands_that_do_not_fit(mesh: xd.DeviceMesh) -> None:
    one = xd.distribute_tensor(torch.ones(4, 3), mesh)
    other = xd.distribute_tensor(torch.ones(4, 2), mesh)
    with pytest.raises(RuntimeError):
        torch.einsum("qd,kd->qk", one, other)
