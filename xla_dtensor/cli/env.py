"""The command ``env``: what this machine has, what is wrong with it, and what to do next.

The doctor: what is installed, which runtime would be chosen, does it work, what to do next.

It answers for installations that are incomplete or broken, so it imports none of the packages that
it asks about: versions come from metadata, and a runtime is started in a process of its own. Names
of the runtimes are therefore repeated here; a test holds them equal to those of `registry`.

Example:
    >>> diagnosis = examine(time_limit_seconds=120)  # doctest: +SKIP
    >>> diagnosis.choice.runtime, diagnosis.works  # doctest: +SKIP
    ('jax', True)
"""

from __future__ import annotations

import faulthandler
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from xla_dtensor.versions import (
    ANY_JAX,
    Installed,
    is_importable,
    jax_support,
    read_installed,
    release,
    satisfies,
    torch_support,
)

__all__ = [
    "BUILT_IN_RUNTIMES",
    "EXTRAS",
    "Choice",
    "Diagnosis",
    "Probe",
    "Situation",
    "advice",
    "choose",
    "examine",
    "findings",
    "probe",
    "to_text",
]


# ------------------------------------------------------- Start one runtime in a process of its own
#
# What crashes or hangs there does no harm here.
#
# The child is this module run as a script. It writes what it finds to a file, not to its output,
# which the libraries it imports write to as well. When the time runs out, it says where it stands.

_GRACE_SECONDS = 2.0
_KEPT_LINES = 10
_STACK_BEGINS = ("Fatal Python error", "Timeout (")  # As faulthandler writes it.


@dataclass(frozen=True)
class Probe:
    """What starting a runtime in a child process came to.

    Args:
        runtime: Its name.
        status: "works"; "failed" with an exception; "crashed", the process died; "timed out".
        seconds: How long it took.
        detail: What went wrong.
        num_devices: Devices of the job.
        num_addressable_devices: Those that one process reaches.
        description: What the runtime says of itself: versions, platform, settings it made.
    """

    runtime: str
    status: str
    seconds: float
    detail: str = ""
    num_devices: int | None = None
    num_addressable_devices: int | None = None
    description: Mapping[str, str] = field(default_factory=dict)

    @property
    def works(self) -> bool:
        """Whether the runtime started and computed."""
        return self.status == "works"


def probe(runtime: str, time_limit_seconds: float) -> Probe:
    """Starts a runtime in a child process, puts a sharded tensor on its devices, reads it back.

    Args:
        runtime: Name of the runtime.
        time_limit_seconds: What the child may take. It and its children are killed after that.

    Returns:
        What came of it; no exception, whatever the child does.

    Example:
        >>> probe("jax", time_limit_seconds=120).status  # doctest: +SKIP
        'works'
    """
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="xla_dtensor_probe_") as folder:
        found, errors = Path(folder, "found.json"), Path(folder, "errors.txt")
        command = [sys.executable, "-m", __name__, runtime, str(found), str(time_limit_seconds)]
        try:
            status = _run(command, errors, time_limit_seconds + _GRACE_SECONDS)
        except OSError as error:
            return Probe(runtime, "failed", time.monotonic() - start, str(error))
        seconds = round(time.monotonic() - start, 1)
        said = _last_lines(errors)
        if found.exists():
            return Probe(runtime=runtime, seconds=seconds, **json.loads(found.read_text()))
    if status is None:
        limit = f"It was stopped after {time_limit_seconds:g} s."
        return Probe(runtime, "timed out", seconds, f"{limit} It last said:\n{said}")
    return Probe(runtime, "crashed", seconds, f"{_ending(status)} It last said:\n{said}")


def _run(command: list[str], errors: Path, limit_seconds: float) -> int | None:
    """Runs a command; its exit status, or None when it had to be stopped."""
    with errors.open("wb") as output:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            return child.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if child.poll() is None:
                with suppress(OSError):  # It may end by itself this very moment.
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()


def _last_lines(path: Path) -> str:
    """What the child said last, and, if it left one, the innermost frames of its Python stack."""
    text = path.read_text(encoding="utf-8", errors="replace")
    lines = [line for line in text.splitlines() if line.strip() and "<frozen " not in line]
    stacks = [i for i, line in enumerate(lines) if line.startswith(_STACK_BEGINS)]
    end = stacks[-1] if stacks else len(lines)
    kept = lines[max(0, end - _KEPT_LINES) : end] + lines[end : end + _KEPT_LINES]
    return "\n".join(kept) or "(nothing)"


def _ending(status: int) -> str:
    if status >= 0:
        return f"Its process ended with status {status}."
    try:
        return f"Its process was ended by {signal.Signals(-status).name}."
    except ValueError:
        return f"Its process was ended by signal {-status}."


