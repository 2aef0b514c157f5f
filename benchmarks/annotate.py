"""What an annotation costs: per call, in the size of the program, and in the tracing of a step.

    python -m benchmarks.annotate
    python -m benchmarks.annotate --processes jax --layers 2 --rounds 3

Three tables, ours beside torch_xla's own, in turns in one process where both run there:

* one call on an activation, in microseconds;
* a program of one annotated op on thousands of devices, in bytes;
* tracing a training step of a transformer with seven annotations per layer, in milliseconds.

Times are CPU time of the calling thread, which neither other processes nor XLA's own threads
prolong. Each process is a child: see `benchmarks.annotate_child` for their names, and
`benchmarks.annotate_size`. Nothing is asserted.
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

_PROCESSES = {"jax": "jax", "torch_xla": "torch_xla", "use_spmd": "torch_xla"}  # what each needs
_SIZES = "4096,262144"
_FIRST = "no annotations"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark, prints its tables and stores its figures."""
    asked = _parser().parse_args(arguments)
    processes = [name for name in asked.processes.split(",") if _is_installed(name)]
    rows: list[dict[str, Any]] = []
    options = [f"--{name}={getattr(asked, name)}" for name in ("rounds", "calls", "layers")]
    for process in processes:
        rows += _child("annotate_child", process, *options)
    for process in processes:
        if process in ("jax", "torch_xla"):
            rows += _child("annotate_size", process, f"--sizes={asked.sizes}")
    print("\nOne annotation of an activation, microseconds\n")
    print("\n".join(_times(rows, "call", 1)))
    print("\n(x + 1) * 2 with the sum annotated, bytes of HLO before partitioning\n")
    print("\n".join(_sizes(rows)))
    print(f"\nTracing a step of {asked.layers} layers, 7 annotations in each, milliseconds\n")
    print("\n".join(_times(rows, "trace", 1000)))
    print(f"\nStored in {store('annotate', {'layers': asked.layers, 'rows': rows}, asked.results)}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.annotate", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--processes", default=",".join(_PROCESSES), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=10, help="turns per figure (default: 10)")
    parser.add_argument("--calls", type=int, default=100, help="calls per turn (default: 100)")
    parser.add_argument("--layers", type=int, default=8, help="of the transformer (default: 8)")
    parser.add_argument("--sizes", default=_SIZES, help="devices, default: %(default)s")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the JSON file")
    return parser


def _is_installed(process: str) -> bool:
    if process not in _PROCESSES:
        raise SystemExit(f"process={process!r} is not known. Pass some of: {','.join(_PROCESSES)}.")
    if importlib.util.find_spec(_PROCESSES[process]) is None:
        print(f"{_PROCESSES[process]} is not installed: {process} is left out")
        return False
    return True


def _child(module: str, process: str, *options: str) -> Iterator[dict[str, Any]]:
    print(f"{module} {process} ...", flush=True)
    return child_rows(module, process, *options, advice="Pass --processes with the others.")


def _times(rows: Sequence[dict[str, Any]], part: str, unit: float) -> Iterator[str]:
    """One line per process and kind of annotation; `unit` in microseconds."""
    yield f"{'process':<12}{'annotation':<32}{'least':>9}{'median':>9}{'over none':>11}"
    base: dict[str, float] = {}
    for row in rows:
        if row["part"] != part:
            continue
        for name, timing in row["microseconds"].items():
            least, median = timing["cpu_min"] / unit, timing["cpu_median"] / unit
            if name == _FIRST:
                base[row["process"]] = least
            over = least / base[row["process"]] - 1 if row["process"] in base else None
            share = f"{over:+11.0%}" if over is not None and name != _FIRST else f"{'':>11}"
            yield f"{row['process']:<12}{name:<32}{least:9.1f}{median:9.1f}{share}".rstrip()


def _sizes(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield f"{'process':<12}{'devices':>9}  {'annotation':<16}{'text':>12}{'proto':>12}"
    for row in rows:
        if row["part"] == "size":
            yield (
                f"{row['process']:<12}{row['num_devices']:>9,}  {row['program']:<16}"
                f"{row['text_bytes']:>12,}{row['proto_bytes']:>12,}"
            )


if __name__ == "__main__":
    sys.exit(main())
