"""The reference models, compiled by libtpu for pods that are not here: the reports in docs/reports.

    python -m benchmarks.preflight                            all: a quarter of an hour
    python -m benchmarks.preflight --only llama3_8b_v5e
    python -m benchmarks.preflight --evidence FOLDER          keeps what is large, too
    python -m benchmarks.preflight --evidence FOLDER --again  reports on what is kept, in seconds
    python -m benchmarks.preflight --index                    rewrites the index only

Each is one command of the command line, and what it leaves is stored: report.md, report.json and
report.html, and in the index how long the command took and how much memory its compiling process
held. Nothing of it ran on a TPU. The exit status is 1 where a model was not compiled.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from xla_dtensor.cli.plan import write_report
from xla_dtensor.report.compile_report import CompileReport
from xla_dtensor.report.report import Evidence
from xla_dtensor.report.texts import bytes_text, seconds_text

ROOT = Path(__file__).resolve().parents[1]
REPORTS = ROOT / "docs" / "reports"
FILES = ("report.md", "report.json", "report.html")


@dataclass(frozen=True, slots=True)
class Case:
    """A plan to be stored.

    Attributes:
        name: its folder in docs/reports.
        words: of the command line, after ``plan``.
        why: what it shows.
    """

    name: str
    words: tuple[str, ...]
    why: str


CASES = (
    Case("llama3_8b_v5e", ("llama3_8b_v5e",), "FSDP over a pod of 256 chips, 8k tokens"),
    Case("llama3_70b_v5p", ("llama3_70b_v5p",), "FSDP over 512 chips"),
    Case("llama3_70b_v5p_2slices", ("llama3_70b_v5p_2slices",), "two slices, gradients over DCN"),
    Case("llama3_405b_v5p_4slices", ("llama3_405b_v5p_4slices",), "four slices of 512 chips"),
    Case("mixtral_8x7b_v5p", ("mixtral_8x7b_v5p",), "experts on an axis of their own"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compiles, stores the reports and writes the index."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.preflight", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--only", choices=[case.name for case in CASES], action="append")
    parser.add_argument("--index", action="store_true", help="compile nothing")
    parser.add_argument("--evidence", type=Path, help="folder of the programs, 10 MB each")
    parser.add_argument("--again", action="store_true", help="compile nothing that is kept there")
    parser.add_argument("--out", type=Path, default=REPORTS, help="folder of the reports")
    asked = parser.parse_args(arguments)
    wanted = [] if asked.index else [c for c in CASES if asked.only is None or c.name in asked.only]
    if asked.again and asked.evidence is None:
        parser.error("--again needs --evidence FOLDER")
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as dropped:
        for case in wanted:
            kept = (asked.evidence or Path(dropped)) / case.name
            there = asked.again and (kept / "seconds.txt").exists()
            if not there and not compile_case(case, kept):
                failed.append(case.name)
            else:
                store(kept, asked.out / case.name)
    (asked.out / "README.md").write_text(index(asked.out), encoding="utf-8")
    if failed:
        print(f"Not compiled: {', '.join(failed)}.")
    return 1 if failed else 0


def compile_case(case: Case, folder: Path) -> bool:
    """Runs one command.

    Args:
        case: What to compile.
        folder: Where its evidence and its report go, and how long it took.

    Returns:
        Whether it was compiled.
    """
    print(f"plan {shlex.join(case.words)}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "xla_dtensor", "plan", *case.words, "--no-cache"]
    start = time.perf_counter()
    subprocess.run([*command, "--out", str(folder)], stdout=subprocess.DEVNULL, check=False)
    seconds = time.perf_counter() - start
    if not (folder / "report.json").exists():
        return False
    (folder / "seconds.txt").write_text(f"{seconds:.0f}\n", encoding="utf-8")
    return True


def store(evidence: Path, folder: Path) -> None:
    """Writes the reports of a compiled case.

    Args:
        evidence: What its command left.
        folder: Where the reports go.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_report(CompileReport.of(Evidence.load(evidence)), folder)
    for name in FILES:  # where this checkout lies is nobody's business
        text = (folder / name).read_text(encoding="utf-8")
        (folder / name).write_text(text.replace(f"{ROOT}/", ""), encoding="utf-8")
    shutil.copyfile(evidence / "seconds.txt", folder / "seconds.txt")


def index(folder: Path) -> str:
    """Writes the page that leads to the stored reports.

    Args:
        folder: Of the reports.

    Returns:
        Markdown.
    """
    rows = [_row(case, folder / case.name) for case in CASES if (folder / case.name).exists()]
    lines = [_NAMES, tuple("---" for _ in _NAMES), *rows]
    return _PAGE.format(table="\n".join(f"| {' | '.join(line)} |" for line in lines))


def _row(case: Case, folder: Path) -> tuple[str, ...]:
    report = CompileReport.from_json((folder / "report.json").read_text(encoding="utf-8"))
    seconds = float((folder / "seconds.txt").read_text(encoding="utf-8"))
    share, step = report.attribution.share, report.roofline
    return (
        f"[{case.name}]({case.name}/report.md)",
        case.why,
        f"`plan {shlex.join(case.words)}`",
        f"{seconds:.0f} s",
        "-" if report.peak_host_bytes is None else f"{report.peak_host_bytes / 1e9:.1f} GB",
        bytes_text(report.memory.total_bytes),
        {True: "yes", False: "no", None: "not known"}[report.fits],
        "-" if step is None else seconds_text(step.step_seconds),
        "-" if share is None else f"{100 * share:.1f} %",
        str(len(report.unread)),
    )


_NAMES = (
    *("report", "what it shows", "command", "took", "host memory", "a device holds", "fits"),
    *("step (modelled)", "attributed", "unread"),
)
_PAGE = """# Stored reports

Written by `python -m benchmarks.preflight`. Each report is what
`python -m xla_dtensor plan ... --out FOLDER` leaves; the HTML file opens in any browser. Everything
was compiled by libtpu on a machine with two cores and no TPU; nothing ran on one. Times of a step
are modelled.

Time and memory are of the command that compiled it, with libtpu 0.0.50.1, while other work ran on
the machine. "Attributed" is the share of all bytes sent that carries a mesh axis and a line of
PyTorch source; "unread" counts the parts of the program that the reader did not understand.

{table}
"""


if __name__ == "__main__":
    raise SystemExit(main())
