"""The generator draws the same program for a seed, and the judge tells right from wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.drawn import ops
from tests.drawn.generate import generate, generate_call, generate_refused
from tests.drawn.judge import Verdict, difference, expected_of, judge
from tests.drawn.minimize import minimized, without_line
from tests.drawn.programs import PLAIN_WORDS, Leaf, Mesh, Program, Result, run
from tests.drawn.run import read, summary

ONE = torch.tensor([1.0, 2.0, 3.0])
ROW = ("R",)


def program(*lines: str, results: tuple[str, ...] = ("v0",), **leaves: torch.Tensor) -> Program:
    made = tuple(Leaf(name, value, ROW) for name, value in leaves.items())
    return Program(Mesh((8,)), made, lines, results)


def plainly(drawn: Program) -> Result:
    return run(drawn, [leaf.value.clone() for leaf in drawn.leaves], PLAIN_WORDS)


# ------------------------------------------------------------------ one value


@pytest.mark.parametrize(
    ("found", "plain", "told"),
    [
        (ONE, ONE, None),
        (torch.ones(2), torch.ones(3), "shape (2,), not (3,)"),
        (torch.ones(2), torch.ones(2).double(), "torch.float32, not torch.float64"),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), "1 of 2 values, such as 2, not 3"),
        (torch.tensor([True]), torch.tensor([False]), "1 of 1 values, such as True, not False"),
        (torch.tensor(float("nan")), torch.tensor(float("nan")), None),
        (torch.tensor(float("inf")), torch.tensor(float("inf")), None),
        (None, torch.zeros(2), None),
        (None, torch.ones(2), "a NoneType, not a Tensor"),
        (torch.ones(()), 1.0, "a Tensor, not a float"),
        (1, 1.0, "1, not 1.0"),
        (2, 1, "2, not 1"),
        (torch.ones(1, requires_grad=True), torch.ones(1), "requires_grad=True, not False"),
    ],
)
def test_difference(found: Any, plain: Any, told: str | None) -> None:
    assert difference(found, plain, []) == told


def test_a_whole_number_that_is_rounded_is_noise() -> None:
    """The tanh of 10 is 1 in float32 here, elsewhere a little less; as an integer, 1 or 0."""
    drawn = program("v0 = torch.tanh(x).long()", x=torch.tensor([0, 10]))
    expected = expected_of(drawn)
    assert judge(drawn, expected, Result({"v0": torch.tensor([0, 0])})).kind != "wrong"
    assert judge(drawn, expected, Result({"v0": torch.tensor([1, 0])})).kind == "wrong"


def test_infinity_is_not_a_number_of_ordinary_size() -> None:
    told = difference(torch.tensor(1.0), torch.tensor(float("inf")), [])
    assert told is not None
    assert told.startswith("1 of 1 values, such as 1, not inf")


# Off by so many units in the last place of the dtype.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_eight_units_are_allowed_and_forty_are_not(dtype: torch.dtype) -> None:
    drawn = program("v0 = x0 * 1", x0=torch.tensor([1.0, 1.25, 1.5, 1.75]).to(dtype))
    expected = expected_of(drawn)
    unit = torch.finfo(dtype).eps
    near = Result({"v0": drawn.leaves[0].value * (1 + 5 * unit)})
    far = Result({"v0": drawn.leaves[0].value * (1 + 40 * unit)})
    assert judge(drawn, expected, near).kind == "right"
    assert judge(drawn, expected, far).kind == "wrong"


def test_a_sum_that_cancels_is_allowed_more() -> None:
    drawn = program("v0 = x0.sum()", x0=torch.tensor([1e6, 1.0, -1e6, 3.0]))
    expected = expected_of(drawn)
    assert judge(drawn, expected, Result({"v0": torch.tensor(4.03)})).kind == "right"
    assert judge(drawn, expected, Result({"v0": torch.tensor(9.0)})).kind == "wrong"


def test_an_edge_may_be_rounded_either_way() -> None:
    two, one = torch.tensor([2, 5]), torch.tensor([1, 5])
    assert difference(one, two, [two, one]) is None
    assert difference(one, two, [two, two]) == "1 of 2 values, such as 1, not 2"


# ------------------------------------------------------------------ errors


def test_where_torch_raises_its_class_is_asked_for() -> None:
    drawn = program("v0 = x0[torch.tensor(7)]", x0=ONE)
    expected = expected_of(drawn)
    assert judge(drawn, expected, Result(error=IndexError("7"))).kind == "right"
    assert judge(drawn, expected, Result(error=ValueError("7"))).kind == "unclear"
    assert judge(drawn, expected, Result({"v0": torch.tensor(3.0)})).kind == "silent"
    poison = Result({"v0": torch.tensor(float("nan"))})
    assert judge(drawn, expected, poison).kind == "right"


def test_poison_counts_for_indices_alone() -> None:
    drawn = program("v0 = x0 @ x1", x0=ONE, x1=torch.ones(2))
    expected = expected_of(drawn)
    assert judge(drawn, expected, Result({"v0": torch.tensor(float("nan"))})).kind == "silent"


def test_a_refusal_is_an_error_of_this_project() -> None:
    from xla_dtensor.errors import UnsupportedOpError

    drawn = program("v0 = x0 * 2", x0=ONE)
    expected = expected_of(drawn)
    assert judge(drawn, expected, Result(error=UnsupportedOpError("no"))).kind == "refused"
    assert judge(drawn, expected, Result(error=KeyError("no"))).kind == "unclear"


def test_the_line_of_an_error_is_known() -> None:
    result = plainly(program("v0 = x0 * 2", "v1 = v0 @ v0[:1]", x0=ONE))
    assert isinstance(result.error, RuntimeError)
    assert result.line == 1


# ------------------------------------------------------------------ programs


@pytest.mark.parametrize("seed", range(6))
def test_a_seed_decides_the_program(seed: int) -> None:
    assert str(generate(seed)) == str(generate(seed))


def test_plain_torch_is_right_about_its_own_programs() -> None:
    for seed in range(60):
        drawn = generate(seed)
        expected = expected_of(drawn)
        assert judge(drawn, expected, expected.plain).kind in ("right", "unjudged"), str(drawn)


def test_a_changed_value_is_found() -> None:
    found = 0
    for seed in range(60):
        drawn = generate(seed)
        expected = expected_of(drawn)
        values = dict(expected.plain.values)
        floats = [n for n, v in values.items() if isinstance(v, torch.Tensor) and v.numel()]
        floats = [n for n in floats if values[n].is_floating_point() and values[n].any()]
        if not floats:
            continue
        values[floats[-1]] = values[floats[-1]].detach() * 1.05 + 0.01
        found += judge(drawn, expected, Result(values)).kind == "wrong"
    assert found >= 30


@pytest.mark.thorough
def test_programs_have_what_they_are_drawn_for() -> None:
    drawn = [generate(seed) for seed in range(400)]
    text = "\n".join(map(str, drawn))
    for word in ("redistribute(", "whole(", "parts(", "gradients(loss2", "dual(", "forget("):
        assert word in text, word
    assert any(p.before for p in drawn)
    assert any(p.mesh.names is None for p in drawn)
    assert {len(p.mesh.shape) for p in drawn} == {1, 2, 3, 4}
    assert sum(p.compiled for p in drawn) > 150
    assert {leaf.value.dtype for p in drawn for leaf in p.leaves} == set(ops.DTYPES)


def test_a_call_in_two_dtypes() -> None:
    drawn = generate_call("add", torch.float32, 0, torch.int64)
    assert drawn is not None
    assert [x.value.dtype for x in drawn.leaves[:2]] == [
        torch.float32,
        torch.int64,
    ]
    assert generate_call("bitwise_not", torch.float32, 0) is None


def test_a_call_that_torch_refuses() -> None:
    drawn = generate_refused("cat", 0)
    assert drawn is not None
    assert expected_of(drawn).plain.error is not None
    assert generate_refused("cat", 99) is None


@pytest.mark.thorough
def test_every_op_of_torch_is_listed() -> None:
    names = set(ops.drawn_ops())
    excluded = {name for group in ops.listed()["excluded"].values() for name in group}
    assert not names & excluded
    assert set(ops.all_names()) <= names | excluded
    callable_ = {n for n in names if any(ops.calls_of(n, dtype) for dtype in ops.DTYPES)}
    assert names == callable_


# ------------------------------------------------------------------ minimizing


def test_a_program_is_made_smaller() -> None:
    drawn = program(
        "v0 = torch.exp(x0)",
        "v1 = v0 + x1",
        "v2 = torch.std(x1, True)",
        "v3 = v2 * v1",
        results=("v0", "v1", "v2", "v3"),
        x0=ONE,
        x1=ONE * 2,
    )
    drawn = replace(drawn, mesh=Mesh((2, 4)), compiled=True)

    def verdict_of(candidate: Program) -> Verdict:
        for number, line in enumerate(candidate.lines):
            if "std" in line:
                return Verdict("wrong", "v2: off", number)
        return Verdict("right")

    small = minimized(drawn, verdict_of)
    assert small.lines == ("v2 = torch.std(x1, True)",)
    assert [leaf.name for leaf in small.leaves] == ["x1"]
    assert small.mesh == Mesh((8,))
    assert not small.compiled


def test_what_needs_a_line_goes_with_it() -> None:
    drawn = program("v0 = x0 * 2", "v1 = v0 + 1", "v2 = x0 - 1", x0=ONE)
    assert without_line(drawn, 0).lines == ("v2 = x0 - 1",)


# ------------------------------------------------------------------ runs


def test_a_job_that_has_no_row_is_told(tmp_path: Path) -> None:
    notes = tmp_path / "notes.jsonl"
    rows = [
        {"started": "program/0"},
        {"job": "program/0", "kind": "right"},
        {"started": "program/1"},
        {"started": "program/1", "program": "mesh (8,)"},
    ]
    notes.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done, begun = read(notes)
    assert list(done) == ["program/0"]
    assert begun == {"started": "program/1", "program": "mesh (8,)"}


def test_summary() -> None:
    rows = [{"kind": "right"}, {"kind": "right"}, {"kind": "wrong"}, {"kind": "none"}]
    assert summary(rows) == "3 judged: 2 right (66.67 %), 1 wrong (33.33 %)"
