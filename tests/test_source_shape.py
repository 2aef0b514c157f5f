"""Short files, short functions, a docstring in each module, and none of the banned names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("tpu_configs", "mesh_utils", "xla_dtensor", "examples", "benchmarks", "tools")
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80
UPSTREAM_NAMES = {"ShardingSpec"}  # torch_xla's, in xla_dtensor.spmd
BANNED_FILES = {"utils.py", "util.py", "helpers.py", "common.py", "misc.py"}


def function_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The lines of a function, its docstring left out."""
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    if ast.get_docstring(node) is not None:
        text = node.body[0]
        lines -= (text.end_lineno or text.lineno) - text.lineno + 1
    return lines


def faults(path: Path) -> Iterator[str]:
    """What is wrong with the shape of one file, one line each."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text, str(path))
    if path.name in BANNED_FILES:
        yield f"{path.name} says nothing: name the file after what it holds"
    if not ast.get_docstring(tree):
        yield "the module has no docstring"
    if (lines := text.count("\n")) > MAX_FILE_LINES:
        yield f"{lines} lines: at most {MAX_FILE_LINES}"
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name.endswith("Spec"):
            if node.name in UPSTREAM_NAMES:
                continue
            yield f"line {node.lineno}: class {node.name}: no class of ours is called Spec"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = function_lines(node)
            if lines > MAX_FUNCTION_LINES:
                yield f"line {node.lineno}: {node.name} has {lines} lines: at most 80"


def test_shape() -> None:
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    assert len(paths) > 10
    assert [f"{path.relative_to(ROOT)}: {fault}" for path in paths for fault in faults(path)] == []


@pytest.mark.parametrize(
    ("name", "source", "fault"),
    [
        ("utils.py", '"""Text."""', "says nothing"),
        ("mesh.py", "import os", "no docstring"),
        ("mesh.py", '"""Text."""\n' + "x = 1\n" * 500, "501 lines"),
        ("mesh.py", '"""Text."""\nclass MeshSpec: ...', "class MeshSpec"),
        ("mesh.py", '"""Text."""\ndef f():\n' + "    g()\n" * 80, "f has 81 lines"),
    ],
)
def test_shape_can_fail(tmp_path: Path, name: str, source: str, fault: str) -> None:
    path = tmp_path / name
    path.write_text(source)
    (found,) = faults(path)
    assert fault in found


def test_docstring_is_not_counted() -> None:
    source = 'def f():\n    """One.\n\n    Two.\n    """\n    return 1\n'
    node = ast.parse(source).body[0]
    assert isinstance(node, ast.FunctionDef)
    assert function_lines(node) == 2
