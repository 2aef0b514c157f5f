"""XDTrainer beside Transformers' own Trainer: one changed line, the same losses and parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import xla_dtensor as xd
from tests.xla_dtensor.integrations.tiny import arguments, difference, llama, losses, rows
from xla_dtensor.errors import ArgumentTypeError, RulesError
from xla_dtensor.runtimes import Runtime

pytestmark = [
    pytest.mark.usefixtures("runtime"),
    pytest.mark.only_on("jax"),
    pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning"),
]


@pytest.fixture
def mesh(runtime: Runtime) -> xd.DeviceMesh:
    return xd.init_device_mesh("xla", (2, 2, 2), mesh_dim_names=("dp", "fsdp", "tp"))


def trainers(folder: Path, mesh: Any, options: dict[str, Any], **given: Any) -> tuple[Any, Any]:
    """The plain trainer and ours, with the same rows per step."""
    import transformers

    from xla_dtensor.hosts.data.rows import row_group
    from xla_dtensor.integrations.transformers import XDTrainer

    devices = row_group(mesh).devices
    given = {"train_dataset": rows(44), **given}
    plain = transformers.Trainer(llama(), arguments(folder, 8, **options), **given)
    ours = XDTrainer(llama(), arguments(folder, 8 // devices, **options), mesh=mesh, **given)
    return plain, ours


def accuracy(predicted: Any) -> dict[str, float]:
    found = predicted.predictions.argmax(-1)[:, :-1] == predicted.label_ids[:, 1:]
    return {"accuracy": float(found.mean())}


@pytest.mark.parametrize("devices", [1, 8])
def test_losses_and_parameters_are_the_plain_trainers(
    tmp_path: Path, mesh: xd.DeviceMesh, devices: int
) -> None:
    if devices == 1:
        mesh = xd.init_device_mesh("xla", (1,), mesh_dim_names=("fsdp",))
    options = {
        "num_train_epochs": 2,
        "gradient_accumulation_steps": 2,
        "eval_strategy": "epoch",
        "lr_scheduler_type": "cosine",
    }
    given = {"eval_dataset": rows(22), "compute_metrics": accuracy}
    plain, ours = trainers(tmp_path, mesh, options, **given)
    outputs = plain.train(), ours.train()
    # 44 rows are five batches of 8 and one of 4, which is the second of an accumulation.
    assert len(losses(ours)) == 6 * 2 + 2
    torch.testing.assert_close(losses(ours), losses(plain), rtol=0, atol=1e-5)
    assert outputs[1].training_loss == pytest.approx(outputs[0].training_loss, abs=1e-5)
    assert difference(ours.model, plain.model) < 1e-5
    found = [
        [log["eval_accuracy"] for log in trainer.state.log_history if "eval_accuracy" in log]
        for trainer in (plain, ours)
    ]
    assert found[0] == found[1]
    weight = ours.model.model.layers[0].mlp.up_proj.weight
    assert weight.mesh_layout.text() == ("[-, -]" if devices == 1 else "[tp, fsdp]")
    assert [step.stats()["traces"] for step in ours.programs] == [1, 2, 2]


@pytest.mark.parametrize("kind", ["AdamW", "Adagrad"])
def test_an_optimizer_of_the_users(tmp_path: Path, mesh: xd.DeviceMesh, kind: str) -> None:
    """It is made before the model is put on the mesh; and training goes on in a second call."""
    import transformers

    from xla_dtensor.integrations.transformers import XDTrainer

    ended: list[Any] = []
    kinds: Any = ((transformers.Trainer, {}), (XDTrainer, {"mesh": mesh}))
    for cls, given in kinds:
        model = llama()
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=1e-3)
        folder = arguments(tmp_path, 8 if cls is transformers.Trainer else 2, max_steps=2)
        given = {"train_dataset": rows(44), "optimizers": (optimizer, None), **given}
        trainer: Any = cls(model, folder, **given)
        for _ in range(2):
            trainer.train()
        ended.append(trainer.model)
    assert difference(*ended[::-1]) < 1e-5
    assert difference(ended[1], llama()) > 1e-3


def test_rows_that_the_mesh_does_not_divide(tmp_path: Path, mesh: xd.DeviceMesh) -> None:
    options = {"num_train_epochs": 2, "eval_strategy": "epoch"}
    # The last batch has 5 rows, and 3 of an evaluation, over 4 devices.
    given = {
        "train_dataset": rows(21),
        "eval_dataset": rows(11),
        "compute_metrics": accuracy,
    }
    plain, ours = trainers(tmp_path, mesh, options, **given)
    plain.train()
    ours.train()
    assert len(losses(ours)) == 2 * (3 * 2 + 1)
    torch.testing.assert_close(losses(ours), losses(plain), rtol=0, atol=1e-5)
    assert difference(ours.model, plain.model) < 1e-5
    found = [
        [log["eval_accuracy"] for log in trainer.state.log_history if "eval_accuracy" in log]
        for trainer in (plain, ours)
    ]
    assert found[0] == found[1]


def test_a_run_goes_on_where_it_was_on_another_mesh(tmp_path: Path, mesh: xd.DeviceMesh) -> None:
    import transformers

    from xla_dtensor.integrations.transformers import XDTrainer

    def trainer(folder: Path, mesh: Any, batch_size: int, **changed: Any) -> Any:
        options = arguments(tmp_path, batch_size, max_steps=4, **changed)
        options.output_dir = str(folder)
        return XDTrainer(llama(), options, train_dataset=rows(32), mesh=mesh)

    whole = trainer(tmp_path / "whole", mesh, 2)
    whole.train()
    trainer(tmp_path / "run", mesh, 2, save_strategy="steps", save_steps=2).train()
    other = xd.init_device_mesh("xla", (8,), mesh_dim_names=("fsdp",))
    later = trainer(tmp_path / "run", other, 1)
    later.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert later.state.global_step == 4
    assert difference(later.model, whole.model) < 1e-6
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-4")
    assert difference(loaded, whole.model) == 0


REFUSED = [
    ({"torch_compile": True}, "torch_compile=True.*compiled by XLA as a whole. Leave it out"),
    ({"fp16": True, "use_cpu": True}, "fp16=True.*no loss scaling here, use bf16=True"),
    ({"auto_find_batch_size": True}, "auto_find_batch_size=True.*xla_dtensor preflight"),
    ({"optim": "adafactor"}, "optim=.*Pass optim=.adamw_torch., or one of torch.optim"),
]


def test_generation_in_an_evaluation_is_refused(tmp_path: Path, mesh: xd.DeviceMesh) -> None:
    import transformers

    from xla_dtensor.integrations.transformers import XDTrainer

    args = transformers.Seq2SeqTrainingArguments(str(tmp_path), predict_with_generate=True)
    with pytest.raises(ArgumentTypeError, match=r"generate=True.* call generate\(\) after it"):
        XDTrainer(llama(), args, mesh=mesh)


@pytest.mark.parametrize(("options", "words"), REFUSED)
def test_refused_by_name(
    tmp_path: Path, mesh: xd.DeviceMesh, options: dict[str, Any], words: str
) -> None:
    from xla_dtensor.integrations.transformers import XDTrainer

    with pytest.raises(ArgumentTypeError, match=words):
        XDTrainer(llama(), arguments(tmp_path, 1, **options), mesh=mesh)


def test_a_model_without_a_plan_is_not_silently_copied(tmp_path: Path, mesh: xd.DeviceMesh) -> None:
    from xla_dtensor.integrations.transformers import XDTrainer

    with pytest.raises(RulesError, match=r"has no tp_plan, so nothing would be cut.*Pass rules as"):
        XDTrainer(torch.nn.Linear(2, 2), arguments(tmp_path, 1), mesh=mesh)


def test_bfloat16_products_and_float32_parameters(tmp_path: Path, mesh: xd.DeviceMesh) -> None:
    options = {"max_steps": 3, "bf16": True, "use_cpu": True, "gradient_checkpointing": True}
    plain, ours = trainers(tmp_path, mesh, options)
    plain.train()
    ours.train()
    torch.testing.assert_close(losses(ours), losses(plain), rtol=0.05, atol=0.02)
    assert all(parameter.dtype is torch.float32 for parameter in ours.model.parameters())
    _, update, _ = ours.programs
    asked = update.explain()
    assert asked.startswith("XDTrainer")
    assert update.hlo().count("bf16[") > 40


def test_a_callback_sees_the_gradients_of_each_update(tmp_path: Path, mesh: xd.DeviceMesh) -> None:
    import transformers

    class Norms(transformers.TrainerCallback):
        def __init__(self) -> None:
            self.found: list[float] = []

        def on_pre_optimizer_step(self, *_: Any, **given: Any) -> None:
            weight = given["model"].model.layers[0].mlp.up_proj.weight
            self.found.append(float(weight.grad.norm()))

    watchers = Norms(), Norms()
    plain, ours = trainers(tmp_path, mesh, {"max_steps": 3})
    for trainer, watcher in zip((plain, ours), watchers, strict=True):
        trainer.add_callback(watcher)
        trainer.train()
    assert len(watchers[1].found) == 3
    torch.testing.assert_close(watchers[1].found, watchers[0].found, rtol=1e-4, atol=1e-6)
    assert difference(ours.model, plain.model) < 1e-5
