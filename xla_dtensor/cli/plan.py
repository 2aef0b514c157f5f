"""``python -m xla_dtensor plan JOB``: does a job fit, and what will its step do.

``--quick`` compiles nothing. Without it the quick answer comes first, then the compiled one:
libtpu compiles the step in a process of its own (``aot``); nothing runs. ``--out FOLDER`` keeps the
evidence and the report, as JSON, Markdown and HTML. ``--sweep``, ``--smallest`` and ``--max-batch``
rank what might be, and confirm it by compiling.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xla_dtensor.cli.subcommand import fits_status, load_job, run_or_refuse

if TYPE_CHECKING:
    from mesh_utils import JobConfig
    from xla_dtensor.plan.estimate import Gradients
    from xla_dtensor.plan.sweep import QuickCase
    from xla_dtensor.report.compile_report import CompileReport
    from xla_dtensor.report.report import Evidence

__all__ = ["add_plan", "write_report"]


# ------------------------------------------------------------------ python -m xla_dtensor plan JOB

_GIB = 1 << 30
_MOMENTS = {"adamw": "float32", "adamw-bf16": "bfloat16"}


def _add_full_options(plan: argparse.ArgumentParser) -> None:
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


def _compiled(job: JobConfig, args: argparse.Namespace, per_group: int, seconds: float) -> Evidence:
    """Compiles a job's step; its axes and its slice may be others than its file's."""
    from xla_dtensor.cli.plan_flags import flagged, reports_too_much
    from xla_dtensor.core.errors import CompileError
    from xla_dtensor.plan.aot import evidence_for
    from xla_dtensor.plan.search import is_too_large, reporting_job

    is_searched = any((args.sweep, args.smallest, args.max_batch))
    where = f", {job.topology().name}, {' '.join(map(str, job.axes))}" if is_searched else ""
    keywords = _keywords(job, args, per_group)
    start = time.monotonic()

    def evidence(to_compile: JobConfig, time_limit: float) -> Evidence:
        return evidence_for(
            "xla_dtensor.plan.job_plan:job_plan",
            to_compile,
            keywords=keywords,
            title=f"{job.name}: {args.model or job.model}{where}",
            command=_launch_command(job, args, per_group),
            cache=not args.no_cache,
            python=args.python,
            time_limit_seconds=time_limit,
            memory_limit_bytes=(
                None if args.memory_limit is None else int(args.memory_limit * _GIB)
            ),
        )

    to_compile = flagged(job, args)
    try:
        return evidence(to_compile, seconds)
    except CompileError as error:
        if not (is_too_large(error) and reports_too_much(args.python)):
            raise
        try:  # once more, for a report of what takes the memory
            return evidence(reporting_job(to_compile), seconds - (time.monotonic() - start))
        except CompileError:
            raise error from None


def _keep(evidence: Evidence, report: CompileReport, folder: str | None) -> None:
    if folder is not None:
        evidence.save(folder)
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


def _keywords(job: JobConfig, args: argparse.Namespace, per_group: int) -> dict[str, Any]:
    from mesh_utils.errors import JobError
    from xla_dtensor.plan.search import variant_of

    keywords: dict[str, Any] = {"job": args.job, "model": args.model, "variant": variant_of(job)}
    if ":" in (args.model or job.model or ""):
        return keywords  # the function is called with the job alone
    what = f"Job {job.name!r} was to be compiled with"
    if args.optimizer not in _MOMENTS:
        raise JobError(
            f"{what} --optimizer {args.optimizer}. The "
            f"reference models are trained by one of {', '.join(_MOMENTS)}. Pass one of these, "
            "or --quick."
        )
    if args.gradients != "together":
        raise JobError(
            f"{what} --gradients {args.gradients}. The reference models' step clips all gradients "
            "by their common norm, so that all are alive at once. Pass --quick, or a "
            "module:function whose step does not."
        )
    batch = {"sequence": args.sequence, "per_group": per_group, "remat": args.remat}
    dtypes = {"dtype": args.dtype, "moment_dtype": _MOMENTS[args.optimizer]}
    return keywords | batch | dtypes


def _launch_command(job: JobConfig, args: argparse.Namespace, per_group: int) -> str:
    words = ["python", "-m", "xla_dtensor", "plan", args.job]
    usual = {
        "model": None,
        "sequence": 8192,
        "dtype": "bfloat16",
        "optimizer": "adamw",
        "remat": "full",
    }
    for name, default in usual.items():
        if getattr(args, name) != default:
            words += [f"--{name}", str(getattr(args, name))]
    for name in args.without_flags:
        words += ["--without-flags", name]
    if args.all_flags:
        words.append("--all-flags")
    if args.sweep:
        words += ["--sweep", ",".join(f"{axis.name}={axis.ici}" for axis in job.axes)]
    elif args.smallest:
        words += ["--smallest", args.smallest]
    elif per_group != 1:
        words += ["--per-group", str(per_group)]
    return shlex.join(words)


# ------------------------------------------------------------------ python -m xla_dtensor plan JOB


def add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command ``plan``.

    Args:
        commands: The commands of the parser.
    """
    plan = commands.add_parser(
        "plan",
        help="tell whether a training job fits its chips, which mesh, slice or batch would",
        description=(
            "Tells from a job file what a training step takes on each device. --quick computes the "
            "bytes of parameters, gradients and optimizer state exactly, and bounds activations "
            "from below; it compiles nothing and needs no torch for the reference models. Without "
            "it the step is compiled by libtpu as well, and reported: memory, communication, time. "
            "Exit status 1 if it does not fit, 2 if the question cannot be answered."
        ),
    )
    plan.add_argument("job", metavar="JOB", help="a job file, or a name in tpu_configs/jobs")
    plan.add_argument("--quick", action="store_true", help="without compiling")
    plan.add_argument(
        "--model",
        metavar="MODEL",
        help="a reference model, a config.json of Hugging Face, or module:function, as "
        "xla_dtensor/models/training.py (default: the job's)",
    )
    plan.add_argument(
        "--sequence", type=int, default=8192, metavar="N", help="tokens (default: %(default)s)"
    )
    plan.add_argument(
        "--per-group",
        type=int,
        default=1,
        metavar="N",
        help="sequences per part of the batch; a part is one device, or those that share its "
        "tokens (default: %(default)s)",
    )
    plan.add_argument(
        "--dtype", default="bfloat16", help="of parameters and activations (default: %(default)s)"
    )
    plan.add_argument(
        "--optimizer",
        default="adamw",
        metavar="NAME",
        help="adamw (float32 moments), adamw-bf16, adamw-master, sgd or sgd-momentum (default: "
        "%(default)s)",
    )
    plan.add_argument(
        "--remat",
        default="full",
        metavar="KIND",
        help="what the backward keeps of a layer, as scan_layers says it; offload:layer_input "
        "keeps the inputs of layers in the host's memory (default: %(default)s)",
    )
    plan.add_argument(
        "--gradients",
        choices=("together", "one-by-one"),
        default="together",
        help="one-by-one counts the largest only, for a step that updates each parameter inside "
        "its backward (default: %(default)s, as clipping by their norm needs)",
    )
    searches = plan.add_mutually_exclusive_group()
    searches.add_argument(
        "--sweep", metavar="AXES", help='rank meshes, and compile the best: "fsdp=*,tp=*"'
    )
    searches.add_argument("--smallest", metavar="CHIP", help="find the smallest slice of v5e, say")
    searches.add_argument(
        "--max-batch", action="store_true", help="find the largest batch that fits"
    )
    plan.add_argument("--json", action="store_true", help="print JSON")
    _add_full_options(plan)
    plan.set_defaults(command=run_or_refuse(_plan))


