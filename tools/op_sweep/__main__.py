"""Sweeps ops from the command line; see the package."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from tools.op_sweep import __doc__ as about
from tools.op_sweep.judge import KINDS, worst
from tools.op_sweep.parent import Sweep
from tools.op_sweep.samples import op_names
from tools.op_sweep.tables import summary, write_tables

_BAD = ("crash", "hang", "wrong", "raised")


def main(arguments: Sequence[str] | None = None) -> int:
    """Sweeps, prints what is not right, returns 1 where a value was wrong."""
    asked = _parser().parse_args(arguments)
    names = _chosen(asked.ops, asked.shard)
    until = time.monotonic() + 60 * asked.minutes
    noted = asked.notes or Path(f"build/op_sweep_{asked.runtime}_{asked.seed}.jsonl")
    sweep = Sweep(asked.runtime, asked.seed, asked.samples, noted.resolve(), asked.chunk)
    rows = {name: row for name, row in sweep.run(names, until).items() if name in set(names)}
    for name, row in rows.items():
        kinds = {worst(row[part]) for part in ("forward", "backward")}
        if kinds & set(_BAD) or asked.ops:
            print(f"{name}: {row['forward']} {row['backward']} {row['note']}")
    for part, counts in summary(rows).items():
        print(f"{part}:", ", ".join(f"{counts[kind]} {kind}" for kind in KINDS if counts[kind]))
    if len(rows) < len(names):
        print(f"{len(names) - len(rows)} ops are left. Call again to go on.")
    if asked.tables is not None:
        write_tables(asked.tables, asked.runtime, rows, torch.__version__)
    counts = summary(rows)["forward"] + summary(rows)["backward"]
    return int(any(counts[kind] for kind in ("crash", "hang", "wrong")))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m tools.op_sweep",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--runtime", default="jax", choices=("jax", "torch_xla"))
    parser.add_argument(
        "--ops", default="", help="names in op_db, with commas; all of them if not given"
    )
    parser.add_argument("--shard", default="1/1", help="the part of the ops to sweep, such as 1/4")
    parser.add_argument("--seed", type=int, default=0, help="decides inputs and placements")
    parser.add_argument("--samples", type=int, default=3, help="sample inputs per op")
    parser.add_argument("--chunk", type=int, default=40, help="ops per child process")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after these")
    parser.add_argument(
        "--notes", type=Path, help="file of rows; ops that it has are not run again"
    )
    parser.add_argument("--tables", type=Path, help="folder to write the tables to, such as docs")
    return parser


def _chosen(ops: str, shard: str) -> list[str]:
    names = ops.split(",") if ops else op_names()
    unknown = sorted(set(names) - set(op_names()))
    if unknown:
        raise SystemExit(
            f"--ops={ops} was asked for. op_db has no {', '.join(unknown)}. Pass full names in it, "
            "such as add or nn.functional.linear; the published tables list them."
        )
    part, parts = map(int, shard.split("/"))
    return names[part - 1 :: parts]


if __name__ == "__main__":
    sys.exit(main())
