"""load_hf and save_hf: values, names, dtypes and refusals, on modules that lie in many ways."""

from __future__ import annotations

import json
import math
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard

import xla_dtensor as xd
from xla_dtensor import checkpoint
from xla_dtensor.errors import ArgumentTypeError, WeightsError
from xla_dtensor.hosts.hugging_face import load_hf, save, save_hf
from xla_dtensor.hosts.hugging_face.files import WeightFiles

pytestmark = pytest.mark.usefixtures("runtime")

SHAPES = [(), (8,), (5,), (0, 4), (16, 8), (7, 6), (3, 8, 4), (5, 3, 2, 6)]


class Bag(nn.Module):
    """Tensors of many shapes and dtypes, as parameters and buffers."""

    def __init__(self) -> None:
        super().__init__()
        for i, shape in enumerate(SHAPES):
            dtype = (torch.float32, torch.bfloat16)[i % 2]
            setattr(self, f"p{i}", nn.Parameter(torch.randn(shape).to(dtype)))
            self.register_buffer(f"b{i}", torch.randint(-9, 9, shape))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.inner = nn.Linear(8, 4)
        self.inner.weight.requires_grad = False


def on_mesh(bag: nn.Module, mesh: xd.DeviceMesh, draw: random.Random) -> Any:
    """Distribute each tensor somehow, or leave it as it is."""

    def placements(ndim: int) -> list[Placement]:
        cut = [
            Shard(draw.randrange(ndim)) if ndim and draw.random() < 0.7 else Replicate()
            for _ in range(2)
        ]
        return list(cut)

    for module in bag.modules():
        for slots in (module._parameters, module._buffers):
            for name, tensor in slots.items():
                if tensor is None or draw.random() < 0.1:
                    continue
                lying: Any = xd.distribute_tensor(tensor.detach(), mesh, placements(tensor.ndim))
                kept = isinstance(tensor, nn.Parameter)
                slots[name] = nn.Parameter(lying, tensor.requires_grad) if kept else lying
    return bag


def values(module: nn.Module) -> dict[str, torch.Tensor]:
    tensors = module.state_dict(keep_vars=True)
    return {
        key: (t.full_tensor() if isinstance(t, xd.DTensor) else t).detach().cpu().clone()
        for key, t in tensors.items()
    }


