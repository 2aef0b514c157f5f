"""A diagnosis as plain, aligned text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from xla_dtensor.doctor.diagnosis import BUILT_IN_RUNTIMES, Diagnosis
from xla_dtensor.doctor.probe import Probe

__all__ = ["to_text"]

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
