"""Programs of tests/drawn over several processes, each judged by each process."""

from __future__ import annotations

import math

import torch

from tests.drawn.judge import expected_of
from tests.drawn.ours import DEVICES, verdict_of
from tests.drawn.run import program_of

__all__ = ["judged"]


def judged(kind: str, first: int, count: int) -> list[tuple[str, str, str]]:
    """Judge programs, or trainings, on meshes of all devices.

    Args:
        kind: "program" or "training".
        first: The first seed; seeds whose mesh leaves out devices are passed over.
        count: How many.

    Returns:
        For each its name, the verdict, and what is noted of it.
    """
    torch.set_num_threads(1)
    rows: list[tuple[str, str, str]] = []
    seed = first
    while len(rows) < count:
        job, seed = f"{kind}/{seed}", seed + 1
        program = program_of(job)
        if math.prod(program.mesh.shape) == DEVICES:
            verdict = verdict_of(program, expected_of(program))
            rows.append((job, verdict.kind, verdict.note))
    return rows
