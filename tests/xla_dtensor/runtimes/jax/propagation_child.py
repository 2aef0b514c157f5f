"""Compares the cuts of products that we find before compiling with what XLA says it found.

    python -m tests.xla_dtensor.runtimes.jax.propagation_child FOLDER

XLA writes its programs into FOLDER, which it can only be told when a process starts. For each
program: how many products it has, and how many of them are cut as was found.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from jax.extend.mlir import ir
from torch.distributed.tensor import Replicate, Shard

import xla_dtensor as xd
from tests.hosts import QUICK_COMPILER
from tests.xla_dtensor.dtensor.product_programs import (
    attention,
    check_gradients,
    heads,
    two_layers,
)
from xla_dtensor.runtimes.jax.arrays.products import (
    cut_of,
    keep_product_orders,
    meshes_of,
    operations,
    propagated,
)
from xla_dtensor.runtimes.jax.compile import program as jax_rehome

_PROGRAMS = [
    (heads, ("221", "---", "-1-")),
    (heads, ("1-1", "101", "101")),
    (two_layers, ("0-1", "-01", "--0")),
    (attention, ("02-", "-0-", "110", "10-", "011")),
]


def _products(module: Any) -> Counter[str]:
    """How the factors and the result of each product lie, as text; uncut ones as unknown ones."""
    meshes = meshes_of(module)
    found: Counter[str] = Counter()
    for op in operations(module):
        if op.name in ("stablehlo.dot_general", "stablehlo.dot"):
            cuts = [cut_of(value, meshes) for value in (*op.operands, op.result)]
            dims = [cut.dims if cut and any(cut.dims) else None for cut in cuts]
            found[f"{op.result.type} {dims}"] += 1
    return found


def _scanned(mesh: xd.DeviceMesh) -> None:
    """A loop whose weights are read by a function that it calls."""
    layers = xd.scan_layers([torch.nn.Linear(8, 8) for _ in range(3)])
    plan = {"*.weight": ["b", "a"], "*.bias": ["b"]}
    layers = xd.shard_module(layers, mesh, plan)
    x = xd.distribute_tensor(torch.ones(8, 8), mesh, [Shard(0), Replicate(), Replicate()])
    xd.compile(lambda: layers(x).sum().backward())()


def _main(folder: Path) -> None:
    os.environ.update(NPROC="64", JAX_PLATFORMS="cpu")
    dump = f"--xla_dump_to={folder} --xla_dump_hlo_pass_re=.*shardy.*"
    os.environ["XLA_FLAGS"] = f"{QUICK_COMPILER} {dump}"
    xd.get_runtime("jax", num_cpu_devices=8)
    mesh = xd.init_device_mesh("xla", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
    ours: list[Counter[str]] = []

    def keep(lowered: Any) -> int:
        told = keep_product_orders(lowered)
        module = lowered.compiler_ir("stablehlo").operation
        with module.context, ir.Location.unknown():
            ours.append(_products(propagated(module)))
        contexts.append(module.context)
        return told

    contexts: list[Any] = []
    jax_rehome.keep_product_orders = keep
    for program, lies in _PROGRAMS:
        told = [[Replicate() if p == "-" else Shard(int(p)) for p in each] for each in lies]
        check_gradients(mesh, program, told, True)
    _scanned(mesh)
    theirs: list[Counter[str]] = []
    with contexts[0], ir.Location.unknown():
        for file in sorted(folder.glob("shardy/*/02.after_propagation.mlir"), key=_made):
            theirs.append(_products(ir.Module.parse(file.read_text()).operation))
    for found, said in zip((each for each in ours if each), filter(None, theirs), strict=True):
        print(found.total(), (found & said).total())


def _made(file: Path) -> float:
    return file.stat().st_mtime


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
