"""A model built on the meta device gets the values that it would have had, where they lie."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import xla_dtensor as xd
from tests.xla_dtensor import hugging_face
from tests.xla_dtensor.host_tasks_init import Net, checksums, sharded

SHAPE = (8, 16)  # one shape for most: each shape's draw is a program to compile


def on_meta(mesh: Any, make: Any = None) -> Any:
    with torch.device("meta"):
        model = nn.Linear(SHAPE[1], SHAPE[0]) if make is None else make()
    return sharded(model, mesh)


@pytest.fixture(scope="module")
def other_mesh(mesh: xd.DeviceMesh) -> xd.DeviceMesh:
    """The same devices, cut another way."""
    return xd.init_device_mesh("xla", (1, 8), mesh_dim_names=("a", "b"))


def test_torch_values_are_those_of_an_eager_model(mesh: xd.DeviceMesh) -> None:
    model: Any = xd.materialize(on_meta(mesh, Net), seed=3, rng="torch")
    torch.manual_seed(3)
    assert checksums(model) == checksums(Net())
    assert model.head.weight is model.embedding.weight
    assert not model.linear.bias.requires_grad
    assert model.embedding.weight.placements == (Shard(0), Shard(1))


@pytest.mark.parametrize("rng", ["device", "torch"])
def test_values_do_not_depend_on_the_mesh(
    mesh: xd.DeviceMesh, other_mesh: xd.DeviceMesh, rng: Any
) -> None:
    one: Any = xd.init_device_mesh("xla", (8,), mesh_dim_names=("x",))
    expected = checksums(xd.materialize(nn.Linear(16, 8, device="meta"), one, seed=0, rng=rng))
    for each in (mesh, other_mesh):
        model = on_meta(each)
        assert checksums(xd.materialize(model, seed=0, rng=rng)) == expected
    assert checksums(xd.materialize(on_meta(mesh), seed=1, rng=rng)) != expected


def test_device_values_are_those_of_the_same_init_on_the_mesh(mesh: xd.DeviceMesh) -> None:
    model: Any = xd.materialize(on_meta(mesh), seed=5)
    eager: Any = sharded(nn.Linear(SHAPE[1], SHAPE[0]), mesh)
    torch.manual_seed(5)
    eager.reset_parameters()
    assert checksums(model) == checksums(eager)


@pytest.mark.parametrize("rng", ["device", "torch"])
def test_parameters_stay_the_objects_that_they_are(mesh: xd.DeviceMesh, rng: Any) -> None:
    model = on_meta(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model.weight.mine = "kept"
    before = list(model.parameters())
    xd.materialize(model, seed=0, rng=rng)
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    assert model.weight.mine == "kept"
    started = model.weight.cpu()
    model(torch.ones(2, SHAPE[1])).sum().backward()
    optimizer.step()
    assert (model.weight.cpu() != started).all()


@pytest.mark.parametrize("rng", ["device", "torch"])
def test_modules_of_fully_shard(mesh: xd.DeviceMesh, rng: Any) -> None:
    with torch.device("meta"):
        model: Any = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8))
    model[0] = xd.fully_shard(model[0], mesh=mesh["tp"])
    model = xd.fully_shard(model, mesh=mesh["tp"])
    xd.materialize(model, seed=0, rng=rng)
    assert model[0].weight.placements == (Shard(0),)
    assert type(model[1].running_var) is torch.Tensor  # as fully_shard leaves buffers
    assert model[1].running_var.tolist() == [1.0] * 8
    model(torch.randn(4, 16)).sum().backward()
    assert model[0].weight.grad is not None
    if rng == "torch":
        torch.manual_seed(0)
        assert torch.equal(model[0].weight.cpu(), nn.Linear(16, 8).weight)


@pytest.mark.only_on("jax")
def test_scanned_layers(mesh: xd.DeviceMesh) -> None:
    def make() -> nn.Module:
        return nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    with torch.device("meta"):
        layers = xd.scan_layers(make())  # pyright: ignore[reportArgumentType]
    xd.materialize(xd.distribute_module(layers, mesh), seed=0, rng="torch")
    torch.manual_seed(0)
    assert checksums(layers) == checksums(make())
    assert layers(xd.distribute_tensor(torch.ones(2, 8), mesh)).shape == (2, 8)


def test_what_has_values_keeps_them(mesh: xd.DeviceMesh) -> None:
    def make() -> Any:
        return nn.Sequential(nn.Linear(16, 8), nn.Linear(16, 8), nn.BatchNorm1d(8))

    model: Any = on_meta(mesh, make)
    real = xd.distribute_tensor(torch.full((8, 16), 7.0), mesh, [Shard(1), Replicate()])
    model[0].weight = nn.Parameter(real)
    model[2].running_mean = torch.full((8,), 5.0)
    xd.materialize(model, seed=0, rng="torch")
    torch.manual_seed(0)
    expected: Any = make()
    assert (model[0].weight.cpu() == 7).all()
    assert (model[2].running_mean == 5).all()
    # The others' numbers are as if it had been drawn.
    assert torch.equal(model[1].weight.cpu(), expected[1].weight)
    assert torch.equal(model[0].bias.cpu(), expected[0].bias)
    before = checksums(model)
    assert checksums(xd.materialize(model, seed=9)) == before


def test_generators_stay_where_they_are(mesh: xd.DeviceMesh) -> None:
    def drawn(between: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        if between:
            xd.materialize(on_meta(mesh), seed=0)
        made = [torch.randn(8, 16)]
        for _ in range(4):
            made.append(xd.randn(8, 16, device_mesh=mesh, placements=[Shard(0), Shard(1)]).cpu())
        return made

    found = drawn(True)
    for a, b in zip(found, drawn(False), strict=True):
        assert torch.equal(a, b)
    assert len({value[0, 0].item() for value in found}) == 5  # none comes twice


def test_without_a_seed_the_generators_in_use_are_drawn_from(mesh: xd.DeviceMesh) -> None:
    torch.manual_seed(11)
    first = checksums(xd.materialize(on_meta(mesh), rng="torch"))
    second = checksums(xd.materialize(on_meta(mesh), rng="torch"))
    torch.manual_seed(11)
    assert first == checksums(nn.Linear(16, 8)) != second


@pytest.mark.parametrize("rng", ["device", "torch"])
def test_the_callers_init_comes_last(mesh: xd.DeviceMesh, rng: Any) -> None:
    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            module.bias.data.fill_(3)

    model: Any = xd.materialize(on_meta(mesh), seed=0, rng=rng, init=init)
    assert (model.bias.cpu() == 3).all()
    if rng == "torch":
        torch.manual_seed(0)
        assert torch.equal(model.weight.cpu(), nn.Linear(16, 8).apply(init).weight)
    else:
        assert 0.01 < model.weight.cpu().std() < 0.03


class Rotary(nn.Module):
    """A buffer that no checkpoint has, and a method that computes it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 8)
        self.register_buffer("frequencies", torch.arange(4.0), persistent=False)

    def reset_parameters(self) -> None:
        """Compute the buffer."""
        self.frequencies = torch.arange(4.0)

    def again(self) -> None:
        """What ``init="again"`` calls, once."""
        nn.init.ones_(self.linear.weight)