def _child(runtime: str, path: str, limit_seconds: float) -> None:
    faulthandler.enable()
    faulthandler.dump_traceback_later(limit_seconds)
    try:
        found = _start(runtime)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        found = {"status": "failed", "detail": text}
    partial = Path(f"{path}.partial")
    partial.write_text(json.dumps(found), encoding="utf-8")
    partial.replace(path)
    # What matters is known. Libraries that crash or hang as they are torn down are left out.
    os._exit(0)


def _start(name: str) -> dict[str, Any]:
    import torch

    from mesh_utils import Mesh
    from xla_dtensor.core import Layout
    from xla_dtensor.runtimes import get_runtime

    runtime = get_runtime(name)
    ids, addressable = runtime.device_ids(), runtime.addressable_device_ids()
    if len(ids) == len(addressable):
        layout = Layout(Mesh(ids, (len(ids),), ("device",)), (("device",),))
        sent = torch.arange(len(ids))
        came_back = runtime.to_host(runtime.put(sent, layout))
        if not torch.equal(sent, came_back):
            text = f"Sent {sent.tolist()} to its devices, {came_back.tolist()} came back."
            return {"status": "failed", "detail": text}
    return {
        "status": "works",
        "num_devices": len(ids),
        "num_addressable_devices": len(addressable),
        "description": {key: str(value) for key, value in runtime.describe().items()},
    }


if __name__ == "__main__":
    _child(sys.argv[1], sys.argv[2], float(sys.argv[3]))


# ---------------------------------------------------------- What the doctor makes of what it found

# Extra -> what it is for. All of them stand in setup.cfg.
EXTRAS = {
    "jax": "runtime jax on CPU",
    "tpu": "runtime jax on TPU",
    "cuda12": "runtime jax on NVIDIA GPUs, with torch 2.9",
    "cuda13": "runtime jax on NVIDIA GPUs, with torch 2.13 or newer",
    "torch-xla": "runtime torch_xla on CPU, with torch 2.9",
    "torch-xla-tpu": "runtime torch_xla on TPU, with torch 2.9",
    "preflight": "compile for TPU pods on a machine without TPU",
}
_TORCH_OF_TORCH_XLA = (2, 9)


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong ("problem") or worth knowing ("note")."""

    level: str
    text: str


@dataclass(frozen=True)
class Situation:
    """What findings and advice are drawn from.

    Args:
        installed: Versions of packages.
        runtimes: Installed runtimes.
        chosen: The runtime that would be chosen.
        probes: What came of starting runtimes.
        environment: Environment variables.
        hardware: Some of "tpu", "gpu".
    """

    installed: Installed
    runtimes: Sequence[str]
    chosen: str | None
    probes: Sequence[Probe]
    environment: Mapping[str, str]
    hardware: Sequence[str] = ()


def findings(situation: Situation) -> Iterator[Finding]:
    """Yields conflicts between what is installed, asked for, and set."""
    yield from _of_torch(situation.installed)
    yield from _of_torch_xla(situation.installed)
    yield from _of_jax(situation)
    yield from _of_libtpu(situation)
    yield from _of_flags(situation.installed)
    yield from _of_choice(situation)


def _problem(text: str) -> Finding:
    return Finding("problem", text)


def _note(text: str) -> Finding:
    return Finding("note", text)


def _of_torch(installed: Installed) -> Iterator[Finding]:
    version = installed.version("torch")
    support = torch_support(version)
    if version is None:
        yield _problem("torch is not installed; every runtime needs it")
    elif not support.is_supported:
        yield _problem(f"torch {version} is {support.reason}")


def _of_torch_xla(installed: Installed) -> Iterator[Finding]:
    version, torch = installed.version("torch_xla"), installed.version("torch")
    if version is None:
        return
    if release(version)[:2] != _TORCH_OF_TORCH_XLA:
        yield _problem(f"torch_xla {version} is not supported: runtime torch_xla needs 2.9")
    if torch is not None and release(torch)[:2] != _TORCH_OF_TORCH_XLA:
        yield _problem(f"torch_xla {version} works with torch 2.9 only, and torch is {torch}")


def _of_jax(situation: Situation) -> Iterator[Finding]:
    installed = situation.installed
    jax, jaxlib = installed.version("jax"), installed.version("jaxlib")
    if jax is None:
        return
    if jaxlib is None:
        yield _problem(f"jax {jax} is installed without jaxlib")
    elif release(jax) != release(jaxlib):
        yield _problem(f"jax {jax} and jaxlib {jaxlib} are of different releases")
    support = jax_support(jax)
    if support.is_too_new and situation.environment.get(ANY_JAX) == "1":
        yield _note(f"jax {jax} is {support.reason}; {ANY_JAX}=1 lets it be tried")
    elif not support.is_supported:
        yield _problem(f"jax {jax} is {support.reason}")


def _of_libtpu(situation: Situation) -> Iterator[Finding]:
    installed = situation.installed
    version, pins = installed.version("libtpu"), installed.libtpu_pins
    if version is None:
        return
    unmet = [package for package, pin in pins.items() if not satisfies(version, pin)]
    met = [package for package in pins if package not in unmet]
    for package in unmet:
        fits = f"; it fits {met[0]}[tpu]" if met else ""
        text = (
            f"libtpu {version} is not what {package}[tpu] pins ({pins[package]}){fits}: runtime "
            f"{package} cannot be expected to use a TPU here, on CPU it does not matter"
        )
        yield _note(text) if met else _problem(text)
    if len(set(pins.values())) > 1:
        yield _note(
            "jax[tpu] and torch_xla[tpu] pin different libtpu versions: for TPU, give each runtime "
            "an environment of its own"
        )
    platforms = situation.environment.get("JAX_PLATFORMS", "")
    if platforms and "tpu" not in platforms:
        yield _note(f"libtpu is installed, but JAX_PLATFORMS={platforms} keeps jax off the TPU")


def _of_flags(installed: Installed) -> Iterator[Finding]:
    """Whether somebody has given this project's XLA flags to the libtpu that is here."""
    version = installed.version("libtpu")
    if version is None or not is_importable("numpy"):
        return
    # The doctor itself starts without any package; mesh_utils needs numpy.
    from mesh_utils.xla_flags import same_version, versions_of

    known = versions_of("libtpu")
    if not any(same_version(version, each) for each in known):
        yield _note(
            f"the XLA flags of tpu_configs were not tried with libtpu {version}, only with "
            f"{', '.join(known)}"
        )


