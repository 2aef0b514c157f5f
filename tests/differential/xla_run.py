"""A program on xla_dtensor, with what is compared of it: values, placements, local shapes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import Replicate

import xla_dtensor as xd
from tests.differential.dtensor_side import DTensorSide
from tests.differential.programs import Program, tokens_of
from tests.differential.running import Run, run
from xla_dtensor.core import local_shape

__all__ = ["Found", "XlaRun", "run_on_xla"]


@dataclass
class Found:
    """One of our tensors: its label, each device's shape by that label, the whole value."""

    tokens: tuple[str, ...]
    shapes: list[tuple[int, ...]]
    value: torch.Tensor


@dataclass
class XlaRun:
    """What a program gave. `shards` are what to_local gives on each device, for the last tensor."""

    tensors: dict[int, Found] = field(default_factory=dict)
    first: dict[int, Found] = field(default_factory=dict)
    gradients: dict[int, Found] = field(default_factory=dict)
    errors: dict[int, Exception] = field(default_factory=dict)
    backward_error: Exception | None = None
    last: int = -1
    shards: list[torch.Tensor] = field(default_factory=list)


def run_on_xla(program: Program, mesh: xd.DeviceMesh, again: Any = (), drop: Any = ()) -> XlaRun:
    """Run a program; see :func:`tests.differential.running.run`."""
    side = DTensorSide(mesh, xd.distribute_tensor, xd.DTensor.from_local)
    done: Run = run(program, side, again, drop)
    result = XlaRun(errors=done.errors, backward_error=done.backward_error)
    made = {i: t for i, t in enumerate(done.tensors) if t is not None}
    groups = (
        (result.tensors, made),
        (result.first, done.first),
        (result.gradients, done.gradients),
    )
    for kept, group in groups:
        for number, tensor in group.items():
            kept[number] = _found(tensor)
    result.last = max(made)
    result.shards = _shards(made[result.last])
    return result


def _found(tensor: Any) -> Found:
    shape, sizes = tuple(tensor.shape), tensor.device_mesh.value.mesh_shape
    shapes = [
        local_shape(tensor.mesh_layout, shape, place, rule="torch").shape
        for place in itertools.product(*map(range, sizes))
    ]
    return Found(tokens_of(tensor.placements), shapes, tensor.detach().cpu())


def _shards(tensor: Any) -> list[torch.Tensor]:
    whole = [Replicate() if p.is_partial() else p for p in tensor.placements]
    view: Any = tensor.detach().redistribute(placements=whole).to_local()
    return [shard.data for shard in view.addressable_shards()]
