"""libtpu, the TPU's compiler, takes the search's meshes; what it makes of them, beside JAX's.

    python -m benchmarks.mesh_libtpu                      all: half an hour on two busy processors
    python -m benchmarks.mesh_libtpu --sample 10
    python -m benchmarks.mesh_libtpu --rows /tmp/rows     goes on where such a run was stopped
    python -m benchmarks.mesh_libtpu --known benchmarks/results/mesh_libtpu.json
                                                          compiles only what is not in that file

For a fixed sample of over 300 meshes (mesh_libtpu_cases.py), v2 to tpu7x, one slice and several, an
all-gather and an all-reduce of 64 MiB are compiled on every axis; no TPU is needed. Four meshes of
each case: the search's; the same with the chips of each axis in snakes and rings (`rings=True`),
and in rows (`rings=False`); JAX's. What XLA chose stands in the compiled program
(mesh_libtpu_child.py reads it): nobody ran it.

A mesh that libtpu does not like can end its process, so child processes compile 25 cases each. If
one ends early, its mesh counts as failed, and the next child goes on after it. The exit status is
1 where a mesh of the search fails.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.child import ChildFailedError, child_rows
from benchmarks.mesh_libtpu_cases import SEED, LibtpuCase, libtpu_cases
from benchmarks.mesh_libtpu_child import KINDS, STRATEGIES
from benchmarks.mesh_libtpu_summary import (
    difference_table,
    failures,
    group_table,
    strategy_table,
)
from benchmarks.mesh_libtpu_where import digest, mesh_ids, where_axes_lie
from benchmarks.timing import RESULTS, store
from xla_dtensor.plan.aot import LIBTPU_ENVIRONMENT

MESHES_PER_CHILD = 25 * len(STRATEGIES)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compiles the sample, prints its tables and stores what was found."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mesh_libtpu", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--sample", type=int, help="so many cases only, drawn with a fixed seed")
    parser.add_argument("--rows", type=Path, help="file to keep what is done, and to go on from")
    parser.add_argument("--known", type=Path, help="JSON file of an earlier run, with this libtpu")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the JSON file")
    asked = parser.parse_args(arguments)
    if importlib.util.find_spec("libtpu") is None:
        print("libtpu is not installed: pip install xla-dtensor[preflight]")
        return 2
    libtpu = version("libtpu")
    earlier = {} if asked.known is None else json.loads(asked.known.read_text(encoding="utf-8"))
    if earlier and earlier.get("libtpu") != libtpu:
        print(
            f"What {asked.known} knows was asked for. It is of libtpu {earlier.get('libtpu')}, and "
            f"this is libtpu {libtpu}, which may choose otherwise. Leave out --known."
        )
        return 2
    cases = libtpu_cases()
    if asked.sample is not None:
        cases = random.Random(SEED).sample(cases, min(asked.sample, len(cases)))
    done: dict[int, dict[str, Any]] = {}
    for row in compiled(cases, asked.rows, earlier):
        done[row["number"]] = row
        if row["strategy"] == STRATEGIES[-1]:
            case = cases[row["case"]]
            shape = "x".join(map(str, case.shape))
            print(f"{row['case'] + 1:>4} of {len(cases)}  {case.topology} {shape}", flush=True)
    found = [_merged(number, case, done) for number, case in enumerate(cases)]
    wrong = failures(found)
    tables = [group_table(found), strategy_table(found), difference_table(found)]
    print("\n".join(line for table in tables for line in ["", *table]))
    print(
        "\n".join(["", *wrong]) if wrong else "\nEvery mesh of the search compiled, on each axis."
    )
    stored = {
        "what": "what XLA chose, as libtpu compiled it; nothing ran",
        "libtpu": libtpu,
        "collectives": KINDS,
        "meshes": STRATEGIES,
        "seconds": round(sum(row.get("seconds", 0) for row in done.values())),
        "compiled_earlier": sum(bool(row.get("known")) for row in done.values()),
        "failures": wrong,
        "cases": found,
    }
    print(f"Stored in {store('mesh_libtpu', stored, asked.results)}")
    return 1 if any(not line.startswith("JAX") for line in wrong) else 0


def compiled(
    cases: Sequence[LibtpuCase], kept: Path | None = None, earlier: Mapping[str, Any] | None = None
) -> Iterator[dict[str, Any]]:
    """Compiles cases in child processes.

    Args:
        cases: what to compile.
        kept: a file to which rows are added as they come, and from which those of a run that was
            stopped are taken; None for none.
        earlier: what an earlier run stored: its meshes are not compiled again.

    Yields:
        A row per mesh. That of a mesh which ended the process has an error and no axes.
    """
    missing = list(range(len(STRATEGIES) * len(cases)))
    if kept is not None and kept.exists():
        for line in kept.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            missing.remove(row["number"])
            yield row
    for row in known_rows(cases, earlier or {}):
        if row["number"] in missing:
            missing.remove(row["number"])
            yield row
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cases.json"
        file.write_text(json.dumps([case.as_json() for case in cases]), encoding="utf-8")
        while missing:
            for row in _child(file, missing[:MESHES_PER_CHILD]):
                missing.remove(row["number"])
                if kept is not None:
                    with kept.open("a", encoding="utf-8") as out:
                        out.write(json.dumps(row) + "\n")
                yield row


def known_rows(cases: Sequence[LibtpuCase], earlier: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What an earlier run says of meshes: those of the same devices in the same order.

    Args:
        cases: what is to be compiled.
        earlier: what that run stored; nothing where there was none.

    Yields:
        A row for each mesh that compiled then.
    """
    stored = {_question(case): case for case in earlier.get("cases", ())}
    for place, case in enumerate(cases):
        found = stored.get(_question(case.as_json()))
        if found is None:
            continue
        by_devices = {mesh["devices"]: mesh for mesh in found["meshes"].values()}
        for strategy, ids in mesh_ids(case).items():
            mesh = by_devices.get(digest(ids))
            if mesh is not None and not mesh["error"]:
                number = len(STRATEGIES) * place + STRATEGIES.index(strategy)
                yield {**mesh, "number": number, "case": place, "strategy": strategy, "known": True}


