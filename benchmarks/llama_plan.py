"""A Llama step under torchtitan's tensor-parallel plan, beside the same said by hand.

    python -m benchmarks.llama_plan
    python -m benchmarks.llama_plan --runtimes jax --topology none

For each, forward and backward as one program on a (dp=2, tp=4) mesh: how far loss and gradients are
from the same model on one device in float64, and the bytes of the program's collectives by kind and
mesh axes, as XLA:CPU partitions it and, on the JAX runtime, as libtpu does for a TPU topology.
Nothing runs on a TPU. A collective's bytes are its payload on one device, not those on the wire.

Each runtime is a child process: see `benchmarks.llama_plan_child`. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.child import ON_CPU, child_rows
from benchmarks.timing import RESULTS, store
from xla_dtensor.plan.aot import LIBTPU_ENVIRONMENT

LIBTPU = {**ON_CPU, **LIBTPU_ENVIRONMENT}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark, prints its tables and stores its figures."""
    asked = _parser().parse_args(arguments)
    rows: list[dict[str, Any]] = []
    for runtime in asked.runtimes.split(","):
        rows += _child(runtime, asked.topology)
    print("\nDifference from one device in float64, relative\n")
    print("\n".join(_errors(rows)))
    pairs = [(row["runtime"], row["compiler"]) for row in rows]
    for runtime, compiler in dict.fromkeys(pairs):
        print(f"\n{runtime}, compiled by {compiler}: kB of collectives per device and step\n")
        chosen = [r for r in rows if (r["runtime"], r["compiler"]) == (runtime, compiler)]
        print("\n".join(_table(chosen)))
    stored = {"topology": asked.topology, "rows": rows}
    print(f"\nStored in {store('llama_plan', stored, asked.results)}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.llama_plan", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--runtimes", default="jax,torch_xla", help="default: %(default)s")
    parser.add_argument(
        "--topology",
        default="v5e:2x4",
        help="8 TPU chips that libtpu compiles for, or none (default: %(default)s)",
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the JSON file")
    return parser


def _child(runtime: str, topology: str) -> Iterator[dict[str, Any]]:
    if runtime not in ("jax", "torch_xla"):
        raise SystemExit(f"runtime={runtime!r} is not known. Pass some of: jax,torch_xla.")
    if importlib.util.find_spec(runtime) is None:
        print(f"{runtime} is not installed: it is left out")
        return iter(())
    options, environment = [], ON_CPU
    if runtime == "jax" and topology != "none":
        if importlib.util.find_spec("libtpu") is None:
            print("libtpu is not installed: programs are compiled for the CPU only")
        else:
            options, environment = [f"--topology={topology}"], LIBTPU
    print(f"llama_plan_child {runtime} ...", flush=True)
    return child_rows(
        "llama_plan_child",
        runtime,
        *options,
        advice="Pass --runtimes with the other one, or --topology none.",
        environment=environment,
    )


def _errors(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield f"{'runtime':<12}{'variant':<26}{'loss':>10}{'gradients':>12}"
    for row in rows:
        if row["compiler"] == "XLA:CPU":
            yield (
                f"{row['runtime']:<12}{row['variant']:<26}"
                f"{row['loss_error']:>10.1e}{row['gradient_error']:>12.1e}"
            )


def _table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """One line per kind and axes, one column per variant: kB, and how often."""
    cells: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in rows:
        for one in row["collectives"]:
            axes = "mixed" if one["axes"] is None else ", ".join(one["axes"])
            cells.setdefault((axes, one["kind"]), {})[row["variant"]] = one
    variants = [row["variant"] for row in rows]
    yield f"{'axes':<10}{'collective':<20}" + "".join(f"{name:>26}" for name in variants)
    for (axes, kind), given in sorted(cells.items()):
        yield f"{axes:<10}{kind:<20}" + "".join(_cell(given.get(name)) for name in variants)
    sums = [sum(one["bytes"] for one in row["collectives"]) for row in rows]
    yield f"{'all':<30}" + "".join(f"{total / 1e3:>20.1f}{'':>6}" for total in sums)


def _cell(one: dict[str, Any] | None) -> str:
    if one is None:
        return f"{'-':>20}{'':>6}"
    return f"{one['bytes'] / 1e3:>20.1f} ({one['count']:>2}) "


if __name__ == "__main__":
    sys.exit(main())
