"""``plan JOB --sweep``, ``--smallest``, ``--max-batch``: what was ranked, confirmed by compiling.

One program after the other, until ``--budget`` seconds are spent; what libtpu refuses is a row of
the table. The report of what was found goes to ``--out``.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from xla_dtensor.cli.plan_search_text import search_data, search_text

if TYPE_CHECKING:
    from mesh_utils import JobConfig
    from xla_dtensor.plan_search import Budget, Compile, Trial
    from xla_dtensor.quick.sweep import QuickCase
    from xla_dtensor.report.evidence import Evidence

__all__ = ["search"]


def search(case: QuickCase, asked: argparse.Namespace) -> bool:
    """Compiles what was asked about, prints the table, and writes the report of what was found.

    Args:
        case: The job.
        asked: The arguments.

    Returns:
        Whether something fits.

    Raises:
        JobError: A pattern, chip, or optimizer that there is not.
    """
    from xla_dtensor.cli.plan_full import compiled, keep
    from xla_dtensor.plan_search import Budget

    def compile(job: JobConfig, per_group: int, seconds: float) -> Evidence:
        return compiled(job, asked, per_group, min(seconds, asked.time_limit))

    budget = Budget(asked.budget)
    trials = _trials(case, asked, compile, budget)
    found = _found(trials, asked)
    spent = budget.seconds - budget.left
    if asked.json:
        print(json.dumps(search_data(case, trials, found, spent), indent=1))
    else:
        print(search_text(case, trials, found, spent, budget.seconds))
    if found is not None and found.evidence is not None and found.report is not None:
        keep(found.evidence, found.report, asked.out)
    elif asked.out is not None:
        print(f"nothing is written to {asked.out}: nothing fits", file=sys.stderr)
    return found is not None


def _trials(
    case: QuickCase, asked: argparse.Namespace, compile: Compile, budget: Budget
) -> tuple[Trial, ...]:
    from xla_dtensor import plan_search

    if asked.sweep is not None:
        return plan_search.compiled_sweep(
            case, asked.sweep, compile, budget=budget, best=asked.best
        )
    if asked.smallest is not None:
        return plan_search.compiled_smallest(case, asked.smallest, compile, budget=budget)
    return plan_search.compiled_batch(case, compile, budget=budget)


def _found(trials: tuple[Trial, ...], asked: argparse.Namespace) -> Trial | None:
    """The answer: the first mesh, the only slice, or the largest batch that fits."""
    fitting = [trial for trial in trials if trial.outcome in ("fits", "unknown")]
    if asked.max_batch:
        return max(fitting, key=lambda trial: trial.per_group, default=None)
    return next(iter(fitting), None)
