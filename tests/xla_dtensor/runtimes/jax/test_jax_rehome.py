"""A traced program for other devices: the same values on them, compiled by their own compiler."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import xla_dtensor as xd
from tests.libtpu import needs_libtpu, run_with_libtpu
from xla_dtensor.errors import CompileError
from xla_dtensor.report import collectives

pytestmark = [pytest.mark.only_on("jax"), pytest.mark.usefixtures("runtime")]


def jax_mesh(devices: Any) -> Any:
    import jax

    return jax.sharding.Mesh(np.array(devices).reshape(2, 4), ("dp", "tp"))


# ---------------------------------------------------------------------- kinds of programs


def constrained(x: Any, mesh: Any, *spec: Any) -> Any:
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*spec)))


def by_scan(x: Any, mesh: Any) -> Any:
    import jax

    def body(carry: Any, row: Any) -> Any:
        return constrained(carry + row, mesh, "tp"), carry.sum()

    return jax.lax.scan(body, x[0], x)


def by_cond(x: Any, mesh: Any) -> Any:
    import jax

    def double(v: Any) -> Any:
        return constrained(v * 2, mesh, "dp", "tp")

    return jax.lax.cond(x.sum() > 0, double, lambda v: -v, x)


def by_while(x: Any, mesh: Any) -> Any:
    import jax

    def body(v: Any) -> Any:
        return constrained(v * 2 + 1, mesh, None, "tp")

    return jax.lax.while_loop(lambda v: v.sum() < 1e4, body, x)


def by_shard_map(x: Any, mesh: Any) -> Any:
    """Over one axis only: the other one stays XLA's, and constants have a type on the mesh."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec

    def one_device(tile: Any) -> Any:
        place = jax.lax.axis_index("tp").astype(tile.dtype)
        summed = jax.lax.psum(tile * (place + 1), "tp")
        return tile + summed * jnp.asarray(0.5, tile.dtype)

    mapped = jax.shard_map(
        one_device,
        mesh=mesh,
        in_specs=PartitionSpec(None, "tp"),
        out_specs=PartitionSpec(None, "tp"),
        axis_names=frozenset({"tp"}),
        check_vma=False,
    )
    return mapped(constrained(x, mesh, "dp", "tp"))


def by_nested_jit(x: Any, mesh: Any) -> Any:
    import jax

    inner = jax.jit(lambda v: constrained(v @ v.T, mesh, "dp", "tp"))
    return inner(x) + inner(x * 2)


def by_custom_vjp(x: Any, mesh: Any) -> Any:
    """Once left as it is, once already differentiated."""
    import jax

    @jax.custom_vjp
    def scaled(v: Any) -> Any:
        return constrained(v * 3, mesh, "dp", None)

    scaled.defvjp(lambda v: (scaled(v), v), lambda v, grad: (constrained(grad * v, mesh, "tp"),))
    return scaled(x), jax.grad(lambda v: (scaled(v) ** 2).sum())(x)


def by_custom_jvp(x: Any, mesh: Any) -> Any:
    import jax

    return jax.nn.relu(constrained(x, mesh, "dp", "tp")), jax.grad(lambda v: jax.nn.silu(v).sum())(
        x
    )


def by_remat(x: Any, mesh: Any) -> Any:
    import jax

    @jax.checkpoint
    def layer(v: Any) -> Any:
        return jax.numpy.tanh(constrained(v @ v.T, mesh, "dp", None))

    return jax.grad(lambda v: layer(v).sum())(x)


