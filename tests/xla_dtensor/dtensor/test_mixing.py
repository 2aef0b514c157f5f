"""Plain tensors among DTensors: their value is the global one, or they are refused."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import implicit_replication as torchs_own

import xla_dtensor as xd
from xla_dtensor.dtensor import dispatch as mixing
from xla_dtensor.errors import DistributeError, MixedTensorsError

R = Replicate()
untyped: Any = torch  # some of its names are private to it


@pytest.fixture
def x(mesh: xd.DeviceMesh) -> Any:
    return xd.distribute_tensor(torch.arange(32.0).reshape(8, 4), mesh, [Shard(0), R])


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Callable[[], Any]:
    monkeypatch.setattr(mixing, "_logged", set())
    caplog.set_level(logging.INFO, "xla_dtensor")
    return lambda: [
        r.getMessage() for r in caplog.records if "plain torch.Tensor" in r.getMessage()
    ]


P = torch.full((8, 4), 2.0)
CASES: dict[str, Callable[[Any, Any], Any]] = {
    "second": lambda d, p: d * p,
    "first": lambda d, p: p - d,
    "keyword": lambda d, p: torch.ops.aten.add.Tensor(d, other=p),
    "in a list": lambda d, p: torch.cat([d, p, d]),
    "first in a list": lambda d, p: torch.stack([p, d], 1),
    "bias": lambda d, p: F.linear(d, p, p[:, 0]),
    "mask": lambda d, p: d.masked_fill(p > 1, 0),
    "index": lambda d, p: d[torch.tensor([1, 5])],
    "foreach": lambda d, p: untyped._foreach_add([d, p], [p, d]),
    "foreach of one kind each": lambda d, p: untyped._foreach_mul([d, d], [p, p]),
    "foreach norm": lambda d, p: untyped._foreach_norm([d, p]),
    "where": lambda d, p: torch.where(p > 1, d, p),
    "lerp": lambda d, p: d.lerp(p, 0.5),
}


@pytest.mark.parametrize("name", CASES)
def test_a_plain_tensor_is_its_value_on_every_device(name: str, x: Any) -> None:
    expected, found = CASES[name](x.cpu(), P), CASES[name](x, P)
    several = isinstance(found, (list, tuple))
    for f, e in zip(
        found if several else [found], expected if several else [expected], strict=True
    ):
        assert type(f) is xd.DTensor
        torch.testing.assert_close(f.cpu(), e)


def test_labels_count_it_as_replicated(x: Any) -> None:
    assert (x * P).placements == (Shard(0), R)
    assert (P - x).placements == (Shard(0), R)


def test_one_log_line_per_op(x: Any, log: Callable[[], Any]) -> None:
    _ = x * P
    _ = x * P[0]
    assert log() == [
        "aten.mul.Tensor was called on DTensors and a plain torch.Tensor of shape=(8, 4) as "
        "argument 1 ('other'); it counts as Replicate: its value, the same on every device."
    ]
    torch.cat([x, P])
    assert len(log()) == 2
    assert "as item 1 of argument 0 ('tensors')" in log()[1]
    # A number in a tensor's clothing needs no word.
    _ = x / torch.tensor(2.0)
    _ = x + 1
    _ = x + x
    assert len(log()) == 2


def test_foreach_writes_to_both_kinds(x: Any) -> None:
    for write in (
        lambda ts, p: untyped._foreach_add_(ts, 1),
        lambda ts, p: untyped._foreach_mul_(ts, [p, p]),
        lambda ts, p: untyped._foreach_copy_(ts, [p, p + 1]),
    ):
        found, expected = [x.clone(), P.clone()], [x.cpu(), P.clone()]
        write(found, P)
        write(expected, P)
        assert type(found[1]) is torch.Tensor
        torch.testing.assert_close(found[0].cpu(), expected[0])
        torch.testing.assert_close(found[1], expected[1])
        assert found[0].placements == (Shard(0), R)


def test_a_plain_destination(x: Any) -> None:
    out = torch.zeros(8, 4)
    assert torch.add(x, 1, out=out) is out
    torch.testing.assert_close(out, x.cpu() + 1)
    torch.testing.assert_close(torch.ones(8, 4).add_(x), x.cpu() + 1)


@pytest.mark.parametrize("foreach", [None, False])
def test_gradients_of_both_kinds_are_clipped(x: Any, foreach: bool | None) -> None:
    def clipped(distributed: Any) -> Any:
        a: Any = nn.Parameter(distributed)
        b: Any = nn.Parameter(P.clone())
        a.grad, b.grad = distributed.detach() * 2, P.clone()
        norm = nn.utils.clip_grad_norm_([a, b], 1.0, foreach=foreach)
        return [t.cpu() for t in (norm, a.grad, b.grad)]

    for f, e in zip(clipped(x), clipped(x.cpu()), strict=True):
        torch.testing.assert_close(f.detach(), e.detach())


# ---------------------------------------------------------------- implicit_replication(False)


@pytest.mark.parametrize(
    ("call", "place", "shape"),
    [
        (lambda d: d * P, r"aten\.mul\.Tensor .* as argument 1 \('other'\)", (8, 4)),
        (lambda d: P - d, r"aten\.sub\.Tensor .* as argument 0 \('self'\)", (8, 4)),
        (lambda d: torch.cat([d, P]), r"aten\.cat.* as item 1 of argument 0 \('tensors'\)", (8, 4)),
        (lambda d: torch.add(d, 1, out=P), r"aten\.add\.out .* as argument 'out'", (8, 4)),
        (lambda d: d.add_(P[0]), r"aten\.add_\.Tensor .* as argument 1 \('other'\)", (4,)),
        (lambda d: d.copy_(P), r"aten\.copy_.* as argument 1 \('src'\)", (8, 4)),
        (lambda d: d[torch.tensor([1, 2])], r"as item 0 of argument 1 \('indices'\)", (2,)),
        (lambda d: untyped._foreach_add([d], [P]), r"as item 0 of argument 1 \('other'\)", (8, 4)),
    ],
)
def test_pytorchs_rule_refuses_naming_op_and_argument(
    call: Any, place: str, shape: tuple[int, ...], x: Any, count_sentences: Callable[[str], int]
) -> None:
    before = x.cpu()
    with xd.implicit_replication(False), pytest.raises(RuntimeError, match=place) as raised:
        call(x)
    assert isinstance(raised.value, MixedTensorsError)
    assert f"shape={shape}" in str(raised.value)
    assert "got mixed torch.Tensor and DTensor" in str(raised.value)
    assert count_sentences(str(raised.value)) == 3
    torch.testing.assert_close(x.cpu(), before)
    call(x.clone())


def test_pytorchs_rule_lets_one_element_pass(x: Any) -> None:
    with xd.implicit_replication(False):
        y = x * torch.tensor(2.0) + torch.tensor([[1.0]])
        with pytest.warns(UserWarning, match=r"aten\.add\.Tensor: found a non-scalar tensor with"):
            y = y + torch.tensor([3.0])
        y[:, 0] = 5.0
    expected = x.cpu() * 2 + 4
    expected[:, 0] = 5.0
    torch.testing.assert_close(y.cpu(), expected)


def test_torchs_own_context_allows_them(x: Any) -> None:
    with xd.implicit_replication(False), torchs_own():
        torch.testing.assert_close((x + P).cpu(), x.cpu() + P)
    with torchs_own():
        torch.testing.assert_close((x + P).cpu(), x.cpu() + P)
    torch.testing.assert_close((x + P).cpu(), x.cpu() + P)


def test_contexts_nest_and_end(x: Any) -> None:
    with xd.implicit_replication(False):
        with xd.implicit_replication():
            _ = x + P
        with xd.strict_placements(), pytest.raises(MixedTensorsError):
            _ = x + P
        with pytest.raises(MixedTensorsError):
            _ = x + P
    _ = x + P


def test_a_training_step_under_pytorchs_rule(x: Any, mesh: xd.DeviceMesh) -> None:
    w = nn.Parameter(xd.distribute_tensor(torch.ones(4, 4), mesh, [R, Shard(0)]))
    for optimizer in (torch.optim.AdamW([w]), torch.optim.SGD([w], lr=0.1, momentum=0.9)):
        with xd.implicit_replication(False):
            F.linear(x, w).softmax(-1)[:, 0].square().sum().backward()
            nn.utils.clip_grad_norm_([w], 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert w.cpu().isfinite().all()


def test_a_compiled_step_is_not_reused_under_the_other_rule(x: Any) -> None:
    step = xd.compile(lambda d: d * P)
    torch.testing.assert_close(step(x).cpu(), x.cpu() * P)
    with xd.implicit_replication(False), pytest.raises(MixedTensorsError):
        step(x)
    torch.testing.assert_close(step(x).cpu(), x.cpu() * P)


@pytest.mark.parametrize("read", ["distribute", "op", "compiled"])
def test_a_plain_tensor_whose_data_was_set_to_a_dtensor(mesh: xd.DeviceMesh, read: str) -> None:
    """It has no memory; what is read there would be whatever lies at the address."""
    on_mesh = xd.distribute_tensor(torch.ones(8, 4), mesh, [R] * mesh.ndim)
    parameter = nn.Parameter(torch.zeros(8, 4))
    reads = {
        "distribute": lambda: xd.distribute_tensor(parameter, mesh),
        "op": lambda: parameter + on_mesh,
        "compiled": lambda: xd.compile(lambda: (parameter + on_mesh).sum())(),
    }

    def run() -> None:
        parameter.data = on_mesh
        reads[read]()

    refused = (DistributeError, RuntimeError)
    with pytest.raises(refused, match=r"no memory|incompatible tensor type"):
        run()
