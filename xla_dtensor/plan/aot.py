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

import importlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mesh_utils import Axis, JobConfig, Mesh, Topology, assign
from xla_dtensor.core.dtypes import host_bytes
from xla_dtensor.core.errors import CompileError
from xla_dtensor.report.compile_report import CompileReport
from xla_dtensor.report.report import Evidence

__all__ = [
    "LIBTPU_ENVIRONMENT",
    "Request",
    "compile_for",
    "evidence_for",
    "function_of",
    "name_function",
    "python_path",
]


# ---------------------------------------- The process that compiles for a machine that is not here
#
# Started, watched, ended.

_POLL_SECONDS = 0.2

# libtpu neither looks for a TPU nor asks the cloud about one, and shares the machine.
LIBTPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "JAX_PLATFORMS": "cpu",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}
_OF_SEVERAL_SLICES = (
    "That is libtpu's own fault. For several slices set its flag "
    "xla_tpu_enable_sunk_dcn_allreduce_done_with_host_reduction to false, as a job with the set "
    "'dcn' does; else try other flags or another mesh. What it says last:"
)
# What libtpu prints of itself when it falls: addresses, and where it would send a report.
_DUMP = re.compile(r"\s*@ |https://symbolize|[EF]\d{4} .*\] RAW: |\*\*\* SIG|PC: @")
_UNKNOWN_FLAG = re.compile(r"Unknown command line flag '?(\w+)")
_FOREIGN = ("XLA_", "PJRT_", "NPROC", "LIBTPU_", "TPU_")


def python_path() -> str:
    """Return PYTHONPATH for a process of another interpreter: where this one finds users' modules.

    This interpreter's library and installed packages are no part of it. The other one has its own,
    and may be of another version.
    """
    own = (sys.prefix, sys.base_prefix)
    users = (
        path for path in sys.path if not any(Path(path).is_relative_to(folder) for folder in own)
    )
    return os.pathsep.join([os.getcwd(), *filter(None, users)])