def _of_choice(situation: Situation) -> Iterator[Finding]:
    chosen, runtimes = situation.chosen, situation.runtimes
    if not runtimes:
        yield _problem("no runtime is installed")
    elif chosen is not None and chosen not in runtimes:
        names = ", ".join(runtimes)
        yield _problem(f"runtime {chosen!r} is asked for, but installed are only: {names}")
    for probe in situation.probes:
        if not probe.works:
            chosen_one = ", the one that would be chosen," if probe.runtime == chosen else ""
            yield _problem(f"runtime {probe.runtime}{chosen_one} does not start: {probe.status}")


def advice(situation: Situation) -> Iterator[str]:
    """Yields what to install or set next, the most urgent first."""
    yield from _about_torch(situation.installed)
    yield from _about_jax(situation)
    yield from _about_libtpu(situation.installed)
    yield from _about_runtimes(situation)
    yield from _about_hardware(situation)
    yield from _about_time_outs(situation)
    working = [probe.runtime for probe in situation.probes if probe.works]
    if working and situation.chosen not in working:
        yield f"export XLA_DTENSOR_RUNTIME={working[0]}    (a runtime that works)"


def _install(extra: str) -> str:
    return f"pip install 'xla-dtensor[{extra}]'    ({EXTRAS[extra]})"


def _about_torch(installed: Installed) -> Iterator[str]:
    torch, has_torch_xla = installed.version("torch"), installed.version("torch_xla") is not None
    has_jax = installed.version("jax") is not None
    wrong_for_torch_xla = torch is not None and release(torch)[:2] != _TORCH_OF_TORCH_XLA
    if torch is not None and not torch_support(torch).is_supported:
        if has_torch_xla:
            yield "pip install 'torch==2.9.*'    (works with both runtimes)"
        else:
            yield "pip install 'torch>=2.13' (or 'torch==2.9.*')"
    elif has_torch_xla and wrong_for_torch_xla:
        if has_jax:
            yield "pip uninstall torch_xla    (keeps torch, and runtime jax)"
        yield "pip install 'torch==2.9.*' 'torch_xla==2.9.*'    (to use runtime torch_xla)"


def _about_jax(situation: Situation) -> Iterator[str]:
    jax = situation.installed.version("jax")
    if jax is None or jax_support(jax).is_supported:
        return
    if not (jax_support(jax).is_too_new and situation.environment.get(ANY_JAX) == "1"):
        yield "pip install 'jax>=0.10,<0.13'    (0.10 is the last one for Python 3.11)"


def _about_libtpu(installed: Installed) -> Iterator[str]:
    libtpu, jax = installed.version("libtpu"), installed.version("jax")
    pin = installed.libtpu_pins.get("jax")
    if libtpu and jax and pin and not satisfies(libtpu, pin):
        yield f"pip install 'jax[tpu]=={jax}'    (the libtpu that belongs to this jax: {pin})"


