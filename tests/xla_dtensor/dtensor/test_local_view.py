"""Local functions, written for one device and run on all: values, gradients, no communication.

Each function runs on eight devices at once, each with tensors of its own and all with the same
plain weights. The oracle is the same function run eight times by plain torch in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.utils.checkpoint import checkpoint

import xla_dtensor as xd
from xla_dtensor import DeviceMesh, DTensor, LocalView, distribute_tensor
from xla_dtensor.collectives import psum
from xla_dtensor.report import collectives
from xla_dtensor.runtimes import Runtime

Function = Callable[..., torch.Tensor]


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def whole_numbers(seed: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------------- the functions


def moe_dense(x: Any, router: Any, experts: Any) -> Any:
    weight, chosen = (x @ router).softmax(-1).topk(2, -1)
    share = (F.one_hot(chosen, 3).to(x.dtype) * weight.unsqueeze(-1)).sum(1)
    return torch.einsum("re,rd,edf->rf", share, x, experts)


def moe_dispatch(x: Any, router: Any, experts: Any) -> Any:
    """Tokens sorted by expert, in blocks of a fixed capacity, and added back to their places."""
    weight, chosen = (x @ router).softmax(-1).max(-1)
    order = chosen.argsort(stable=True)
    expert = chosen[order]
    rank = F.one_hot(expert, 3).cumsum(0).gather(1, expert[:, None])[:, 0] - 1
    slots = x.new_zeros(3, 4, x.shape[1]).index_put((expert, rank), x[order])
    done = torch.bmm(slots, experts)[expert, rank]
    return torch.zeros_like(done).index_add_(0, order, done * weight[order, None])


def attention(x: Any, q: Any, k: Any, v: Any, out: Any) -> Any:
    heads = [(x @ w).unflatten(-1, (2, 2)).transpose(1, 2) for w in (q, k, v)]
    mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
    return mixed.transpose(1, 2).flatten(2) @ out


def attention_by_hand(x: Any, q: Any, k: Any, v: Any) -> Any:
    scores = (x @ q) @ (x @ k).mT / 2
    later = torch.ones(3, 3, dtype=torch.bool).triu(1)
    return scores.masked_fill(later, float("-inf")).softmax(-1) @ (x @ v)


def rotary(x: Any, angle: Any) -> Any:
    one, two = x.chunk(2, -1)
    return torch.cat([one * angle.cos() - two * angle.sin(), two * angle.cos() + one], -1)


def local_vocabulary(ids: Any, table: Any) -> Any:
    mine = (ids >= 1) & (ids < 4)
    return F.embedding((ids - 1).clamp(0, 2), table) * mine.unsqueeze(-1)


def written_through_views(x: Any) -> Any:
    y = x * 1
    y[:, 1].mul_(2)
    y.t()[0].add_(1)
    y[1:3, 2:] = y[0, 2:] + y[1:3, :2]
    return y.view(2, -1)[1].sin_()


def fresh_and_written(x: Any) -> Any:
    zeros, rows = torch.zeros_like(x), x.new_zeros(2, 4)
    zeros[1:] += x[:3]
    rows.copy_(x[2:] * 2)
    return zeros.add_(1).sum(0) * rows


def masked_setitem(x: Any) -> Any:
    y = x * 2
    y[x > 0.5] = -1.0
    y[x[:, 0] < 0] = 3.0
    y[1:] = torch.where(x[:1] < 0, 0.0, y[1:])
    return y.masked_fill_(x < -0.5, 0.25).cos()


def index_put(x: Any, index: Any) -> Any:
    y = x * 1
    y[index] = x[index.flip(0)] * 2
    return y.index_put((index, index), x[0, :2], accumulate=True)


def scattered(x: Any, index: Any) -> Any:
    added = torch.zeros_like(x).scatter_add(0, index, x)
    return added + x.scatter(1, index, 0.5 * x) * x.gather(1, index)


def checkpointed(x: Any, w: Any) -> Any:
    part: Any = checkpoint(lambda a, b: (a @ b).tanh() @ b.T, x, w, use_reentrant=False)
    return part * x


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (x,) = ctx.saved_tensors
        return grad * 3 * x**2


X = (4, 4)
# name -> (function, shapes of what differs by device, shapes of what is shared, sizes of indices)
FUNCTIONS: dict[str, tuple[Function, list[Any], list[Any]]] = {
    "moe, every expert": (moe_dense, [X], [(4, 3), (3, 4, 5)]),
    "moe, dispatched": (moe_dispatch, [X], [(4, 3), (3, 4, 5)]),
    "attention": (attention, [(2, 3, 4), X, X, X], [X]),
    "attention by hand": (attention_by_hand, [(3, 4), (4, 2)], [(4, 2), (4, 2)]),
    "rotary": (rotary, [X], [(2,)]),
    "mlp": (lambda x, w, b: F.gelu(F.linear(x, w, b)) @ w, [X], [(5, 4), (5,)]),
    "swiglu": (lambda x, w, u: F.silu(x @ w) * (x @ u), [X, (4, 5)], [(4, 5)]),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (4,), w, b), [X], [(4,), (4,)]),
    "rms_norm": (lambda x, w: F.rms_norm(x, (4,), w), [X], [(4,)]),
    "group_norm": (lambda x: F.group_norm(x.view(2, 2, 4), 2), [X], []),
    "embedding": (local_vocabulary, [4], [(3, 5)]),
    "softmax": (lambda x: x.softmax(-1) * x.log_softmax(0), [X], []),
    "cross_entropy": (lambda x, t: F.cross_entropy(x, t, reduction="none"), [X, 4], []),
    "losses": (lambda x, y: F.mse_loss(x, y) + F.smooth_l1_loss(x, y), [X, X], []),
    "topk": (lambda x: x.topk(2, -1).values.cumsum(0), [X], []),
    "sort": (lambda x: x.sort(0).values * x.argsort(1), [X], []),
    "max": (lambda x: x.max(0).values - x.amin(1), [X], []),
    "gather and scatter": (scattered, [X, "index"], []),
    "index_put": (index_put, [X, "pair"], []),
    "index_select": (lambda x, i: x.index_select(1, i) @ x[i], [X, "pair"], []),
    "masked setitem": (masked_setitem, [X], []),
    "written through views": (written_through_views, [X], []),
    "fresh and written": (fresh_and_written, [X], []),
    "cumsum": (lambda x: x.cumsum(0) + x.cumprod(1), [X], []),
    "einsum": (lambda x, w: torch.einsum("ij,jk,ik->i", x, w, x), [X], [X]),
    "checkpoint": (checkpointed, [X], [(4, 3)]),
    "an autograd function": (lambda x: _Cube.apply(x.sin()), [X], []),  # pyright: ignore
    "conv1d": (lambda x, w: F.conv1d(x[None], w, padding=1), [X, (2, 4, 3)], []),
    "conv1d, one kernel": (lambda x, w: F.conv1d(x[None], w), [X], [(2, 4, 3)]),
    "windows": (lambda x: F.pad(x, (1, 1)).unfold(1, 3, 1).sum(-1), [X], []),
    "moved": (lambda x: torch.cat([x.flip(0), x.roll(1, 1)]).triu(1) + x.repeat(2, 1), [X], []),
    "norms": (lambda x: x.norm(dim=0) + x.std(1) + x.var(0) + x.logsumexp(0), [X], []),
    "where": (lambda x: torch.where(x > 0, x.exp(), x.clamp(-0.5, 0.1)), [X], []),
    "bmm": (lambda x, w: torch.baddbmm(w, x[None], w), [X], [(1, 4, 4)]),
}
ONLY_ON = {"conv1d": "torch_xla", "conv1d, one kernel": "torch_xla", "windows": "jax"}
# The others' values and gradients are checked as one program in the usual run, op by op in the
# slow one.
OP_BY_OP = {
    "moe, dispatched",
    "attention",
    "mlp",
    "embedding",
    "gather and scatter",
    "index_put",
    "masked setitem",
    "written through views",
    "fresh and written",
    "checkpoint",
    "conv1d",
}
INDEX: dict[str, Callable[[int], torch.Tensor]] = {
    "index": lambda device: whole_numbers(device, 4, 4, 4).argsort(1),
    "pair": lambda device: torch.tensor([(0, 3), (1, 2), (3, 1)][device % 3]),
}


def differing(kinds: list[Any], device: int) -> list[torch.Tensor]:
    made = []
    for number, kind in enumerate(kinds):
        seed = 10 * device + number
        if isinstance(kind, tuple):
            made.append(numbers(seed, *kind))
        else:
            made.append(
                INDEX[kind](device) if isinstance(kind, str) else whole_numbers(seed, 4, kind)
            )
    return made


def wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def graded(function: Function, tensors: list[Any]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Run a function; return its value and the gradients of a weighted sum of it."""
    leaves = [
        t.detach().requires_grad_() if t.is_floating_point() and not t.requires_grad else t
        for t in tensors
    ]
    value = function(*leaves)
    weight = torch.linspace(0.5, 2, value.numel()).reshape(value.shape)
    given = [leaf for leaf in leaves if leaf.is_floating_point()]
    return value.detach(), list(torch.autograd.grad((value * weight).sum(), given))