class CompilingProcess:
    """A process that compiles, from its start on.

    Args:
        python: Its interpreter.
        folder: Where its request is, and where its evidence will be.
        environment: What it has besides this process's environment.
    """

    def __init__(self, python: str, folder: Path, environment: Mapping[str, str]) -> None:
        self._command = [python, "-m", "xla_dtensor.plan.aot_child", str(folder)]
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN)}
        self._said = folder / "said.txt"
        self._errors = folder / "errors.txt"
        with self._said.open("wb") as output, self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                self._command,
                env={**inherited, **environment, "PYTHONPATH": python_path()},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )

    def wait(
        self, seconds: float | None, most_bytes: int | None, progress: bool, title: str
    ) -> None:
        """Wait until it has ended well.

        Args:
            seconds: The most time it may take; None for any.
            most_bytes: The most memory it may hold; None for any.
            progress: Whether to say on stderr what it is doing.
            title: What it compiles, for people.

        Raises:
            CompileError: It has not, or it has reached a limit.
        """
        start, shown = time.monotonic(), 0
        try:
            while self._process.poll() is None:
                time.sleep(_POLL_SECONDS)
                shown = self._show(shown, start, title) if progress else 0
                if seconds is not None and time.monotonic() - start > seconds:
                    self._refuse(title, f"It took more than time_limit_seconds={seconds:g}")
                if most_bytes is not None and self._bytes() > most_bytes:
                    self._refuse(title, f"It took more than memory_limit_bytes={most_bytes}")
        finally:
            self._end()
        if self._process.returncode:
            self._fail(title)

    def _show(self, shown: int, start: float, title: str) -> int:
        parts = self._said.read_text(encoding="utf-8", errors="replace").splitlines()
        for part in parts[shown:]:
            sys.stderr.write(f"{title}: {part} ({time.monotonic() - start:.0f} s)\n")
        return len(parts)

    def _bytes(self) -> int:
        return host_bytes("VmRSS", self._process.pid) or 0

    def _end(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _last(self) -> str:
        parts = self._said.read_text(encoding="utf-8", errors="replace").splitlines()
        stages = [part for part in parts if part]
        return f" while it was at {stages[-1]!r}" if stages else " before it began"

    def _refuse(self, title: str, why: str) -> None:
        raise CompileError(
            f"{title!r} was being compiled in a process of its own. {why}{self._last()}, and was "
            "ended. Raise the limit, or compile a smaller step: layers as one loop (scan_layers) "
            "take a fraction of both."
        )

    def _fail(self, title: str) -> None:
        status = self._process.returncode
        how = f"signal {-status}" if status < 0 else f"status {status}"
        output = self._errors.read_text(encoding="utf-8", errors="replace").strip()
        flag = _UNKNOWN_FLAG.search(output)
        if flag:
            raise CompileError(
                f"{title!r} was to be compiled with the XLA flag {flag[1]}. The libtpu at hand "
                "does not know it. Leave it out of xla_flags: flags, or compile with a libtpu that "
                "does (--python names the interpreter of its environment)."
            )
        last = [line for line in output.splitlines() if not _DUMP.match(line)][-12:]
        hint = _OF_SEVERAL_SLICES if -status == signal.SIGSEGV else "Mend what it says last:"
        raise CompileError(
            f"{title!r} was being compiled in a process of its own. It ended with {how}"
            f"{self._last()}. {hint}\n" + "\n".join(last)
        )


# -------------------------------------------------------------------------------------- Aot request
#
# What is asked of the process that compiles for a machine that is not here, as plain data.
#
# It travels as JSON from `compile_for` to a child, which may run in another interpreter. A function
# is named by its module and its name, or, where its module is the script itself, by the script's
# file: the child imports it, as multiprocessing's children do.

_SCRIPT = "__xla_dtensor_script__"


@dataclass(frozen=True)
class Request:
    """A step to compile for a machine.

    Attributes:
        function: what makes model, step, inputs and placements, as `name_function` names it.
        keywords: further arguments of that function; JSON values.
        topology: the name of the machine.
        wrap: for each dim of a slice whether it wraps; None for the table's answer.
        device_ids: of the mesh, in its order.
        mesh_shape: the sizes of its axes.
        axis_names: their names.
        title: what is compiled, for people.
        command: what makes the report again.
        flags: XLA's flags that the child is started with, for the report.
        executable: where the compiled program is to be saved; "" for nowhere.
        cache: the folder of earlier results; "" for none.
    """

    function: str
    keywords: Mapping[str, Any]
    topology: str
    wrap: tuple[bool, ...] | None
    device_ids: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    axis_names: tuple[Axis, ...]
    title: str
    command: str = ""
    flags: Mapping[str, str] = field(default_factory=dict[str, str])
    executable: str = ""
    cache: str = ""

    def to_json(self) -> str:
        """The request as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Request:
        """Read what `to_json` wrote."""
        plain = json.loads(text)
        for name in ("wrap", "device_ids", "mesh_shape", "axis_names"):
            plain[name] = None if plain[name] is None else tuple(plain[name])
        return cls(**plain)

    def read_topology(self) -> Topology:
        """The machine."""
        return Topology.parse(self.topology, wrap=self.wrap, allow_unreal=True)

    def read_mesh(self) -> Mesh:
        """The mesh."""
        return Mesh(self.device_ids, self.mesh_shape, self.axis_names)


def name_function(function: str | Callable[..., Any]) -> str:
    """Name a function so that another process finds it.

    Args:
        function: A function of a module, or such a name: "package.module:function",
            "folder/file.py:function".

    Returns:
        The name.

    Raises:
        CompileError: A function inside another one, a lambda, or one that was typed into a prompt.

    Example:
        >>> name_function(json.dumps)
        'json:dumps'
    """
    if isinstance(function, str):
        if not all(function.rpartition(":")):
            raise CompileError(
                f"A step was asked for as {function!r}. That names no function. Pass "
                "'module:function' or 'file.py:function'."
            )
        return function
    name, module = getattr(function, "__qualname__", ""), getattr(function, "__module__", "")
    place: str | None = module
    if module == "__main__":
        main = sys.modules["__main__"]
        spec, file = main.__spec__, getattr(main, "__file__", None)
        place = spec.name if spec is not None else file and str(Path(file).resolve())
    if not name or "<" in name or not place:
        raise CompileError(
            f"A step was asked for as {name or function!r}. It is compiled in a process of its "
            "own, which imports the function, and this one cannot be imported. Pass a function "
            "that a file defines on its top level."
        )
    return f"{place}:{name}"


def function_of(name: str) -> Callable[..., Any]:
    """Import the function that `name_function` named.

    Args:
        name: Its name.

    Raises:
        CompileError: There is no such module, file or function.
    """
    place, _, attribute = name.rpartition(":")
    try:
        function: Any = _script(place) if place.endswith(".py") else importlib.import_module(place)
        for part in attribute.split("."):
            function = getattr(function, part)
    except (ImportError, OSError, AttributeError) as error:
        raise CompileError(
            f"A step was asked for as {name!r}. It cannot be imported: {error}. Pass "
            "'module:function' of a module on the path, or 'file.py:function'."
        ) from error
    return function


def _script(path: str) -> Any:
    spec = importlib.util.spec_from_file_location(_SCRIPT, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_SCRIPT] = module
    sys.path.insert(0, str(Path(path).resolve().parent))
    spec.loader.exec_module(module)
    return module


# -------------------------------------------------------------------------------- compile_for(...)


def compile_for(
    step: str | Callable[..., Any],
    topology: str | Topology | JobConfig,
    mesh: Mesh | Mapping[str, int] | None = None,
    **options: Any,
) -> CompileReport:
    """Compile a training step for a topology, and report what it will do there.

    Args:
        step: A function of the mesh that returns model, step, inputs and placements (see
            :mod:`xla_dtensor.plan.aot`), or its name: "package.module:function",
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


def _topology(topology: str | Topology) -> Topology:
    return Topology.parse(topology) if isinstance(topology, str) else topology


def _mesh(mesh: Mesh | Mapping[str, int] | None, topology: object, machine: Topology) -> Mesh:
    if isinstance(mesh, Mesh):
        return mesh
    if mesh is None:
        if isinstance(topology, JobConfig):
            return topology.mesh()
        raise CompileError(
            f"A step was to be compiled for {machine.name} without a mesh. The axes are not known. "
            "Pass mesh={'fsdp': 64, 'tp': 4}, or a JobConfig, which has them."
        )
    names: tuple[Axis, ...] = tuple(mesh)
    shape, dcn = tuple(mesh.values()), None
    if machine.num_slices > 1:
        if not shape or shape[0] % machine.num_slices:
            raise CompileError(
                f"A step was to be compiled for {machine.name} with mesh={dict(mesh)}. Its first "
                f"axis runs over the {machine.num_slices} slices and does not divide by them. Let "
                "it, or pass a mesh of assign(topology, ici_shape, dcn_shape)."
            )
        dcn = (machine.num_slices, *(1 for _ in shape[1:]))
        shape = (shape[0] // machine.num_slices, *shape[1:])
    return assign(machine, shape, dcn, axis_names=names).mesh


def _cache(cache: str | os.PathLike[str] | bool) -> str:
    if cache is False:
        return ""
    if cache is not True:
        return str(Path(cache).expanduser().resolve())
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return str(Path(home).expanduser() / "xla_dtensor" / "preflight")
