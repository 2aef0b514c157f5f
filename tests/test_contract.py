"""The contract is what public imports can say."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tests.contract import PUBLIC, private_imports, slow_tests

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("source", "private"),
    [
        ("import xla_dtensor as xd\nfrom xla_dtensor import distribute_tensor", set()),
        ("from xla_dtensor.spmd import mark_sharding", set()),
        (
            "from mesh_utils.network import LinkModel\nfrom xla_dtensor.core.layout import Layout",
            set(),
        ),
        ("from tests.hosts import Hosts\nimport torch", set()),
        ("from xla_dtensor.runtimes import get_runtime, base", set()),
        ("from xla_dtensor.runtimes import registry", {"xla_dtensor.runtimes.registry"}),
        ("def f():\n    import xla_dtensor.dtensor.dispatch", {"xla_dtensor.dtensor.dispatch"}),
        (
            "from xla_dtensor.runtimes.jax.lower.table import TABLE",
            {"xla_dtensor.runtimes.jax.lower.table"},
        ),
    ],
)
def test_private_imports(tmp_path: Path, source: str, private: set[str]) -> None:
    file = tmp_path / "test_it.py"
    file.write_text(source)
    assert private_imports(file) == private


@pytest.mark.parametrize("module", sorted(PUBLIC))
def test_public_modules_exist(module: str) -> None:
    assert importlib.util.find_spec(module) is not None


def test_slow_tests_exist() -> None:
    """A test that was renamed is part of the contract again, and its old name is nobody's."""
    gone = []
    for name in sorted(slow_tests()):
        path, *_, function = re.sub(r"\[.*", "", name).split("::")
        file = ROOT / path
        if not file.exists() or f"def {function}(" not in file.read_text(encoding="utf-8"):
            gone.append(name)
    assert gone == []
