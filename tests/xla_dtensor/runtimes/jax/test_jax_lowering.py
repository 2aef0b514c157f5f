"""Every lowering has a case, and every case reaches the lowering that it is of.

What they compute in a compiled step, and the first of each op eagerly, test_op_tables compares on
every run; here each case runs eagerly by itself: in inference mode, where composite ops arrive
whole, and under autograd, where torch may take them apart. The reference is torch on the CPU, in
float64 where the inputs are float32.
"""

from __future__ import annotations

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
from tests.xla_dtensor.runtimes.jax.lowering_checks import (
    check_gradients,
    check_values,
    count_calls,
    per_op,
    sharded,
)
from tests.xla_dtensor.runtimes.lowering_cases import CASES, ELSEWHERE, POINTWISE, RANGES
from xla_dtensor import DeviceMesh
from xla_dtensor.runtimes.jax import lower as jax_lowering
from xla_dtensor.runtimes.jax.lower.table import TABLE

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


@pytest.mark.thorough
@per_op(CASES)
def test_values(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, op: Any) -> None:
    check_values(mesh, monkeypatch, op, CASES[op])


@pytest.mark.thorough
@per_op(CASES)
def test_gradients(mesh: DeviceMesh, op: Any) -> None:
    # Further cases of pointwise ops differ in dtypes and scalars only.
    cases = CASES[op][: 2 if op in POINTWISE else None]
    check_gradients(mesh, op, cases, rtol=2e-5, atol=5e-6)


@pytest.mark.thorough
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


def test_a_first_state_is_filled_by_the_host_that_has_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from xla_dtensor.runtimes.jax.lower import index

    def compiled(*_: Any, **__: Any) -> None:
        raise AssertionError("a program was compiled")

    weight = torch.zeros(3, 2, dtype=torch.bfloat16)
    monkeypatch.setattr(index.jnp, "full", compiled)
    with index.filling_on_host():
        filled = index._filled(0.5, weight)
    assert filled.dtype == "bfloat16"
    assert filled.tolist() == [[0.5, 0.5]] * 3
    monkeypatch.setattr(index.jax_devices, "has_host_memory", lambda: False)
    with index.filling_on_host(), pytest.raises(AssertionError, match="compiled"):
        index._filled(0.5, weight)
