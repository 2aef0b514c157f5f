"""What ``plan`` prints of meshes, slices or batches that it compiled, as text or for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from xla_dtensor.cli.plan_text import SCHEMA, size_text
from xla_dtensor.cli.table import table

if TYPE_CHECKING:
    from xla_dtensor.plan_search import Trial
    from xla_dtensor.quick.sweep import QuickCase

__all__ = ["search_data", "search_text"]

_HEADER = (
    "",
    "sequences",
    "comm. by the rules",
    "step, compiled",
    "no overlap",
    "memory",
    "compiled in",
    "",
)


def search_text(
    case: QuickCase, trials: Sequence[Trial], found: Trial | None, spent: float, budget: float
) -> str:
    """Write a table of what was tried.

    Args:
        case: The job.
        trials: What was tried.
        found: The answer; None if nothing fits.
        spent: Seconds.
        budget: Seconds that might have been spent.

    Returns:
        Lines.
    """
    count = sum(trial.report is not None for trial in trials)
    lines = [
        "",
        f"{count} compiled by libtpu in {spent:.0f} s of {budget:.0f} s. Memory is the compiler's; "
        "seconds of a step are modelled,",
        'from the rules before compiling, from the compiled program after it: "step" if all '
        "overlaps, then if nothing does.",
        "",
        *table([_HEADER, *(_row(trial, case) for trial in trials)]),
        "",
        _answer(case, found, trials),
    ]
    return "\n".join(lines)


def _row(trial: Trial, case: QuickCase) -> tuple[str, ...]:
    report, estimate = trial.report, trial.estimate
    roofline = None if report is None else report.roofline
    if report is not None:
        memory = size_text(report.memory.total_bytes)
    else:
        memory = "" if estimate is None else f"> {size_text(estimate.lower_bound_bytes)}"
    return (
        _name(trial, case),
        f"{_sequences(trial):,}" if estimate is not None else "",
        f"{sum(trial.modelled.values()):.3g} s" if trial.modelled else "-",
        "-" if roofline is None else f"{roofline.step_seconds:.3g} s",
        "-" if roofline is None else f"{roofline.step_seconds_no_overlap:.3g} s",
        memory,
        f"{trial.seconds:.0f} s" if trial.seconds else "-",
        trial.outcome if trial.refused is None else f"{trial.outcome}: {trial.refused}",
    )


def _name(trial: Trial, case: QuickCase) -> str:
    axes = " ".join(map(str, trial.job.axes))
    same = trial.job.accelerator == case.job.accelerator
    return axes if same else f"{trial.job.topology().name} {axes}"


def _sequences(trial: Trial) -> int:
    from xla_dtensor.quick.batch import batch_of

    return trial.per_group * batch_of(trial.job, sequence=_ANY).groups


_ANY = 1 << 30
"""Tokens: a length that every axis divides."""


def _answer(case: QuickCase, found: Trial | None, trials: Sequence[Trial]) -> str:
    if found is None:
        tried = any(trial.report is not None or trial.seconds for trial in trials)
        return "Nothing that was compiled fits." if tried else "Nothing was compiled."
    room = None if found.report is None else found.report.memory.spare_bytes
    left = "" if room is None else f", {size_text(room)} to spare"
    each = f"{found.per_group:,} sequences per part of the batch"
    return f"found: {_name(found, case)}, {each}{left}."


def search_data(
    case: QuickCase, trials: Sequence[Trial], found: Trial | None, spent: float
) -> dict[str, Any]:
    """Gather it for JSON.

    Args:
        case: The job.
        trials: What was tried.
        found: The answer; None if nothing fits.
        spent: Seconds.

    Returns:
        Numbers and text; bytes are those of one device.
    """
    return {
        "schema": SCHEMA,
        "job": case.job.name,
        "seconds": spent,
        "found": None if found is None else trials.index(found),
        "trials": [_trial_data(trial) for trial in trials],
    }


def _trial_data(trial: Trial) -> dict[str, Any]:
    report, estimate = trial.report, trial.estimate
    roofline = None if report is None else report.roofline
    memory = None if report is None else report.memory
    return {
        "topology": trial.job.topology().name,
        "axes": {axis.name: axis.size for axis in trial.job.axes},
        "sequences_per_group": trial.per_group,
        "outcome": trial.outcome,
        "refused": trial.refused,
        "modelled_seconds": trial.modelled,
        "lower_bound_bytes": None if estimate is None else estimate.lower_bound_bytes,
        "compiled": None
        if report is None or memory is None
        else {
            "total_bytes": memory.total_bytes,
            "capacity_bytes": memory.capacity_bytes,
            "step_seconds": None if roofline is None else roofline.step_seconds,
            "step_seconds_no_overlap": (
                None if roofline is None else roofline.step_seconds_no_overlap
            ),
            "binding": None if roofline is None else roofline.binding,
            "findings": [each.code for each in report.findings],
        },
        "compile_seconds": trial.seconds,
    }