def by_hand(name: str) -> tuple[list[torch.Tensor], list[list[torch.Tensor]], int]:
    """Return each device's value and gradients, by plain torch."""
    function, kinds, shared = FUNCTIONS[name]
    weights = [numbers(-1 - i, *shape) for i, shape in enumerate(shared)]
    results = [
        graded(function, [*map(wide, differing(kinds, device)), *map(wide, weights)])
        for device in range(8)
    ]
    own = sum(isinstance(kind, tuple) for kind in kinds)
    return [value for value, _ in results], [grads for _, grads in results], own


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    found = found.detach().cpu().double()
    torch.testing.assert_close(found, expected.detach().double(), rtol=2e-4, atol=2e-5)


def close_shards(view: Any, expected: list[torch.Tensor]) -> None:
    assert isinstance(view, LocalView)
    for shard, value in zip(view.addressable_shards(), expected, strict=True):
        close(shard.data, value)


def marked(often: set[str]) -> list[Any]:
    return [
        pytest.param(
            name,
            marks=[
                *([pytest.mark.only_on(ONLY_ON[name])] if name in ONLY_ON else []),
                *([] if name in often else [pytest.mark.thorough]),
            ],
        )
        for name in FUNCTIONS
    ]


@pytest.mark.thorough
@pytest.mark.parametrize("name", marked(OP_BY_OP))
def test_values_and_gradients(mesh: DeviceMesh, name: str) -> None:
    function, kinds, shared = FUNCTIONS[name]
    columns = zip(*(differing(kinds, device) for device in range(8)), strict=True)
    views = [LocalView.from_shards(column, mesh) for column in columns]
    plain = [numbers(-1 - i, *shape).requires_grad_() for i, shape in enumerate(shared)]
    values, grads, own = by_hand(name)
    value, found = graded(function, [*views, *plain])
    close_shards(value, values)
    for number, grad in enumerate(found):
        if number < own:
            close_shards(grad, [each[number] for each in grads])
        else:  # a plain tensor is one tensor: what the devices send back is added up
            assert type(grad) is torch.Tensor
            close(grad, torch.stack([each[number] for each in grads]).sum(0))


