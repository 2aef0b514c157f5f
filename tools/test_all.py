#!/usr/bin/env python3
"""Runs all tests, in parts of at most 15 minutes; a run that was stopped goes on where it was.

    make test-all                                 every part that has not passed on this tree
    make test-all TEST_ALL_ARGS="--only thorough-3 mutants-1"
    python tools/test_all.py --list

A part is a selection of tests in one environment of the Makefile, a set of mutants, or programs of
seeds that were never drawn before, which continuous integration leaves out. What came of it is kept
in .test-all/, under the state of the tree that it ran on. At the end all parts are printed, with
the slowest tests and the tests that were skipped in every environment: those are a hole, and red,
but for tests of what "this machine has no" instance of, by their own words.

Continuous integration has time for some parts only, and begins at another one each day:

    python tools/test_all.py --begin-at-day --start-within 1800

starts parts for 1800 seconds. A part that took too long is printed, and counts as not run.

This file needs nothing but Python.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".test-all"
LIMIT_SECONDS = 15 * 60
NUM_SLOWEST = 25

# A worker that has crashed is not replaced: pytest-xdist's groups wait for it for ever.
PYTEST = ("-m", "pytest", "-n", "2", "--dist", "loadgroup", "--max-worker-restart=0")
MAIN, TORCH_XLA = "MAIN", "TORCH_XLA"
# Tests that need torch 2.9, both runtimes installed, or a libtpu that gives programs that do not
# fit, and are of no runtime or of JAX's.
OF_BOTH = tuple(
    f"tests/xla_dtensor/{name}.py"
    for name in (
        "cli/test_plan_full",
        "runtimes/jax/test_jax_lowering_linalg",
        "runtimes/test_starting",
        "runtimes/test_torch_own",
        "spmd/test_spmd_baseline",
        "hosts/test_process_start",
    )
)
CONTRACT, THOROUGH = "not thorough and not gpu", "thorough and not gpu"


@dataclass(frozen=True)
class Part:
    """A selection of tests in one environment.

    Attributes:
        name: the part's name.
        environment: the Makefile's name of the environment, without _VENV.
        arguments: what that environment's Python is started with.
        variables: make's variables, as NAME=value.
        beside: other environments that it starts Pythons of.
    """

    name: str
    environment: str
    arguments: tuple[str, ...]
    variables: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()

    @property
    def is_pytest(self) -> bool:
        """Whether it writes the outcome of each test."""
        return self.arguments[: len(PYTEST)] == PYTEST


def _tests(
    name: str, environment: str, marks: str, *arguments: str, variables: tuple[str, ...] = ()
) -> Part:
    return Part(name, environment, (*PYTEST, "-m", marks, *arguments), variables)


def _parts() -> Iterator[Part]:
    yield _tests("contract", MAIN, CONTRACT)
    yield _tests(
        "contract-torch-xla", TORCH_XLA, f"on_runtime and {CONTRACT}", "--runtime=torch_xla"
    )
    examples = "--hypothesis-profile=thorough"
    yield _tests("contract-examples", MAIN, f"hypothesis and {CONTRACT}", examples)
    for i in range(1, 17):
        yield _tests(f"thorough-{i}", MAIN, THOROUGH, examples, f"--part={i}/16")
    for i in range(1, 4):
        marks = f"on_runtime and {THOROUGH}"
        yield _tests(
            f"thorough-torch-xla-{i}", TORCH_XLA, marks, "--runtime=torch_xla", f"--part={i}/3"
        )
    yield _tests("contract-2.9-0.10.2", TORCH_XLA, CONTRACT, "--runtime=jax")
    yield _tests("thorough-2.9-0.10.2", TORCH_XLA, THOROUGH, "--runtime=jax", *OF_BOTH)
    for stack in ("2.13,0.11.0", "2.15,0.11.2"):
        yield _tests(
            f"contract-{stack.replace(',', '-')}", "STACK", CONTRACT, variables=(f"STACK={stack}",)
        )
    yield Part("dry-runs", MAIN, ("tools/dry_runs.py",))
    yield Part("docs", "DOCS", ("-m", "mkdocs", "build", "--strict"))
    # Seeds that nobody has drawn before: what they find may be older than the change at hand.
    new = ("-m", "tests.drawn.run", "--show")
    yield Part("new-programs", MAIN, (*new, "--programs", "new", "--seconds=600"))
    yield Part("new-trainings", MAIN, (*new, "--trainings", "new", "--seconds=300"))
    on_torch_xla = ("--runtime=torch_xla", "--programs", "new", "--seconds=300")
    yield Part("new-programs-torch-xla", TORCH_XLA, (*new, *on_torch_xla))
    for i in range(1, 7):
        mutants = ("-m", "tools.mutants", f"--part={i}/6", "--jobs=2")
        yield Part(f"mutants-{i}", MAIN, mutants, beside=(TORCH_XLA,))


PARTS = tuple(_parts())


@dataclass
class Outcome:
    """What came of a part.

    Attributes:
        status: "passed", "failed", or "cut off" where it took too long.
        wall_seconds: how long it took.
        cpu_seconds: of all its processes.
        tree: the state of the tree that it ran on.
    """

    status: str
    wall_seconds: float
    cpu_seconds: float
    tree: str


def tree_state() -> str:
    """Return a text that changes with every tracked file."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, check=True)
    change = subprocess.run(["git", "diff", "HEAD"], cwd=ROOT, capture_output=True, check=True)
    return hashlib.sha256(commit.stdout + change.stdout).hexdigest()[:16]


