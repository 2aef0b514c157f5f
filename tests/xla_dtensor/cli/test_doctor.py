"""The doctor, on installations that are made up: incomplete, contradicting, broken."""

from __future__ import annotations

import configparser
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from xla_dtensor.cli import env as doctor
from xla_dtensor.cli.env import (
    BUILT_IN_RUNTIMES,
    EXTRAS,
    Choice,
    Probe,
    Situation,
    advice,
    choose,
    examine,
    findings,
    to_text,
)
from xla_dtensor.versions import (
    Installed,
    is_importable,
    read_installed,
    satisfies,
    torch_support,
)

ROOT = Path(__file__).resolve().parents[3]
GOOD = {"torch": "2.9.1", "jax": "0.10.2", "jaxlib": "0.10.2"}
PINS = {"jax": "==0.0.42.*", "torch_xla": "==0.0.21"}


def situation(
    versions: Mapping[str, str | None],
    runtimes: tuple[str, ...] = ("jax",),
    chosen: str | None = "jax",
    **more: Any,
) -> Situation:
    probes = more.pop("probes", [Probe(name, "works", 1.0) for name in runtimes])
    pins = {package: PINS[package] for package in PINS if versions.get(package)}
    environment = more.pop("environment", {})
    return Situation(Installed(versions, pins), runtimes, chosen, probes, environment, **more)


# ---------------------------------------------------------------- the same names as elsewhere


def test_runtimes_are_those_of_the_registry() -> None:
    from xla_dtensor.runtimes import registry

    assert {name: entry.needs for name, entry in registry.BUILT_IN.items()} == BUILT_IN_RUNTIMES
    assert tuple(registry.BUILT_IN) == tuple(BUILT_IN_RUNTIMES)
    assert registry.ENVIRONMENT_VARIABLE == doctor.RUNTIME_VARIABLE
    assert registry.ENTRY_POINT_GROUP == doctor.ENTRY_POINT_GROUP
    assert registry.installed_runtimes() == doctor.installed_runtimes()


def test_extras_are_those_of_the_package() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    assert set(config["options.extras_require"]) - {"dev", "docs"} == set(EXTRAS)


# ---------------------------------------------------------------- packages


@pytest.mark.parametrize(
    ("version", "supported", "reason"),
    [
        ("2.9.0", True, "supported"),
        ("2.9.1+cu128", True, "supported"),
        ("2.13.0+cpu", True, "supported"),
        ("3.0.0", True, "supported"),
        ("2.8.0", False, "too old"),
        ("2.10.0", False, "C++"),
        ("2.12.1", False, "C++"),
        ("unknown", False, "too old"),
        (None, False, "not installed"),
    ],
)
def test_torch_support(version: str | None, supported: bool, reason: str) -> None:
    support = torch_support(version)
    assert support.is_supported is supported
    assert reason in support.reason


@pytest.mark.parametrize(
    ("version", "pin", "expected"),
    [
        ("0.0.42.1", "==0.0.42.*", True),
        ("0.0.4", "==0.0.42.*", False),
        ("0.0.21", "==0.0.21", True),
        ("0.0.21.1", "==0.0.21", False),
        ("0.0.21", ">=0.0.1", True),
    ],
)
def test_satisfies(version: str, pin: str, expected: bool) -> None:
    assert satisfies(version, pin) is expected


def fake_distribution(folder: Path, name: str, metadata: str) -> None:
    info = folder / f"{name}-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\n{metadata}")


