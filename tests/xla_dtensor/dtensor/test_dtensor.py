"""DTensor: values of ordinary ops, labels of their outputs, and Python's protocols."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

import xla_dtensor as xd
from xla_dtensor.errors import DistributeError
from xla_dtensor.runtimes import Runtime

R = Replicate()
Make = Callable[[torch.Tensor, list[Any]], Any]

# name: f(x, y, w, i) with x (8, 12), y (8, 12), w (12, 4), i (8,) int64
OPS: dict[str, Callable[..., Any]] = {
    "add": lambda x, y, w, i: x + y,
    "sub_alpha": lambda x, y, w, i: torch.sub(x, y, alpha=2),
    "mul_number": lambda x, y, w, i: 3 * x,
    "div_row": lambda x, y, w, i: x / (y[0].abs() + 1),
    "pow": lambda x, y, w, i: x**2,
    "neg_abs_sqrt": lambda x, y, w, i: (-x).abs().sqrt(),
    "exp_log1p": lambda x, y, w, i: x.exp().log1p(),
    "clamp": lambda x, y, w, i: x.clamp(-0.5, 0.5),
    "compare": lambda x, y, w, i: (x > y) & (x != 0),
    "where": lambda x, y, w, i: torch.where(x > 0, x, y),
    "maximum": lambda x, y, w, i: torch.maximum(x, y),
    "relu_gelu_silu": lambda x, y, w, i: F.relu(x) + F.gelu(x) + F.silu(x),
    "sum": lambda x, y, w, i: x.sum(),
    "sum_dim": lambda x, y, w, i: x.sum(0),
    "mean_keepdim": lambda x, y, w, i: x.mean(1, keepdim=True),
    "max": lambda x, y, w, i: x.max(),
    "max_dim": lambda x, y, w, i: x.max(1),
    "argmax": lambda x, y, w, i: x.argmax(0),
    "var": lambda x, y, w, i: x.var(1),
    "var_mean": lambda x, y, w, i: torch.var_mean(x, 0),
    "norm": lambda x, y, w, i: torch.linalg.vector_norm(x),
    "cumsum": lambda x, y, w, i: x.cumsum(1),
    "softmax": lambda x, y, w, i: x.softmax(-1),
    "log_softmax": lambda x, y, w, i: x.log_softmax(0),
    "logsumexp": lambda x, y, w, i: x.logsumexp(1),
    "layer_norm": lambda x, y, w, i: F.layer_norm(x, (12,)),
    "rms_norm": lambda x, y, w, i: F.rms_norm(x, (12,), eps=1e-6),
    "matmul": lambda x, y, w, i: x @ w,
    "mm_transposed": lambda x, y, w, i: x @ y.t(),
    "linear": lambda x, y, w, i: F.linear(x, w.t(), w.sum(0)),
    "einsum": lambda x, y, w, i: torch.einsum("bi,bi,ij->bj", x, y, w),
    "outer_batched": lambda x, y, w, i: x.view(2, 4, 12) @ w,
    "embedding": lambda x, y, w, i: F.embedding(i, w),
    "index_select": lambda x, y, w, i: w.index_select(0, i),
    "gather": lambda x, y, w, i: w.gather(0, i.view(8, 1)),
    "index": lambda x, y, w, i: x[i.remainder(8)],
    "slice": lambda x, y, w, i: x[1:7, ::3],
    "select": lambda x, y, w, i: x[:, -1],
    "t": lambda x, y, w, i: x.t(),
    "permute_unsqueeze": lambda x, y, w, i: x.unsqueeze(1).permute(2, 0, 1),
    "view_split": lambda x, y, w, i: x.view(8, 3, 4),
    "view_merge": lambda x, y, w, i: x.reshape(-1),
    "expand": lambda x, y, w, i: x.unsqueeze(0).expand(3, 8, 12),
    "cat": lambda x, y, w, i: torch.cat([x, y], 0),
    "stack": lambda x, y, w, i: torch.stack([x, y], 1),
    "split": lambda x, y, w, i: x.split(5, dim=1),
    "chunk": lambda x, y, w, i: x.chunk(3, dim=0),
    "unbind": lambda x, y, w, i: x.unbind(0),
    "pad": lambda x, y, w, i: F.pad(x, (1, 2, 0, 1)),
    "flip_roll": lambda x, y, w, i: x.flip(0).roll(2, 1),
    "tril": lambda x, y, w, i: x.tril(),
    "masked_fill": lambda x, y, w, i: x.masked_fill(y > 0, float("-inf")),
    "topk": lambda x, y, w, i: x.topk(3, dim=1),
    "sort": lambda x, y, w, i: x.sort(dim=0),
    "one_hot": lambda x, y, w, i: F.one_hot(i, 12),
    "cast": lambda x, y, w, i: x.to(torch.bfloat16),
    "zeros_like": lambda x, y, w, i: torch.zeros_like(x),
    "new_ones": lambda x, y, w, i: x.new_ones(3, 2),
}
TWO_DIMS = ([Shard(0), Shard(1)], [Shard(0), R], [R, Shard(0)], [Shard(0), R])
ROWS_BY_BOTH = ([Shard(0), Shard(0)], [Shard(0), Shard(0)], [R, R], [Shard(0), Shard(0)])
# Ops to which the rows' order and cuts matter most are tried with both.
CASES = [(name, TWO_DIMS) for name in OPS] + [
    (name, ROWS_BY_BOTH)
    for name in ("add", "sum_dim", "matmul", "embedding", "index", "slice", "view_merge", "cat")
]


@pytest.fixture
def put(mesh: xd.DeviceMesh) -> Make:
    return lambda tensor, placements: xd.distribute_tensor(tensor, mesh, placements)


def outputs(result: Any) -> list[torch.Tensor]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "placements"), CASES, ids=[f"{name}-{p[0]}" for name, p in CASES])
def test_values_and_labels(name: str, placements: Any, put: Make, mesh: xd.DeviceMesh) -> None:
    torch.manual_seed(0)
    plain = [torch.randn(8, 12), torch.randn(8, 12), torch.randn(12, 4), torch.randint(12, (8,))]
    distributed = [put(t, p) for t, p in zip(plain, placements, strict=True)]
    expected, found = outputs(OPS[name](*plain)), outputs(OPS[name](*distributed))
    assert len(found) == len(expected)
    for e, f in zip(expected, found, strict=True):
        assert type(f) is xd.DTensor
        assert f.device_mesh is mesh
        # A legal label: one placement per mesh axis, dims that exist, no state of torch's own.
        assert len(f.placements) == 2
        assert f.mesh_layout.ndim == f.ndim
        assert all(type(p) is Partial for p in f.placements if p.is_partial())
        assert (f.shape, f.dtype) == (e.shape, e.dtype)
        assert f.xla_sharding().kind in ("replicated", "tiled")
        torch.testing.assert_close(f.cpu(), e)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x, w: x + 1, (Shard(0), Shard(1))),
        (lambda x, w: x.t(), (Shard(1), Shard(0))),
        (lambda x, w: x.detach(), (Shard(0), Shard(1))),
        (lambda x, w: x.clone(), (Shard(0), Shard(1))),
        (lambda x, w: x.to(torch.float64), (Shard(0), Shard(1))),
        (lambda x, w: x.unsqueeze(0), (Shard(1), Shard(2))),
        (lambda x, w: x.sum(), (Partial("sum"), Partial("sum"))),
        (lambda x, w: x.sum(0), (Partial("sum"), Shard(0))),
        (lambda x, w: x.sum(1), (Shard(0), Partial("sum"))),
        (lambda x, w: x.amax(1), (Shard(0), Partial("max"))),
        (lambda x, w: x.mean(1), (Shard(0), Partial("avg"))),
        (lambda x, w: x.softmax(1), (Shard(0), R)),
        # The contraction is sharded over tp, the rows over dp.
        (lambda x, w: x @ w, (Shard(0), Partial("sum"))),
        (lambda x, w: F.linear(x, w.t()), (Shard(0), Partial("sum"))),
        (lambda x, w: w.t() @ x.t(), (Shard(1), Partial("sum"))),
        # Both operands would cut the output over dp; the rows win.
        (lambda x, w: x @ x.t(), (Shard(0), Partial("sum"))),
        # tp cuts 12 columns into 4 parts of 3, which are no rows of (3, 4); dp is not concerned.
        (lambda x, w: x.view(8, 3, 4), (Shard(0), R)),
        (lambda x, w: x.view(2, 4, 12), (Shard(0), Shard(2))),
        (lambda x, w: torch.zeros_like(x), (Shard(0), Shard(1))),
    ],
)
def test_labels_by_hand(function: Any, expected: Any, put: Make) -> None:
    x, w = put(torch.randn(8, 12), [Shard(0), Shard(1)]), put(torch.randn(12, 4), [R, Shard(0)])
    assert function(x, w).placements == expected


def test_labels_are_not_enforced_and_the_truth_is_told(put: Make) -> None:
    x = put(torch.randn(8, 12), [Shard(0), Shard(1)])
    total = x.sum(1)
    assert total.placements == (Shard(0), Partial("sum"))
    # The value is whole: only the label is pending.
    replicated_over_tp = xd.OpSharding.parse("{devices=[2,4]<=[8] last_tile_dim_replicate}")
    moved = total.redistribute(placements=[Shard(0), R])
    assert moved.xla_sharding() == replicated_over_tp
    torch.testing.assert_close(total.cpu(), x.cpu().sum(1))


# ---------------------------------------------------------------- mixed tensors and meshes


def test_plain_tensors_stand_for_their_global_value(put: Make) -> None:
    x, mask = torch.randn(8, 12), torch.ones(8, 12).tril().bool()
    d = put(x, [Shard(0), Shard(1)])
    for found, expected in (
        (d + torch.arange(12), x + torch.arange(12)),
        (torch.arange(12) - d, torch.arange(12) - x),
        (d.masked_fill(mask, 0), x.masked_fill(mask, 0)),
        (torch.where(mask, d, torch.tensor(2.0)), torch.where(mask, x, torch.tensor(2.0))),
        (d[torch.tensor([3, 1])], x[torch.tensor([3, 1])]),
        (torch.cat([d, torch.zeros(1, 12)]), torch.cat([x, torch.zeros(1, 12)])),
        (F.linear(d, torch.eye(12)), x),
        (d + d.full_tensor(), x + x),
    ):
        assert type(found) is xd.DTensor
        torch.testing.assert_close(found.cpu(), expected)


def test_gradient_reaches_a_plain_parameter(put: Make) -> None:
    w = torch.randn(12, requires_grad=True)
    x = torch.randn(8, 12)
    (put(x, [Shard(0), Shard(1)]) * w).sum().backward()
    assert w.grad is not None
    torch.testing.assert_close(w.grad.cpu(), x.sum(0))


def test_tensors_of_two_meshes(put: Make, mesh: xd.DeviceMesh) -> None:
    flat = xd.init_device_mesh("xla", (8,), mesh_dim_names=("all",))
    a, b = torch.randn(8, 4), torch.randn(8, 4)
    found = put(a, [Shard(0), R]) + xd.distribute_tensor(b, flat, [Shard(0)])
    assert found.device_mesh is mesh
    torch.testing.assert_close(found.cpu(), a + b)


# ---------------------------------------------------------------- writing


def test_in_place_ops_keep_object_placements_and_sharding(put: Make) -> None:
    x = torch.randn(8, 12)
    d = put(x, [Shard(0), Shard(1)])
    before = d.xla_sharding()
    assert d.add_(1) is d
    assert d.mul_(put(x, [R, R])) is d
    d += 2
    d[d < 0] = 0
    d.copy_(d.clone().clamp_(max=3))
    expected = (((x + 1) * x) + 2).clamp(min=0).clamp(max=3)
    torch.testing.assert_close(d.cpu(), expected)
    assert d.placements == (Shard(0), Shard(1))
    assert d.xla_sharding() == before
    d.zero_()
    assert d.xla_sharding() == before
    assert d.sum().item() == 0


def test_in_place_through_views(put: Make) -> None:
    x = torch.arange(96.0).reshape(8, 12)
    d, e = put(x, [Shard(0), Shard(1)]), x.clone()
    before = d.xla_sharding()
    for t in (d, e):
        t[0].zero_()
        t.t()[3:5].mul_(2)
        t.view(4, 2, 12)[:, 1].add_(1)
        row = t[2]
        row[::2] = -1
        t[1:3, 4:6].copy_(torch.full((2, 2), 7.0))
        t.unsqueeze(0)[0, 7].fill_(5)
    torch.testing.assert_close(d.cpu(), e)
    view = d[3]
    d.add_(10)
    torch.testing.assert_close(view.cpu(), e[3] + 10)
    assert d.xla_sharding() == before
    assert d.placements == (Shard(0), Shard(1))


def test_out_argument(put: Make) -> None:
    x = torch.randn(8, 4)
    out = put(torch.zeros(8, 4), [Shard(0), R])
    result = torch.add(put(x, [R, R]), 1, out=out)
    assert result is out
    torch.testing.assert_close(out.cpu(), x + 1)


def test_assigning_data(put: Make) -> None:
    p = cast("Any", nn.Parameter(put(torch.zeros(8, 4), [R, R])))
    p.data = put(torch.ones(6, 2), [Shard(0), R])
    assert (p.shape, p.placements) == ((6, 2), (Shard(0), R))
    assert (isinstance(p, nn.Parameter), p.requires_grad) == (True, True)
    assert {s.data.shape for s in p.addressable_shards()} == {(3, 2)}
    p.data.mul_(3)
    p.data = p.data + 1
    (p * 2).sum().backward()
    assert torch.equal(p.cpu(), torch.full((6, 2), 4.0))
    assert torch.equal(p.grad.cpu(), torch.full((6, 2), 2.0))
    with pytest.raises(DistributeError, match=r"Tensor was assigned to \.data of DTensor\("):
        p.data = torch.ones(6, 2)


def test_detach_shares_the_value(put: Make) -> None:
    p = cast("Any", nn.Parameter(put(torch.zeros(8), [Shard(0), R])))
    with torch.no_grad():
        p.detach().add_(1)
    assert not p.detach().requires_grad
    assert p.detach().placements == (Shard(0), R)
    assert torch.equal(p.cpu(), torch.ones(8))


# ---------------------------------------------------------------- Python's protocols


def test_repr_gathers_nothing(put: Make, runtime: Runtime, monkeypatch: Any) -> None:
    d = nn.Parameter(put(torch.randn(10, 12), [Shard(0), Shard(0)]))

    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("repr read the devices")

    for name in ("to_host", "constrain", "run_op", "addressable_shards", "op_sharding"):
        monkeypatch.setattr(runtime, name, forbidden)
    text = (
        "DTensor(shape=(10, 12), dtype=float32, placements=(S(0), S(0)), mesh=(dp=2, tp=4), "
        "local_shape=(2, 12), requires_grad=True)"
    )
    assert str(d) == repr(d) == f"{d}"
    assert text in repr(d)


def test_reading_values(put: Make) -> None:
    x = torch.arange(8.0)
    d = put(x, [Shard(0), Shard(0)])
    assert d.tolist() == x.tolist()
    assert (d.numpy() == x.numpy()).all()
    assert (d[3].item(), float(d[3]), int(d[3]), bool(d[3] > 2)) == (3.0, 3.0, 3, True)
    assert f"{d[3]:.2f}" == "3.00"
    assert (len(d), [row.item() for row in d], 5.0 in d) == (8, x.tolist(), True)
    assert torch.equal(d, d.clone())
    assert torch.allclose(d, put(x, [R, R]))
    torch.testing.assert_close(d.full_tensor(), put(x, [Shard(0), Shard(0)]).full_tensor())
    assert {d: 1}[d] == 1
    assert type(d.cpu()) is torch.Tensor


@pytest.mark.parametrize("parameter", [False, True])
def test_deepcopy(put: Make, parameter: bool) -> None:
    d = put(torch.arange(8.0), [Shard(0), Shard(0)])
    d = cast("Any", nn.Parameter(d)) if parameter else d
    twice = copy.deepcopy([d, d])
    assert twice[0] is twice[1]
    assert type(twice[0]) is type(d)
    assert isinstance(twice[0], nn.Parameter) is parameter
    assert twice[0].placements == d.placements
    assert twice[0].xla_sharding() == d.xla_sharding()
    assert twice[0].requires_grad is d.requires_grad
    with torch.no_grad():
        twice[0].add_(1)
    assert torch.equal(d.cpu(), torch.arange(8.0))


def test_deepcopy_of_a_module_keeps_ties(mesh: xd.DeviceMesh) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[1].weight = module[0].weight
    copied = cast("Any", copy.deepcopy(xd.distribute_module(module, mesh)))
    assert copied[1].weight is copied[0].weight
    assert copied[0].weight is not module[0].weight
