"""Which tests are the contract: what users may rely on, by the public API. `make test` runs them.

A test is no part of the contract, and has the marker ``thorough``, if

* its file imports a private module of the project,
* it compiles with libtpu (``tests.libtpu.needs_libtpu``),
* it runs a job of several processes (the fixture ``hosts``),
* it lies in a folder of what is no part of the packages (`THOROUGH_FOLDERS`),
* it takes long: slow_tests.txt names it, which tools/slow_tests.py writes from measured times,
* or it says so itself: it draws many programs, asks the package index.

`make test-all` runs those as well.

    from xla_dtensor import distribute_tensor                  public: README and docs name it
    from mesh_utils.network import LinkModel                   public: of a package without torch
    from xla_dtensor.runtimes.jax.lower.table import TABLE  private: the file is thorough

So a change of what is private can break no test of the contract but by breaking what it does. The
packages that need no torch are small libraries whose modules are all public here; their tests are
quick.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

__all__ = [
    "PACKAGES",
    "PUBLIC",
    "SLOW_TESTS",
    "THOROUGH_FOLDERS",
    "WITHOUT_TORCH",
    "mark_thorough",
    "private_imports",
    "slow_tests",
]

PACKAGES = ("xla_dtensor", "mesh_utils", "tpu_configs")
WITHOUT_TORCH = ("mesh_utils", "tpu_configs", "xla_dtensor.core", "xla_dtensor.report")
THOROUGH_FOLDERS = ("benchmarks", "examples", "pytorch_dtensor", "tools", "torchtitan")
PUBLIC = frozenset(
    {
        "xla_dtensor",
        "xla_dtensor.checkpoint",
        "xla_dtensor.cli",
        "xla_dtensor.collectives",
        "xla_dtensor.data",
        "xla_dtensor.cli.env",
        "xla_dtensor.errors",
        "xla_dtensor.hosts.hugging_face",
        "xla_dtensor.models",
        "xla_dtensor.runtimes",
        "xla_dtensor.runtimes.base",  # what a third party's runtime is written against
        "xla_dtensor.spmd",
    }
)

_TESTS = Path(__file__).resolve().parent
SLOW_TESTS = _TESTS / "slow_tests.txt"
_ROOT = _TESTS.parent


def mark_thorough(items: list[pytest.Item]) -> None:
    """Give the marker to the tests that are no part of the contract."""
    slow = slow_tests()
    for item in items:
        has_several_processes = "hosts" in getattr(item, "fixturenames", ())
        reasons = [str(mark.kwargs.get("reason")) for mark in item.iter_markers("skipif")]
        has_libtpu = any(reason.startswith("libtpu") for reason in reasons)
        is_slow = item.nodeid in slow
        if is_slow or has_several_processes or has_libtpu or _is_thorough(item.path):
            item.add_marker(pytest.mark.thorough)


def slow_tests() -> frozenset[str]:
    """Return the names, as pytest writes them, of the tests that take long."""
    lines = SLOW_TESTS.read_text(encoding="utf-8").splitlines()
    return frozenset(line for line in lines if line and not line.startswith("#"))


@cache
def _is_thorough(file: Path) -> bool:
    in_folder = file.relative_to(_TESTS).parts[0] in THOROUGH_FOLDERS
    return in_folder or bool(private_imports(file))


def private_imports(file: Path) -> frozenset[str]:
    """Return the private modules of the project that a file imports."""
    return frozenset(name for name in _imports(file) if _is_private(name))


def _imports(file: Path) -> set[str]:
    """Return the modules that a file imports, at its top or in functions."""
    imported: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            imported |= {_module(f"{node.module}.{alias.name}") for alias in node.names}
        elif isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
    return imported


def _module(name: str) -> str:
    """Return the module that a name is, or is in."""
    path = _ROOT.joinpath(*name.split("."))
    return name if path.is_dir() or path.with_suffix(".py").exists() else name.rpartition(".")[0]


def _is_private(module: str) -> bool:
    if module.partition(".")[0] not in PACKAGES or module in PUBLIC:
        return False
    return not any(f"{module}.".startswith(f"{package}.") for package in WITHOUT_TORCH)
