"""Make the stored results: the random programs under PyTorch's own DTensor.

``python -m tests.differential.make_oracle`` needs torch 2.13 or newer: all 8 ranks run in one
process, under LocalTensorMode with a process group that does nothing, and each has its own values.

``python -m tests.differential.make_oracle --labels`` works with any torch, 2.9 too: rank 0 runs
alone and its values mean nothing, but placements, local shapes and errors are right. Placements
differ between versions of PyTorch, so each has a file of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import multiprocessing
import signal
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.differential.checksums import checksum
from tests.differential.dtensor_side import DTensorSide
from tests.differential.generating import make_program
from tests.differential.programs import tokens_of
from tests.differential.running import Run, run
from tests.differential.stored import StoredRun, StoredTensor, save, save_labels

WORLD = 8
CHUNK = 50
LONGEST_SECONDS = 10.0  # of processor time


@lru_cache(maxsize=8)
def side_of(mesh_shape: tuple[int, ...], labels_only: bool) -> DTensorSide:
    """PyTorch's DTensor on a mesh of CPU ranks."""
    mesh = DeviceMesh("cpu", torch.arange(WORLD).reshape(mesh_shape))
    if labels_only:
        # Without communication: each rank takes its shard of a value that all have.
        return DTensorSide(mesh, partial(distribute_tensor, src_data_rank=None), from_local)
    return DTensorSide(mesh, distribute_tensor, from_local)


def from_local(tensor: Any, mesh: Any, placements: Any, **options: Any) -> Any:
    return DTensor.from_local(tensor, mesh, placements, run_check=False, **options)


def stored(tensor: Any) -> tuple[tuple[str, ...], list[torch.Tensor]]:
    """Placements, and each rank's own tensor after reduction."""
    tokens = tokens_of(tensor.placements)
    if any(placement.is_partial() for placement in tensor.placements):
        whole = [Replicate() if p.is_partial() else p for p in tensor.placements]
        with torch.no_grad():
            tensor = tensor.redistribute(placements=whole)
    local = tensor._local_tensor.detach()
    if hasattr(local, "wait"):
        local = local.wait()
    parts = getattr(local, "_local_tensors", None)
    return tokens, [parts[r] for r in range(WORLD)] if parts else [local] * WORLD


def collected(groups: list[dict[int, Any]]) -> list[dict[int, Any]]:
    """The placements and parts of some tensors, or None for one that cannot be reduced."""
    found = []
    for group in groups:
        parts = {}
        for number, tensor in group.items():
            with contextlib.suppress(Exception):
                parts[number] = stored(tensor)
        found.append(parts)
    return found


def record(seed: int, done: Run, groups: list[dict[int, Any]]) -> StoredRun:
    """What is stored of one program."""
    result = StoredRun(seed)
    for kept, group in zip((result.tensors, result.gradients), groups, strict=True):
        for number, (tokens, parts) in group.items():
            shapes = [tuple(part.shape) for part in parts]
            kept[number] = StoredTensor(tokens, shapes, [checksum(part) for part in parts])
    result.errors = {number: type(e).__name__ for number, e in done.errors.items()}
    result.lost = {number: type(e).__name__ for number, e in done.lost.items()}
    result.backward_error = type(done.backward_error).__name__ if done.backward_error else ""
    return result


def groups_of(done: Run, num_leaves: int) -> list[dict[int, Any]]:
    made = {i: t for i, t in enumerate(done.tensors) if i >= num_leaves and t is not None}
    return [made, done.gradients]


def make_values(seeds: range) -> list[StoredRun]:
    """All ranks, with their values."""
    mode: Any = importlib.import_module("torch.distributed._local_tensor").LocalTensorMode(WORLD)

    prepare()
    runs = []
    with mode:
        for seed in seeds:
            program = make_program(seed)
            try:
                with at_most(LONGEST_SECONDS):
                    done = run(program, side_of(program.mesh_shape, labels_only=False))
                    groups = collected(groups_of(done, len(program.leaves)))
            except TooLong:
                print(f"seed {seed} took too long and is left out", flush=True)
                continue
            with mode.disable():
                runs.append(record(seed, done, groups))
    return runs


class TooLong(BaseException):
    """Raised through whatever catches exceptions."""


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Stop a program for which PyTorch's search of a redistribution does not end in time."""

    def stop(*_: Any) -> None:
        raise TooLong

    signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def make_labels(seeds: range) -> dict[int, Any]:
    """Placements, rank 0's shapes and errors, per seed."""
    prepare()
    labels = {}
    for seed in seeds:
        program = make_program(seed)
        done = run(program, side_of(program.mesh_shape, labels_only=True))
        groups = []
        for group in groups_of(done, len(program.leaves)):
            groups.append(
                [
                    [number, " ".join(tokens_of(t.placements)), list(t._local_tensor.shape)]
                    for number, t in group.items()
                ]
            )
        errors = {number: type(e).__name__ for number, e in done.errors.items()}
        failed = type(done.backward_error).__name__ if done.backward_error else ""
        labels[seed] = [*groups, errors, failed]
    return labels


def prepare() -> None:
    """Start the process group, once per process."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())


def main() -> None:
    """Run all programs and write the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--labels", action="store_true", help="placements of this torch only")
    parser.add_argument("--count", type=int, default=2200, help="how many programs")
    parser.add_argument("--jobs", type=int, default=2, help="how many processes")
    arguments = parser.parse_args()
    version = ".".join(torch.__version__.split(".")[:2])
    chunks = [
        range(first, min(first + CHUNK, arguments.count))
        for first in range(0, arguments.count, CHUNK)
    ]
    start, made = time.monotonic(), []
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.jobs, mp_context=spawn) as pool:
        make = make_labels if arguments.labels else make_values
        for future in as_completed([pool.submit(make, chunk) for chunk in chunks]):
            made.append(future.result())
            seconds = time.monotonic() - start
            print(f"{len(made)} of {len(chunks)} parts, {seconds:.0f} s", flush=True)
            keep(made, arguments.labels, version)


def keep(made: list[Any], labels_only: bool, version: str) -> None:
    """Write what is there so far."""
    if labels_only:
        save_labels({seed: label for part in made for seed, label in part.items()}, version)
    else:
        runs = [run for part in made for run in part]
        save(sorted(runs, key=lambda run: run.seed), version)


if __name__ == "__main__":
    main()
