"""What processes of a job do in tests of Lightning; called by name, see ``tests/hosts.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import xla_dtensor as xd

__all__ = ["fit_by_lightning", "train_by_fabric"]


def fit_by_lightning(folder: str, shape: tuple[int, ...], epochs: int) -> dict[str, Any]:
    """Fit with XDStrategy, from the last checkpoint in the folder if it has one.

    The loaders have all rows, as a script's do; a batch is 8 rows of this process.
    """
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger
    from lightning_utilities.core.rank_zero import rank_zero_only

    from tests.xla_dtensor.integrations import lightning_modules as m
    from xla_dtensor.integrations.lightning import XDStrategy

    mesh = xd.init_device_mesh("xla", shape, mesh_dim_names=("fsdp", "dp")[: len(shape)])
    last = Path(folder, "last.ckpt")
    saving = ModelCheckpoint(folder, monitor="step", mode="max", save_last="link")
    rank_zero_only.rank = 0  # as where Lightning is imported before the processes meet
    run: Any = m.Run(
        XDStrategy(mesh),
        m.made(m.Net, 0.0, 32, True),
        epochs=epochs,
        batch_size=8,
        checkpoint=last if last.exists() else None,
        callbacks=[saving],
        enable_checkpointing=True,
        logger=CSVLogger(folder, "log", "", flush_logs_every_n_steps=1),
        log_every_n_steps=1,
        limit_val_batches=1,
    )
    predictions = run.trainer.predict(run.module, m.rows(25, 2, 32))
    return {
        "seen": run.seen,
        "predictions": predictions,
        "values": m.values(run.module),
        "rank": run.trainer.global_rank,
        "writes": (run.trainer.is_global_zero, rank_zero_only.rank == 0),
        "traces": run.traces,
        "layout": run.module.net[0].weight.mesh_layout.text(),
    }


def train_by_fabric(folder: str, load: bool) -> dict[str, Any]:
    """Train an epoch by XDFabricStrategy and save; or load that into a fresh model, and go on."""
    from tests.xla_dtensor.integrations import lightning_modules as m
    from tests.xla_dtensor.integrations.test_lightning import Loop, fabric_on

    fabric = fabric_on(xd.init_device_mesh("xla", (8,), mesh_dim_names=("fsdp",)))
    loop = Loop(fabric, is_compiled=True, epochs=0, batch_size=8)
    state = {"model": loop.model, "optimizer": loop.optimizer, "epoch": 0}
    if load:
        fabric.load(folder, state)
    seen = loop.run(1)
    if not load:
        fabric.save(folder, {**state, "epoch": 1})
    number = torch.tensor(10.0 + fabric.global_rank)
    return {
        "seen": seen,
        "values": m.values(loop.model),
        "epoch": state["epoch"],
        "rank": fabric.global_rank,
        "over processes": [
            fabric.all_gather(number).tolist(),
            fabric.all_reduce(number).item(),
            fabric.broadcast(fabric.global_rank, src=1),
        ],
    }
