"""XDAccelerator beside Accelerate's own Accelerator, in a loop as its users write it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import xla_dtensor as xd
from tests.xla_dtensor.integrations.tiny import difference, llama, rows
from xla_dtensor.errors import ArgumentTypeError
from xla_dtensor.runtimes import Runtime

pytestmark = [pytest.mark.usefixtures("runtime"), pytest.mark.only_on("jax")]


@pytest.fixture
def mesh(runtime: Runtime) -> xd.DeviceMesh:
    return xd.init_device_mesh("xla", (4, 2), mesh_dim_names=("fsdp", "tp"))


class Loop:
    """A training loop, with what `prepare` gave."""

    def __init__(self, accelerator: Any, is_compiled: bool = False, batch_size: int = 8) -> None:
        self.accelerator = accelerator
        model = llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=4)
        loader = torch.utils.data.DataLoader(rows(24), batch_size=batch_size)  # pyright: ignore
        self.model, self.optimizer, self.loader, self.scheduler = accelerator.prepare(
            model, optimizer, loader, scheduler
        )
        self.step = xd.compile(self.body) if is_compiled else self.body

    def body(self, batch: Any) -> torch.Tensor:
        loss = self.model(**batch).loss
        self.accelerator.backward(loss)
        if self.accelerator.sync_gradients:
            self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def epochs(self, count: int) -> list[float]:
        losses: list[float] = []
        for _ in range(count):
            for batch in self.loader:
                with self.accelerator.accumulate(self.model):
                    losses.append(float(self.accelerator.gather(self.step(batch)).mean()))
                    if self.accelerator.sync_gradients:
                        self.scheduler.step()
        return losses


def plain_loop(batch_size: int = 8, **options: Any) -> Loop:
    import accelerate

    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, **options)
    return Loop(accelerator, batch_size=batch_size)


def our_loop(mesh: Any, is_compiled: bool = True, batch_size: int = 8, **options: Any) -> Loop:
    import accelerate

    from xla_dtensor.integrations.accelerate import XDAccelerator

    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()
    options = {"gradient_accumulation_steps": 2, **options}
    return Loop(XDAccelerator(mesh=mesh, **options), is_compiled, batch_size)


@pytest.mark.parametrize("is_compiled", [True, False])
def test_a_loop_trains_as_plain_accelerate(mesh: xd.DeviceMesh, is_compiled: bool) -> None:
    epochs = 3 if is_compiled else 1
    plain, ours = plain_loop(), None
    wanted = plain.epochs(epochs)
    ours = our_loop(mesh, is_compiled)
    torch.testing.assert_close(ours.epochs(epochs), wanted, rtol=0, atol=1e-5)
    assert difference(ours.model, plain.model) < 1e-5
    assert ours.model.lm_head.weight.mesh_layout.text() == "[tp, fsdp]"
    if is_compiled:
        # One for batches that accumulate, one for those that update after it, and one for the
        # third batch, the last of an epoch, which updates alone.
        assert ours.step.stats()["traces"] == 3  # pyright: ignore


def test_a_state_is_loaded_on_another_mesh(mesh: xd.DeviceMesh, tmp_path: Path) -> None:
    first = our_loop(mesh)
    first.epochs(1)
    first.accelerator.save_state(str(tmp_path / "state"))
    wanted = first.epochs(1)
    later = our_loop(xd.init_device_mesh("xla", (8,), mesh_dim_names=("fsdp",)))
    later.accelerator.load_state(str(tmp_path / "state"))
    torch.testing.assert_close(later.epochs(1), wanted, rtol=0, atol=1e-5)
    assert difference(later.model, first.model) < 1e-6
    whole = later.accelerator.get_state_dict(later.model)
    assert {type(tensor) for tensor in whole.values()} == {torch.Tensor}


def test_what_is_gathered_for_metrics_has_the_rows_of_the_data(mesh: xd.DeviceMesh) -> None:
    loop = our_loop(mesh)
    labels = [loop.accelerator.gather_for_metrics(batch["labels"]) for batch in loop.loader]
    assert torch.equal(torch.cat(labels), torch.stack([row["labels"] for row in rows(24)]))
    batch = next(iter(loop.accelerator.skip_first_batches(loop.loader, 1)))
    assert batch["labels"].mesh_layout.text() == "[fsdp, -]"
    assert torch.equal(batch["labels"].full_tensor(), labels[1])
    count = batch["labels"].ne(-100).sum()
    assert int(loop.accelerator.reduce(count)) == int(labels[1].ne(-100).sum())


def test_products_are_in_bfloat16(mesh: xd.DeviceMesh) -> None:
    loop = our_loop(mesh, mixed_precision="bf16")
    loop.step(next(iter(loop.loader)))
    assert loop.model.lm_head.weight.dtype == torch.float32
    hlo: Any = loop.step.hlo()  # pyright: ignore
    assert sum("dot(" in line and "= bf16" in line for line in hlo.splitlines()) > 20


@pytest.mark.parametrize("order", ["model, optimizer", "optimizer, model"])
def test_an_optimizer_that_was_prepared_apart(mesh: xd.DeviceMesh, order: str) -> None:
    from xla_dtensor.integrations.accelerate import XDAccelerator

    plain = plain_loop()
    batches = [next(iter(plain.loader))] * 3
    accelerator = XDAccelerator(mesh=mesh)
    ours = Loop.__new__(Loop)
    ours.accelerator, ours.model = accelerator, llama()
    ours.optimizer = torch.optim.AdamW(ours.model.parameters(), lr=1e-3)
    torch.optim.lr_scheduler.LinearLR(ours.optimizer, total_iters=4)
    for name in order.split(", "):
        setattr(ours, name, accelerator.prepare(getattr(ours, name)))
    for batch in batches:
        plain.body(batch)
        ours.body(accelerator.put_batch(batch))
    assert difference(ours.model, plain.model) < 1e-5


@pytest.mark.parametrize("kind", ["AdamW", "Adagrad", "SGD"])
def test_an_optimizer_that_has_stepped_follows_with_its_state(
    mesh: xd.DeviceMesh, kind: str
) -> None:
    from xla_dtensor.nn.model_plan import put_model

    def trained(put: Any) -> Any:
        model = llama()
        options = {"momentum": 0.9} if kind == "SGD" else {}
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=1e-3, **options)
        for call in range(3):
            if call == 2:
                put(model, optimizer)
            model(input_ids=torch.arange(8)[None]).logits.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model

    ours = trained(lambda model, optimizer: put_model(model, mesh, optimizers=[optimizer]))
    assert difference(ours, trained(lambda model, optimizer: None)) < 1e-5


def test_another_device_is_refused(mesh: xd.DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "meta")
    with pytest.raises(
        ArgumentTypeError, match=r"Accelerate has device='meta'.*mesh is its device"
    ):
        our_loop(mesh)


def test_rows_that_the_mesh_does_not_divide(mesh: xd.DeviceMesh) -> None:
    plain, ours = plain_loop(batch_size=9), our_loop(mesh, batch_size=9)  # 9, 9 and 6, over 4
    torch.testing.assert_close(ours.epochs(1), plain.epochs(1), rtol=0, atol=1e-5)
    assert difference(ours.model, plain.model) < 1e-5
