"""When one value is accepted in the place of another one, and how values are named."""

from __future__ import annotations

import enum
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from xla_dtensor.runtimes.premises.values import (
    ABSENT,
    Judge,
    TensorLike,
    described,
    is_plain,
)


def nobody_looked(judge: Judge, found: Any, now: Any) -> None:
    """Say of two objects that nobody has looked into them."""


class Color(enum.Enum):
    RED = 1


PLAIN = [0, 1, True, 0.0, -0.0, 1.0, "a", b"a", None, Color.RED, torch.float32, (1, "a"), 1j]


def test_only_a_plain_value_itself_is_accepted() -> None:
    judge = Judge(lambda tensor: True, nobody_looked)
    for i, a in enumerate(PLAIN):
        assert is_plain(a)
        for j, b in enumerate(PLAIN):
            assert judge.accepts(a, b) == (i == j), (a, b)
    assert judge.accepts(float("nan"), float("nan"))
    assert not judge.accepts((1, 2), (1, 2.0))
    assert judge.accepts((1, (2, "a")), (1, (2, "a")))


def test_what_nobody_looked_into_is_accepted_by_its_type() -> None:
    judge = Judge(lambda tensor: True, nobody_looked)
    a, b = SimpleNamespace(x=1), SimpleNamespace(x=1)
    assert judge.accepts(a, b)
    assert not judge.accepts(a, SimpleNamespace(x=2))  # unless it says what is equal to it
    assert judge.accepts(object(), object())
    assert not judge.accepts(a, a.__dict__)
    assert not judge.accepts(nn.ReLU(), nn.ReLU())


def test_what_somebody_looked_into_is_accepted_by_what_it_holds() -> None:
    def same_x(judge: Judge, found: Any, now: Any) -> bool:
        return judge.accepts(found.x, now.x)

    judge = Judge(lambda tensor: True, same_x)
    assert judge.accepts(SimpleNamespace(x=1, y=1), SimpleNamespace(x=1, y=2))
    assert not judge.accepts(SimpleNamespace(x=1), SimpleNamespace(x=2))


def test_values_are_named_on_one_line() -> None:
    assert described(torch.ones(2, 3)) == "a tensor of shape=(2, 3)"
    assert described(TensorLike.of(torch.ones(2))) == "a tensor of shape=(2,)"
    assert described("x" * 100) == "'" + "x" * 56 + "..."
    assert described([1]) == "a list"
    assert described(nn.Linear) == "Linear"
    assert described(ABSENT) == "nothing"
