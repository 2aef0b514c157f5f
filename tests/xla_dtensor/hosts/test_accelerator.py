"""What torch answers about devices and processes after install(), and what it takes back."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed
import torch.distributed.fsdp
from torch import nn
from torch.distributed.tensor import Shard

import xla_dtensor as xd
from xla_dtensor.nn import install as functions

pytestmark = pytest.mark.only_on("jax")

# Looked up when they are used: install() replaces what is in them.
accelerator: Any = torch.accelerator
dist: Any = torch.distributed
fsdp: Any = torch.distributed.fsdp


@pytest.fixture
def installed(mesh: xd.DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    xd.install()
    yield
    xd.uninstall()


def names() -> list[Any]:
    return [
        accelerator.is_available,
        accelerator.device_count,
        accelerator.current_accelerator,
        accelerator.synchronize,
        dist.init_process_group,
        dist.get_default_backend_for_device,
        torch.Tensor.to,
        torch.tensor,
        torch.as_tensor,
        torch.nn.functional.linear,  # and one that is never replaced
    ]


def test_uninstall_puts_everything_back(
    mesh: xd.DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    before = names()
    assert not dist.is_initialized()
    xd.install()
    assert [a is b for a, b in zip(names(), before, strict=True)] == [False] * 9 + [True]
    assert accelerator.device_count() == 8
    assert (os.environ["RANK"], os.environ["LOCAL_RANK"], dist.get_world_size()) == ("0", "0", 1)
    xd.uninstall()
    assert all(a is b for a, b in zip(names(), before, strict=True))
    assert not dist.is_initialized()
    assert "RANK" not in os.environ
    with pytest.raises(NotImplementedError, match="'XLA' backend"):
        torch.empty(2, device="xla:0")
    # What is installed twice, by either name, is taken back as one.
    for _ in range(2):
        xd.install()
        functions.install()
        functions.uninstall()
        assert all(a is b for a, b in zip(names(), before, strict=True))


@pytest.mark.usefixtures("installed")
class TestAnswers:
    def test_questions(self) -> None:
        assert accelerator.is_available()
        assert accelerator.current_accelerator() == torch.device("xla")
        assert accelerator.current_accelerator(check_available=True).type == "xla"
        assert accelerator.current_device_index() == 0
        accelerator.set_device_index(0)
        with accelerator.device_index(0):
            accelerator.synchronize()

    def test_torch_gets_its_own_answer(self) -> None:
        globals_of_torch = {"__name__": "torch.optim.optimizer", "torch": torch}
        answer = eval("torch.accelerator.is_available()", globals_of_torch)
        assert answer == functions.torch_has_one()

    def test_process_group(self) -> None:
        device = torch.device("xla:0")
        backend = dist.get_default_backend_for_device(device)
        assert backend == "gloo"
        dist.init_process_group(backend=backend, device_id=device)
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "gloo")
        dist.init_process_group(backend)  # the job's is there
        dist.destroy_process_group()
        dist.init_process_group()
        assert dist.is_initialized()
        dist.destroy_process_group()

    def test_a_group_that_the_call_describes(self) -> None:
        store = dist.HashStore()
        device = torch.device("xla", 0)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1, device_id=device)
        assert dist.get_world_size() == 1
        with pytest.raises(ValueError, match="twice"):
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        dist.destroy_process_group()

    def test_fully_shard_without_a_mesh(self) -> None:
        model: Any = fsdp.fully_shard(nn.Linear(4, 16))
        assert xd.FSDPModule in type(model).__mro__
        assert model.weight.placements == (Shard(0),)
        assert model.weight.device_mesh.size() == 8

    def test_a_mesh_that_leaves_devices_out(self, caplog: pytest.LogCaptureFixture) -> None:
        for _ in range(2):
            dist.init_device_mesh("xla", (3,))
        (said,) = [each.getMessage() for each in caplog.records]
        assert said == (
            "init_device_mesh made DeviceMesh((0=3), device: 'xla'), and there are 8 devices: the "
            "others do nothing. WORLD_SIZE and get_world_size() count processes; "
            "xla_dtensor.get_runtime().device_ids() has all devices."
        )
        dist.init_device_mesh("xla", (8,))
        assert len(caplog.records) == 1


def test_an_accelerator_of_torchs(
    installed: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A machine with one, and no runtime that runs or is named: torch's, and it says so."""
    monkeypatch.delenv("XLA_DTENSOR_RUNTIME")
    monkeypatch.setattr(functions, "current_runtime", lambda: None)
    monkeypatch.setattr(functions, "torch_has_one", lambda: True)
    assert accelerator.current_accelerator(check_available=True) is None
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        assert not isinstance(fsdp.fully_shard(nn.Linear(2, 2), mesh=mesh), xd.FSDPModule)
        assert not caplog.records
        model = fsdp.fully_shard(nn.Linear(2, 2))
        assert not isinstance(model, xd.FSDPModule)
        (said,) = [each.getMessage() for each in caplog.records]
        assert said == (
            "fully_shard was called without a mesh, and torch has an accelerator of its own: the "
            "model is on torch's mesh, and nothing of it on XLA. Pass mesh=, or choose a runtime "
            "before, by xla_dtensor.get_runtime() or XLA_DTENSOR_RUNTIME=jax."
        )
    finally:
        dist.destroy_process_group()
    monkeypatch.setenv("XLA_DTENSOR_RUNTIME", "jax")
    assert isinstance(fsdp.fully_shard(nn.Linear(2, 2)), xd.FSDPModule)


