"""``python -m xla_dtensor diff a.json b.json``: what differs between two reports."""

from __future__ import annotations

import argparse

from xla_dtensor.cli.report_status import STATUSES, fits_status, status_or_refusal

__all__ = ["add_diff"]


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
    diff.set_defaults(command=status_or_refusal(_diff))


def _diff(asked: argparse.Namespace) -> int:
    from xla_dtensor.report.compile_report import CompileReport

    before, after = (CompileReport.load(path) for path in (asked.before, asked.after))
    print(before.diff(after).to_markdown().removesuffix("\n"))
    return fits_status(after.fits)
