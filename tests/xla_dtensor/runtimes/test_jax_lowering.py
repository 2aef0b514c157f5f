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
from xla_dtensor import DeviceMesh, DTensor, distribute_tensor
from xla_dtensor.runtimes import jax_lowering
from xla_dtensor.runtimes.jax_lowering.table import TABLE, Lowering

pytestmark = [pytest.mark.only_on("jax"), pytest.mark.usefixtures("runtime")]

aten = torch.ops.aten


def sharded(mesh: DeviceMesh) -> Callable[[torch.Tensor], DTensor]:
    """Dims 0 and 1 on dp and tp; sizes such as 5 and 6 leave the last shards short."""

    def put(tensor: torch.Tensor) -> DTensor:
        return distribute_tensor(tensor, mesh, ("dp", "tp", None, None)[: tensor.ndim] or None)

    return put


def wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.dtype == torch.float32 else tensor


def assert_same(found: Any, expected: Any, reference: Any) -> None:
    """Compare with the values of `reference`, in the dtypes of `expected`."""
    for ours, plain, value in zip(
        *(tree_flatten(v)[0] for v in (found, expected, reference)), strict=True
    ):
        if isinstance(plain, torch.Tensor):
            assert isinstance(ours, DTensor)
            assert (ours.dtype, ours.shape) == (plain.dtype, plain.shape)
            half = plain.dtype == torch.bfloat16
            tolerance: dict[str, Any] = (
                {"rtol": 2e-2, "atol": 1e-2} if half else {"rtol": 2e-5, "atol": 2e-6}
            )
            torch.testing.assert_close(
                ours.cpu(), value.detach().to(plain.dtype), equal_nan=True, **tolerance
            )
        else:
            assert ours == plain


def count_calls(monkeypatch: pytest.MonkeyPatch, op: Any) -> list[Any]:
    """Record each use of an op's lowering."""
    lowering, calls = TABLE[op], []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(op)
        return lowering.function(*args, **kwargs)

    monkeypatch.setitem(TABLE, op, Lowering(counted, lowering.wants_meta))
    return calls


def per_op(table: dict[Any, Any]) -> Any:
    return pytest.mark.parametrize("op", table, ids=lambda op: str(op).removeprefix("aten."))


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
    calls = count_calls(monkeypatch, op)
    for case in CASES[op]:
        del calls[:]
        with torch.inference_mode():
            found = case.mapped(sharded(mesh)).run(op)
        assert calls, "the op never reached its lowering"
        assert_same(found, case.run(op), case.mapped(wide).run(op))


def leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.is_floating_point())


def pulled(output: Any, put: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Send a cotangent of distinct numbers back through every differentiable output."""
    outputs = [
        v for v in tree_flatten(output)[0] if isinstance(v, torch.Tensor) and v.requires_grad
    ]
    for out in outputs:
        cotangent = torch.linspace(-1, 1.3, out.numel(), dtype=torch.float64).reshape(out.shape)
        out.backward(put(cotangent.to(out.dtype)), retain_graph=True)


@per_op(CASES)
def test_gradients(mesh: DeviceMesh, op: Any) -> None:
    # Further cases of pointwise ops differ in dtypes and scalars only.
    for case in CASES[op][: 2 if op in POINTWISE else None]:
        if not all(t.numel() for t in case.tensors()):
            continue  # nothing to differentiate
        reference = case.mapped(wide).mapped(leaf)
        try:
            pulled(reference.run(op), lambda t: t)
        except RuntimeError:
            continue  # torch itself cannot differentiate it
        ours = case.mapped(lambda t: leaf(sharded(mesh)(t)))
        pulled(ours.run(op), sharded(mesh))
        for mine, theirs in zip(ours.tensors(), reference.tensors(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None)
            if theirs.grad is not None:
                assert mine.grad is not None
                expected_grad = theirs.grad.to(mine.dtype)
                torch.testing.assert_close(
                    mine.grad.cpu(), expected_grad, rtol=2e-5, atol=5e-6, equal_nan=True
                )


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