def assert_same(module: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    found = values(module)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].dtype == value.dtype, key
        assert torch.equal(found[key], value), key


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.thorough), 2])
def test_what_was_saved_comes_back_bit_for_bit_however_it_lies(
    mesh: xd.DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    expected = values(first := on_mesh(Bag(), mesh, draw))
    if seed < 2:  # small pieces, so that most tensors are written in several
        monkeypatch.setattr(save, "GATHERED_BYTES", 100)
    most = [60, 500, 10**9][seed]
    assert (len(save_hf(tmp_path, first, max_shard_bytes=most)) == 1) == (seed == 2)
    for device in ("cpu", "meta"):
        with torch.device(device):
            second = on_mesh(Bag(), mesh, draw)
        result = load_hf(tmp_path, second)
        assert (result.missing, result.unexpected) == ((), ())
        assert_same(second, expected)
        assert second.inner.bias.requires_grad
        assert not second.inner.weight.requires_grad
        for tensor in second.state_dict(keep_vars=True).values():
            if isinstance(tensor, xd.DTensor) and tensor.numel():
                asked = tensor._spec.layout.op_sharding(xd.get_runtime().root(mesh.value))
                assert tensor.xla_sharding() == asked
    load_hf(tmp_path, plain := Bag())
    assert_same(plain, expected)


def test_a_tensor_with_values_stays_the_same_object_and_is_seen_to_change(
    mesh: xd.DeviceMesh, tmp_path: Path
) -> None:
    save_hf(tmp_path, source := nn.Linear(8, 16))
    for target in (nn.Linear(8, 16), xd.shard_module(nn.Linear(8, 16), mesh, {"": "colwise"})):
        optimizer = torch.optim.SGD(target.parameters(), lr=1.0)
        weight, version = target.weight, target.weight._version
        load_hf(tmp_path, target)
        assert target.weight is weight is optimizer.param_groups[0]["params"][0]
        assert weight._version > version
        assert_same(target, values(source))


def test_a_parameter_without_values_stays_the_same_object(
    mesh: xd.DeviceMesh, tmp_path: Path
) -> None:
    save_hf(tmp_path, source := nn.Linear(8, 16))
    with torch.device("meta"):
        target: Any = xd.shard_module(nn.Linear(8, 16), mesh, {"": "colwise"})
    target.weight.marked = "mine"
    optimizer = torch.optim.SGD(target.parameters(), lr=0.5)
    weight = target.weight
    load_hf(tmp_path, target)
    assert target.weight is weight is optimizer.param_groups[0]["params"][0]
    assert weight.marked == "mine"
    assert_same(target, values(source))
    # With values it is trained, and converted after that.
    target(xd.distribute_tensor(torch.ones(4, 8), mesh)).sum().backward()
    optimizer.step()
    assert torch.equal(values(target)["bias"], source.bias.detach() - 2)
    load_hf(tmp_path, target, dtype=torch.bfloat16)
    assert_same(target, {key: value.bfloat16() for key, value in values(source).items()})


def test_a_part_that_the_devices_do_not_hold_whole_is_read_once(
    mesh: xd.DeviceMesh, tmp_path: Path
) -> None:
    save_hf(tmp_path, nn.Linear(2048, 16, bias=False))
    for rule in (["tp", None], [None, "tp"], [None, None], ["tp", "dp"]):
        with torch.device("meta"):
            target = nn.Linear(2048, 16, bias=False)
        xd.shard_module(target, mesh, {"weight": rule})
        # Devices that hold the same get it from one reading.
        assert load_hf(tmp_path, target).bytes_read == 2048 * 16 * 4


def test_names_say_what_a_tensor_is_made_of_both_ways(mesh: xd.DeviceMesh, tmp_path: Path) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(8, 16, bias=False)
            self.experts = nn.ParameterList([torch.randn(4, 6, 8)])
            self.head = nn.Linear(8, 2)

    names = {
        "qkv.weight": [("q.weight", 8), ("k.weight", 4), ("v.weight", 4)],
        "experts.*": ["moe.*.#.gate", "moe.*.#.up"],
        "head.*": None,
        "**": "model.**",
    }
    rules = {"qkv.weight": ["tp", "dp"], "experts.0": ["dp", "tp", None], "**": None}
    first, second = Own(), xd.shard_module(Own(), mesh, rules)
    save_hf(tmp_path / "a", first, names=names)
    with WeightFiles(tmp_path / "a") as files:
        shapes = {key: tensor.shape for key, tensor in files.tensors.items()}
    assert shapes == {
        "q.weight": (8, 8),
        "k.weight": (4, 8),
        "v.weight": (4, 8),
        **{f"moe.0.{i}.{part}": (3, 8) for i in range(4) for part in ("gate", "up")},
    }
    before = values(second)
    assert load_hf(tmp_path / "a", second, names=names).missing == ()
    kept = {key: before[key] for key in before if key.startswith("head")}
    assert_same(second, {**values(first), **kept})
    save_hf(tmp_path / "b", second, names=names)
    a, b = ((tmp_path / folder / "model.safetensors").read_bytes() for folder in "ab")
    assert a == b


def test_dtypes_are_converted_as_asked(mesh: xd.DeviceMesh, tmp_path: Path) -> None:
    source: Any = Bag().double()
    save_hf(tmp_path, source)
    expected = values(source)

    def loaded(device: str, dtype: Any) -> Any:
        with torch.device(device):
            bag = on_mesh(Bag(), mesh, random.Random(5))
        load_hf(tmp_path, bag, dtype=dtype)
        return bag

    for device in ("cpu", "meta"):
        assert_same(loaded(device, "auto"), expected)
        halves = {k: v.half() if v.is_floating_point() else v for k, v in expected.items()}
        assert_same(loaded(device, torch.float16), halves)
        own = {k: v.to(getattr(Bag(), k).dtype) for k, v in expected.items() if "." not in k}
        own |= {k: v.float() for k, v in expected.items() if "." in k}
        assert_same(loaded(device, None), own)
    narrow = loaded("cpu", None)
    save_hf(tmp_path / "half", narrow, dtype=torch.float16, config={"dtype": "float64"})
    with WeightFiles(tmp_path / "half") as files:
        kinds = {tensor.dtype for tensor in files.tensors.values()}
    assert kinds == {torch.float16, torch.int64}
    assert json.loads((tmp_path / "half" / "config.json").read_text()) == {"dtype": "float16"}


def test_buffers_that_old_files_have_do_not_count(tmp_path: Path) -> None:
    class Old(Bag):
        def __init__(self) -> None:
            super().__init__()
            del self._buffers["scratch"]
            self.scratch = nn.Parameter(torch.zeros(3))
            self.rotary_emb = nn.ParameterDict({"inv_freq": torch.ones(2)})

    save_hf(tmp_path, Old())
    assert load_hf(tmp_path, Bag()).unexpected == ()


def test_a_tied_tensor_is_one(mesh: xd.DeviceMesh, tmp_path: Path) -> None:
    def model(tied: bool) -> Any:
        parts = nn.ModuleDict({"embed": nn.Embedding(16, 8), "head": nn.Linear(8, 16, bias=False)})
        if tied:
            parts["head"].weight = parts["embed"].weight
        return xd.shard_module(
            parts, mesh, {"embed.weight": ["tp", None], "head.weight": ["tp", None]}
        )

    assert len(values(model(tied=True))) == 2
    save_hf(tmp_path / "tied", first := model(tied=True))
    with WeightFiles(tmp_path / "tied") as files:
        assert list(files.tensors) == ["embed.weight"]
    result = load_hf(tmp_path / "tied", second := model(tied=True))
    assert result.loaded == ("embed.weight", "head.weight")
    assert second["head"].weight is second["embed"].weight
    assert_same(second, values(first))
    with pytest.raises(WeightsError, match=r"missing in the files \(1\): head\.weight"):
        load_hf(tmp_path / "tied", model(tied=False))

    save_hf(tmp_path / "two", untied := model(tied=False))
    with pytest.raises(WeightsError, match=r"different values under 'embed\.weight' and 'head"):
        load_hf(tmp_path / "two", second)
    load_hf(tmp_path / "two", second, strict=False)
    assert torch.equal(values(second)["head.weight"], values(untied)["embed.weight"])
    with torch.no_grad():
        untied["head"].weight.copy_(untied["embed"].weight)
    save_hf(tmp_path / "equal", untied)
    load_hf(tmp_path / "equal", second)


def test_names_that_compiling_and_checkpointing_add_are_left_out(tmp_path: Path) -> None:
    save_hf(tmp_path, nn.Sequential(inner := nn.Linear(4, 4)))
    compiled = nn.Sequential(torch.compile(other := nn.Linear(4, 4), backend="eager"))  # pyright: ignore
    load_hf(tmp_path, compiled)
    assert_same(other, values(inner))


@pytest.mark.only_on("jax")
@pytest.mark.parametrize("lying", [("dp", "tp"), ("tp", "dp"), (None, "tp"), (("dp", "tp"), None)])
def test_to_gather_a_part_xla_moves_no_more_than_it_and_a_shard(
    mesh: xd.DeviceMesh, lying: tuple[Any, ...]
) -> None:
    layer: Any = xd.shard_module(nn.Linear(256, 512, bias=False), mesh, {"weight": list(lying)})
    copied = [Replicate(), Replicate()]
    gather: Any = xd.compile(lambda w: w[100:132].redistribute(placements=copied))
    weight = layer.weight.detach()
    assert torch.equal(gather(weight).full_tensor().cpu(), weight.full_tensor().cpu()[100:132])
    moves = r"= \(?(\w+\[[\d,]*\]).* (?:all-gather|all-reduce|all-to-all|collective-permute)"
    moved = re.findall(moves, gather.hlo())
    assert moved
    sizes = [math.prod(map(int, re.findall(r"\d+", text.partition("[")[2]))) for text in moved]
    assert max(sizes) <= max(32 * 256, 512 * 256 // 8 + 8 * 256)


# ---------------------------------------------------------------------- what is refused


def test_what_does_not_fit_is_named_and_nothing_is_changed(
    mesh: xd.DeviceMesh, tmp_path: Path, count_sentences: Callable[[str], int]
) -> None:
    save_hf(tmp_path, nn.ModuleDict({"w1": nn.Linear(4, 8), "gate": nn.Linear(4, 4)}))
    module = nn.ModuleDict({"w1": nn.Linear(8, 4, bias=False), "gates": nn.Linear(4, 4)})
    xd.shard_module(module, mesh, {"**": None})
    before = values(module)
    for strict in (True, False):
        with pytest.raises(WeightsError) as raised:
            load_hf(tmp_path, module, strict=strict)
        message = str(raised.value)
        assert count_sentences(message) == 3
        for text in (
            f"A ModuleDict was to get the weights of path={str(tmp_path)!r}, which has 4 tensors.",
            "of another shape or kind (1): w1.weight has shape=(4, 8), ",
            "w1.weight in the files (8, 4); missing",
            "missing in the files (2): gates.weight (the nearest there is gate.weight), gates.bias",
            "not in the module (3): w1.bias, gate.weight, gate.bias",
        ):
            assert text in message
    assert_same(module, before)
    names = {"gates.*": "gate.*"}
    with pytest.raises(WeightsError, match=r"not in the module \(2\): w1.weight, w1.bias\. Pass "):
        load_hf(tmp_path, module, names={**names, "w1.*": None})
    result = load_hf(tmp_path, module, names={**names, "w1.*": None}, strict=False)
    assert result.loaded == ("gates.weight", "gates.bias")
    assert result.unexpected == ("w1.weight", "w1.bias")
    module["w1"] = nn.Linear(4, 8)
    result = load_hf(tmp_path, module, strict=False)
    assert result.missing == ("gates.weight", "gates.bias")


def test_values_of_another_kind_are_refused(tmp_path: Path) -> None:
    module = nn.Module()
    module.register_buffer("step", torch.tensor(3))
    save_hf(tmp_path, module)
    module.step = torch.tensor(3.0)
    text = r"step has dtype=torch\.float32, step in the files torch\.int64"
    with pytest.raises(WeightsError, match=text):
        load_hf(tmp_path, module)
    for dtype in (torch.int8, "float"):
        with pytest.raises(WeightsError, match=r"were to be loaded with dtype="):
            load_hf(tmp_path, module, dtype=dtype)


def test_other_arguments_that_are_refused(mesh: xd.DeviceMesh, tmp_path: Path) -> None:
    layer: Any = nn.Linear(2, 2)
    with pytest.raises(ArgumentTypeError, match=r"of type=dict\. .* Pass a module"):
        save_hf(tmp_path, {})  # pyright: ignore
    with pytest.raises(ArgumentTypeError, match=r"config=3 was passed, of type=int"):
        save_hf(tmp_path, layer, config=3)
    for size in (0, -1, "5 apples", "0GB"):
        with pytest.raises(WeightsError, match=r"max_shard_bytes=.*'5GB'"):
            save_hf(tmp_path, layer, max_shard_bytes=size)
    with pytest.raises(WeightsError, match=r"Two tensors were to be written as 'w'"):
        save_hf(tmp_path, layer, names={"weight": "w", "bias": "w"})
    with pytest.raises(WeightsError, match=r"'weight' on the meta device was to be written"):
        save_hf(tmp_path, nn.Linear(2, 2, device="meta"))
    with torch.device("meta"):
        layer = xd.shard_module(nn.Linear(2, 2), mesh, {"**": None})
    with pytest.raises(WeightsError, match=r"It has no values"):
        save_hf(tmp_path, layer)
    module = nn.Module()
    module.register_buffer("z", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(WeightsError, match=r"'z' was to be written with dtype=torch\.complex128"):
        save_hf(tmp_path, module)
    assert not list(tmp_path.iterdir())


def test_weights_go_through_a_checkpoint_of_this_library_onto_another_mesh(
    mesh: xd.DeviceMesh, tmp_path: Path
) -> None:
    def model(on: xd.DeviceMesh, rules: Any) -> Any:
        with torch.device("meta"):
            return xd.shard_module(nn.Sequential(nn.Linear(12, 6), nn.Linear(6, 5)), on, rules)

    save_hf(tmp_path / "first", nn.Sequential(nn.Linear(12, 6), nn.Linear(6, 5)))
    load_hf(tmp_path / "first", first := model(mesh, {"*.weight": ["tp", "dp"], "**": None}))
    checkpoint.save(tmp_path / "steps", {"model": first}, step=3)
    line = xd.init_device_mesh("xla", (8,), mesh_dim_names=("fsdp",))
    second = model(line, {"*.weight": [None, "fsdp"], "**": ["fsdp"]})
    xd.materialize(second, init=False)
    assert checkpoint.load(tmp_path / "steps", {"model": second}) == 3
    save_hf(tmp_path / "again", second)
    before, after = (
        (tmp_path / folder / "model.safetensors").read_bytes() for folder in ("first", "again")
    )
    assert before == after


# ---------------------------------------------------------------------- the folder


def test_a_save_replaces_the_one_before(tmp_path: Path) -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    assert len(save_hf(tmp_path, first, max_shard_bytes=64)) == 2
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model-00003-of-00009.safetensors.unfinished").write_text("killed")
    save_hf(tmp_path, second)
    assert {p.name for p in tmp_path.iterdir()} == {"model.safetensors", "tokenizer.json"}
    load_hf(tmp_path, first)
    assert_same(first, values(second))
    save_hf(tmp_path, second, max_shard_bytes=64)
    assert not (tmp_path / "model.safetensors").exists()
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_parameters": 20, "total_size": 80}


def test_a_save_that_fails_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_hf(tmp_path, first := nn.Linear(4, 4))
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(WeightsError, match=r"Process 0 could not: OSError: .*No space left"):
        save_hf(tmp_path, nn.Linear(4, 4), max_shard_bytes=64)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    assert values(first)
