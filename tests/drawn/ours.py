"""Programs on DTensors, on one of the runtimes."""

from __future__ import annotations

import math
import os
import re
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from tests.drawn.judge import Expected, Verdict, has_nan, is_of_index, judge
from tests.drawn.programs import PLAIN_WORDS, Mesh, Program, Result, run

__all__ = ["DEVICES", "run_on_mesh", "start", "verdict_of"]

DEVICES = 8
_WRITES = re.compile(r"scatter|put|index_(add|copy|fill|reduce)|\] [-+*/]?= ")


def start(runtime: str, platform: str = "cpu") -> None:
    """Start a runtime with 8 virtual CPU devices, or with the GPUs that are there."""
    import xla_dtensor

    if platform == "cpu":
        os.environ.setdefault("NPROC", "64")
        os.environ |= {"JAX_PLATFORMS": "cpu", "PJRT_DEVICE": "CPU"}
        xla_dtensor.get_runtime(runtime, num_cpu_devices=DEVICES)
    else:
        os.environ["JAX_PLATFORMS"] = platform
        xla_dtensor.get_runtime(runtime)
    mesh_of(Mesh((DEVICES,)))  # the root: all devices in their order


@cache
def mesh_of(mesh: Mesh) -> Any:
    """The device mesh of a program. torch_xla takes all devices: its mesh has as many axes.

    On GPUs, however many there are, the first axis takes all of them.
    """
    import mesh_utils
    import xla_dtensor

    here = len(xla_dtensor.get_runtime().device_ids())
    if here != DEVICES:
        mesh = replace(mesh, shape=(here, *(1 for _ in mesh.shape[1:])), order=None)
    elif xla_dtensor.get_runtime().name == "torch_xla" and math.prod(mesh.shape) != DEVICES:
        mesh = replace(mesh, shape={1: (8,), 2: (2, 4)}[len(mesh.shape)])
    if mesh.order is None:
        return xla_dtensor.init_device_mesh("xla", mesh.shape, mesh_dim_names=mesh.names)
    ids = xla_dtensor.get_runtime().device_ids()  # of several processes not 0 to 7
    order = [ids[place] for place in mesh.order]
    return xla_dtensor.DeviceMesh(mesh_utils.Mesh(order, mesh.shape, mesh.names))


def placements_of(tokens: tuple[str, ...]) -> list[Placement]:
    """Placements of their short names: "R", "S1", "_S0:4" (a strided shard).

    Example:
        >>> placements_of(("S1", "R"))
        [Shard(dim=1), Replicate()]
    """
    return [_placement(token) for token in tokens]


def _placement(token: str) -> Placement:
    if token.startswith("_S"):
        dim, factor = token[2:].split(":")
        return _StridedShard(int(dim), split_factor=int(factor))
    return Replicate() if token == "R" else Shard(int(token[1:]))


def verdict_of(program: Program, expected: Expected) -> Verdict:
    """Run a program on DTensors and judge it.

    Where an index is out of range and no result has NaN, or it is written by, the documents promise
    an error under `check_values` in compiled steps of the JAX runtime. On torch_xla they promise
    nothing of whole numbers.
    """
    import xla_dtensor

    found = run_on_mesh(program)
    verdict = judge(program, expected, found)
    if verdict.kind == "silent" and is_of_index(expected.plain.error):
        line = "" if verdict.line is None else program.lines[verdict.line]
        # A write in range to the same row hides the NaN.
        if has_nan(found, line) and not _WRITES.search(line):
            return verdict
        if xla_dtensor.get_runtime().name == "torch_xla":
            return verdict if has_nan(found, line) else replace(verdict, kind="unjudged")
        with xla_dtensor.check_values():
            return judge(program, expected, run_on_mesh(program))
    return verdict


def run_on_mesh(program: Program) -> Result:
    """Run a program on DTensors, eagerly or as a compiled step."""
    import xla_dtensor
    from tests.drawn.ours_training import training_words

    mesh = mesh_of(program.mesh)

    def redistribute(tensor: Any, *tokens: str) -> Any:
        if not isinstance(tensor, xla_dtensor.DTensor):
            return tensor.clone()
        return tensor.redistribute(placements=placements_of(tokens)).clone()

    def whole(tensor: Any) -> Any:
        if not isinstance(tensor, xla_dtensor.DTensor):
            return tensor.clone()
        plain = tensor.full_tensor()
        if xla_dtensor.get_runtime().name == "torch_xla":  # whose own ops are not judged
            plain = xla_dtensor.DTensor.from_local(plain, mesh, [Replicate()] * mesh.ndim)
        return plain.clone()

    def parts(tensor: Any) -> Any:
        if not isinstance(tensor, xla_dtensor.DTensor):
            return tensor.clone()
        lying = [Replicate() if p.is_partial() else p for p in tensor.placements]
        tensor = tensor.redistribute(placements=lying)
        back = xla_dtensor.DTensor.from_local(
            tensor.to_local(), mesh, lying, shape=tensor.shape, stride=tensor.stride()
        )
        return back.clone()

    def pending(tensor: Any, kind: str, axis: int) -> Any:
        if not isinstance(tensor, xla_dtensor.DTensor):
            return tensor.clone()
        lying = [Replicate() if p.is_partial() else p for p in tensor.placements]
        lying[axis] = Replicate()
        back = [*lying[:axis], Partial(), *lying[axis + 1 :]]
        local = tensor.redistribute(placements=lying).to_local(grad_placements=back)
        local = local / mesh.size(axis) if kind == "sum" else local.clone()
        lying[axis] = Partial(kind)
        return xla_dtensor.DTensor.from_local(
            local, mesh, lying, shape=tensor.shape, stride=tensor.stride()
        )

    words = {**PLAIN_WORDS, "redistribute": redistribute, "whole": whole, "parts": parts}
    words["pending"] = pending
    words |= training_words(mesh)
    try:
        arguments = []
        for leaf in program.leaves:
            value: Any = leaf.value.clone()
            if leaf.placements is not None:
                value = xla_dtensor.distribute_tensor(value, mesh, placements_of(leaf.placements))
            arguments.append(value.requires_grad_(leaf.requires_grad))
    except Exception as error:
        return Result(error=error)
    execute = xla_dtensor.compile if program.compiled else (lambda function: function)
    return run(program, arguments, words, execute=execute, fetch=_fetched)


def _fetched(values: list[Any]) -> list[Any]:
    """The results on the host. torch_xla computes them in one program, not in one each."""
    import xla_dtensor

    whole = [value.detach() if isinstance(value, torch.Tensor) else value for value in values]
    whole = [v.full_tensor() if isinstance(v, xla_dtensor.DTensor) else v for v in whole]
    if xla_dtensor.get_runtime().name == "torch_xla":
        xla_dtensor.get_runtime().synchronize()
    return [
        found.cpu().clone().requires_grad_(value.requires_grad)
        if isinstance(found, torch.Tensor)
        else found
        for found, value in zip(whole, values, strict=True)
    ]