def _about_runtimes(situation: Situation) -> Iterator[str]:
    if not situation.runtimes:
        extras = ["jax", "torch-xla"]
        if "tpu" in situation.hardware:
            extras = ["tpu", "torch-xla-tpu"]
        elif "gpu" in situation.hardware:
            extras = ["cuda13", "cuda12"]
        yield from map(_install, extras)
    elif situation.installed.version("torch") is None:
        yield from (
            _install({"jax": "jax", "torch_xla": "torch-xla"}[runtime])
            for runtime in situation.runtimes
            if runtime in ("jax", "torch_xla")
        )
    elif situation.chosen in ("jax", "torch_xla") and situation.chosen not in situation.runtimes:
        yield _install({"jax": "jax", "torch_xla": "torch-xla"}[situation.chosen])


def _about_hardware(situation: Situation) -> Iterator[str]:
    """What a runtime lacks that runs on CPU beside an accelerator."""
    for probe in situation.probes:
        if not probe.works or probe.description.get("platform", "").lower() != "cpu":
            continue
        if "tpu" in situation.hardware:
            yield _install("tpu" if probe.runtime == "jax" else "torch-xla-tpu")
        elif "gpu" in situation.hardware and probe.runtime == "jax":
            torch = situation.installed.version("torch") or ""
            yield _install("cuda12" if release(torch)[:2] == _TORCH_OF_TORCH_XLA else "cuda13")


def _about_time_outs(situation: Situation) -> Iterator[str]:
    if not any(probe.status == "timed out" for probe in situation.probes):
        return
    yield "python -m xla_dtensor env --time-limit 600    (a runtime ran out of time)"
    if "tpu" not in situation.hardware and not situation.environment.get("JAX_PLATFORMS"):
        yield "export JAX_PLATFORMS=cpu    (no TPU is seen; jax may be looking for one)"


# ---------------------------------------- Which runtime would be chosen here, and whether it works

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


# -------------------------------------------------------------- A diagnosis as plain, aligned text

_NAMES_OF_HARDWARE = {"tpu": "TPU", "gpu": "NVIDIA GPU"}


def to_text(diagnosis: Diagnosis) -> str:
    """Renders a diagnosis for a person.

    Args:
        diagnosis: The diagnosis.

    Returns:
        Several lines; the last says whether there is a runtime that works.
    """
    return "\n".join(_lines(diagnosis))


def _lines(diagnosis: Diagnosis) -> Iterator[str]:
    hardware = ", ".join(_NAMES_OF_HARDWARE[name] for name in diagnosis.hardware)
    yield from _table(
        [
            ("Python", diagnosis.python),
            ("System", diagnosis.system),
            ("Accelerators", hardware or "none seen"),
        ],
        indent="",
    )
    yield from ("", "Packages")
    yield from _table(
        (package, version or "not installed", diagnosis.torch if package == "torch" else "")
        for package, version in diagnosis.installed.versions.items()
    )
    yield from ("", "Runtimes")
    yield from _runtimes(diagnosis)
    yield from ("", "Environment variables")
    yield from _table((k, v if v is not None else "-") for k, v in diagnosis.variables.items())
    yield from ("", "Findings")
    yield from _table([(each.level, each.text) for each in diagnosis.findings] or [("none",)])
    if diagnosis.advice:
        yield from ("", "Next")
        yield from (f"  {line}" for line in dict.fromkeys(diagnosis.advice))
    working = [probe.runtime for probe in diagnosis.probes if probe.works]
    yield ""
    yield f"{', '.join(working)}: ready" if working else "No runtime works."


def _runtimes(diagnosis: Diagnosis) -> Iterator[str]:
    probed = {probe.runtime: probe for probe in diagnosis.probes}
    names = dict.fromkeys((*BUILT_IN_RUNTIMES, *diagnosis.runtimes))
    yield from _table(
        (name, _status(name in diagnosis.runtimes, probed.get(name))) for name in names
    )
    yield f"  chosen: {diagnosis.choice.runtime or 'none'} ({diagnosis.choice.reason})"
    for probe in diagnosis.probes:
        if probe.description or probe.detail:
            yield from ("", f"  {probe.runtime}")
            yield from _table(probe.description.items(), indent="    ")
            yield from (f"    {line}" for line in probe.detail.splitlines())


def _status(is_installed: bool, probe: Probe | None) -> str:
    if probe is None:
        return "installed, not started" if is_installed else "not installed"
    text = f"{probe.status}, {probe.seconds:g} s"
    if probe.num_devices is None:
        return text
    platform = probe.description.get("platform", "")
    reached = f", {probe.num_addressable_devices} of them in one process"
    reached = "" if probe.num_addressable_devices == probe.num_devices else reached
    return f"{text}: {probe.num_devices} x {platform or 'device'}{reached}"


def _table(rows: Iterable[Sequence[str]], indent: str = "  ") -> Iterator[str]:
    """Rows with their columns aligned; the last column is not padded."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        yield (indent + "  ".join(cells)).rstrip()