@pytest.mark.thorough
@pytest.mark.parametrize("name", marked({*FUNCTIONS}))
def test_nothing_is_communicated(mesh: DeviceMesh, runtime: Runtime, name: str) -> None:
    """The whole function with its backward pass as one program: no collective in its HLO."""
    function, kinds, shared = FUNCTIONS[name]
    weights = [numbers(-1 - i, *shape) for i, shape in enumerate(shared)]
    columns = zip(*([*differing(kinds, i), *weights] for i in range(8)), strict=True)
    views = [LocalView.from_shards(column, mesh) for column in columns]
    step = xd.compile(lambda *given: graded(function, list(given)))
    value, found = step(*views)
    assert collectives(step.hlo(), mesh.value) == ()
    values, grads, _ = by_hand(name)
    close_shards(value, values)
    for number, grad in enumerate(found):
        close_shards(grad, [each[number] for each in grads])


def test_a_collective_would_be_seen(mesh: DeviceMesh, runtime: Runtime) -> None:
    view = LocalView.from_shards([numbers(i, 4) for i in range(8)], mesh)
    step = xd.compile(lambda v: psum(v.sin(), "tp"))
    step(view)
    assert [(c.kind, c.axes) for c in collectives(step.hlo(), mesh.value)] == [
        ("all-reduce", ("tp",))
    ]


