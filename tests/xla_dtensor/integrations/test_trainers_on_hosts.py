"""Trainers in a job of two processes of four devices: data split, save and resume."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hosts import Hosts
from tests.xla_dtensor.integrations.test_accelerate import plain_loop
from tests.xla_dtensor.integrations.test_adapters import (
    adapted,
    rewarded,
    rollout,
    supervised,
)
from tests.xla_dtensor.integrations.test_adapters import logged as numbers_of
from tests.xla_dtensor.integrations.tiny import arguments, llama, losses, rows
from tests.xla_dtensor.integrations.titan import write_text

# What the clients' own code warns of.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*is deprecated and will be removed in v6:FutureWarning"
)

TASKS = "tests.xla_dtensor.host_tasks_trainers"
TITAN_TASKS = "tests.xla_dtensor.host_tasks_torchtitan"


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
    for rows_of_both in hosts(2, 4).run(f"{TASKS}:short_batch", shape=(4, 2)):
        assert torch.equal(rows_of_both, torch.arange(12.0).reshape(6, 2))


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


def test_adapters(hosts: Callable[..., Hosts], tmp_path: Path) -> None:
    """Two steps of peft's adapters and a checkpoint, and two more of a model that begins there."""
    import peft
    import transformers

    options = arguments(tmp_path, 8, max_steps=4, lr_scheduler_type="constant")
    data: Any = rows(32)
    plain = transformers.Trainer(adapted(), options, train_dataset=data)
    plain.train()
    task, folder = f"{TASKS}:train_adapters", str(tmp_path / "run")
    hosts(2, 4).run(task, folder=folder, steps=2, resume=None)
    resume = f"{folder}/checkpoint-2"
    answers = hosts(2, 4).run(task, folder=folder, steps=4, resume=resume)
    model: Any = plain.model
    for logged, values in answers:
        torch.testing.assert_close(logged, losses(plain), rtol=0, atol=1e-5)
        assert differs(values, dict(model.named_parameters())) < 1e-5
    loaded = peft.PeftModel.from_pretrained(llama(), f"{folder}/checkpoint-4")
    assert differs(dict(loaded.named_parameters()), answers[0][1]) == 0


def test_supervised_tuning(hosts: Callable[..., Hosts], tmp_path: Path) -> None:
    from trl.trainer.sft_trainer import SFTTrainer

    plain = supervised(SFTTrainer, tmp_path, 8)
    plain.train()
    for logged, values in hosts(2, 4).run(f"{TASKS}:train_by_trl", folder=str(tmp_path)):
        # TRL's own loss is summed up in another order.
        torch.testing.assert_close(logged, losses(plain), rtol=0, atol=1e-4)
        # Adam divides by gradients near 0: in one element plain float32 is 5e-6 from float64, too.
        assert differs(values, dict(plain.model.named_parameters())) < 3e-5


@pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")
@pytest.mark.parametrize("draws", [False, True], ids=["given", "drawn"])
def test_tuning_by_rewards(hosts: Callable[..., Hosts], tmp_path: Path, draws: bool) -> None:
    from trl.trainer.grpo_trainer import GRPOTrainer

    given: dict[str, Any] = {"top_k": 1} if draws else {"rollout_func": rollout}
    plain = rewarded(GRPOTrainer, tmp_path, 16, max_steps=2, num_iterations=2, **given)
    plain.train()
    task = f"{TASKS}:train_by_rewards"
    for numbers, _, values in hosts(2, 4).run(task, folder=str(tmp_path), draws=draws):
        expected = {name: numbers_of(plain, name) for name in numbers}
        torch.testing.assert_close(numbers, expected, rtol=1e-5, atol=1e-5)
        assert differs(values, dict(plain.model.named_parameters())) < 1e-6


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


def test_torchtitan(hosts: Callable[..., Hosts], tmp_path: Path) -> None:
    """Four steps with a checkpoint in the middle, from which a new trainer makes the last two."""
    folder = str(write_text(tmp_path))
    task, steps = f"{TITAN_TASKS}:train_by_torchtitan", 4
    options = {"training__steps": steps, "checkpoint__enable": True, "checkpoint__interval": 2}
    first = hosts(2, 4).run(task, folder=folder, **options)
    shutil.rmtree(tmp_path / "out" / "checkpoint" / f"step-{steps}")
    options["parallelism__spmd_backend"] = "partial_dtensor"
    later = hosts(2, 4).run(task, folder=folder, **options)
    before = first[0]["before"]
    plain = hosts(2, 4).run(f"{TITAN_TASKS}:plain_steps", folder=folder, before=before, steps=steps)
    for answers, begin in ((first, 0), (later, 2)):
        assert [answer["ranks"] for answer in answers] == [[0, 1], [2, 3]]
        for answer in answers:
            for name in ("losses", "norms"):
                wanted = plain[0][name][begin:]
                torch.testing.assert_close(answer[name], wanted, rtol=0, atol=1e-5)
            assert differs(answer["after"], plain[0]["after"]) < 1e-5
            assert answer["tokens"] == [256.0 * step for step in range(begin + 1, steps + 1)]
            assert answer["traces"] == [0, 1]


def test_generation(hosts: Callable[..., Hosts]) -> None:
    """Greedy and drawn: both processes have all prompts, and get the plain model's tokens."""
    ids = torch.randint(3, 64, (4, 7), generator=torch.Generator().manual_seed(3))
    ways: list[dict[str, Any]] = [{}, {"do_sample": True, "top_p": 0.9}]
    ways = [{"max_new_tokens": 32, **way} for way in ways]
    answers = hosts(2, 4).run(f"{TASKS}:generate", ids=ids, ways=ways)
    for answer in answers:
        for (plain, ours), (first, _) in zip(answer["tokens"], answers[0]["tokens"], strict=True):
            assert ours.shape == (4, 39)
            assert torch.equal(ours, plain)
            assert torch.equal(ours, first)
            assert len(ours.unique()) >= 20
        assert answer["error"] < 1e-5
        assert answer["traces"] == 2
        assert answer["cache"] == "[fsdp, tp, -, -]"
