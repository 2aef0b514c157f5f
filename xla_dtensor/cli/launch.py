"""``python -m xla_dtensor launch JOB``: prints what starts a job elsewhere, or runs it here."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from xla_dtensor.cli.subcommand import load_job, run_or_refuse

if TYPE_CHECKING:
    from mesh_utils.job import JobConfig

__all__ = ["add_launch"]

_DEFAULT_COMMAND = ("python", "train.py")
_DEFAULT_IMAGE = "IMAGE"


def add_launch(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to a command line.

    Args:
        commands: What ``ArgumentParser.add_subparsers`` returned.

    Example:
        >>> parser = argparse.ArgumentParser()
        >>> add_launch(parser.add_subparsers())
        >>> parser.parse_args(["launch", "llama3_8b_v5e"]).job
        'llama3_8b_v5e'
    """
    launch = commands.add_parser(
        "launch",
        help="print what starts a job file (JobSet, xpk, queued resources, torchrun, Slurm), or "
        "run it on this machine",
        description=(
            "Fills a launcher's template from a job file and prints it; nothing is started. With "
            "--local the job runs here, as processes on virtual CPU devices with scaled-down axes. "
            "docs/jobs.md describes job files and launchers."
        ),
    )
    launch.add_argument("job", metavar="JOB", help="a job file, or a name in tpu_configs/jobs")
    launch.add_argument(
        "--with",
        dest="launcher",
        metavar="LAUNCHER",
        help="jobset, xpk, queued, torchrun or slurm (default: jobset)",
    )
    launch.add_argument("--image", help="the container image")
    launch.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an environment variable; may be given several times",
    )
    launch.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="what the launcher knows besides, such as project=, zone=, queue=, partition=",
    )
    launch.add_argument(
        "--command",
        dest="words",
        nargs=argparse.REMAINDER,
        metavar="WORD",
        help=(
            "what each host runs, up to the end of the line; one word is read as a shell would "
            f"(default: that of the job file, else {' '.join(_DEFAULT_COMMAND)})"
        ),
    )
    launch.add_argument(
        "--print",
        dest="only_print",
        action="store_true",
        help="print what would be started (the default without --local)",
    )
    _add_local(launch)
    launch.set_defaults(command=run_or_refuse(_launch))


def _add_local(launch: argparse.ArgumentParser) -> None:
    local = launch.add_argument_group("on this machine")
    local.add_argument(
        "--local", type=int, metavar="N", help="run the job here, as N processes on CPU devices"
    )
    local.add_argument(
        "--devices", type=int, metavar="D", help="devices of each process (default: 2)"
    )
    local.add_argument(
        "--axes",
        metavar="YAML",
        help="sizes of the axes here, such as '{dp: {dcn: 2}, tp: {ici: -1}}' (default: scaled)",
    )
    local.add_argument(
        "--logs", metavar="FOLDER", help="where each process's output goes (default: a new folder)"
    )
    local.add_argument("--timeout", type=float, metavar="SECONDS", help="end the job after so long")
    local.add_argument(
        "--grace",
        type=float,
        metavar="SECONDS",
        help="from a signal until processes are killed (default: the job's grace_seconds)",
    )


def _launch(args: argparse.Namespace) -> int:
    """The exit status: that of the job where it runs here."""
    from mesh_utils.launch import flag_notes, render

    job = load_job(args.job)
    if args.local is not None:
        return _launch_here(args, job)
    _refuse_local_arguments(args)
    for note in flag_notes(job):
        print(f"note: {note}", file=sys.stderr)
    text = render(
        job,
        args.launcher or "jobset",
        command=_words(args.words, job),
        image=_image(args, job),
        env=_pairs(args.env, "--env"),
        **_pairs(args.option, "--option"),
    )
    print(text, end="")
    return 0


def _refuse_local_arguments(args: argparse.Namespace) -> None:
    from mesh_utils.errors import JobError

    for name in ("devices", "axes", "logs", "timeout", "grace"):
        if getattr(args, name) is not None:
            raise JobError(
                f"--{name} {getattr(args, name)} was given without --local. It says how a job "
                "runs on this machine. Pass --local N with it, or leave it out."
            )


def _launch_here(args: argparse.Namespace, job: JobConfig) -> int:
    import tempfile
    from pathlib import Path

    from mesh_utils.errors import JobError
    from mesh_utils.job import read_yaml
    from mesh_utils.launch.local import local_plan
    from mesh_utils.launch.text import dns_name
    from xla_dtensor.cli.launch_local import LocalRun, local_environment

    if args.launcher or args.image or args.option:
        raise JobError(
            "--local was given with --with, --image or --option. It starts processes on this "
            "machine, without launcher and image. Leave them out, or leave out --local."
        )
    axes = None if args.axes is None else read_yaml(args.axes, "--axes")
    plan = local_plan(job, args.local, 2 if args.devices is None else args.devices, axes)
    words, env = _words(args.words, job), _pairs(args.env, "--env")
    sizes = " ".join(map(str, plan.axes))
    title = f"{plan.processes} processes x {plan.devices} CPU devices, {sizes}"
    print(f"job {job.name}: {title}", file=sys.stderr)
    if args.only_print:
        for index in range(plan.processes):
            here = local_environment(job, plan, index, "127.0.0.1:PORT", env)
            pairs = [f"{name}={shlex.quote(value)}" for name, value in here.items()]
            print(" ".join([*pairs, shlex.join(words)]))
        return 0
    logs = args.logs or tempfile.mkdtemp(prefix=f"{dns_name(job.name)}-")
    run = LocalRun(
        job,
        plan,
        words,
        logs=Path(logs),
        env=env,
        grace_seconds=args.grace,
        timeout_seconds=args.timeout,
    )
    status = run.run()
    print(f"job {job.name} {run.reason}", file=sys.stderr)
    if run.last_lines:
        print("its last lines:", *run.last_lines, sep="\n    ", file=sys.stderr)
    return status


def _words(command: Sequence[str] | None, job: JobConfig) -> list[str]:
    from mesh_utils.errors import JobError

    if not command and job.run.command:
        return list(job.run.command)
    if not command:
        print(f"note: no --command, {shlex.join(_DEFAULT_COMMAND)} stands for it", file=sys.stderr)
        return list(_DEFAULT_COMMAND)
    if len(command) > 1:
        return list(command)
    try:
        return shlex.split(command[0])
    except ValueError as error:
        raise JobError(
            f"--command {command[0]!r} was given. It is no line of shell: {error}. "
            "Pass the words one by one, or close the quotes."
        ) from None


def _image(args: argparse.Namespace, job: JobConfig) -> str | None:
    if args.image is None and job.run.image is None and args.launcher in (None, "jobset"):
        print(f"note: no --image, {_DEFAULT_IMAGE} stands for it", file=sys.stderr)
        return _DEFAULT_IMAGE
    return args.image


def _pairs(options: Sequence[str], argument: str) -> dict[str, str]:
    from mesh_utils.errors import JobError

    pairs: dict[str, str] = {}
    for option in options:
        name, equals, value = option.partition("=")
        if not equals or not name.isidentifier():
            raise JobError(
                f"{argument} {option!r} was given. It names nothing. Pass such as {argument} "
                "NAME=VALUE."
            )
        pairs[name] = value
    return pairs
