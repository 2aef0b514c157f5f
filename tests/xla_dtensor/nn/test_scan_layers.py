"""scan_layers gives what the layers give one by one; on the JAX runtime as one loop."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import xla_dtensor as xd
from tests.xla_dtensor.nn.scanned_blocks import (
    Block,
    LowRank,
    Odd,
    Pair,
    Trained,
    batch,
    model,
    on,
    placed,
    scanned,
    train,
)
from xla_dtensor.errors import ScanError
from xla_dtensor.runtimes import Runtime

aten = torch.ops.aten
MAKERS: dict[str, Callable[[], nn.Module]] = {"block": Block, "odd": Odd, "low_rank": LowRank}


def close(found: Trained, expected: Trained) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=1e-5, abs=1e-6)
    assert list(found.parameters) == list(expected.parameters)
    for name, value in expected.parameters.items():
        torch.testing.assert_close(found.parameters[name], value, rtol=1e-5, atol=1e-5)


@functools.cache
def by_plain_torch(name: str) -> Trained:
    return train(model(MAKERS[name]), lambda t: t, compiled=False)


# ---------------------------------------------------------------------- values


@pytest.mark.thorough
@pytest.mark.parametrize("name", MAKERS)
def test_three_steps_of_training_are_plain_torchs(mesh: xd.DeviceMesh, name: str) -> None:
    net = placed(scanned(model(MAKERS[name])), mesh)
    close(train(net, lambda t: on(mesh, t), compiled=True), by_plain_torch(name))


def only_matmuls(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = op in (aten.mm.default, aten.addmm.default, aten.bmm.default)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


SELECTIVE = functools.partial(create_selective_checkpoint_contexts, only_matmuls)


KEPT: dict[str, Any] = {
    "none": "none",
    "full": "full",
    "dots": "dots",
    "dots_no_batch": "dots_no_batch",
    "named": "save:hidden",
    "selective": SELECTIVE,
}


@pytest.mark.thorough
@pytest.mark.parametrize("remat", KEPT.values(), ids=KEPT)
def test_gradients_lie_as_their_parameters_whatever_is_kept(
    mesh: xd.DeviceMesh, runtime: Runtime, remat: Any
) -> None:
    plain = model()
    plain(batch()).square().sum().backward()
    net = placed(scanned(model(), remat), mesh)
    net(on(mesh, batch())).square().sum().backward()
    for (name, expected), found in zip(plain.named_parameters(), net.parameters(), strict=True):
        # On torch_xla the layers run one by one, and XLA places their gradients.
        if name.startswith("layers.") and runtime.name == "jax":
            assert found.grad.placements == found.placements, name
            assert found.grad.xla_sharding() == found.xla_sharding(), name
        torch.testing.assert_close(found.grad.cpu(), expected.grad, rtol=1e-4, atol=1e-4)


def test_shared_arguments_get_their_gradients(mesh: xd.DeviceMesh) -> None:
    def run(net: Any, put: Callable[[torch.Tensor], Any]) -> list[torch.Tensor]:
        x, bias = put(batch(1)).requires_grad_(), put(batch(2)).requires_grad_()
        out = net(x, bias, scale=0.5)
        out.sum().backward()
        return [t.detach().cpu() for t in (out, x.grad, bias.grad)]

    expected = run(model(), lambda t: t.clone())
    found = run(placed(scanned(model()), mesh), lambda t: on(mesh, t))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_without_gradients(mesh: xd.DeviceMesh) -> None:
    net = placed(scanned(model()), mesh)
    with torch.no_grad():
        found = net(on(mesh, batch()))
    assert not found.requires_grad
    torch.testing.assert_close(found.cpu(), model()(batch()).detach())


def test_a_tuple_goes_from_layer_to_layer(mesh: xd.DeviceMesh) -> None:
    torch.manual_seed(0)
    plain: Any = nn.ModuleList(Pair() for _ in range(3))
    layers: Any = placed(xd.scan_layers(copy.deepcopy(plain)), mesh)
    expected: Any = (batch(), torch.tensor(5))
    for layer in plain:
        expected = layer(expected)
    found = layers((on(mesh, batch()), xd.distribute_tensor(torch.tensor(5), mesh)))
    assert isinstance(found, tuple)
    assert found[1].item() == 8
    torch.testing.assert_close(found[0].detach().cpu(), expected[0].detach())
    found[0].sum().backward()
    expected[0].sum().backward()
    torch.testing.assert_close(layers[0].wide.weight.grad.cpu(), plain[0].wide.weight.grad)


@pytest.mark.thorough
def test_autocast(mesh: xd.DeviceMesh, runtime: Runtime) -> None:
    kind = torch.device(runtime.torch_device).type

    def run(net: Any) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast(kind, torch.bfloat16):
            out = net(on(mesh, batch()))
        out.float().square().sum().backward()
        return out.detach().cpu(), net.layers[1].wide.weight.grad.cpu()

    unrolled, loop = run(placed(model(), mesh)), run(placed(scanned(model()), mesh))
    assert loop[0].dtype == unrolled[0].dtype
    assert loop[1].dtype == unrolled[1].dtype == torch.float32
    for a, b in zip(loop, unrolled, strict=True):
        assert float((a.float() - b.float()).norm() / b.float().norm()) < 0.02
    exact = placed(model(), mesh)(on(mesh, batch())).detach().cpu()
    assert not torch.allclose(loop[0].float(), exact, rtol=1e-6, atol=1e-6)


def test_plain_tensors_of_the_runtime(mesh: xd.DeviceMesh) -> None:
    plain = model()
    net = scanned(plain)
    for module in net.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            whole = xd.distribute_tensor(parameter.detach(), mesh).full_tensor()
            setattr(module, name, nn.Parameter(whole))
    x = xd.distribute_tensor(batch(), mesh).full_tensor()
    net(x).sum().backward()
    plain(batch()).sum().backward()
    expected = plain.layers[2].narrow.weight.grad
    torch.testing.assert_close(net.layers[2].narrow.weight.grad.cpu(), expected)


def test_off_the_mesh_it_is_plain_torch() -> None:
    plain = model()
    net = scanned(plain)
    torch.testing.assert_close(net(batch()), plain(batch()))
    net(batch()).sum().backward()
    plain(batch()).sum().backward()
    pairs = zip(net.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)


def test_uneven_parameters_and_a_submesh(mesh: xd.DeviceMesh) -> None:
    plain = model(lambda: Block(hidden=10))  # 10 rows over 4 devices
    net: Any = xd.shard_module(
        scanned(plain), mesh["tp"], {"**.wide.weight": ["tp", None]}, unmatched="replicate"
    )
    x: Any = xd.distribute_tensor(batch(), mesh["tp"], [Replicate()])
    net(x).sum().backward()
    plain(batch()).sum().backward()
    found = net.layers[0].wide.weight
    assert found.grad.xla_sharding() == found.xla_sharding()
    torch.testing.assert_close(
        found.grad.cpu(), plain.layers[0].wide.weight.grad, rtol=1e-4, atol=1e-5
    )


# ---------------------------------------------------------------------- random numbers


@pytest.mark.thorough
@pytest.mark.parametrize(("remat", "compiled"), [("none", True), ("full", True), ("full", False)])
def test_dropout_draws_as_the_layers_one_by_one(
    mesh: xd.DeviceMesh, remat: str, compiled: bool
) -> None:
    def run(net: Any) -> Trained:
        torch.manual_seed(7)
        return train(placed(net, mesh), lambda t: on(mesh, t), compiled=compiled, steps=1)

    plain = model(lambda: Block(dropout=0.5))
    found = run(scanned(plain, remat))
    close(found, run(copy.deepcopy(plain)))
    assert found.losses[0] != pytest.approx(by_plain_torch("block").losses[0], rel=1e-5)


@pytest.mark.only_on("jax")
def test_dropout_draws_anew_on_each_call_without_a_trace(mesh: xd.DeviceMesh) -> None:
    net = placed(scanned(model(lambda: Block(dropout=0.5))), mesh)
    step = xd.compile(lambda x: net(x).square().mean())
    x = on(mesh, batch())
    results = [step(x).full_tensor().item() for _ in range(3)]
    assert len(set(results)) == 3
    assert step.stats()["traces"] == 1


@pytest.mark.only_on("jax")
def test_a_checkpoint_around_the_loop_repeats_its_dropout(mesh: xd.DeviceMesh) -> None:
    net = placed(scanned(model(lambda: Block(dropout=0.5))), mesh)
    grads = []
    ways: list[Callable[[Any], Any]] = [net, lambda x: checkpoint(net, x, use_reentrant=False)]
    for around in ways:
        torch.manual_seed(3)
        net.zero_grad()
        around(on(mesh, batch())).sum().backward()
        grads.append(net.layers[0].wide.weight.grad.cpu())
    torch.testing.assert_close(grads[0], grads[1])


# ---------------------------------------------------------------------- names


def test_it_is_a_list_of_its_layers(mesh: xd.DeviceMesh) -> None:
    net = placed(scanned(model(count=4)), mesh)
    layers: Any = net.layers
    assert [layers[i] for i in range(len(layers))] == list(layers)
    assert layers[-1] is list(enumerate(layers))[3][1]
    x = on(mesh, batch())
    first = layers[:2]
    assert isinstance(first, xd.ScannedLayers)
    assert list(first) == list(layers)[:2]
    expected = layers[1](layers[0](x))
    torch.testing.assert_close(first(x).cpu(), expected.cpu())
    assert layers[:0](x) is x


def test_parameters_keep_their_names_and_checkpoints_fit(mesh: xd.DeviceMesh) -> None:
    plain = model()
    loop = scanned(plain)
    assert list(loop.state_dict()) == list(plain.state_dict())
    assert "layers.0.wide.weight" in loop.state_dict()
    other = placed(scanned(model(count=3)), mesh)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(0)
    other.load_state_dict({k: on_like(other, k, v) for k, v in plain.state_dict().items()})
    torch.testing.assert_close(
        other(on(mesh, batch())).detach().cpu(), plain(batch()).detach(), rtol=1e-5, atol=1e-5
    )
    assert type(loop.layers[0]) is Block


def on_like(net: nn.Module, name: str, value: torch.Tensor) -> Any:
    like: Any = net.state_dict()[name]
    return xd.distribute_tensor(value, like.device_mesh, like.placements)


# ---------------------------------------------------------------------- the program


def loop_program(mesh: xd.DeviceMesh, remat: Any, count: int, **sizes: Any) -> Any:
    net = placed(scanned(model(lambda: Block(**sizes), count=count), remat), mesh)

    def step(x: torch.Tensor) -> Any:
        net(x).square().sum().backward()
        grads = [p.grad for p in net.parameters()]
        net.zero_grad()
        return grads

    run = xd.compile(step)
    run(on(mesh, batch()))
    return run


def dots(text: str) -> list[str]:
    return re.findall(r"= (\S+?)\{?[\d,]*\}? dot\(", text)


@pytest.mark.only_on("jax")
def test_the_program_is_two_loops_of_local_shapes_whatever_the_depth(mesh: xd.DeviceMesh) -> None:
    short, long = (loop_program(mesh, "full", n).hlo() for n in (2, 5))
    assert short.count(" while(") == long.count(" while(") == 2
    assert sorted(dots(short)) == sorted(dots(long))
    # 2 of 4 sequences of 6 tokens on each device, 4 of 16 hidden features.
    assert "f32[12,4]" in dots(long)
    assert not re.search(r"f32\[(?:4,6|24),(?:8|16)\]", long)
    assert re.search(r"f32\[5,4,4\]", long)  # the stack of `wide`, cut over tp and dp


@pytest.mark.thorough
@pytest.mark.only_on("jax")
def test_what_is_kept_is_what_takes_memory(mesh: xd.DeviceMesh) -> None:
    def memory(remat: Any) -> int:
        program = loop_program(mesh, remat, 6, hidden=64)._called()
        return program.executable.memory_analysis().temp_size_in_bytes

    full, named, everything = memory("full"), memory("save:hidden"), memory("none")
    hidden = 6 * 12 * 16 * 4  # layers, rows and features on one device, bytes
    assert full + hidden // 2 < named < everything
    assert memory(SELECTIVE) > full


@pytest.mark.only_on("jax")
@pytest.mark.thorough
def test_offloading_where_the_device_can(mesh: xd.DeviceMesh) -> None:
    net = placed(scanned(model(), "offload:hidden"), mesh)
    close(train(net, lambda t: on(mesh, t), compiled=True), by_plain_torch("block"))


@pytest.mark.only_on("jax")
def test_a_compiled_step_is_traced_anew_when_a_layer_is_changed(mesh: xd.DeviceMesh) -> None:
    net = placed(scanned(model()), mesh)
    run = xd.compile(net)
    with torch.no_grad():
        run(on(mesh, batch()))
        run(on(mesh, batch()))
        assert run.stats()["traces"] == 1
        net.layers[2].eval()
        with pytest.raises(ScanError, match=r"layer 2 has at 'training' False where layer 0"):
            run(on(mesh, batch()))
        net.eval()
        run(on(mesh, batch()))


@pytest.mark.only_on("jax")
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_in_an_unrolled_step_is_computed_again(
    mesh: xd.DeviceMesh, reentrant: bool
) -> None:
    plain = model().double()  # in float32 the two programs round otherwise, some processors more

    def grads(around: Callable[..., Any]) -> tuple[int, list[torch.Tensor]]:
        net = placed(copy.deepcopy(plain), mesh)

        def step(x: torch.Tensor) -> Any:
            x = net.first(x)
            for layer in net.layers:
                x = around(layer, x)
            x.square().sum().backward()
            found = [p.grad for p in net.parameters()]
            net.zero_grad()
            return found

        run = xd.compile(step)
        found = [g.cpu() for g in run(on(mesh, batch().double()))]
        return len(dots(run.hlo())), found

    plainly, expected = grads(lambda layer, x: layer(x))
    again, found = grads(lambda layer, x: checkpoint(layer, x, use_reentrant=reentrant))
    # In each layer that of `wide`, whose result the next gradient asks for, and the scores of the
    # attention. XLA of JAX 0.10 merges the scores with those of the forward, and so keeps them.
    assert again - plainly in (3, 6)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_labels_that_change_from_layer_to_layer(mesh: xd.DeviceMesh) -> None:
    """Column-parallel layers in a row: each leaves its output cut otherwise than its input."""
    torch.manual_seed(0)
    plain = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(5))
    net: Any = xd.shard_module(
        xd.scan_layers(copy.deepcopy(plain)),
        mesh,
        {"*.weight": ["tp", None]},
        unmatched="replicate",
    )
    x = torch.randn(4, 8)
    found = net(xd.distribute_tensor(x, mesh)).square().sum()
    wanted: Any = x
    for layer in plain:
        wanted = layer(wanted)
    wanted = wanted.square().sum()
    found.backward()
    wanted.backward()
    torch.testing.assert_close(found.full_tensor().cpu(), wanted.detach())
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor().cpu(), theirs.grad)
