"""What is taken from JAX's private modules, and the public name that each of these waits for.

The text of a test says which public function or attribute would replace the one it tests. A test
that fails on a new JAX says what that release has moved.
"""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp = jax.numpy

from jax.extend import core  # noqa: E402 - JAX may be missing

from xla_dtensor.runtimes.jax.arrays import private as jax_private  # noqa: E402 - it imports JAX

ROOT = Path(__file__).parents[4]
PACKAGES = ("xla_dtensor", "mesh_utils")

pytestmark = pytest.mark.only_on("jax")


def mesh_of_two() -> Any:
    return jax.sharding.Mesh(np.array(jax.devices()[:2]), ("a",))


def named(mesh: Any, *spec: Any) -> Any:
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))


# ------------------------------------------------------------------ the rule


def private_uses(source: str) -> list[str]:
    """Imports of ``jax._src``, and of jaxlib, which has no public part."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return [name for name in names if name.startswith(("jax._src", "jaxlib"))]


def test_private_uses_are_seen() -> None:
    assert private_uses("def f():\n    from jax._src import core") == ["jax._src.core"]
    assert private_uses("import jaxlib.mlir") == ["jaxlib.mlir"]


def test_one_file_uses_private_modules() -> None:
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    users = {path.name for path in files if private_uses(path.read_text(encoding="utf-8"))}
    assert users == {"private.py"}


def test_nothing_of_jax_is_given_out() -> None:
    for name in jax_private.__all__:
        value = getattr(jax_private, name)
        assert inspect.isfunction(value) or inspect.isclass(value), name
        assert value.__module__ == jax_private.__name__, name


# ------------------------------------------------------------------ jaxprs


def closed_with_constant() -> Any:
    constant = jnp.arange(3.0)
    return jax.make_jaxpr(lambda x: x * constant)(jnp.ones(3))


def test_open_jaxpr_and_is_jaxpr() -> None:
    """``jax.extend.core.Jaxpr`` alone, once JAX 0.10 is no longer supported."""
    closed = closed_with_constant()
    assert jax_private.is_jaxpr(closed)
    assert jax_private.is_jaxpr(jax_private.open_jaxpr(closed))
    assert not jax_private.is_jaxpr(closed.eqns)
    assert isinstance(jax_private.open_jaxpr(closed), core.Jaxpr)


def test_constants_of() -> None:
    """``jaxpr.consts``, once JAX 0.10 is no longer supported."""
    (constant,) = jax_private.constants_of(closed_with_constant())
    assert constant.tolist() == [0, 1, 2]


def test_inputs_only() -> None:
    """``jaxpr.with_consts([])``, once JAX 0.10 is no longer supported."""
    closed = closed_with_constant()
    jaxpr = jax_private.inputs_only(closed)
    assert len(jaxpr.invars) == 2
    assert not jaxpr.constvars
    assert not jax_private.constants_of(jaxpr)
    (found,) = jax.core.eval_jaxpr(jaxpr, (), *jax_private.constants_of(closed), jnp.full(3, 2.0))
    assert found.tolist() == [0, 2, 4]


def test_with_constants() -> None:
    """``jaxpr.with_consts(values)``, once JAX 0.10 is no longer supported."""
    open_one = jax_private.open_jaxpr(closed_with_constant())
    closed = jax_private.with_constants(open_one, [jnp.full(3, 5.0)])
    assert core.jaxpr_as_fun(closed)(jnp.ones(3))[0].tolist() == [5, 5, 5]


def test_context_on_mesh() -> None:
    """A public constructor of ``jax.extend.core.JaxprEqn.ctx`` with another mesh."""
    mesh = mesh_of_two()
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        closed = jax.make_jaxpr(lambda x: x + 1)(jnp.ones(4))
    (equation,) = closed.eqns
    assert equation.ctx.cur_abstract_mesh == mesh.abstract_mesh
    other = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("b",)).abstract_mesh
    moved = jax_private.context_on_mesh(equation.ctx, other)
    assert moved.cur_abstract_mesh == other
    assert moved.compute_type == equation.ctx.compute_type
    assert moved.threefry_partitionable == equation.ctx.threefry_partitionable
    assert moved.xla_metadata == equation.ctx.xla_metadata


def test_context_on_mesh_keeps_metadata() -> None:
    """The same."""
    from jax.experimental.xla_metadata import set_xla_metadata

    mesh = mesh_of_two().abstract_mesh
    with set_xla_metadata(kind="test"):
        (equation,) = jax.make_jaxpr(lambda x: x + 1)(jnp.ones(4)).eqns
    assert jax_private.context_on_mesh(equation.ctx, mesh).xla_metadata == {"kind": "test"}


def test_partial_evaluation() -> None:
    """A public form of what ``jax.checkpoint`` does to a jaxpr with a policy."""
    closed = jax.make_jaxpr(lambda x, g: (jnp.sin(x), jnp.cos(x) * g))(1.0, 1.0)
    jaxpr = jax_private.inputs_only(closed)
    parts = jax_private.partial_evaluation(
        jaxpr, [False, True], [False, True], jax.checkpoint_policies.everything_saveable
    )
    sine, *saved = jax.core.eval_jaxpr(parts.known, (), 2.0)
    assert parts.num_saved == len(saved) == 1
    assert saved[0] == pytest.approx(np.cos(2.0))
    assert sine == pytest.approx(np.sin(2.0))
    assert list(parts.is_staged) == [False, True]


# ------------------------------------------------------------------ values and programs


def test_trace_of() -> None:
    """``jax.extend.core.find_top_trace``, if it gave the trace of a tracer of an outer trace."""

    def outer(x: Any) -> Any:
        def inner(y: Any) -> Any:
            with core.set_current_trace(jax_private.trace_of(x)):
                z = x + 1  # an equation of the outer trace, from inside of the inner one
            return y + z

        inner_jaxpr = jax.make_jaxpr(inner)(2.0)
        assert len(inner_jaxpr.eqns) == 1
        return x

    assert len(jax.make_jaxpr(outer)(1.0).eqns) == 1
    assert jax_private.trace_of(1.0) is None
    assert jax_private.trace_of(jnp.ones(1)) is None


def test_device_ids() -> None:
    """An ordered ``Sharding.device_assignment``; ``device_set`` has no order."""
    devices = jax.devices()[:2][::-1]
    mesh = jax.sharding.Mesh(np.array(devices), ("a",))
    assert jax_private.device_ids(named(mesh, "a")) == tuple(device.id for device in devices)


def test_hlo_sharding_text() -> None:
    """A public ``Sharding.to_hlo_sharding(ndim)``."""
    sharding = named(mesh_of_two(), None, "a")
    assert jax_private.hlo_sharding_text(sharding, 2) == "{devices=[1,2]<=[2]}"


def test_inputs_of_programs() -> None:
    """``kept_inputs`` of ``jax.stages.Lowered`` and ``jax.stages.Compiled``."""
    lowered = jax.jit(lambda unused, x: x + 1).lower(1.0, 2.0)
    assert jax_private.lowered_inputs(lowered) == [1]
    assert jax_private.executable_inputs(lowered.compile(), 2) == [1]
    nothing = jax.jit(lambda unused: 1.0).lower(1.0).compile()
    assert jax_private.executable_inputs(nothing, 1) == []


# ------------------------------------------------------------------ frames and names


def frames(equation: Any) -> list[str]:
    return [frame.function_name for frame in equation.source_info.traceback.frames]


def test_frames_of() -> None:
    """A public context that sets the traceback of equations (``source_info_util`` sets names)."""

    def elsewhere() -> Any:
        with jax.named_scope("block"):
            return jax_private.frames_here()

    origin = elsewhere()

    def traced(x: Any) -> Any:
        with jax_private.frames_of(origin, "backward"):
            x = x + 1
        return x * 2

    inside, outside = jax.make_jaxpr(traced)(1.0).eqns
    assert str(inside.source_info.name_stack) == "backward/block"
    assert any("elsewhere" in name for name in frames(inside))
    assert str(outside.source_info.name_stack) == ""
    assert not any("elsewhere" in name for name in frames(outside))


def test_frames_of_equation() -> None:
    """``jax.core.eval_jaxpr``, if one equation could be evaluated by itself."""

    def elsewhere(x: Any) -> Any:
        with jax.named_scope("inner"):
            return x + 1

    (old,) = jax.make_jaxpr(elsewhere)(1.0).eqns

    def traced(x: Any) -> Any:
        with jax.named_scope("outer"), jax_private.frames_of_equation(old):
            return x + 1

    (new,) = jax.make_jaxpr(traced)(1.0).eqns
    assert str(new.source_info.name_stack) == "outer/inner"
    assert any("elsewhere" in name for name in frames(new))


def test_line_of_equation() -> None:
    """``jax.extend.source_info_util.summarize``, if it gave the function as well."""

    def doubled(x: Any) -> Any:
        return x * 2

    (equation,) = jax.make_jaxpr(doubled)(1.0).eqns
    line = doubled.__code__.co_firstlineno + 1
    name = "test_line_of_equation.<locals>.doubled"
    assert jax_private.line_of_equation(equation) == f"{__file__}:{line} ({name})"


def test_leave_out_frames_of(tmp_path: Path) -> None:
    """``jax.extend.source_info_util.register_inclusion``, and a way to ask what is registered."""
    from jax._src import source_info_util

    package, models = tmp_path / "package", tmp_path / "package" / "models"
    for _ in range(2):
        jax_private.leave_out_frames_of(package, but=models)
    assert source_info_util._exclude_paths.count(f"{package}/") == 1
    assert not source_info_util.is_user_filename(str(package / "a.py"))
    assert source_info_util.is_user_filename(str(models / "a.py"))
    assert source_info_util.is_user_filename(str(tmp_path / "a.py"))


# ------------------------------------------------------------------ listeners


def test_around_listeners() -> None:
    """Nothing: that JAX calls users' code of itself, at any time, is no interface's matter."""
    heard: list[str] = []

    def listen(event: str, **_: Any) -> None:
        heard.append(event)

    jax.monitoring.register_event_listener(listen)
    try:
        with jax_private.around_listeners(lambda: heard.append("("), lambda: heard.append(")")):
            jax.monitoring.record_event("/a")
        jax.monitoring.record_event("/b")
    finally:
        jax.monitoring.unregister_event_listener(listen)
    assert heard == ["(", "/a", ")", "/b"]


# ------------------------------------------------------------------ processes


def test_devices_have_started() -> None:
    """``jax.extend.backend.backends_are_initialized``."""
    jax.devices()
    assert jax_private.devices_have_started()


def test_job_of_a_process_alone() -> None:
    """``jax.distributed.client()`` or alike: its key-value store and barrier are not public.

    Jobs of several processes are tested where they are used (processes, data, checkpoints).
    """
    assert jax_private.job() is None


def test_present_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """A public way to ask which cluster ``jax.distributed.initialize`` would detect."""
    for name, value in {
        "SLURM_JOB_ID": "7",
        "SLURM_NTASKS": "4",
        "SLURM_PROCID": "3",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_NODELIST": "host[1-2]",
    }.items():
        monkeypatch.setenv(name, value)
    cluster = jax_private.present_cluster()
    assert cluster is not None
    assert cluster.name == "slurm"
    assert (cluster.num_processes(), cluster.process_id(), cluster.local_process_id()) == (4, 3, 1)
    assert cluster.coordinator_address(1, "1234") == "host1:1234"
    monkeypatch.delenv("SLURM_JOB_ID")
    for name in ("OMPI_MCA_orte_hnp_uri", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    assert jax_private.present_cluster() is None


def test_through_hlo() -> None:
    """A public way back from HLO to StableHLO; ``compiler_ir("hlo")`` is the way there."""
    import jax

    lowered: Any = jax.jit(lambda x: (x.T @ x) + 1).lower(jax.numpy.ones((4, 3)))
    text = jax_private.through_hlo(lowered.compiler_ir("stablehlo").operation)
    assert "stablehlo.dot" in text
    assert "stablehlo.add" in text
