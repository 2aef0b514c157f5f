"""``python -m xla_dtensor mesh v5e:16x16 --axes fsdp=64,tp=4``: the mesh, why, and a drawing.

``python -m xla_dtensor topology v5p-128``: what a machine is, in words or as JSON.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xla_dtensor.cli.subcommand import add_topology_arguments, read_topology, run_or_refuse

if TYPE_CHECKING:
    from mesh_utils import Chip, Figure, Topology

__all__ = ["add_mesh", "add_topology", "topology_facts"]


# ---------------------------------------- python -m xla_dtensor mesh v5e:16x16 --axes fsdp=64,tp=4


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


def _mesh(args: argparse.Namespace) -> int:
    from mesh_utils.draw import check_format
    from mesh_utils.errors import MeshError
    from xla_dtensor.cli.mesh_text import make_plans

    if args.draw is not None:
        check_format(Path(args.draw))
    axes = _sizes("--axes", args.axes)
    dcn = {} if args.dcn is None else _sizes("--dcn", args.dcn)
    weights = None if args.weights is None else _weights(args.weights)
    product = math.prod(dcn.values())
    topology = read_topology(args, product if dcn and product > 0 else None)
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
    drawn = plans.mesh_of(args.strategy)
    if isinstance(drawn, str):
        raise MeshError(
            f"JAX's mesh of {plans.found.mesh.axes_text()} on {plans.found.topology.name} was "
            f"asked for. {drawn}. Pass --strategy search."
        )
    from mesh_utils.draw import draw_mesh

    drawing = draw_mesh(plans.found.topology, drawn.mesh, plans.found.network)
    if args.draw is not None:
        drawing.save(args.draw)
    if args.json:
        print(json.dumps(plans.to_dict(args.strategy), indent=1))
        return 0
    from xla_dtensor.cli.mesh_text import plans_text

    print(plans_text(plans, args.strategy, drawing))
    if args.draw is not None:
        print(f"\ndrawn to {args.draw}")
    return 0


def _sizes(option: str, text: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for name, size in _pairs(option, text):
        if not size.removeprefix("-").isdecimal():
            _refuse(option, text, f"{size!r} is no size")
        sizes[name] = int(size)
    return sizes


def _weights(text: str) -> dict[str, float]:
    weights: dict[str, float] = {}
    for name, weight in _pairs("--weights", text):
        try:
            weights[name] = float(weight)
        except ValueError:
            _refuse("--weights", text, f"{weight!r} is no number")
    return weights


def _pairs(option: str, text: str) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for part in text.split(","):
        name, equals, number = (word.strip() for word in part.partition("="))
        if not name or not equals:
            _refuse(option, text, f"{part!r} has not the form NAME=NUMBER")
        if name in dict(pairs):
            _refuse(option, text, f"{name!r} is there twice")
        pairs.append((name, number))
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


# ---------------------------------------------------------- python -m xla_dtensor topology v5p-128

_NEAREST = 3
"""Real slices that are named beside the one asked for."""


def add_topology(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command ``topology``.

    Args:
        commands: The commands of the parser.
    """
    topology = commands.add_parser(
        "topology",
        help="show what a slice is: chips, hosts, links, wraps, memory, speed, names",
        description=(
            "Shows what is known of a TPU slice or of GPU nodes, and what was assumed. No device, "
            "no torch and no jax is needed. Exit status 2 if there is no such machine."
        ),
    )
    add_topology_arguments(topology)
    topology.add_argument(
        "--json", action="store_true", help="print JSON, with the source of every figure"
    )
    topology.set_defaults(command=run_or_refuse(_topology))


def _topology(args: argparse.Namespace) -> int:
    facts = topology_facts(read_topology(args))
    if args.json:
        print(json.dumps(facts, indent=1))
        return 0
    from xla_dtensor.cli.mesh_text import topology_text

    print(topology_text(facts))
    return 0


