"""DTensors in orbax's checkpoints: bit by bit, on other meshes, in the background."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import xla_dtensor as xd
from xla_dtensor import checkpoint
from xla_dtensor.checkpoint import orbax
from xla_dtensor.errors import CheckpointError

pytestmark = [pytest.mark.usefixtures("mesh"), pytest.mark.only_on("jax")]
R, S = Replicate(), Shard
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.float64, torch.bool)
PARTIAL: dict[str, Any] = {"partial_restore": True}
PLAIN = {
    "n": 3,
    "lr": 0.1,
    "on": True,
    "none": None,
    "text": "word",
    "code": "torch.save;base64,x",
    "": "é",
    "betas": (0.9, [1, {"a": 2}]),
}


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[ocp.CheckpointManager]:
    with ocp.CheckpointManager(tmp_path) as made:
        yield made


def save(manager: ocp.CheckpointManager, state: Any, step: int = 1) -> None:
    manager.save(step, args=orbax.DTensorSave(state))
    manager.wait_until_finished()


def restore(manager: ocp.CheckpointManager, state: Any, step: int = 1, **options: Any) -> Any:
    return manager.restore(step, args=orbax.DTensorRestore(state, **options))


def values(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Values that 32 bits do not hold, where the dtype has more."""
    count = torch.arange(torch.Size(shape).numel())
    wide = count + 2**40 if dtype == torch.int64 else count.double() / 7 - 2
    return wide.to(dtype).reshape(shape)


# ---------------------------------------------------------------------- what comes back


@pytest.mark.parametrize("shape", [(8, 4), (9, 5), (1, 3), (0, 4)])
@pytest.mark.parametrize("other", [((8,), (S(0),)), ((8,), (S(1),)), ((4, 2), (R, S(0)))])
def test_bit_equal_on_another_mesh(
    manager: ocp.CheckpointManager, mesh: xd.DeviceMesh, shape: tuple[int, ...], other: Any
) -> None:
    target = xd.init_device_mesh("xla", other[0])
    state: dict[str, Any] = {"step": 1}  # orbax takes no tree without anything in it
    template: dict[str, Any] = {"step": 0}
    for dtype in DTYPES:
        whole = values(shape, dtype)
        state[str(dtype)] = xd.distribute_tensor(whole, mesh, [S(0), S(1)])
        template[str(dtype)] = xd.distribute_tensor(torch.zeros_like(whole), target, other[1])
    save(manager, state)
    restored = restore(manager, template)
    assert restored is template
    for dtype in DTYPES:
        tensor = restored[str(dtype)]
        assert (tensor.dtype, tensor.placements) == (dtype, other[1])
        assert torch.equal(tensor.full_tensor().cpu(), values(shape, dtype))


def test_where_an_event_loop_runs(manager: ocp.CheckpointManager, mesh: xd.DeviceMesh) -> None:
    """As in a notebook: orbax goes on in another thread there."""
    whole = values((8, 4), torch.int64)
    template = {"w": xd.distribute_tensor(whole * 0, mesh, [R, S(0)])}

    async def cell() -> None:
        save(manager, {"w": xd.distribute_tensor(whole, mesh, [S(0), S(1)])})
        restore(manager, template)

    asyncio.run(cell())
    assert torch.equal(template["w"].full_tensor().cpu(), whole)


def test_what_is_no_dtensor(manager: ocp.CheckpointManager, mesh: xd.DeviceMesh) -> None:
    plain = {str(dtype): values((3,), dtype) for dtype in DTYPES}
    scalar = xd.distribute_tensor(torch.tensor(2**40), mesh)
    save(manager, {"tensors": plain, "values": PLAIN, "list": [scalar, 2**70]})
    state: Any = {
        "tensors": {name: torch.zeros_like(tensor) for name, tensor in plain.items()},
        "values": dict.fromkeys(PLAIN),
        "list": [xd.distribute_tensor(torch.tensor(0), mesh), 0],
    }
    restore(manager, state)
    assert state["values"] == PLAIN
    assert (state["list"][0].item(), state["list"][1]) == (2**40, 2**70)
    assert all(torch.equal(state["tensors"][name], tensor) for name, tensor in plain.items())


