"""Traced numbers: Python's arithmetic inside a compiled step, and nothing that needs a value."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch

from xla_dtensor import DeviceMesh, distribute_tensor
from xla_dtensor import compile as xla_compile
from xla_dtensor.errors import CompileError

pytestmark = [pytest.mark.only_on("jax"), pytest.mark.usefixtures("runtime")]

BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
    "**": operator.pow,
    "min": torch.sym_min,
    "max": torch.sym_max,
}
UNARY: dict[str, Callable[[Any], Any]] = {
    "-": operator.neg,
    "abs": abs,
    "float": torch.sym_float,
    "floor": math.floor,
    "ceil": math.ceil,
    "round": round,
    "trunc": math.trunc,
    "sqrt": lambda a: torch._sym_sqrt(abs(a)),  # pyright: ignore[reportAttributeAccessIssue]
}
COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}
PAIRS = [(7.5, 2.0), (-7.5, 2.0), (7.5, -2.5), (7, 2), (-7, 2), (7, -2), (7, 2.5), (2.5, 7)]


def traced(mesh: DeviceMesh, function: Callable[..., Any], *numbers: float) -> list[float]:
    """Compute with ``.item()`` of tensors inside a step; return what the program gives.

    The program runs a second time on the same numbers plus a changed first one, so that a number
    baked in at the first trace would be seen.
    """

    def step(base: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        found = function(*(t.item() for t in tensors))
        return base + torch.stack([base * 0 + number for number in found])

    compiled = xla_compile(step)
    base = distribute_tensor(torch.zeros((), dtype=torch.float64), mesh)
    kinds = [torch.float64 if isinstance(n, float) else torch.int64 for n in numbers]

    def call(*values: float) -> list[float]:
        tensors = [
            distribute_tensor(torch.tensor(v, dtype=k), mesh)
            for v, k in zip(values, kinds, strict=True)
        ]
        return compiled(base, *tensors).tolist()

    first = call(*numbers)
    changed = (numbers[0] + 2, *numbers[1:])
    assert call(*changed) == pytest.approx(list(function(*changed)), rel=1e-15)
    assert compiled.stats()["traces"] == 1
    return first


@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_arithmetic_is_pythons(mesh: DeviceMesh, a: float, b: float) -> None:
    def all_of_them(x: Any, y: Any) -> list[Any]:
        # A negative base to a fraction is complex in Python.
        operators = [f for name, f in BINARY.items() if name != "**"]
        return [f(x, y) for f in operators]

    assert traced(mesh, all_of_them, a, b) == pytest.approx(all_of_them(a, b), rel=1e-15)


@pytest.mark.parametrize("number", [7.5, -7.5, 7, -7])
def test_arithmetic_with_plain_numbers_on_either_side(mesh: DeviceMesh, number: float) -> None:
    def mixed(x: Any) -> list[Any]:
        forward = [f(x, c) for f in BINARY.values() for c in (3, 2.0) if (f, c) != (pow, 2.0)]
        backward = [BINARY[name](c, x) for name in "+-*/%" for c in (3, 2.5)]
        return [*forward, *backward, c_to_the(x)]

    def c_to_the(x: Any) -> Any:
        return 0.9 ** (x * 1.0)

    assert traced(mesh, mixed, number) == pytest.approx(mixed(number), rel=1e-14)


@pytest.mark.parametrize("number", [7.5, -7.5, 7, -7])
def test_functions_of_one_number(mesh: DeviceMesh, number: float) -> None:
    def all_of_them(x: Any) -> list[Any]:
        return [f(x) for f in UNARY.values()]

    assert traced(mesh, all_of_them, number) == pytest.approx(all_of_them(number), rel=1e-15)


@pytest.mark.parametrize("name", COMPARISONS)
def test_a_comparison_is_a_traced_truth_value(mesh: DeviceMesh, name: str) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        result = COMPARISONS[name](x.item(), 1.0)
        assert isinstance(result, torch.SymBool)
        return x * 2 if result else x * 3

    compiled = xla_compile(step)
    for number in (2.0, 1.0, 0.0):
        found = compiled(distribute_tensor(torch.tensor(number), mesh))
        assert found.item() == number * (2 if COMPARISONS[name](number, 1.0) else 3)


def test_integers_stay_exact(mesh: DeviceMesh) -> None:
    step = xla_compile(lambda x: x * 0 + x.item() * 3)
    x = distribute_tensor(torch.tensor(2**40 + 1), mesh)
    assert step(x).item() == 3 * (2**40 + 1)
    assert step(x).dtype == torch.int64


def test_a_traced_number_keeps_the_dtype_of_the_tensor_it_meets(mesh: DeviceMesh) -> None:
    step = xla_compile(lambda x, n: (x * n.item(), x.add(x, alpha=n.item()), x.clamp(max=n.item())))
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.tensor([1.0, 2.0, 4.0]).to(dtype)
        found = step(distribute_tensor(x, mesh), distribute_tensor(torch.tensor(1.5), mesh))
        for ours, plain in zip(
            found, (x * 1.5, x.add(x, alpha=1.5), x.clamp(max=1.5)), strict=True
        ):
            assert ours.dtype == dtype
            assert torch.equal(ours.cpu(), plain)


def test_the_bias_correction_of_adam(mesh: DeviceMesh) -> None:
    """The formula as torch.optim writes it; a baked step would repeat the first one's value."""
    count = distribute_tensor(torch.tensor(0.0, dtype=torch.float64), mesh)

    def corrected(rate: float = 1e-3) -> torch.Tensor:
        count.add_(1)
        number = count.item()
        size = rate / (1 - 0.9**number)
        return count * 0.0 + size * (1 - 0.999**number) ** 0.5

    step = xla_compile(corrected)
    for n in range(1, 5):
        expected = 1e-3 / (1 - 0.9**n) * math.sqrt(1 - 0.999**n)
        assert step().item() == pytest.approx(expected, rel=1e-12)


