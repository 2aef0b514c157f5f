"""``python -m xla_dtensor mesh v5e:16x16 --axes fsdp=64,tp=4``: the mesh, why, and a drawing."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

from xla_dtensor.cli.refusal import add_topology_arguments, read_topology, run_or_refuse

if TYPE_CHECKING:
    from mesh_utils import Topology

__all__ = ["add_mesh"]


def add_mesh(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command ``mesh``.

    Args:
        commands: The commands of the parser.
    """
    mesh = commands.add_parser(
        "mesh",
        help="find the mesh whose axes have the best links, beside JAX's, and draw it",
        description=(
            "Finds how the axes of a mesh should lie on a machine, says why, gives the bandwidth "
            "that each axis gets beside what it gets in JAX's mesh, and draws it. All bandwidths "
            "are modelled, not measured. No device is needed, and no torch; jax only for its mesh. "
            "Exit status 2 if there is no such mesh."
        ),
    )
    add_topology_arguments(mesh)
    mesh.add_argument(
        "--axes",
        required=True,
        metavar="NAME=SIZE,...",
        help="the axes inside a slice, from the least to the most network-hungry; one size may be "
        "-1, for what is left",
    )
    mesh.add_argument(
        "--dcn",
        metavar="NAME=SIZE,...",
        help="the axes, or parts of axes, across slices; without --slices their product says how "
        "many slices there are",
    )
    mesh.add_argument(
        "--weights",
        metavar="NAME=BYTES,...",
        help="bytes that each axis gathers, in any unit, 0 for axes left out (default: doubling "
        "from axis to axis)",
    )
    mesh.add_argument(
        "--strategy",
        choices=("search", "jax"),
        default="search",
        help="which mesh to explain and draw (default: %(default)s)",
    )
    mesh.add_argument("--draw", metavar="FILE", help="draw it to a file that ends in .svg")
    mesh.add_argument("--json", action="store_true", help="print JSON, with the device ids")
    mesh.set_defaults(command=run_or_refuse(_mesh))


def _mesh(asked: argparse.Namespace) -> None:
    from mesh_utils.drawing import check_format
    from mesh_utils.errors import MeshError
    from xla_dtensor.cli.mesh_plans import make_plans

    if asked.draw is not None:
        check_format(Path(asked.draw))
    axes = _sizes("--axes", asked.axes)
    dcn = {} if asked.dcn is None else _sizes("--dcn", asked.dcn)
    weights = None if asked.weights is None else _weights(asked.weights)
    product = math.prod(dcn.values())
    topology = read_topology(asked, product if dcn and product > 0 else None)
    _refuse_unknowns(topology, axes, dcn)
    # Axes that are only in --dcn need the network least: they come first.
    names = [*(name for name in dcn if name not in axes), *axes]
    plans = make_plans(
        topology,
        names,
        [axes.get(name, 1) for name in names],
        [dcn.get(name, 1) for name in names],
        weights,
    )
    drawn = plans.mesh_of(asked.strategy)
    if isinstance(drawn, str):
        raise MeshError(
            f"JAX's mesh of {plans.found.mesh.axes_text()} on {plans.found.topology.name} was "
            f"asked for. {drawn}. Pass --strategy search."
        )
    from mesh_utils.drawing import draw_mesh

    drawing = draw_mesh(plans.found.topology, drawn.mesh, plans.found.network)
    if asked.draw is not None:
        drawing.save(asked.draw)
    if asked.json:
        print(json.dumps(plans.to_dict(asked.strategy), indent=1))
        return
    from xla_dtensor.cli.mesh_text import plans_text

    print(plans_text(plans, asked.strategy, drawing))
    if asked.draw is not None:
        print(f"\ndrawn to {asked.draw}")


def _sizes(option: str, text: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for name, value in _pairs(option, text):
        if not value.removeprefix("-").isdecimal():
            _refuse(option, text, f"{value!r} is no size")
        sizes[name] = int(value)
    return sizes


def _weights(text: str) -> dict[str, float]:
    weights: dict[str, float] = {}
    for name, value in _pairs("--weights", text):
        try:
            weights[name] = float(value)
        except ValueError:
            _refuse("--weights", text, f"{value!r} is no number")
    return weights


def _pairs(option: str, text: str) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for part in text.split(","):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not name or not equals:
            _refuse(option, text, f"{part!r} has not the form NAME=NUMBER")
        if name in dict(pairs):
            _refuse(option, text, f"{name!r} is there twice")
        pairs.append((name, value))
    return pairs


def _refuse(option: str, text: str, why: str) -> None:
    from mesh_utils.errors import MeshError

    raise MeshError(
        f"A mesh was asked for with {option} {text}. {why[0].upper()}{why[1:]}. "
        f"Pass names with numbers, such as {option} fsdp=64,tp=4."
    )


def _refuse_unknowns(topology: Topology, axes: dict[str, int], dcn: dict[str, int]) -> None:
    from mesh_utils.errors import TopologyError

    text = ", ".join(f"{name}={size}" for name, size in axes.items())
    if topology.num_slices > 1 and not dcn:
        raise TopologyError(
            f"A mesh of {text} was asked for on {topology.num_slices} slices, {topology.name}. "
            "Nothing says which axis runs across slices, over DCN. "
            f"Pass such as --dcn data={topology.num_slices}."
        )
    if topology.wrap is None:
        raise TopologyError(
            f"A mesh of {text} was asked for on {topology.name}. Which dims of it wrap is not "
            "known, and that decides the bandwidth of every axis. "
            "Pass --wrap xy for a torus, or --wrap none for a mesh."
        )
