"""Which runtime would be chosen here, and whether it works."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from xla_dtensor.doctor.findings import Finding, Situation, advice, findings
from xla_dtensor.doctor.packages import Installed, is_importable, read_installed
from xla_dtensor.doctor.probe import Probe, probe
from xla_dtensor.versions import torch_support

__all__ = ["BUILT_IN_RUNTIMES", "VARIABLES", "Choice", "Diagnosis", "choose", "examine"]

RUNTIME_VARIABLE = "XLA_DTENSOR_RUNTIME"
ENTRY_POINT_GROUP = "xla_dtensor.runtimes"
# Runtime -> the modules that it needs, in order of preference.
BUILT_IN_RUNTIMES = {"jax": ("jax",), "torch_xla": ("torch_xla",)}

VARIABLES = (
    RUNTIME_VARIABLE,
    "XLA_DTENSOR_CPU_DEVICES",
    "XLA_DTENSOR_DUMP_HLO",
    "PJRT_DEVICE",
    "JAX_PLATFORMS",
    "XLA_FLAGS",
    "NPROC",
    "CPU_NUM_DEVICES",
    "XLA_DISABLE_FUNCTIONALIZATION",
    "LIBTPU_INIT_ARGS",
)
_VARIABLE_PREFIX = "TPU_"
# Device files that drivers make.
_DEVICE_FILES = {"tpu": ("accel[0-9]*", "vfio/[0-9]*"), "gpu": ("nvidia[0-9]*",)}


@dataclass(frozen=True)
class Choice:
    """The runtime that get_runtime() would start; None when there is none."""

    runtime: str | None
    reason: str


@dataclass(frozen=True)
class Diagnosis:
    """All that the doctor found.

    Args:
        python: Version, implementation and path of the interpreter.
        system: Operating system and architecture.
        hardware: "tpu" and "gpu", as far as their device files are there.
        installed: Versions of packages.
        torch: Whether the version of torch is supported, in words.
        runtimes: Installed runtimes, in order of preference.
        choice: The one that would be chosen.
        probes: What came of starting them.
        variables: Environment variables that matter, None where they are not set.
        findings: What is wrong or worth knowing.
        advice: What to install or set next.
    """

    python: str
    system: str
    hardware: tuple[str, ...]
    installed: Installed
    torch: str
    runtimes: tuple[str, ...]
    choice: Choice
    probes: tuple[Probe, ...]
    variables: Mapping[str, str | None]
    findings: tuple[Finding, ...]
    advice: tuple[str, ...]

    @property
    def works(self) -> bool:
        """Whether at least one runtime started and computed."""
        return any(each.works for each in self.probes)

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values, for JSON."""
        return {**asdict(self), "works": self.works}


def examine(
    runtime: str | None = None,
    *,
    time_limit_seconds: float = 120.0,
    environment: Mapping[str, str] | None = None,
    installed: Installed | None = None,
    start: Callable[[str, float], Probe] = probe,
) -> Diagnosis:
    """Examines this Python environment.

    Args:
        runtime: The name that get_runtime would be called with; only that runtime is then started.
        time_limit_seconds: What each runtime may take to start.
        environment: Environment variables; those of this process when None.
        installed: Versions; read from package metadata when None.
        start: Starts a runtime, given its name and the time limit.

    Returns:
        The diagnosis.
    """
    environment = os.environ if environment is None else environment
    installed = read_installed() if installed is None else installed
    runtimes, hardware = installed_runtimes(), seen_hardware()
    choice = choose(runtime, environment, runtimes)
    to_start = runtimes if runtime is None else tuple(n for n in runtimes if n == runtime)
    probes = tuple(start(name, time_limit_seconds) for name in to_start)
    situation = Situation(installed, runtimes, choice.runtime, probes, environment, hardware)
    return Diagnosis(
        python=f"{platform.python_version()} ({sys.executable})",
        system=f"{platform.system()} {platform.machine()}",
        hardware=hardware,
        installed=installed,
        torch=torch_support(installed.version("torch")).reason,
        runtimes=runtimes,
        choice=choice,
        probes=probes,
        variables=_variables(environment),
        findings=tuple(findings(situation)),
        advice=tuple(advice(situation)),
    )


def installed_runtimes() -> tuple[str, ...]:
    """The names of the installed runtimes, in order of preference; nothing is imported."""
    built_in = [
        name for name, modules in BUILT_IN_RUNTIMES.items() if all(map(is_importable, modules))
    ]
    try:
        registered = [e.name for e in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)]
    except Exception:
        registered = []  # Damaged metadata of any package can end up here.
    others = [name for name in registered if name not in BUILT_IN_RUNTIMES]
    return (*built_in, *dict.fromkeys(others))


def choose(
    argument: str | None, environment: Mapping[str, str], runtimes: tuple[str, ...]
) -> Choice:
    """Chooses as get_runtime does, and says why.

    Args:
        argument: Its name argument.
        environment: Environment variables.
        runtimes: The installed ones, in order of preference.

    Returns:
        The choice; its runtime may be one that is not installed, if that is what was asked for.
    """
    if argument:
        return Choice(argument, f"asked for: get_runtime({argument!r})")
    if environment.get(RUNTIME_VARIABLE):
        return Choice(environment[RUNTIME_VARIABLE], f"{RUNTIME_VARIABLE} is set")
    if runtimes:
        reason = f"the first that is installed; no argument, {RUNTIME_VARIABLE} is not set"
        return Choice(runtimes[0], reason)
    return Choice(None, "no runtime is installed")


def seen_hardware() -> tuple[str, ...]:
    """The accelerators whose device files are there: some of "tpu", "gpu"."""
    devices = Path("/dev")
    return tuple(
        name
        for name, patterns in _DEVICE_FILES.items()
        if any(any(devices.glob(pattern)) for pattern in patterns)
    )


def _variables(environment: Mapping[str, str]) -> dict[str, str | None]:
    others = sorted(name for name in environment if name.startswith(_VARIABLE_PREFIX))
    return {name: environment.get(name) for name in (*VARIABLES, *others)}
