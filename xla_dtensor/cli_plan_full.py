"""``python -m xla_dtensor plan JOB``: the job's step, compiled for its chips, and the report.

libtpu compiles it in a process of its own (``aot``); nothing runs. ``--out FOLDER`` keeps the
evidence and the report, as JSON, Markdown and HTML.
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mesh_utils import JobConfig

__all__ = ["add_full_options", "plan_fully"]

_GIB = 1 << 30
_MOMENTS = {"adamw": "float32", "adamw-bf16": "bfloat16"}


def add_full_options(plan: argparse.ArgumentParser) -> None:
    """Adds the options of the compiled plan.

    Args:
        plan: The command ``plan``.
    """
    full = plan.add_argument_group("compiling, which --quick leaves out")
    full.add_argument("--out", metavar="FOLDER", help="keep evidence and report there")
    full.add_argument("--python", metavar="PATH", help="the interpreter that has jax and libtpu")
    full.add_argument(
        "--time-limit", type=float, default=3600, metavar="S", help="seconds (default: %(default)g)"
    )
    full.add_argument(
        "--memory-limit", type=float, metavar="GIB", help="of the process that compiles"
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
    from xla_dtensor.aot import evidence_for
    from xla_dtensor.report.compile_report import CompileReport

    evidence = evidence_for(
        "xla_dtensor.job_plan:job_plan",
        job,
        keywords=_keywords(job, asked),
        title=f"{job.name}: {asked.model or job.model}",
        command=_command(asked),
        cache=not asked.no_cache,
        python=asked.python,
        time_limit_seconds=asked.time_limit,
        memory_limit_bytes=None if asked.memory_limit is None else int(asked.memory_limit * _GIB),
    )
    report = CompileReport.of(evidence)
    if asked.out is not None:
        folder = Path(asked.out)
        evidence.save(folder)
        (folder / "report.json").write_text(report.to_json() + "\n", encoding="utf-8")
        (folder / "report.md").write_text(report.to_markdown(), encoding="utf-8")
        (folder / "report.html").write_text(report.to_html(), encoding="utf-8")
    print(report.to_json() if asked.json else report.render().removesuffix("\n"))
    return report.fits


def _keywords(job: JobConfig, asked: argparse.Namespace) -> dict[str, Any]:
    from mesh_utils.errors import JobError

    keywords: dict[str, Any] = {"job": asked.job, "model": asked.model}
    if ":" in (asked.model or job.model or ""):
        return keywords  # the function is called with the job alone
    if asked.optimizer not in _MOMENTS:
        raise JobError(
            f"Job {job.name!r} was to be compiled with --optimizer {asked.optimizer}. The "
            f"reference models are trained by one of {', '.join(_MOMENTS)}. Pass one of these, "
            "or --quick."
        )
    batch = {"sequence": asked.sequence, "per_group": asked.per_group}
    dtypes = {"dtype": asked.dtype, "moment_dtype": _MOMENTS[asked.optimizer]}
    return keywords | batch | dtypes


def _command(asked: argparse.Namespace) -> str:
    words = ["python", "-m", "xla_dtensor", "plan", asked.job]
    for name, usual in (("model", None), ("sequence", 8192), ("per_group", 1)):
        if getattr(asked, name) != usual:
            words += [f"--{name.replace('_', '-')}", str(getattr(asked, name))]
    for name, usual in (("dtype", "bfloat16"), ("optimizer", "adamw")):
        if getattr(asked, name) != usual:
            words += [f"--{name}", getattr(asked, name)]
    return shlex.join(words)
