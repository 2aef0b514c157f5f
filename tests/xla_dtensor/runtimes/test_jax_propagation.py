"""The cuts that are found before compiling are those that XLA says it found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.usefixtures("runtime"), pytest.mark.only_on("jax")]


def test_products_are_cut_as_xla_says(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.xla_dtensor.runtimes.propagation_child", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    found = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert len(found) == 5
    assert all(count == alike > 0 for count, alike in found), found


def test_numbers_are_taken_away_again() -> None:
    import jax
    from jax.extend.mlir import ir

    from xla_dtensor.runtimes.jax_propagation import (
        number_of,
        numbered,
        operations,
        propagated,
        unnumber,
    )

    with jax.named_scope("scope"):
        lowered: Any = jax.jit(lambda x: (x @ x) @ x).lower(jax.numpy.ones((4, 4)))
    module = lowered.compiler_ir("stablehlo").operation
    before = str(module)
    with module.context, ir.Location.unknown():
        products = numbered(module, ("stablehlo.dot_general",))
        assert len(products) == 2
        copy = propagated(module)
        assert {number_of(op) for op in operations(copy)} == {0, 1, None}
        unnumber(products)
    assert str(module) == before