def topology_facts(topology: Topology) -> dict[str, Any]:
    """Gathers what is known of a topology.

    Args:
        topology: The topology, of a known chip.

    Returns:
        Facts for JSON. Figures are ``{"value", "source", "note", "reason", "others"}``, in bytes,
        bytes per second and FLOP per second; a value that no source gives is None.

    Raises:
        ValueError: The chip is not known.

    Example:
        >>> from mesh_utils import Topology
        >>> topology_facts(Topology.parse("v5p-128"))["hosts"]
        16
    """
    chip = topology.chip
    if chip is None:
        raise ValueError(f"{topology!r} has no chip whose facts are known.")
    return {
        "name": topology.name,
        "title": chip.title,
        "platform": chip.platform,
        "slices": topology.num_slices,
        "chips": topology.num_chips,
        "cores": topology.num_cores,
        "devices": topology.num_devices,
        "hosts": topology.num_hosts,
        "shape": list(topology.shape[: max(chip.torus_rank, 1)]),
        "torus_rank": chip.torus_rank,
        "chips_per_host": list(topology.chips_per_host[: max(chip.torus_rank, 1)]),
        "wrap": None if topology.wrap is None else list(topology.wrap[: chip.torus_rank]),
        "twist": topology.twist,
        "is_real": topology.is_real,
        "ici": _ici(topology, chip),
        "dcn_bandwidth_per_chip": _figure(chip.figure("dcn_bandwidth_per_chip")),
        "hbm": _figure(chip.figure("hbm")),
        "usable_hbm_per_device": _figure(chip.figure("usable_hbm_per_device")),
        "hbm_bandwidth": _figure(chip.figure("hbm_bandwidth")),
        "peak_flops": {name: _figure(figure) for name, figure in chip.peak_flops.items()},
        "names": _names_of_chip(topology, chip),
        "nearest": _nearest(topology, chip),
        "assumptions": list(topology.assumptions),
    }


def _ici(topology: Topology, chip: Chip) -> dict[str, Any]:
    """The fast network of a slice; of GPUs NVLink, where links are ports to a switch."""
    facts: dict[str, Any] = {
        "links_per_chip": _figure(chip.figure("ici_links")),
        "link_bandwidth": _figure(chip.figure("ici_link_bandwidth")),
        "links_per_slice": None,
        "bisection_links": None,
        "bisection_bandwidth": None,
    }
    if topology.wrap is None or chip.torus_rank == 0:
        return facts
    from mesh_utils import Network
    from mesh_utils.draw import bisection_links, slice_links

    network = Network.of(topology)
    cut, link = bisection_links(network), chip.link_bytes_per_second
    facts["links_per_slice"] = int(slice_links(network).sum())
    facts["bisection_links"] = cut
    facts["bisection_bandwidth"] = None if link is None else cut * link
    return facts


def _names_of_chip(topology: Topology, chip: Chip) -> dict[str, Any]:
    from mesh_utils.devices import shape_text

    shape = shape_text(topology.shape, chip.torus_rank)
    libtpu = None
    if chip.libtpu_name is not None:
        libtpu = f"{chip.libtpu_name}:{shape}{'_twisted' if topology.twist else ''}"
    return {
        "cloud": topology.cloud_name,
        "gke_accelerator": chip.gke_name,
        "gke_topology": shape if chip.torus_rank else None,
        "machine_types": list(chip.machine_types),
        "libtpu": libtpu,
        "jax_device_kinds": list(chip.device_kinds),
    }


def _nearest(topology: Topology, chip: Chip) -> list[str]:
    from mesh_utils.devices import shape_text

    if chip.torus_rank == 0:
        return []
    near = [s for s in chip.slices.nearest(topology.shape, _NEAREST + 1) if s != topology.shape]
    return [f"{chip.name}:{shape_text(shape, chip.torus_rank)}" for shape in near[:_NEAREST]]


def _figure(figure: Figure) -> Mapping[str, Any]:
    """A figure and who says it."""
    return {
        "value": figure.value,
        "source": figure.source,
        "note": figure.note,
        "reason": figure.reason,
        "others": [
            {"value": alternative.value, "source": alternative.source}
            for alternative in figure.others
        ],
    }