def _plan(args: argparse.Namespace) -> int:
    """Answers what was asked; the exit status."""
    from mesh_utils.errors import JobError
    from xla_dtensor.core.errors import LayoutError

    try:
        case = _case(args)
        if not args.quick:
            _print_flags(case.job, args)
        fits: bool | None = _quick(case, args, quiet=args.json and not args.quick)
    except LayoutError as error:  # rules that do not fit the model
        raise JobError(str(error)) from error
    if fits and not args.quick:
        is_search = args.sweep is not None or args.smallest is not None or args.max_batch
        fits = _search(case, args) if is_search else _fully(case, args)
    return fits_status(fits)


def _print_flags(job: JobConfig, args: argparse.Namespace) -> None:
    """First what is compiled otherwise than launched; a libtpu that refuses it ends the plan."""
    from xla_dtensor.cli.plan_flags import flag_lines

    for line in flag_lines(job, args):
        print(line, file=sys.stderr if args.json else sys.stdout, flush=True)


def _fully(case: QuickCase, args: argparse.Namespace) -> bool | None:
    """Compiles a job's step, prints the report, writes what was asked for; whether it fits."""
    from mesh_utils.errors import JobError
    from xla_dtensor.core.errors import CompileError
    from xla_dtensor.plan.search import is_too_large, short
    from xla_dtensor.report.compile_report import CompileReport

    try:
        evidence = _compiled(case.job, args, args.per_group, args.time_limit)
    except CompileError as error:
        if is_too_large(error):
            print(f"DOES NOT FIT, says libtpu: {short(str(error))}", file=sys.stderr)
            return False
        raise JobError(str(error)) from error
    report = CompileReport.of(evidence)
    _keep(evidence, report, args.out)
    print(report.to_json() if args.json else report.render().removesuffix("\n"))
    return report.fits


