"""What materialize refuses, and that a refused model is as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import xla_dtensor as xd
from xla_dtensor.errors import ArgumentTypeError, DistributeError


class Made(nn.Module):
    """What a constructor computes, and nothing computes again."""

    def __init__(self, *, attribute: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        if attribute:
            self.table = torch.arange(4)
        else:
            self.scale = nn.Parameter(torch.ones(4))
            self.register_buffer("ids", torch.arange(4))


def made(mesh: Any, make: Any) -> Any:
    with torch.device("meta"):
        return xd.distribute_module(make(), mesh)


@pytest.mark.parametrize("rng", ["device", "torch"])
def test_unknown_values_are_named(mesh: xd.DeviceMesh, rng: Any) -> None:
    model = made(mesh, Made)
    before = dict(model.named_parameters())
    with pytest.raises(DistributeError, match=r"unknown=scale \(0 of 4 elements\), ids \(0 of 4"):
        xd.materialize(model, seed=0, rng=rng)
    # It is as it was, and can be tried again.
    assert all(p.is_meta and p is before[n] for n, p in model.named_parameters())

    def init(module: nn.Module) -> None:
        if isinstance(module, Made):
            nn.init.ones_(module.scale)
            module.ids.copy_(torch.arange(4))  # pyright: ignore

    xd.materialize(model, seed=0, rng=rng, init=init)
    assert model.ids.cpu().tolist() == [0, 1, 2, 3]
    assert model.scale is before["scale"]
    assert model.scale.cpu().tolist() == [1.0] * 4


def test_a_part_of_a_parameter_is_not_all_of_it(mesh: xd.DeviceMesh) -> None:
    def init(module: nn.Module) -> None:
        if isinstance(module, Made):
            module.scale[:2].fill_(1)
            module.ids.mul_(2)  # pyright: ignore

    with pytest.raises(DistributeError, match=r"scale \(2 of 4 elements\), ids \(0 of 4"):
        xd.materialize(made(mesh, Made), seed=0, init=init)


def test_a_buffer_that_no_checkpoint_has(mesh: xd.DeviceMesh) -> None:
    def make() -> nn.Module:
        model = nn.Linear(4, 4)
        model.register_buffer("ids", torch.arange(4), persistent=False)
        return model

    with pytest.raises(DistributeError, match="no checkpoint has these buffers"):
        xd.materialize(made(mesh, make), init=False)


def test_an_attribute_is_named(mesh: xd.DeviceMesh) -> None:
    model = made(mesh, lambda: Made(attribute=True))
    with pytest.raises(DistributeError, match="attributes=table"):
        xd.materialize(model, seed=0)
    assert model.linear.weight.is_meta


def test_a_failing_init_leaves_the_model_as_it_was(mesh: xd.DeviceMesh) -> None:
    def init(module: nn.Module) -> None:
        raise KeyError("mine")

    model = made(mesh, lambda: nn.Linear(4, 4))
    with pytest.raises(KeyError, match="mine"):
        xd.materialize(model, seed=0, init=init)
    assert model.weight.is_meta


def test_a_plain_parameter_without_a_mesh(mesh: xd.DeviceMesh) -> None:
    model = nn.Linear(4, 4, device="meta")
    with pytest.raises(DistributeError, match="without a mesh on a model with weight, bias"):
        xd.materialize(model, seed=0)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(DistributeError, match="optimizer=SGD holds it"):
        xd.materialize(model, mesh, seed=0)
    del optimizer
    xd.materialize(model, mesh, seed=0)
    assert isinstance(model.weight, xd.DTensor)


def test_a_parameter_with_hooks(mesh: xd.DeviceMesh) -> None:
    model = made(mesh, lambda: nn.Linear(4, 4))
    model.weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(DistributeError, match="gradient hooks"):
        xd.materialize(model, seed=0)


def test_a_constructor_that_cannot_be_known(mesh: xd.DeviceMesh) -> None:
    class Own(nn.Linear):
        def _init_weights(self, module: nn.Module) -> None:
            nn.init.ones_(module.weight)  # pyright: ignore

    model = made(mesh, lambda: Own(4, 4))
    with pytest.raises(DistributeError, match="has _init_weights"):
        xd.materialize(model, seed=0)
    xd.materialize(model, seed=0, init=model._init_weights)
    assert (model.weight.cpu() == 1).all()


def test_parametrizations_are_named(mesh: xd.DeviceMesh) -> None:
    def make() -> nn.Module:
        return nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))

    with pytest.raises(DistributeError, match=r"parametrizations.weight.original0 \(0 of"):
        xd.materialize(made(mesh, make), seed=0, rng="torch")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"rng": "cuda"}, "rng='cuda'"),
        ({"seed": 1.5}, "seed=1.5"),
        ({"init": 3}, "init=3"),
        ({"init": "no_such"}, "has no such method"),
    ],
)
def test_wrong_arguments(mesh: xd.DeviceMesh, options: Any, text: str) -> None:
    model = made(mesh, lambda: nn.Linear(4, 4))
    with pytest.raises((ArgumentTypeError, DistributeError), match=text):
        xd.materialize(model, **options)
    with pytest.raises(ArgumentTypeError, match="type=dict"):
        xd.materialize({})  # pyright: ignore
