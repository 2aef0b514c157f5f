"""The command ``launch``: prints what starts a job file somewhere else.

Example:
    >>> main = ["launch", "llama3_70b_v5p", "--with", "queued", "--command", "python", "train.py"]
"""

from __future__ import annotations

import argparse
import shlex
import sys
import warnings
from collections.abc import Sequence

from xla_dtensor.cli_refusal import run_or_refuse

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
        help="print what starts a job file: a JobSet, xpk, queued resources, torchrun or Slurm",
        description=(
            "Fills a launcher's template from a job file and prints it. Nothing is started. "
            "docs/jobs.md describes job files and launchers."
        ),
    )
    launch.add_argument("job", metavar="JOB", help="a job file, or a name in tpu_configs/jobs")
    launch.add_argument(
        "--with",
        dest="launcher",
        default="jobset",
        metavar="LAUNCHER",
        help="jobset, xpk, queued, torchrun or slurm (default: %(default)s)",
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
            f"(default: {' '.join(_DEFAULT_COMMAND)})"
        ),
    )
    launch.set_defaults(command=run_or_refuse(_launch))


def _launch(asked: argparse.Namespace) -> None:
    from mesh_utils.config import JobConfig
    from mesh_utils.launch import render

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        job = JobConfig.load(asked.job)
    for warning in found:
        print(f"warning: {warning.message}", file=sys.stderr)
    text = render(
        job,
        asked.launcher,
        command=_words(asked.words),
        image=_image(asked),
        env=_pairs(asked.env, "--env"),
        **_pairs(asked.option, "--option"),
    )
    print(text, end="")


def _words(given: Sequence[str] | None) -> list[str]:
    from mesh_utils.errors import JobError

    if not given:
        print(f"note: no --command, {shlex.join(_DEFAULT_COMMAND)} stands for it", file=sys.stderr)
        return list(_DEFAULT_COMMAND)
    if len(given) > 1:
        return list(given)
    try:
        return shlex.split(given[0])
    except ValueError as error:
        raise JobError(
            f"--command {given[0]!r} was given. It is no line of shell: {error}. "
            "Pass the words one by one, or close the quotes."
        ) from None


def _image(asked: argparse.Namespace) -> str | None:
    if asked.image is None and asked.launcher == "jobset":
        print(f"note: no --image, {_DEFAULT_IMAGE} stands for it", file=sys.stderr)
        return _DEFAULT_IMAGE
    return asked.image


def _pairs(given: Sequence[str], argument: str) -> dict[str, str]:
    from mesh_utils.errors import JobError

    pairs: dict[str, str] = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not equals or not name.isidentifier():
            raise JobError(
                f"{argument} {each!r} was given. It names nothing. Pass such as {argument} "
                "NAME=VALUE."
            )
        pairs[name] = value
    return pairs
