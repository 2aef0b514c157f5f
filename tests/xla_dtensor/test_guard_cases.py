"""A change of Python's between two calls of a compiled step: none is overlooked.

`NEEDLESS` and `NEEDLESS_SEEDS` name the cases that are traced for what nobody reads. They only
shrink: a case in them that is not fails here.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_dtensor as xd
from tests.xla_dtensor.fixed_guard_cases import FIXED, READ, UNREAD, fixed
from tests.xla_dtensor.guard_cases import NUM_CHANGES, cases, drawn
from tests.xla_dtensor.guard_runs import (
    judge,
    judge_on_mesh,
    main,
    of_name,
    of_seed,
    only_new_objects_searched,
    report,
    worst,
)
from xla_dtensor.errors import CompileError

pytestmark = pytest.mark.thorough

NUM_SEEDS = 40
# Refused by design: Python runs once, and each of these goes on with every call.
REFUSED = {
    "a_cycle_that_the_step_goes_on_with",
    "a_draw_of_pythons_generator",
    "an_iterator_that_a_loop_leaves",
}
NEEDLESS = {
    "a_name_in_a_parameter_group": "all items of a parameter group are compared",
    "a_count_beside_a_scale_in_a_dict": "a dict read by a computed key, whole",
    "a_list_of_which_only_the_sign_of_the_length_counts": "a list is read whole",
    "a_counter_on_a_config_read_by_computed_names": "an object is read whole",
    "a_list_that_grows_on_a_config_read_by_computed_names": "so are lists in it",
}
# What is handed on is compared whole: a container, an object, a class, a function, a tensor.
NEEDLESS_SEEDS = {2, 5, 6, 10, 11, 15, 16, 17, 19, 24, 27, 29, 33, 36}


@pytest.fixture(scope="module")
def quick_traces(mesh: xd.DeviceMesh) -> Iterator[None]:
    """Search only new objects, once all is imported that a trace imports."""
    judge_on_mesh(of_seed(1), mesh)
    with only_new_objects_searched():
        yield


@pytest.mark.only_on("jax")
@pytest.mark.parametrize("name", FIXED)
def test_a_case_with_a_name(mesh: xd.DeviceMesh, quick_traces: None, name: str) -> None:
    verdicts = judge_on_mesh(of_name(name), mesh)
    expected = "refused" if name in REFUSED else "needless" if name in NEEDLESS else "right"
    assert worst(verdicts) == expected, verdicts[-1].note


@pytest.mark.only_on("jax")
@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_a_drawn_case(mesh: xd.DeviceMesh, quick_traces: None, seed: int) -> None:
    verdicts = judge_on_mesh(of_seed(seed), mesh)
    expected = "needless" if seed in NEEDLESS_SEEDS else "right"
    assert worst(verdicts) == expected, (verdicts, str(drawn(seed)))


def test_the_tables_name_cases_that_are_judged() -> None:
    assert set(NEEDLESS) | REFUSED <= set(FIXED)
    assert set(range(NUM_SEEDS)) >= NEEDLESS_SEEDS
    assert len(READ) >= 21
    assert len(UNREAD) >= 20


# ----------------------------------------------------------------------- the cases themselves


def results(case: Any) -> list[str]:
    """What a case gives without a compiler; as text, since NaN is not equal to itself."""
    x = torch.tensor([1.0, 2.0, -1.0, 0.5])
    found = [str(case.step(x).tolist())]
    for number in range(len(case.changes)):
        case.change(number)
        found.append(str(case.step(x).tolist()))
    case.close()
    return found


def test_what_nobody_reads_changes_nothing() -> None:
    for case in cases(range(400)):
        found = results(case)
        for number in range(NUM_CHANGES):
            if case.is_read(number) is False:
                assert found[number] == found[number + 1], f"{case}: {case.changes[number]}"


def test_half_of_the_changes_are_read_and_change_results() -> None:
    changed = read = total = 0
    for case in cases(range(400)):
        found = results(case)
        total += NUM_CHANGES
        read += sum(case.is_read(number) is True for number in range(NUM_CHANGES))
        changed += sum(a != b for a, b in itertools.pairwise(found))
    assert read > 0.3 * total
    assert changed > 0.2 * total


def test_a_seed_is_a_case() -> None:
    first, second = drawn(17), drawn(17)
    assert first == second
    assert results(first) == results(second)
    assert str(first).startswith("seed 17: ")


@pytest.mark.parametrize("name", UNREAD)
def test_what_nobody_reads_of_a_case_with_a_name(name: str) -> None:
    alone, beside = fixed(name), fixed(name)
    x = torch.tensor([1.0, 2.0, -1.0, 0.5])
    for number in range(3):
        assert torch.equal(alone.step(x), beside.step(x))
        beside.change(number)


# ----------------------------------------------------------------------- the judge


class Fake:
    """A compiled step that traces as its mode says."""

    def __init__(self, step: Callable[..., Any], mode: str) -> None:
        self.step, self.mode, self.traces = step, mode, 0
        self.first: Any = None

    def stats(self) -> dict[str, Any]:
        return {"traces": self.traces, "reasons": []}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.mode == "refuses":
            raise CompileError("This is refused.")
        if self.mode == "fails":
            raise KeyError("name")
        if self.first is None or self.mode == "always":
            self.first, self.traces = self.step(x), self.traces + 1
        return self.first


@pytest.mark.parametrize(
    ("mode", "name", "kind"),
    [
        ("once", "an_attribute_by_an_f_string", "wrong"),
        ("once", "a_counter_on_an_object_read_by_attrgetter", "right"),
        ("always", "an_attribute_by_an_f_string", "right"),
        ("always", "a_counter_on_an_object_read_by_attrgetter", "needless"),
        ("refuses", "an_attribute_by_an_f_string", "refused"),
        ("fails", "an_attribute_by_an_f_string", "error"),
    ],
)
def test_the_judge(mode: str, name: str, kind: str) -> None:
    verdicts = judge(of_name(name), lambda tensor: tensor, lambda step: Fake(step, mode))
    assert worst(verdicts) == kind
    text = report(verdicts, 1, 1.0)
    assert kind in text
    assert kind == "right" or f"\n{kind}, as owner | read | change" in text


@pytest.mark.only_on("jax")
def test_a_run_prints_its_tables_and_notes_each_verdict(
    mesh: xd.DeviceMesh,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    for name in ("XLA_DTENSOR_CPU_DEVICES", "JAX_PLATFORMS", "XLA_FLAGS"):
        monkeypatch.setenv(name, os.environ.get(name, "8"))
    monkeypatch.setattr(logging, "disable", lambda level: None)
    notes = tmp_path / "notes.jsonl"
    assert main(["--seeds", "0:2", "--devices", "8", "--notes", str(notes)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("2 cases, 12 calls in ")
    assert all(f"\n{column} " in text for column in ("owner", "read", "form"))
    assert len(notes.read_text().splitlines()) == 12
