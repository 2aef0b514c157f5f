"""Ops inside a manual region on torch_xla: each device on its own, without communication."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.xla_dtensor.runtimes.torch_xla.torch_xla_tiles import (
    MESH,
    Tiles,
    aten,
    communication,
    each,
    layout,
    op,
    region,
    stacked,
    values,
)
from xla_dtensor.runtimes.base import Runtime

pytest.importorskip("torch_xla")
pytestmark = pytest.mark.only_on("torch_xla")


TABLE = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
MASK = TABLE > 0.3
ROWS = torch.tensor([3, 1, 2])


def written(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y.mul_(2)
    y[:, 2] = 7.0
    y[0].add_(1)
    y.t()[1:3].sub_(0.5)
    y[ROWS] = TABLE[:3]
    y[5] = TABLE[5]
    y.masked_fill_(MASK, 0.25)
    return y


def copied(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros_like(x)
    y.copy_(x)
    y[0].copy_(TABLE[0])
    return y + x.clone().copy_(TABLE)


def attention(x: torch.Tensor, is_causal: bool = False) -> torch.Tensor:
    heads = x.view(1, 2, 4, 8)
    return F.scaled_dot_product_attention(heads, heads, heads, is_causal=is_causal)


def norms(x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, (8,), TABLE[0], TABLE[1]) + F.batch_norm(x, None, None, training=True)


OPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "pointwise": lambda x: torch.tanh(x) * 2 + x.exp().clamp(0, 1) - x.sigmoid() / 3.5,
    "compare": lambda x: ((x > 0) & (x < TABLE)).to(torch.int32),
    "matmul": lambda x: x @ x.t(),
    "matmul_host": lambda x: TABLE @ x @ TABLE,
    "bmm": lambda x: x.view(2, 4, 8) @ x.view(2, 8, 4),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, TABLE),
    "softmax": lambda x: x.softmax(-1) + x.log_softmax(0),
    "topk": lambda x: x.topk(3, -1)[0],
    "topk_indices": lambda x: x.topk(3, -1)[1],
    "sort": lambda x: x.sort(-1, descending=True)[0] + x.argsort(0),
    "kthvalue": lambda x: x.kthvalue(3, -1)[0],
    "argmax": lambda x: x.argmax(-1) // 3,
    "reductions": lambda x: x.sum(0) + x.amax() + x.mean(1) + x.var(0) + x.norm() + x.prod(1),
    "scans": lambda x: x.cumsum(0) + x.cumprod(1) + x.logsumexp(-1),
    "written": written,
    "copied": copied,
    "views": lambda x: x.view(4, 2, 8).transpose(0, 2).reshape(8, 8)[1:5].squeeze().t(),
    "expand": lambda x: x[2].flatten().unsqueeze(0).expand(3, 8),
    "cat": lambda x: torch.cat([x, x * 2, TABLE], 1),
    "stack": lambda x: torch.stack([x, TABLE]).roll(1, 0).flip(1),
    "index": lambda x: x[ROWS, 1:] + x[MASK][:7] + x[~MASK[0], 1:].sum(0),
    "gather": lambda x: x.gather(1, x.topk(3, -1)[1]),
    "scatter": lambda x: torch.zeros_like(x).scatter(1, x.topk(3, -1)[1], 1.0),
    "index_add": lambda x: x.clone().index_add_(0, ROWS, x[:3]),
    "where": lambda x: torch.where(MASK, x, 0.0) + x.masked_fill(MASK, -9.0),
    "triangles": lambda x: x.triu(1) + x.tril(),
    "pad": lambda x: F.pad(x, (1, 2)),
    "cast": lambda x: x.to(torch.bfloat16).to(torch.float64),
    "linear": lambda x: F.linear(x, TABLE, TABLE[0]),
    "addmm": lambda x: torch.addmm(TABLE, x, x),
    "norms": norms,
    "activations": lambda x: F.gelu(x) + F.silu(x) + F.relu(x) + F.softplus(x),
    "attention": lambda x: attention(x, is_causal=True),
    "convolution": lambda x: F.conv2d(x.view(1, 1, 8, 8), TABLE[:4, :4].view(1, 1, 4, 4)),
    "pooling": lambda x: F.max_pool2d(x.view(1, 1, 8, 8), 2) + F.avg_pool2d(x.view(1, 1, 8, 8), 2),
    "embedding": lambda x: F.embedding(x.argmax(-1), TABLE) + F.one_hot(x.argmax(-1), 8),
    "cross_entropy": lambda x: F.cross_entropy(x, x.argmin(-1)),
    "zeros_like": lambda x: torch.zeros_like(x),
    "new_zeros": lambda x: x.new_zeros(3, 3) + 1,
    "full_like": lambda x: torch.full_like(x, 3.5) @ x + torch.ones_like(x),
    "host_scalar": lambda x: x * torch.tensor(2.5) + torch.tensor(3),
    "factories": lambda x: x + torch.arange(8) + torch.eye(8) + torch.full((8, 1), 2.5),
    "svd": lambda x: torch.linalg.svdvals(x),
    "detach": lambda x: x.detach(),
}


def whole_of_tiles(runtime: Runtime) -> tuple[torch.Tensor, torch.Tensor]:
    host = torch.randn(8, 8, 8, generator=torch.Generator().manual_seed(0))
    return host, runtime.put(host, each(MESH, 2))


def tiles(runtime: Runtime, whole: torch.Tensor) -> Any:
    manual = runtime.enter_manual(whole, each(MESH, 2), region(MESH))
    return Tiles(op(runtime, aten.view.default, manual, [8, 8]), runtime)


def check_stacked(
    runtime: Runtime, found: torch.Tensor, wanted: list[torch.Tensor], name: str
) -> None:
    host, want = runtime.to_host(found), torch.stack(wanted)
    assert host.dtype == want.dtype, name
    torch.testing.assert_close(host, want, atol=1e-4, rtol=1e-4, msg=lambda text: f"{name}: {text}")


def test_ops_are_local(runtime: Runtime) -> None:
    host, whole = whole_of_tiles(runtime)

    def step(x: torch.Tensor) -> dict[str, torch.Tensor]:
        results: dict[str, Any] = {name: work(tiles(runtime, x)) for name, work in OPS.items()}
        return {name: stacked(runtime, MESH, found.payload) for name, found in results.items()}

    compiled = runtime.compile(step)
    for name, found in compiled(whole).items():
        check_stacked(runtime, found, [OPS[name](tile) for tile in host], name)
    assert communication(compiled.hlo()) == []


TRAINED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "linear": lambda x: F.gelu(F.linear(x, TABLE, TABLE[0])) @ x,
    "norms": lambda x: F.layer_norm(x, (8,), x[0], TABLE[1]),
    "attention": lambda x: attention(x),
    "convolution": lambda x: F.conv2d(x.view(1, 1, 8, 8), x.view(4, 1, 4, 4), padding=1),
    "pooling": lambda x: F.max_pool2d(x.view(1, 1, 8, 8), 2),
    "embedding": lambda x: F.embedding(ROWS, x) + x[ROWS] + x.softmax(0)[:3],
    "cross_entropy": lambda x: F.cross_entropy(x, torch.arange(8)),
    "pieces": lambda x: torch.cat([x.tril(), x.sort(-1)[0], x.topk(2)[0]], 1).cumsum(0),
}


def test_gradients_are_local(runtime: Runtime) -> None:
    host, whole = whole_of_tiles(runtime)

    def gradient(work: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Any:
        x.requires_grad_()
        work(x).pow(2).sum().backward()
        return x.grad

    def step(x: torch.Tensor) -> dict[str, torch.Tensor]:
        results = {name: gradient(work, tiles(runtime, x)) for name, work in TRAINED.items()}
        return {name: stacked(runtime, MESH, found.payload) for name, found in results.items()}

    compiled = runtime.compile(step)
    for name, found in compiled(whole).items():
        wanted = [gradient(TRAINED[name], tile.clone()) for tile in host]
        check_stacked(runtime, found, wanted, name)
    assert communication(compiled.hlo()) == []


def test_ops_one_by_one(runtime: Runtime) -> None:
    """The same without a step, where torch_xla may execute at any time."""
    host, whole = whole_of_tiles(runtime)
    for name in ("pointwise", "written", "index", "zeros_like", "attention"):
        result = OPS[name](tiles(runtime, whole))
        assert isinstance(result, Tiles)
        found = stacked(runtime, MESH, result.payload)
        check_stacked(runtime, found, [OPS[name](tile) for tile in host], name)


def test_devices_draw_the_same_numbers(runtime: Runtime) -> None:
    _, whole = whole_of_tiles(runtime)
    for draw in (torch.rand_like, torch.randn_like, lambda x: F.dropout(torch.ones_like(x))):
        drawn = []
        for seed in (1, 1, 2):
            runtime.manual_seed(seed)
            result: Any = draw(tiles(runtime, whole))
            drawn.append(runtime.to_host(stacked(runtime, MESH, result.payload)))
        assert all(torch.equal(tile, drawn[0][0]) for tile in drawn[0])
        assert len(drawn[0][0].unique()) > 1
        assert torch.equal(drawn[0], drawn[1])
        assert not torch.equal(drawn[0], drawn[2])


def test_operands_of_every_device(runtime: Runtime) -> None:
    """Host tensors, plain XLA tensors and factories: manual payloads equal on every device."""
    host, plain = values(3, 2), torch.ones(3, 2, device="xla") * 5
    made = [
        (op(runtime, aten.detach.default, host), host.clone()),
        (op(runtime, aten.clone.default, host), host.clone()),
        (op(runtime, aten.add.Tensor, plain, host), 5 + host),
        (op(runtime, aten.full.default, [2], 1, device=torch.device("xla")), torch.ones(2).long()),
        (op(runtime, aten.full.default, [2], 2.5), torch.full((2,), 2.5)),
        (op(runtime, aten.zeros.default, [], device=torch.device("xla")), torch.zeros(())),
    ]
    host.zero_()  # Was copied.
    spread_out = [(stacked(runtime, MESH, manual), want) for manual, want in made]
    whole = runtime.leave_manual(made[3][0], layout(MESH, ("tp", "dp")), region(MESH))
    for found, want in spread_out:
        assert torch.equal(runtime.to_host(found), want.expand(8, *want.shape))
    assert torch.equal(runtime.to_host(whole), torch.ones(16, dtype=torch.int64))


def test_global_and_manual_programs_share_numbers(runtime: Runtime) -> None:
    """Constants and values that both sides use: GSPMD must not carry a label from one to other."""
    asked, host = layout(MESH, ("dp", "tp"), None), values(16, 8)

    def step(x: torch.Tensor) -> torch.Tensor:
        table = runtime.put(TABLE[:1], layout(MESH, None, None))
        x = runtime.run_op(aten.add.Tensor, (x, table), {})
        x = runtime.run_op(aten.mul.Tensor, (x, 2.5), {})
        manual = runtime.enter_manual(x, asked, region(MESH))
        also = runtime.enter_manual(table, layout(MESH, None, None), region(MESH))
        manual = op(runtime, aten.mul.Tensor, op(runtime, aten.add.Tensor, manual, also), 2.5)
        back = runtime.leave_manual(manual, asked, region(MESH))
        ones = runtime.run_op(aten.ones_like.default, (back,), {})
        return runtime.run_op(
            aten.add.Tensor, (back, runtime.run_op(aten.mul.Tensor, (ones, 2.5), {})), {}
        )

    compiled = runtime.compile(step)
    result = compiled(runtime.put(host, asked))
    want = ((host + TABLE[:1]) * 2.5 + TABLE[:1]) * 2.5 + 2.5
    torch.testing.assert_close(runtime.to_host(result), want)
    assert communication(compiled.hlo()) == []
