"""Gives each set of XLA flags to several libtpu and jaxlib, and writes down who took it.

    python -m tools.try_xla_flags --python jax-0.11/bin/python --python jax-0.12/bin/python

Each interpreter has a jax with its jaxlib and libtpu (`pip install "jax[tpu]==0.11.2"` is enough);
this one needs the project alone. For each interpreter, each set of tpu_configs/xla_flags.yaml and
each TPU that it is for, a process with the set's flags compiles one small program
(try_xla_flags_child.py) on one slice and on two. The same is done for what jobs take together, and
for the flags that no job may have together: a trial in which libtpu takes all would show nothing.
A process with the flags of GPUs starts JAX on CPU, which ends it at a name that jaxlib does not
know.

tpu_configs/xla_flags_tried.yaml is written after each interpreter. What other versions said stays
where the flags are the same, so versions can be tried one by one. About 5 CPU seconds a row.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mesh_utils import JobConfig, chips
from mesh_utils.job import job_names
from mesh_utils.xla_flags import COMPILERS, default_sets, digest, flag_table, flags_for
from xla_dtensor.plan.aot import LIBTPU_ENVIRONMENT

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tpu_configs" / "xla_flags_tried.yaml"
CHILD = Path(__file__).with_name("try_xla_flags_child.py")
SHAPES = {"v4": "2x2x1", "v5e": "2x4", "v5p": "2x2x1", "v6e": "2x4", "tpu7x": "2x2x1"}
TIME_LIMIT_SECONDS = 600
SAID = 160  # characters of an error: what it is, without its advice
VERSIONS = "import importlib.metadata as m; print(*[m.version(p) for p in ('jax', {0!r})])"
START_JAX = "import jax; jax.devices()"
UNKNOWN = re.compile(r"Unknown command line flag '?(\w+)|Unknown flags? in XLA_FLAGS: (?:--)?(\w+)")
HEAD = """\
# Who took which XLA flags: mesh_utils/xla_flags.py says how to read this.
# Made by python -m tools.try_xla_flags; not to be edited.
"""


@dataclass(frozen=True)
class Case:
    """Flags to try on one chip: those of sets, or those that are unsafe together."""

    sets: tuple[str, ...]
    unsafe: str
    chip: str
    flags: tuple[str, ...]
    slices: str = "1,2"


@dataclass(frozen=True)
class Outcome:
    """What came of a case: the outcome, the first line of its error, and CPU seconds."""

    outcome: str
    said: str
    cpu_seconds: float
    collectives: frozenset[str] = frozenset()


def cases(platform: str) -> Iterator[Case]:
    """Everything to try on TPUs or on GPUs.

    Args:
        platform: "tpu" or "gpu".

    Yields:
        Each set, what jobs take together, and what no job may.
    """
    table = flag_table()
    names = [chip.name for chip in chips() if chip.platform == platform]
    names = list(SHAPES) if platform == "tpu" else names
    for name, each in table.sets.items():
        for chip in names:
            if any(chip in flag.hardware for flag in each.flags):
                yield _case((name,), chip)
    if platform == "gpu":
        return
    together = {(tuple(default_sets(2)), chip): None for chip in names}
    jobs = [job for job in map(JobConfig.load, job_names()) if job.chip.platform == platform]
    together |= {(_sets_of(job), job.chip.name): None for job in jobs}
    for sets, chip in together:
        if len(sets) > 1:
            yield _case(sets, chip)
    for unsafe in table.unsafe:
        flags = tuple(f"--{name}={value}" for name, value in unsafe.flags.items())
        for chip in names:
            yield Case((), unsafe.name, chip, flags)


def _case(sets: tuple[str, ...], chip: str) -> Case:
    slices = "2" if "dcn" in sets else "1,2"
    return Case(sets, "", chip, tuple(map(str, flags_for(chip, 2, sets))), slices)


def _sets_of(job: JobConfig) -> tuple[str, ...]:
    return tuple(dict.fromkeys(flag.flag_set for flag in job.xla_flags() if flag.flag_set))


def try_case(python: str, case: Case) -> Outcome:
    """Starts a process with the flags of a case.

    Args:
        python: The interpreter.
        case: The case.

    Returns:
        What came of it.
    """
    is_tpu = case.chip in SHAPES
    command = [python, str(CHILD), case.chip, SHAPES.get(case.chip, ""), case.slices]
    variable = "LIBTPU_INIT_ARGS" if is_tpu else "XLA_FLAGS"
    outside = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "LIBTPU_"))}
    before = _child_seconds()
    done = subprocess.run(
        command if is_tpu else [python, "-c", START_JAX],
        env={**outside, **LIBTPU_ENVIRONMENT, variable: " ".join(case.flags)},
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_SECONDS,
        check=False,
    )
    seconds = round(_child_seconds() - before, 1)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    unknown = UNKNOWN.search(done.stderr + done.stdout)
    if unknown:
        return Outcome("unknown flag", f"unknown flag {unknown[1] or unknown[2]}", seconds)
    errors = [row["error"] for row in rows if "error" in row]
    if errors:
        return Outcome("refused", errors[0][:SAID], seconds)
    if done.returncode:
        last = [line for line in done.stderr.splitlines() if line.strip()] or [""]
        how = f"it ended with status {done.returncode}"
        return Outcome("refused", f"{how}: {last[-1].strip()[:200]}", seconds)
    seen = frozenset(kind for row in rows for kind in row["collectives"])
    return Outcome("took", "", seconds, seen)


def _child_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def try_all(python: str, compiler: str, old: dict[str, Any]) -> dict[str, Any]:
    """Tries every case with one interpreter.

    Args:
        python: The interpreter.
        compiler: "libtpu" or "jaxlib".
        old: The part of the table for that compiler, as it was; empty at first.

    Returns:
        That part with a column more.
    """
    platform = next(key for key, value in COMPILERS.items() if value == compiler)
    jax, version = _output(python, VERSIONS.format(compiler)).split()
    with_jax = {**old.get("versions", {}), version: f"jax {jax}"}
    versions = dict(sorted(with_jax.items(), key=lambda item: _numbers(item[0])))
    rows: list[dict[str, Any]] = []
    known = {_key(row): row for row in old.get("trials", ())}
    tried: dict[tuple[str, ...], Outcome] = {}
    for case in cases(platform):
        row: dict[str, Any] = {"unsafe": case.unsafe} if case.unsafe else {"sets": [*case.sets]}
        row |= {"chip": case.chip, "flags": digest(case.flags)}
        same = ("gpu" if platform == "gpu" else case.chip, case.slices, *case.flags)
        if same not in tried:
            tried[same] = try_case(python, case)
        new = tried[same]
        before = known.get(_key(row), {})
        columns = dict(zip(old.get("versions", {}), before.get("outcomes", ()), strict=False))
        seconds = dict(zip(old.get("versions", {}), before.get("cpu_seconds", ()), strict=False))
        columns[version], seconds[version] = new.outcome, new.cpu_seconds
        row["outcomes"] = [columns.get(each, "not tried") for each in versions]
        row["cpu_seconds"] = [seconds.get(each, 0) for each in versions]
        said = {each: text for each, text in before.get("said", {}).items() if each != version}
        said |= {version: new.said} if new.said else {}
        row |= {"said": said} if said else {}
        rows.append(row)
        print(version, case.chip, case.unsafe or " ".join(case.sets), new.outcome, flush=True)
    if platform == "tpu" and not any(len(each.collectives) == 5 for each in tried.values()):
        raise SystemExit(f"No program of {compiler} {version} has all five kinds of collectives.")
    return {"versions": versions, "trials": rows}


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return (*row.get("sets", ()), row.get("unsafe"), row["chip"], row["flags"])


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def _output(python: str, program: str) -> str:
    return subprocess.run(
        [python, "-c", program], capture_output=True, text=True, check=True
    ).stdout


def table_text(table: dict[str, Any]) -> str:
    """Writes the table, a line for each trial.

    Args:
        table: The table.

    Returns:
        YAML.
    """
    lines = [HEAD + f"date: {table['date']}"]
    for compiler in COMPILERS.values():
        part = table.get(compiler, {"versions": {}, "trials": []})
        lines += [f"{compiler}:", f"  versions: {_flow(part['versions'])}", "  trials:"]
        lines += [f"    - {_flow(row)}" for row in part["trials"]]
    return "\n".join(lines) + "\n"


def _flow(data: object) -> str:
    return yaml.safe_dump(data, default_flow_style=True, width=10**6, sort_keys=False).strip()


def main(arguments: Sequence[str] | None = None) -> int:
    """Tries, and writes the table.

    Args:
        arguments: Those of the command line.

    Returns:
        0.
    """
    parser = argparse.ArgumentParser("python -m tools.try_xla_flags", description=__doc__)
    parser.add_argument(
        "--python", action="append", required=True, metavar="PATH", help="one that has jax[tpu]"
    )
    parser.add_argument("--only", choices=COMPILERS.values(), help="leave out the other compiler")
    asked = parser.parse_args(arguments)
    table = yaml.safe_load(TABLE.read_text(encoding="utf-8")) if TABLE.exists() else {}
    for python in asked.python:
        for compiler in COMPILERS.values():
            if asked.only in (None, compiler):
                table[compiler] = try_all(python, compiler, table.get(compiler, {}))
        table["date"] = datetime.date.today().isoformat()
        TABLE.write_text(table_text(table), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
