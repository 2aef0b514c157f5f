"""All ops of the tables against plain PyTorch: values and gradients in compiled steps, and eager.

A test is a batch of calls, see op_batches; a failure names those that are wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

import xla_dtensor as xd
from tests.xla_dtensor.op_batches import (
    Program,
    Put,
    Tolerance,
    by_batches,
    check_gradients,
    check_values,
    eagerly,
    program_of,
    within,
)
from tests.xla_dtensor.runtimes import (
    lowering_cases_counting,
    lowering_cases_linalg,
    lowering_cases_special,
)
from tests.xla_dtensor.runtimes.layer_cases_images import LAYERS
from tests.xla_dtensor.runtimes.lowering_cases import CASES, POINTWISE, RANGES, Case

pytestmark = pytest.mark.only_on("jax")


@pytest.fixture(scope="module")
def put(mesh: xd.DeviceMesh) -> Put:
    """Dims 0 and 1 on dp and tp; sizes such as 5 and 6 leave the last shards short."""

    def place(tensor: torch.Tensor) -> torch.Tensor:
        cut = ("dp", "tp", *(None,) * (tensor.ndim - 2))[: tensor.ndim]
        return xd.distribute_tensor(tensor, mesh, cut or None)

    return place


def programs(table: dict[Any, list[Case]], first: int | None = None, **options: Any) -> list[Program]:
    """The calls of a table, of each op the `first` ones."""
    return [
        replace(
            program_of(f"{str(op).removeprefix('aten.')} {i}", op, *case.args, **case.kwargs),
            **options,
        )
        for op, cases in table.items()
        for i, case in enumerate(cases[:first])
    ]


CLOSE: Tolerance = (2e-5, 5e-6)
STATIC = [
    *programs(CASES),
    *programs(lowering_cases_counting.STATIC),
    *programs(lowering_cases_linalg.LINALG),
    *programs(lowering_cases_special.ALL),
]


@by_batches(STATIC)
def test_values(put: Put, batch: list[Program]) -> None:
    check_values(batch, put, xd.compile)

GRADS = [
    *programs({op: cases[:2] if op in POINTWISE else cases for op, cases in CASES.items()}, gradients=CLOSE),
    *programs(lowering_cases_counting.STATIC),
    *programs(lowering_cases_linalg.LINALG),
    *programs(lowering_cases_special.ALL),
]

@by_batches(GRADS)
def test_gradients(put: Put, batch: list[Program]) -> None:
    check_gradients(batch, put, xd.compile)
