"""Timing for the benchmarks: interleaved rounds, least and median, results stored as JSON.

What is compared runs in turns within one process, so that a machine that slows down for a while
slows down all of it. Of the rounds the least and the median are kept: the least is what the code
costs, the median what a call costs on this machine with what else runs there. Two clocks are read:
wall time, and the CPU time of the calling thread, which other processes do not prolong.
"""

from __future__ import annotations

import gc
import importlib.metadata
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"

_PACKAGES = ("xla-dtensor", "torch", "torch_xla", "jax", "jaxlib", "numpy")
_MIN_MEASUREMENTS = 3
_NANOSECONDS_PER_MICROSECOND = 1e3


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Work:
    """One thing to time.

    Args:
        call: What is timed.
        before: Run before each measurement, untimed, e.g. to clear caches.
        after: Run after each measurement, untimed, e.g. to wait for a device.
        calls: How often `call` runs in one measurement.
        repeats: Measurements in one turn. With more than one, the least is that of a processor
            whose caches are not full of what ran in between.
    """

    call: Callable[[], object]
    before: Callable[[], object] = _nothing
    after: Callable[[], object] = _nothing
    calls: int = 1
    repeats: int = 1


@dataclass(frozen=True)
class Timing:
    """Microseconds per call: the least and the median of `measurements`."""

    wall_min: float
    wall_median: float
    cpu_min: float
    cpu_median: float
    measurements: int


@dataclass
class _Clocked:
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def has_enough(self, calls: int, budget_seconds: float) -> bool:
        spent_seconds = sum(self.wall) * calls / 1e6
        return len(self.wall) >= _MIN_MEASUREMENTS and spent_seconds > budget_seconds

    def timing(self) -> Timing:
        return Timing(
            min(self.wall),
            statistics.median(self.wall),
            min(self.cpu),
            statistics.median(self.cpu),
            len(self.wall),
        )


def interleaved(
    works: Mapping[str, Work], rounds: int = 10, budget_seconds: float = 0.5
) -> dict[str, Timing]:
    """Times several things in turns.

    Args:
        works: What to time, by name.
        rounds: How many turns each has.
        budget_seconds: What took longer than this in all is measured no more, once it was measured
            three times.

    Returns:
        The timing of each. Garbage collection is off meanwhile, and each ran once before.

    Example:
        >>> timings = interleaved({"nothing": Work(lambda: None, calls=100)}, rounds=3)
        >>> timings["nothing"].measurements
        3
    """
    clocked = {name: _Clocked() for name in works}
    for work in works.values():
        work.before()
        work.call()
        work.after()
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, work in works.items():
                for _ in range(work.repeats):
                    if not clocked[name].has_enough(work.calls, budget_seconds):
                        _measure(work, clocked[name])
    finally:
        if was_enabled:
            gc.enable()
    return {name: each.timing() for name, each in clocked.items()}


def _measure(work: Work, clocked: _Clocked) -> None:
    work.before()
    call, turns = work.call, range(work.calls)
    wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
    for _ in turns:
        call()
    cpu, wall = time.thread_time_ns() - cpu, time.perf_counter_ns() - wall
    work.after()
    per_call = work.calls * _NANOSECONDS_PER_MICROSECOND
    clocked.wall.append(wall / per_call)
    clocked.cpu.append(cpu / per_call)


def versions() -> dict[str, str]:
    """The versions of the packages that figures depend on, as this process has them."""
    known: dict[str, str] = {}
    for package in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            known[package] = importlib.metadata.version(package)
    return known


def machine() -> dict[str, Any]:
    """What the figures depend on: processor, load, Python, versions of packages."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "load_average": [round(load, 1) for load in os.getloadavg()],
        "versions": versions(),
    }


def store(name: str, results: Mapping[str, Any], folder: Path = RESULTS) -> Path:
    """Writes results, with a description of the machine, as JSON.

    Args:
        name: Name of the benchmark.
        results: Anything JSON can say; dataclasses are written as their fields.
        folder: Made if it is not there.

    Returns:
        The file, ``<folder>/<name>.json``; an older one is replaced.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    content = {"benchmark": name, "machine": machine(), **results}
    path.write_text(_one_row_per_line(content), encoding="utf-8")
    return path


def _one_row_per_line(content: Mapping[str, Any]) -> str:
    """JSON in which a row that has changed is one line that has changed."""
    parts: list[str] = []
    for key, value in content.items():
        text = json.dumps(value, default=asdict)
        if isinstance(value, list):
            rows = ",\n".join(json.dumps(row, default=asdict) for row in value)
            text = f"[\n{rows}\n]"
        parts.append(f"{json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"
