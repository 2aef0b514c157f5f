"""The roles' bytes of a sharded program equal what libtpu's compiler says, padding included."""

from __future__ import annotations

import json
from pathlib import Path

from mesh_utils import Mesh
from tests.libtpu import needs_libtpu, run_with_libtpu
from xla_dtensor.report import CompilerMemory, Evidence, Held
from xla_dtensor.report.memory import memory_report

START = """
import json
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

found = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2x1")
mesh = Mesh(np.array(found.devices).reshape(2, 2), ("dp", "tp"))
def array(shape, dtype, *axes):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*axes)))
"""
END = """
said = compiled.memory_analysis()
names = ("argument", "output", "alias", "temp", "generated_code")
print(json.dumps([compiled.as_text(), [getattr(said, f"{n}_size_in_bytes") for n in names]]))
"""
PROGRAM = f"""{START}
def step(weight, moment, rate, batch):
    moment = moment + (batch.T @ batch)[:6].astype(jnp.float32)
    return (weight - rate * moment).astype(weight.dtype), moment, batch.sum()
compiled = jax.jit(step, donate_argnums=(0, 1)).lower(
    array((6, 300), jnp.bfloat16, "dp", "tp"), array((6, 300), jnp.float32, "dp", "tp"),
    array((), jnp.float32), array((10, 300), jnp.bfloat16, "dp", None),
).compile()
{END}"""

# The shapes of one device's shards, by hand.
HELD = (
    Held("weight", "parameter", (6, 300), "bf16", (3, 150), input=0, output=0),
    Held("moment", "optimizer state", (6, 300), "f32", (3, 150), input=1, output=1),
    Held("rate", "number", (), "f32", (), input=2),
    Held("batch", "argument", (10, 300), "bf16", (5, 300), input=3),
    Held("sum", "result", (), "bf16", (), output=2),
)


@needs_libtpu
def test_roles_equal_what_the_compiler_says(tmp_path: Path) -> None:
    text, sizes = json.loads(run_with_libtpu(PROGRAM, folder=tmp_path).splitlines()[-1])
    said = CompilerMemory(*sizes)
    mesh = Mesh(list(range(4)), (2, 2), ("dp", "tp"))
    report = memory_report(Evidence("a test", text, mesh, held=HELD, memory=said))
    inputs = {one.role for one in HELD if one.input is not None}
    parts = {part.role: part for part in report.parts}
    assert sum(parts[role].memory_bytes for role in inputs) == said.arguments
    assert {role: parts[role].device_bytes for role in inputs} == {
        "parameter": 3 * 150 * 2,
        "optimizer state": 3 * 150 * 4,
        "number": 4,
        "argument": 5 * 300 * 2,
    }
    assert all(parts[role].padding_bytes > 0 for role in inputs)
    assert report.unexplained_bytes == 0
    assert report.total_bytes == said.total_bytes
    assert "state not updated in place" not in parts
    assert "unnamed" not in parts


MANY = f"""{START}
def step(weights, rate):
    return [weight - rate for weight in weights]
compiled = jax.jit(step, donate_argnums=0).lower(
    [array((4, 300), jnp.float32, "dp", "tp")] * 2001, array((), jnp.float32)
).compile()
{END}"""


@needs_libtpu
def test_more_arrays_than_are_handed_over_one_by_one(tmp_path: Path) -> None:
    text, sizes = json.loads(run_with_libtpu(MANY, folder=tmp_path).splitlines()[-1])
    assert "entry_computation_layout={((" in text  # they come as one tuple
    said = CompilerMemory(*sizes)
    held = tuple(
        Held(f"w{i}", "parameter", (4, 300), "f32", (2, 150), input=i, output=i)
        for i in range(2001)
    )
    held = (*held, Held("rate", "number", (), "f32", (), input=2001))
    mesh = Mesh(list(range(4)), (2, 2), ("dp", "tp"))
    report = memory_report(Evidence("a test", text, mesh, held=held, memory=said))
    assert report.not_read == ""
    assert report.unexplained_bytes == 0
    parts = {part.role: part for part in report.parts}
    assert parts["parameter"].device_bytes == 2001 * 2 * 150 * 4
    assert "state not updated in place" not in parts
    assert report.total_bytes == said.total_bytes
