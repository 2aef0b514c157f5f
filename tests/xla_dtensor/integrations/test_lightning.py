"""XDStrategy beside plain Lightning, and XDFabricStrategy beside plain Fabric.

What Lightning's own code warns of is named here; nothing of it comes from this library.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import xla_dtensor as xd
from tests.documents import ROOT, blocks, run_session
from xla_dtensor.errors import ArgumentTypeError, CompileError
from xla_dtensor.runtimes import Runtime

pytestmark = [
    pytest.mark.usefixtures("runtime"),
    pytest.mark.only_on("jax"),
    pytest.mark.filterwarnings("ignore:`isinstance\\(treespec, LeafSpec\\)` is deprecated"),
    pytest.mark.filterwarnings("ignore:The '\\w+' does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:.*`dataloader_iter`"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]


@pytest.fixture
def mesh(runtime: Runtime) -> xd.DeviceMesh:
    return xd.init_device_mesh("xla", (8,), mesh_dim_names=("fsdp",))


def modules() -> Any:
    """The modules and runs, imported when a test runs: they import Lightning."""
    from tests.xla_dtensor.integrations import lightning_modules

    return lightning_modules


def fit(mesh: Any, module: Any, **options: Any) -> Any:
    """A run on a mesh; on None, plain Lightning's."""
    from xla_dtensor.integrations.lightning import XDStrategy

    kind = options.pop("strategy", {})
    return modules().Run(None if mesh is None else XDStrategy(mesh, **kind), module, **options)


def pair(mesh: Any, kind: str, *args: Any, **options: Any) -> tuple[Any, Any]:
    """The same run on plain Lightning and on the mesh."""
    m = modules()
    kind_of = getattr(m, kind)
    plain = fit(None, m.made(kind_of, *args), **{**options, "strategy": {}})
    return plain, fit(mesh, m.made(kind_of, *args), **options)


def check_same(plain: Any, ours: Any, atol: float = 1e-5) -> None:
    """Parameters, what callbacks saw after each batch, metrics, counters and learning rates."""
    m = modules()
    torch.testing.assert_close(m.values(ours.module), m.values(plain.module), atol=atol, rtol=0)
    assert ours.trainer.global_step == plain.trainer.global_step
    assert [sorted(seen) for seen in ours.seen] == [sorted(seen) for seen in plain.seen]
    for left, right in zip(ours.seen, plain.seen, strict=True):
        assert left == pytest.approx(right, abs=atol)
    numbers = [{k: float(v) for k, v in r.trainer.callback_metrics.items()} for r in (ours, plain)]
    assert numbers[0] == pytest.approx(numbers[1], abs=atol)
    rates = [r.trainer.optimizers[0].param_groups[0]["lr"] for r in (ours, plain)]
    assert rates[0] == rates[1]


# -------------------------------------------------------------------------------------- The Trainer


@pytest.mark.parametrize(("devices", "accumulated"), [(8, 1), (8, 2), (1, 1)])
def test_a_fit_is_plain_lightnings(runtime: Runtime, devices: int, accumulated: int) -> None:
    """Metrics of torchmetrics, last batches of 12 and 8 rows, clipping and a schedule included."""
    mesh = xd.init_device_mesh("xla", (devices,), mesh_dim_names=("fsdp",))
    options = {"accumulate_grad_batches": accumulated, "epochs": 3}
    plain, ours = pair(mesh, "Net", 0.0, 32, devices > 1, **options)
    check_same(plain, ours)
    if accumulated == 1:
        assert ours.traces == [("training_step", 9, 2), ("validation_step", 6, 2)]
    else:  # an accumulated batch, its update, and a last batch that does both
        whole = [("training_step", 3, 1)] * 3
        assert ours.traces == [*whole, ("validation_step", 6, 2)]
    layout = ours.module.net[0].weight.mesh_layout.text()
    assert layout == ("[fsdp, -]" if devices > 1 else "[-, -]")


