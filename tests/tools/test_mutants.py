"""The list of old faults: its texts stand in the code, and a run of tests is judged rightly."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

from tools.mutants.__main__ import LIST, ROOT, main
from tools.mutants.check import check
from tools.mutants.mutant import Mutant, MutantError, read_mutants
from tools.mutants.place import Tree, positions, replaced
from tools.mutants.trial import Copy, Ending, Run
from tools.mutants.verdict import BROKEN, KILLED, SURVIVED, baseline_faults, judge

CODE = "class A:\n    def f(self, x):\n        if x:\n            return 1\n        return 2\n"
OLD, NEW = "if x:\n    return 1\n", "return 3\n"


def mutant(old: str = OLD, new: str = NEW, test: str = "tests/test_a.py::test_f") -> Mutant:
    return Mutant("f", "f was wrong.", "error", "core", "none", "all", (test,), old, new)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for package in ("mesh_utils", "xla_dtensor", "tests"):
        (tmp_path / package).mkdir()
    (tmp_path / "xla_dtensor/a.py").write_text(CODE)
    (tmp_path / "tests/test_a.py").write_text("def test_f() -> None: ...\n")
    return tmp_path


def test_every_mutant_stands_in_the_code_once() -> None:
    assert check(read_mutants(LIST), ROOT) == []


def test_the_list_is_long_enough() -> None:
    mutants = read_mutants(LIST)
    kinds = Counter(each.kind for each in mutants)
    files = [Tree(ROOT).place(each).file for each in mutants]
    assert len(mutants) >= 60
    assert kinds["silent_value"] + kinds["silent_layout"] >= 40
    assert sum("torch_xla" in file.parts for file in files) >= 10
    assert sum(each.suite == "contract" for each in mutants) >= 50


def test_a_text_is_found_whatever_its_indentation() -> None:
    assert positions(CODE, OLD) == [2]
    after = replaced(CODE, OLD, NEW)
    assert after == "class A:\n    def f(self, x):\n        return 3\n        return 2\n"
    assert replaced(CODE, OLD, "") == "class A:\n    def f(self, x):\n        return 2\n"
    assert positions(CODE, "    if x:\n        return 1\n") == [2]
    assert positions(CODE, "if x:\nreturn 1\n") == []


def test_a_text_that_is_gone_is_red(tree: Path) -> None:
    (fault,) = check([mutant(old="while x:\n    return 1\n")], tree)
    assert "stands 0 times in mesh_utils, xla_dtensor (nowhere)" in fault
    assert "f was wrong." in fault


def test_a_text_that_stands_twice_is_red(tree: Path) -> None:
    (tree / "mesh_utils/b.py").write_text("if x:\n    return 1\n")
    (fault,) = check([mutant()], tree)
    assert "stands 2 times" in fault
    assert "mesh_utils/b.py, xla_dtensor/a.py" in fault


def test_a_new_text_that_is_no_python_is_red(tree: Path) -> None:
    (fault,) = check([mutant(new="if x:\n")], tree)
    assert "xla_dtensor/a.py with the new text is no Python" in fault


@pytest.mark.parametrize(
    "test", ["tests/test_b.py::test_f", "tests/test_a.py::test_g", "tests/test_a.py::test_f[one]"]
)
def test_a_test_that_is_gone_is_red(tree: Path, test: str) -> None:
    assert check([mutant(test=test)], tree) == [
        f"f: the test {test} is not there. Name the one that finds it now."
    ]


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"kind": "loud"}, "kind of 'f' is 'loud'. Pass one of silent_value"),
        ({"id": "F f"}, "the id 'F f' is no name"),
        ({"tests": []}, "'f' has no test"),
        ({"new": OLD}, "a new text equal to the old one"),
        ({"since": 1}, "has unknown ones: since"),
        ({"needs": "a jax"}, "'f' needs 'a jax'. That is no package with a version"),
    ],
)
def test_an_entry_that_is_wrong_is_refused(tmp_path: Path, changed: dict, text: str) -> None:
    entry = {**mutant().__dict__, "tests": ["tests/test_a.py"], **changed}
    lines = "".join(f"  {name}: {value!r}\n" for name, value in entry.items())
    (tmp_path / "list.yaml").write_text("-" + lines[1:])
    with pytest.raises(MutantError, match=text.replace("(", "\\(")):
        read_mutants(tmp_path / "list.yaml")


def test_an_id_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    lines = "".join(f"  {name}: {value!r}\n" for name, value in mutant().__dict__.items())
    text = "-" + lines[1:].replace("(", "[").replace(",)", "]")
    (tmp_path / "list.yaml").write_text(text * 2)
    with pytest.raises(MutantError, match=r"f is there twice\. Give each its own id"):
        read_mutants(tmp_path / "list.yaml")


def test_an_unknown_id_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["no_such_mutant"]) == 2
    assert (
        "no_such_mutant were asked for. The list has none of that name" in capsys.readouterr().err
    )


def test_what_a_mutant_needs_is_looked_for(tmp_path: Path) -> None:
    python = Path(sys.executable)
    copy = Copy(ROOT, tmp_path / "copy", {"jax": python, "torch_xla": python})
    assert copy.lacks("", "none") == ""
    assert copy.lacks("pytest>=8", "none") == ""
    assert copy.lacks("pytest<8", "none").startswith("needs pytest<8, there is pytest ")


@pytest.mark.parametrize(("suite", "num_run"), [("contract", 1), ("all", 2)])
def test_the_contract_has_to_find_its_mutants_itself(
    tmp_path: Path, suite: str, num_run: int
) -> None:
    python = Path(sys.executable)
    copy = Copy(ROOT, tmp_path / "copy", {"jax": python, "torch_xla": python})
    tests = [
        "tests/xla_dtensor/core/test_decode.py",  # public
        "tests/tools/test_environments.py::test_none_is_nothing",
    ]
    run = copy.run(tests, "none", timeout=300, stop_at_first=False, suite=suite)
    assert len({ending.test.partition("::")[0] for ending in run.endings}) == num_run


def ran(*endings: tuple[str, str], status: int | None = 1) -> Run:
    found = tuple(
        Ending("tests/test_a.py::test_f", outcome, error, "") for outcome, error in endings
    )
    return Run(found, status, 1.0, "the end")


@pytest.mark.parametrize(
    ("run", "verdict"),
    [
        (ran(("failed", "AssertionError")), KILLED),
        (ran(("passed", ""), ("failed", "LayoutError")), KILLED),
        (ran(("passed", ""), status=0), SURVIVED),
        (ran(("skipped", "Skipped"), status=0), SURVIVED),
        (ran(status=5), SURVIVED),  # no test was chosen
        (ran(("failed", "NameError")), BROKEN),
        (ran(("failed", "ModuleNotFoundError")), BROKEN),
        (ran(("broken", "ValueError")), BROKEN),
        (ran(("broken", "CollectError"), status=2), BROKEN),
        (ran(status=-6), BROKEN),
        (ran(status=None), BROKEN),
    ],
)
def test_a_run_is_judged(run: Run, verdict: str) -> None:
    assert judge(mutant(), run).verdict == verdict


def test_without_a_mutant_each_named_test_has_to_pass() -> None:
    tests = ("tests/test_a.py::test_f",)
    assert baseline_faults(tests, ran(("passed", ""), status=0)) == []
    assert "skipped without a mutant" in baseline_faults(tests, ran(("skipped", ""), status=0))[0]
    assert "failed without a mutant" in baseline_faults(tests, ran(("failed", "Error")))[0]
    assert baseline_faults(("tests/test_b.py",), ran(("passed", ""), status=0)) == [
        "tests/test_b.py did not run without a mutant"
    ]


@pytest.mark.thorough
def test_mutants_are_found_and_survive(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    name = next(mutant.id for mutant in read_mutants(LIST) if not mutant.needs)
    options = ["--python-jax", sys.executable, "--json", str(tmp_path / "verdicts.json")]
    assert main([name, *options]) == 0
    assert "1 killed, 0 SURVIVED, 0 broken, 0 not tried" in capsys.readouterr().out
