"""What the doctor makes of what it found: conflicts, and what to install or set next."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from xla_dtensor.doctor.packages import Installed, is_importable
from xla_dtensor.doctor.probe import Probe
from xla_dtensor.versions import ANY_JAX, jax_support, release, satisfies, torch_support

__all__ = ["EXTRAS", "Finding", "Situation", "advice", "findings"]

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
    from mesh_utils.xla_flags_tried import same_version, versions_of

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
