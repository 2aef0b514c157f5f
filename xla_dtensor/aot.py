"""compile_for(...): compile a PyTorch training step for a machine that is not here.

    def llama(mesh):                       makes model, step, inputs and placements (training_plan)
        ...
    report = compile_for(llama, topology="v5p:8x8x8", mesh={"fsdp": 128, "tp": 4})
    report.fits, report.findings

The step is traced with parameters that have no values and compiled by libtpu, the compiler that the
pod itself would use, in a process of its own: libtpu can end the process that asks it about a bad
mesh, and takes memory that should be given back. What comes back is the step's evidence, from which
the report is made here.

Nothing runs. What the report says of memory and collectives is the compiler's; what it says of time
is modelled.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mesh_utils import Axis, JobConfig, Mesh, Topology, assign
from xla_dtensor.aot_process import LIBTPU_ENVIRONMENT, CompilingProcess
from xla_dtensor.aot_request import Request, name_function
from xla_dtensor.errors import CompileError
from xla_dtensor.report.evidence import Evidence

if TYPE_CHECKING:
    from xla_dtensor.report.compile_report import CompileReport

__all__ = ["compile_for", "evidence_for"]


def compile_for(
    step: str | Callable[..., Any],
    topology: str | Topology | JobConfig,
    mesh: Mesh | Mapping[str, int] | None = None,
    **options: Any,
) -> CompileReport:
    """Compile a training step for a topology, and report what it will do there.

    Args:
        step: A function of the mesh that returns model, step, inputs and placements (see
            :mod:`xla_dtensor.training_plan`), or its name: "package.module:function",
            "file.py:function". It is called in another process, so it must be a file's own.
        topology: The machine: a name such as "v5p:8x8x8" or "2xv5e:16x16", a Topology, or a
            job with its axes.
        mesh: The axes: sizes by name, which are laid out by :func:`mesh_utils.assign`, or a mesh
            over the topology's device ids. None for a job's own.
        **options: Those of :func:`evidence_for`.

    Returns:
        The report.

    Raises:
        CompileError: The function cannot be imported or gives something else, libtpu refuses or
            ends, or a limit is reached.
        MeshError: A topology or mesh of which there is none.

    Example:
        >>> report = compile_for("my_model:build", "v5e:4x4", {"dp": 16})  # doctest: +SKIP
        >>> report.fits  # doctest: +SKIP
        True
    """
    from xla_dtensor.report.compile_report import CompileReport

    return CompileReport.of(evidence_for(step, topology, mesh, **options))


def evidence_for(
    step: str | Callable[..., Any],
    topology: str | Topology | JobConfig,
    mesh: Mesh | Mapping[str, int] | None = None,
    *,
    keywords: Mapping[str, Any] | None = None,
    title: str | None = None,
    command: str = "",
    executable: str | os.PathLike[str] | None = None,
    cache: str | os.PathLike[str] | bool = True,
    python: str | None = None,
    time_limit_seconds: float | None = 3600,
    memory_limit_bytes: int | None = None,
    progress: bool = True,
) -> Evidence:
    """Compile a training step for a topology, and return the evidence that it leaves.

    Args:
        step: As for :func:`compile_for`.
        topology: The same.
        mesh: The same.
        keywords: Further arguments of the function; values that JSON has.
        title: What the report is called; the function's name when None.
        command: What makes it again, for the report.
        executable: Where to save the compiled program; a step on the pod takes it with
            ``compiled.load(path)``.
        cache: A folder in which results are kept, by program and versions; True for
            ``~/.cache/xla_dtensor/preflight``, False for none.
        python: The interpreter of the child, of an environment with jax and libtpu. None for this.
        time_limit_seconds: After this the child is ended. None for no limit.
        memory_limit_bytes: When the child holds more, it is ended. None for no limit.
        progress: Whether to say on stderr what is being done.

    Returns:
        The evidence.

    Raises:
        CompileError: As for :func:`compile_for`.
        MeshError: The same.
    """
    machine = topology.topology() if isinstance(topology, JobConfig) else _topology(topology)
    name = name_function(step)
    laid = _mesh(mesh, topology, machine)
    flags = topology.environment() if isinstance(topology, JobConfig) else {}
    request = Request(
        function=name,
        keywords=dict(keywords or {}),
        topology=machine.name,
        wrap=None if machine.wrap is None else tuple(machine.wrap),
        device_ids=tuple(laid.device_ids.reshape(-1).tolist()),
        mesh_shape=laid.mesh_shape,
        axis_names=laid.axis_names,
        title=title or f"{name.rpartition(':')[2]} on {machine.name}",
        command=command,
        flags=flags,
        executable="" if executable is None else str(Path(executable).resolve()),
        cache=_cache(cache),
    )
    with tempfile.TemporaryDirectory(prefix="xla_dtensor_") as folder:
        (Path(folder) / "request.json").write_text(request.to_json(), encoding="utf-8")
        child = CompilingProcess(
            python or sys.executable, Path(folder), {**LIBTPU_ENVIRONMENT, **flags}
        )
        child.wait(time_limit_seconds, memory_limit_bytes, progress, request.title)
        return Evidence.load(folder)


def _topology(asked: str | Topology) -> Topology:
    return Topology.parse(asked) if isinstance(asked, str) else asked


def _mesh(asked: Mesh | Mapping[str, int] | None, topology: object, machine: Topology) -> Mesh:
    if isinstance(asked, Mesh):
        return asked
    if asked is None:
        if isinstance(topology, JobConfig):
            return topology.mesh()
        raise CompileError(
            f"A step was to be compiled for {machine.name} without a mesh. The axes are not known. "
            "Pass mesh={'fsdp': 64, 'tp': 4}, or a JobConfig, which has them."
        )
    names: tuple[Axis, ...] = tuple(asked)
    shape, dcn = tuple(asked.values()), None
    if machine.num_slices > 1:
        if not shape or shape[0] % machine.num_slices:
            raise CompileError(
                f"A step was to be compiled for {machine.name} with mesh={dict(asked)}. Its first "
                f"axis runs over the {machine.num_slices} slices and does not divide by them. Let "
                "it, or pass a mesh of assign(topology, ici_shape, dcn_shape)."
            )
        dcn = (machine.num_slices, *(1 for _ in shape[1:]))
        shape = (shape[0] // machine.num_slices, *shape[1:])
    return assign(machine, shape, dcn, axis_names=names).mesh


def _cache(asked: str | os.PathLike[str] | bool) -> str:
    if asked is False:
        return ""
    if asked is not True:
        return str(Path(asked).expanduser().resolve())
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return str(Path(home).expanduser() / "xla_dtensor" / "preflight")