# -------------------------------------------------------------------------------- The device "xla"


@pytest.mark.parametrize("device", ["xla", "xla:0", torch.device("xla"), torch.device("xla", 0)])
@pytest.mark.parametrize(
    "make",
    [
        lambda device: torch.rand(3, 2, device=device),
        lambda device: torch.randint(0, 9, (4,), device=device),
        lambda device: torch.arange(5, device=device),
        lambda device: torch.full((2,), 3.0, device=device, dtype=torch.bfloat16),
        lambda device: torch.tensor([1.0, 2.0], device=device),
        lambda device: torch.as_tensor([1, 2], device=device),
        lambda device: torch.eye(3).to(device),
        lambda device: torch.eye(3).to(device, torch.float64),
        lambda device: torch.eye(3).to(device=device, dtype=torch.int32),
        lambda device: torch.eye(3).new_zeros(2, device=device),
        lambda device: nn.Linear(3, 2).to(device).weight.detach(),
        lambda device: nn.Linear(3, 2, device=device).weight.detach(),
    ],
)
def test_xla_is_the_hosts_memory(
    installed: None, make: Callable[[Any], torch.Tensor], device: Any
) -> None:
    torch.manual_seed(3)
    made = make(device)
    torch.manual_seed(3)
    expected = make("cpu")
    assert type(made) is torch.Tensor
    assert (made.device, made.dtype) == (expected.device, expected.dtype)
    assert torch.equal(made, expected)


def test_other_devices_are_left_alone(installed: None) -> None:
    assert torch.ones(2).to("meta").is_meta
    assert torch.ones(2).to(torch.float64).dtype is torch.float64
    assert torch.ones(2).to(torch.ones(1, dtype=torch.int32)).dtype is torch.int32
    assert torch.tensor([1.0], device="meta").is_meta


def test_a_model_without_memory(installed: None, mesh: xd.DeviceMesh) -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 16)
    sharded: Any = xd.fully_shard(model)
    sharded.to_empty(device=torch.device("xla:0"))
    sharded.reset_parameters()
    assert sharded.weight.placements == (Shard(0),)
    assert 0 < sharded.weight.abs().max().item() <= 0.5


def test_one_program(installed: None, mesh: xd.DeviceMesh) -> None:
    """A step that asks, makes and moves is traced once."""
    weight = nn.Parameter(xd.distribute_tensor(torch.ones(4), mesh))
    optimizer = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.0)

    @xd.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        device = accelerator.current_accelerator()
        factor = torch.tensor([1.0, 2.0, 3.0, 4.0], device=device).to(device)
        loss = (weight * factor + x.to(device) + torch.zeros(4, device=device)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    losses = [step(torch.full((4,), float(n))).item() for n in range(2)]
    assert losses == pytest.approx([10.0, 10.0 - 0.1 * 10 + 4], abs=1e-5)
    assert step.stats()["traces"] == 1


# ------------------------------------------------------------------------------------------- Savers


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: nn.Parameter(x, requires_grad=False)])
def test_a_whole_tensor_is_saved_as_torchs(wrap: Any, mesh: xd.DeviceMesh) -> None:
    """Whoever loads it needs neither this library nor trust."""
    values = torch.arange(12.0).reshape(4, 3).bfloat16()
    whole = wrap(xd.distribute_tensor(values, mesh, [Shard(0)] * mesh.ndim).full_tensor())
    file = io.BytesIO()
    torch.save({"whole": whole, "again": whole, "row": whole[1]}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert type(loaded["whole"]) in (torch.Tensor, nn.Parameter)
    assert isinstance(loaded["whole"], nn.Parameter) == isinstance(whole, nn.Parameter)
    assert loaded["again"] is loaded["whole"]
    assert torch.equal(loaded["whole"], values)
    assert torch.equal(loaded["row"], values[1])
    assert b"xla_dtensor" not in file.getvalue()
