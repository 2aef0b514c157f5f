"""The process that compiles a step for a machine that is not here.

Run by `compile_for` as ``python -m xla_dtensor.plan.aot_child FOLDER``: it reads what is there,
says on stdout what it is doing, one line per part, and leaves the evidence in FOLDER. Whatever goes
wrong inside libtpu ends this process and no other.
"""

from __future__ import annotations

import hashlib
import os
import platform
import resource
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from xla_dtensor.core.dtypes import host_bytes
from xla_dtensor.dtensor.mesh import as_device_mesh
from xla_dtensor.plan.aot import Request, function_of
from xla_dtensor.plan.training_plan import TrainingPlan
from xla_dtensor.report.report import Evidence
from xla_dtensor.runtimes.registry import compile_only_runtime
from xla_dtensor.versions import read_installed

__all__ = ["main", "produce"]

_LOOK_SECONDS = 2.0


def main(arguments: list[str] | None = None) -> int:
    """Compiles what FOLDER/request.json asks for."""
    folder = Path((sys.argv[1:] if arguments is None else arguments)[0])
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    request = Request.from_json((folder / "request.json").read_text(encoding="utf-8"))
    try:
        produce(request, folder)
    except Exception as error:
        vars(error).pop("__notes__", None)  # JAX says there that it left out lines
        traceback.print_exception(error)
        sys.stderr.flush()
        os._exit(1)  # what libraries say at an interpreter's end would hide the error
    return 0


def _end_with(parent: int) -> None:
    """Ends when who asked is gone, killed perhaps: a compilation may take an hour and 6 GB."""
    while os.getppid() == parent:
        time.sleep(_LOOK_SECONDS)
    os._exit(1)


def produce(request: Request, folder: Path) -> None:
    """Leave the evidence of a request in a folder.

    Args:
        request: What is asked.
        folder: Where it goes.

    Raises:
        CompileError: The function cannot be found or gives something else, or libtpu refuses.
    """
    seconds: dict[str, float] = {}
    topology = request.read_topology()
    runtime = compile_only_runtime(topology)
    mesh = as_device_mesh(request.read_mesh())
    plan = partial(TrainingPlan.of, function_of(request.function), mesh, request.keywords)
    with _timed("trace", seconds):
        traced = runtime.traced(plan, runtime.root(mesh.value))
    with _timed("lower", seconds):
        lowered = traced.lowered()
    cached = _cached(request, lowered)
    if cached is not None and cached.exists():
        _say("found an earlier result")
        shutil.copytree(cached, folder, dirs_exist_ok=True)
        return
    with _timed("compile", seconds):
        compiled = traced.compiled(lowered)
    evidence = traced.evidence(
        compiled,
        title=request.title,
        topology=topology,
        seconds=seconds,
        peak_host_bytes=_peak_host_bytes(),
        versions=_versions(),
        options=dict(request.flags),
        command=request.command,
    )
    evidence.save(folder)
    if request.executable:
        traced.save(lowered, compiled, request.executable)
    if cached is not None:
        _keep(evidence, cached)


def _keep(evidence: Evidence, folder: Path) -> None:
    """Writes a result so that others see all of it or nothing."""
    partial_folder = folder.with_name(f"{folder.name}.{os.getpid()}")
    evidence.save(partial_folder)
    try:
        partial_folder.rename(folder)
    except OSError:  # another process was faster
        shutil.rmtree(partial_folder)


def _versions() -> dict[str, str]:
    versions = {name: version for name, version in read_installed().versions.items() if version}
    return versions | {"python": platform.python_version()}


def _say(part: str) -> None:
    sys.stdout.write(f"{part}\n")
    sys.stdout.flush()


@contextmanager
def _timed(part: str, seconds: dict[str, float]) -> Iterator[None]:
    """Says what begins, and notes how long it took."""
    _say(part)
    start = time.perf_counter()
    yield
    seconds[part] = time.perf_counter() - start


def _cached(request: Request, lowered: Any) -> Path | None:
    """Where the result of this very program is kept."""
    if not request.cache or request.executable:
        return None
    parts: list[str] = [lowered.as_text(), request.topology, str(request.wrap)]
    parts += [str(request.device_ids), str(request.mesh_shape), str(request.axis_names)]
    parts += [_sorted(request.flags), _sorted(_versions()), request.title, request.command]
    return Path(request.cache) / hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _sorted(pairs: Mapping[str, str]) -> str:
    return str(sorted(pairs.items()))


def _peak_host_bytes() -> int:
    own = host_bytes("VmHWM")
    if own is not None:
        return own
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


if __name__ == "__main__":
    raise SystemExit(main())
