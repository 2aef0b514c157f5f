"""The cheap check: each text stands in the code once, and each named test is there."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from tools.mutants.mutant import Mutant, MutantError
from tools.mutants.place import Tree

__all__ = ["check"]


def check(mutants: Sequence[Mutant], root: Path) -> list[str]:
    """Return what is wrong with the list, a line each; nothing is run.

    Args:
        mutants: The list.
        root: The tree that the packages and the tests are in.

    Returns:
        A line for each text that does not stand in the code once, and for each test whose file,
        class, function or case is not there.
    """
    tree, faults = Tree(root), list[str]()
    for mutant in mutants:
        try:
            tree.place(mutant)
        except MutantError as error:
            faults.append(str(error))
        faults += [
            f"{mutant.id}: the test {test} is not there. Name the one that finds it now."
            for test in mutant.tests
            if not _is_there(test, root)
        ]
    return faults


def _is_there(test: str, root: Path) -> bool:
    """Tell whether the file and each name of a test's id stand in it.

    The ids of cases may be put together by pytest. One that is a single name may be that of a
    function in a table, which may lie beside the file.
    """
    name, _, case = test.rstrip("]").partition("[")
    file, *names = name.split("::")
    if not (root / file).is_file():
        return False
    text = (root / file).read_text("utf-8")
    if not all(re.search(rf"\b(?:def|class) {re.escape(part)}\b", text) for part in names):
        return False
    if re.fullmatch(r"[a-z_]*[a-z]", case) is None:
        return True
    word = re.compile(rf"\b{case}\b")
    files = (root / file).parent.glob("*.py")
    return any(word.search(each.read_text("utf-8")) for each in files)
