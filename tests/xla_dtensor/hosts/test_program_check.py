"""Programs that differ between processes are found before they hang, with both sides named."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import xla_dtensor as xd
from tests.hosts import HostError, Hosts
from xla_dtensor.errors import ArgumentTypeError
from xla_dtensor.runtimes import Runtime

TASKS = "tests.xla_dtensor.host_tasks_checks"


@pytest.fixture(scope="module")
def pair() -> Iterator[Hosts]:
    group = Hosts(2, 1)
    yield group
    group.close()


pytestmark = pytest.mark.xdist_group("hosts")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("program", "here", "there", "what"),
    [
        ("shapes", "'_shapes.<locals>.<lambda>'", "'_shapes.<locals>.<lambda>'", "tensor<4x4xf32>"),
        ("branch", "'_branch.<locals>.train'", "'_branch.<locals>.train'", "Here: "),
        ("order", "'_order.<locals>.train'", "'_order.<locals>.evaluate'", ""),
        ("eager", "aten.sum.default", "aten.mul.Tensor", ""),
        ("values", "aten.mul_.Tensor", "aten.mul_.Tensor", "host tensor of shape=(4,)"),
        ("draws", "'_draws.<locals>.<lambda>'", "_draws", "Here: 'host tensor of shape=(4,)"),
        ("configuration", "the check of 'the learning rate'", "the learning rate", "Here: '0.1'"),
    ],
)
def test_both_are_told(pair: Hosts, program: str, here: str, there: str, what: str) -> None:
    (first, seconds), (second, _) = pair.run(f"{TASKS}:told", program=program)
    assert seconds < 15
    assert here in first.split(", but process 1 runs ")[0]
    assert there in first.split(", but process 1 runs ")[1]
    assert what in first
    assert there in second.split(", but process 0 runs ")[0]
    assert here in second.split(", but process 0 runs ")[1]
    assert all("host_tasks_checks.py:" in text for text in (first, second))
    assert all("the same order" in text for text in (first, second))


@pytest.mark.thorough
@pytest.mark.parametrize("program", ["equal", "equal draws"])
def test_equal_programs_run(pair: Hosts, program: str) -> None:
    assert [text for text, _ in pair.run(f"{TASKS}:told", program=program)] == ["", ""]


@pytest.mark.thorough
def test_what_checks_cost(pair: Hosts) -> None:
    for found in pair.run(f"{TASKS}:cost", calls=20):
        assert found["checks, off"] == found["checks, first"] == 0
        assert found["checks, every"] == 20
        assert found["check"] < 200


LONE = (
    "Process 1 traces call 4 of the compiled step '_guard.<locals>.train' anew: the item 'scale' "
    "of the variable 'settings' of _guard changed from '2' to '3'. Process 0 runs that call"
)


@pytest.mark.thorough
def test_a_guard_that_breaks_in_one_process_is_told_to_all() -> None:
    """The other one comes to its call when that is known already."""
    group = Hosts(2, 1)
    (first, _), (second, seconds) = group.run(f"{TASKS}:told", program="guard, late")
    group.close()
    assert first.startswith(LONE)
    assert second.startswith(LONE)
    assert seconds < 15


@pytest.mark.thorough
def test_numbers_that_differ_are_told_to_all(tmp_path: Path) -> None:
    """The one that finds it out raises, and the other one waits for it in vain."""
    group = Hosts(2, 1)
    with pytest.raises(HostError) as raised:
        group.run(f"{TASKS}:told", program="numbers", folder=str(tmp_path), timeout_seconds=90)
    group.close()
    told = (tmp_path / "1").read_text()
    assert told.startswith("Numbers of Python are inputs of the compiled step '_numbers.<locals>.")
    assert "process 1 has given others to one of its calls up to call 32 than process 0" in told
    assert told in str(raised.value)


@pytest.mark.thorough
def test_a_process_that_waits_in_vain_ends(tmp_path: Path) -> None:
    """It runs the program that it has, and waits in its collective for the one that traces."""
    group, began = Hosts(2, 1), time.monotonic()
    with pytest.raises(HostError) as raised:
        group.run(f"{TASKS}:told", program="guard", folder=str(tmp_path), timeout_seconds=90)
    assert time.monotonic() - began < 60
    group.close()
    assert "process 0: ended" in str(raised.value)
    assert "process 1" not in str(raised.value)
    assert LONE in str(raised.value)
    assert "This process ends, for it waits in vain." in str(raised.value)
    assert (tmp_path / "1").read_text().startswith(LONE)


@pytest.mark.thorough
def test_a_gather_of_one_process_ends(pair: Hosts) -> None:
    """The last test of this group: its processes are out of step afterwards."""
    (first, seconds), (second, _) = pair.run(
        f"{TASKS}:told", program="gather of one", patience_seconds=1.0
    )
    assert "process 1 did not come to it in 1 s" in first
    assert "the gather of a tensor of shape=(4, 4)" in first
    assert (second, seconds < 10) == ("", True)
    pair.close()


def test_a_process_alone_has_nothing_to_compare(runtime: Runtime) -> None:
    with xd.program_checks("every"):
        xd.check_same_program("the learning rate", 0.1)


def test_a_wrong_mode_is_refused() -> None:
    message = r"mode='often'.*Pass one of off, first, every"
    with pytest.raises(ArgumentTypeError, match=message), xd.program_checks("often"):
        pass


def test_it_works_on_any_group(hosts: Callable[..., Hosts]) -> None:
    assert [text for text, _ in hosts(2, 4).run(f"{TASKS}:told", program="equal")] == ["", ""]
