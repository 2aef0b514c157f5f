"""The child of `benchmarks.step` that compiles for TPUs which are not here.

Run as ``python -m benchmarks.step_tpu_child --model llama --topology v5e:16x16 --mesh 16,16``, in
an environment that keeps libtpu from looking for a TPU. xla_dtensor's step is traced without
values, as `compile_for` does it; the step by hand is lowered from types. One JSON object per line:
flops, bytes and collectives of either program.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.step_child import say
from benchmarks.step_plan import AXES, BY_HAND, OURS
from benchmarks.step_sizes import KINDS, sizes_of
from benchmarks.step_torch import annotated, made, placements_of, training_step
from mesh_utils import Mesh, Topology
from xla_dtensor.dtensor.mesh import as_device_mesh
from xla_dtensor.plan.training_plan import TrainingPlan
from xla_dtensor.runtimes.jax.absent import absent_devices
from xla_dtensor.runtimes.registry import compile_only_runtime


def main(arguments: Sequence[str] | None = None) -> None:
    """Compiles both steps; one row each on stdout."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--sizes", choices=KINDS, default="pod")
    parser.add_argument("--topology", required=True)
    parser.add_argument("--mesh", required=True, help="sizes of dp and tp")
    asked = parser.parse_args(arguments)
    dp, tp = map(int, asked.mesh.split(","))
    topology = Topology.parse(asked.topology)
    runtime = compile_only_runtime(topology)
    mesh = Mesh.arange((dp, tp), AXES)
    from benchmarks.step_ways_jax import program_facts

    sizes = sizes_of(asked.model, asked.sizes)
    ways: dict[str, Callable[[], Any]] = {
        OURS: partial(_ours, sizes, mesh, runtime),
        BY_HAND: partial(_by_hand, sizes, mesh, topology),
    }
    for way, lower in ways.items():
        start = time.perf_counter()
        compile = lower()
        middle = time.perf_counter()
        compiled = compile()
        say(
            {
                "model": asked.model,
                "topology": asked.topology,
                "mesh": [dp, tp],
                "way": way,
                "trace_seconds": middle - start,
                "compile_seconds": time.perf_counter() - middle,
                **program_facts(compiled, mesh),
            }
        )


def _ours(sizes: Any, mesh: Mesh, runtime: Any) -> Callable[[], Any]:
    def build(mesh: Any) -> tuple[Any, ...]:
        model, batch = made(sizes)
        annotated(model, mesh)
        return model, training_step(model), batch, (placements_of(["dp"]),) * len(batch)

    plan = partial(TrainingPlan.of, build, as_device_mesh(mesh), {})
    traced = runtime.traced(plan, runtime.root(mesh))
    return partial(traced.compiled, traced.lowered())


def _by_hand(sizes: Any, mesh: Mesh, topology: Topology) -> Callable[[], Any]:
    from jax.sharding import Mesh as JaxMesh

    from benchmarks.step_jax import lowered_for
    from benchmarks.step_ways_jax import host_batch, host_weights

    model, batch = made(sizes)
    devices = sorted(absent_devices(topology), key=lambda device: device.id)
    placed = JaxMesh(np.array(devices).reshape(mesh.mesh_shape), AXES)
    weights = host_weights(model, torch.float32)
    return lowered_for(weights, host_batch(batch, torch.float32), sizes, placed).compile


if __name__ == "__main__":
    main()
