"""What the commands have in common: how a topology is named, and how a refusal is said."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mesh_utils import Topology

__all__ = ["add_topology_arguments", "read_topology", "run_or_refuse"]

REFUSED = 2
"""The exit status of a question that cannot be answered, as for wrong arguments."""

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


def read_topology(asked: argparse.Namespace, num_slices: int | None = None) -> Topology:
    """Makes the topology that was named.

    Args:
        asked: The arguments.
        num_slices: How many slices, where neither the name nor ``--slices`` says.

    Returns:
        The topology.

    Raises:
        MeshError: There is none of that name.
    """
    from mesh_utils import Topology
    from mesh_utils.topology_name import read_topology_name

    slices = asked.slices
    if slices is None and read_topology_name(asked.topology).num_slices is None:
        slices = num_slices
    return Topology.parse(
        asked.topology,
        num_slices=slices,
        wrap=_wrap(asked.wrap),
        twist=asked.twist,
        allow_unreal=asked.allow_unreal,
    )


def run_or_refuse(
    command: Callable[[argparse.Namespace], None],
) -> Callable[[argparse.Namespace], int]:
    """Makes a command say in words what it refuses, without a traceback.

    Args:
        command: What to do; it may raise MeshError, or OSError for files.

    Returns:
        The same, returning the exit status: 0, or 2 after a refusal.
    """

    def run(asked: argparse.Namespace) -> int:
        from mesh_utils.errors import MeshError

        try:
            command(asked)
        except MeshError as error:
            text = str(error)
            for python, option in _OPTIONS:
                text = text.replace(python, option)
            print(f"error: {text}", file=sys.stderr)
            return REFUSED
        except OSError as error:
            print(
                f"error: The file {str(error.filename)!r} was asked for. The system says: "
                f"{error.strerror}. Pass a path that can be opened.",
                file=sys.stderr,
            )
            return REFUSED
        return 0

    return run


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
