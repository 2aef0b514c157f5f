"""The child of `benchmarks.step` that compiles for TPUs which are not here.

Run as ``python -m benchmarks.step_tpu_child --model llama --topology v5e:16x16 --mesh 16,16``, in
an environment that keeps libtpu from looking for a TPU. xla_dtensor's step runs once on as many
virtual CPU devices, by which it is traced with its optimizer state; the step by hand is lowered
from types. One JSON object per line: flops, bytes and collectives of either program.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.step_child import say
from benchmarks.step_plan import AXES, BY_HAND, OURS
from benchmarks.step_sizes import KINDS, sizes_of


def main(arguments: Sequence[str] | None = None) -> None:
    """Compiles both steps; one row each on stdout."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--sizes", choices=KINDS, default="pod")
    parser.add_argument("--topology", required=True)
    parser.add_argument("--mesh", required=True, help="sizes of dp and tp")
    asked = parser.parse_args(arguments)
    dp, tp = map(int, asked.mesh.split(","))
    import xla_dtensor as xd

    xd.get_runtime("jax", num_cpu_devices=dp * tp)
    mesh = xd.init_device_mesh("xla", (dp, tp), mesh_dim_names=AXES)
    devices = _devices(asked.topology)
    for way, lower in ((OURS, _ours), (BY_HAND, _by_hand)):
        start = time.perf_counter()
        lowered = lower(sizes_of(asked.model, asked.sizes), mesh, devices)
        middle = time.perf_counter()
        compiled = lowered.compile()
        from benchmarks.step_ways_jax import program_facts

        say(
            {
                "model": asked.model,
                "topology": asked.topology,
                "mesh": [dp, tp],
                "way": way,
                "trace_seconds": middle - start,
                "compile_seconds": time.perf_counter() - middle,
                **program_facts(compiled, mesh.value),
            }
        )


def _devices(topology: str) -> list[Any]:
    topologies: Any = importlib.import_module("jax.experimental.topologies")
    described = topologies.get_topology_desc(topology, "tpu")
    return sorted(described.devices, key=lambda device: device.id)


def _ours(sizes: Any, mesh: Any, devices: list[Any]) -> Any:
    from benchmarks.step_ways_jax import our_step

    step, batch = our_step(sizes, mesh, torch.float32)
    for _ in range(2):  # The first call makes the optimizer's state, the second finds it.
        step(*batch)
    return step.lowered_for(devices)


def _by_hand(sizes: Any, mesh: Any, devices: list[Any]) -> Any:
    from jax.sharding import Mesh

    from benchmarks.step_jax import lowered_for
    from benchmarks.step_torch import made
    from benchmarks.step_ways_jax import host_batch, host_weights

    model, batch = made(sizes)
    placed = Mesh(np.array(devices).reshape(tuple(mesh.shape)), AXES)
    weights = host_weights(model, torch.float32)
    return lowered_for(weights, host_batch(batch, torch.float32), sizes, placed)


if __name__ == "__main__":
    main()
