"""One way of running the benchmarked step, and what is recorded of it before it is timed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.step_sizes import AnySizes
from benchmarks.step_torch import made, training_step

__all__ = ["LOSSES", "Built", "Way", "collectives_of", "expected_losses", "recorded"]

LOSSES = 10
_SETTLING = 3  # By then every way has traced and compiled all that it ever does.


@dataclass(frozen=True)
class Built:
    """What building a step took, in seconds."""

    trace: float
    compile: float


@dataclass(frozen=True)
class Way:
    """One way of running the step.

    Args:
        name: As in ``benchmarks.step_plan``.
        train: Trains one step and returns its loss, unread.
        wait: Waits until the step of a loss is done.
        read: Reads a loss.
        compiling: Seconds that the compiler has spent in this process so far.
        facts: What is known of the program, asked for after its last trace.
        built: What it took to build the step, where it was built before its first call.
    """

    name: str
    train: Callable[[], Any]
    wait: Callable[[Any], object]
    read: Callable[[Any], float]
    compiling: Callable[[], float]
    facts: Callable[[], Mapping[str, Any]]
    built: Built | None = None

    def timed(self) -> float:
        """Trains one step; returns its seconds."""
        start = time.perf_counter()
        self.wait(self.train())
        return time.perf_counter() - start


def expected_losses(
    sizes: AnySizes, dtype: torch.dtype = torch.float32, steps: int = LOSSES
) -> list[float]:
    """Returns the first losses of plain PyTorch on this machine's processor."""
    model, (inputs, targets) = made(sizes)
    step = training_step(model.to(dtype))
    inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs
    return [step(inputs, targets).item() for _ in range(steps)]


def recorded(way: Way, expected: Sequence[float]) -> dict[str, Any]:
    """Trains a way's first steps and describes them.

    Args:
        way: Fresh: none of its steps has run.
        expected: The losses that it should have, at least four.

    Returns:
        A row: what building it took, its losses, how far they are off, its program's facts.
    """
    before = way.compiling()
    seconds: list[float] = []
    losses: list[float] = []
    for _ in expected:
        start = time.perf_counter()
        loss = way.train()
        way.wait(loss)
        seconds.append(time.perf_counter() - start)
        losses.append(way.read(loss))
    compiled = way.compiling() - before
    steady = statistics.median(seconds[_SETTLING:])
    # The first run takes longer than those after it, also of a program that was compiled before.
    before_steady = sum(seconds[:_SETTLING]) - _SETTLING * steady
    known = way.built or Built(-compiled, compiled)
    built = Built(known.trace + before_steady, known.compile)
    return {
        "way": way.name,
        "builds": [[built.trace, built.compile]],
        "losses": losses,
        "loss_difference": max(abs(a - b) for a, b in zip(losses, expected, strict=True)),
        **way.facts(),
    }


def collectives_of(text: str, mesh: Any) -> list[dict[str, Any]]:
    """Returns a program's collectives, summed by kind and axes.

    Args:
        text: HLO.
        mesh: A ``mesh_utils.Mesh`` in the order of the program's partitions.
    """
    from xla_dtensor.report import collectives, summarize

    return [
        {
            "kind": row.kind,
            "axes": None if row.axes is None else [str(axis) for axis in row.axes],
            "count": row.count,
            "bytes": row.bytes_per_device,
        }
        for row in summarize(collectives(text, mesh))
    ]
