"""Says what would go wrong if the files of today were merged as a tree places them.

    python -m tools.house                      the tree of tools/house_tree.yaml
    python -m tools.house --tree other.yaml

The tree lists folders from the ground up, and for each file to come the files of today that it is
made of. Four things are looked for, by reading sources alone:

* files that no file of the tree takes, and files of the tree that are not there;
* imports that point to a folder further down, those for types and inside of functions included;
* circles of merged files, by imports at load time; then with those inside of functions as well;
* top-level names that two files of one row define, and not by the same statement.

``exceptions`` of the tree are imports that may point down, each with its reason. They only shrink.
"""

from __future__ import annotations

import argparse
import ast
import collections
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

__all__ = ["House", "main"]

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("mesh_utils", "xla_dtensor")
LOAD, LAZY, TYPE = "load", "lazy", "type"


@dataclass(frozen=True)
class Import:
    """One file of today imports another, which lies in another file of the tree.

    Attributes:
        kind: "load", "lazy" (inside of a function) or "type" (under TYPE_CHECKING).
        source: The file that imports.
        target: The file that is imported.
    """

    kind: str
    source: str
    target: str


class House:
    """A tree, beside the files of today.

    Args:
        tree: What house_tree.yaml holds.
        root: The folder of the packages.
    """

    def __init__(self, tree: Mapping[str, Mapping[str, Mapping[str, Sequence[str]]]], root: Path):
        self.root = root
        self.folders = list(tree["folders"])
        self.exceptions = set(tree.get("exceptions") or ())
        self.places = {
            file: f"{folder}/{name}"
            for folder, rows in tree["folders"].items()
            for name, files in rows.items()
            for file in files
        }
        found = [path for package in PACKAGES for path in (root / package).rglob("*.py")]
        self.files = sorted(str(path.relative_to(root)) for path in found)
        self.modules = {_module(file): file for file in self.files}
        placed = [file for file in self.files if file in self.places]
        self.sources = {file: ast.parse((root / file).read_text("utf-8")) for file in placed}
        self.imports = [one for file in placed for one in self._imports_of(file)]

    def misplaced(self) -> list[str]:
        """Return files that no row takes, and those of rows that are not there."""
        missing = [f"{file}: in the tree, and not there" for file in self.places]
        missing = [line for line in missing if line.partition(":")[0] not in self.files]
        return [f"{file}: no row" for file in self.files if file not in self.places] + missing

    def down(self) -> list[Import]:
        """Return imports that point to a folder further down."""
        rank = {folder: at for at, folder in enumerate(self.folders)}

        def is_down(one: Import) -> bool:
            source, target = (self.places[f].rpartition("/")[0] for f in (one.source, one.target))
            excepted = f"{one.source} -> {one.target}" in self.exceptions
            return rank[source] < rank[target] and not excepted

        return [one for one in self.imports if is_down(one)]

    def circles(self, *kinds: str) -> list[list[str]]:
        """Return sets of files of the tree that import each other in a circle.

        Args:
            kinds: Of imports that count.
        """
        after: dict[str, set[str]] = collections.defaultdict(set)
        for one in self.imports:
            if one.kind in kinds:
                after[self.places[one.source]].add(self.places[one.target])
        reached = {file: _reached(file, after) for file in list(after)}
        found = {
            tuple(sorted(b for b in reached[a] if a in reached.get(b, ())))
            for a in reached
            if a in reached[a]
        }
        return sorted(map(list, found), key=len)

    def clashes(self) -> dict[str, list[str]]:
        """Return, by file of the tree, names that two files of its row define differently."""
        texts: dict[str, dict[str, set[str]]] = collections.defaultdict(
            lambda: collections.defaultdict(set)
        )
        for file, code in self.sources.items():
            for name, text in _definitions(code):
                texts[self.places[file]][name].add(text)
        clashing = {
            place: sorted(name for name, different in names.items() if len(different) > 1)
            for place, names in texts.items()
        }
        return {place: names for place, names in sorted(clashing.items()) if names}

    def _imports_of(self, file: str) -> Iterator[Import]:
        for kind, name in _imported(self.sources[file], LOAD):
            while name and name not in self.modules:
                name = name.rpartition(".")[0]
            target = self.modules.get(name)
            if target in self.places and self.places[target] != self.places[file]:
                yield Import(kind, file, target)


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
        yield from _imported(child, within)


def _definitions(code: ast.Module) -> Iterator[tuple[str, str]]:
    for node in code.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names = [node.target.id]
        else:
            names = []
        yield from ((name, ast.unparse(node)) for name in names if name not in ("__all__", "_"))


def _reached(start: str, after: Mapping[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    todo = [start]
    while todo:
        new = after.get(todo.pop(), set()) - seen
        seen |= new
        todo += new
    return seen


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what is wrong with a tree; 1 where something is."""
    parser = argparse.ArgumentParser(prog="python -m tools.house", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--tree", type=Path, default=ROOT / "tools" / "house_tree.yaml")
    asked = parser.parse_args(arguments)
    house = House(yaml.safe_load(asked.tree.read_text("utf-8")), ROOT)
    down = [f"{one.kind} {one.source} -> {one.target}" for one in house.down()]
    parts = {
        "files out of place": house.misplaced(),
        "imports that point down": down,
        "circles at load time": [" ".join(files) for files in house.circles(LOAD)],
        "circles, lazy imports included": [" ".join(f) for f in house.circles(LOAD, LAZY)],
        "names that clash": [f"{file}: {' '.join(n)}" for file, n in house.clashes().items()],
    }
    for title, lines in parts.items():
        print(f"{title}: {len(lines) or 'none'}", *(f"    {line}" for line in lines), sep="\n")
    return int(any(parts.values()))


if __name__ == "__main__":
    raise SystemExit(main())
