"""What processes of a job do in tests of orbax; called by name, see ``tests/hosts.py``."""

from __future__ import annotations

import orbax.checkpoint as ocp
import torch

from tests.xla_dtensor.host_tasks_checkpoint import differing, drawn_state
from xla_dtensor.checkpoint import orbax

__all__ = ["restore_drawn", "save_drawn"]


def save_drawn(folder: str, cases: int, step: int) -> None:
    """Save the tensors of all cases in the background, each on its drawn mesh."""
    state = {**drawn_state(cases, f"source {step}"), "plain": torch.arange(3), "step": step}
    with ocp.CheckpointManager(folder) as manager:
        manager.save(step, args=orbax.DTensorSave(state))
        manager.wait_until_finished()


def restore_drawn(folder: str, cases: int, where: str, step: int) -> list[int]:
    """Restore all cases, each on another drawn mesh; return the numbers of those that differ."""
    others = {"plain": torch.zeros(3).long(), "step": 0}
    with ocp.CheckpointManager(folder) as manager:

        def restore(state: dict[str, torch.Tensor]) -> None:
            whole = {**state, **others}
            manager.restore(step, args=orbax.DTensorRestore(whole))
            assert (whole["plain"].tolist(), whole["step"]) == ([0, 1, 2], step)

        return differing(cases, where, restore)
