"""Compiles one small program for one kind of TPU, on one slice and on two; needs jax alone.

    python tools/try_xla_flags_child.py v6e 2x4 1,2

prints a line of JSON for each number of slices: {"slices": 1, "collectives": ["all-gather", ...]},
or {"slices": 1, "error": "FAILED_PRECONDITION: ..."}. Flags are in LIBTPU_INIT_ARGS, which libtpu
reads once; a flag that it does not know ends the process.

The program is the gradient of layers whose weights are gathered over the axis fsdp, so that their
gradients are scattered; values change sides by all-to-all, pass to the next device, and the loss is
summed over both axes.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

KINDS = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
WIDTH, INNER, LAYERS, TOKENS = 512, 1024, 4, 1024


def program(mesh: Mesh) -> Any:
    """The gradients of the loss by the weights, and the loss."""
    size = mesh.shape["fsdp"]
    ring = [(i, (i + 1) % size) for i in range(size)]

    def layer(x: Any, weights: tuple[Any, Any]) -> tuple[Any, None]:
        up, down = weights
        y = jnp.tanh(x @ jax.lax.all_gather(up, "fsdp", axis=1, tiled=True))
        y = jax.lax.all_to_all(y, "fsdp", 1, 0, tiled=True)
        y = jax.lax.all_to_all(jnp.sin(y), "fsdp", 0, 1, tiled=True)
        z = y @ jax.lax.all_gather(down, "fsdp", axis=0, tiled=True)
        return jnp.tanh(jax.lax.ppermute(z, "fsdp", ring)), None

    def loss(x: Any, up: Any, down: Any) -> Any:
        last, _ = jax.lax.scan(layer, x, (up, down))
        return jax.lax.pmean((last.astype(jnp.float32) ** 2).sum(), ("dp", "fsdp"))

    specs = (P(("dp", "fsdp")), P(None, None, "fsdp"), P(None, "fsdp"))
    whole = jax.shard_map(loss, mesh=mesh, in_specs=specs, out_specs=P())
    shapes = (
        (TOKENS * mesh.shape["dp"], WIDTH),
        (LAYERS, WIDTH, INNER),
        (LAYERS, INNER, WIDTH),
    )
    arguments = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    ]
    return jax.jit(jax.value_and_grad(whole, (1, 2))).lower(*arguments)


def collectives(chip: str, shape: str, slices: int) -> list[str]:
    """Compiles the program, and says which collectives stand in what libtpu made of it."""
    options = {"num_slices": slices} if slices > 1 else {}
    devices = topologies.get_topology_desc(f"{chip}:{shape}", platform="tpu", **options).devices
    mesh = Mesh(np.array(devices).reshape(slices, -1), ("dp", "fsdp"))
    text = program(mesh).compile().as_text()
    return [kind for kind in KINDS if re.search(rf" {kind}(-start)?\(", text)]


def main(chip: str, shape: str, slices: str) -> None:
    """Compiles for each number of slices."""
    for number in map(int, slices.split(",")):
        row: dict[str, Any] = {"slices": number}
        try:
            row["collectives"] = collectives(chip, shape, number)
        except Exception as error:
            row["error"] = next(iter(str(error).splitlines()), type(error).__name__).strip()
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
