r"""Where the text of a mutant stands in the packages, and how it is replaced.

A mutant names no file: code moves, and the text is looked for in all ``.py`` and ``.yaml`` files of
`PACKAGES`. It is compared without its indentation, so that a block which became a method is the
same text. It has to stand in exactly one place; a text that is gone or ambiguous is an error,
never a mutant that does nothing.

Example:
    >>> lines = "def f(x):\n    if x:\n        return 1\n    return 2\n"
    >>> replaced(lines, "if x:\n    return 1\n", "if not x:\n    return 1\n")
    'def f(x):\n    if not x:\n        return 1\n    return 2\n'
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.mutants.mutant import Mutant, MutantError

__all__ = ["PACKAGES", "Place", "Tree", "positions", "replaced"]

PACKAGES = ("mesh_utils", "xla_dtensor")


@dataclass(frozen=True)
class Place:
    """A file, relative to the root, and its text before and after."""

    file: Path
    before: str
    after: str


class Tree:
    """The files of the packages, read once.

    Args:
        root: The folder that the packages are in.
    """

    def __init__(self, root: Path) -> None:
        files = (
            file
            for package in PACKAGES
            for ending in ("py", "yaml")
            for file in sorted((root / package).rglob(f"*.{ending}"))
        )
        self._texts = {file.relative_to(root): file.read_text("utf-8") for file in files}

    def place(self, mutant: Mutant) -> Place:
        """Return where a mutant stands.

        Raises:
            MutantError: Its text stands nowhere or in several places, or what it makes of the file
                is no Python.
        """
        first = _lines(mutant.old)[0].strip()
        found = [
            (file, text)
            for file, text in self._texts.items()
            if first in text
            for _ in positions(text, mutant.old)
        ]
        if len(found) != 1:
            where = ", ".join(sorted({str(file) for file, _ in found})) or "nowhere"
            raise MutantError(
                f"{mutant.id}: the old text stands {len(found)} times in {', '.join(PACKAGES)} "
                f"({where}). It has to stand there once. Give the text as it is now, or express "
                f"the fault anew where the code went: {mutant.what}"
            )
        file, text = found[0]
        place = Place(file, text, replaced(text, mutant.old, mutant.new))
        if file.suffix == ".py":
            try:
                ast.parse(place.after)
            except SyntaxError as error:
                raise MutantError(
                    f"{mutant.id}: {file} with the new text is no Python ({error}). Mutants run; "
                    "correct the new text."
                ) from None
        return place


def positions(text: str, old: str) -> list[int]:
    """Return the lines, counted from 0, at which `old` begins, whatever its indentation."""
    lines, wanted = text.splitlines(), _lines(old)
    return [
        start
        for start in range(len(lines) - len(wanted) + 1)
        if lines[start].strip() == wanted[0].strip()
        and _lines("\n".join(lines[start : start + len(wanted)])) == wanted
    ]


def replaced(text: str, old: str, new: str) -> str:
    """Return `text` with the first place of `old` replaced, in the indentation of that place."""
    lines, count = text.splitlines(keepends=True), len(_lines(old))
    start = positions(text, old)[0]
    here = lines[start : start + count]
    indent = min(len(line) - len(line.lstrip(" ")) for line in here if line.strip())
    made = textwrap.indent("\n".join(_lines(new)), " " * indent)
    return "".join([*lines[:start], made + "\n" if made else "", *lines[start + count :]])


def _lines(text: str) -> Sequence[str]:
    return [line.rstrip() for line in textwrap.dedent(text.strip("\n")).splitlines()]
