"""The runner of all tests: its parts, what it remembers, what it calls a hole."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools import test_all as runner

ROOT = Path(__file__).resolve().parents[2]
CASE = '<testcase classname="tests.test_a" name="{name}" time="{time}">{inner}</testcase>'
SKIPPED = '<skipped message="needs what is not here"/>'


def write(file: Path, *cases: str) -> Path:
    file.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    return file


def test_parts_have_names_of_their_own() -> None:
    names = [part.name for part in runner.PARTS]
    assert len(set(names)) == len(names)
    assert {"contract", "contract-torch-xla", "contract-2.9-0.10.2", "mutants-1"} <= set(names)


def test_continuous_integration_draws_no_new_seeds() -> None:
    names = [part.name for part in runner.PARTS if "new" in part.arguments]
    text = (ROOT / ".ci" / "run").read_text()
    assert names
    assert all(name in text for name in names)


@pytest.mark.parametrize("part", runner.PARTS, ids=lambda part: part.name)
def test_the_makefile_knows_each_environment(part: runner.Part) -> None:
    done = subprocess.run(
        ["make", "--no-print-directory", f"folder-{part.environment}", *part.variables],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith(".venv")


def test_a_test_that_ran_nowhere_is_a_hole(tmp_path: Path) -> None:
    first = write(
        tmp_path / "a.xml",
        CASE.format(name="one", time=1, inner=""),
        CASE.format(name="two", time=0, inner=SKIPPED),
        CASE.format(name="three", time=0, inner=SKIPPED),
        '<testcase classname="" name="tests.test_a" time="0">' + SKIPPED + "</testcase>",
    )
    second = write(tmp_path / "b.xml", CASE.format(name="two", time=3, inner=""))
    tests = runner.read_tests([first, second])
    assert tests.skipped_everywhere == {"tests.test_a::three": "needs what is not here"}
    assert tests.seconds["tests.test_a::two"] == 3


def test_it_begins_at_another_part_each_day() -> None:
    number = len(runner.PARTS)
    firsts = {runner.turned(runner.PARTS, day)[0] for day in range(739000, 739000 + number)}
    assert firsts == set(runner.PARTS)
    assert set(runner.turned(runner.PARTS, 5)) == set(runner.PARTS)


def run_in(monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str) -> int:
    monkeypatch.setattr(runner, "FOLDER", folder)
    monkeypatch.setattr(sys, "argv", ["test_all.py", *arguments])
    return runner.main()


def part(name: str, program: str) -> runner.Part:
    return runner.Part(name, "MAIN", ("-c", program))


def test_what_has_passed_is_not_run_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    parts = (
        part("good", "print('ran good')"),
        part("bad", "print('ran bad'); raise SystemExit(1)"),
    )
    monkeypatch.setattr(runner, "PARTS", parts)
    monkeypatch.setattr(runner, "python_of", lambda part: sys.executable)
    assert run_in(monkeypatch, tmp_path) == 1
    assert {"ran good", "ran bad"} <= set(capfd.readouterr().out.splitlines())
    assert run_in(monkeypatch, tmp_path) == 1
    lines = capfd.readouterr().out.splitlines()
    assert "ran bad" in lines
    assert "ran good" not in lines
    outcomes = json.loads((tmp_path / "outcomes.json").read_text())
    assert {name: values["status"] for name, values in outcomes.items()} == {
        "good": "passed",
        "bad": "failed",
    }


def test_a_part_that_takes_too_long_does_not_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "PARTS", (part("slow", "import time; time.sleep(60)"),))
    monkeypatch.setattr(runner, "python_of", lambda part: sys.executable)
    monkeypatch.setattr(runner, "LIMIT_SECONDS", 1)
    assert run_in(monkeypatch, tmp_path) == 0
    assert "these do not count: slow" in capfd.readouterr().out


def test_an_unknown_part_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_in(monkeypatch, tmp_path, "--only", "nonsense") == 2
    assert "There is no part nonsense." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("reason", "status"), [("this machine has no Python 3.14", 0), ("needs what is not here", 1)]
)
def test_only_what_the_machine_lacks_may_be_skipped_everywhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reason: str, status: int
) -> None:
    tests = runner.Part("tests", "MAIN", runner.PYTEST)
    inner = SKIPPED.replace("needs what is not here", reason)
    write(tmp_path / "tests.xml", CASE.format(name="one", time=0, inner=inner))
    monkeypatch.setattr(runner, "PARTS", (tests,))
    monkeypatch.setattr(runner, "run", lambda *_: runner.Outcome("passed", 1, 1, tree))
    tree = runner.tree_state()
    assert run_in(monkeypatch, tmp_path) == status
