"""``python -m xla_dtensor topology v5p-128``: what a machine is, in words or as JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from xla_dtensor.cli.refusal import add_topology_arguments, read_topology, run_or_refuse

if TYPE_CHECKING:
    from mesh_utils import Chip, Figure, Topology

__all__ = ["add_topology", "topology_facts"]

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


def _topology(asked: argparse.Namespace) -> None:
    found = read_topology(asked)
    facts = topology_facts(found)
    if asked.json:
        print(json.dumps(facts, indent=1))
        return
    from xla_dtensor.cli.topology_text import topology_text

    print(topology_text(facts))


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
        "peak_flops": {name: _figure(each) for name, each in chip.peak_flops.items()},
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
    from mesh_utils.drawing_links import bisection_links, slice_links

    network = Network.of(topology)
    cut, link = bisection_links(network), chip.link_bytes_per_second
    facts["links_per_slice"] = int(slice_links(network).sum())
    facts["bisection_links"] = cut
    facts["bisection_bandwidth"] = None if link is None else cut * link
    return facts


def _names_of_chip(topology: Topology, chip: Chip) -> dict[str, Any]:
    from mesh_utils.topology_name import shape_text

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
    from mesh_utils.topology_name import shape_text

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
        "others": [{"value": other.value, "source": other.source} for other in figure.others],
    }
