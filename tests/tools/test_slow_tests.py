"""The list of slow tests is written from what pytest measured."""

from __future__ import annotations

from pathlib import Path

import pytest

import tools.slow_tests
from tests.contract import slow_tests
from tools.mutants.mutant import read_mutants
from tools.slow_tests import MUTANTS, listed, main, measured

TIMES = """<testsuites><testsuite>
<testcase classname="tests.a.test_one" name="test_x[2-[Shard(0)]]" time="3.1"/>
<testcase classname="tests.a.test_one.TestAll" name="test_y" time="0.2"/>
</testsuite></testsuites>"""
X, Y = "tests/a/test_one.py::test_x[2-[Shard(0)]]", "tests/a/test_one.py::TestAll::test_y"


def test_names_are_pytests(tmp_path: Path) -> None:
    file = tmp_path / "tests.xml"
    file.write_text(TIMES)
    assert measured(file) == {X: 3.1, Y: 0.2}


def test_what_is_listed() -> None:
    seconds = {X: 3.1, Y: 0.2}
    assert listed(frozenset(), seconds, 2.5, []) == [X]
    assert listed(frozenset({Y, "tests/b.py::test_z"}), seconds, 2.5, []) == [
        X,
        "tests/b.py::test_z",
    ]
    assert listed(frozenset({X}), seconds, 2.5, ["tests/a/test_one.py::test_x"]) == []


def test_the_file_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    times, names = tmp_path / "tests.xml", tmp_path / "slow.txt"
    times.write_text(TIMES)
    monkeypatch.setattr(tools.slow_tests, "SLOW_TESTS", names)
    monkeypatch.setattr(tools.slow_tests, "slow_tests", frozenset)
    assert main([str(times)]) == 0
    assert names.read_text().splitlines()[-1] == X
    assert "1 tests are slow; the others that were measured take 0 s" in capsys.readouterr().out


def test_the_contract_keeps_the_tests_that_find_its_mutants() -> None:
    found = [test for m in read_mutants(MUTANTS) if m.suite == "contract" for test in m.tests]
    assert [name for name in slow_tests() if name.startswith(tuple(found))] == []
