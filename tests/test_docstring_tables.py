"""The tables in the docstrings of modules: the columns of consecutive lines line up."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import groupby, pairwise
from pathlib import Path

import pytest

from tests.contract import PACKAGES

ROOT = Path(__file__).resolve().parents[1]
CELL = re.compile(r"\S+(?: \S+)*")
"""Two spaces or more part a cell from the next one."""

MODULES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]

# The worked example of layout.py as it once was: a table of five rows, filled like a paragraph.
REFLOWED = """
    placements      [_StridedShard(0, split_factor=4), Shard(0)]
    dims            (("tp", "dp"), ())          rows: 4 pieces by tp, each in 2 by dp; columns:
    whole text            [tp.dp, -] partition spec  (("tp", "dp"), None) OpSharding
    {devices=[8,1]<=[2,4]T(1,0)} device (dp=1, tp=2) has row 5               (2 * 2 + 1)
"""

Cells = list[tuple[int, int]]
"""Where each cell of a line begins and ends."""


def tables(docstring: str) -> Iterator[list[str]]:
    """The lines of each indented block, up to its doctest; pictures without a letter left out."""
    lines = docstring.splitlines()
    for indented, block in groupby(lines, lambda line: line.startswith("    ")):
        rows = list(block)
        if indented:
            doctest = next((n for n, row in enumerate(rows) if ">>> " in row), len(rows))
            yield [row for row in rows[:doctest] if re.search(r"\w", row)]


def fits(cells: Cells, above: Cells) -> bool:
    """Whether each cell begins or ends below another one, or had to give way to the one before."""
    starts, ends = ({cell[place] for cell in above} for place in (0, 1))
    for (before, before_end), (start, end) in pairwise(cells):
        column = min((place for place in starts if place > before), default=0)
        if start not in starts and end not in ends and before_end + 1 < column:
            return False
    return True


def crooked(docstring: str) -> Iterator[str]:
    """The lines whose columns are not those of the line above."""
    for rows in tables(docstring):
        for above, row in pairwise(rows):
            upper, lower = ([cell.span() for cell in CELL.finditer(line)] for line in (above, row))
            continued = lower[0][0] in {start for start, _ in upper}
            if not continued or 1 in (len(upper), len(lower)):
                continue
            if not fits(lower, upper) and not fits(upper, lower):
                yield row


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_columns_line_up(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    assert list(crooked(docstring)) == []


def test_that_it_can_fail() -> None:
    assert list(crooked(REFLOWED)) == REFLOWED.splitlines()[3:4]
