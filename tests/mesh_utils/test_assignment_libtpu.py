"""Searched meshes against the TPU compiler: it takes an all-gather and an all-reduce on every axis.

A bad order of devices makes libtpu refuse, or abort the process (a random one of v5e 16x16 does),
so a child process compiles. Snakes, rings, blocks and strided axes are among the meshes.
"""

import json
from pathlib import Path

from mesh_utils import Topology, assign
from tests.libtpu import needs_libtpu, run_with_libtpu

pytestmark = needs_libtpu

MESHES: list[tuple[str, tuple[int, ...]]] = [
    ("v5e:16x16", (64, 4)),
    ("v5e:16x16", (32, 8)),
    ("v5e:16x16", (16, 2, 8)),
    ("v5e:16x16", (2, 128)),
    ("v5e:8x8", (16, 4)),
    ("v6e:4x4", (2, 8)),
    ("v5p:4x4x8", (2, 4, 16)),
    ("v5p:4x4x12", (6, 32)),
    ("v5p:8x8x8", (8, 8, 8)),
    ("tpu7x:2x2x4", (4, 8)),
]

PROGRAM = """
import json, sys
import jax, numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from mesh_utils import create_device_mesh

for name, shape, wrap in json.loads(sys.argv[1]):
    options = {"wrap": tuple(wrap)} if any(wrap) else {}
    devices = topologies.get_topology_desc(name, "tpu", **options).devices
    placed = create_device_mesh(tuple(shape), devices)
    names = tuple("abc"[: len(shape)])
    mesh = Mesh(placed, names)
    for axis in names:
        spec = PartitionSpec(axis)
        steps = {
            "all-gather": lambda x: jax.lax.all_gather(x, axis, tiled=True),
            "all-reduce": lambda x: jax.lax.psum(x, axis),
        }
        for kind, step in steps.items():
            mapped = jax.shard_map(
                step, mesh=mesh, in_specs=spec, out_specs=PartitionSpec(), check_vma=False
            )
            size = mesh.shape[axis]
            x = jax.ShapeDtypeStruct(
                (8 * size, 128), "float32", sharding=NamedSharding(mesh, spec)
            )
            text = jax.jit(mapped).lower(x).compile().as_text()
            print(json.dumps([name, shape, axis, kind, kind in text]))
    print(json.dumps([name, shape, "ids", np.vectorize(lambda d: d.id)(placed).tolist()]))
"""


def test_libtpu_takes_searched_meshes(tmp_path: Path) -> None:
    asked = [(name, shape, Topology.parse(name).wrap) for name, shape in MESHES]
    printed = run_with_libtpu(PROGRAM, json.dumps(asked), folder=tmp_path, time_limit_seconds=500)
    found = [json.loads(line) for line in printed.splitlines()]
    compiled = [line for line in found if line[2] != "ids"]
    assert len(compiled) == sum(2 * len(shape) for _, shape in MESHES)
    assert all(line[-1] for line in compiled), [line for line in compiled if not line[-1]]
    placed = [line for line in found if line[2] == "ids"]
    for (name, shape), line in zip(MESHES, placed, strict=True):
        # libtpu's own devices are laid out as those that the topology describes.
        assert line[3] == assign(Topology.parse(name), shape).device_ids.tolist()
