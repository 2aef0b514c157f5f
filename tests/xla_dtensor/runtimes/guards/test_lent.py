"""Numbers that a trace is lent: what Python computes of them, and what it asks of them."""

from __future__ import annotations

import copy
import math
import operator
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from xla_dtensor.runtimes.guards.lent import Arithmetic, is_lent, is_number
from xla_dtensor.runtimes.guards.values import Moving

NUMBERS = (0, 1, -3, 7, 2**40, 0.0, -0.0, 0.5, -2.75, 1e300, math.inf, math.nan)
BINARY = (
    *(operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod),
    *(operator.pow, operator.lshift, operator.and_, operator.or_, operator.xor, divmod),
    *(operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge, min, max),
    *(math.atan2, math.copysign, math.fmod, round),
)
UNARY: tuple[Callable[[Any], Any], ...] = (
    *(operator.neg, operator.pos, abs, operator.invert, round, math.floor, math.ceil, math.trunc),
    *(math.sqrt, math.exp, math.cos, math.isnan, float, int, bool, str, repr, operator.index),
    *(
        lambda n: f"{n:.3f}",
        lambda n: f"{n:5}",
        lambda n: "%d".__mod__(n),
        lambda n: n.is_integer(),
    ),
    *(lambda n: n.real, lambda n: n.bit_length(), np.asarray, lambda n: np.float64(2) * n),
    *(lambda n: isinstance(n, int), lambda n: isinstance(n, float), lambda n: n == "text"),
    *(lambda n: pickle.loads(pickle.dumps(n)), copy.copy, copy.deepcopy),
)


def lend(arithmetic: Arithmetic, number: Any) -> tuple[Any, Moving]:
    moving = Moving(number, fits=lambda now: type(now) is type(number))
    return arithmetic.lend(moving), moving


def outcome(function: Callable[..., Any], *operands: Any) -> str:
    try:
        result = function(*operands)
    except Exception as error:
        return type(error).__name__
    return f"{type(result).__name__} {result!r}"


@pytest.mark.parametrize("function", [*BINARY, *UNARY], ids=lambda function: function.__name__)
def test_it_computes_as_the_number_does(function: Callable[..., Any]) -> None:
    pairs = [(a, b) for a in NUMBERS for b in NUMBERS] if function in BINARY else NUMBERS
    for operands in pairs:
        numbers: tuple[Any, ...] = operands if isinstance(operands, tuple) else (operands,)
        if function is operator.pow and abs(numbers[0]) > 1 and abs(numbers[1]) > 1000:
            continue  # Python computes a number of a million digits
        if function is operator.lshift and numbers[1] == 2**40:
            continue
        expected = outcome(function, *numbers)
        for is_lent_too in (True, False) if len(numbers) == 2 else (True,):
            arithmetic = Arithmetic()
            others = [
                lend(arithmetic, n)[0] if is_lent_too or place == 0 else n
                for place, n in enumerate(numbers)
            ]
            found = outcome(partial(told, arithmetic, function), *others)
            # What no program has a place for, the trace goes on without.
            assert found == expected or arithmetic.is_doubted, (numbers, found, expected)


def told(arithmetic: Arithmetic, function: Callable[..., Any], *operands: Any) -> Any:
    result = function(*operands)
    if isinstance(result, tuple):
        return tuple(map(arithmetic.now, result))
    return arithmetic.now(result)


def test_each_call_computes_anew() -> None:
    arithmetic = Arithmetic()
    calls, moving = lend(arithmetic, 3)
    total, moving_total = lend(arithmetic, 0.5)
    share = (total + calls) / calls**2
    moving.there, moving_total.there = 5, 2.5
    arithmetic.compute()
    assert arithmetic.now(share) == 7.5 / 25
    assert arithmetic.now(calls) == 5


def test_what_python_asks_is_told() -> None:
    asked: list[tuple[Callable[[], Any], Any]] = []
    arithmetic = Arithmetic(ask=lambda question, answer: asked.append((question, answer)))
    calls, moving = lend(arithmetic, 3)
    assert calls * 2 > 5
    assert f"{calls:03d}" == "003"
    assert [1, 2, 3, 4][calls] == 4
    assert calls * 2 > 5  # asked before
    answers = [answer for _, answer in asked]
    assert answers == [True, "003", 3]
    moving.there = 1
    arithmetic.compute()
    assert [question() for question, _ in asked] == [False, "001", 1]


@pytest.mark.parametrize(
    ("start", "then", "message"),
    [
        (3, 0, "by zero"),
        (2, 2**62, "a int that a program has no place for"),
    ],
)
def test_what_a_program_cannot_be_given_is_raised(start: int, then: int, message: str) -> None:
    arithmetic = Arithmetic()
    number, moving = lend(arithmetic, start)
    _ = number * number + 1 // number
    moving.there = then
    with pytest.raises((ZeroDivisionError, TypeError), match=message):
        arithmetic.compute()


def test_a_result_of_another_type_is_raised() -> None:
    arithmetic = Arithmetic()
    number, moving = lend(arithmetic, 3)
    assert is_lent(2**number)
    moving.there = -3  # 2 ** -3 is a float
    with pytest.raises(TypeError, match="a float that a program has no place for"):
        arithmetic.compute()


def test_a_key_is_refused_for_good() -> None:
    """Somebody may catch the error, and go another way than with the number."""
    arithmetic = Arithmetic()
    number, _ = lend(arithmetic, 3)
    with pytest.raises(TypeError, match="has no hash"):
        {3: "three"}.get(number)
    assert arithmetic.is_doubted


def test_torch_takes_it_for_its_own() -> None:
    arithmetic = Arithmetic()
    number, _ = lend(arithmetic, 3)
    assert isinstance(number, torch.SymInt)
    assert isinstance(number, int)


@pytest.mark.parametrize("value", [True, "3", None, 1j, 2**64, np.float64(1), (1,)])
def test_what_is_not_lent(value: Any) -> None:
    assert not is_number(value)