def _question(case: Mapping[str, Any]) -> str:
    return json.dumps([case["topology"], case["shape"], case["dcn"]])


def _child(file: Path, numbers: Sequence[int]) -> Iterator[dict[str, Any]]:
    begun: int | None = numbers[0]
    options = [str(file), "--numbers", *map(str, numbers)]
    try:
        rows = child_rows("mesh_libtpu_child", *options, advice="", environment=LIBTPU_ENVIRONMENT)
        for row in rows:
            if "begun" in row:
                begun = row["begun"]
            else:
                later = numbers[numbers.index(row["number"]) + 1 :]
                begun = later[0] if later else None
                yield row
    except ChildFailedError as error:
        if begun is None:
            return
        case, which = divmod(begun, len(STRATEGIES))
        yield {
            "number": begun,
            "case": case,
            "strategy": STRATEGIES[which],
            "error": f"the process ended: {error}",
            "devices": "",
            "axes": [],
        }


def _merged(number: int, case: LibtpuCase, done: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """A case with what came of its meshes, axis by axis."""
    lie = where_axes_lie(case)
    meshes: dict[str, Any] = {}
    for place, strategy in enumerate(STRATEGIES):
        row = done[len(STRATEGIES) * number + place]
        axes = [{**axis, **where} for axis, where in zip(row["axes"], lie[strategy], strict=False)]
        meshes[strategy] = {"error": row["error"], "devices": row["devices"], "axes": axes}
    return {
        "group": case.group,
        "topology": case.topology,
        "shape": case.shape,
        "dcn": case.dcn,
        "meshes": meshes,
    }


if __name__ == "__main__":
    sys.exit(main())
