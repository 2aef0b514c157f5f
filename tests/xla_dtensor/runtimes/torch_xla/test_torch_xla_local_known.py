"""Local views over tp of what is cut over dp: ops and collectives over tp leave dp alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Partial, Replicate, Shard

import xla_dtensor as xd
from xla_dtensor.collectives import all_gather, all_to_all, psum, reduce_scatter
from xla_dtensor.report import collectives
from xla_dtensor.runtimes import Runtime

pytestmark = [pytest.mark.only_on("torch_xla"), pytest.mark.usefixtures("runtime")]

R = Replicate()
_generator = torch.Generator().manual_seed(7)
X = torch.randn(8, 16, 12, generator=_generator)
CLASSES = torch.randint(0, 12, (8, 16), generator=_generator)


def batch(mesh: xd.DeviceMesh, x: torch.Tensor, tp: Any) -> Any:
    """A tensor on mesh["tp"] of which it is known that dp cuts its rows."""
    whole = xd.distribute_tensor(x, mesh, [Shard(0), R])
    return whole.redistribute(mesh["tp"], [tp])


def local_step(mesh: xd.DeviceMesh, work: Callable[..., Any], out: Any) -> Any:
    def step(*tensors: Any) -> Any:
        views = [tensor.to_local() for tensor in tensors]
        return xd.DTensor.from_local(work(*views), mesh["tp"], [out])

    return xd.compile(step)


def axes_used(hlo: str, mesh: xd.DeviceMesh) -> set[Any]:
    return {axis for c in collectives(hlo, mesh.value) for axis in c.axes or ("?",)}


# Of x over tp along its dim 1: what each device does, what it is afterwards, the whole of it.
COLLECTIVES: dict[str, tuple[Callable[[Any], Any], Any, Callable[[Any], Any]]] = {
    "all_gather": (lambda v: all_gather(v, "tp", dim=1), R, lambda x: x),
    "all_gather of another dim": (
        lambda v: all_gather(v.sum(1), "tp", dim=1),
        R,
        lambda x: torch.cat([part.sum(1) for part in x.chunk(4, 1)], 1),
    ),
    "psum": (lambda v: psum(v, "tp"), R, lambda x: sum(x.chunk(4, 1))),
    "reduce_scatter": (
        lambda v: reduce_scatter(v, "tp", dim=2),
        Shard(2),
        lambda x: sum(x.chunk(4, 1)),
    ),
    "all_to_all": (
        lambda v: all_to_all(v, "tp", split_dim=2, concat_dim=1),
        Shard(2),
        lambda x: x,
    ),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_over_tp_moves_nothing_over_dp(mesh: xd.DeviceMesh, name: str) -> None:
    work, out, whole = COLLECTIVES[name]
    step = local_step(mesh, work, out)
    found = step(batch(mesh, X, Shard(1)))
    torch.testing.assert_close(found.cpu(), whole(X), rtol=1e-5, atol=1e-5)
    assert axes_used(step.hlo(), mesh) == {"tp"}


def test_the_dim_that_dp_cuts_can_be_gathered_over_tp(mesh: xd.DeviceMesh) -> None:
    """The rows of a device's tp neighbours come behind all of its own, those of dp included."""
    step = local_step(mesh, lambda v: all_gather(v, "tp", dim=0), R)
    found = step(batch(mesh, X, R))
    assert torch.equal(found.cpu(), torch.cat([X] * 4))


MASK = torch.ones(16, 12, dtype=torch.bool).tril()
OPS: dict[str, Callable[..., Any]] = {
    "softmax": lambda v: F.softmax(v.masked_fill(~MASK, float("-inf")), -1),
    "safe softmax": lambda v: torch.ops.aten._safe_softmax.default(v * 2, -1),
    "ones_like": lambda v: torch.ones_like(v) * v,
    "attention": lambda v: F.scaled_dot_product_attention(v, v, v, is_causal=True),
    "losses": lambda v, c: F.cross_entropy(v.flatten(0, 1), c.flatten(0, 1), reduction="none"),
}


@pytest.mark.parametrize("name", OPS)
def test_an_op_leaves_dp_to_xla(mesh: xd.DeviceMesh, name: str) -> None:
    given = [X, CLASSES][: 1 + (name == "losses")]
    step = local_step(mesh, OPS[name], R)
    found = step(*(batch(mesh, x, R) for x in given))
    torch.testing.assert_close(found.cpu(), OPS[name](*given), rtol=1e-4, atol=1e-5)
    assert "dp" not in axes_used(step.hlo(), mesh)


LOSSES: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "ignored": {"ignore_index": 3},
    "weights": {"weight": torch.linspace(0.5, 2, 12)},
    "both": {"weight": torch.linspace(0.5, 2, 12), "ignore_index": 5, "reduction": "none"},
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_and_its_gradient(runtime: Runtime, mesh: xd.DeviceMesh, name: str) -> None:
    options = LOSSES[name]

    def loss(logits: Any, classes: Any) -> Any:
        found = F.cross_entropy(logits.flatten(0, 1), classes.flatten(0, 1), **options)
        return found.square().sum()

    plain = X.clone().requires_grad_()
    loss(plain, CLASSES).backward()
    logits, classes = batch(mesh, X, R).requires_grad_(), batch(mesh, CLASSES, R)

    def step(logits: Any, classes: Any) -> Any:
        total = loss(logits.to_local(), classes.to_local())
        (grad,) = torch.autograd.grad(total, logits)
        return grad

    compiled = xd.compile(step)
    found: Any = compiled(logits, classes)
    torch.testing.assert_close(found.cpu(), plain.grad, rtol=1e-4, atol=1e-6)
    moved = collectives(compiled.hlo(), mesh.value)
    assert not [c for c in moved if c.kind == "all-gather"]
    # Sums of one number each.
    assert sum(c.payload_bytes for c in moved) <= 64


def test_a_sum_over_tp_that_leaves(mesh: xd.DeviceMesh) -> None:
    step = local_step(mesh, lambda v: v.sum(1), Partial())
    found = step(batch(mesh, X, Shard(1)))
    torch.testing.assert_close(found.cpu(), X.sum(1), rtol=1e-5, atol=1e-5)