# ---------------------------------------------------------------------- random values


def test_dropout(mesh: DeviceMesh) -> None:
    same: Any = distribute_tensor(torch.ones(64), mesh).to_local().clone().requires_grad_()
    kept: Any = F.dropout(same, 0.5)
    assert kept.varying == {"dp", "tp"}
    kept.sum().backward()
    masks = [shard.data for shard in kept.addressable_shards()]
    assert all(set(mask.tolist()) == {0.0, 2.0} for mask in masks)
    assert len({tuple(mask.tolist()) for mask in masks}) == 8
    close_shards(same.grad, masks)


RANDOM: dict[str, Callable[[Any], torch.Tensor]] = {
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "bernoulli": lambda v: torch.bernoulli(torch.full_like(v, 0.5)),
    "uniform_": lambda v: torch.empty_like(v).uniform_(),
    "normal_": lambda v: v.clone().normal_(),
    "attention's dropout": lambda v: F.scaled_dot_product_attention(
        *[v.view(1, 1, 16, 4)] * 3, dropout_p=0.5
    ),
}


@pytest.mark.parametrize("name", RANDOM)
def test_each_device_draws_its_own(mesh: DeviceMesh, name: str) -> None:
    same = distribute_tensor(torch.linspace(0, 1, 64), mesh).to_local()
    drawn: Any = RANDOM[name](same)
    assert drawn.varying == {"dp", "tp"}
    assert len({tuple(s.data.flatten().tolist()) for s in drawn.addressable_shards()}) == 8


def test_attention_without_dropout_draws_nothing(mesh: DeviceMesh) -> None:
    same = distribute_tensor(numbers(1, 1, 1, 4, 4), mesh).to_local()
    mixed: Any = F.scaled_dot_product_attention(same, same, same)
    assert mixed.varying == frozenset()
    assert torch.equal(DTensor.from_local(mixed, mesh).cpu(), mixed.cpu())


# ---------------------------------------------------------------------- where devices differ

LABELS: dict[str, tuple[Callable[[Any, Any], Any], set[str]]] = {
    "in union": (lambda d, t: d + t, {"dp", "tp"}),
    "with a plain tensor": (lambda d, t: torch.ones(2) * d, {"dp"}),
    "an index": (lambda d, t: torch.ones(4).expand(2, 4)[:, t.long().abs() % 4], {"tp"}),
    "a condition": (lambda d, t: torch.where(t > 0, 1.0, 0.0), {"tp"}),
    "a list": (lambda d, t: torch.cat([d, t]), {"dp", "tp"}),
    "of several results": (lambda d, t: (d * t).max(0).indices, {"dp", "tp"}),
    "written in place": (lambda d, t: d.clone().add_(t), {"dp", "tp"}),
    "written to a part": (lambda d, t: _written(d.clone(), t, lambda x: x[0]), {"dp", "tp"}),
    "written to a part of a part": (
        lambda d, t: _written(d.clone(), t, lambda x: x.view(2, 1)[1].detach()),
        {"dp", "tp"},
    ),
    "written to one of a split": (
        lambda d, t: _written(d.clone(), t, lambda x: x.split(1)[1]),
        {"dp", "tp"},
    ),
    "out=": (lambda d, t: torch.add(d, t, out=torch.empty_like(d)), {"dp", "tp"}),
    "a foreach op": (lambda d, t: _added(d.clone(), t), {"dp", "tp"}),
    "summed over an axis": (lambda d, t: psum(d + t, "dp"), {"tp"}),
}