def test_evaluation_gives_the_right_values(mesh: xd.DeviceMesh) -> None:
    """Means over all rows, and predictions of plain CPU tensors; the last batch is uneven."""
    m = modules()
    plain, ours = pair(mesh, "Net", epochs=1)
    loader = m.rows(27, 2)
    for name in ("test", "validate"):
        found = [
            getattr(run.trainer, name)(run.module, loader, verbose=False)[0]
            for run in (plain, ours)
        ]
        assert found[1] == pytest.approx(found[0], abs=1e-5)
    predictions = [run.trainer.predict(run.module, loader) for run in (plain, ours)]
    assert [type(each["logits"]) for each in predictions[1]] == [torch.Tensor] * 2
    torch.testing.assert_close(predictions[1], predictions[0], atol=1e-5, rtol=0)


def test_a_resumed_fit_is_exact(mesh: xd.DeviceMesh, tmp_path: Path) -> None:
    """With dropout, whose random state is saved; and on another mesh to the last digits."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    m = modules()
    torch.manual_seed(0)
    xd.manual_seed(0, mesh)
    whole = fit(mesh, m.Net(0.3), epochs=4)
    torch.manual_seed(0)
    xd.manual_seed(0, mesh)
    saving = ModelCheckpoint(tmp_path, save_last=True)
    stopped = fit(mesh, m.Net(0.3), callbacks=[saving], enable_checkpointing=True)
    last = tmp_path / "last.ckpt"
    assert len(list(tmp_path.glob("epoch=*.ckpt"))) == 1
    resumed = fit(mesh, m.Net(0.3), epochs=4, checkpoint=last)
    torch.testing.assert_close(m.values(resumed.module), m.values(whole.module), atol=0, rtol=0)
    outputs = [[seen["output"] for seen in run.seen] for run in (resumed, whole)]
    assert outputs[0] == outputs[1][6:]
    other = xd.init_device_mesh("xla", (4, 2), mesh_dim_names=("fsdp", "dp"))
    moved = fit(other, m.Net(0.3), epochs=4, checkpoint=last)
    torch.testing.assert_close(m.values(moved.module), m.values(whole.module), atol=1e-6, rtol=0)
    check_plain_checkpoint(last, stopped, tmp_path / "plain.ckpt", mesh)


def check_plain_checkpoint(folder: Path, stopped: Any, file: Path, mesh: Any) -> None:
    """Lightning's own load_from_checkpoint takes what read_checkpoint gives, and so does a fit."""
    from xla_dtensor.integrations.lightning import read_checkpoint

    m = modules()
    torch.save(read_checkpoint(folder), file)
    loaded = m.Net.load_from_checkpoint(file, weights_only=False)
    assert loaded.hparams["dropout"] == 0.3
    torch.testing.assert_close(m.values(loaded), m.values(stopped.module), atol=0, rtol=0)
    plain = m.Run(None, m.Net(), epochs=3, checkpoint=file)
    ours = fit(mesh, m.Net(), epochs=3, checkpoint=file)
    torch.testing.assert_close(m.values(ours.module), m.values(plain.module), atol=1e-5, rtol=0)


def test_callbacks_read_what_a_step_logs(mesh: xd.DeviceMesh) -> None:
    from lightning.pytorch.callbacks import EarlyStopping

    stops = [EarlyStopping("val_loss", patience=1) for _ in range(2)]
    m = modules()
    plain = fit(None, m.made(m.Net), epochs=8, callbacks=[stops[0]])
    ours = fit(mesh, m.made(m.Net), epochs=8, callbacks=[stops[1]])
    check_same(plain, ours)
    assert 0 < stops[1].stopped_epoch == stops[0].stopped_epoch
    assert float(stops[1].best_score) == pytest.approx(float(stops[0].best_score), abs=1e-5)


def test_hooks_up_to_the_update_are_part_of_the_program(mesh: xd.DeviceMesh) -> None:
    plain, ours = pair(mesh, "Hooks")
    check_same(plain, ours)
    assert "norm" in ours.seen[-1]
    assert "largest" in ours.seen[-1]
    assert ours.traces[0] == ("training_step", 6, 2)


