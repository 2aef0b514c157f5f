"""When one value may stand where a trace found another one, and how values are named."""

from __future__ import annotations

import copy
import enum
import functools
import operator
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from xla_dtensor.runtimes.guards.judge import Judge
from xla_dtensor.runtimes.guards.values import ABSENT, Moving, TensorLike, described, is_plain


class Color(enum.Enum):
    RED = 1


class Plain:
    """Of the user's code, whose reads are noted."""


class Meters(float):
    """Has a value that no attribute shows."""


class Loose(str):
    """Says that all texts are equal."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = str.__hash__


PLAIN = [0, 1, True, 0.0, -0.0, 1.0, "a", b"a", None, Color.RED, torch.float32, (1, "a"), 1j]
PLAIN += [Replicate(), Shard(0), Shard(1), Partial("sum"), Partial("avg")]
PLAIN += [_StridedShard(0, split_factor=2)]


def test_only_a_plain_value_itself_is_accepted() -> None:
    judge = Judge()
    for i, a in enumerate(PLAIN):
        assert is_plain(a)
        for j, b in enumerate(PLAIN):
            assert judge.accepts(a, b) == (i == j), (a, b)
    assert judge.accepts(float("nan"), float("nan"))
    for other in [(1, 2.0), (True, 2), (1, 2, 2), (1,)]:
        assert not judge.accepts((1, 2), other)
    assert not judge.accepts((1, (0.0,)), (1, (-0.0,)))
    assert judge.accepts((1, (2, float("nan"))), (1, (2, float("nan"))))
    assert not judge.accepts(frozenset({1, "a"}), frozenset({1.0, "a"}))
    assert judge.accepts(frozenset({1, "a"}), frozenset({"a", 1}))


@pytest.mark.parametrize("value", [[1], {}, object(), (1, [2]), torch.ones(1), len, nn.Linear])
def test_what_can_change_is_not_plain(value: Any) -> None:
    assert not is_plain(value)


def test_what_nothing_was_read_of_is_accepted_by_its_type() -> None:
    judge = Judge()
    assert judge.accepts(Plain(), Plain())
    assert judge.accepts([1], [2])
    assert not judge.accepts(Plain(), [])
    assert not judge.accepts(nn.ReLU(), nn.ReLU())  # unless two of them are never the same
    assert not judge.accepts(object(), object())
    a = SimpleNamespace(x=1)
    assert judge.accepts(a, SimpleNamespace(x=1))
    assert not judge.accepts(a, SimpleNamespace(x=2))  # or it says what is equal to it


@pytest.mark.parametrize("pair", [(Meters(0.0), Meters(-0.0)), (Loose("a"), Loose("b"))])
def test_a_value_of_a_class_of_c_is_compared_beside_the_attributes(pair: tuple[Any, Any]) -> None:
    found, other = pair
    judge = Judge(holds_the_same=lambda found, now: True)
    assert judge.accepts(found, copy.copy(found))
    assert judge.accepts(found, type(found)(found))
    assert not judge.accepts(found, other)


def test_what_was_read_is_accepted_by_what_it_holds() -> None:
    asked = []

    def same_x(found: Any, now: Any) -> bool | None:
        asked.append((found, now))
        return found.x == now.x if isinstance(found, SimpleNamespace) else None

    judge = Judge(holds_the_same=same_x)
    a, b = SimpleNamespace(x=1, y=1), SimpleNamespace(x=1, y=2)
    assert judge.accepts(a, b)
    assert asked == [(a, b)]
    assert not judge.accepts(a, SimpleNamespace(x=2, y=1))
    assert judge.accepts((a, 1), (b, 1))
    assert not judge.accepts((a, 1), (b, 2))


def scaled(by: float) -> Callable[[float], float]:
    return lambda x: x * by


def test_functions_are_accepted_by_their_code_and_what_is_around_it() -> None:
    def same_cells(found: Any, now: Any) -> bool | None:
        is_cell = hasattr(found, "cell_contents")
        return found.cell_contents == now.cell_contents if is_cell else None

    judge = Judge(holds_the_same=same_cells)
    assert judge.accepts(scaled(1.0), scaled(1.0))
    assert not judge.accepts(scaled(1.0), scaled(2.0))
    assert not judge.accepts(scaled(1.0), lambda x: x)
    partial: Any = functools.partial
    assert judge.accepts(partial(scaled(1.0), 1), partial(scaled(1.0), 1))
    assert not judge.accepts(partial(scaled(1.0), 1), partial(scaled(1.0), 2))
    assert not judge.accepts(partial(scaled(1.0), x=1), partial(scaled(1.0), y=1))


def test_what_is_made_anew_for_each_look_is_accepted_by_its_object() -> None:
    judge, a, b = Judge(), nn.ReLU(), nn.ReLU()
    assert judge.accepts(a.forward, a.forward)
    assert not judge.accepts(a.forward, b.forward)
    assert not judge.accepts(a.forward, a.extra_repr)
    generator, other = torch.Generator(), torch.Generator()
    assert judge.accepts(generator.seed, generator.seed)
    assert not judge.accepts(generator.seed, other.seed)
    assert judge.accepts(weakref.ref(a, lambda _: None), weakref.ref(a, print))
    assert not judge.accepts(weakref.ref(a), weakref.ref(b))
    assert judge.accepts(operator.itemgetter(1), operator.itemgetter(1))
    assert not judge.accepts(operator.itemgetter(1), operator.itemgetter(2))


def test_an_equality_that_raises_accepts_nothing() -> None:
    class Raising(frozenset[int]):
        def __eq__(self, other: object) -> bool:
            raise ValueError("never equal")

        __hash__ = frozenset.__hash__

    Raising.__module__ = "numpy.made_up"  # of a library, whose objects nobody looks into
    assert not Judge().accepts(Raising(), Raising())


def test_a_tensor_that_the_program_reads_is_accepted_itself_only() -> None:
    a, b, c = torch.ones(2), torch.ones(2), torch.ones(3)
    judge = Judge(lambda tensor: tensor is a)
    assert judge.forget(a) is a
    assert not judge.accepts(a, b)
    kept = judge.forget(b)
    assert judge.accepts(kept, a)
    assert not judge.accepts(kept, c)
    assert not judge.accepts(kept, torch.ones(2, requires_grad=True))
    assert not judge.accepts(kept, 1.0)
    assert judge.forget((1, (a, b))) == (1, (a, kept))
    assert judge.now_expected(kept, a) is kept
    assert judge.now_expected(1.0, 1.0) == 1.0


def test_a_tensor_that_is_read_by_name_moves() -> None:
    a, b, c = torch.ones(2), torch.zeros(2), torch.ones(3)
    judge, moving = Judge(), Moving(a, lambda now: now.shape == (2,))
    assert judge.accepts(moving, b)
    assert moving.there is b
    assert not judge.accepts(moving, c)
    assert moving.there is b
    assert judge.now_expected(moving, b) is moving


def test_values_are_named_on_one_line() -> None:
    assert described(torch.ones(2, 3)) == "a tensor of shape=(2, 3)"
    assert described(TensorLike.of(torch.ones(2))) == "a tensor of shape=(2,)"
    assert described(Moving(torch.ones(2), bool)) == "a tensor of shape=(2,)"
    assert described("x" * 100) == "'" + "x" * 56 + "..."
    assert described([1]) == "a list"
    assert described(nn.Linear) == "Linear"
    assert described(ABSENT) == "nothing"
