"""The benchmarked step on JAX: xla_dtensor's, and the one written by hand."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.step_jax import JaxTraining
from benchmarks.step_plan import AXES, BY_HAND, OURS
from benchmarks.step_sizes import AnySizes
from benchmarks.step_torch import annotated, made, placements_of, training_step
from benchmarks.step_ways import Built, Way, collectives_of

__all__ = [
    "compile_clock",
    "host_batch",
    "host_weights",
    "our_step",
    "program_facts",
    "ways_on_jax",
]

_COMPILED = "/jax/core/compile/backend_compile_duration"


def ways_on_jax(sizes: AnySizes, mesh: Any, dtype: torch.dtype = torch.float32) -> list[Way]:
    """Returns both ways, each with a model and a batch of its own.

    Args:
        sizes: The model's.
        mesh: Axes dp and tp, a ``DeviceMesh`` of xla_dtensor on the JAX runtime. By hand, a mesh
            of one device is none.
        dtype: Of parameters and moments.
    """
    compiling = compile_clock()
    step, batch = our_step(sizes, mesh, dtype)

    def facts() -> dict[str, Any]:
        found = program_facts(step._called().executable, mesh.value)
        return {**found, "traces": step.stats()["traces"]}

    ours = Way(
        OURS,
        train=lambda: step(*batch),
        wait=lambda loss: jax.block_until_ready(loss._local_tensor.value()),
        read=lambda loss: loss.full_tensor().item(),
        compiling=compiling,
        facts=facts,
    )
    return [ours, _by_hand(sizes, mesh, dtype, compiling)]


def our_step(sizes: AnySizes, mesh: Any, dtype: torch.dtype) -> tuple[Any, list[Any]]:
    """Returns xla_dtensor's compiled step, not yet called, and its batch."""
    import xla_dtensor as xd

    model, batch = made(sizes)
    step = xd.compile(training_step(annotated(model.to(dtype), mesh)))
    floats = [t.to(dtype) if t.is_floating_point() else t for t in batch]
    return step, [xd.distribute_tensor(t, mesh, placements_of(["dp"])) for t in floats]


def _by_hand(sizes: AnySizes, mesh: Any, dtype: torch.dtype, compiling: Any) -> Way:
    shape = tuple(mesh.shape)
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    placed = None if devices.size == 1 else Mesh(devices, AXES)
    lies = jax.devices()[0] if placed is None else NamedSharding(placed, PartitionSpec("dp"))
    model, batch = made(sizes)
    inputs, targets = (jax.device_put(b, lies) for b in host_batch(batch, dtype))
    training = JaxTraining.of(host_weights(model, dtype), (inputs, targets), sizes, placed)
    return Way(
        BY_HAND,
        train=lambda: training(inputs, targets),
        wait=jax.block_until_ready,
        read=float,
        compiling=compiling,
        facts=lambda: {**program_facts(training.compiled, mesh.value), "traces": 1},
        built=Built(training.trace_seconds, training.compile_seconds),
    )


def host_weights(model: torch.nn.Module, dtype: torch.dtype) -> dict[str, Any]:
    """Returns parameters and buffers by name, as arrays of one device."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: _array(tensor.detach(), dtype) for name, tensor in named}


def host_batch(batch: Any, dtype: torch.dtype) -> tuple[Any, Any]:
    """Returns inputs and targets as arrays of one device; whole numbers have 32 bits."""
    inputs, targets = (_array(tensor, dtype) for tensor in batch)
    return inputs, targets


def _array(tensor: torch.Tensor, dtype: torch.dtype) -> Any:
    if not tensor.is_floating_point():
        return tensor.numpy().astype(np.int32)
    array = tensor.float().numpy()
    return jnp.asarray(array, jnp.bfloat16) if dtype == torch.bfloat16 else array


def program_facts(executable: Any, mesh: Any) -> dict[str, Any]:
    """Returns flops, memory and collectives of a ``jax.stages.Compiled``, all of one device."""
    memory = executable.memory_analysis()
    kept = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return {
        "flops": (executable.cost_analysis() or {}).get("flops"),
        "temporary_bytes": memory.temp_size_in_bytes,
        "peak_bytes": kept + memory.temp_size_in_bytes - memory.alias_size_in_bytes,
        "collectives": collectives_of(executable.as_text(), mesh),
    }


@cache
def compile_clock() -> Any:
    """Returns a function that says for how long XLA has compiled since this was called first."""
    spent: list[float] = []

    def note(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == _COMPILED:
            spent.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(note)
    return lambda: sum(spent)