def test_the_state_converts(manager: ocp.CheckpointManager, mesh: xd.DeviceMesh) -> None:
    """As orbax does it: the target's dtype is what is restored."""
    whole = values((8, 4), torch.float32)
    save(manager, {"w": xd.distribute_tensor(whole, mesh, [S(0), R]), "b": whole})
    state: Any = {
        "w": xd.distribute_tensor(whole.bfloat16() * 0, mesh, [R, S(1)]),
        "b": whole.bfloat16() * 0,
    }
    restore(manager, state)
    assert torch.equal(state["w"].full_tensor().cpu(), whole.bfloat16())
    assert torch.equal(state["b"], whole.bfloat16())


def test_jax_code_reads_and_writes_it(tmp_path: Path, mesh: xd.DeviceMesh) -> None:
    whole = values((9, 4), torch.float32)
    with ocp.CheckpointManager(tmp_path) as manager:
        save(manager, {"m": {"0.w": xd.distribute_tensor(whole, mesh, [S(0), R])}, "n": (3,)})
    with ocp.CheckpointManager(tmp_path) as manager:
        tree = manager.restore(1, args=ocp.args.StandardRestore())
        assert np.array_equal(tree["m"]["0.w"], whole.numpy())
        assert isinstance(tree["n"], str)
    with ocp.CheckpointManager(tmp_path) as manager:
        layers = {"layers": [{"w": whole.numpy()}, {"w": whole.numpy() + 1}], "note": "hello"}
        manager.save(2, args=ocp.args.PyTreeSave(layers))
    with ocp.CheckpointManager(tmp_path) as manager:
        template = xd.distribute_tensor(whole * 0, mesh, [R, S(0)])
        state = restore(manager, {"layers": {"1": {"w": template}}, "note": ""}, 2, **PARTIAL)
        assert torch.equal(template.full_tensor().cpu(), whole + 1)
        assert state["note"] == "hello"


# ---------------------------------------------------------------------- a training job


def training(mesh: xd.DeviceMesh, placements: Any, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    module: Any = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 5))

    def place(_: str, part: nn.Module, on: xd.DeviceMesh) -> None:
        for name, p in list(part.named_parameters(recurse=False)):
            where = placements if p.ndim == 2 else [R, R]
            setattr(part, name, nn.Parameter(xd.distribute_tensor(p, on, where)))

    xd.distribute_module(module, mesh, place)
    return {"model": module, "optimizer": torch.optim.AdamW(module.parameters(), lr=0.01)}


def stepper(state: dict[str, Any], mesh: xd.DeviceMesh) -> Callable[[torch.Tensor], float]:
    """A compiled step: its programs donate the state, so that its memory is written to."""

    def step(batch: torch.Tensor) -> torch.Tensor:
        loss = state["model"](batch).pow(2).mean()
        loss.backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        return loss.detach()

    compiled = xd.compile(step)
    return lambda batch: compiled(xd.distribute_tensor(batch, mesh)).item()


def test_a_job_goes_on(manager: ocp.CheckpointManager, mesh: xd.DeviceMesh) -> None:
    batches = torch.randn(5, 8, 6)
    state = training(mesh, [R, S(0)], 0)
    step = stepper(state, mesh)
    for batch in batches[:2]:
        step(batch)
    manager.save(2, args=orbax.DTensorSave(state))
    expected = [step(batch) for batch in batches[2:]]  # while orbax writes
    manager.wait_until_finished()

    same = restore(manager, training(mesh, [R, S(0)], 1), 2)
    step = stepper(same, mesh)
    assert [step(batch) for batch in batches[2:]] == expected

    elsewhere = restore(manager, training(mesh, [S(1), S(0)], 2), 2)
    parameter = elsewhere["model"][0].weight
    moment = elsewhere["optimizer"].state[parameter]["exp_avg"]
    assert parameter.placements == (S(1), S(0))
    assert moment.xla_sharding() == parameter.xla_sharding()
    step = stepper(elsewhere, mesh)
    assert [step(batch) for batch in batches[2:]] == pytest.approx(expected, rel=1e-5)


