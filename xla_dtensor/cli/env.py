"""The command ``env``: what this machine has, what is wrong with it, and what to do next.

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

RUNTIME_VARIABLE = "XLA_DTENSOR_RUNTIME"
ENTRY_POINT_GROUP = "xla_dtensor.runtimes"
# Runtime -> the modules that it needs, in order of preference.
BUILT_IN_RUNTIMES = {"jax": ("jax",), "torch_xla": ("torch_xla",)}
# Extra -> what it is for. All of them stand in setup.cfg.
EXTRAS = {
    "jax": "runtime jax on CPU",
    "tpu": "runtime jax on TPU",
    "cuda12": "runtime jax on NVIDIA GPUs, with torch 2.9",
    "cuda13": "runtime jax on NVIDIA GPUs, with torch 2.13 or newer",
    "torch-xla": "runtime torch_xla on CPU, with torch 2.9",
    "torch-xla-tpu": "runtime torch_xla on TPU, with torch 2.9",
    "preflight": "compile for TPU pods on a machine without TPU",
    "orbax": "checkpoints by orbax's managers, on the runtime jax",
}
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
_EXTRA_OF_RUNTIME = {"jax": "jax", "torch_xla": "torch-xla"}
_TORCH_OF_TORCH_XLA = (2, 9)


# ------------------------------------------------------- Start one runtime in a process of its own
#
# What crashes or hangs there does no harm here. The child is this module run as a script. It writes
# its outcome to a file, not to its output, which the libraries it imports write to as well. When
# the time runs out, it says where it stands.

_GRACE_SECONDS = 2.0
_LAST_LINES = 10
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
        outcome, output = Path(folder, "outcome.json"), Path(folder, "output.txt")
        command = [sys.executable, "-m", __name__, runtime, str(outcome), str(time_limit_seconds)]
        try:
            status = _run(command, output, time_limit_seconds + _GRACE_SECONDS)
        except OSError as error:
            return Probe(runtime, "failed", time.monotonic() - start, str(error))
        seconds = round(time.monotonic() - start, 1)
        if outcome.exists():
            return Probe(runtime=runtime, seconds=seconds, **json.loads(outcome.read_text()))
        last_words = f"It last said:\n{_last_lines(output)}"
    if status is None:
        ending = f"It was stopped after {time_limit_seconds:g} s."
        return Probe(runtime, "timed out", seconds, f"{ending} {last_words}")
    ending = f"ended with status {status}"
    if status < 0:
        names = {signal_.value: signal_.name for signal_ in signal.Signals}
        ending = f"was ended by {names.get(-status, f'signal {-status}')}"
    return Probe(runtime, "crashed", seconds, f"Its process {ending}. {last_words}")


def _run(command: list[str], output: Path, limit_seconds: float) -> int | None:
    """Runs a command; its exit status, or None when it had to be stopped."""
    with output.open("wb") as file:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
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
    """The last lines of an output, and the innermost frames of a Python stack that follow."""
    text = path.read_text(encoding="utf-8", errors="replace")
    lines = [line for line in text.splitlines() if line.strip() and "<frozen " not in line]
    stacks = [i for i, line in enumerate(lines) if line.startswith(_STACK_BEGINS)]
    end = stacks[-1] if stacks else len(lines)
    return "\n".join(lines[max(0, end - _LAST_LINES) : end + _LAST_LINES]) or "(nothing)"


def _child(runtime: str, path: str, limit_seconds: float) -> None:
    faulthandler.enable()
    faulthandler.dump_traceback_later(limit_seconds)
    try:
        outcome = _start(runtime)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        outcome = {"status": "failed", "detail": text}
    partial = Path(f"{path}.partial")
    partial.write_text(json.dumps(outcome), encoding="utf-8")
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


# ------------------------------------------------------------------ What is wrong, and what to do
#
# Checks are rows: whether it is so, whether that is a problem, a note, or what to do next, and the
# words.

PROBLEM, NOTE, NEXT = "problem", "note", "next"
Check = tuple[bool, str, str]


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
    for is_so, level, text in _checks(situation):
        if is_so and level != NEXT:
            yield Finding(level, text)


def advice(situation: Situation) -> Iterator[str]:
    """Yields what to install or set next, the most urgent first."""
    yield from (text for is_so, level, text in _checks(situation) if is_so and level == NEXT)


def _checks(situation: Situation) -> Iterator[Check]:
    yield from _of_torch(situation.installed.version)
    yield from _of_jax(situation.installed.version, situation.environment)
    yield from _of_libtpu(situation.installed, situation.environment)
    yield from _of_runtimes(situation)
    yield from _of_hardware(situation)
    working = [probe.runtime for probe in situation.probes if probe.works]
    text = f"export {RUNTIME_VARIABLE}={next(iter(working), None)}    (a runtime that works)"
    yield bool(working) and situation.chosen not in working, NEXT, text


def _of_torch(version: Callable[[str], str | None]) -> Iterator[Check]:
    torch, xla, has_jax = version("torch"), version("torch_xla"), version("jax") is not None
    support = torch_support(torch)
    bad = torch is not None and not support.is_supported
    apart = xla is not None and torch is not None and release(torch)[:2] != _TORCH_OF_TORCH_XLA
    text = f"torch_xla {xla} is not supported: runtime torch_xla needs 2.9"
    yield torch is None, PROBLEM, "torch is not installed; every runtime needs it"
    yield bad, PROBLEM, f"torch {torch} is {support.reason}"
    yield xla is not None and release(xla)[:2] != _TORCH_OF_TORCH_XLA, PROBLEM, text
    yield apart, PROBLEM, f"torch_xla {xla} works with torch 2.9 only, and torch is {torch}"

    both = "pip install 'torch==2.9.*' 'torch_xla==2.9.*'    (to use runtime torch_xla)"
    without_xla = "pip uninstall torch_xla    (keeps torch, and runtime jax)"
    yield bad and xla is not None, NEXT, "pip install 'torch==2.9.*'    (works with both runtimes)"
    yield bad and xla is None, NEXT, "pip install 'torch>=2.13' (or 'torch==2.9.*')"
    yield apart and not bad and has_jax, NEXT, without_xla
    yield apart and not bad, NEXT, both


def _of_jax(
    version: Callable[[str], str | None], environment: Mapping[str, str]
) -> Iterator[Check]:
    jax, jaxlib = version("jax"), version("jaxlib")
    if jax is None:
        return
    support = jax_support(jax)
    tried = support.is_too_new and environment.get(ANY_JAX) == "1"
    bad = not support.is_supported and not tried
    apart = jaxlib is not None and release(jax) != release(jaxlib)
    yield jaxlib is None, PROBLEM, f"jax {jax} is installed without jaxlib"
    yield apart, PROBLEM, f"jax {jax} and jaxlib {jaxlib} are of different releases"
    yield tried, NOTE, f"jax {jax} is {support.reason}; {ANY_JAX}=1 lets it be tried"
    yield bad, PROBLEM, f"jax {jax} is {support.reason}"
    yield bad, NEXT, "pip install 'jax>=0.10,<0.13'    (0.10 is the last one for Python 3.11)"


def _of_libtpu(installed: Installed, environment: Mapping[str, str]) -> Iterator[Check]:
    libtpu, jax, pins = installed.version("libtpu"), installed.version("jax"), installed.libtpu_pins
    if libtpu is None:
        return
    met = [package for package, pin in pins.items() if satisfies(libtpu, pin)]
    fits = f"; it fits {met[0]}[tpu]" if met else ""
    for package, pin in pins.items():
        text = (
            f"libtpu {libtpu} is not what {package}[tpu] pins ({pin}){fits}: runtime "
            f"{package} cannot be expected to use a TPU here, on CPU it does not matter"
        )
        yield package not in met, NOTE if met else PROBLEM, text
    text = (
        "jax[tpu] and torch_xla[tpu] pin different libtpu versions: for TPU, give each runtime "
        "an environment of its own"
    )
    yield len(set(pins.values())) > 1, NOTE, text
    platforms = environment.get("JAX_PLATFORMS", "")
    text = f"libtpu is installed, but JAX_PLATFORMS={platforms} keeps jax off the TPU"
    yield bool(platforms) and "tpu" not in platforms, NOTE, text
    if is_importable("numpy"):
        # The doctor itself starts without any package; mesh_utils needs numpy.
        from mesh_utils.xla_flags import same_version, versions_of

        tried = versions_of("libtpu")
        new = not any(same_version(libtpu, version) for version in tried)
        text = f"the XLA flags of tpu_configs were not tried with libtpu {libtpu}, only with "
        yield new, NOTE, text + ", ".join(tried)
    pin = pins.get("jax", "")
    text = f"pip install 'jax[tpu]=={jax}'    (the libtpu that belongs to this jax: {pin})"
    yield bool(jax and pin) and not satisfies(libtpu, pin), NEXT, text


def _of_runtimes(situation: Situation) -> Iterator[Check]:
    chosen, runtimes, hardware = situation.chosen, situation.runtimes, situation.hardware
    names = ", ".join(runtimes)
    missing = bool(runtimes) and chosen is not None and chosen not in runtimes
    text = f"runtime {chosen!r} is asked for, but installed are only: {names}"
    yield not runtimes, PROBLEM, "no runtime is installed"
    yield missing, PROBLEM, text
    for probe in situation.probes:
        words = ", the one that would be chosen," if probe.runtime == chosen else ""
        text = f"runtime {probe.runtime}{words} does not start: {probe.status}"
        yield not probe.works, PROBLEM, text

    without_torch = bool(runtimes) and situation.installed.version("torch") is None
    extras = [_EXTRA_OF_RUNTIME[name] for name in runtimes if name in _EXTRA_OF_RUNTIME]
    if not runtimes:
        extras = ["jax", "torch-xla"]
        if "tpu" in hardware:
            extras = ["tpu", "torch-xla-tpu"]
        elif "gpu" in hardware:
            extras = ["cuda13", "cuda12"]
    elif missing and not without_torch:
        extras = [_EXTRA_OF_RUNTIME[chosen]] if chosen in _EXTRA_OF_RUNTIME else []
    for extra in extras:
        yield not runtimes or without_torch or missing, NEXT, _install(extra)


def _of_hardware(situation: Situation) -> Iterator[Check]:
    """What a runtime lacks that runs on CPU beside an accelerator, or that ran out of time."""
    hardware, torch = situation.hardware, situation.installed.version("torch") or ""
    cuda = "cuda12" if release(torch)[:2] == _TORCH_OF_TORCH_XLA else "cuda13"
    for probe in situation.probes:
        on_cpu = probe.works and probe.description.get("platform", "").lower() == "cpu"
        is_jax, has_tpu = probe.runtime == "jax", "tpu" in hardware
        yield on_cpu and has_tpu, NEXT, _install("tpu" if is_jax else "torch-xla-tpu")
        yield on_cpu and not has_tpu and "gpu" in hardware and is_jax, NEXT, _install(cuda)
    late = any(probe.status == "timed out" for probe in situation.probes)
    looks = "tpu" not in hardware and not situation.environment.get("JAX_PLATFORMS")
    text = "export JAX_PLATFORMS=cpu    (no TPU is seen; jax may be looking for one)"
    yield late, NEXT, "python -m xla_dtensor env --time-limit 600    (a runtime ran out of time)"
    yield late and looks, NEXT, text


def _install(extra: str) -> str:
    return f"pip install 'xla-dtensor[{extra}]'    ({EXTRAS[extra]})"


# ---------------------------------------- Which runtime would be chosen here, and whether it works

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
        return any(probe.works for probe in self.probes)

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
    third_party = [name for name in registered if name not in BUILT_IN_RUNTIMES]
    return (*built_in, *dict.fromkeys(third_party))


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
    of_tpu = sorted(name for name in environment if name.startswith("TPU_"))
    return {name: environment.get(name) for name in (*VARIABLES, *of_tpu)}


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
    hardware = ", ".join(_NAMES_OF_HARDWARE[name] for name in diagnosis.hardware) or "none seen"
    first = ("Python", diagnosis.python), ("System", diagnosis.system), ("Accelerators", hardware)
    yield from _table(first, indent="")
    yield from ("", "Packages")
    yield from _table(
        (package, version or "not installed", diagnosis.torch if package == "torch" else "")
        for package, version in diagnosis.installed.versions.items()
    )
    yield from ("", "Runtimes")
    probed = {probe.runtime: probe for probe in diagnosis.probes}
    names = dict.fromkeys((*BUILT_IN_RUNTIMES, *diagnosis.runtimes))
    yield from _table((n, _status(n in diagnosis.runtimes, probed.get(n))) for n in names)
    yield f"  chosen: {diagnosis.choice.runtime or 'none'} ({diagnosis.choice.reason})"
    for probe in diagnosis.probes:
        if probe.description or probe.detail:
            yield from ("", f"  {probe.runtime}")
            yield from _table(probe.description.items(), indent="    ")
            yield from (f"    {line}" for line in probe.detail.splitlines())
    yield from ("", "Environment variables")
    yield from _table((k, v if v is not None else "-") for k, v in diagnosis.variables.items())
    yield from ("", "Findings")
    yield from _table([(f.level, f.text) for f in diagnosis.findings] or [("none",)])
    if diagnosis.advice:
        yield from ("", "Next")
        yield from (f"  {line}" for line in dict.fromkeys(diagnosis.advice))
    working = [probe.runtime for probe in diagnosis.probes if probe.works]
    yield from ("", f"{', '.join(working)}: ready" if working else "No runtime works.")


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


if __name__ == "__main__":
    _child(sys.argv[1], sys.argv[2], float(sys.argv[3]))