def test_a_buffer_that_is_computed_anew(mesh: xd.DeviceMesh) -> None:
    model: Any = xd.materialize(on_meta(mesh, Rotary), seed=0, init="again")
    assert model.frequencies.cpu().tolist() == [0, 1, 2, 3]
    assert isinstance(model.frequencies, xd.DTensor)
    assert (model.linear.weight.cpu() == 1).all()


def test_init_false_leaves_the_values_to_a_checkpoint(mesh: xd.DeviceMesh) -> None:
    model = on_meta(mesh, Rotary)
    state = torch.get_rng_state()
    xd.materialize(model, init=False)
    assert torch.equal(state, torch.get_rng_state())
    assert model.frequencies.cpu().tolist() == [0, 1, 2, 3]
    assert model.linear.weight.placements == (Shard(0), Shard(1))
    assert not model.linear.weight.cpu().any()
    values = torch.randn(8, 16)
    model.linear.load_state_dict({"weight": values, "bias": torch.ones(8)})
    assert torch.equal(model.linear.weight.cpu(), values)


INITS: dict[str, Any] = {
    "normal": lambda t: nn.init.normal_(t, 0.5, 2.0),
    "xavier": lambda t: nn.init.xavier_uniform_(t),
    "kaiming": lambda t: nn.init.kaiming_normal_(t),
    "trunc": lambda t: nn.init.trunc_normal_(t, std=0.02),
    "orthogonal": lambda t: nn.init.orthogonal_(t),
    "eye": lambda t: nn.init.eye_(t),
    "sparse": lambda t: nn.init.sparse_(t, 0.25),
    "copy": lambda t: t.copy_(torch.arange(float(t.numel())).reshape(t.shape)),
    "rows": lambda t: t[1:3].normal_(),
    "columns": lambda t: t[:, 2:5].uniform_(),
    "exponential": lambda t: t.data.exponential_(2.0),
    "generator": lambda t: t.normal_(generator=torch.Generator().manual_seed(4)),
}