def _search(case: QuickCase, args: argparse.Namespace) -> bool:
    """Compiles what was asked about, prints the table, and writes the report of what was found.

    One program after the other, until ``--budget`` seconds are spent; what libtpu refuses is a row
    of the table.
    """
    from xla_dtensor.cli.plan_text import search_data, search_text
    from xla_dtensor.plan.search import (
        Budget,
        compiled_batch,
        compiled_smallest,
        compiled_sweep,
    )

    def compile(job: JobConfig, per_group: int, seconds: float) -> Evidence:
        return _compiled(job, args, per_group, min(seconds, args.time_limit))

    budget = Budget(args.budget)
    if args.sweep is not None:
        trials = compiled_sweep(case, args.sweep, compile, budget=budget, best=args.best)
    elif args.smallest is not None:
        trials = compiled_smallest(case, args.smallest, compile, budget=budget)
    else:
        trials = compiled_batch(case, compile, budget=budget)
    # The answer: the first mesh, the only slice, or the largest batch that fits.
    fitting = [trial for trial in trials if trial.outcome in ("fits", "unknown")]
    if args.max_batch:
        fitting.sort(key=lambda trial: -trial.per_group)
    answer = next(iter(fitting), None)
    spent = budget.seconds - budget.left
    if args.json:
        print(json.dumps(search_data(case, trials, answer, spent), indent=1))
    else:
        print(search_text(case, trials, answer, spent, budget.seconds))
    if answer is not None and answer.evidence is not None and answer.report is not None:
        _keep(answer.evidence, answer.report, args.out)
    elif args.out is not None:
        print(f"nothing is written to {args.out}: nothing fits", file=sys.stderr)
    return answer is not None


def _quick(case: QuickCase, args: argparse.Namespace, quiet: bool = False) -> bool:
    from xla_dtensor.cli import plan_text
    from xla_dtensor.plan.sweep import max_batch, quick_sweep, smallest_slice

    fits, plain, shown = True, {}, ""
    if args.sweep is not None:
        meshes = quick_sweep(case, args.sweep)
        fits = meshes[0].refused is None
        plain, shown = plan_text.sweep_data(case, meshes), plan_text.sweep_text(case, meshes)
    elif args.smallest is not None:
        smallest = smallest_slice(case, args.smallest)
        fits = smallest is not None
        plain, shown = (
            plan_text.smallest_data(args.smallest, smallest),
            plan_text.smallest_text(case, args.smallest, smallest),
        )
    elif args.max_batch:
        most = max_batch(case)
        fits = most is not None
        plain, shown = plan_text.batch_data(case, most), plan_text.batch_text(case, most)
    else:
        estimate = case.estimate(args.per_group)
        fits = not estimate.batch_cannot_fit
        batch = case.batch(args.per_group)
        plain = plan_text.estimate_data(case, batch, estimate)
        shown = plan_text.estimate_text(case, batch, estimate)
    if not quiet:
        print(json.dumps(plain, indent=1) if args.json else shown, flush=True)
    return fits


def _case(args: argparse.Namespace) -> QuickCase:
    from mesh_utils.errors import JobError
    from xla_dtensor.core.dtypes import itemsize_bytes
    from xla_dtensor.plan.estimate import optimizer_state
    from xla_dtensor.plan.search import maker_of
    from xla_dtensor.plan.sweep import QuickCase

    job = load_job(args.job)
    for option, number in (("--sequence", args.sequence), ("--per-group", args.per_group)):
        if number < 1:
            raise JobError(
                f"A plan of job {job.name!r} was asked for with {option} {number}. It has to be a "
                f"positive number. Pass {option} 1 or more."
            )
    optimizer = optimizer_state(args.optimizer)
    itemsize_bytes(args.dtype)
    model = args.model or job.model
    maker = None if model is None else maker_of(model)
    if model is not None and maker in ("function", "transformers"):
        return _own_case(job, model, optimizer, args)
    case = QuickCase.of(job, model, dtype=args.dtype, optimizer=optimizer, sequence=args.sequence)
    return replace(case, gradients=_gradients(args), remat=args.remat)


def _own_case(job: JobConfig, model: str, optimizer: Any, args: argparse.Namespace) -> QuickCase:
    """The case of a module:function, or of a model of Transformers; needs torch."""
    from xla_dtensor.plan.estimate import module_parameters, tied_parameters
    from xla_dtensor.plan.sweep import QuickCase

    module = _own_model(job, model, args)
    return QuickCase(
        job,
        tuple(module_parameters(module)),
        None,
        optimizer,
        args.dtype,
        args.sequence,
        tied_parameters(module),
        gradients=_gradients(args),
    )


def _own_model(job: JobConfig, model: str, args: argparse.Namespace) -> Any:
    from mesh_utils.errors import JobError
    from xla_dtensor.core.errors import CompileError
    from xla_dtensor.plan.aot import function_of

    if ":" not in model:
        import torch

        from xla_dtensor.models.hugging_face import make_hugging_face

        return make_hugging_face(model, dtype=getattr(torch, args.dtype.removeprefix("torch.")))
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # an installed command has its own folder there instead
    try:
        training = function_of(model)(job)
    except CompileError as error:
        why = str(error.__cause__ or error)
        raise JobError(
            f"Model {model!r} was asked for. It cannot be imported: {why}. Pass module:function "
            "or file.py:function, of a module in this folder or installed."
        ) from error
    if not isinstance(training, tuple) or len(training) not in (4, 5):
        raise JobError(
            f"Model {model!r} was called with the job. It returned a {type(training).__name__}. "
            "Return (model, make_step, inputs, placements), as xla_dtensor/models/training.py "
            "does."
        )
    return training[0]


def _gradients(args: argparse.Namespace) -> Gradients:
    return "together" if args.gradients == "together" else "one by one"
