"""The engine of batches names every call that fails, and no other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import xla_dtensor as xd
from tests.xla_dtensor.op_batches import Program, Put, check_all, check_values, eagerly

X = torch.linspace(-2, 3, 30).reshape(5, 6)


@pytest.fixture(scope="module")
def put(mesh: xd.DeviceMesh) -> Put:
    return lambda tensor: xd.distribute_tensor(tensor, mesh, ["dp", "tp"][: tensor.ndim] or None)


def wrong(x: torch.Tensor) -> torch.Tensor:
    return x.exp() * (1.01 if isinstance(x, xd.DTensor) else 1)


def wrong_gradient(x: torch.Tensor) -> torch.Tensor:
    return x.detach() + 2 * x if isinstance(x, xd.DTensor) else 3 * x


def wrong_dtype(x: torch.Tensor) -> torch.Tensor:
    return x.double() if isinstance(x, xd.DTensor) else x.clone()


def lost_gradient(x: torch.Tensor) -> torch.Tensor:
    return x.detach() * 3 if isinstance(x, xd.DTensor) else x * 3


def raising(x: torch.Tensor) -> torch.Tensor:
    if isinstance(x, xd.DTensor):
        raise NotImplementedError("no kernel")
    return x.clone()


GOOD = {"sin": torch.sin, "sum": torch.sum, "prod": torch.prod, "abs": torch.abs}
BAD: dict[str, tuple[Callable[..., Any], str]] = {
    "wrong": (wrong, "Tensor-likes are not close!"),
    "wrong gradient": (wrong_gradient, "gradients: Tensor-likes are not close!"),
    "wrong dtype": (wrong_dtype, "torch.float64"),
    "lost gradient": (lost_gradient, "gradients: 0, in torch 1"),
    "raising": (raising, "raises NotImplementedError: no kernel"),
}


def batch(*names: str) -> list[Program]:
    calls = {**GOOD, **{name: call for name, (call, _) in BAD.items()}}
    return [Program(f"<{name}>", calls[name], (X,)) for name in names]


@pytest.mark.parametrize("execute", [xd.compile, eagerly], ids=["compiled", "eager"])
def test_each_call_that_fails_is_named(put: Put, execute: Any) -> None:
    programs = batch("sin", "wrong", "sum", "raising", "wrong gradient", "lost gradient", "prod")
    programs += batch("wrong dtype", "abs")
    with pytest.raises(AssertionError) as raised:
        check_all(programs, put, execute)
    message = str(raised.value)
    assert message.startswith("5 of 9 programs fail\n")
    for name, (_, text) in BAD.items():
        (fault,) = (part for part in message.split("\n\n<") if f"{name}>: " in "<" + part)
        assert text in fault
    assert not any(f"<{name}>" in message for name in GOOD)


def test_values_alone(put: Put) -> None:
    check_values(batch("sin", "wrong gradient", "sum"), put, xd.compile)
    with pytest.raises(AssertionError, match=r"1 of 2 programs fail\n<wrong>: Tensor-likes"):
        check_values(batch("sin", "wrong"), put, xd.compile)


def test_calls_that_fail_together_only(put: Put) -> None:
    """Nobody is to blame alone: all are named."""

    def never_two(step: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        def run(*arguments: Any) -> list[Any]:
            results = step(*arguments)
            if len(results) > 1:
                raise MemoryError("two")
            return results

        return run

    expected = r"only in one step: <sin>, <abs>: raise MemoryError: two"
    with pytest.raises(AssertionError, match=expected):
        check_values(batch("sin", "abs"), put, never_two)


def test_a_tensor_of_several_calls_is_one_input(put: Put) -> None:
    """What one call has twice is two inputs, so that each has a gradient of its own."""
    inputs: list[int] = []

    def counting(step: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        def run(tensors: Any, *rest: Any) -> list[Any]:
            inputs.append(len(tensors))
            return step(tensors, *rest)

        return run

    programs = [Program("add", torch.add, (X, X)), Program("sin", torch.sin, (X,))]
    check_all(programs, put, counting)
    assert inputs == [2]
