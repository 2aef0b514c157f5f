"""What the tests of lowerings do with their cases, on sharded inputs, against plain torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_flatten

from tests.xla_dtensor.op_batches import leaf, wide
from tests.xla_dtensor.runtimes.lowering_cases import Case
from xla_dtensor import DeviceMesh, DTensor, distribute_tensor
from xla_dtensor.runtimes.jax.lower.table import TABLE, Lowering

__all__ = [
    "assert_same",
    "check_gradients",
    "check_values",
    "count_calls",
    "leaf",
    "per_op",
    "pulled",
    "sharded",
    "wide",
]

Put = Callable[[torch.Tensor], torch.Tensor]


def sharded(mesh: DeviceMesh) -> Callable[[torch.Tensor], DTensor]:
    """Dims 0 and 1 on dp and tp; sizes such as 5 and 6 leave the last shards short."""

    def put(tensor: torch.Tensor) -> DTensor:
        return distribute_tensor(tensor, mesh, ("dp", "tp", None, None)[: tensor.ndim] or None)

    return put


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


def pulled(output: Any, put: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Send a cotangent of distinct numbers back through every differentiable output."""
    outputs = [
        v for v in tree_flatten(output)[0] if isinstance(v, torch.Tensor) and v.requires_grad
    ]
    for out in outputs:
        cotangent = torch.linspace(-1, 1.3, out.numel(), dtype=torch.float64).reshape(out.shape)
        out.backward(put(cotangent.to(out.dtype)), retain_graph=True)


def check_values(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, op: Any, cases: Sequence[Case]
) -> None:
    """Compare each call on sharded inputs with torch in float64."""
    calls = count_calls(monkeypatch, op)
    for case in cases:
        del calls[:]
        with torch.inference_mode():
            found = case.mapped(sharded(mesh)).run(op)
        assert calls, "the op never reached its lowering"
        assert_same(found, case.run(op), case.mapped(wide).run(op))


def check_gradients(
    mesh: DeviceMesh, op: Any, cases: Sequence[Case], rtol: float = 1e-4, atol: float = 2e-5
) -> None:
    """Compare the gradients of all inputs with torch in float64, where torch has them."""
    for case in cases:
        if not all(t.numel() for t in case.tensors()):
            continue
        reference, single = case.mapped(wide).mapped(leaf), case.mapped(leaf)
        try:
            pulled(reference.run(op), lambda t: t)
            pulled(single.run(op), lambda t: t)
        except RuntimeError:
            continue  # torch itself cannot differentiate it
        ours = case.mapped(lambda t: leaf(sharded(mesh)(t)))
        pulled(ours.run(op), sharded(mesh))
        for mine, theirs, narrow in zip(
            ours.tensors(), reference.tensors(), single.tensors(), strict=True
        ):
            assert (mine.grad is None) == (theirs.grad is None)
            if theirs.grad is not None:
                assert mine.grad is not None
                assert narrow.grad is not None
                # Where float32 overflows on the way, it does so in torch as well.
                expected = torch.where(narrow.grad.isfinite(), theirs.grad, narrow.grad)
                torch.testing.assert_close(
                    mine.grad.cpu(),
                    expected.to(mine.dtype),
                    rtol=rtol,
                    atol=atol,
                    equal_nan=True,
                )
