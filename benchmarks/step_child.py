"""The child of `benchmarks.step`: builds the ways of one runtime, then trains when it is told to.

Run as ``python -m benchmarks.step_child jax --model llama --sizes cpu --devices 8``. It prints one
JSON object per line: a row for each way, then ``{"ready": [names]}``. Then it reads lines: for
``go 3 JAX by hand`` it trains three steps that way and prints their seconds; at the end of its
input it ends.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.step_sizes import KINDS, sizes_of
from benchmarks.step_ways import Way, expected_losses, recorded
from benchmarks.timing import versions

PROCESSES = ("jax", "torch_xla", "torchax", "torch_compile")
_MOST_TP = 4


def main(arguments: Sequence[str] | None = None) -> None:
    """Records every way, then answers turns until its input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("process", choices=PROCESSES)
    parser.add_argument("--model", required=True)
    parser.add_argument("--sizes", choices=KINDS, required=True)
    parser.add_argument("--devices", type=int, help="virtual CPU devices; left out: the real ones")
    parser.add_argument("--half", action="store_true", help="bfloat16")
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        ways, devices = _ways(asked, Path(folder))
        dtype = torch.bfloat16 if asked.half else torch.float32
        # Where devices are real, sizes are theirs: too large for this machine's processor.
        expected = expected_losses(sizes_of(asked.model, asked.sizes)) if asked.devices else None
        for way in ways:
            row = _row(way, expected)
            facts = {"model": asked.model, "devices": devices, "dtype": str(dtype)}
            say({**facts, "versions": versions(), **row})
        say({"ready": [way.name for way in ways]})
        answer({way.name: way for way in ways})


def _row(way: Way, expected: Sequence[float] | None) -> dict[str, Any]:
    if expected is not None:
        return recorded(way, expected)
    return {**recorded(way, [0.0] * 10), "loss_difference": None}


def _ways(asked: Any, folder: Path) -> tuple[list[Way], int]:
    sizes = sizes_of(asked.model, asked.sizes)
    dtype = torch.bfloat16 if asked.half else torch.float32
    if asked.process == "torch_compile":
        from benchmarks.step_ways_cuda import ways_on_cuda

        return ways_on_cuda(sizes, dtype), 1
    if asked.process == "torchax":
        return _on_torchax(sizes, asked.devices), asked.devices
    import xla_dtensor as xd

    # torch_xla can only write its programs to a folder. What is timed is compiled here and now.
    options: dict[str, Any] = {"compile_cache": False}
    if asked.process == "torch_xla":
        options["dump_hlo"] = folder
    xd.get_runtime(asked.process, num_cpu_devices=asked.devices, **options)
    devices = len(xd.get_runtime().device_ids())
    mesh = xd.init_device_mesh("xla", _mesh_shape(devices), mesh_dim_names=("dp", "tp"))
    if asked.process == "torch_xla":
        from benchmarks.step_ways_torch_xla import ways_on_torch_xla

        return ways_on_torch_xla(sizes, mesh, folder), devices
    from benchmarks.step_ways_jax import ways_on_jax

    return ways_on_jax(sizes, mesh, dtype), devices


def _mesh_shape(devices: int) -> tuple[int, int]:
    tp = min(_MOST_TP, devices)
    return devices // tp, tp


def _on_torchax(sizes: Any, devices: int) -> list[Way]:
    # Before JAX is imported; what starts the project's own runtime sees to the same.
    os.environ.setdefault("NPROC", "64")
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    from benchmarks.step_ways_torchax import ways_on_torchax

    return ways_on_torchax(sizes, _mesh_shape(devices))


def say(row: Mapping[str, Any]) -> None:
    """Prints a row for the parent."""
    print(json.dumps(row), flush=True)


def answer(ways: Mapping[str, Way]) -> None:
    """Trains as the lines on stdin say, and prints how long each step took."""
    for line in sys.stdin:
        word, count, name = line.strip().split(" ", 2)
        if word != "go":
            raise SystemExit(f"line={line!r} came in. Pass turns: go 3 {next(iter(ways))}")
        gc.collect()
        gc.disable()
        seconds = [ways[name].timed() for _ in range(int(count))]
        gc.enable()
        say({"way": name, "seconds": seconds})


if __name__ == "__main__":
    main()
