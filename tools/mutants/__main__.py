"""Puts mutants back from the command line; see the package."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from tools.mutants import __doc__ as about
from tools.mutants.check import check
from tools.mutants.mutant import SUITES, Mutant, MutantError, read_mutants
from tools.mutants.place import Tree
from tools.mutants.trial import Copy
from tools.mutants.verdict import (
    BROKEN,
    KILLED,
    NOT_TRIED,
    SURVIVED,
    Verdict,
    baseline_faults,
    judge,
    not_tried,
)

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("mutants.yaml")


def main(arguments: Sequence[str] | None = None) -> int:
    """Puts mutants back, prints a table, returns 1 where one was not found by its tests."""
    asked = _parser().parse_args(arguments)
    try:
        mutants = _chosen(read_mutants(LIST), asked.ids, asked.suite)
        number, parts = map(int, asked.part.split("/"))
        mutants = mutants[number - 1 :: parts]
    except MutantError as error:
        print(error, file=sys.stderr)
        return 2
    if asked.list:
        for mutant in mutants:
            print(f"{mutant.id} ({mutant.kind}, {mutant.area}, {mutant.runtime}): {mutant.what}")
        return 0
    faults = check(mutants, ROOT)
    if faults or asked.check:
        print("\n".join(faults) or f"{len(mutants)} mutants: each stands in the code once")
        return int(bool(faults))
    pythons = {"jax": asked.python_jax, "torch_xla": asked.python_torch_xla}
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies = [Copy(ROOT, Path(folder) / f"copy{n}", pythons) for n in range(asked.jobs)]
        faults = [] if asked.no_baseline else _baseline(mutants, copies[0], asked.timeout)
        verdicts = _verdicts(mutants, copies, asked.timeout)
    asked.json.parent.mkdir(parents=True, exist_ok=True)
    asked.json.write_text(json.dumps([verdict.as_data() for verdict in verdicts], indent=1) + "\n")
    counts = Counter(verdict.verdict for verdict in verdicts)
    print(", ".join(f"{counts[name]} {name}" for name in (KILLED, SURVIVED, BROKEN, NOT_TRIED)))
    print("\n".join(faults))
    return int(bool(faults or counts[SURVIVED] or counts[BROKEN]))


def _baseline(mutants: Sequence[Mutant], copy: Copy, timeout: float) -> list[str]:
    """Run all named tests once per runtime without a mutant; return what is wrong."""
    faults: list[str] = []
    for runtime in dict.fromkeys(mutant.runtime for mutant in mutants):
        tests = tuple(
            dict.fromkeys(
                test for mutant in mutants if mutant.runtime == runtime for test in mutant.tests
            )
        )
        time = timeout + 20 * len(tests)
        run = copy.run(tests, runtime, timeout=time, stop_at_first=False)
        found = baseline_faults(tests, run)
        print(f"without a mutant, {runtime}: {len(tests)} tests, {run.seconds:.0f} s", flush=True)
        print("".join(f"  {fault}\n" for fault in found), end="", flush=True)
        faults += found
    return faults


def _verdicts(mutants: Sequence[Mutant], copies: Sequence[Copy], timeout: float) -> list[Verdict]:
    tree, free = Tree(ROOT), SimpleQueue[Copy]()
    for copy in copies:
        free.put(copy)

    def tried(mutant: Mutant) -> Verdict:
        copy = free.get()
        try:
            found = _tried(mutant, tree, copy, timeout)
        finally:
            free.put(copy)
        print(f"{found.verdict:9} {found.seconds:5.1f} s  {mutant.id}", flush=True)
        print(f"          {found.by}\n          {found.why}", flush=True)
        return found

    with ThreadPoolExecutor(len(copies)) as pool:
        return list(pool.map(tried, mutants))


def _tried(mutant: Mutant, tree: Tree, copy: Copy, timeout: float) -> Verdict:
    lacking = copy.lacks(mutant.needs, mutant.runtime)
    if lacking:
        return not_tried(mutant, lacking)
    with copy.holding(tree.place(mutant)):
        run = copy.run(
            mutant.tests, mutant.runtime, timeout=timeout, stop_at_first=True, suite=mutant.suite
        )
    return judge(mutant, run)


def _chosen(mutants: Sequence[Mutant], ids: Sequence[str], suite: str) -> Sequence[Mutant]:
    unknown = sorted(set(ids) - {mutant.id for mutant in mutants})
    if unknown:
        raise MutantError(
            f"The mutants {', '.join(unknown)} were asked for. The list has none of that name. "
            "python -m tools.mutants --list prints them."
        )
    return [
        mutant
        for mutant in mutants
        if (not ids or mutant.id in ids) and suite in ("all", mutant.suite)
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m tools.mutants",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("ids", nargs="*", help="mutants; all of them where none is named")
    parser.add_argument("--list", action="store_true", help="print them, and run nothing")
    parser.add_argument("--check", action="store_true", help="look for their texts, run nothing")
    parser.add_argument(
        "--suite", default="all", choices=SUITES, help="contract: those that it must find"
    )
    parser.add_argument("--part", default="1/1", help="2/6: every sixth, beginning at the second")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for a mutant's tests")
    parser.add_argument(
        "--no-baseline", action="store_true", help="do not run the tests without a mutant first"
    )
    parser.add_argument(
        "--python-jax", type=Path, default=ROOT / ".venv/bin/python", help="runs JAX"
    )
    parser.add_argument(
        "--python-torch-xla",
        type=Path,
        default=ROOT / ".venv-torch-xla/bin/python",
        help="runs torch_xla",
    )
    parser.add_argument(
        "--json", type=Path, default=ROOT / "build/mutants.json", help="where the verdicts go"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
