"""Cross entropy of logits that are sharded over the classes: nowhere are they whole."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard

import xla_dtensor as xd

R = Replicate()


def parts(mesh: xd.DeviceMesh) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Any]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, 32, generator=generator)
    weight = torch.randn(64, 32, generator=generator)
    classes = torch.randint(0, 64, (16,), generator=generator)
    classes[3] = -100
    on_tp = xd.distribute_tensor(weight, mesh, [R, Shard(0)])
    return x, weight, classes, torch.nn.Parameter(on_tp)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_values_and_gradients(mesh: xd.DeviceMesh, reduction: str, smoothing: float) -> None:
    x, weight, classes, parameter = parts(mesh)
    batch: Any = xd.distribute_tensor(x, mesh, [Shard(0), R])
    options: Any = {"reduction": reduction, "label_smoothing": smoothing}
    with xd.loss_parallel():
        loss = F.cross_entropy(F.linear(batch, parameter), classes, **options)
        loss.backward()
    weight = weight.requires_grad_()
    expected = F.cross_entropy(x @ weight.t(), classes, **options)
    expected.backward()
    torch.testing.assert_close(loss.detach().cpu(), expected.detach())
    torch.testing.assert_close(parameter.grad.cpu(), weight.grad)


def test_log_probabilities_and_gradient_lie_as_the_logits(mesh: xd.DeviceMesh) -> None:
    x, _, classes, parameter = parts(mesh)
    batch: Any = xd.distribute_tensor(x, mesh, [Shard(0), R])
    logits: Any = F.linear(batch, parameter)
    logits = logits.redistribute(placements=[Shard(0), Shard(1)])
    leaf = logits.detach().requires_grad_()
    with xd.loss_parallel():
        log_probabilities: Any = F.log_softmax(leaf, -1)
        F.nll_loss(log_probabilities, classes).backward()
    tiles = "{devices=[2,4]<=[8]}"
    assert str(log_probabilities.xla_sharding()) == tiles
    assert str(leaf.grad.xla_sharding()) == tiles


@pytest.mark.only_on("jax")
def test_nothing_of_the_size_of_the_logits_is_communicated(mesh: xd.DeviceMesh) -> None:
    x, _, classes, parameter = parts(mesh)

    @xd.compile
    def step(batch: Any, classes: Any) -> Any:
        with xd.loss_parallel():
            loss = F.cross_entropy(F.linear(batch, parameter), classes)
            loss.backward()
        return loss

    batch = xd.distribute_tensor(x, mesh, [Shard(0), R])
    step(batch, xd.distribute_tensor(classes, mesh, [Shard(0), R]))
    hlo = step.hlo()
    assert not re.findall(r" all-gather\(", hlo)
    # Each row's maximum, sum and picked logit, the loss, and the gradient of the weight's shard.
    reduced = re.findall(r"= (.*?) all-reduce\(", hlo)
    shapes = {shape for text in reduced for shape in re.findall(r"f32\[([\d,]*)\]", text)}
    assert shapes <= {"", "8", "8,1", "16,32"}
