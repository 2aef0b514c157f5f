"""The search's meshes beside JAX's: every shape on every slice, by the modelled score.

    python -m benchmarks.mesh                  everything: seven minutes of a processor
    python -m benchmarks.mesh --sample 200     200 cases, drawn with a fixed seed
    python -m benchmarks.mesh --slice v5e:16x16

For each case (mesh_cases.py lists them) three meshes stand beside each other (mesh_compare.py): the
search's, JAX's with allow_split_physical_axes=True, and the best of all, by enumeration
(mesh_optimum.py). All scores are MODELLED: no hardware was asked. A score is the mean bandwidth of
an all-gather over the axes, in links, with weights that double from axis to axis.

The full run writes results/mesh.json, from which `python -m benchmarks.mesh_document` writes the
tables of docs/mesh_search.md and its plot. Other runs write only where --results says. The exit
status is 1 where the search is below JAX, misses an optimum, fails, or is behind a hand-made ring.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.mesh_cases import SliceCases, every_case
from benchmarks.mesh_compare import Outcome, Slice, compare
from benchmarks.mesh_rings import ring_rows
from benchmarks.mesh_summary import families, faults, ring_table, slice_table, summary_table
from benchmarks.timing import RESULTS, store

SEED = 20261122


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark, prints its tables and stores its figures."""
    asked = _parser().parse_args(arguments)
    is_full = asked.sample is None and asked.slice is None
    if is_full and asked.results is None:
        asked.results = RESULTS
    cases = _chosen(list(every_case()), asked)
    start = time.process_time()
    rows = [_run(case, asked.quiet) for case in cases]
    seconds = time.process_time() - start
    rings = ring_rows()
    found = families(rows)
    print("\n".join(["", *summary_table(found), "", *ring_table(rings), ""]))
    if len(rows) < 30 or asked.slices:
        print("\n".join([*slice_table(rows), ""]))
    wrong = faults(rows, rings)
    print("\n".join(wrong) if wrong else "Nothing is below JAX, below an optimum, or failed.")
    print(f"{sum(len(row['cases']) for row in rows)} cases, {seconds:.0f} s of a processor")
    if asked.results is not None:
        stored = {
            "what": "modelled scores, in links; see benchmarks/mesh.py",
            "columns": COLUMNS,
            "seconds": round(seconds, 1),
            "sample": asked.sample,
            "faults": wrong,
            "families": found,
            "rings": rings,
            "slices": rows,
        }
        print(f"Stored in {store('mesh', stored, asked.results)}")
    return 1 if wrong else 0


COLUMNS = ["shape", "search's score", "JAX's score", "optimum", "dominating", "JAX's error"]
"""Of a case in the JSON. "dominating": how much faster than JAX's one axis can be while no other is
slower, 1 if that cannot be. JAX's error: "" none, "default" where only the default raises, else
what is raised although dims may be split."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mesh", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--sample", type=int, help="so many cases only, drawn with a fixed seed")
    parser.add_argument("--slice", help="this slice only, such as v5e:16x16")
    parser.add_argument("--slices", action="store_true", help="print a table of slices too")
    parser.add_argument("--results", type=Path, help="folder for the JSON file")
    parser.add_argument("--quiet", action="store_true", help="print no line per slice")
    return parser


def _chosen(cases: list[SliceCases], asked: argparse.Namespace) -> list[SliceCases]:
    if asked.slice is not None:
        cases = [case for case in cases if case.name == asked.slice]
        if not cases:
            raise SystemExit(
                f"--slice {asked.slice} was asked for. It is none of the slices that are compared. "
                "Pass one of those that a run with --sample 50 prints."
            )
    if asked.sample is None:
        return cases
    every = [(number, shape) for number, case in enumerate(cases) for shape in case.shapes]
    drawn = random.Random(SEED).sample(every, min(asked.sample, len(every)))
    kept: dict[int, list[tuple[int, ...]]] = {}
    for number, shape in sorted(drawn):
        kept.setdefault(number, []).append(shape)
    return [
        SliceCases(
            cases[number].name,
            cases[number].family,
            cases[number].is_power,
            cases[number].is_twisted,
            tuple(shapes),
            cases[number].jax_kind,
        )
        for number, shapes in kept.items()
    ]


def _run(case: SliceCases, quiet: bool) -> dict[str, Any]:
    """All shapes of one slice, as a row of the JSON file."""
    on = Slice(case.name, case.jax_kind)
    outcomes = [compare(on, shape) for shape in case.shapes]
    row = {
        "slice": case.name,
        "family": family_name(case),
        "jax_kind": case.jax_kind,
        "devices": on.topology.num_devices,
        "wrap": "".join(dim for dim, wraps in zip("xyz", on.network.wrap, strict=True) if wraps),
        "meshes": sum(outcome.meshes for outcome in outcomes),
        "search_seconds": round(sum(outcome.seconds for outcome in outcomes), 3),
        "slowest_search_seconds": round(max(outcome.seconds for outcome in outcomes), 3),
        "faults": [fault for outcome in outcomes for fault in _faults(outcome)],
        "cases": [_columns(outcome) for outcome in outcomes],
    }
    if not quiet:
        better = sum(outcome.is_better for outcome in outcomes)
        print(f"{case.name:<22}{len(outcomes):>6} shapes, {better} better than JAX's", flush=True)
    return row


def family_name(case: SliceCases) -> str:
    """What a slice is counted under.

    Example:
        >>> family_name(SliceCases("v5p:4x4x8_twisted", "v4, v5p", True, True, ()))
        'v4, v5p, twisted'
    """
    kind = f' as "{case.jax_kind}"' if case.jax_kind else ""
    twisted = ", twisted" if case.is_twisted else ""
    sizes = "" if case.is_power else ", other sizes"
    family = case.family if case.is_power else "v5p"
    return f"{family}{kind}{sizes}{twisted}"


def _columns(outcome: Outcome) -> list[Any]:
    error = outcome.jax_error.partition(":")[0]
    error = error or ("default" if outcome.jax_default_error else "")
    return [
        "x".join(map(str, outcome.shape)),
        _short(outcome.score),
        _short(outcome.jax_score),
        _short(outcome.best),
        _short(outcome.dominating),
        error,
    ]


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


def _faults(outcome: Outcome) -> list[str]:
    """What is wrong with one case, judged before figures are rounded."""
    shape = "x".join(map(str, outcome.shape))
    found = [f"{shape}: {fault}" for fault in outcome.faults]
    if outcome.is_below_jax:
        found.append(f"{shape}: its score {outcome.score} is below JAX's {outcome.jax_score}")
    if outcome.best is not None and not outcome.is_optimal:
        found.append(f"{shape}: its score {outcome.score} is below the optimum {outcome.best}")
    if outcome.best is not None and outcome.score > outcome.best * (1 + 1e-9):
        found.append(f"{shape}: its score {outcome.score} is above the optimum {outcome.best}")
    if not outcome.is_exact:
        found.append(f"{shape}: the search says that it is not exact")
    return found


if __name__ == "__main__":
    sys.exit(main())
