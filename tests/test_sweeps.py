"""Each run takes its share of a sweep, and what it leaves out is slow."""

from __future__ import annotations

from typing import Any, cast

import pytest

from tests.sweeps import is_of_the_share, leave_out

CASES = [f"tests/test_x.py::test_values[{case}]" for case in range(3000)]


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_shares_are_of_equal_size(parts: int) -> None:
    share = [case for case in CASES if is_of_the_share(case, parts, "jax 2.9")]
    assert abs(len(share) - len(CASES) / parts) < 0.1 * len(CASES) / parts
    assert share == [case for case in CASES if is_of_the_share(case, parts, "jax 2.9")]


def test_runs_take_other_cases() -> None:
    shares = [
        {case for case in CASES if is_of_the_share(case, 3, run)}
        for run in ("jax 2.9", "torch_xla 2.9", "jax 2.15")
    ]
    assert len(set.union(*shares)) > 0.65 * len(CASES)  # 1 - (2 / 3) ** 3 = 0.70


class Item:
    """What pytest has for a case."""

    def __init__(self, nodeid: str, *marks: pytest.Mark) -> None:
        self.nodeid = nodeid
        self.marks = {mark.name: mark for mark in marks}

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self.marks.get(name)

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks[mark.name] = mark.mark


def test_what_is_left_out_is_slow() -> None:
    swept = [Item(case, pytest.mark.sweep(4).mark) for case in CASES]
    others = [Item(case) for case in CASES]
    leave_out(cast("list[Any]", [*swept, *others]), "jax")
    slow = [item for item in swept if "slow" in item.marks]
    assert 0.7 * len(CASES) < len(slow) < 0.8 * len(CASES)
    assert not [item for item in others if "slow" in item.marks]
