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
    "short_batch",
    "torch_group",
    "train_by_accelerate",
    "train_by_transformers",
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


def short_batch(shape: tuple[int, ...]) -> str:
    """What is said of 3 rows of a process with devices for 2."""
    from xla_dtensor.errors import DataError
    from xla_dtensor.hosts.data.rows import put_batch

    mesh = xd.init_device_mesh("xla", shape, mesh_dim_names=("fsdp", "tp"))
    try:
        put_batch({"x": torch.ones(3, 2)}, mesh)
    except DataError as error:
        return str(error)
    return ""


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


def _values(model: torch.nn.Module) -> Values:
    return {
        name: tensor.detach().full_tensor().cpu()  # pyright: ignore[reportAttributeAccessIssue]
        for name, tensor in model.named_parameters()
    }
