"""Whole ops on torch_xla: which dots they compile to, and what torch says of odd arguments."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard

import xla_dtensor as xd
import xla_dtensor.spmd as xs
from xla_dtensor.report import collectives
from xla_dtensor.runtimes import Runtime

pytestmark = [pytest.mark.only_on("torch_xla"), pytest.mark.usefixtures("runtime")]

R = Replicate()
HEADS: list[Any] = [Shard(0), Shard(1)]
_generator = torch.Generator().manual_seed(5)


def f(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=_generator)


def dots(hlo: str) -> list[tuple[int, ...]]:
    """The shapes of the dots that one device computes."""
    found = re.findall(r"= \w+\[([\d,]*)\]\S* dot\(", hlo)
    return sorted(tuple(int(size) for size in dims.split(",") if size) for dims in found)


def gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    def step(*tensors: Any) -> Any:
        return torch.autograd.grad(function(*tensors).square().sum(), tensors)

    return step


def heads(mesh: xd.DeviceMesh, *shapes: tuple[int, ...]) -> list[Any]:
    return [xd.distribute_tensor(f(*s), mesh, HEADS).requires_grad_() for s in shapes]


# (a device's share of) batch 4, heads 8, queries 6, keys 5, dim 3
ONE_HEAD_DOTS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "matmul": (lambda q, k: q @ k.mT, [(2, 2, 6, 5)]),
    "einsum": (lambda q, k: torch.einsum("bhqd,bhkd->bhqk", q, k), [(2, 2, 6, 5)]),
    "attention": (
        lambda q, k: F.scaled_dot_product_attention(q, k, k),
        [(2, 2, 6, 3), (2, 2, 6, 5)],
    ),
}


@pytest.mark.parametrize("name", ONE_HEAD_DOTS)
def test_a_device_computes_its_own_batch_and_heads(mesh: xd.DeviceMesh, name: str) -> None:
    work, expected = ONE_HEAD_DOTS[name]
    given = heads(mesh, (4, 8, 6, 3), (4, 8, 5, 3))
    step: Any = xd.compile(work)
    found = step(*given)
    assert str(found.xla_sharding()) == "{devices=[2,4,1,1]<=[8]}"
    assert dots(step.hlo()) == expected
    assert collectives(step.hlo()) == ()


@pytest.mark.parametrize("name", ONE_HEAD_DOTS)
def test_gradients_stay_on_their_device(mesh: xd.DeviceMesh, name: str) -> None:
    work, _ = ONE_HEAD_DOTS[name]
    given = heads(mesh, (4, 8, 6, 3), (4, 8, 5, 3))
    step: Any = xd.compile(gradients(work))
    found = step(*given)
    exact = [t.detach().cpu().double().requires_grad_() for t in given]
    for ours, theirs in zip(found, gradients(work)(*exact), strict=True):
        assert str(ours.xla_sharding()) == "{devices=[2,4,1,1]<=[8]}"
        torch.testing.assert_close(ours.cpu(), theirs.float(), rtol=1e-4, atol=1e-4)
    assert all(shape[:2] == (2, 2) for shape in dots(step.hlo()))
    assert collectives(step.hlo()) == ()


def test_batch_and_sequence_of_a_linear_stay_apart(mesh: xd.DeviceMesh) -> None:
    x = xd.distribute_tensor(f(4, 8, 16), mesh, HEADS).requires_grad_()
    weight = xd.distribute_tensor(f(6, 16), mesh).requires_grad_()
    step: Any = xd.compile(gradients(F.linear))
    grad_x, _ = step(x, weight)
    assert str(grad_x.xla_sharding()) == "{devices=[2,4,1]<=[8]}"
    found = collectives(step.hlo(), mesh.value)
    # The weight's gradient is a sum over both axes, and that is all.
    assert {c.kind for c in found} == {"all-reduce"}
    assert sum(c.payload_bytes for c in found) <= 2 * 4 * 6 * 16


@pytest.mark.parametrize("groups", [4, 2, 1])
def test_grouped_heads_are_not_gathered(mesh: xd.DeviceMesh, groups: int) -> None:
    """Also where there are fewer heads of keys than devices."""
    q = xd.distribute_tensor(f(4, 8, 6, 4), mesh, HEADS).requires_grad_()
    cut = [Shard(0), Shard(1) if groups == 4 else R]
    kv = [xd.distribute_tensor(f(4, groups, 6, 4), mesh, cut).requires_grad_() for _ in "kv"]

    def attention(*qkv: Any) -> Any:
        return F.scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=True)

    step: Any = xd.compile(attention)
    found = step(q, *kv)
    assert str(found.xla_sharding()) == "{devices=[2,4,1,1]<=[8]}"
    assert not [c for c in collectives(step.hlo()) if c.kind == "all-gather"]
    plain = [t.detach().cpu().double().requires_grad_() for t in (q, *kv)]
    torch.testing.assert_close(
        found.detach().cpu(), attention(*plain).float(), rtol=1e-4, atol=1e-5
    )
    for ours, theirs in zip(
        gradients(attention)(q, *kv), gradients(attention)(*plain), strict=True
    ):
        torch.testing.assert_close(ours.cpu(), theirs.float(), rtol=1e-4, atol=1e-4)


def test_float64_is_exact(mesh: xd.DeviceMesh) -> None:
    plain = [f(2, 4, 6, 8).double().requires_grad_() for _ in "qkv"]
    ours: list[Any] = [
        xd.distribute_tensor(t.detach(), mesh, HEADS).requires_grad_() for t in plain
    ]

    def work(q: Any, k: Any, v: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v) @ v.mT

    torch.testing.assert_close(work(*ours).detach().cpu(), work(*plain).detach())
    for found, wanted in zip(gradients(work)(*ours), gradients(work)(*plain), strict=True):
        torch.testing.assert_close(found.cpu(), wanted)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_row_without_a_key_is_zero(mesh: xd.DeviceMesh, kind: str) -> None:
    mask = torch.ones(6, 5, dtype=torch.bool)
    mask[2] = False
    q, k = f(4, 8, 6, 3), f(4, 8, 5, 3)
    given = mask if kind == "bool" else torch.zeros(6, 5).masked_fill(~mask, float("-inf"))
    ours = [xd.distribute_tensor(t, mesh, HEADS) for t in (q, k)]
    found: Any = F.scaled_dot_product_attention(ours[0], ours[1], ours[1], attn_mask=given)
    assert found.cpu()[:, :, 2].abs().max() == 0
    wanted = F.scaled_dot_product_attention(q, k, k, attn_mask=given)
    torch.testing.assert_close(found.cpu(), wanted, rtol=1e-4, atol=1e-5)


def test_half_precision_adds_up_in_float32(mesh: xd.DeviceMesh) -> None:
    q, k, v = (f(2, 4, 64, 8).bfloat16() for _ in "qkv")
    ours: list[Any] = [xd.distribute_tensor(t, mesh, HEADS).requires_grad_() for t in (q, k, v)]
    found: Any = F.scaled_dot_product_attention(ours[0], ours[1], ours[2])
    assert found.dtype == torch.bfloat16
    wanted = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
    torch.testing.assert_close(found.detach().cpu().double(), wanted, rtol=2e-2, atol=1e-2)
    assert {g.dtype for g in torch.autograd.grad(found.sum(), ours)} == {torch.bfloat16}


WRONG: dict[str, Callable[[Any], Any]] = {
    "matmul": lambda x: x @ x,
    "linear": lambda x: F.linear(x, x[0, 0, :, :3]),
    "attention, two dtypes": lambda x: F.scaled_dot_product_attention(x, x.double(), x),
}


@pytest.mark.parametrize("name", WRONG)
def test_torch_refuses_as_it_does(mesh: xd.DeviceMesh, name: str) -> None:
    x = f(4, 8, 6, 4)
    with pytest.raises(RuntimeError):
        WRONG[name](x)
    with pytest.raises(RuntimeError):
        WRONG[name](xd.distribute_tensor(x, mesh, HEADS)).cpu()


def test_a_marked_tensor_keeps_its_heads(runtime: Runtime) -> None:
    marked_mesh = xs.Mesh(list(range(8)), (2, 4), ("dp", "tp"))
    x = f(4, 8, 6, 4)
    marked: Any = xs.mark_sharding(x.to("xla"), marked_mesh, ("dp", "tp", None, None))
    found = F.scaled_dot_product_attention(marked, marked, marked)
    assert isinstance(found, xs.XLAShardedTensor)
    assert str(found.xla_sharding()) == "{devices=[2,4,1,1]<=[8]}"
    torch.testing.assert_close(
        found.cpu(), F.scaled_dot_product_attention(x, x, x), rtol=1e-4, atol=1e-5
    )


def test_our_own_ops_run_on_plain_xla_tensors() -> None:
    """A graph of torch.compile calls them so."""
    grad, x = f(4, 5, 3), f(4, 5, 2)
    found = torch.ops.xla_dtensor.linear_weight_grad.default(grad.to("xla"), x.to("xla"))
    torch.testing.assert_close(found.cpu(), torch.einsum("bsm,bsn->mn", grad, x))
    q, k, v = (f(2, 4, 5, 3).requires_grad_() for _ in "qkv")
    out = F.scaled_dot_product_attention(q, k, v)
    wanted = torch.autograd.grad(out.sum(), (q, k, v))
    on_device = [t.detach().to("xla") for t in (torch.ones(2, 4, 5, 3), q, k, v)]
    given = torch.ops.xla_dtensor.sdpa_backward.default(*on_device, None, False, None, False)
    for one, other in zip(given, wanted, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-4, atol=1e-5)