def test_the_state_may_change_while_it_is_written(
    manager: ocp.CheckpointManager, mesh: xd.DeviceMesh
) -> None:
    state = {
        "w": xd.distribute_tensor(torch.ones(1 << 20), mesh, [S(0), S(0)]),
        "plain": torch.ones(1 << 20),
    }
    double = xd.compile(lambda: state["w"].mul_(2))
    double()
    manager.save(1, args=orbax.DTensorSave(state))
    for _ in range(5):
        double()
        state["plain"].mul_(2)
    manager.wait_until_finished()
    restore(manager, state)
    assert (state["w"].full_tensor() == 2).all()
    assert (state["plain"] == 1).all()


def test_shared_weights(manager: ocp.CheckpointManager, mesh: xd.DeviceMesh) -> None:
    def made(seed: int) -> Any:
        torch.manual_seed(seed)
        module: Any = nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 12, bias=False))
        module[1].weight = module[0].weight
        return xd.fully_shard(module, mesh=mesh["tp"])

    module, other = made(0), made(1)
    save(manager, {"m": module})
    restore(manager, {"m": other})
    assert other[1].weight is other[0].weight
    assert torch.equal(other[0].weight.full_tensor().cpu(), module[0].weight.full_tensor().cpu())


def test_several_items_and_checkpointers(tmp_path: Path, mesh: xd.DeviceMesh) -> None:
    whole = values((8, 4), torch.int64)
    saved = {"w": xd.distribute_tensor(whole, mesh, [S(0), R])}
    state = {"w": xd.distribute_tensor(whole * 0, mesh, [R, S(0)])}
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
    with ocp.CheckpointManager(tmp_path / "manager", options=options) as manager:
        note = ocp.args.JsonSave({"a": 1})
        manager.save(1, args=ocp.args.Composite(state=orbax.DTensorSave(saved), note=note))
        manager.restore(1, args=ocp.args.Composite(state=orbax.DTensorRestore(state)))
    assert torch.equal(state["w"].full_tensor().cpu(), whole)
    state["w"].zero_()
    with ocp.Checkpointer(orbax.DTensorCheckpointHandler(use_zarr3=True)) as checkpointer:
        checkpointer.save(tmp_path / "one", args=orbax.DTensorSave(saved))
        checkpointer.restore(tmp_path / "one", args=orbax.DTensorRestore(state))
    assert torch.equal(state["w"].full_tensor().cpu(), whole)


# ---------------------------------------------------------------------- what is refused


def test_what_does_not_fit(manager: ocp.CheckpointManager, mesh: xd.DeviceMesh) -> None:
    one = torch.ones(8)
    save(manager, {"w": xd.distribute_tensor(one, mesh), "b": one, "n": 3})

    def state(**other: Any) -> dict[str, Any]:
        return {"w": xd.distribute_tensor(one * 0, mesh), "b": one * 0, "n": 0, **other}

    for text, wrong in {
        "checkpoint lacks 'c'; the state lacks nothing. Pass": state(c=one),
        "checkpoint lacks nothing; the state lacks 'b', 'n'. Pass": {"w": state()["w"]},
        r"'b' .* It has shape=\(8,\) there, and shape=\(4,\) in": state(b=one[:4]),
        "'b' .* It is a tensor there, and a plain value in the state": state(b=3),
        "'n' .* It is a plain value there, and a tensor in the state": state(n=one),
    }.items():
        with pytest.raises(CheckpointError, match=text):
            restore(manager, wrong)
        assert wrong["w"].sum().item() == 0  # nothing was restored
    part = restore(manager, {"w": state()["w"]}, **PARTIAL)
    assert part["w"].sum().item() == 8
    with pytest.raises(CheckpointError, match="checkpoint lacks 'c'; the state lacks nothing"):
        restore(manager, state(c=one), **PARTIAL)
    with pytest.raises(CheckpointError, match="It is on the meta device and has no value"):
        orbax.DTensorSave({"m": torch.ones(2, device="meta")})


def test_where_orbax_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, orbax.__name__)
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(ImportError, match=r"Run pip install 'xla-dtensor\[orbax\]'"):
        assert checkpoint.orbax
