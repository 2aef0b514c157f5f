"""What processes of a job do in tests of checkpoints; called by name, see ``tests/hosts.py``.

The same draws are made in every process: a case is known by its number.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import xla_dtensor as xd
from xla_dtensor import checkpoint
from xla_dtensor.errors import CheckpointError
from xla_dtensor.hosts.checkpoint import storage

__all__ = [
    "check_rows",
    "differing",
    "drawn_state",
    "fail_in_one",
    "load_drawn",
    "save_again_and_again",
    "save_drawn",
    "save_rows",
    "value_of",
    "values_of_processes",
]

_MESHES = ((8,), (2, 4), (4, 2), (2, 2, 2))
_DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64)


@dataclass(frozen=True)
class Drawn:
    """A mesh of the 8 devices, and placements on it."""

    mesh: tuple[int, ...]
    placements: tuple[Any, ...]

    def put(self, value: torch.Tensor) -> Any:
        """Return a value laid out so."""
        mesh = xd.init_device_mesh("xla", self.mesh)
        return xd.distribute_tensor(value, mesh, list(self.placements))


def drawn(number: int, where: str) -> Drawn:
    """A layout for the tensor of a case; `where` makes another draw of it."""
    draw = random.Random(f"{number} {where}")
    ndim = value_of(number).ndim
    mesh = draw.choice(_MESHES)
    kinds = [Replicate(), *(Shard(d) for d in range(ndim))] * 2
    placements = [draw.choice(kinds) for _ in mesh]
    if ndim and len(mesh) == 2 and draw.random() < 0.15:
        placements = [_StridedShard(0, split_factor=mesh[1]), Shard(0)]
    return Drawn(mesh, tuple(placements))


def value_of(number: int) -> torch.Tensor:
    """The tensor of a case: up to three dims, often uneven, sometimes empty."""
    draw = random.Random(number)
    shape = [draw.choice((1, 3, 5, 8, 9, 16)) for _ in range(draw.randint(0, 3))]
    if shape and draw.random() < 0.05:
        shape[0] = 0
    values = torch.arange(math.prod(shape)).reshape(shape) + number
    dtype = draw.choice(_DTYPES)
    return values % 3 == 1 if dtype is torch.bool else values.to(dtype)


def save_drawn(folder: str, cases: int, step: int = 1, copied: bool = False) -> str:
    """Save the tensors of all cases, each on its drawn mesh."""
    state = drawn_state(cases, f"source {step}")
    if copied:
        return checkpoint.async_save(folder, state, step=step).wait()
    return checkpoint.save(folder, state, step=step)


def drawn_state(cases: int, where: str) -> dict[str, Any]:
    """The tensors of all cases, each on its drawn mesh."""
    return {f"t{i}": drawn(i, where).put(value_of(i)) for i in range(cases)}


def load_drawn(folder: str, cases: int, where: str, step: int = 1) -> list[int]:
    """Load all cases, each on another drawn mesh; return the numbers of those that differ."""
    return differing(cases, where, lambda state: checkpoint.load(folder, state, step=step))


def differing(cases: int, where: str, load: Callable[[dict[str, Any]], object]) -> list[int]:
    """Load all cases into zeros on other drawn meshes; return the numbers of those that differ."""
    layouts = [drawn(i, f"target {where}") for i in range(cases)]
    state = {f"t{i}": d.put(torch.zeros_like(value_of(i))) for i, d in enumerate(layouts)}
    lies = [state[f"t{i}"].xla_sharding() for i in range(cases)]
    load(state)
    wrong: list[int] = []
    for i in range(cases):
        tensor, value = state[f"t{i}"], value_of(i)
        shards = [(s.data, value[s.index]) for s in tensor.addressable_shards()]
        good = all(torch.equal(a, b) and a.dtype == b.dtype for a, b in shards)
        if not (good and tensor.xla_sharding() == lies[i] and tensor.shape == value.shape):
            wrong.append(i)
    return wrong


def _rows(mesh_shape: Sequence[int], number: float) -> Any:
    mesh = xd.init_device_mesh("xla", tuple(mesh_shape))
    value = torch.arange(64.0 * 32).reshape(64, 32) + number
    return xd.distribute_tensor(value, mesh, [Shard(0)] + [Replicate()] * (len(mesh_shape) - 1))


def save_rows(folder: str, mesh_shape: tuple[int, ...], step: int, pause: float = 0) -> str:
    """Save a tensor whose values tell the step; `pause` makes process 1 a slow writer."""
    state = {"x": _rows(mesh_shape, step), "step": step}
    with _faults(pause_seconds=pause if jax.process_index() == 1 else 0):
        return checkpoint.save(folder, state, step=step)


def check_rows(folder: str, mesh_shape: tuple[int, ...], step: int | None = None) -> int:
    """Load such a tensor, compare all its shards, and return the step."""
    state = {"x": _rows(mesh_shape, -1), "step": -1}
    found = checkpoint.load(folder, state, step=step)
    assert state["step"] == found
    value = torch.arange(64.0 * 32).reshape(64, 32) + found
    assert all(torch.equal(s.data, value[s.index]) for s in state["x"].addressable_shards())
    return found


def save_again_and_again(folder: str, mesh_shape: tuple[int, ...], first: int) -> None:
    """Save until somebody kills the process; odd steps in the background."""
    for step in range(first, first + 10_000):
        state = {"x": _rows(mesh_shape, step), "step": step}
        if step % 2:
            checkpoint.async_save(folder, state, step=step, keep=3)
        else:
            checkpoint.save(folder, state, step=step, keep=3)


def values_of_processes(folder: str) -> list[Any]:
    """Save a value and a tensor of each process's own, load them, and return what came."""
    index = jax.process_index()
    state: dict[str, Any] = {"same": 7, "own": f"process {index}", "t": torch.full((3,), index)}
    checkpoint.save(folder, state, step=1)
    state = {"same": 0, "own": "", "t": torch.full((3,), -1)}
    checkpoint.load(folder, state)
    return [state["same"], state["own"], state["t"].tolist()]


