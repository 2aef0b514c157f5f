"""The benchmarked step on torch_xla: xla_dtensor's, and the one that mark_sharding annotates."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.step_plan import ACTIVATIONS, AXES, MARKED, OURS_ON_TORCH_XLA, axes_of
from benchmarks.step_sizes import AnySizes
from benchmarks.step_torch import annotated, kept_outputs, made, placements_of, training_step
from benchmarks.step_ways import Way, collectives_of

__all__ = ["ways_on_torch_xla"]

# The runtime's dump takes programs whose name begins like those of its own steps.
_MARKED_PROGRAM = "xla_dtensor_step_that_is_marked"
_NANOSECONDS = 1e9


def ways_on_torch_xla(sizes: AnySizes, mesh: Any, dump_dir: Path | None) -> list[Way]:
    """Returns both ways, each with a model and a batch of its own.

    Args:
        sizes: The model's.
        mesh: Axes dp and tp, a ``DeviceMesh`` of xla_dtensor on the torch_xla runtime.
        dump_dir: What get_runtime was given as `dump_hlo`; None where HLO is not wanted.
    """
    return [_ours(sizes, mesh, dump_dir), _marked(sizes, mesh, dump_dir)]


def _ours(sizes: AnySizes, mesh: Any, dump_dir: Path | None) -> Way:
    import xla_dtensor as xd

    model, host_batch = made(sizes)
    step = xd.compile(training_step(annotated(model, mesh)))
    batch = [xd.distribute_tensor(t, mesh, placements_of(["dp"])) for t in host_batch]

    def facts() -> Mapping[str, Any]:
        text = None if dump_dir is None else step.hlo()
        return {**_facts(text, mesh), "traces": step.stats()["traces"]}

    return Way(
        OURS_ON_TORCH_XLA,
        train=lambda: step(*batch),
        wait=_wait,
        read=lambda loss: loss.full_tensor().item(),
        compiling=_compiling,
        facts=facts,
    )


def _marked(sizes: AnySizes, mesh: Any, dump_dir: Path | None) -> Way:
    """As torch_xla's own scripts do it: xs.mark_sharding, and torch_xla.compile."""
    torch_xla: Any = importlib.import_module("torch_xla")
    mark = _marker(tuple(mesh.shape))
    model, host_batch = made(sizes)
    model = model.to("xla")
    for name, parameter in model.named_parameters():
        mark(parameter, axes_of(name))
    for module, place in kept_outputs(model):
        _mark_output(module, mark, ACTIVATIONS[place])
    batch = [tensor.to("xla") for tensor in host_batch]
    for tensor in batch:
        mark(tensor, ("dp",))
    step = torch_xla.compile(training_step(model), full_graph=True, name=_MARKED_PROGRAM)
    compiled_before = _num_compiled()

    def facts() -> Mapping[str, Any]:
        text = None if dump_dir is None else _newest(dump_dir)
        return {**_facts(text, mesh), "traces": _num_compiled() - compiled_before}

    return Way(
        MARKED,
        train=lambda: step(*batch),
        wait=_wait,
        read=lambda loss: loss.item(),
        compiling=_compiling,
        facts=facts,
    )


def _marker(shape: tuple[int, ...]) -> Callable[[torch.Tensor, tuple[str | None, ...]], None]:
    """Returns a function that annotates a tensor; on one device it does nothing."""
    if math.prod(shape) == 1:
        return lambda tensor, axes: None
    spmd: Any = importlib.import_module("torch_xla.distributed.spmd")
    own: Any = importlib.import_module("torch_xla.distributed.spmd.xla_sharding")
    # mark_sharding looks for torchax on each call, which is slow where there is none. Once will do.
    found = importlib.import_module("torch_xla._internal.jax_workarounds").maybe_get_torchax()
    vars(own)["maybe_get_torchax"] = lambda: found
    mesh = spmd.Mesh(list(range(math.prod(shape))), shape, AXES)

    def mark(tensor: torch.Tensor, axes: tuple[str | None, ...]) -> None:
        spmd.mark_sharding(tensor, mesh, (*axes, *[None] * (tensor.ndim - len(axes))))

    return mark


def _mark_output(module: nn.Module, mark: Any, axes: tuple[str | None, ...]) -> None:
    def keep(_module: Any, _given: Any, result: torch.Tensor) -> None:
        mark(result, axes)

    module.register_forward_hook(keep)


def _wait(_loss: Any) -> None:
    importlib.import_module("torch_xla.core.xla_model").wait_device_ops()


def _facts(text: str | None, mesh: Any) -> dict[str, Any]:
    found = None if text is None else collectives_of(text, mesh.value)
    return {"flops": None, "temporary_bytes": None, "peak_bytes": None, "collectives": found}


def _newest(folder: Path) -> str:
    files = folder.glob(f"*{_MARKED_PROGRAM}.*after_optimizations.txt")
    return max(files, key=lambda path: path.stat().st_mtime_ns).read_text()


def _compiling() -> float:
    metrics: Any = importlib.import_module("torch_xla.debug.metrics")
    data = metrics.metric_data("CompileTime")  # codespell:ignore
    return 0.0 if data is None else data[1] / _NANOSECONDS


def _num_compiled() -> int:
    metrics: Any = importlib.import_module("torch_xla.debug.metrics")
    return metrics.counter_value("UncachedCompile") or 0
