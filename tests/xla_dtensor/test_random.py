"""Random numbers: repeated where torch repeats them, fresh everywhere else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard
from torch.utils.checkpoint import checkpoint

import xla_dtensor as xd
from xla_dtensor.runtimes import Runtime


@pytest.fixture
def ones(mesh: xd.DeviceMesh) -> Any:
    x = xd.distribute_tensor(torch.ones(16, 16), mesh, [Shard(0), Replicate()])
    return x.requires_grad_()


def block(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(x, 0.5).sin()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_repeats_the_dropout_of_the_forward(ones: Any, use_reentrant: bool) -> None:
    first: Any = checkpoint(block, ones, use_reentrant=use_reentrant)
    second: Any = checkpoint(block, ones, use_reentrant=use_reentrant)
    (first.sum() + 100 * second.sum()).backward()
    kept = [(y.detach().cpu() != 0).float() for y in (first, second)]
    assert not torch.equal(*kept)
    # Where the forward kept a 1, it became 2, and sin has the slope cos(2) there.
    expected = (kept[0] + 100 * kept[1]) * 2 * torch.tensor(2.0).cos()
    torch.testing.assert_close(ones.grad.cpu(), expected)


def test_checkpoint_in_a_program_repeats_the_dropout(ones: Any) -> None:
    def step(x: torch.Tensor) -> Any:
        y: Any = checkpoint(block, x, use_reentrant=False)
        (grad,) = torch.autograd.grad(y.sum(), x)
        return y.detach(), grad

    compiled = xd.compile(step)
    results = [compiled(ones) for _ in range(3)]
    assert all(torch.equal(y.cpu() != 0, grad.cpu() != 0) for y, grad in results)
    assert not torch.equal(results[0][0].cpu(), results[1][0].cpu())
    assert not torch.equal(results[1][0].cpu(), results[2][0].cpu())


def test_seeding_the_runtime_repeats(runtime: Runtime, ones: Any) -> None:
    runtime.manual_seed(3)
    first, after = torch.rand_like(ones).cpu(), torch.rand_like(ones).cpu()
    runtime.manual_seed(3)
    again = torch.rand_like(ones).cpu()
    runtime.manual_seed(4)
    other = torch.rand_like(ones).cpu()
    assert torch.equal(again, first)
    assert not torch.equal(after, first)
    assert not torch.equal(other, first)


@pytest.mark.only_on("jax")
def test_seeding_torch_repeats(ones: Any) -> None:
    values = []
    for number in (0, 1, 0):
        torch.manual_seed(number)
        values.append((torch.rand_like(ones).cpu(), torch.randn_like(ones).cpu()))
    assert torch.equal(values[0][0], values[2][0])
    assert torch.equal(values[0][1], values[2][1])
    assert not torch.equal(values[0][0], values[1][0])


def test_a_random_tensor_lies_as_the_one_it_is_like(ones: Any) -> None:
    values: Any = torch.rand_like(ones)
    assert values.xla_sharding() == ones.xla_sharding()
    assert 0.3 < values.mean().item() < 0.7