@pytest.mark.parametrize("name", INITS)
@pytest.mark.parametrize("shape", [(8, 16), (7, 9)], ids=str)
def test_every_fill_is_torchs(
    mesh: xd.DeviceMesh, name: str, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xla_dtensor.nn.host_blocks.RUN", 16)
    model = on_meta(mesh, lambda: nn.Linear(shape[1], shape[0], bias=False))
    init = INITS[name]
    xd.materialize(model, seed=2, rng="torch", init=lambda m: init(m.weight))
    torch.manual_seed(2)
    expected = nn.Linear(shape[1], shape[0], bias=False)
    with torch.no_grad():
        init(expected.weight)
    found = model.weight.cpu()
    if name == "orthogonal":
        torch.testing.assert_close(found, expected.weight)
    else:
        assert torch.equal(found, expected.weight)


@pytest.mark.parametrize("name", ["trunc", "orthogonal", "eye", "copy", "rows", "exponential"])
@pytest.mark.parametrize("shape", [(8, 16), (7, 9)], ids=str)
def test_every_fill_runs_on_the_devices(
    mesh: xd.DeviceMesh, other_mesh: xd.DeviceMesh, name: str, shape: tuple[int, int]
) -> None:
    made = []
    for each in (mesh, other_mesh):
        model = on_meta(each, lambda: nn.Linear(shape[1], shape[0], bias=False))
        init = INITS[name]
        xd.materialize(model, seed=2, init=lambda m, init=init: init(m.weight))
        made.append(model.weight.cpu())
    torch.testing.assert_close(*made, rtol=1e-6, atol=1e-6)
    assert made[0].unique().numel() > 1


def test_half_precision(mesh: xd.DeviceMesh) -> None:
    model = on_meta(mesh, lambda: nn.Linear(16, 8, dtype=torch.bfloat16))
    xd.materialize(model, seed=0, rng="torch")
    torch.manual_seed(0)
    assert model.weight.dtype == torch.bfloat16
    assert checksums(model) == checksums(nn.Linear(16, 8, dtype=torch.bfloat16))


def hugging_face_on_meta(mesh: xd.DeviceMesh, name: str) -> Any:
    hf = pytest.importorskip("transformers")
    with torch.device("meta"):
        return xd.distribute_module(getattr(hugging_face, name)(hf), mesh)


def hugging_face_eager(name: str) -> Any:
    torch.manual_seed(0)
    return getattr(hugging_face, name)(pytest.importorskip("transformers"))


@pytest.mark.parametrize("name", ["_llama", "_t5"])
def test_hugging_face_values_are_those_of_an_eager_model(mesh: xd.DeviceMesh, name: str) -> None:
    model = xd.materialize(hugging_face_on_meta(mesh, name), seed=0, rng="torch")
    expected = hugging_face_eager(name)
    assert checksums(model) == checksums(expected)
    for buffer, value in expected.named_buffers():
        assert torch.equal(model.get_buffer(buffer).cpu(), value), buffer


def test_hugging_face_memory_only_still_has_its_frequencies(mesh: xd.DeviceMesh) -> None:
    model = xd.materialize(hugging_face_on_meta(mesh, "_llama"), init=False)
    expected = hugging_face_eager("_llama")
    for buffer, value in expected.named_buffers():
        assert torch.equal(model.get_buffer(buffer).cpu(), value), buffer
    model.load_state_dict(expected.state_dict())
    assert checksums(model) == checksums(expected)
