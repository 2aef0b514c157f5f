"""What processes of a job do in tests of torchtitan; called by name, see ``tests/hosts.py``."""

# torchtitan is installed for the newest torch only.
# pyright: reportMissingImports=false

from __future__ import annotations

import contextlib
import gc
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import xla_dtensor as xd
from tests.xla_dtensor.integrations.titan import Plain, Seen, config, whole

__all__ = ["plain_steps", "train_by_torchtitan"]

Values = dict[str, torch.Tensor]


@contextlib.contextmanager
def _put_back(folder: str) -> Iterator[None]:
    """Put back what torchtitan and the trainer change in the process."""
    as_torch_made_it = FakeTensorMode.__init__
    utils: Any = importlib.import_module("torchtitan.distributed.utils")
    FakeTensorMode.__init__ = as_torch_made_it
    datasets: Any = importlib.import_module("datasets")
    cache, backend = datasets.config.HF_DATASETS_CACHE, utils.get_spmd_backend()
    datasets.config.HF_DATASETS_CACHE = Path(folder, "cache")
    try:
        yield
    finally:
        datasets.config.HF_DATASETS_CACHE = cache
        utils.set_spmd_backend(backend)
        xd.uninstall()
        gc.enable()


def train_by_torchtitan(folder: str, **options: Any) -> dict[str, Any]:
    """Train by XDTrainer, from the last checkpoint if there is one."""
    from xla_dtensor.integrations.torchtitan import XDTrainer

    with _put_back(folder):
        trainer = XDTrainer(config(Path(folder), Path(folder, "out"), **options))
        seen, before = Seen(trainer), whole(trainer.model_parts[0].state_dict())
        trainer.train()
        trainer.close()
        return {
            "before": before,
            "after": whole(trainer.model_parts[0].state_dict()),
            "ranks": list(trainer.parallel_dims.ranks),
            "losses": seen.column("loss_metrics/global_avg_loss"),
            "norms": seen.column("grad_norm"),
            "tokens": seen.column("n_tokens_seen"),
            "traces": [program.stats()["traces"] for program in trainer.programs],
        }


def plain_steps(folder: str, before: Values, steps: int) -> dict[str, Any]:
    """Make the same steps by plain PyTorch."""
    with _put_back(folder):
        options: dict[str, Any] = {"training__steps": steps}
        plain = Plain(config(Path(folder), Path(folder, "out"), **options), before)
        losses, norms = zip(*[plain.step() for _ in range(steps)], strict=True)
        after = whole(plain.model.state_dict())
    return {"losses": [*losses], "norms": [*norms], "after": after}
