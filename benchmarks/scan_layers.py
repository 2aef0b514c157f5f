"""What scan_layers saves: time of the first step, and memory, by depth and by what is kept.

    python -m benchmarks.scan_layers            4 and 32 layers
    python -m benchmarks.scan_layers 4 8        other depths

A step is forward, backward, clipping and AdamW. Shown are the first call's seconds of Python
(tracing and lowering) and of XLA's compiler, the median of five steps, bytes on one device, the
length of the program and how many arrays it takes. The layers are also compiled unrolled, up to 8
of them. Two layers are run before anything is measured.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard

import xla_dtensor as xd
from benchmarks.step_ways_jax import compile_clock
from examples.language_model import Block, ModelConfig

_STEPS = 5
_MOST_UNROLLED = 8
RULES = {f"**.{name}.weight": ["tp", None] for name in ("wq", "wk", "wv", "w1", "w3")}
RULES |= {f"**.{name}.weight": [None, "tp"] for name in ("wo", "w2")}
CONFIG = ModelConfig(dim=64, heads=4, seq=64)


def measured(mesh: Any, layers: Any) -> dict[str, float]:
    """Train a few steps; return what the first one took and what it made."""
    optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-3)

    def forward(x: torch.Tensor) -> torch.Tensor:
        if isinstance(layers, xd.ScannedLayers):
            return layers(x)
        for layer in layers:
            x = layer(x)
        return x

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = forward(x).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(layers.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run: Any = xd.compile(step)
    x = xd.distribute_tensor(torch.ones(8, CONFIG.seq, CONFIG.dim), mesh, [Shard(0), Replicate()])
    compiling = compile_clock()
    start, before = time.perf_counter(), compiling()
    run(x)
    seconds, compiled = time.perf_counter() - start, compiling() - before
    turns = []
    for _ in range(_STEPS):
        begun = time.perf_counter()
        float(run(x).full_tensor().item())
        turns.append(time.perf_counter() - begun)
    program = run._called()
    memory = program.executable.memory_analysis()
    return {
        "python s": seconds - compiled,
        "compile s": compiled,
        "step ms": 1e3 * statistics.median(turns),
        "temp kB": memory.temp_size_in_bytes / 1e3,
        "HLO kB": len(run.hlo()) / 1e3,
        "inputs": len(program.slots.state) + len(program.slots.read),
    }


def main() -> None:
    """Print the table."""
    xd.get_runtime("jax", num_cpu_devices=8)
    mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))

    def found_of(count: int, remat: str) -> dict[str, float]:
        layers: Any = torch.nn.ModuleList(Block(CONFIG) for _ in range(count))
        layers = layers if remat == "unrolled" else xd.scan_layers(layers, remat)
        return measured(mesh, xd.shard_module(layers, mesh, RULES, unmatched="replicate"))

    found_of(2, "full")
    for count in map(int, sys.argv[1:] or (4, 32)):
        for remat in ("unrolled", "none", "dots", "full"):
            if remat == "unrolled" and count > _MOST_UNROLLED:
                continue
            found = found_of(count, remat)
            figures = "  ".join(f"{name} {value:8.1f}" for name, value in found.items())
            print(f"{count:4} layers  {remat:9}  {figures}", flush=True)


if __name__ == "__main__":
    main()
