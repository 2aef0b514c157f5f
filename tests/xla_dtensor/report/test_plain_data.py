"""Dataclasses as plain data: the way there and back, and what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xla_dtensor.report import ReportError
from xla_dtensor.report.report import from_plain, json_schema, to_plain


@dataclass(frozen=True)
class Leaf:
    """A value within another."""

    name: str | int
    size: float | None = None


@dataclass(frozen=True)
class Tree:
    """One of each kind of field."""

    kind: Literal["a", "b"]
    leaves: tuple[Leaf, ...]
    pair: tuple[int, str]
    flag: bool = False
    numbers: Mapping[str, float] = field(default_factory=dict[str, float])
    best: Leaf | None = None


LEAVES = st.builds(
    Leaf,
    st.text() | st.integers(),
    st.none() | st.floats(allow_nan=False) | st.integers(-(2**70), 2**70),
)
TREES = st.builds(
    Tree,
    st.sampled_from(["a", "b"]),
    st.lists(LEAVES, max_size=3).map(tuple),
    st.tuples(st.integers(), st.text()),
    st.booleans(),
    st.dictionaries(st.text(), st.floats(allow_nan=False), max_size=3),
    st.none() | LEAVES,
)


@given(TREES)
def test_what_comes_back_is_what_went(tree: Tree) -> None:
    text = json.dumps(to_plain(tree), allow_nan=False)
    assert from_plain(Tree, json.loads(text)) == tree


def test_not_a_number_comes_back() -> None:
    assert to_plain(Leaf("x", math.nan)) == {"name": "x", "size": "NaN"}
    assert math.isnan(from_plain(Leaf, {"name": "x", "size": "NaN"}).size or 0)


def test_numpy_numbers_are_numbers() -> None:
    assert json.dumps(to_plain(Leaf("x", np.float64(2.5)))) == '{"name": "x", "size": 2.5}'
    assert json.dumps(to_plain((np.int64(3), np.bool_(True)))) == "[3, true]"


GOOD: dict[str, Any] = {"kind": "a", "leaves": [], "pair": [1, "x"]}


def test_an_absent_field_takes_its_default() -> None:
    assert from_plain(Tree, GOOD) == Tree("a", (), (1, "x"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "c"}, r"report\.kind = 'c'. It must be one of 'a', 'b'"),
        ({"pair": [1]}, r"report\.pair = \[1\]. It must be an array of 2"),
        ({"pair": ["x", "x"]}, r"report\.pair\[0\] = 'x'. It must be of type integer"),
        ({"pair": [True, "x"]}, r"report\.pair\[0\] = True"),
        ({"leaves": {}}, r"report\.leaves = \{\}. It must be an array"),
        ({"leaves": [3]}, r"report\.leaves\[0\] = 3. It must be an object"),
        ({"leaves": [{}]}, r"report\.leaves\[0\] lacks 'name'"),
        ({"leaves": [{"name": []}]}, r"report\.leaves\[0\]\.name = \[\]"),
        ({"numbers": {"x": "1"}}, r"report\.numbers\.x = '1'. It must be of type number"),
        ({"numbers": []}, r"report\.numbers = \[\]. It must be an object"),
        ({"flag": 1}, r"report\.flag = 1. It must be of type boolean"),
        ({"new": 1}, r"report has 'new'. This version knows no such member"),
    ],
)
def test_what_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ReportError, match=message):
        from_plain(Tree, GOOD | change)


def test_the_schema_names_every_field() -> None:
    schema = json_schema(Tree)
    assert set(schema["properties"]) == {"kind", "leaves", "pair", "flag", "numbers", "best"}
    assert schema["required"] == ["kind", "leaves", "pair"]
    assert schema["properties"]["leaves"]["items"] == {"$ref": "#/$defs/Leaf"}
    assert schema["$defs"]["Leaf"]["required"] == ["name"]
