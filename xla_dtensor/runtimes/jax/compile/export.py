"""A compiled step for others: StableHLO with its shardings, and what its inputs are called.

    step/
      program.jax       jax.export.deserialize(...).call(*inputs), in a process without this library
      program.mlir      the same program as text: StableHLO, for every compiler that reads it
      signature.json    inputs and outputs in the program's order: name, shape, dtype, layout

The program is the whole step, state included: weights and optimizer state are inputs that come
back as outputs, so that who runs it hands them on from call to call. JAX keeps such files readable
for six months at least (https://docs.jax.dev/en/latest/export/export.html).
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax import export as jax_export

from xla_dtensor.core.errors import CompileError
from xla_dtensor.report.report import Held
from xla_dtensor.runtimes.jax.arrays.products import keep_product_orders
from xla_dtensor.runtimes.jax.compile.inspect import Traced
from xla_dtensor.runtimes.jax.compile.program import Blueprint

__all__ = ["write_export"]


def write_export(
    traced: Traced, executable: Any, path: str | os.PathLike[str], platforms: Sequence[str] | None
) -> None:
    """Write a program's files to a folder; see the module docstring.

    Args:
        traced: The program and the names of what it holds.
        executable: What runs it here.
        path: The folder; it is made.
        platforms: As ``jax.export.export`` takes them, "tpu" for example; None: this process's.
    """
    blueprint = traced.program.blueprint
    jitted, inputs = _flat(blueprint)
    if keep_product_orders(jitted.lower(*inputs)):
        raise CompileError(
            f"A compiled step was to be exported to path={os.fspath(path)!r}. XLA's partitioner "
            "would put tiles of one of its products on the wrong devices; here it is told how they "
            "lie, and an exported program cannot be. Export it over a mesh with fewer axes."
        )
    exported = jax_export.export(jitted, platforms=platforms)(*inputs)
    try:
        data = exported.serialize()
    except ImportError as error:
        raise CompileError(
            f"A compiled step was to be exported to path={os.fspath(path)!r}. JAX writes its files "
            "with the package flatbuffers, which is not installed. Run `pip install flatbuffers`."
        ) from error
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "program.jax").write_bytes(data)
    (folder / "program.mlir").write_text(exported.mlir_module())
    text = json.dumps(_signature(traced, executable, exported), indent=1)
    (folder / "signature.json").write_text(text + "\n")


def _flat(blueprint: Blueprint) -> tuple[Any, list[Any]]:
    """Return a program that takes arrays and returns a list of them, and its inputs' types."""
    program = blueprint.program_of(blueprint.jaxpr)
    inputs, tree = jax.tree.flatten(blueprint.inputs)
    ends = list(itertools.accumulate(len(jax.tree.leaves(group)) for group in blueprint.inputs))
    donated = [p for i in blueprint.donated for p in range(([0, *ends])[i], ends[i])]
    lie = jax.tree.leaves(blueprint.out_shardings, is_leaf=lambda node: node is None)

    def flat(*arrays: Any) -> list[Any]:
        return jax.tree.leaves(program(*jax.tree.unflatten(tree, arrays)))

    return jax.jit(flat, donate_argnums=donated, out_shardings=lie), inputs


def _signature(traced: Traced, executable: Any, exported: Any) -> dict[str, Any]:
    entries = traced.held(executable)
    return {
        "devices": exported.nr_devices,
        "platforms": list(exported.platforms),
        "mesh": dict(zip(traced.root.axis_names, traced.root.mesh_shape, strict=True)),
        "inputs": [_described(entry) for entry in entries[: len(exported.in_avals)]],
        "outputs": [
            _described(entry)
            for entry in sorted(entries, key=lambda h: -1 if h.output is None else h.output)
            if entry.output is not None
        ],
    }


def _described(entry: Held) -> dict[str, Any]:
    shape = entry.shape if entry.layers == 1 else (entry.layers, *entry.shape)
    layout = (
        entry.chosen if entry.chosen is None or entry.layers == 1 else f"[-, {entry.chosen[1:]}"
    )
    return {
        "name": entry.name,
        "role": entry.role,
        "shape": shape,
        "dtype": entry.dtype,
        "layout": layout,
    }
