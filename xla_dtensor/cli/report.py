"""``python -m xla_dtensor report evidence/ --html report.html``: what a compiled step will do."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from xla_dtensor.cli.report_status import STATUSES, fits_status, status_or_refusal
from xla_dtensor.cli.report_verify import add_verify, verify

if TYPE_CHECKING:
    from xla_dtensor.report.compile_report import CompileReport

__all__ = ["add_report", "add_report_outputs", "write_report"]


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
    add_report_outputs(report)
    add_verify(report)
    report.set_defaults(command=status_or_refusal(_report))


def add_report_outputs(command: argparse.ArgumentParser) -> None:
    """Adds the options that say where a report is written to.

    Args:
        command: The command.
    """
    command.add_argument("--json", metavar="FILE", help="write it as JSON")
    command.add_argument("--html", metavar="FILE", help="write it as one HTML page")
    command.add_argument("--markdown", metavar="FILE", help="write it as Markdown")
    command.add_argument("--quiet", action="store_true", help="print only whether it fits")


def write_report(report: CompileReport, asked: argparse.Namespace) -> int:
    """Prints a report and writes the files that were asked for.

    Args:
        report: The report.
        asked: The arguments, those of `add_report_outputs` among them.

    Returns:
        The exit status.

    Raises:
        OSError: A file that cannot be written.
    """
    from xla_dtensor.report.report_words import verdict

    if asked.json is not None:
        Path(asked.json).write_text(report.to_json() + "\n", encoding="utf-8")
    if asked.html is not None:
        Path(asked.html).write_text(report.to_html(), encoding="utf-8")
    if asked.markdown is not None:
        Path(asked.markdown).write_text(report.to_markdown(), encoding="utf-8")
    print(verdict(report) if asked.quiet else report.render().removesuffix("\n"))
    return fits_status(report.fits)


def _report(asked: argparse.Namespace) -> int:
    from xla_dtensor.report.compile_report import CompileReport

    if asked.verify is not None:
        return verify(asked)
    return write_report(CompileReport.load(asked.evidence), asked)