def load() -> dict[str, Outcome]:
    """Return what is known of each part."""
    file = FOLDER / "outcomes.json"
    if not file.exists():
        return {}
    return {name: Outcome(**values) for name, values in json.loads(file.read_text()).items()}


def store(outcomes: Mapping[str, Outcome]) -> None:
    """Keep what is known of each part."""
    FOLDER.mkdir(exist_ok=True)
    values = {name: vars(outcome) for name, outcome in outcomes.items()}
    (FOLDER / "outcomes.json").write_text(json.dumps(values, indent=1))


def python_of(part: Part) -> str:
    """Make the part's environments and return its Python."""
    make = ("make", "--no-print-directory", *part.variables)
    for environment in (part.environment, *part.beside):
        subprocess.run([*make, f"environment-{environment}"], cwd=ROOT, check=True)
    folder = subprocess.run(
        [*make, f"folder-{part.environment}"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    return str(ROOT / folder / "bin" / "python")


def run(part: Part, limit_seconds: float) -> Outcome:
    """Run a part; its output is this process's."""
    tree = tree_state()
    python = python_of(part)
    FOLDER.mkdir(exist_ok=True)
    arguments = [*part.arguments]
    if part.is_pytest:
        arguments += [f"--junitxml={FOLDER / part.name}.xml", "-q", "-o", "junit_logging=no"]
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    child = subprocess.Popen(
        [python, *arguments], cwd=ROOT, stdin=subprocess.DEVNULL, start_new_session=True
    )
    try:
        status = {0: "passed", 5: "passed"}.get(child.wait(limit_seconds), "failed")
    except subprocess.TimeoutExpired:
        status = "cut off"
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Outcome(status, round(time.monotonic() - start, 1), round(cpu, 1), tree)


@dataclass(frozen=True)
class Tests:
    """The outcome of single tests over several parts.

    Attributes:
        seconds: by test, the longest time that it took.
        skipped_everywhere: those that ran nowhere, each with a reason.
    """

    seconds: Mapping[str, float]
    skipped_everywhere: Mapping[str, str]


def read_tests(files: Sequence[Path]) -> Tests:
    """Read what pytest wrote of single tests (JUnit's XML)."""
    seconds: dict[str, float] = collections.defaultdict(float)
    reasons: dict[str, str] = {}
    ran: set[str] = set()
    for file in files:
        for case in ElementTree.parse(file).iter("testcase"):
            name = f"{case.get('classname')}::{case.get('name')}"
            seconds[name] = max(seconds[name], float(case.get("time") or 0))
            skipped = case.find("skipped")
            if skipped is None:
                ran.add(name)
            else:
                reasons[name] = str(skipped.get("message"))
    # A module that was not collected in one environment has an entry of its own.
    ran |= {f"::{name.partition('::')[0]}" for name in ran}
    return Tests(seconds, {name: text for name, text in reasons.items() if name not in ran})


def turned(parts: Sequence[Part], begin_at: int) -> list[Part]:
    """Return the parts, beginning at another one."""
    begin_at %= len(parts)
    return [*parts[begin_at:], *parts[:begin_at]]


def main() -> int:
    """Run what is asked for; return the exit status."""
    asked = _arguments()
    parts = [part for part in PARTS if asked.only is None or part.name in asked.only]
    if asked.only and len(parts) < len(set(asked.only)):
        unknown = sorted(set(asked.only) - {part.name for part in PARTS})
        print(f"There is no part {', '.join(unknown)}. `--list` prints all.", file=sys.stderr)
        return 2
    if asked.skip:
        parts = [part for part in parts if part.name not in asked.skip]
    if asked.list:
        print("\n".join(part.name for part in parts))
        return 0
    if asked.begin_at_day:
        parts = turned(parts, datetime.date.today().toordinal())
    outcomes, tree, start = load(), tree_state(), time.monotonic()
    left_out: list[str] = []
    for number, part in enumerate(parts, 1):
        outcome = outcomes.get(part.name)
        passed = outcome is not None and (outcome.status, outcome.tree) == ("passed", tree)
        if passed and not asked.again:
            continue
        if asked.start_within is not None and time.monotonic() - start > asked.start_within:
            left_out.append(part.name)
            continue
        print(f"== part {number} of {len(parts)}: {part.name}", flush=True)
        outcomes[part.name] = outcome = run(part, LIMIT_SECONDS)
        store(outcomes)
        print(f"== {part.name}: {outcome.status}, {_times(outcome)}", flush=True)
    return _report(parts, outcomes, tree, left_out)


def _report(
    parts: Sequence[Part], outcomes: Mapping[str, Outcome], tree: str, left_out: Sequence[str]
) -> int:
    ran = {p.name: outcomes[p.name] for p in parts if p.name in outcomes}
    ran = {name: outcome for name, outcome in ran.items() if outcome.tree == tree}
    tests = read_tests(
        [FOLDER / f"{p.name}.xml" for p in PARTS if p.is_pytest and _has_ended(p, ran)]
    )
    print(f"\nThe {NUM_SLOWEST} slowest tests:")
    for name, seconds in sorted(tests.seconds.items(), key=lambda item: -item[1])[:NUM_SLOWEST]:
        print(f"  {seconds:7.1f} s  {name}")
    print("\nParts:")
    for name, outcome in ran.items():
        print(f"  {name:24} {outcome.status:8} {_times(outcome)}")
    for name in left_out:
        print(f"  {name:24} left out: no time")
    cut_off = [name for name, outcome in ran.items() if outcome.status == "cut off"]
    if cut_off:
        print(f"Cut off after {LIMIT_SECONDS} s, these do not count: {', '.join(cut_off)}")
    is_red = any(outcome.status == "failed" for outcome in ran.values())
    if all(_has_ended(part, ran) for part in PARTS):
        print(f"\nSkipped in every environment: {len(tests.skipped_everywhere)}")
        for name, reason in sorted(tests.skipped_everywhere.items()):
            print(f"  {name}: {reason}")
        is_red = is_red or not all(map(_is_of_machine, tests.skipped_everywhere.values()))
    return int(is_red)


def _is_of_machine(reason: str) -> bool:
    return "this machine has no " in reason


def _has_ended(part: Part, ran: Mapping[str, Outcome]) -> bool:
    return part.name in ran and ran[part.name].status != "cut off"


def _times(outcome: Outcome) -> str:
    return f"{outcome.wall_seconds:.0f} s, {outcome.cpu_seconds:.0f} CPU s"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="print the names of the parts")
    parser.add_argument("--only", nargs="+", help="run these parts")
    parser.add_argument("--skip", nargs="+", help="leave these parts out")
    parser.add_argument("--again", action="store_true", help="run what has passed on this tree too")
    parser.add_argument(
        "--begin-at-day", action="store_true", help="begin at another part each day"
    )
    parser.add_argument("--start-within", type=float, help="seconds in which parts are started")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