def test_versions_come_from_metadata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_distribution(tmp_path, "torch", "Version: 2.11.0+fake\n")
    fake_distribution(
        tmp_path,
        "jax",
        "Version: 0.11.0\nRequires-Dist: libtpu (==0.0.50.*) ; extra == 'tpu'\n"
        "Requires-Dist: libtpu-nightly==1 ; extra == 'nightly'\n",
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    installed = read_installed()
    assert installed.version("torch") == "2.11.0+fake"
    assert installed.version("jax") == "0.11.0"
    assert installed.version("torch_xla") is None
    assert installed.libtpu_pins == {"jax": "==0.0.50.*"}


@pytest.mark.filterwarnings("ignore:Implicit None:DeprecationWarning")
def test_damaged_metadata_is_no_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_distribution(tmp_path, "torch", "Summary: no version\n")
    (tmp_path / "jax-1.dist-info").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    installed = read_installed()
    assert installed.version("torch") is None
    assert installed.version("jax") is None


def test_is_importable_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_importable("json")
    assert not is_importable("no_such_module_at_all")
    monkeypatch.setitem(sys.modules, "jax", None)
    assert not is_importable("jax")


# ---------------------------------------------------------------- choosing


@pytest.mark.parametrize(
    ("argument", "environment", "runtimes", "runtime", "reason"),
    [
        ("torch_xla", {"XLA_DTENSOR_RUNTIME": "jax"}, ("jax",), "torch_xla", "asked for"),
        (None, {"XLA_DTENSOR_RUNTIME": "other"}, ("jax",), "other", "is set"),
        (None, {"XLA_DTENSOR_RUNTIME": ""}, ("jax", "torch_xla"), "jax", "first"),
        (None, {}, ("torch_xla",), "torch_xla", "first"),
        (None, {}, (), None, "no runtime"),
    ],
)
def test_choose(
    argument: str | None,
    environment: dict[str, str],
    runtimes: tuple[str, ...],
    runtime: str | None,
    reason: str,
) -> None:
    choice = choose(argument, environment, runtimes)
    assert choice.runtime == runtime
    assert reason in choice.reason


# ---------------------------------------------------------------- findings and advice

HANGS = Probe("jax", "timed out", 9.0)
ON_CPU = Probe("jax", "works", 1.0, description={"platform": "cpu"})


@pytest.mark.parametrize(
    ("found", "texts"),
    [
        (situation(GOOD), []),
        (situation({**GOOD, "torch": None}), ["torch is not installed"]),
        (situation({**GOOD, "torch": "2.11.0"}), ["torch 2.11.0 is not supported: 2.10 to 2.12"]),
        (situation({**GOOD, "torch": "2.8.0"}), ["torch 2.8.0 is too old"]),
        (
            situation({**GOOD, "torch": "2.13.0", "torch_xla": "2.9.0"}),
            ["torch_xla 2.9.0 works with torch 2.9 only, and torch is 2.13.0"],
        ),
        (situation({**GOOD, "torch_xla": "2.8.1"}), ["torch_xla 2.8.1 is not supported"]),
        (situation({**GOOD, "jaxlib": None}), ["without jaxlib"]),
        (situation({**GOOD, "jaxlib": "0.10.1"}), ["of different releases"]),
        (situation({**GOOD, "jax": "0.9.0", "jaxlib": "0.9.0"}), ["jax 0.9.0 is too old"]),
        (situation({**GOOD, "jax": "0.13.0", "jaxlib": "0.13.0"}), ["jax 0.13.0 is too new"]),
        (
            situation(
                {**GOOD, "jax": "0.13.0", "jaxlib": "0.13.0"},
                environment={"XLA_DTENSOR_ANY_JAX": "1"},
            ),
            ["is too new: supported are 0.10 to 0.12; XLA_DTENSOR_ANY_JAX=1 lets it be tried"],
        ),
        (situation({**GOOD, "libtpu": "0.0.42.1"}), []),
        (
            situation({**GOOD, "libtpu": "0.0.30"}),
            ["libtpu 0.0.30 is not what jax[tpu] pins", "not tried with libtpu 0.0.30, only with"],
        ),
        (
            situation({**GOOD, "libtpu": "0.0.42", "torch_xla": "2.9.0"}),
            ["not what torch_xla[tpu] pins (==0.0.21); it fits jax[tpu]", "pin different libtpu"],
        ),
        (
            situation({**GOOD, "libtpu": "0.0.42"}, environment={"JAX_PLATFORMS": "cpu"}),
            ["JAX_PLATFORMS=cpu keeps jax off"],
        ),
        (situation(GOOD, (), None), ["no runtime is installed"]),
        (situation(GOOD, chosen="torch_xla"), ["'torch_xla' is asked for, but installed are"]),
        (situation(GOOD, probes=[HANGS]), ["jax, the one that would be chosen, does not start"]),
    ],
)
def test_findings(found: Situation, texts: list[str]) -> None:
    given = [finding.text for finding in findings(found)]
    assert len(given) == len(texts)
    assert all(text in line for text, line in zip(texts, given, strict=True))


def test_another_libtpu_is_a_problem_only_where_it_fits_nobody() -> None:
    both = {**GOOD, "torch_xla": "2.9.0"}
    fits_jax = findings(situation({**both, "libtpu": "0.0.42"}))
    assert {finding.level for finding in fits_jax} == {"note"}
    fits_none = findings(situation({**both, "libtpu": "0.0.30"}))
    assert [finding.level for finding in fits_none] == ["problem", "problem", "note", "note"]


@pytest.mark.parametrize(
    ("found", "starts"),
    [
        (situation(GOOD), []),
        (situation({}, (), None), ["'xla-dtensor[jax]'", "'xla-dtensor[torch-xla]'"]),
        (
            situation({}, (), None, hardware=("tpu",)),
            ["'xla-dtensor[tpu]'", "'xla-dtensor[torch-xla-tpu]'"],
        ),
        (
            situation({}, (), None, hardware=("gpu",)),
            ["'xla-dtensor[cuda13]'", "'xla-dtensor[cuda12]'"],
        ),
        (situation({"jax": "0.10.2"}), ["'xla-dtensor[jax]'"]),
        (situation({**GOOD, "libtpu": "0.0.30"}), ["install 'jax[tpu]==0.10.2'    (the libtpu"]),
        (situation({**GOOD, "torch": "2.11.0"}), ["'torch>=2.13'"]),
        (situation({**GOOD, "torch": "2.11.0", "torch_xla": "2.9.0"}), ["'torch==2.9.*'"]),
        (
            situation({**GOOD, "torch": "2.13.0", "torch_xla": "2.9.0"}),
            ["pip uninstall torch_xla", "'torch==2.9.*' 'torch_xla==2.9.*'"],
        ),
        (situation(GOOD, probes=[ON_CPU], hardware=("tpu",)), ["'xla-dtensor[tpu]'"]),
        (situation(GOOD, probes=[ON_CPU], hardware=("gpu",)), ["'xla-dtensor[cuda12]'"]),
        (
            situation({**GOOD, "torch": "2.13.0"}, probes=[ON_CPU], hardware=("gpu",)),
            ["'xla-dtensor[cuda13]'"],
        ),
        (
            situation(GOOD, chosen="torch_xla"),
            ["'xla-dtensor[torch-xla]'", "XLA_DTENSOR_RUNTIME=jax"],
        ),
        (situation(GOOD, probes=[HANGS]), ["--time-limit", "JAX_PLATFORMS=cpu"]),
    ],
)
def test_advice(found: Situation, starts: list[str]) -> None:
    given = list(advice(found))
    assert len(given) == len(starts)
    assert all(text in line for text, line in zip(starts, given, strict=True))


# ---------------------------------------------------------------- the whole


def diagnose(monkeypatch: pytest.MonkeyPatch, *probes: Probe, **options: Any) -> doctor.Diagnosis:
    monkeypatch.setattr(doctor, "installed_runtimes", lambda: tuple(p.runtime for p in probes))
    monkeypatch.setattr(doctor, "seen_hardware", lambda: ())
    by_name = {each.runtime: each for each in probes}
    installed = Installed({**GOOD, "torch_xla": None, "libtpu": None}, {})
    options = {"environment": {}, "installed": installed, **options}
    return examine(start=lambda name, _: by_name[name], **options)


def test_a_crash_and_a_runtime_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    crash = Probe("jax", "crashed", 2.0, "Its process was ended by SIGSEGV. It last said:\nfault")
    works = Probe("torch_xla", "works", 3.0, "", 8, 4, {"platform": "CPU"})
    found = diagnose(monkeypatch, crash, works)
    assert found.works
    text = to_text(found)
    assert "jax        crashed, 2 s\n" in text
    assert "torch_xla  works, 3 s: 8 x CPU, 4 of them in one process\n" in text
    assert "    fault\n" in text
    assert "export XLA_DTENSOR_RUNTIME=torch_xla" in text
    assert text.endswith("torch_xla: ready")


def test_only_the_runtime_asked_for_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    probes = (Probe("jax", "works", 1.0), Probe("torch_xla", "failed", 1.0, "no"))
    found = diagnose(monkeypatch, *probes, runtime="torch_xla")
    assert [each.runtime for each in found.probes] == ["torch_xla"]
    assert not found.works
    assert "jax        installed, not started" in to_text(found)


def test_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"TPU_WORKER_ID": "3", "PJRT_DEVICE": "TPU", "HOME": "/x"}
    found = diagnose(monkeypatch, environment=environment)
    assert found.variables["PJRT_DEVICE"] == "TPU"
    assert found.variables["NPROC"] is None
    assert found.variables["TPU_WORKER_ID"] == "3"
    assert "HOME" not in found.variables


def test_nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = Installed(dict.fromkeys(GOOD), {})
    found = diagnose(monkeypatch, installed=installed)
    assert found.choice == Choice(None, "no runtime is installed")
    assert to_text(found).endswith("No runtime works.")
    assert json.loads(json.dumps(found.to_dict()))["works"] is False


def test_columns_are_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = to_text(diagnose(monkeypatch, Probe("jax", "works", 1.0))).splitlines()
    start = lines.index("Packages") + 1
    table = lines[start : lines.index("", start)]
    assert len({line.index(line.split()[1]) for line in table}) == 1
    assert not any(line != line.rstrip() for line in lines)
