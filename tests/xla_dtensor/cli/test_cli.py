"""The command line: arguments, exit statuses, and that it starts where nothing is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from xla_dtensor import __version__, cli
from xla_dtensor.cli import env as doctor
from xla_dtensor.cli.env import Choice, Diagnosis, Probe
from xla_dtensor.versions import Installed

ROOT = Path(__file__).resolve().parents[3]


def run(
    *options: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, **(environment or {})}
    variables.pop("PYTHONPATH", None)
    command = [sys.executable, *options]
    return subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=280
    )


@pytest.mark.parametrize("arguments", [[], ["no_such_command"], ["env", "--time-limit", "0"]])
def test_wrong_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert "usage: python -m xla_dtensor" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"xla_dtensor {__version__}\n"


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    assert "env" in capsys.readouterr().out


@pytest.mark.parametrize(("status", "expected"), [("works", 0), ("failed", 1)])
def test_env(
    status: str,
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: list[object] = []

    def examine(runtime: str | None, *, time_limit_seconds: float) -> Diagnosis:
        asked.extend((runtime, time_limit_seconds))
        probes = (Probe("jax", status, 1.0),)
        installed = Installed({"torch": "2.9.1"}, {})
        choice = Choice("jax", "asked for")
        return Diagnosis(
            "3.11", "Linux", (), installed, "supported", ("jax",), choice, probes, {}, (), ()
        )

    monkeypatch.setattr(doctor, "examine", examine)
    assert cli.main(["env", "--runtime", "jax", "--time-limit", "7"]) == expected
    assert asked == ["jax", 7.0]
    assert f"jax        {status}, 1 s" in capsys.readouterr().out
    assert cli.main(["env", "--json"]) == expected
    found = json.loads(capsys.readouterr().out)
    assert found["works"] is (expected == 0)
    assert found["installed"]["versions"] == {"torch": "2.9.1"}


def test_starts_without_any_package() -> None:
    # -S leaves out site-packages: no numpy, no torch, no runtime.
    done = run("-S", "-m", "xla_dtensor", "env", "--json")
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert found["runtimes"] == []
    assert found["probes"] == []
    assert found["installed"]["versions"]["torch"] is None
    assert found["advice"]


def test_imports_nothing_heavy() -> None:
    heavy = ("numpy", "torch", "jax", "torch_xla", "torchax", "mesh_utils", "rich", "jinja2")
    code = (
        "import sys; import xla_dtensor.cli, xla_dtensor.cli.env, xla_dtensor.cli.env; "
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    assert run("-c", code).stdout == "[]\n"


def test_env_on_this_machine(pytestconfig: pytest.Config) -> None:
    runtime = str(pytestconfig.getoption("--runtime"))
    done = run("-m", "xla_dtensor", "env", "--runtime", runtime, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["choice"]["runtime"] == runtime
    assert [(each["runtime"], each["status"]) for each in found["probes"]] == [(runtime, "works")]
    assert found["probes"][0]["num_devices"] >= 1
