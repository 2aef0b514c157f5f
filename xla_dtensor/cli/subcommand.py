"""What the commands have in common: how a topology is named, and how a refusal is said."""

from __future__ import annotations

import argparse
import json
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mesh_utils import JobConfig, Topology

__all__ = [
    "add_env",
    "add_topology_arguments",
    "fits_status",
    "gigabytes_per_second",
    "json_number",
    "load_job",
    "read_topology",
    "run_or_refuse",
    "table",
]


# ----------------------------------------------------------------------- python -m xla_dtensor env
#
# What is installed and which runtime works.

_DEFAULT_TIME_LIMIT_SECONDS = 120.0


def add_env(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command ``env``.

    Args:
        commands: The commands of the parser.
    """
    env = commands.add_parser(
        "env",
        help="show what is installed, start each runtime, say what is wrong and what to install",
        description=(
            "Shows versions, conflicts and the runtime that would be chosen, and starts each "
            "runtime in a process of its own. Exit status 0 if at least one of them works, else 1."
        ),
    )
    env.add_argument("--json", action="store_true", help="print JSON instead of text")
    env.add_argument(
        "--runtime",
        metavar="NAME",
        help="start only this runtime, as get_runtime(NAME) would",
    )
    env.add_argument(
        "--time-limit",
        type=_seconds,
        default=_DEFAULT_TIME_LIMIT_SECONDS,
        metavar="SECONDS",
        help="how long a runtime may take to start (default: %(default)g)",
    )
    env.set_defaults(command=_env)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < math.inf:
        raise ValueError(f"{text} is no time limit")
    return seconds


def _env(args: argparse.Namespace) -> int:
    from xla_dtensor.cli.env import examine, to_text

    diagnosis = examine(args.runtime, time_limit_seconds=args.time_limit)
    print(json.dumps(diagnosis.to_dict(), indent=1) if args.json else to_text(diagnosis))
    return 0 if diagnosis.works else 1


# ---------------------------------------------------------------- What the commands have in common

DOES_NOT_FIT, REFUSED = 1, 2
"""Exit statuses: of a plan that does not fit, and of a question that cannot be answered, as for
wrong arguments."""

_OPTIONS = (
    ("allow_unreal=True", "--allow-unreal"),
    ("twist=False", "--no-twist"),
    ("twist=True", "--twist"),
    ("with wrap=.", "with --wrap."),
)
"""What messages for Python say, and what it is on the command line."""


def add_topology_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the arguments that name a topology.

    Args:
        command: The command.
    """
    command.add_argument(
        "topology",
        metavar="TOPOLOGY",
        help="v5p-128, v5litepod-16, v5p:4x4x8, v5p:4x4x8_twisted, 4xv5e:16x16, h100-64, ...",
    )
    command.add_argument("--slices", type=int, metavar="N", help="how many such slices")
    command.add_argument(
        "--wrap",
        metavar="DIMS",
        help="which dims wrap, such as xy, or none: where no table knows (v2 and v3 below the pod)",
    )
    command.add_argument(
        "--twist",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="whether a slice is a twisted torus, where its name does not say",
    )
    command.add_argument(
        "--allow-unreal", action="store_true", help="also take slices that nobody offers"
    )


def read_topology(args: argparse.Namespace, num_slices: int | None = None) -> Topology:
    """Makes the topology that was named.

    Args:
        args: The arguments.
        num_slices: How many slices, where neither the name nor ``--slices`` says.

    Returns:
        The topology.

    Raises:
        MeshError: There is none of that name.
    """
    from mesh_utils import Topology
    from mesh_utils.devices import read_topology_name

    slices = args.slices
    if slices is None and read_topology_name(args.topology).num_slices is None:
        slices = num_slices
    return Topology.parse(
        args.topology,
        num_slices=slices,
        wrap=_wrap(args.wrap),
        twist=args.twist,
        allow_unreal=args.allow_unreal,
    )


def load_job(name: str) -> JobConfig:
    """Reads a job, and says on stderr what it warns of.

    Args:
        name: A job file, or a name in tpu_configs/jobs.

    Raises:
        JobError: There is none, or it cannot be read.
    """
    from mesh_utils.job import JobConfig

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        job = JobConfig.load(name)
    for warning in caught:
        print(f"warning: {warning.message}", file=sys.stderr)
    return job


def fits_status(fits: bool | None) -> int:
    """The exit status of a plan or a report.

    Args:
        fits: Whether the step fits; None if nobody knows.

    Returns:
        1 if it does not fit, else 0.

    Example:
        >>> fits_status(True), fits_status(None), fits_status(False)
        (0, 0, 1)
    """
    return DOES_NOT_FIT if fits is False else 0


def run_or_refuse(
    command: Callable[[argparse.Namespace], int],
) -> Callable[[argparse.Namespace], int]:
    """Makes a command say in words what it refuses, without a traceback.

    Args:
        command: What to do, returning the exit status. It may raise errors of meshes, evidence and
            reports, or OSError for files.

    Returns:
        The same; 2 after a refusal.
    """

    def run(args: argparse.Namespace) -> int:
        try:
            return command(args)
        except _refusals() as error:
            text = str(error)
            for python, option in _OPTIONS:
                text = text.replace(python, option)
        except (OSError, UnicodeDecodeError) as error:
            name = getattr(error, "filename", None)
            why = getattr(error, "strerror", None) or error
            text = (
                f"The file {str(name)!r} was asked for. The system says: {why}. "
                "Pass a path that can be opened."
            )
        print(f"error: {text}", file=sys.stderr)
        return REFUSED

    return run


def _refusals() -> tuple[type[Exception], ...]:
    from mesh_utils.errors import MeshError
    from xla_dtensor.report import EvidenceError, HloError, ReportError

    return MeshError, EvidenceError, HloError, ReportError


def _wrap(dims: str | None) -> tuple[bool, bool, bool] | None:
    from mesh_utils.errors import TopologyError

    if dims is None:
        return None
    letters = "" if dims == "none" else dims
    if not set(letters) <= set("xyz") or len(set(letters)) != len(letters) or not dims:
        raise TopologyError(
            f"A topology was asked for with --wrap {dims}. That is no list of dims. "
            "Pass the letters of those that wrap, such as --wrap xy, or --wrap none."
        )
    return ("x" in letters, "y" in letters, "z" in letters)


# -------------------------------------------------------------------------------------------- Table
#
# Rows of words with their columns aligned, and numbers with units, as the commands print them.


def table(rows: Iterable[Sequence[str]], header: Sequence[str] = ()) -> list[str]:
    """Aligns rows.

    Args:
        rows: Cells, equally many in each row.
        header: What stands above them.

    Returns:
        Lines, two spaces further to the right; folded only where the terminal is narrower.
    """
    from xla_dtensor.report.render import Table, table_lines, terminal_width

    cells = tuple(map(tuple, rows))
    names = tuple(header) or ("",) * len(cells[0] if cells else ())
    width = terminal_width() if sys.stdout.isatty() else None
    return table_lines(Table(names, cells), "  ", width)


def gigabytes_per_second(value: float) -> str:
    """Writes a bandwidth.

    Args:
        value: Bytes per second.

    Returns:
        GB/s, of 10^9 bytes; TB/s from 10 000 GB/s on.

    Example:
        >>> gigabytes_per_second(6.25e9), gigabytes_per_second(51.2e12)
        ('6.25 GB/s', '51.2 TB/s')
    """
    return f"{value / 1e12:.4g} TB/s" if value >= 1e13 else f"{value / 1e9:.4g} GB/s"


def json_number(value: float | None) -> float | None:
    """Makes a number fit for JSON, which knows no infinity.

    Args:
        value: A number.

    Returns:
        The number; None for inf, nan and None.

    Example:
        >>> json_number(1.5), json_number(float("inf"))
        (1.5, None)
    """
    return value if value is not None and math.isfinite(value) else None
