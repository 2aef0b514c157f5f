"""What processes of a job do in tests of trainers; called by name, see ``tests/hosts.py``."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import xla_dtensor as xd
from tests.xla_dtensor.integrations.tiny import arguments, llama, losses, rows

__all__ = [
    "generate",
    "short_batch",
    "torch_group",
    "train_adapters",
    "train_by_accelerate",
    "train_by_rewards",
    "train_by_transformers",
    "train_by_trl",
    "train_until_told",
]

Values = dict[str, torch.Tensor]


def torch_group() -> dict[str, Any]:
    """What torch.distributed says of the job, and what its group carries."""
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, dist.get_rank())
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return {
        "rank": dist.get_rank(),
        "said": said,
        "backend": dist.get_backend(),
        "environment": [os.environ[name] for name in names],
    }


def short_batch(shape: tuple[int, ...]) -> torch.Tensor:
    """What becomes of 3 rows in each process with devices for 2."""
    from xla_dtensor.hosts.data.rows import put_batch

    mesh = xd.init_device_mesh("xla", shape, mesh_dim_names=("fsdp", "tp"))
    part = torch.arange(6.0).reshape(3, 2) + 6 * dist.get_rank()
    return put_batch({"x": part}, mesh)["x"].cpu()


def train_by_transformers(
    folder: str, shape: tuple[int, ...], names: tuple[str, ...], resume: str | None, steps: int
) -> tuple[list[float], Values, int]:
    """Train by XDTrainer; return what it logged, the parameters, and how many rows are its own."""
    from xla_dtensor.integrations.transformers import XDTrainer

    mesh = xd.init_device_mesh("xla", shape, mesh_dim_names=names)
    args = arguments(
        Path(folder),
        1,
        max_steps=steps,
        lr_scheduler_type="constant",
        save_strategy="steps",
        save_steps=2,
        eval_strategy="steps",
        eval_steps=2,
    )
    args.output_dir = folder
    args.per_device_train_batch_size = args.per_device_eval_batch_size = 8 // mesh["fsdp"].size()
    trainer = XDTrainer(llama(), args, train_dataset=rows(40), eval_dataset=rows(24), mesh=mesh)
    trainer.train(resume_from_checkpoint=resume)
    batch = next(iter(trainer.get_train_dataloader()))
    return losses(trainer), _values(trainer.model), len(batch["input_ids"])


def train_adapters(folder: str, steps: int, resume: str | None) -> tuple[list[float], Values]:
    """Train peft's adapters by XDTrainer."""
    from tests.xla_dtensor.integrations.test_adapters import adapted
    from xla_dtensor.integrations.transformers import XDTrainer

    mesh = xd.init_device_mesh("xla", (4, 2), mesh_dim_names=("fsdp", "tp"))
    args = arguments(
        Path(folder),
        2,
        max_steps=steps,
        lr_scheduler_type="constant",
        save_strategy="steps",
        save_steps=2,
    )
    args.output_dir = folder
    trainer = XDTrainer(adapted(), args, train_dataset=rows(32), mesh=mesh)
    trainer.train(resume_from_checkpoint=resume)
    return losses(trainer), _values(trainer.model)


def train_by_trl(folder: str) -> tuple[list[float], Values]:
    """Train by XDSFTTrainer."""
    from tests.xla_dtensor.integrations.test_adapters import supervised
    from xla_dtensor.integrations.trl import XDSFTTrainer

    mesh = xd.init_device_mesh("xla", (4, 2), mesh_dim_names=("fsdp", "tp"))
    trainer = supervised(XDSFTTrainer, folder, 2, mesh=mesh)
    trainer.train()
    return losses(trainer), _values(trainer.model)


def train_by_rewards(
    folder: str, draws: bool
) -> tuple[dict[str, list[float]], list[float], Values]:
    """Train by XDGRPOTrainer, on completions that it draws or on others."""
    from tests.xla_dtensor.integrations.test_adapters import (
        NUMBERS_OF_REWARDS,
        logged,
        rewarded,
        rollout,
    )
    from xla_dtensor.integrations.trl import XDGRPOTrainer

    mesh = xd.init_device_mesh("xla", (4, 2), mesh_dim_names=("fsdp", "tp"))
    given: dict[str, Any] = {"top_k": 1} if draws else {"rollout_func": rollout}
    trainer = rewarded(XDGRPOTrainer, folder, 4, max_steps=2, num_iterations=2, mesh=mesh, **given)
    trainer.train()
    numbers = {name: logged(trainer, name) for name in NUMBERS_OF_REWARDS}
    return numbers, losses(trainer), _values(trainer.model)


def train_until_told(
    folder: str, shape: tuple[int, ...], steps: int, told: int | None
) -> tuple[list[float], Values, int]:
    """Train by XDTrainer, on from what is saved; the first process gets SIGTERM after a step.

    Args:
        folder: Of the run.
        shape: Of the mesh.
        steps: How many in all.
        told: The step; None: nobody is told, and the run goes on from what is saved.

    Returns:
        What it logged, the parameters, and after how many steps it returned.
    """
    import transformers

    from xla_dtensor.integrations.transformers import XDTrainer

    class Sender(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == told and trainer.is_world_process_zero():
                os.kill(os.getpid(), signal.SIGTERM)

    mesh = xd.init_device_mesh("xla", shape, mesh_dim_names=("fsdp", "tp"))
    options = {"max_steps": steps, "enable_jit_checkpoint": True}
    args = arguments(Path(folder), 8 // shape[0], **options)
    args.output_dir = folder
    trainer = XDTrainer(llama(), args, train_dataset=rows(40), mesh=mesh, callbacks=[Sender()])
    trainer.train(resume_from_checkpoint=told is None)
    return losses(trainer), _values(trainer.model), trainer.state.global_step


def train_by_accelerate(folder: str, load: bool) -> tuple[list[float], Values]:
    """Train two epochs by XDAccelerator, and save after the first; or load that, and go on."""
    from tests.xla_dtensor.integrations.test_accelerate import our_loop

    shape, names = ((8,), ("fsdp",)) if load else ((4, 2), ("fsdp", "tp"))
    mesh = xd.init_device_mesh("xla", shape, mesh_dim_names=names)
    loop = our_loop(mesh, batch_size=4, step_scheduler_with_optimizer=False)
    if load:
        loop.accelerator.load_state(folder)
    else:
        loop.epochs(1)
        loop.accelerator.save_state(folder)
    return loop.epochs(1), _values(loop.model)


def generate(ids: torch.Tensor, ways: list[dict[str, Any]]) -> dict[str, Any]:
    """Generate on a mesh (fsdp, tp) in some ways, each process with all prompts."""
    from tests.xla_dtensor.integrations.test_generation import Pair

    mesh = xd.init_device_mesh("xla", (4, 2), mesh_dim_names=("fsdp", "tp"))
    pair = Pair(llama(max_position_embeddings=128), mesh)
    found = [pair.generate(ids, **way) for way in ways]
    pairs = [pair for plain, ours in found for pair in zip(plain.logits, ours.logits, strict=True)]
    return {
        "tokens": [[plain.sequences, ours.sequences] for plain, ours in found],
        "error": max((a - b).abs().max() / a.abs().max() for a, b in pairs),
        "traces": pair.traces,
        "cache": found[0][1].cache.layers[0].keys.mesh_layout.text(),
    }


def _values(model: torch.nn.Module) -> Values:
    return {
        name: tensor.detach().full_tensor().cpu()  # pyright: ignore[reportAttributeAccessIssue]
        for name, tensor in model.named_parameters()
    }
