"""The rows of a sweep as one Markdown table per runtime, and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.op_sweep.judge import worst

__all__ = ["markdown", "summary", "write_tables"]

_SHOWN = ("right", "refused", "raised", "wrong", "crash", "hang", "skipped")
_HEAD = """# Ops on DTensors: the {runtime} runtime

Every op of PyTorch's own test table (`torch.testing`'s `op_db`), called with up to {samples} of its
sample inputs under random placements on a (dp=2, tp=4) mesh of 8 CPU devices; values and gradients
are compared with plain torch. Made by `python -m tools.op_sweep`; seed {seed}, torch {torch},
{seconds:.0f} seconds on one core. One row is made again by

    python -m tools.op_sweep --runtime {runtime} --seed {seed} --samples {samples} --ops NAME

| outcome | forward | backward |
|---|---|---|
{counts}

*Right*: as plain torch, arguments written into included; of random ops, shape and dtype. *Refused*:
an error of this project says that the op is not supported. *Raised*: another error. *Skipped*:
nothing to compare, with the reason. An op counts as its worst
call; numbers in brackets say how many calls ended otherwise.

| op | forward | backward | |
|---|---|---|---|
"""


def summary(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Counter[str]]:
    """Return how many ops are of each kind, forward and backward."""
    parts = ("forward", "backward")
    return {part: Counter(worst(row[part]) for row in rows.values()) for part in parts}


def markdown(runtime: str, rows: Mapping[str, Mapping[str, Any]], torch_version: str) -> str:
    """Return the page of one runtime.

    Args:
        runtime: Its name.
        rows: The rows of the sweep, by op.
        torch_version: Which torch they were made with.
    """
    first = next(iter(rows.values()))
    counted = summary(rows)
    counts = "\n".join(
        f"| {kind} | {counted['forward'][kind]} | {counted['backward'][kind]} |" for kind in _SHOWN
    )
    head = _HEAD.format(
        runtime=runtime,
        samples=first["samples"],
        seed=first["seed"],
        torch=torch_version,
        seconds=sum(row["seconds"] for row in rows.values()),
        counts=counts,
    )
    lines = [
        f"| {name} | {_cell(row['forward'])} | {_cell(row['backward'])} | {_escaped(row['note'])} |"
        for name, row in sorted(rows.items())
    ]
    return head + "\n".join(lines) + "\n"


def _cell(counts: Mapping[str, int]) -> str:
    if not counts:
        return "-"
    kind = worst(dict(counts))
    others = [f"{n} {other}" for other, n in counts.items() if other != kind]
    return f"{kind} ({', '.join(others)})" if others else kind


def _escaped(note: str) -> str:
    return note.replace("|", "\\|").replace("<", "&lt;")


def write_tables(
    folder: Path, runtime: str, rows: Mapping[str, Mapping[str, Any]], torch_version: str
) -> None:
    """Write ``op_table_<runtime>.md`` and this runtime's part of ``op_table.json``."""
    page = folder / f"op_table_{runtime}.md"
    page.write_text(markdown(runtime, rows, torch_version), encoding="utf-8")
    file = folder / "op_table.json"
    tables = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    first = next(iter(rows.values()))
    tables[runtime] = {
        "torch": torch_version,
        "seed": first["seed"],
        "samples": first["samples"],
        "seconds": round(sum(row["seconds"] for row in rows.values())),
        "ops": {name: [row["forward"], row["backward"]] for name, row in sorted(rows.items())},
    }
    lines = json.dumps(tables, separators=(",", ":"), sort_keys=True).replace("]],", "]],\n")
    file.write_text(lines.replace('},"', '},\n"') + "\n", encoding="utf-8")
