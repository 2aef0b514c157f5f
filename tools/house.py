"""Says whether the files of the packages lie as the folders are meant to: who imports whom.

    python -m tools.house

`tools/house.yaml` lists folders, and a file, from the ground up; what is in none of its rows is of
the floor of the folder around it. Three things are looked for, by reading sources alone:

* imports that point to a folder further down the list, those for types, inside of functions and by
  ``importlib.import_module("...")`` included;
* circles of files, by imports at load time;
* circles of files, with those inside of functions as well.

``exceptions`` are imports that may point down, until what is said above them happens. The list only
shrinks: one that is not needed is a fault too.
"""

from __future__ import annotations

import argparse
import ast
import collections
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

__all__ = ["LAZY", "LOAD", "ROOT", "TYPE", "House", "main", "rules"]

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("mesh_utils", "xla_dtensor")
LOAD, LAZY, TYPE = "load", "lazy", "type"


@dataclass(frozen=True)
class Import:
    """One file imports another.

    Attributes:
        kind: "load", "lazy" (inside of a function) or "type" (under TYPE_CHECKING).
        source: The file that imports.
        target: The file that is imported.
    """

    kind: str
    source: str
    target: str

    def __str__(self) -> str:
        return f"{self.source} -> {self.target}"


class House:
    """The files of the packages, and what is said of their folders.

    Args:
        folders: From the ground up.
        exceptions: Imports that may point down, as ``a.py -> b.py``.
        root: The folder of the packages.
    """

    def __init__(self, folders: Sequence[str], exceptions: Sequence[str], root: Path):
        self.folders = list(folders)
        self.exceptions = frozenset(exceptions)
        paths = [path for package in PACKAGES for path in (root / package).rglob("*.py")]
        self.files = sorted(str(path.relative_to(root)) for path in paths)
        self.modules = {_module(file): file for file in self.files}
        self.imports = [
            one
            for file in self.files
            for one in self._imports_of(file, ast.parse((root / file).read_text("utf-8")))
        ]

    def floor(self, file: str) -> int:
        """Return the number of the folder that a file is of.

        Raises:
            KeyError: No folder of the list is around it.
        """
        for parent in (Path(file), *Path(file).parents):
            if str(parent) in self.folders:
                return self.folders.index(str(parent))
        raise KeyError(file)

    def down(self) -> list[Import]:
        """Return imports that point to a folder further down, and are no exceptions."""
        return [one for one in self._pointing_down() if str(one) not in self.exceptions]

    def needless(self) -> list[str]:
        """Return exceptions that no import needs."""
        return sorted(self.exceptions - {str(one) for one in self._pointing_down()})

    def circles(self, *kinds: str) -> list[list[str]]:
        """Return sets of files that import each other in a circle.

        Args:
            kinds: Of imports that count.
        """
        after: dict[str, set[str]] = collections.defaultdict(set)
        for one in self.imports:
            if one.kind in kinds:
                after[one.source].add(one.target)
        reached = {file: _reached(file, after) for file in list(after)}
        circles = {
            tuple(sorted(b for b in reached[a] if a in reached.get(b, ())))
            for a in reached
            if a in reached[a]
        }
        return sorted(map(list, circles), key=len)

    def _pointing_down(self) -> list[Import]:
        return [one for one in self.imports if self.floor(one.source) < self.floor(one.target)]

    def _imports_of(self, file: str, code: ast.Module) -> Iterator[Import]:
        for kind, name in _imported(code, LOAD):
            while name and name not in self.modules:
                name = name.rpartition(".")[0]
            target = self.modules.get(name)
            if target is not None and target != file:
                yield Import(kind, file, target)


def rules() -> tuple[list[str], list[str]]:
    """Return the folders and the exceptions of house.yaml."""
    text = (ROOT / "tools" / "house.yaml").read_text("utf-8")
    data: Mapping[str, list[str]] = yaml.safe_load(text)
    return data["folders"], data["exceptions"]


def _module(file: str) -> str:
    return ".".join(Path(file).with_suffix("").parts).removesuffix(".__init__")


def _imported(node: ast.AST, kind: str) -> Iterator[tuple[str, str]]:
    """Yield the modules that code imports, and names of them: ``a.b`` of ``from a import b``."""
    for child in ast.iter_child_nodes(node):
        is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        within = LAZY if kind == LOAD and is_function else kind
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            within = TYPE
        if isinstance(child, ast.Import):
            yield from ((within, alias.name) for alias in child.names)
        if isinstance(child, ast.ImportFrom) and child.module:
            yield from ((within, f"{child.module}.{alias.name}") for alias in child.names)
        if isinstance(child, ast.Call) and ast.unparse(child.func).endswith("import_module"):
            constants = [a.value for a in child.args if isinstance(a, ast.Constant)]
            yield from ((within, value) for value in constants if isinstance(value, str))
        yield from _imported(child, within)


def _reached(start: str, after: Mapping[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    todo = [start]
    while todo:
        new = after.get(todo.pop(), set()) - seen
        seen |= new
        todo += new
    return seen


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what is wrong with the folders; 1 where something is."""
    parser = argparse.ArgumentParser(prog="python -m tools.house", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.parse_args(arguments)
    house = House(*rules(), ROOT)
    parts = {
        "imports that point down": [f"{one.kind} {one}" for one in house.down()],
        "exceptions that nothing needs": house.needless(),
        "circles at load time": [" ".join(files) for files in house.circles(LOAD)],
        "circles, lazy imports included": [" ".join(f) for f in house.circles(LOAD, LAZY)],
    }
    for title, lines in parts.items():
        print(f"{title}: {len(lines) or 'none'}", *(f"    {line}" for line in lines), sep="\n")
    return int(any(parts.values()))


if __name__ == "__main__":
    raise SystemExit(main())
