"""Every lowering against plain torch: values, dtype, shape and gradients, on sharded inputs.

An op is called three ways: in inference mode, where composite ops arrive whole; under autograd,
where torch may take them apart; and with other dtypes and shapes than the first. The reference is
torch on the CPU, in float64 where the inputs are float32.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_flatten

from tests.xla_dtensor.runtimes import (
    layer_cases_images,
    lowering_cases_counting,
    lowering_cases_linalg,
    lowering_cases_special,
)
from tests.xla_dtensor.runtimes.lowering_cases import CASES, ELSEWHERE, POINTWISE, RANGES
from tests.xla_dtensor.runtimes.lowering_checks import (
    assert_same,
    check_gradients,
    check_values,
    count_calls,
    per_op,
    sharded,
)
from xla_dtensor import DeviceMesh, distribute_tensor
from xla_dtensor.runtimes import jax_lowering
from xla_dtensor.runtimes.jax_lowering.table import TABLE

pytestmark = [pytest.mark.only_on("jax"), pytest.mark.usefixtures("runtime")]

aten = torch.ops.aten


def test_every_lowering_has_a_case() -> None:
    with_cases = set(CASES) | set(RANGES) | ELSEWHERE
    for others in (
        layer_cases_images,
        lowering_cases_counting,
        lowering_cases_linalg,
        lowering_cases_special,
    ):
        with_cases |= set(others.ALL)
    assert set(TABLE) - with_cases == set()
    assert jax_lowering.find_lowering(aten.exp.default) is TABLE[aten.exp.default]


@per_op(CASES)
def test_values(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, op: Any) -> None:
    check_values(mesh, monkeypatch, op, CASES[op])


@per_op(CASES)
def test_gradients(mesh: DeviceMesh, op: Any) -> None:
    # Further cases of pointwise ops differ in dtypes and scalars only.
    cases = CASES[op][: 2 if op in POINTWISE else None]
    check_gradients(mesh, op, cases, rtol=2e-5, atol=5e-6)


OTHERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "bfloat16": lambda t: t.bfloat16() if t.is_floating_point() else t,
    "int64": lambda t: torch.where(t.trunc() == 0, 1, t).long() if t.is_floating_point() else t,
    "bool": lambda t: t > 0 if t.is_floating_point() else t,
    "0-dim": lambda t: t.reshape(-1)[0].clone(),
    "empty": lambda t: t.new_empty((0, *t.shape[1:])) if t.ndim == 2 else t,
}


@pytest.mark.parametrize("change", OTHERS)
@per_op(POINTWISE)
def test_other_inputs(mesh: DeviceMesh, op: Any, change: str) -> None:
    case = POINTWISE[op][0].mapped(OTHERS[change])
    try:
        expected = case.run(op)
    except (RuntimeError, TypeError):
        return  # not an op of torch's on this dtype
    assert_same(case.mapped(lambda t: distribute_tensor(t, mesh)).run(op), expected, expected)


@per_op(RANGES)
def test_shape_dtype_and_range(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, op: Any) -> None:
    case, low, high = RANGES[op]
    calls = count_calls(monkeypatch, op)
    found, expected = case.mapped(sharded(mesh)).run(op), case.run(op)
    assert calls
    for ours, plain in zip(tree_flatten(found)[0], tree_flatten(expected)[0], strict=True):
        assert (ours.dtype, ours.shape, ours.stride()) == (plain.dtype, plain.shape, plain.stride())
        assert ours.cpu().min() >= low
        assert ours.cpu().max() <= high


VALUES = {
    "bool": torch.tensor([True, False, True]),
    "uint8": torch.tensor([1, 2, 255], dtype=torch.uint8),
    "int32": torch.tensor([-7, 2, 3], dtype=torch.int32),
    "int64": torch.tensor([-7, 2, 3]),
    "bfloat16": torch.tensor([-1.5, 0.5, 2.25]).bfloat16(),
    "float32": torch.tensor([-1.5, 0.5, 2.25]),
}
SECOND = {
    **VALUES,
    "True": True,
    "3": 3,
    "1.5": 1.5,
    "0-dim int64": torch.tensor(3),
    "0-dim float32": torch.tensor(1.5),
    "0-dim float64": torch.tensor(1.5, dtype=torch.float64),
}
PROMOTING: dict[str, Callable[[Any, Any], torch.Tensor]] = {
    "add": torch.add,
    "mul": torch.mul,
    "div": torch.div,
    "eq": torch.eq,
    "lt": torch.lt,
    "where": lambda a, b: torch.where(VALUES["bool"], a, b),
    "pow": lambda a, b: torch.pow(a.abs() if a.dtype != torch.bool else a, b),
    "scalar first": lambda a, b: b - a,
}


@pytest.mark.parametrize("name", PROMOTING)
def test_dtypes_are_promoted_as_torch_does(mesh: DeviceMesh, name: str) -> None:
    function = PROMOTING[name]
    for (dtype, a), (kind, b) in itertools.product(VALUES.items(), SECOND.items()):
        if (name, dtype, kind) == ("pow", "bool", "True"):
            continue  # bool on torch's CPU, int64 on its meta device, which is asked here
        try:
            expected = function(a, b)
        except RuntimeError:
            continue
        ours_b = distribute_tensor(b, mesh) if isinstance(b, torch.Tensor) else b
        found = function(distribute_tensor(a, mesh), ours_b)
        assert found.dtype == expected.dtype, (dtype, kind)
        torch.testing.assert_close(
            found.cpu(), expected, equal_nan=True, msg=lambda m, c=(dtype, kind): f"{c}: {m}"
        )
