"""``python -m xla_dtensor report evidence/ --html report.html``: what a compiled step will do."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from xla_dtensor.cli.subcommand import fits_status, run_or_refuse

if TYPE_CHECKING:
    from xla_dtensor.report.compile_report import CompileReport
    from xla_dtensor.report.verification import Tolerances

__all__ = ["add_diff", "add_report"]


STATUSES = "Exit status 0 if it fits or nobody knows, 1 if it does not fit, 2 for what is refused."
"""What the exit statuses mean, for the help."""


# -------------------------------------------------------- python -m xla_dtensor diff a.json b.json
#
# What differs between two reports.


def add_diff(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command ``diff``.

    Args:
        commands: The commands of the parser.
    """
    diff = commands.add_parser(
        "diff",
        help="say what differs between two reports: memory, communication, time, findings",
        description=(
            "Compares two reports of compiled steps, as Markdown. No device, no torch and no jax "
            f"is needed. Of the second report: {STATUSES[0].lower()}{STATUSES[1:]}"
        ),
    )
    for name in ("before", "after"):
        diff.add_argument(
            name, metavar=name.upper(), help="a report as JSON, or a folder of evidence"
        )
    diff.set_defaults(command=run_or_refuse(_diff))


def _diff(args: argparse.Namespace) -> int:
    from xla_dtensor.report.compile_report import CompileReport

    before, after = (CompileReport.load(path) for path in (args.before, args.after))
    print(before.diff(after).to_markdown().removesuffix("\n"))
    return fits_status(after.fits)


# --------------------------------------------- python -m xla_dtensor report A.json --verify B.json
#
# Was it what the prediction said?


def _add_verify(command: argparse.ArgumentParser) -> None:
    """The options that hold a report against another."""
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


def _verify(args: argparse.Namespace) -> int:
    """Prints what a job does against what was predicted; the exit status."""
    from xla_dtensor.report.compile_report import CompileReport
    from xla_dtensor.report.verification import verdict_text

    predicted, job = (CompileReport.load(path) for path in (args.evidence, args.verify))
    outcome = predicted.verify(job, tolerances=_tolerances(args.tolerance))
    print(verdict_text(outcome) if args.quiet else outcome.to_markdown().removesuffix("\n"))
    return outcome.status


def _tolerances(texts: list[str]) -> Tolerances:
    from dataclasses import fields

    from xla_dtensor.report.report import ReportError
    from xla_dtensor.report.verification import Tolerances

    names = [field.name for field in fields(Tolerances)]
    shares: dict[str, float] = {}
    for text in texts:
        name, _, number = text.partition("=")
        try:
            share = float(number)
        except ValueError:
            share = None
        if name not in names or share is None:
            raise ReportError(
                f"A report was to be verified with --tolerance {text!r}. That is no name and "
                f"share. Pass one of {', '.join(names)}, an equals sign and a share, as in "
                "total=0.1."
            )
        shares[name] = share
    return Tolerances(**shares)


# --------------------------------------- python -m xla_dtensor report evidence/ --html report.html


def add_report(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command ``report``.

    Args:
        commands: The commands of the parser.
    """
    report = commands.add_parser(
        "report",
        help="say what a compiled step will do: memory, communication, time, findings",
        description=(
            "Reads what a compiled step left behind and says whether it fits, which collectives it "
            "runs over which mesh axes and for which lines of source, how long a step takes "
            f"(modelled), and what to look at. No device, no torch and no jax is needed. {STATUSES}"
        ),
    )
    report.add_argument(
        "evidence", metavar="EVIDENCE", help="a folder of evidence, or a report as JSON"
    )
    _add_outputs(report)
    _add_verify(report)
    report.set_defaults(command=run_or_refuse(_report))


def _add_outputs(command: argparse.ArgumentParser) -> None:
    """The options that say where a report is written to."""
    command.add_argument("--json", metavar="FILE", help="write it as JSON")
    command.add_argument("--html", metavar="FILE", help="write it as one HTML page")
    command.add_argument("--markdown", metavar="FILE", help="write it as Markdown")
    command.add_argument("--quiet", action="store_true", help="print only whether it fits")


def _write_report(report: CompileReport, args: argparse.Namespace) -> int:
    """Prints a report and writes the files that were asked for; the exit status."""
    from xla_dtensor.report.render import verdict

    if args.json is not None:
        Path(args.json).write_text(report.to_json() + "\n", encoding="utf-8")
    if args.html is not None:
        Path(args.html).write_text(report.to_html(), encoding="utf-8")
    if args.markdown is not None:
        Path(args.markdown).write_text(report.to_markdown(), encoding="utf-8")
    print(verdict(report) if args.quiet else report.render().removesuffix("\n"))
    return fits_status(report.fits)


def _report(args: argparse.Namespace) -> int:
    from xla_dtensor.report.compile_report import CompileReport

    if args.verify is not None:
        return _verify(args)
    return _write_report(CompileReport.load(args.evidence), args)
