"""Processes compare what they are about to do, through a key-value store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from xla_dtensor.errors import ProgramMismatchError, RuntimeSetupError
from xla_dtensor.runtimes.same_program import Checks, how_checked, user_line


class Shared:
    """The texts of a job, and how often they were asked for."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.changed = threading.Condition()


class OneStore:
    """One process's way to them."""

    def __init__(self, shared: Shared, index: int, count: int) -> None:
        self.shared, self.index, self.count = shared, index, count

    def put(self, key: str, text: str) -> None:
        with self.shared.changed:
            self.shared.texts[key] = text
            self.shared.changed.notify_all()

    def get(self, key: str, timeout_seconds: float) -> str | None:
        with self.shared.changed:
            self.shared.changed.wait_for(lambda: key in self.shared.texts, timeout_seconds)
            return self.shared.texts.get(key)

    def peek(self, key: str) -> str | None:
        return self.shared.texts.get(key)

    def drop(self, key: str) -> None:
        with self.shared.changed:
            del self.shared.texts[key]


def job(count: int, seconds: float = 5) -> tuple[list[Checks], Shared]:
    shared = Shared()
    return [Checks(OneStore(shared, i, count), "first", seconds) for i in range(count)], shared


def run(checks: list[Checks], program: Callable[[Checks, int], Any]) -> list[str]:
    """Run a program in each process; "" or the refusal."""
    found = [""] * len(checks)

    def one(index: int) -> None:
        try:
            program(checks[index], index)
        except ProgramMismatchError as error:
            found[index] = str(error)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(len(checks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    return found


def test_equal_programs_pass_and_leave_little_behind() -> None:
    checks, shared = job(4)

    def program(check: Checks, index: int) -> None:
        for i in range(50):
            check.compare(f"op {i}", "same")

    assert run(checks, program) == [""] * 4
    assert len(shared.texts) <= 2 * 4
    assert all(check.seconds > 0 for check in checks)


def test_two_that_differ_are_both_named_with_their_lines() -> None:
    checks, _ = job(2)

    def program(check: Checks, index: int) -> None:
        if index:
            check.compare("the step 'train'", "b")
        else:
            check.compare("the step 'eval'", "a")

    first, second = run(checks, program)
    assert first.startswith("Process 0 is about to run the step 'eval' (")
    assert "but process 1 runs the step 'train' (" in first
    assert second.startswith("Process 1 is about to run the step 'train' (")
    assert "but process 0 runs the step 'eval' (" in second
    assert all("test_same_program.py:" in text for text in (first, second))
    assert all(", in program)" in text for text in (first, second))


def test_the_first_line_that_differs_is_shown() -> None:
    checks, _ = job(2)

    def program(check: Checks, index: int) -> None:
        lines = ["module", f"  x: ({4 + index}, 8)", "end"]
        check.compare("a step", str(index), text=lambda: "\n".join(lines))

    first, second = run(checks, program)
    assert "Here: 'x: (4, 8)'; there: 'x: (5, 8)'. " in first
    assert "Here: 'x: (5, 8)'; there: 'x: (4, 8)'. " in second


def test_texts_of_other_lengths_are_told_apart() -> None:
    checks, _ = job(2)

    def program(check: Checks, index: int) -> None:
        check.compare("a step", str(index), text=lambda: "a\n" * (index + 1))

    assert "One has 1 lines, the other 2. " in run(checks, program)[0]


def test_without_a_text_what_differs_is_said_all_the_same() -> None:
    checks, _ = job(2)
    found = run(checks, lambda check, index: check.compare("a step", str(index)))
    assert all("What they work on differs. " in text for text in found)


def test_one_who_does_not_come_is_named_with_its_last() -> None:
    checks, _ = job(2, 0.5)

    def program(check: Checks, index: int) -> None:
        check.compare("the first", "a")
        if index == 0:
            check.compare("the second", "b")

    first, second = run(checks, program)
    assert "about to run the second (" in first
    assert "process 1 did not come to it in 0.5 s; its last was the first (" in first
    assert second == ""


def test_one_who_has_ended_is_not_waited_for() -> None:
    checks, _ = job(2, 60)

    def program(check: Checks, index: int) -> None:
        check.compare("step 1", "a")
        if index == 0:
            check.compare("step 2", "a")
        else:
            check._say_end()

    began = time.monotonic()
    first, _ = run(checks, program)
    assert time.monotonic() - began < 10
    assert "process 1 has ended its program; its last was step 1 (" in first


def test_only_the_processes_of_a_program_compare_it() -> None:
    checks, _ = job(3)

    def program(check: Checks, index: int) -> None:
        if index < 2:
            check.compare("a step of two", "a", (0, 1))
        if index == 2:
            check.compare("one of its own", "b", (2,))
        check.compare("a step of all", "c")

    assert run(checks, program) == ["", "", ""]


def test_a_process_is_not_asked_about_programs_of_others() -> None:
    checks, shared = job(2)
    checks[1].compare("a step of process 0", "a", (0,))
    assert shared.texts == {}


def test_a_program_that_was_agreed_on_is_not_compared_again() -> None:
    checks, _ = job(2, 0.5)

    def program(check: Checks, index: int) -> None:
        check.compare_once("a step", "a", (0, 1), lambda: "")
        if index == 0:  # it traced the same again, the other did not
            check.compare_once("a step", "a", (0, 1), lambda: "")
        check.compare_once("another", "b", (0, 1), lambda: "")

    assert run(checks, program) == ["", ""]


@pytest.mark.parametrize("mode", ["off", "first", "every"])
def test_the_environment_says_the_mode(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    monkeypatch.setenv("XLA_DTENSOR_PROGRAM_CHECKS", mode)
    assert how_checked() == mode


def test_a_wrong_mode_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XLA_DTENSOR_PROGRAM_CHECKS", raising=False)
    assert how_checked() == "first"
    monkeypatch.setenv("XLA_DTENSOR_PROGRAM_CHECKS", "often")
    with pytest.raises(RuntimeSetupError, match=r"'often'.*Set it to one of off, first, every"):
        how_checked()


def test_the_line_is_the_users() -> None:
    assert "test_same_program.py:" in user_line()
