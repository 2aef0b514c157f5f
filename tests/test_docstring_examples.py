"""The examples in the docstrings of all modules run, and print what they show."""

from __future__ import annotations

import doctest
import importlib
import subprocess
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.contract import PACKAGES, WITHOUT_TORCH

ROOT = Path(__file__).resolve().parents[1]
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
# Its example starts a runtime.
FRESH = "xla_dtensor"


def modules(of: str) -> list[str]:
    """The modules of a package whose sources have examples."""
    paths = [p for p in (ROOT / of).rglob("*.py") if ">>> " in p.read_text(encoding="utf-8")]
    names = (".".join(path.relative_to(ROOT).with_suffix("").parts) for path in sorted(paths))
    return [name.removesuffix(".__init__") for name in names]


ALL = [name for package in PACKAGES for name in modules(package)]
TORCH_XLA = [name for name in ALL if name.startswith("xla_dtensor.runtimes.torch_xla")]
LIGHT = [name for name in ALL if f"{name}.".startswith(tuple(f"{p}." for p in WITHOUT_TORCH))]
# What they need is in the main environment, as torchtitan is.
CLIENTS = [name for name in ALL if name.startswith("xla_dtensor.integrations")]
ABSENT = () if find_spec("torchtitan") else CLIENTS
REST = [name for name in ALL if name not in {*LIGHT, *TORCH_XLA, *ABSENT, FRESH}]


def run(name: str) -> None:
    module = importlib.import_module(name)
    # Before Python 3.13 an example that is skipped was not attempted.
    assert any(found.examples for found in doctest.DocTestFinder().find(module))
    with warnings.catch_warnings():  # An example may show one that is an error here.
        warnings.simplefilter("default")
        result = doctest.testmod(module, optionflags=FLAGS)
    assert result.failed == 0


@pytest.mark.parametrize("name", LIGHT)
def test_without_torch(name: str) -> None:
    run(name)


@pytest.mark.parametrize("name", REST)
@pytest.mark.usefixtures("runtime")
@pytest.mark.only_on("jax")
def test_on_eight_devices(name: str) -> None:
    run(name)


@pytest.mark.usefixtures("runtime")
@pytest.mark.only_on("jax")
def test_in_a_fresh_process() -> None:
    code = f"import doctest, sys, {FRESH} as m; sys.exit(doctest.testmod(m).failed)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", TORCH_XLA)
@pytest.mark.usefixtures("runtime")
@pytest.mark.only_on("torch_xla")
def test_on_torch_xla(name: str) -> None:
    run(name)


def test_that_it_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(LIGHT) > 30
    assert len(REST) > 60
    module = importlib.import_module("mesh_utils.span")
    monkeypatch.setattr(module, "__doc__", ">>> 1 + 1\n3\n")
    with pytest.raises(AssertionError):
        run("mesh_utils.span")
