"""Elements under a mask, ``x[mask]``, in a compiled step: values and gradients are PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import xla_dtensor as xd
from xla_dtensor.errors import CheckFailedError, CompileError

pytestmark = pytest.mark.only_on("jax")
Step = Callable[[Any, Any, Any, Any], Any]


def a_copy(x: Any, m: Any) -> Any:
    y, mask = x * 1, m.clone()
    rows, others = y[m], x.detach()[mask]
    y.zero_()
    mask.logical_not_()
    rows *= 3
    same = others.detach()
    others += 1
    some = rows[rows > 0]
    rows.mul_(2)
    return (rows * same).sum() + some.square().sum()


def doubled_in_place(x: Any, m: Any) -> Any:
    y = x * 1
    y[m] += 1
    y[m] = y[m] * y[m].exp()
    return y.square().sum()


# Of x (8, 6), a mask of it, rows (8, 6, 5), and classes (8, 6), which are -100 where it is False.
STEPS: dict[str, Step] = {
    "sum": lambda x, m, r, c: x[m].sum() + r[m].sum((0, 1)),
    "mean": lambda x, m, r, c: -x[m].mean() * 2 + r[m].mean(),
    "of each column": lambda x, m, r, c: (r[m].sum(0) * r[m].mean(dim=0) ** 2).sum(),
    "of each row": lambda x, m, r, c: (
        (r[m].sum(-1) ** 2).mean() + r[m].mean(1).pow(3).sum() + r[m].sum(1, keepdim=True).sum()
    ),
    "standard deviation": lambda x, m, r, c: x[m].std() + r[m].var(0, unbiased=False).sum(),
    "standardized": lambda x, m, r, c: ((x[m] - x[m].mean()) / (x[m].std() + 1e-8)).pow(3).sum(),
    "extremes": lambda x, m, r, c: x[m].max() + 2 * x[m].min() + r[m].amax(0).sum(),
    "extremes that are equal": lambda x, m, r, c: (x * 0)[m].max(),
    "integers": lambda x, m, r, c: x.sum() * c[m].max() + x.sum() * c[m].sum(),
    "truth": lambda x, m, r, c: (
        (x[m] > 0).any() * x.sum() + (x[m] > -9).all() * r.sum() + (x[m] > 0).all(()).sum()
    ),
    "a function that is not defined everywhere": lambda x, m, r, c: (
        x[x > 0].log().mean() + (x[x > 0].sqrt() + 1).pow(2).sum() + (2 / x[x != 0]).sum()
    ),
    "operators": lambda x, m, r, c: (1 - x[m]).abs().sum() + (x[m] ** 2 % 0.3 - (-x[m])).sum(),
    "pointwise": lambda x, m, r, c: (
        x[m].clamp(-1, 1).exp().sum()
        + F.gelu(x[m]).sum()
        + torch.where(x[m] > 0, x[m], x[m] * 0.1).sum()
        + torch.max(x[m], x[m] * 2).sum()
    ),
    "rows by a matrix": lambda x, m, r, c: (
        F.linear(r[m], torch.ones(7, 5, dtype=r.dtype)).softmax(-1).square().sum()
        + (r[m] @ torch.ones(5, 3, dtype=r.dtype)).relu().mean()
        + F.layer_norm(r[m], (5,)).abs().sum()
    ),
    "less the mean row": lambda x, m, r, c: (r[m] - r[m].mean(0)).square().sum(),
    "some columns": lambda x, m, r, c: (r[m][:, 0] * r[m][:, 1:3].sum(-1)).sum(),
    "whole rows": lambda x, m, r, c: (x[m[:, 0]].sum(0) ** 2).sum() + x[m[:, 1]].mean(),
    "losses": lambda x, m, r, c: (
        F.mse_loss(x[m], (x * 2)[m])
        + F.l1_loss(x[m], torch.zeros_like(x)[m], reduction="sum")
        + F.binary_cross_entropy_with_logits(x[m], torch.ones_like(x)[m])
    ),
    "cross entropy": lambda x, m, r, c: (
        F.cross_entropy(input=r[m], target=c[m])
        + F.cross_entropy(r[m], c[m], reduction="sum", label_smoothing=0.1)
        + F.nll_loss(F.log_softmax(r[m], -1), c[m])
    ),
    "cross entropy under equal masks": lambda x, m, r, c: F.cross_entropy(
        r[c != -100], c[c != -100]
    ),
    "cross entropy that ignores some": lambda x, m, r, c: F.cross_entropy(r[x > -1], c[x > -1]),
    "numbers": lambda x, m, r, c: x.sum() / x[m].numel() + r[m].sum() / r[m].shape[0] / len(x),
    "a branch": lambda x, m, r, c: x[m].sum() if x[m].numel() > 9 else x.sum() * 0,
    "nothing": lambda x, m, r, c: x[x > 99].sum() + x[x > 99].exp().sum() + x.sum(),
    "writes": lambda x, m, r, c: doubled_in_place(x, m),
    "a copy": lambda x, m, r, c: a_copy(x, m),
    "more deviations": lambda x, m, r, c: (
        x[m].std(False) + r[m].std((0, 1)) + r[m].var(0, correction=3).sum() + x[m].var()
    ),
    "of the whole": lambda x, m, r, c: (r[m] - r[m].sum((0, 1)).reshape(1, 1)).square().sum(),
    "half": lambda x, m, r, c: x.bfloat16()[m].mean().double() + x.half()[m].sum().double(),
}


def _result(step: Step, mesh: xd.DeviceMesh | None) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(8, 6, generator=draw, dtype=torch.float64)
    mask = torch.rand(8, 6, generator=draw) > 0.4
    rows = torch.randn(8, 6, 5, generator=draw, dtype=torch.float64)
    classes = torch.randint(0, 5, (8, 6), generator=draw).masked_fill(~mask, -100)
    given: list[Any] = [x, mask, rows, classes]
    if mesh is not None:
        given = [xd.distribute_tensor(t, mesh, ("dp", "tp", None)[: t.ndim]) for t in given]
    leaves = [given[0].requires_grad_(), given[2].requires_grad_()]

    def run(x: Any, mask: Any, rows: Any, classes: Any) -> list[Any]:
        value = step(x, mask, rows, classes)
        grads = torch.autograd.grad(value, leaves, allow_unused=True)
        return [value.detach(), *(torch.zeros(()) if grad is None else grad for grad in grads)]

    leaves = [given[0], given[2]]
    results = (run if mesh is None else xd.compile(run))(*given)
    return [t.full_tensor().cpu() if isinstance(t, xd.DTensor) else t for t in results]


@pytest.mark.parametrize("name", STEPS)
def test_values_and_gradients(mesh: xd.DeviceMesh, name: str) -> None:
    expected, found = _result(STEPS[name], None), _result(STEPS[name], mesh)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_what_leaves_the_step_is_a_tensor(mesh: xd.DeviceMesh) -> None:
    kept: dict[str, Any] = {}

    @xd.compile
    def step(x: Any) -> Any:
        kept["positive"] = x[x > 0] * 2
        return x[x < 0]

    for sign in (1.0, -1.0, 2.0):
        plain = sign * torch.arange(-3.0, 5.0)
        found = step(xd.distribute_tensor(plain, mesh, ("dp",)))
        assert torch.equal(found.cpu(), plain[plain < 0])
        assert torch.equal(kept["positive"].cpu(), plain[plain > 0] * 2)
    assert step.stats()["traces"] == 1


@pytest.mark.parametrize(
    "step",
    [
        lambda x: x[x > 0].max(),
        lambda x: (x[x > 0] + x[x < -3]).sum(),
    ],
    ids=["the largest of none", "two masks"],
)
def test_what_a_run_finds_wrong(mesh: xd.DeviceMesh, step: Callable[[Any], Any]) -> None:
    compiled: Any = xd.compile(step)
    with pytest.raises(CheckFailedError, match=f"mask.*{__file__}"):
        compiled(xd.distribute_tensor(torch.full((8,), -4.0), mesh))


REFUSED: dict[str, Callable[[Any, Any], Any]] = {
    "len": lambda x, m: len(x[m]),
    "sort": lambda x, m: x[m].sort(),
    "cat": lambda x, m: torch.cat([x[m], x[m]]),
    "tolist": lambda x, m: x[m].tolist(),
    "softmax": lambda x, m: x[m].softmax(0),
    "log_softmax": lambda x, m: x[m].log_softmax(-1),
    "an index of its first dim": lambda x, m: x[m][0],
    "a tensor beside it": lambda x, m: x[m] + x.reshape(-1),
    "a write to some": lambda x, m: x[m].__setitem__(0, 1),
    "resize_": lambda x, m: x[m].resize_(3),
    "its placements": lambda x, m: x[m].placements,
    "a tensor under a mask that has": lambda x, m: x[m[:, 0]] + x[m[:, 0]][:, 0],
    "a variance": lambda x, m: x[m[:, 0]].var(1),
    "layer_norm": lambda x, m: F.layer_norm(x[m], (6,)),
    "mse_loss with other": lambda x, m: F.mse_loss(x[m], x[m], weight=x[m]),
    "the mean of a dtype": lambda x, m: x[m].long().mean(),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_needs_the_number_is_refused(mesh: xd.DeviceMesh, what: str) -> None:
    x = xd.distribute_tensor(torch.ones(8, 6), mesh, ("dp", None))
    with pytest.raises(CompileError, match=rf"how many elements there are, for {what}"):
        xd.compile(REFUSED[what])(x, x > 0)
