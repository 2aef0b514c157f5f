"""Find, choose and start the one runtime of a process.

Choosing, first match wins: the argument of :func:`get_runtime`, the environment variable
``XLA_DTENSOR_RUNTIME``, torch_xla if the process has switched it to SPMD itself (a script of its
own style), the first that is installed in the order jax, torch_xla, others. A process
runs one runtime: two would fight over the devices, and payloads of one mean nothing to the other.

A third party registers its own by an entry point in the group ``xla_dtensor.runtimes`` whose name
is the runtime's name and whose object is a :class:`~xla_dtensor.runtimes.base.Runtime` subclass.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xla_dtensor.core.argument_types import argument_types
from xla_dtensor.core.errors import RuntimeSetupError
from xla_dtensor.runtimes.base import Runtime
from xla_dtensor.versions import ANY_JAX, jax_support

__all__ = [
    "BUILT_IN",
    "cache_folder",
    "compile_only_runtime",
    "current_runtime",
    "get_runtime",
    "installed_runtimes",
]


# ------------------------ Where compiled programs are kept between processes, and whether they are
#
# Compiling a pod's step takes minutes, and every restart of a job repeats it. XLA can write what it
# compiled to a folder and find it again by the program, the compiler's version and its options.
# That is on by default on TPUs and GPUs. It is off on CPUs, where a program is compiled for the
# very processor: a folder on a shared disk would hand it to machines that lack its instructions.
#
# =====================================  =======================================================
# ``get_runtime(..., compile_cache=x)``  meaning
# =====================================  =======================================================
# a folder                               kept there
# True                                   kept in the default folder, on any device
# False                                  not kept
# None (default)                         as ``XLA_DTENSOR_COMPILE_CACHE`` says (a folder, 1 or
#                                        0), else True on TPUs and GPUs, False on CPUs
# =====================================  =======================================================
#
# The default folder is ``~/.cache/xla_dtensor``, or ``$XDG_CACHE_HOME/xla_dtensor``.

CACHE_VARIABLE = "XLA_DTENSOR_COMPILE_CACHE"


def cache_folder(choice: str | os.PathLike[str] | bool | None, *, on_cpu: bool) -> Path | None:
    """Return the folder for compiled programs; None where they are not to be kept.

    Args:
        choice: The argument `compile_cache`.
        on_cpu: Whether the devices are CPUs.

    Example:
        >>> cache_folder("/tmp/programs", on_cpu=True).name
        'programs'
    """
    if choice is None:
        choice = os.environ.get(CACHE_VARIABLE) or None
    if choice in (None, "0", "1"):
        choice = (not on_cpu) if choice is None else choice == "1"
    if choice is False:
        return None
    if choice is True:
        choice = f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/xla_dtensor"
    return Path(choice).expanduser()


# --------------------------------------------- Find, choose and start the one runtime of a process

ENVIRONMENT_VARIABLE = "XLA_DTENSOR_RUNTIME"
ENTRY_POINT_GROUP = "xla_dtensor.runtimes"


@dataclass(frozen=True)
class _BuiltIn:
    module: str
    class_name: str
    needs: tuple[str, ...]
    install_hint: str


BUILT_IN = {
    "jax": _BuiltIn(
        "xla_dtensor.runtimes.jax.runtime", "JaxRuntime", ("jax",), "pip install 'xla-dtensor[jax]'"
    ),
    "torch_xla": _BuiltIn(
        "xla_dtensor.runtimes.torch_xla.runtime",
        "TorchXlaRuntime",
        ("torch_xla",),
        "pip install 'xla-dtensor[torch-xla]'",
    ),
}

_COMPILE_ONLY = "xla_dtensor.runtimes.jax.absent"

_log = logging.getLogger("xla_dtensor")
_current: Runtime | None = None


def _entry_points() -> dict[str, importlib.metadata.EntryPoint]:
    return {e.name: e for e in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)}


def installed_runtimes() -> tuple[str, ...]:
    """Return the names of the runtimes whose packages are installed, in order of preference.

    Returns:
        Names, built-in ones first. Nothing is imported.

    Example:
        >>> set(installed_runtimes()) <= {"jax", "torch_xla"} | set(_entry_points())
        True
    """
    built_in = [
        name
        for name, entry in BUILT_IN.items()
        if all(importlib.util.find_spec(package) is not None for package in entry.needs)
    ]
    return (*built_in, *(name for name in _entry_points() if name not in BUILT_IN))


def current_runtime() -> Runtime | None:
    """Return the runtime of this process, or None when none has been started."""
    return _current


@argument_types
def get_runtime(name: str | None = None, **options: Any) -> Runtime:
    """Return the runtime of this process, starting it on the first call.

    Args:
        name: "jax", "torch_xla" or the name of a registered one. None: see the module docstring.
        **options: Given to the runtime when it starts, e.g. ``num_cpu_devices=8``.

    Returns:
        The runtime. Later calls return the same object.

    Raises:
        RuntimeSetupError: The runtime is unknown or not installed, another one runs already, or
            options differ from those it was started with.

    Example:
        >>> runtime = get_runtime()  # doctest: +SKIP
    """
    global _current
    if _current is not None:
        if name is not None or options:
            _check_same(_current, name, options)
        return _current
    name = name or os.environ.get(ENVIRONMENT_VARIABLE) or _running_already()
    _current = _start(name or _first_installed(), options)
    if "torch_xla" in sys.modules:
        importlib.import_module("xla_dtensor.runtimes.torch_own").put_back()
    return _current


def compile_only_runtime(topology: Any) -> Any:
    """Let this process compile for a machine that is not here, and do nothing else.

    Args:
        topology: The machine: a :class:`mesh_utils.Topology`, or devices of JAX.

    Returns:
        The runtime, from then on the process's: an ``AbsentRuntime`` of ``absent``.

    Raises:
        RuntimeSetupError: A runtime runs already.
        CompileError: There is no compiler for such a machine.
    """
    global _current
    if _current is not None:
        raise RuntimeSetupError(
            f"A program was to be compiled for {topology!r}, but the runtime {_current.name!r} "
            "already runs. A process has one runtime for as long as it lives. Do it in a process "
            "of its own: compile_for starts one."
        )
    _check_jax()
    _current = importlib.import_module(_COMPILE_ONLY).AbsentRuntime.of(topology)
    return _current


def _check_same(running: Runtime, name: str | None, options: dict[str, Any]) -> None:
    if name is not None and name != running.name:
        raise RuntimeSetupError(
            f"Runtime name={name!r} was asked for, but runtime={running.name!r} already runs in "
            "this process. A process has one runtime, because tensors of one mean nothing to the "
            f"other. Choose once, at the start: get_runtime({name!r}) before the first tensor or "
            f"mesh, or {ENVIRONMENT_VARIABLE}={name} in the environment."
        )
    if options:
        raise RuntimeSetupError(
            f"Runtime {running.name!r} was asked to start with options={options!r}, but it already "
            "runs. Options such as the number of devices are fixed when a runtime starts. Pass "
            "them on the first call of get_runtime, before the first tensor or mesh."
        )


def _running_already() -> str | None:
    """Name torch_xla where the process has imported it and called use_spmd()."""
    torch_xla_runtime = sys.modules.get("torch_xla.runtime")
    spmd = torch_xla_runtime is not None and torch_xla_runtime.is_spmd()
    return "torch_xla" if spmd else None


def _first_installed() -> str:
    installed = installed_runtimes()
    if not installed:
        hints = " or ".join(f"`{entry.install_hint}`" for entry in BUILT_IN.values())
        raise RuntimeSetupError(
            "A runtime was asked for, but none is installed. xla_dtensor computes through JAX or "
            f"torch_xla and ships neither. Install one: {hints}."
        )
    return installed[0]


def _check_jax() -> None:
    """Refuse a JAX that is not supported before its private parts are imported."""
    version = importlib.metadata.version("jax")
    support = jax_support(version)
    if support.is_supported:
        return
    if support.is_too_new and os.environ.get(ANY_JAX) == "1":
        _log.warning("jax %s is %s. %s=1 lets it be tried.", version, support.reason, ANY_JAX)
        return
    attempt = f", or set {ANY_JAX}=1 to try this one" if support.is_too_new else ""
    raise RuntimeSetupError(
        f"Runtime 'jax' was asked for, and jax {version} is {support.reason}. It uses private "
        "parts of JAX, which differ between releases. Install one that is supported: "
        f"`pip install 'jax>=0.10,<0.13'`{attempt}."
    )


def _start(name: str, options: dict[str, Any]) -> Runtime:
    if name in BUILT_IN:
        entry = BUILT_IN[name]
        missing = [p for p in entry.needs if importlib.util.find_spec(p) is None]
        if missing:
            raise RuntimeSetupError(
                f"Runtime name={name!r} was asked for, but it is not installed. The package "
                f"{missing[0]!r} cannot be found by this Python. Install it: "
                f"`{entry.install_hint}`."
            )
        if name == "jax":
            _check_jax()
        return getattr(importlib.import_module(entry.module), entry.class_name)(**options)
    registered = _entry_points()
    if name not in registered:
        names = ", ".join(sorted({*BUILT_IN, *registered}))
        raise RuntimeSetupError(
            f"Runtime name={name!r} was asked for, but there is none of that name. Runtimes are "
            f"built in or registered under the entry point group {ENTRY_POINT_GROUP!r}. Pass one "
            f"of: {names}."
        )
    return registered[name].load()(**options)
