"""Trainers in a job of two processes of four devices: data split, save and resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hosts import Hosts
from tests.xla_dtensor.integrations.test_accelerate import plain_loop
from tests.xla_dtensor.integrations.tiny import arguments, llama, losses, rows

TASKS = "tests.xla_dtensor.host_tasks_trainers"


def differs(values: dict[str, torch.Tensor], other: dict[str, Any]) -> float:
    return max((values[name] - other[name]).abs().max().item() for name in values)


def test_torch_distributed_knows_the_job(hosts: Callable[..., Hosts]) -> None:
    answers = hosts(2, 4).run(f"{TASKS}:torch_group")
    for index, answer in enumerate(answers):
        assert answer == {
            "rank": index,
            "said": [0, 1],
            "backend": "gloo",
            "environment": [str(index), "2", str(index), "2"],
        }


def test_a_short_batch_that_the_devices_do_not_divide(hosts: Callable[..., Hosts]) -> None:
    for said in hosts(2, 4).run(f"{TASKS}:short_batch", shape=(4, 2)):
        assert "and 3 does not divide by that" in said
        assert said.endswith("dataloader_drop_last=True of TrainingArguments.")


def test_transformers(hosts: Callable[..., Hosts], tmp_path: Path) -> None:
    import transformers

    options = arguments(
        tmp_path, 8, max_steps=6, eval_strategy="steps", eval_steps=2, lr_scheduler_type="constant"
    )
    data: Any = {"train_dataset": rows(40), "eval_dataset": rows(24)}
    plain: Any = transformers.Trainer(llama(), options, **data)
    plain.train()
    task, folder = f"{TASKS}:train_by_transformers", str(tmp_path / "run")
    where: dict[str, Any] = {"shape": (4, 2), "names": ("fsdp", "tp")}
    answers = hosts(2, 4).run(task, folder=folder, **where, resume=None, steps=4)
    for logged, _, count in answers:
        torch.testing.assert_close(logged, losses(plain)[: len(logged)], rtol=0, atol=2e-5)
        assert count == 4  # of the 8 rows of a step
    where = {"shape": (8,), "names": ("fsdp",)}
    resume = f"{folder}/checkpoint-4"
    answers = hosts(2, 4).run(task, folder=folder, **where, resume=resume, steps=6)
    wanted = dict(plain.model.named_parameters())
    for _, values, _ in answers:
        assert differs(values, wanted) < 1e-5
    loaded = transformers.LlamaForCausalLM.from_pretrained(f"{folder}/checkpoint-6")
    assert differs(answers[0][1], dict(loaded.named_parameters())) == 0


@pytest.mark.parametrize("processes", [1, 2])
def test_transformers_saves_and_ends_when_it_is_told_to(
    hosts: Callable[..., Hosts], tmp_path: Path, processes: int
) -> None:
    import transformers

    folder, steps, told = tmp_path / "run", 10, 3
    options = arguments(tmp_path, 8, max_steps=steps)
    data: Any = rows(40)
    plain: Any = transformers.Trainer(llama(), options, train_dataset=data)
    plain.train()
    task = f"{TASKS}:train_until_told"
    run = {"folder": str(folder), "shape": (4, 2), "steps": steps}
    group = Hosts(processes, 8 // processes)  # its own: JAX settles on a step once
    try:
        ended = {step for *_, step in group.run(task, **run, told=told)}
    finally:
        group.close()
    (step,) = ended  # all at the same one
    assert step == told if processes == 1 else told <= step < steps
    assert [path.name for path in folder.iterdir()] == [f"checkpoint-{step}"]
    for logged, values, last in hosts(processes, 8 // processes).run(task, **run, told=None):
        assert last == steps
        torch.testing.assert_close(logged, losses(plain), rtol=0, atol=2e-5)
        assert differs(values, dict(plain.model.named_parameters())) < 1e-5


def test_accelerate(hosts: Callable[..., Hosts], tmp_path: Path) -> None:
    # Else Accelerate steps the scheduler once per process.
    plain = plain_loop(step_scheduler_with_optimizer=False)
    plain.epochs(1)
    wanted, task = plain.epochs(1), f"{TASKS}:train_by_accelerate"
    first = hosts(2, 4).run(task, folder=str(tmp_path), load=False)
    later = hosts(2, 4).run(task, folder=str(tmp_path), load=True)
    for logged, values in (*first, *later):
        torch.testing.assert_close(logged, wanted, rtol=0, atol=2e-5)
        assert differs(values, dict(plain.model.named_parameters())) < 1e-5
