"""scan_layers refuses what is no loop, and says why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import xla_dtensor as xd
from tests.xla_dtensor.nn.scanned_blocks import DIM, Block, batch, model, on, placed, scanned
from xla_dtensor.errors import ScanError


def changed(change: Callable[[Any], Any]) -> Any:
    layers = nn.ModuleList(Block() for _ in range(3))
    change(layers)
    return layers


def tied(layers: Any) -> None:
    layers[1].narrow.bias = layers[1].norm.bias


DIFFERENT: list[tuple[str, Callable[[Any], Any], str]] = [
    ("type", lambda m: m.__setitem__(2, nn.Linear(3, 3)), "layer 2 has at"),
    (
        "shape",
        lambda m: setattr(m[1], "wide", nn.Linear(DIM, 3)),
        r"'wide.weight' shape=\(3, 8\) where",
    ),
    ("grad", lambda m: m[2].requires_grad_(False), "'norm.weight' requires_grad=False"),
    ("dtype", lambda m: m[1].double(), r"'norm.weight' dtype=torch.float64"),
    ("dropout", lambda m: setattr(m[1].dropout, "p", 0.5), r"'dropout.p' 0.5 where layer 0 has 0"),
    ("index", lambda m: setattr(m[2], "index", 2), "'index' 2 where layer 0 has nothing"),
    ("hook", lambda m: m[1].norm.register_forward_hook(print), "'norm._forward_hooks'"),
    ("tied", tied, "other tensors in common"),
]


@pytest.mark.parametrize(
    ("change", "text"), [d[1:] for d in DIFFERENT], ids=[d[0] for d in DIFFERENT]
)
def test_layers_that_differ_are_refused(change: Any, text: str) -> None:
    with pytest.raises(ScanError, match=text):
        xd.scan_layers(changed(change))


def test_attributes_that_do_not_matter_can_be_ignored() -> None:
    def numbered(layers: Any) -> None:
        for i, layer in enumerate(layers):
            layer.layer_idx = i

    with pytest.raises(ScanError, match="layer_idx"):
        xd.scan_layers(changed(numbered))
    assert len(xd.scan_layers(changed(numbered), ignore=("layer_idx",))) == 3


def test_layers_that_lie_otherwise_are_refused(mesh: xd.DeviceMesh) -> None:
    layers = changed(lambda m: None)
    xd.shard_module(layers[0], mesh, {"wide.weight": ["tp", None]}, unmatched="replicate")
    for layer in (layers[1], layers[2]):
        xd.shard_module(layer, mesh, {"wide.weight": [None, "tp"]}, unmatched="replicate")
    with pytest.raises(ScanError, match=r"wide.weight' placements=.*Shard\(dim=1\)"):
        xd.scan_layers(layers)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


class Closure(nn.Module):
    """Uses what is not its own."""

    def __init__(self, shift: list[Any]) -> None:
        super().__init__()
        self.shift = shift

    def forward(self, x: torch.Tensor) -> Any:
        return self.use(x, self.shift[0])

    def use(self, x: torch.Tensor, shift: Any) -> Any:
        return x + shift


class Counting(Closure):
    def use(self, x: torch.Tensor, shift: Any) -> Any:
        shift.add_(1)
        return x * 2


class Wrapped(Closure):
    def use(self, x: torch.Tensor, shift: Any) -> Any:
        return (x,)


class Narrow(Closure):
    def use(self, x: torch.Tensor, shift: Any) -> Any:
        return x[:, :3]


class Wide(Closure):
    def use(self, x: torch.Tensor, shift: Any) -> Any:
        return x.double()


REFUSED: list[tuple[type[Closure], str]] = [
    (Counting, "wrote in place to a tensor of shape=.8,. that is older"),
    (Closure, r"uses a tensor of shape=.8,. that requires grad and is neither"),
    (Wrapped, "returned a tuple of 1 where it was given"),
    (Narrow, r"shape=\(2, 3, 8\) where shape=\(2, 6, 8\)|was given"),
    (Wide, "dtype=torch.float64 where dtype=torch.float32 was given"),
]


@pytest.mark.only_on("jax")
@pytest.mark.parametrize(("kind", "text"), REFUSED, ids=[k.__name__ for k, _ in REFUSED])
def test_blocks_that_are_no_loop_are_refused(
    mesh: xd.DeviceMesh, kind: type[Closure], text: str
) -> None:
    shift = [xd.distribute_tensor(torch.ones(DIM), mesh)]
    if kind is Closure:
        shift[0].requires_grad_()
    layers = xd.scan_layers([kind(shift), kind(shift)])
    x = on(mesh, batch()).requires_grad_()
    with pytest.raises(ScanError, match=text):
        layers(x)
    assert shift[0].detach().cpu().tolist() == [1.0] * DIM


@pytest.mark.only_on("jax")
def test_a_buffer_that_is_written_is_refused_and_one_that_is_read_is_not(
    mesh: xd.DeviceMesh,
) -> None:
    layers = placed(xd.scan_layers([Normed(), Normed()]), mesh)
    x = on(mesh, torch.randn(4, DIM))
    with pytest.raises(ScanError, match=r"norm\.\w+ of shape="):
        layers(x)
    assert layers[0].norm.num_batches_tracked.item() == 0
    layers.eval()
    with torch.no_grad():
        layers[1].norm.running_mean.add_(3)
        torch.testing.assert_close(layers(x).cpu(), layers[1](layers[0](x)).cpu())


@pytest.mark.only_on("jax")
def test_a_tensor_off_the_mesh_is_refused(mesh: xd.DeviceMesh) -> None:
    net = placed(scanned(model()), mesh)
    with pytest.raises(ScanError, match="first argument of type=Tensor that is not on the mesh"):
        net.layers(batch())
    with pytest.raises(ScanError, match="that needs a gradient"):
        net.layers(on(mesh, batch()), batch().requires_grad_())


@pytest.mark.only_on("jax")
def test_a_name_that_the_block_does_not_give_is_refused(mesh: xd.DeviceMesh) -> None:
    net = placed(scanned(model(), "save:scores"), mesh)
    with pytest.raises(ScanError, match=r"no value the name 'scores'; its names are \['hidden'\]"):
        net(on(mesh, batch()))


@pytest.mark.parametrize("remat", ["all", "save", "save:", "full:x", 3, None])
def test_what_to_keep_is_checked(remat: Any) -> None:
    with pytest.raises((ScanError, TypeError), match="remat="):
        xd.scan_layers([nn.Linear(2, 2)], remat)


@pytest.mark.parametrize("layers", [[], nn.Linear(2, 2), [3], nn.ModuleDict()])
def test_modules_are_asked_for(layers: Any) -> None:
    with pytest.raises(TypeError, match="scan_layers was called with"):
        xd.scan_layers(layers)


@pytest.mark.parametrize(("x", "name"), [(3, "a"), (torch.ones(1), ""), (torch.ones(1), "a,b")])
def test_names_are_checked(x: Any, name: str) -> None:
    with pytest.raises(TypeError, match="checkpoint_name was called with"):
        xd.checkpoint_name(x, name)
