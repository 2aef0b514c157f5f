"""``python -m xla_dtensor report A.json --verify B.json``: was it what the prediction said?"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xla_dtensor.report.verification import Tolerances

__all__ = ["add_verify", "verify"]


def add_verify(command: argparse.ArgumentParser) -> None:
    """Adds the options that hold a report against another.

    Args:
        command: The command.
    """
    command.add_argument(
        "--verify",
        metavar="JOB",
        help="hold the report against that of a job that ran (JSON, or a folder of evidence), and "
        "print what differs; exit status 0 if it is as predicted, else 1",
    )
    command.add_argument(
        "--tolerance",
        metavar="NAME=SHARE",
        action="append",
        default=[],
        help="with --verify: by which share a quantity may differ, such as total=0.1; names are "
        "state, total, temporaries, communication, flops, peak",
    )


def verify(asked: argparse.Namespace) -> int:
    """Prints what a job does against what was predicted.

    Args:
        asked: The arguments.

    Returns:
        The exit status.

    Raises:
        ReportError: A file that is no report, or a tolerance that is none.
        OSError: A file that cannot be read.
    """
    from xla_dtensor.report.compile_report import CompileReport
    from xla_dtensor.report.verification_text import verdict_text

    predicted, job = (CompileReport.load(path) for path in (asked.evidence, asked.verify))
    outcome = predicted.verify(job, tolerances=_tolerances(asked.tolerance))
    print(verdict_text(outcome) if asked.quiet else outcome.to_markdown().removesuffix("\n"))
    return outcome.status


def _tolerances(texts: list[str]) -> Tolerances:
    from dataclasses import fields

    from xla_dtensor.report.errors import ReportError
    from xla_dtensor.report.verification import Tolerances

    names = [field.name for field in fields(Tolerances)]
    given: dict[str, float] = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            share = float(value)
        except ValueError:
            share = None
        if name not in names or share is None:
            raise ReportError(
                f"A report was to be verified with --tolerance {text!r}. That is no name and "
                f"share. Pass one of {', '.join(names)}, an equals sign and a share, as in "
                "total=0.1."
            )
        given[name] = share
    return Tolerances(**given)