def fail_in_one(folder: str, mesh_shape: tuple[int, ...], process: int, what: str) -> str:
    """Save with a fault in one process, and return the error that this one gets."""
    faulty = jax.process_index() == process
    state: dict[str, Any] = {"x": _rows(mesh_shape, 2)}
    if what == "other state" and faulty:
        state["y"] = torch.ones(3)
    full = 500 if what == "full disk" and faulty else None
    try:
        with _faults(full_after_bytes=full):
            if what == "in the background":
                with _faults(full_after_bytes=500 if faulty else None):
                    pending = checkpoint.async_save(folder, state, step=2)
                    pending.wait()
            else:
                checkpoint.save(folder, state, step=2)
    except CheckpointError as error:
        return str(error)
    return "saved"


class _faults:
    """Within it, files are written slowly, or the disk is full after so many bytes."""

    def __init__(self, pause_seconds: float = 0, full_after_bytes: int | None = None) -> None:
        self._pause, self._full = pause_seconds, full_after_bytes
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> None:
        create = storage._Local.create
        faults = self._pause, self._full
        self._patch.setattr(storage._Local, "create", lambda *args: _File(create(*args), *faults))

    def __exit__(self, *_: object) -> None:
        self._patch.undo()


class _File:
    def __init__(self, file: Any, pause_seconds: float, full_after_bytes: int | None) -> None:
        self._file, self._pause, self._full = file, pause_seconds, full_after_bytes

    def write(self, data: Any) -> int:
        time.sleep(self._pause)
        if self._full is not None and self._file.tell() + len(data) > self._full:
            self._file.write(memoryview(data)[: max(0, self._full - self._file.tell())])
            raise OSError(28, "No space left on device")
        return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