def by_constants(x: Any, mesh: Any) -> Any:
    """A host array, and one that lies on the devices of the trace."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    placed = jax.device_put(np.arange(8.0, dtype=np.float32), NamedSharding(mesh, PartitionSpec()))
    return x * placed + np.ones(8, np.float32)


def by_random(x: Any, mesh: Any) -> Any:
    import jax

    key = jax.random.key(0)
    return x + constrained(jax.random.normal(key, x.shape, x.dtype), mesh, "dp", "tp")


PROGRAMS: list[Callable[[Any, Any], Any]] = [
    by_scan,
    by_cond,
    by_while,
    by_shard_map,
    by_nested_jit,
    by_custom_vjp,
    by_custom_jvp,
    by_remat,
    by_constants,
    by_random,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__.removeprefix("by_"))
def test_values_are_equal_on_the_reversed_devices(program: Callable[..., Any]) -> None:
    import jax
    from jax import core as jax_core
    from jax.sharding import NamedSharding, PartitionSpec

    from xla_dtensor.runtimes.jax.compile.program import rehomed

    devices = jax.devices()[:8]
    here, there = jax_mesh(devices), jax_mesh(devices[::-1])
    x = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    lies = PartitionSpec("dp")
    traced = jax.make_jaxpr(lambda v: program(v, here))(
        jax.device_put(x, NamedSharding(here, lies))
    )
    moved = rehomed(traced, devices[::-1])

    def run(closed: Any, mesh: Any) -> list[Any]:
        # Constants are arguments, as in a step: those of the trace lie on its devices.
        consts = [np.asarray(c) if np.ndim(c) else c for c in closed.consts]
        evaluated = jax.jit(lambda v: jax_core.eval_jaxpr(closed.jaxpr, consts, v))
        return evaluated(jax.device_put(x, NamedSharding(mesh, lies)))

    expected, found = run(traced, here), run(moved, there)
    assert len(found) == len(expected) > 0
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype
        assert list(ours.sharding._device_assignment) == devices[::-1]
        np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=1e-6)


def test_a_jaxpr_called_twice_stays_one() -> None:
    import jax

    from xla_dtensor.runtimes.jax.compile.program import rehomed

    devices = jax.devices()[:8]
    inner = jax.jit(lambda v: constrained(v * 2, jax_mesh(devices), "dp"))
    traced = jax.make_jaxpr(lambda v: inner(v) + inner(v + 1))(np.ones(8, np.float32))
    moved = rehomed(traced, devices[::-1])
    called = [e.params["jaxpr"] for e in moved.jaxpr.eqns if "jaxpr" in e.params]
    assert len(called) == 2
    assert called[0] is called[1]


def test_another_number_of_devices_is_refused() -> None:
    import jax

    from xla_dtensor.runtimes.jax.compile.program import rehomed, rehomed_sharding

    devices = jax.devices()[:8]
    traced = jax.make_jaxpr(lambda v: constrained(v, jax_mesh(devices), "dp"))(np.ones(8))
    expected = r"A program over 8 devices was asked for over 4 others\..*Pass as many devices"
    with pytest.raises(CompileError, match=expected):
        rehomed(traced, devices[:4])
    assert rehomed_sharding(None, devices) is None


# ---------------------------------------------------------------------- compiled steps


def make_step(mesh: xd.DeviceMesh) -> tuple[Any, Any]:
    """A step with a constraint, a local view, a collective and a donated weight."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8, bias=False)
    weight: Any = xd.distribute_tensor(model.weight, mesh, [Replicate(), Shard(1)])
    model.weight = nn.Parameter(weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        out: Any = model(x)
        local = out.redistribute(placements=[Shard(0), Replicate()]).to_local() * 2
        whole = xd.DTensor.from_local(local, mesh, [Shard(0), Replicate()])
        loss = (whole**2).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    x = xd.distribute_tensor(torch.randn(8, 8), mesh, [Shard(0), Shard(1)])
    return xd.compile(train), x


def test_a_step_on_the_reversed_devices_communicates_alike(mesh: xd.DeviceMesh) -> None:
    import jax

    step, x = make_step(mesh)
    step(x)
    devices = jax.devices()[:8]
    text = step.hlo_for(devices[::-1])

    def kinds(hlo: str) -> list[Any]:
        return sorted((c.kind, c.axes, c.payload_bytes) for c in collectives(hlo, mesh.value))

    assert kinds(text) == kinds(step.hlo())
    assert len(kinds(text)) > 1
    assert "input_output_alias" in text.splitlines()[0]
    lowered = step.lowered_for(devices[::-1]).compile()
    given = jax.tree.leaves(lowered.input_shardings)
    assert {tuple(s._device_assignment) for s in given} == {tuple(devices[::-1])}


def test_a_rehomed_step_computes_the_same(mesh: xd.DeviceMesh) -> None:
    import jax

    from xla_dtensor.runtimes.jax.arrays.values import x64
    from xla_dtensor.runtimes.jax.compile.program import rehomed_sharding

    step, x = make_step(mesh)
    step(x)
    program = step._last
    devices = jax.devices()[:8][::-1]
    arrays = [[s.array for s in part] for part in (program.state, program.read)]
    arguments = program.holding.divided([x._local_tensor._storage.array])
    given = (*arrays, program.constants, *arguments)

    def moved(array: Any) -> Any:
        return jax.device_put(np.asarray(array), rehomed_sharding(array.sharding, devices))

    with x64():
        executable = step.lowered_for(devices).compile()
        results, state, *_ = executable(*jax.tree.map(moved, given))
        weight = np.asarray(state[0])
    loss = step(x)
    assert float(results[0]) == pytest.approx(loss.item(), rel=1e-6)
    np.testing.assert_allclose(weight, np.asarray(program.state[0].array), rtol=1e-6)


def test_a_step_before_its_first_call_has_no_program(mesh: xd.DeviceMesh) -> None:
    step, _ = make_step(mesh)
    with pytest.raises(CompileError, match="before its first call"):
        step.hlo_for([])


def test_a_step_over_another_number_of_devices_is_refused(mesh: xd.DeviceMesh) -> None:
    import jax

    step, x = make_step(mesh)
    step(x)
    with pytest.raises(CompileError, match="A program over 8 devices was asked for over 2 others"):
        step.hlo_for(jax.devices()[:2])


def test_a_step_on_one_device_is_refused() -> None:
    import jax

    step: Any = xd.compile(lambda x: x + 1)
    step(torch.ones(4))
    with pytest.raises(CompileError, match="None of its tensors lies on a mesh"):
        step.hlo_for(jax.devices()[:1])


# ---------------------------------------------------------------------- libtpu

CHILD = """
import json, sys
import jax
from jax.experimental import topologies
import xla_dtensor as xd
sys.path.insert(0, sys.argv[1])
from test_jax_rehome import make_step
xd.get_runtime("jax", num_cpu_devices=8)
mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
step, x = make_step(mesh)
loss = step(x).item()
devices = topologies.get_topology_desc("v5e:2x4", "tpu").devices
text = step.hlo_for(sorted(devices, key=lambda device: device.id))
print(json.dumps({"hlo": text, "loss": loss}))
"""


@pytest.mark.thorough
@needs_libtpu
def test_libtpu_compiles_a_step_traced_on_cpu(mesh: xd.DeviceMesh, tmp_path: Path) -> None:
    printed = run_with_libtpu(CHILD, str(Path(__file__).parent), folder=tmp_path)
    text = json.loads(printed.splitlines()[-1])["hlo"]
    # Memory laid out in tiles is a TPU's.
    assert "num_partitions=8" in text.splitlines()[0]
    assert ":T(2,128)}" in text
    assert "input_output_alias" in text.splitlines()[0]
    found = {(c.kind, c.axes) for c in collectives(text, mesh.value)}
    assert ("all-reduce", ("dp",)) in found or ("all-reduce", ("dp", "tp")) in found
    assert any("tp" in (axes or ()) for _, axes in found)
