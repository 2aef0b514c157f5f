"""Writes tests/slow_tests.txt: the tests that are no part of the contract because they take long.

The contract is run after every change, so it has to be over in ten minutes. Four of five tests take
less than half a second; the few that take longest are most of the time. Of measured times,

    python -m pytest -n 2 --dist loadgroup -m "not thorough and not gpu" --junitxml=out/tests.xml
    python -m tools.slow_tests out/tests.xml --seconds 2.5

adds what takes longer than 2.5 seconds to the list, and takes out what no longer does. A test that
was not measured stays where it is, and so does one that the contract needs: it finds a fault of
tools/mutants, or it is the only one of its kind (`NEEDED`).
"""

from __future__ import annotations

import argparse
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.contract import SLOW_TESTS, slow_tests
from tools.mutants.mutant import read_mutants

__all__ = ["NEEDED", "listed", "main", "measured"]

MUTANTS = Path(__file__).with_name("mutants") / "mutants.yaml"
HEADER = """\
# Tests that take long: `make test-all` runs them, `make test` does not. Written from measured times
# by tools/slow_tests.py.
"""
NEEDED = (
    "tests/drawn/test_programs.py::test_drawn_programs",
    "tests/test_import_rules.py::test_folders",
    "tests/test_import_rules.py::test_layers",
    "tests/test_pages.py::test_the_sessions_of_use",
    "tests/test_readme.py",
    "tests/test_source_shape.py::test_shape",
    "tests/xla_dtensor/nn/test_fully_shard.py::test_mixed_precision",
    "tests/xla_dtensor/nn/test_fully_shard.py::test_training",
    "tests/xla_dtensor/plan/test_llama_plan.py::test_the_plan_communicates_as_hand_annotations_do",
    "tests/xla_dtensor/runtimes/jax/test_jax_compile.py::test_gradient_accumulation",
    "tests/xla_dtensor/test_hugging_face.py::test_thirty_steps_equal_plain_pytorch",
    "tests/xla_dtensor/test_op_tables.py::test_the_first_call_of_each_kind",
    "tests/xla_dtensor/test_step_checks.py::test_a_call_that_fails_leaves_all_as_it_was",
    "tests/xla_dtensor/test_trainer_calls.py::test_whole_state_dicts[broadcast-placements]",
    "tests/xla_dtensor/test_training.py::test_three_steps[adamw]",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the list anew; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("times", type=Path, help="what pytest wrote by --junitxml")
    parser.add_argument("--seconds", type=float, default=2.5, help="default: %(default)s")
    asked = parser.parse_args(arguments)
    found = [test for mutant in read_mutants(MUTANTS) for test in mutant.tests]
    seconds = measured(asked.times)
    names = listed(slow_tests(), seconds, asked.seconds, [*NEEDED, *found])
    SLOW_TESTS.write_text(HEADER + "".join(f"{name}\n" for name in names), encoding="utf-8")
    left = sum(time for name, time in seconds.items() if name not in names)
    print(f"{len(names)} tests are slow; the others that were measured take {left:.0f} s")
    return 0


def measured(file: Path) -> dict[str, float]:
    """Return the seconds of each test, by pytest's name of it, of what pytest wrote."""
    seconds: dict[str, float] = {}
    for case in ElementTree.parse(file).iter("testcase"):
        *folders, last = str(case.get("classname")).split(".")
        is_class = last.startswith("Test")
        path = "/".join(folders if is_class else [*folders, last])
        name = f"{last}::{case.get('name')}" if is_class else str(case.get("name"))
        seconds[f"{path}.py::{name}"] = float(case.get("time") or 0)
    return seconds


def listed(
    before: frozenset[str], seconds: Mapping[str, float], limit: float, needed: Sequence[str]
) -> list[str]:
    """Return the tests that are slow.

    Args:
        before: Those that were.
        seconds: How long each took, of those that were measured.
        limit: In seconds.
        needed: Beginnings of the names of those that the contract keeps.
    """
    names = {name for name, time in seconds.items() if time > limit}
    names |= before - seconds.keys()
    return sorted(name for name in names if not name.startswith(tuple(needed)))


if __name__ == "__main__":
    sys.exit(main())
