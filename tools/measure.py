"""Prints how large the packages are, and through how much of them one call goes.

    python -m tools.measure                 sizes, names, comments, circles; needs no torch
    python -m tools.measure --paths         and the files, functions and calls that a call enters
    python -m tools.measure --root OTHER    of another checkout, to put two beside each other

A path is what Python enters of the packages during one call, counted by ``sys.setprofile``: files,
functions, and calls of them. Each call is the first of its kind, but for the last of a step.
"""

from __future__ import annotations

import argparse
import ast
import collections
import io
import json
import os
import re
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tools.house import LAZY, LOAD, PACKAGES, ROOT, House

__all__ = ["main", "paths", "sizes"]

# Names that say nothing of what they name.
CONTENTLESS = frozenset(
    re.findall(
        r"\w+",
        """found given each kept known asked told made one other others rest now before after held
        moved lies whole wanted taken done left value result item data obj info""",
    )
)
_NOT_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENDMARKER, tokenize.ENCODING),
}


def sizes(root: Path) -> dict[str, float]:
    """Return what is counted in the sources of a checkout, by what it is called.

    Args:
        root: The checkout's folder.
    """
    house = House(["mesh_utils", "xla_dtensor"], [], root)
    texts = {file: (root / file).read_text("utf-8") for file in house.files}
    counts: collections.Counter[str] = collections.Counter()
    for text in texts.values():
        counts.update(_counts(text))
    importers: dict[str, set[str]] = collections.defaultdict(set)
    for one in house.imports:
        importers[one.target].add(one.source)
    folders = _folders(house.files)
    circles = house.circles(LOAD, LAZY)
    return {
        "files": len(texts),
        "lines": sum(text.count("\n") for text in texts.values()),
        "code lines": counts["code lines"],
        "tokens": counts["tokens"],
        "files with one importer": sum(len(sources) == 1 for sources in importers.values()),
        "names that say nothing, per 1,000": round(
            1000 * counts["contentless"] / counts["names"], 1
        ),
        "comments per 100 lines of code": round(100 * counts["comments"] / counts["code lines"], 1),
        "circles of files, lazy imports included": len(circles),
        "files in the largest circle": max((len(files) for files in circles), default=0),
        "folders of more than 18 entries": sum(number > 18 for number in folders.values()),
        "files of more than 1,000 lines": sum(text.count("\n") > 1000 for text in texts.values()),
    }


def _counts(text: str) -> Iterator[str]:
    """Yield the name of each thing that counts, as often as it is there."""
    docstrings = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not re.match(r"# (?:-{8}|type:|noqa)", token.string):
            yield "comments"
        if token.type in _NOT_CODE or token.start[0] in docstrings:
            continue
        yield "tokens"
        lines.update(range(token.start[0], token.end[0] + 1))
        if token.type == tokenize.NAME and len(token.string) > 1:
            yield "names"
            if token.string in CONTENTLESS:
                yield "contentless"
    yield from ["code lines"] * len(lines)


def _folders(files: Sequence[str]) -> collections.Counter[Path]:
    """Return how many entries each folder has."""
    paths = {path for file in files for path in (Path(file), *Path(file).parents)}
    return collections.Counter(path.parent for path in paths if len(path.parts) > 1)


def paths(root: Path) -> dict[str, tuple[int, int, int]]:
    """Return the files, functions and calls that each kind of call enters, in a fresh process.

    Args:
        root: The checkout's folder.
    """
    environment = {**os.environ, "PYTHONPATH": str(root), "NPROC": "64", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, __file__, "--child"]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def _measured(call: Callable[[], Any]) -> tuple[Any, tuple[int, int, int]]:
    entered: collections.Counter[tuple[str, str]] = collections.Counter()

    def note(frame: Any, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and any(f"{os.sep}{package}{os.sep}" in file for package in PACKAGES):
            entered[file, f"{frame.f_code.co_qualname}:{frame.f_lineno}"] += 1

    sys.setprofile(note)
    try:
        result = call()
    finally:
        sys.setprofile(None)
    return result, (len({file for file, _ in entered}), len(entered), entered.total())


def _child() -> None:
    import torch
    from torch.distributed.tensor import Replicate, Shard

    import xla_dtensor as xd

    xd.get_runtime("jax", num_cpu_devices=8)
    mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
    w = xd.distribute_tensor(torch.ones(16, 16), mesh, [Replicate(), Shard(1)])
    found: dict[str, tuple[int, int, int]] = {}

    def measure(name: str, call: Callable[[], Any]) -> Any:
        result, found[name] = _measured(call)
        return result

    x = measure(
        "distribute_tensor",
        lambda: xd.distribute_tensor(torch.ones(8, 16), mesh, [Shard(0), Replicate()]),
    )
    y = measure("x @ w", lambda: x @ w)
    measure("redistribute", lambda: y.redistribute(mesh, [Replicate(), Replicate()]))
    measure("to_local()", lambda: y.to_local())
    step = xd.compile(lambda x: (x @ w).square().sum())
    measure("a step's first call", lambda: step(x))
    measure("a step's later call", lambda: step(x))
    print(json.dumps(found))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(prog="python -m tools.measure", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--root", type=Path, default=ROOT)
    parser.add_argument("--paths", action="store_true")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        _child()
        return 0
    for name, number in sizes(options.root).items():
        print(f"{name:45} {number:>10,}")
    if options.paths:
        print(f"\n{'':45} {'files':>10} {'functions':>10} {'calls':>10}")
        for name, numbers in paths(options.root).items():
            print(f"{name:45}", *(f"{number:>10,}" for number in numbers))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
