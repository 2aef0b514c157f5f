"""What dispatch of an op on a DTensor costs, once its placements are known.

The same op on the bare tensor of the runtime, and on the library's own type, stand beside it.

    python -m benchmarks.dispatch
    python -m benchmarks.dispatch --runtimes jax --profile

| column | on jax | on torch_xla |
|---|---|---|
| DTensor | xla_dtensor's | xla_dtensor's |
| bare | the JaxTensor inside it | the lazy tensor inside it |
| native | jnp on the jax.Array inside that | torch_xla's XLAShardedTensor |

Small tensors on 8 virtual CPU devices, so that what is timed is what Python does. Each runtime runs
in a child process, `benchmarks.dispatch_child`; the columns are timed there in turns. Nothing is
asserted.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.child import child_rows
from benchmarks.timing import RESULTS, store

_RUNTIMES = ("jax", "torch_xla")
_VARIANTS = ("DTensor", "bare", "native")
_TARGET_MICROSECONDS = 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark, prints its tables and stores its figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dispatch", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--runtimes", default=",".join(_RUNTIMES), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=10, help="turns per figure (default: 10)")
    parser.add_argument("--calls", type=int, default=200, help="ops per turn (default: 200)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the JSON file")
    parser.add_argument("--profile", action="store_true", help="show where DTensor's time goes")
    asked = parser.parse_args(arguments)
    runtimes = [name for name in asked.runtimes.split(",") if _is_installed(name)]
    options = ["--rounds", str(asked.rounds), "--calls", str(asked.calls)]
    if asked.profile:
        for runtime in runtimes:
            for row in _child(runtime, [*options, "--profile"]):
                print(f"{runtime}, DTensor {row['op']}: microseconds per call, under the profiler")
                print(row["profile"], end="\n\n")
        return 0
    print("Microseconds per op: least and median CPU time of the calling thread, least wall time\n")
    print(_head())
    rows: list[dict[str, Any]] = []
    for runtime in runtimes:
        for row in _child(runtime, options):
            print(_line(row), flush=True)
            rows.append(row)
    print("\n".join([*_failures(rows), _verdict(rows)]))
    print(f"Stored in {store('dispatch', {'rows': rows}, asked.results)}")
    return 0


def _is_installed(runtime: str) -> bool:
    if runtime not in _RUNTIMES:
        raise SystemExit(f"runtime={runtime!r} is not timed here. Pass some of: jax,torch_xla.")
    if importlib.util.find_spec(runtime) is None:
        print(f"{runtime} is not installed: left out")
        return False
    return True


def _child(runtime: str, options: Sequence[str]) -> Iterator[dict[str, Any]]:
    advice = "Pass --runtimes with the others."
    return child_rows("dispatch_child", runtime, *options, advice=advice)


def _head() -> str:
    columns = "".join(f"{name + ' least':>15}{'median':>9}{'wall':>9}" for name in _VARIANTS)
    return f"{'runtime':<10}{'op':<13}{columns}{'over bare':>12}{'ratio':>8}{'over native':>13}"


def _line(row: dict[str, Any]) -> str:
    times = row["microseconds"]
    cells = [f"{row['runtime']:<10}{row['op']:<13}"]
    for name in _VARIANTS:
        if name in times:
            least, median, wall = (times[name][k] for k in ("cpu_min", "cpu_median", "wall_min"))
            cells.append(f"{least:15.1f}{median:9.1f}{wall:9.1f}")
        else:
            cells.append(f"{'-':>15}{'-':>9}{'-':>9}")
    ours, bare = times["DTensor"]["cpu_min"], times["bare"]["cpu_min"]
    cells.append(f"{ours - bare:+12.1f}{ours / bare:7.1f}x")
    native = times.get("native")
    cells.append(f"{ours / native['cpu_min']:12.1f}x" if native else f"{'-':>13}")
    return "".join(cells)


def _verdict(rows: Sequence[dict[str, Any]]) -> str:
    over = [
        r["microseconds"]["DTensor"]["cpu_min"] - r["microseconds"]["bare"]["cpu_min"] for r in rows
    ]
    met = sum(cost <= _TARGET_MICROSECONDS for cost in over)
    return f"Target {_TARGET_MICROSECONDS} us over the bare tensor: met by {met} of {len(over)}"


def _failures(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    for row in rows:
        for name, text in row["failed"].items():
            yield f"{row['runtime']} {row['op']}, {name}: not timed, it raised {text}"


if __name__ == "__main__":
    sys.exit(main())
