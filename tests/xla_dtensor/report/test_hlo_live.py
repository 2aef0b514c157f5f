"""Programs compiled here, whose collectives are known, read back."""

import itertools
import math
import os

os.environ.setdefault("NPROC", "64")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from mesh_utils import Mesh
from xla_dtensor.report import collectives, num_partitions, summarize

SHAPES = {(2, 4): ("dp", "tp"), (2, 2, 2): ("pp", "dp", "tp")}
BLOCK_BYTES = 16 * 8 * 4  # each device has float32 [16, 8]

# What each primitive does to [16, 8] over n devices: its kind, and the bytes in and out.
PRIMITIVES = {
    "psum": ("all-reduce", lambda n: (BLOCK_BYTES, BLOCK_BYTES)),
    "pmax": ("all-reduce", lambda n: (BLOCK_BYTES, BLOCK_BYTES)),
    "all_gather": ("all-gather", lambda n: (BLOCK_BYTES, BLOCK_BYTES * n)),
    "psum_scatter": ("reduce-scatter", lambda n: (BLOCK_BYTES, BLOCK_BYTES // n)),
    "all_to_all": ("all-to-all", lambda n: (BLOCK_BYTES, BLOCK_BYTES)),
    "ppermute": ("collective-permute", lambda n: (BLOCK_BYTES, BLOCK_BYTES)),
}
CASES = [
    (primitive, shape, axes)
    for primitive in PRIMITIVES
    for shape, names in SHAPES.items()
    for count in range(1, len(names) + 1)
    for axes in itertools.combinations(names, count)
]


def apply(primitive: str, x: jax.Array, axes: tuple[str, ...], size: int) -> jax.Array:
    match primitive:
        case "psum":
            return lax.psum(x, axes)
        case "pmax":
            return lax.pmax(x, axes)
        case "all_gather":
            return lax.all_gather(x, axes, tiled=True)
        case "psum_scatter":
            return lax.psum_scatter(x, axes, tiled=True)
        case "all_to_all":
            return lax.all_to_all(x, axes, 0, 1, tiled=True)
    return lax.ppermute(x, axes, [(place, (place + 1) % size) for place in range(size)])


def meshes(shape: tuple[int, ...], permuted: bool) -> tuple[jax.sharding.Mesh, Mesh]:
    ids = np.random.default_rng(1).permutation(8) if permuted else np.arange(8)
    devices = np.array(jax.devices())[ids].reshape(shape)
    return jax.sharding.Mesh(devices, SHAPES[shape]), Mesh(ids, shape, SHAPES[shape])


def text_of(lowered: jax.stages.Lowered) -> str:
    text = lowered.compile().as_text()
    assert text is not None
    return text


def compiled_text(primitive: str, jax_mesh: jax.sharding.Mesh, axes: tuple[str, ...]) -> str:
    size = math.prod(jax_mesh.shape[axis] for axis in axes)
    spec = PartitionSpec(jax_mesh.axis_names)
    step = jax.shard_map(
        lambda x: apply(primitive, x, axes, size),
        mesh=jax_mesh,
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )
    x = jax.ShapeDtypeStruct((16 * 8, 8), jnp.float32, sharding=NamedSharding(jax_mesh, spec))
    return text_of(jax.jit(step).lower(x))


@pytest.mark.parametrize("permuted", [False, True], ids=["in-order", "permuted"])
@pytest.mark.parametrize(("primitive", "shape", "axes"), CASES)
def test_each_primitive_over_each_subset_of_axes(primitive, shape, axes, permuted):
    jax_mesh, mesh = meshes(shape, permuted)
    text = compiled_text(primitive, jax_mesh, axes)
    (item,) = collectives(text, mesh)
    kind, sizes = PRIMITIVES[primitive]
    n = math.prod(mesh.size(axis) for axis in axes)
    assert (item.kind, item.axes) == (kind, axes)
    assert (item.operand_bytes, item.result_bytes) == sizes(n)
    assert (item.executions, item.in_loop) == (1, False)
    assert item.op_name is not None
    assert item.source_file == __file__
    assert num_partitions(text) == 8


def test_the_check_of_axes_can_fail():
    """The same program against a mesh whose axes lie otherwise."""
    jax_mesh, _ = meshes((2, 4), permuted=False)
    text = compiled_text("psum", jax_mesh, ("tp",))
    (item,) = collectives(text, Mesh.arange((4, 2), ("dp", "tp")))
    assert item.axes == ("dp:(2)2", "tp")


def test_a_sharded_matmul_reduces_over_the_contracted_axis():
    jax_mesh, mesh = meshes((2, 4), permuted=False)

    def argument(shape: tuple[int, ...], *spec: str | None) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(jax_mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    step = jax.jit(jnp.matmul, out_shardings=NamedSharding(jax_mesh, PartitionSpec("dp")))
    lowered = step.lower(argument((16, 64), "dp", "tp"), argument((64, 32), "tp", None))
    (item,) = collectives(text_of(lowered), mesh)
    assert (item.kind, item.axes, item.payload_bytes) == ("all-reduce", ("tp",), 8 * 32 * 4)


def test_loops_in_loops_multiply():
    jax_mesh, mesh = meshes((2, 4), permuted=False)

    def inner(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
        return lax.psum(jnp.sin(carry), "tp"), None

    def outer(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
        carry = lax.pmax(jnp.cos(carry), "dp")
        return lax.scan(inner, carry, None, length=3)[0], None

    spec = PartitionSpec(("dp", "tp"))
    step = jax.shard_map(
        lambda x: lax.scan(outer, x, None, length=7)[0],
        mesh=jax_mesh,
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )
    text = text_of(jax.jit(step).lower(jnp.ones((64, 8))))
    rows = {row.axes: (row.count, row.at_least) for row in summarize(collectives(text, mesh))}
    assert rows == {("tp",): (21, False), ("dp",): (7, False)}


def test_a_while_loop_of_unknown_length_is_said_to_be_so():
    jax_mesh, mesh = meshes((2, 4), permuted=False)

    def step(x: jax.Array) -> jax.Array:
        return lax.while_loop(lambda y: y[0, 0] < 100, lambda y: lax.psum(y, "tp") + 1, x)

    spec = PartitionSpec("dp", None)
    mapped = jax.shard_map(step, mesh=jax_mesh, in_specs=spec, out_specs=spec, check_vma=False)
    text = text_of(jax.jit(mapped).lower(jnp.ones((64, 8))))
    (item,) = collectives(text, mesh)
    assert (item.axes, item.in_loop, item.executions) == (("tp",), True, None)
