"""What scan_layers saves: time to the first step, and memory, by depth and by what is kept.

    python -m benchmarks.scan_layers            4 and 32 layers, forward and backward compiled
    python -m benchmarks.scan_layers 4 8        other depths

Times are CPU seconds of the process, which other work on the machine disturbs less than seconds on
the clock. Each row is a first call: tracing, compiling, and one run.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard

import xla_dtensor as xd
from examples.language_model import Block, ModelConfig

RULES = {f"**.{name}.weight": ["tp", None] for name in ("wq", "wk", "wv", "w1", "w3")}
RULES |= {f"**.{name}.weight": [None, "tp"] for name in ("wo", "w2")}
CONFIG = ModelConfig(dim=64, heads=4, seq=64)


def first_call(mesh: Any, layers: Any) -> tuple[float, int, int]:
    """Return CPU seconds, bytes of temporary memory on one device, and length of the HLO."""

    def step(x: torch.Tensor) -> Any:
        y = x
        if isinstance(layers, xd.ScannedLayers):
            y = layers(y)
        else:
            for layer in layers:
                y = layer(y)
        y.square().mean().backward()
        grads = [p.grad for p in layers.parameters()]
        layers.zero_grad()
        return grads

    run: Any = xd.compile(step)
    x = xd.distribute_tensor(torch.ones(8, CONFIG.seq, CONFIG.dim), mesh, [Shard(0), Replicate()])
    start = time.process_time()
    run(x)
    seconds = time.process_time() - start
    memory = run._called().executable.memory_analysis()
    return seconds, memory.temp_size_in_bytes, len(run.hlo())


def main() -> None:
    """Print the table."""
    xd.get_runtime("jax", num_cpu_devices=8)
    mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
    print(f"{'layers':>6}  {'remat':10}  {'CPU s':>6}  {'temp kB':>8}  {'HLO kB':>7}", flush=True)
    for count in map(int, sys.argv[1:] or (4, 32)):
        for remat in ("unrolled", "none", "dots", "full"):
            if remat == "unrolled" and count > 8:
                continue
            layers: Any = torch.nn.ModuleList(Block(CONFIG) for _ in range(count))
            layers = layers if remat == "unrolled" else xd.scan_layers(layers, remat)
            xd.shard_module(layers, mesh, RULES, unmatched="replicate")
            seconds, temp, length = first_call(mesh, layers)
            row = f"{count:6}  {remat:10}  {seconds:6.1f}  {temp / 1e3:8.0f}  {length / 1e3:7.0f}"
            print(row, flush=True)


if __name__ == "__main__":
    main()
