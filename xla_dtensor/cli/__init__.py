"""The command line, ``python -m xla_dtensor``. It starts without torch, jax or torch_xla.

Each command is a file of its own, <command>.py, which imports what it needs when it runs.

Example:
    >>> main(["env", "--json"])  # doctest: +SKIP
    0
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from xla_dtensor import __version__
from xla_dtensor.cli.launch import add_launch
from xla_dtensor.cli.mesh import add_mesh, add_topology
from xla_dtensor.cli.plan import add_plan
from xla_dtensor.cli.report import add_diff, add_report
from xla_dtensor.cli.subcommand import add_env

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        arguments: Words of the command line; those of this process when None.

    Returns:
        The exit status.

    Raises:
        SystemExit: Wrong arguments, ``--help`` or ``--version``.
    """
    args = _parser().parse_args(arguments)
    return args.command(args)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m xla_dtensor",
        description="PyTorch's DTensor API, executed by XLA's SPMD partitioner.",
    )
    parser.add_argument("--version", action="version", version=f"xla_dtensor {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    add_env(commands)
    add_topology(commands)
    add_mesh(commands)
    add_launch(commands)
    add_plan(commands)
    add_report(commands)
    add_diff(commands)
    return parser
