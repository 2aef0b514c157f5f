"""``python -m xla_dtensor plan JOB``: the job's step, compiled for its chips, and the report.

libtpu compiles it in a process of its own (``aot``); nothing runs. ``--out FOLDER`` keeps the
evidence and the report, as JSON, Markdown and HTML.
"""

from __future__ import annotations

import argparse
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mesh_utils import JobConfig
    from xla_dtensor.report.compile_report import CompileReport
    from xla_dtensor.report.evidence import Evidence

__all__ = ["add_full_options", "compiled", "keep", "plan_fully", "write_report"]

_GIB = 1 << 30
_MOMENTS = {"adamw": "float32", "adamw-bf16": "bfloat16"}


def add_full_options(plan: argparse.ArgumentParser) -> None:
    """Adds the options of the compiled plan.

    Args:
        plan: The command ``plan``.
    """
    full = plan.add_argument_group("compiling, which --quick leaves out")
    full.add_argument("--out", metavar="FOLDER", help="keep evidence and report there")
    full.add_argument(
        "--python", metavar="PATH", help="the interpreter that has jax, libtpu and this package"
    )
    full.add_argument(
        "--time-limit", type=float, default=3600, metavar="S", help="seconds (default: %(default)g)"
    )
    full.add_argument(
        "--memory-limit", type=float, metavar="GIB", help="of the process that compiles"
    )
    full.add_argument(
        "--budget",
        type=float,
        default=1800,
        metavar="S",
        help="seconds for all that --sweep, --smallest or --max-batch compile (default: "
        "%(default)g)",
    )
    full.add_argument(
        "--best",
        type=int,
        default=3,
        metavar="N",
        help="how many meshes of --sweep are compiled until they fit (default: %(default)s)",
    )
    full.add_argument(
        "--without-flags",
        action="append",
        default=[],
        metavar="SET",
        help="leave out a set of the job's XLA flags; may be given several times",
    )
    full.add_argument(
        "--all-flags",
        action="store_true",
        help="compile with all XLA flags that launch runs with, the sets that are slow to compile "
        "as well",
    )
    full.add_argument("--no-cache", action="store_true", help="compile though it was before")


def plan_fully(job: JobConfig, asked: argparse.Namespace) -> bool | None:
    """Compiles a job's step, prints the report, and writes what was asked for.

    Args:
        job: The job.
        asked: The arguments.

    Returns:
        Whether it fits; None if nobody knows.

    Raises:
        JobError: An optimizer that the reference models do not have.
        CompileError: It cannot be compiled.
    """
    from xla_dtensor.report.compile_report import CompileReport

    evidence = compiled(job, asked, asked.per_group, asked.time_limit)
    report = CompileReport.of(evidence)
    keep(evidence, report, asked.out)
    print(report.to_json() if asked.json else report.render().removesuffix("\n"))
    return report.fits


def compiled(job: JobConfig, asked: argparse.Namespace, per_group: int, seconds: float) -> Evidence:
    """Compiles a job's step.

    Args:
        job: The job; its axes and its slice may be others than its file's.
        asked: The arguments.
        per_group: Sequences per part of the batch.
        seconds: How long it may take.

    Returns:
        What it leaves.

    Raises:
        JobError: What the reference models do not have.
        CompileError: It cannot be compiled, or not in that time.
    """
    from xla_dtensor.aot import evidence_for
    from xla_dtensor.cli.plan_flags import flagged, reports_too_much
    from xla_dtensor.errors import CompileError
    from xla_dtensor.job_variant import reporting_job
    from xla_dtensor.plan_search import is_too_large

    is_searched = any((asked.sweep, asked.smallest, asked.max_batch))
    where = f", {job.topology().name}, {' '.join(map(str, job.axes))}" if is_searched else ""
    keywords = _keywords(job, asked, per_group)
    start = time.monotonic()

    def evidence(to_compile: JobConfig, left: float) -> Evidence:
        return evidence_for(
            "xla_dtensor.job_plan:job_plan",
            to_compile,
            keywords=keywords,
            title=f"{job.name}: {asked.model or job.model}{where}",
            command=_launch_command(job, asked, per_group),
            cache=not asked.no_cache,
            python=asked.python,
            time_limit_seconds=left,
            memory_limit_bytes=(
                None if asked.memory_limit is None else int(asked.memory_limit * _GIB)
            ),
        )

    to_compile = flagged(job, asked)
    try:
        return evidence(to_compile, seconds)
    except CompileError as error:
        if not (is_too_large(error) and reports_too_much(asked.python)):
            raise
        try:  # once more, for a report of what takes the memory
            return evidence(reporting_job(to_compile), seconds - (time.monotonic() - start))
        except CompileError:
            raise error from None


def keep(evidence: Evidence, report: CompileReport, folder: str | None) -> None:
    """Writes evidence and report, as JSON, Markdown and HTML.

    Args:
        evidence: What a step left.
        report: Made of it.
        folder: Where to; None for nowhere.
    """
    if folder is None:
        return
    evidence.save(Path(folder))
    write_report(report, Path(folder))


def write_report(report: CompileReport, folder: Path) -> None:
    """Writes a report in its three forms.

    Args:
        report: The report.
        folder: Where report.json, report.md and report.html go.
    """
    (folder / "report.json").write_text(report.to_json() + "\n", encoding="utf-8")
    (folder / "report.md").write_text(report.to_markdown(), encoding="utf-8")
    (folder / "report.html").write_text(report.to_html(), encoding="utf-8")


def _keywords(job: JobConfig, asked: argparse.Namespace, per_group: int) -> dict[str, Any]:
    from mesh_utils.errors import JobError
    from xla_dtensor.job_variant import variant_of

    keywords: dict[str, Any] = {"job": asked.job, "model": asked.model, "variant": variant_of(job)}
    if ":" in (asked.model or job.model or ""):
        return keywords  # the function is called with the job alone
    what = f"Job {job.name!r} was to be compiled with"
    if asked.optimizer not in _MOMENTS:
        raise JobError(
            f"{what} --optimizer {asked.optimizer}. The "
            f"reference models are trained by one of {', '.join(_MOMENTS)}. Pass one of these, "
            "or --quick."
        )
    if asked.gradients != "together":
        raise JobError(
            f"{what} --gradients {asked.gradients}. The reference models' step clips all gradients "
            "by their common norm, so that all are alive at once. Pass --quick, or a "
            "module:function whose step does not."
        )
    batch = {"sequence": asked.sequence, "per_group": per_group, "remat": asked.remat}
    dtypes = {"dtype": asked.dtype, "moment_dtype": _MOMENTS[asked.optimizer]}
    return keywords | batch | dtypes


def _launch_command(job: JobConfig, asked: argparse.Namespace, per_group: int) -> str:
    words = ["python", "-m", "xla_dtensor", "plan", asked.job]
    usual = {
        "model": None,
        "sequence": 8192,
        "dtype": "bfloat16",
        "optimizer": "adamw",
        "remat": "full",
    }
    for name, value in usual.items():
        if getattr(asked, name) != value:
            words += [f"--{name}", str(getattr(asked, name))]
    for name in asked.without_flags:
        words += ["--without-flags", name]
    if asked.all_flags:
        words.append("--all-flags")
    if asked.sweep:
        words += ["--sweep", ",".join(f"{axis.name}={axis.ici}" for axis in job.axes)]
    elif asked.smallest:
        words += ["--smallest", asked.smallest]
    elif per_group != 1:
        words += ["--per-group", str(per_group)]
    return shlex.join(words)