NEEDS_A_VALUE: dict[str, Callable[[torch.Tensor], Any]] = {
    "bool": lambda x: bool(x.item()),
    "int": lambda x: int(x.item()),
    "float": lambda x: float(x.item()),
    "if": lambda x: 1 if x.item() > 0 else 2,
    "round": lambda x: range(int(x.item())),
    "math": lambda x: math.sqrt(x.item()),
    "hash": lambda x: {x.item(): 1},
    "int of a tensor": lambda x: int(x),
    "float of a tensor": lambda x: float(x),
    "bool of a tensor": lambda x: bool(x > 0),
    "item of a bool": lambda x: (x > 0).item(),
}


# Python 3.11 says so of every class that has __trunc__ and no __int__, before it calls it.
@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:The delegation of int")
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
@pytest.mark.parametrize("name", NEEDS_A_VALUE)
def test_python_that_needs_the_value_is_refused(
    mesh: DeviceMesh, name: str, dtype: torch.dtype
) -> None:
    with pytest.raises((CompileError, TypeError)) as error:
        xla_compile(NEEDS_A_VALUE[name])(distribute_tensor(torch.tensor(2, dtype=dtype), mesh))
    assert "while a step was traced" in str(error.value) or name == "hash"


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
def test_a_traced_number_can_be_printed(mesh: DeviceMesh, dtype: torch.dtype) -> None:
    texts = []

    def step(x: torch.Tensor) -> torch.Tensor:
        texts.extend((str(x.item()), repr(x.item()), f"{x.item()}"))
        return x

    xla_compile(step)(distribute_tensor(torch.tensor(2, dtype=dtype), mesh))
    assert set(texts) == {"traced number"}


def test_outside_a_step_item_is_a_plain_number(mesh: DeviceMesh) -> None:
    number = distribute_tensor(torch.tensor(2.5), mesh).item()
    assert type(number) is float
    assert type(distribute_tensor(torch.tensor(2), mesh).item()) is int
    assert type(distribute_tensor(torch.tensor(True), mesh).item()) is bool