def test_a_batchs_number_is_read_as_a_condition(mesh: xd.DeviceMesh) -> None:
    """One trace for even numbers, one for odd ones, and the smaller batch's, which is even."""
    plain, ours = pair(mesh, "Numbered")
    check_same(plain, ours)
    assert ours.traces[0] == ("training_step", 6, 3)


def test_a_counter_in_a_step_is_right_and_warned_of(
    mesh: xd.DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    m = modules()
    monkeypatch.setattr("xla_dtensor.integrations.lightning_steps.MANY_TRACES", 3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = fit(mesh, m.made(m.Counting, 0.0, 4), epochs=5, count=16)
    assert [seen["step"] for seen in run.seen] == list(map(float, range(5)))
    text = "Counting.training_step was traced 3 times in 3 calls"
    assert sum(text in str(each.message) for each in caught) == 1


def test_manual_optimization_runs_op_by_op(mesh: xd.DeviceMesh) -> None:
    plain, ours = pair(mesh, "Manual", epochs=1, gradient_clip_val=None)
    check_same(plain, ours)
    assert [name for name, *_ in ours.traces] == ["validation_step"]


def test_mixed_precision_multiplies_in_bfloat16(mesh: xd.DeviceMesh) -> None:
    plain, ours = pair(mesh, "Net", epochs=1, precision="bf16-mixed")
    losses = [[seen["output"] for seen in run.seen] for run in (ours, plain)]
    assert losses[0] == pytest.approx(losses[1], abs=5e-3)
    (program,) = (p for k, p in ours.strategy.steps.programs.items() if k[0] == "training_step")
    assert any("= bf16" in line and " dot(" in line for line in program.hlo().splitlines())


@pytest.mark.parametrize(
    ("kind", "options", "error", "text"),
    [
        ("Reading", {}, CompileError, "A tensor's value was"),
        ("Iterating", {}, ArgumentTypeError, "training_step takes dataloader_iter"),
        ("SearchingLines", {}, ArgumentTypeError, "is optimized by LBFGS"),
        ("Net", {"precision": "64-true"}, ArgumentTypeError, "precision='64-true'"),
    ],
)
def test_what_is_refused(
    mesh: xd.DeviceMesh, kind: str, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    m = modules()
    with pytest.raises(error, match=text) as raised:
        fit(mesh, m.made(getattr(m, kind)), epochs=1, count=16, **options)
    if kind == "Reading":
        assert raised.value.__notes__[-2:] == [
            "This is the program of Reading.validation_step.",
            "XDStrategy(..., compile_evaluation=False) runs it op by op.",
        ]
        free = {"strategy": {"compile_evaluation": False}, "epochs": 1, "count": 16}
        plain, ours = pair(mesh, kind, **free)
        check_same(plain, ours)


def test_a_plugin_for_checkpoints_is_refused(mesh: xd.DeviceMesh) -> None:
    from lightning.pytorch.plugins.io import AsyncCheckpointIO

    m = modules()
    with pytest.raises(ArgumentTypeError, match="The plugin AsyncCheckpointIO was given"):
        fit(mesh, m.made(m.Net), plugins=[AsyncCheckpointIO()])


def test_the_session_of_the_page() -> None:
    page = (ROOT / "docs" / "trainers" / "lightning.md").read_text(encoding="utf-8")
    run_session("".join(blocks(page, "pycon")), "jax")


# ------------------------------------------------------------------------------------------- Fabric


class Loop:
    """A loop of Fabric as its users write it, op by op or with a compiled body."""

    def __init__(
        self,
        fabric: Any,
        is_compiled: bool,
        epochs: Any = 2,
        batch_size: Any = 16,
        **clip: Any,
    ) -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8)
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.fabric, self.clip = fabric, clip or {"max_norm": 0.5}
        self.model, self.optimizer = fabric.setup(model, optimizer)
        self.step: Any = xd.compile(self.body) if is_compiled else self.body
        self.loader = fabric.setup_dataloaders(modules().rows(44, 0, batch_size))
        self.seen = self.run(epochs)

    def run(self, epochs: Any) -> list[list[float]]:
        """Make steps, and return what each has given."""
        return [[float(v) for v in self.step(b)] for _ in range(epochs) for b in self.loader]

    def body(self, batch: Any) -> list[torch.Tensor]:
        loss = cross_entropy(self.model(batch[0]), batch[1])
        self.fabric.backward(loss)
        norm = self.fabric.clip_gradients(self.model, self.optimizer, **self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return [loss.detach()] if norm is None else [loss.detach(), norm]


def fabric_on(mesh: Any, **options: Any) -> Any:
    from lightning.fabric import Fabric

    from xla_dtensor.integrations.lightning import XDFabricStrategy

    return Fabric(strategy=XDFabricStrategy(mesh), **options)


@pytest.mark.parametrize(
    ("is_compiled", "clip"), [(True, {"max_norm": 0.5}), (True, {"clip_val": 0.1}), (False, {})]
)
def test_a_loop_of_fabric_is_plain_fabrics(
    mesh: xd.DeviceMesh, is_compiled: bool, clip: dict[str, float]
) -> None:
    from lightning.fabric import Fabric

    plain = Loop(Fabric(accelerator="cpu"), False, **clip)
    ours = Loop(fabric_on(mesh), is_compiled, **clip)
    m = modules()
    torch.testing.assert_close(m.values(ours.model), m.values(plain.model), atol=1e-5, rtol=0)
    for left, right in zip(ours.seen, plain.seen, strict=True):
        assert left == pytest.approx(right, abs=1e-5)
    if is_compiled:  # one for each shape of a batch
        assert ours.step.stats()["traces"] == 2


def test_fabric_saves_and_loads(mesh: xd.DeviceMesh, tmp_path: Path) -> None:
    m, fabric = modules(), fabric_on(mesh)
    saved = Loop(fabric, is_compiled=True)
    state = {"model": saved.model, "optimizer": saved.optimizer, "step": 7, "more": torch.ones(3)}
    fabric.save(tmp_path / "a", state)
    loaded = Loop(fabric, is_compiled=False, epochs=0)
    into = {"model": loaded.model, "optimizer": loaded.optimizer, "step": 0}
    rest = fabric.load(tmp_path / "a", into)
    assert list(rest) == ["more"]
    assert torch.equal(rest["more"], torch.ones(3))
    assert into["step"] == 7
    torch.testing.assert_close(m.values(loaded.model), m.values(saved.model), atol=0, rtol=0)
    steps = [loop.optimizer.optimizer.state_dict()["state"][0]["step"] for loop in (saved, loaded)]
    assert float(steps[0]) == float(steps[1]) == 6
    with pytest.raises(KeyError, match="contains a key 'modul_'"):
        fabric.load(tmp_path / "a", {"modul_": loaded.model})
    with pytest.raises(ArgumentTypeError, match="load_raw was called with the folder"):
        fabric.load_raw(tmp_path / "a", loaded.model)
    only_biases = {"model": lambda name, _: name.endswith("bias")}
    fabric.save(tmp_path / "b", {"model": saved.model}, filter=only_biases)
    assert sorted(fabric.load(tmp_path / "b")["model"]) == ["0.bias", "2.bias"]


def test_a_norm_that_is_not_finite(mesh: xd.DeviceMesh) -> None:
    """Refused as Fabric refuses it, op by op; a program reads nothing, and returns it."""
    fabric = fabric_on(mesh)
    model, optimizer = fabric.setup(
        layer := torch.nn.Linear(4, 4), torch.optim.SGD(layer.parameters(), lr=0.1)
    )

    def step(x: Any) -> Any:
        fabric.backward(model(x).sum() * float("nan"))
        norm = fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.zero_grad()
        return norm

    x = xd.distribute_tensor(torch.ones(8, 4), mesh)
    with pytest.raises(RuntimeError, match=r"The norm of order 2\.0 of the gradients is nan"):
        step(x)
    optimizer.zero_grad()
    assert xd.compile(step)(x).isnan().item()


def test_fabric_refuses_other_precisions(mesh: xd.DeviceMesh) -> None:
    with pytest.raises(ArgumentTypeError, match="precision='64-true'"):
        fabric_on(mesh, precision="64-true").setup(torch.nn.Linear(4, 4))
