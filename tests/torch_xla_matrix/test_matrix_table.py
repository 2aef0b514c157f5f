"""The table of the package's docstring names each test of the matrix once, under its letter."""

from __future__ import annotations

import ast
import re
from pathlib import Path

FOLDER = Path(__file__).parent
# The letters of each module, where they are more than the one in its name.
LETTERS = {"c": "CD", "e": "EF", "h": "HI", "m": "MNO"}


def functions_of(path: Path) -> list[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [name for name in names if name.startswith("test_")]


def table() -> list[tuple[str, str, str]]:
    text = ast.get_docstring(ast.parse((FOLDER / "__init__.py").read_text(encoding="utf-8")))
    return re.findall(r"^([A-O]\d\d)   (test_\w+) +(\S.*)$", text or "", re.MULTILINE)


def test_each_test_has_a_row_under_its_letter() -> None:
    rows = [(case[0], name) for case, name, _ in table()]
    found: list[tuple[str, str]] = []
    for path in sorted(FOLDER.glob("test_matrix_?_*.py")):
        first = path.stem.removeprefix("test_matrix_")[0]
        letter_of = {name: letter for letter, name in rows if letter in LETTERS.get(first, "")}
        found += [(letter_of.get(name, first.upper()), name) for name in functions_of(path)]
    assert sorted(rows) == sorted(found)


def test_cases_are_numbered_one_by_one() -> None:
    numbers = [case for case, _, _ in table()]
    letters = "".join(dict.fromkeys(case[0] for case in numbers))
    assert letters == "ABCDEFGHIJKLMNO"
    for letter in letters:
        count = sum(case[0] == letter for case in numbers)
        expected = [f"{letter}{i:02}" for i in range(1, count + 1)]
        assert [case for case in numbers if case[0] == letter] == expected


def test_what_torch_xla_does_in_silence_is_named_so() -> None:
    for case, name, says in table():
        assert name.startswith("test_silent") == says.startswith("SILENT") or case == "K09"
        assert re.match(r"SILENT|RAISES|OK|lost|not on JAX", says), case
