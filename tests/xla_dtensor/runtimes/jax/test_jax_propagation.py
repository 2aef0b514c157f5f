"""The cuts that are found before compiling are those that XLA says it found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import xla_dtensor as xd
from xla_dtensor.errors import CompileError

pytestmark = [pytest.mark.usefixtures("runtime"), pytest.mark.only_on("jax")]


def test_products_are_cut_as_xla_says(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "tests.xla_dtensor.runtimes.jax.propagation_child",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    found = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert len(found) == 5
    assert all(count == alike > 0 for count, alike in found), found


def test_numbers_are_taken_away_again() -> None:
    import jax
    from jax.extend.mlir import ir

    from xla_dtensor.runtimes.jax.arrays.products import (
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


@pytest.mark.parametrize(
    "step",
    [
        lambda x: torch.linalg.svd(x @ x.mT)[1],
        lambda x: torch.linalg.qr(x @ x)[1],
        lambda x: torch.linalg.eigvals(x @ x).abs(),
        lambda x: torch.linalg.lu_factor(x @ x)[0],
        lambda x: torch.sort(x @ x)[0],
    ],
    ids=["svd", "qr", "eigvals", "lu", "sort"],
)
def test_programs_that_call_a_library(step: Any) -> None:
    """A call with several results does not come back from HLO as Shardy takes it."""
    cube = xd.init_device_mesh("xla", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
    value = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = xd.distribute_tensor(value, cube, [Shard(0), Shard(1), Replicate()])
    found: Any = xd.compile(step)(x)
    torch.testing.assert_close(found.full_tensor().cpu().sort().values, step(value).sort().values)


def test_what_shardy_cannot_read_is_refused() -> None:
    import jax
    from jax.extend.mlir import ir

    from xla_dtensor.runtimes.jax.arrays.products import propagated

    lowered: Any = jax.jit(lambda x: x).lower(1.0)
    with lowered.compiler_ir("stablehlo").context, ir.Location.unknown():
        module = ir.Module.parse(
            """func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {
                 %0 = stablehlo.tuple %x : tuple<tensor<4xf32>>
                 %1 = stablehlo.custom_call @library(%0) : (tuple<tensor<4xf32>>) -> tensor<4xf32>
                 return %1 : tensor<4xf32>
               }"""
        )
        with pytest.raises(CompileError, match=r"(?s)could not be found, .* of its own"):
            propagated(module.operation)
