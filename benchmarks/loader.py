"""What feeding costs: MB/s and memory of a ShardedLoader, beside a plain DataLoader.

    python -m benchmarks.loader
    python -m benchmarks.loader --batches 8 --cases tokens

| way | what it does with each batch |
|---|---|
| plain | torch's DataLoader: host tensors, nothing on a device |
| distribute | a DataLoader, and distribute_tensor on every tensor, in the loop |
| in the loop | ShardedLoader(prefetch=0) |
| ahead | ShardedLoader(prefetch=2), which reads in a thread |

One process with 8 virtual CPU devices, rows in a file that the system has in memory. "MB/s" reads
as fast as it can. "ms added" is what a batch adds to a step that only waits, as a program waits for
its devices. Times are taken in turns within one process. "MB held" is the most memory of a way over
what the process held before, in a process of its own; what the devices hold is among it, because
here that is memory of the host. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.child import child_rows
from benchmarks.loader_child import CASES
from benchmarks.timing import RESULTS, store

_ADVICE = "Pass fewer --batches, or --cases with the others."


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark, prints its table and stores its figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loader", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--cases", default=",".join(CASES), help="default: %(default)s")
    parser.add_argument("--batches", type=int, default=12, help="per epoch (default: 12)")
    parser.add_argument("--rounds", type=int, default=3, help="epochs per figure (default: 3)")
    parser.add_argument(
        "--step-milliseconds", type=float, default=30, help="a step's wait (default: 30)"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the JSON file")
    asked = parser.parse_args(arguments)
    cases = asked.cases.split(",")
    if unknown := set(cases) - set(CASES):
        raise SystemExit(f"cases={sorted(unknown)} are not measured. Pass some of {list(CASES)}.")
    options = [
        *("--batches", str(asked.batches), "--rounds", str(asked.rounds)),
        *("--step-milliseconds", str(asked.step_milliseconds)),
    ]
    print(_head(asked.step_milliseconds))
    rows: list[dict[str, Any]] = []
    for case in cases:
        timed = list(child_rows("loader_child", case, *options, advice=_ADVICE))
        for row in timed:
            (memory,) = child_rows(
                "loader_child", case, *options, "--memory-of", row["way"], advice=_ADVICE
            )
            rows.append(row | memory)
            print(_line(rows[-1]), flush=True)
    print(f"Stored in {store('loader', {'rows': rows}, asked.results)}")
    return 0


def _head(step_milliseconds: float) -> str:
    wait = f"a step of {step_milliseconds:g} ms"
    return (
        f"{'':<22}{'MB per':>8}{'MB/s':>9}{'':>9}{'ms added to':>26}{'MB held':>10}\n"
        f"{'case':<9}{'way':<13}{'batch':>8}{'best':>9}{'median':>9}{wait:>26}{'at most':>10}"
    )


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['case']:<9}{row['way']:<13}{row['batch_mb']:8.1f}{row['best_mb_per_second']:9.0f}"
        f"{row['median_mb_per_second']:9.0f}{row['added_milliseconds']:26.1f}{row['peak_mb']:10.0f}"
    )


if __name__ == "__main__":
    sys.exit(main())
