"""Which XLA flags a plan compiles with, and whether the libtpu at hand takes them.

A job's sets of flags that are slow to compile are left out, unless ``--all-flags`` asks for what
``launch`` runs. What is left out, and which sets nobody has tried with this libtpu, comes first; a
set that this libtpu refused, or a libtpu that does not belong to the JAX beside it, is refused
before anything is compiled.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from typing import TYPE_CHECKING

from xla_dtensor.plan.aot import python_path
from xla_dtensor.versions import Installed, read_installed, release, satisfies

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from mesh_utils import JobConfig

__all__ = ["check_at_hand", "flag_lines", "flagged", "reports_too_much"]

_ASK = (
    "import json; from xla_dtensor.versions import read_installed as read; found = read(); "
    "print(json.dumps([dict(found.versions), dict(found.libtpu_pins)]))"
)


def flagged(job: JobConfig, args: argparse.Namespace) -> JobConfig:
    """Returns the job with the flags that are to be compiled.

    Args:
        job: The job.
        args: The arguments.

    Returns:
        The job without the sets of ``--without-flags``, and without slow ones.

    Raises:
        JobError: It does not take a set of ``--without-flags``.
    """
    from xla_dtensor.plan.search import without_flags

    return without_flags(job, [*dict.fromkeys([*args.without_flags, *_left_out(job, args)])])


def flag_lines(job: JobConfig, args: argparse.Namespace) -> Iterator[str]:
    """Says what is left out, and what nobody has tried; checks the flags on the way.

    Args:
        job: The job.
        args: The arguments.

    Yields:
        Lines for people.

    Raises:
        JobError: The libtpu at hand refused a set of the job, or does not belong to its JAX.
    """
    from mesh_utils.xla_flags import flag_table

    for name in _left_out(job, args):
        slow = flag_table().sets[name].slow
        assert slow is not None
        yield (
            f"XLA flags left out: {name}, slow to compile ({slow.program}: {slow.seconds:g} CPU "
            f"seconds, {slow.without:g} without). --all-flags compiles what launch runs."
        )
    installed = _at_hand(args.python)
    yield from check_at_hand(flagged(job, args), installed)


def check_at_hand(job: JobConfig, installed: Installed) -> list[str]:
    """Checks the libtpu that will compile: that it belongs to its JAX, and takes the job's flags.

    Args:
        job: The job, with the flags that are to be compiled.
        installed: What is installed where it is compiled.

    Returns:
        Notes for people.

    Raises:
        JobError: It does not.
    """
    from mesh_utils.errors import JobError
    from mesh_utils.xla_flags import check_taken

    libtpu, jax = installed.version("libtpu"), installed.version("jax")
    pin = installed.libtpu_pins.get("jax")
    if libtpu is None or jax is None or job.chip.platform != "tpu":
        return []
    if pin is not None and not satisfies(libtpu, pin):
        raise JobError(
            f"Job {job.name!r} was to be compiled with jax {jax} and libtpu {libtpu}. They do not "
            f"belong together: this jax pins libtpu{pin}. "
            f"Install it with pip install 'jax[tpu]=={jax}'."
        )
    args = f"Job {job.name!r} was to be compiled with libtpu {libtpu}"
    return [f"note: {note}" for note in check_taken(job.xla_flags(), job.chip, libtpu, args)]


def reports_too_much(python: str | None) -> bool:
    """Tells whether libtpu gives a program that does not fit, where `reporting_job` asks for one.

    From 0.0.48.1 on it refuses each, so that compiling once more is for nothing.

    Args:
        python: The interpreter that compiles; None for this.

    Returns:
        Whether it may.
    """
    libtpu = _at_hand(python).version("libtpu")
    return libtpu is None or release(libtpu) < (0, 0, 48)


def _left_out(job: JobConfig, args: argparse.Namespace) -> list[str]:
    from mesh_utils.xla_flags import flag_table

    names = dict.fromkeys(flag.flag_set for flag in job.xla_flags() if flag.flag_set)
    slow = [name for name in names if flag_table().sets[name].slow is not None]
    return [] if args.all_flags else [name for name in slow if name not in args.without_flags]


def _at_hand(python: str | None) -> Installed:
    """What is installed here, or where ``--python`` is, seen as the compiling process sees it."""
    if python is None:
        return read_installed()
    process = subprocess.run(
        [python, "-c", _ASK],
        env={**os.environ, "PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode:  # the compiling process will say what is wrong with it
        return replace(read_installed(), versions={}, libtpu_pins={})
    versions, pins = json.loads(process.stdout)
    return Installed(versions, pins)