def _written(x: Any, value: Any, part: Callable[[Any], Any]) -> Any:
    part(x).copy_(value[0])
    return x


def _added(x: Any, value: Any) -> Any:
    torch._foreach_add_([x, x.clone()], [value, value])  # pyright: ignore
    return x


@pytest.mark.parametrize("name", LABELS)
def test_varying(mesh: DeviceMesh, name: str) -> None:
    along_dp = distribute_tensor(torch.arange(4.0), mesh, [Shard(0), Replicate()]).to_local()
    along_tp = distribute_tensor(torch.arange(8.0), mesh, [Replicate(), Shard(0)]).to_local()
    function, axes = LABELS[name]
    assert function(along_dp, along_tp).varying == axes


# ---------------------------------------------------------------------- modules


def test_plain_then_distributed_then_plain(mesh: DeviceMesh) -> None:
    """Plain layers around a column- and a row-parallel one; all gradients as on one device."""
    torch.manual_seed(0)
    first, wide_one, narrow, last = (
        nn.Linear(a, b, bias=bias)
        for a, b, bias in ((4, 6, True), (6, 8, True), (8, 6, False), (6, 2, True))
    )
    x = numbers(5, 8, 4)
    layers = (first, wide_one, narrow, last)
    expected = last(narrow(wide_one(first(x)).relu()).tanh())
    (expected**2).mean().backward()
    grads: list[Any] = [p.grad for layer in layers for p in layer.parameters()]
    for layer in layers:
        layer.zero_grad()

    def sharded(p: Any, dim: int) -> Any:
        return distribute_tensor(p.detach(), mesh, [Replicate(), Shard(dim)]).requires_grad_()

    up, up_bias, down = [
        sharded(p, dim) for p, dim in ((wide_one.weight, 0), (wide_one.bias, 0), (narrow.weight, 1))
    ]
    rows = distribute_tensor(x, mesh, [Shard(0), Replicate()]).to_local()
    along_dp = [Partial(), Shard(0)], [Partial(), Shard(1)]
    inside = first(rows)
    inside = F.linear(
        inside,
        up.to_local(grad_placements=along_dp[0]),
        up_bias.to_local(grad_placements=along_dp[0]),
    ).relu()
    inside = psum(inside @ down.to_local(grad_placements=along_dp[1]).T, "tp")
    y = last(inside.tanh())
    loss = psum((y**2).sum(), "dp") / 16
    loss.backward()
    close(loss, (expected**2).mean())
    found = [*first.parameters(), up, up_bias, down, *last.parameters()]
    for parameter, grad in zip(found, grads, strict=True):
        mine: Any = parameter.grad
        assert isinstance(mine, DTensor) == isinstance(parameter, DTensor)
        close(mine.cpu(), grad)


def test_modules_of_plain_parameters(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    x = numbers(3, 8, 3, 4)
    block(x).sin().sum().backward()
    grads = [torch.clone(p.grad) for p in block.parameters()]  # pyright: ignore
    expected = block(x).detach()
    block.zero_grad()
    view = distribute_tensor(x, mesh, [Shard(0), Replicate()]).to_local()
    y = block(view)
    assert torch.equal(y.cpu(), y.addressable_shards()[0].data)
    close(DTensor.from_local(y.detach(), mesh, [Shard(0), Replicate()]).cpu(), expected)
    psum(y.sin().sum(), "dp").backward()
    for parameter, grad in zip(block.parameters(), grads, strict=True):
        close(parameter.grad, grad)  # pyright: ignore
