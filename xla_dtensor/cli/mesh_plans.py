"""The meshes that ``python -m xla_dtensor mesh`` compares: the search's and JAX's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mesh_utils import Assignment, AxisReport, Mesh, MeshError, Topology, assign, axis_reports
from mesh_utils.assignment import RunnerUp, mesh_score
from mesh_utils.jax_drop_in import create_device_mesh, create_hybrid_device_mesh
from mesh_utils.network import COLLECTIVES
from xla_dtensor.cli.table import json_number

__all__ = ["Plan", "Plans", "make_plans"]


@dataclass(frozen=True)
class Plan:
    """A mesh and what its axes get, in the model.

    Attributes:
        mesh: The mesh.
        reports: What each axis gets.
        score: The weighted mean bandwidth, in links.
        note: How it was made.
    """

    mesh: Mesh
    reports: tuple[AxisReport, ...]
    score: float
    note: str

    def to_dict(self) -> dict[str, Any]:
        """Writes it for JSON.

        Returns:
            The score, and each axis with its bandwidths; numbers that are infinite are None.
        """
        axes = [_axis_dict(report) for report in self.reports]
        return {"score_links": json_number(self.score), "note": self.note, "axes": axes}


@dataclass(frozen=True)
class Plans:
    """The meshes side by side.

    Attributes:
        found: The search's mesh, with its reasons and the runner-up.
        search: The same as a plan.
        jax: JAX's mesh; a sentence if it has none.
    """

    found: Assignment
    search: Plan
    jax: Plan | str

    def mesh_of(self, strategy: str) -> Plan | str:
        """The mesh of a strategy.

        Args:
            strategy: "search" or "jax".

        Returns:
            Its plan, or why there is none.
        """
        return self.jax if strategy == "jax" else self.search

    def to_dict(self, strategy: str) -> dict[str, Any]:
        """Writes both for JSON.

        Args:
            strategy: Whose device ids to give.

        Returns:
            What was asked, both meshes, the runner-up, reasons, and the device ids.
        """
        found, chosen = self.found, self.mesh_of(strategy)
        columns = (found.axis_names, found.ici_mesh_shape, found.dcn_mesh_shape, found.weights)
        keys = ("name", "ici", "dcn", "weight")
        return {
            "modelled": True,
            "topology": found.topology.name,
            "axes": [dict(zip(keys, row, strict=True)) for row in zip(*columns, strict=True)],
            "strategy": strategy,
            "bound_links": json_number(found.bound),
            "is_exact": found.is_exact,
            "choices": found.choices,
            "search": self.search.to_dict(),
            "jax": {"refused": self.jax} if isinstance(self.jax, str) else self.jax.to_dict(),
            "runner_up": _runner_up(found.runner_up),
            "reasons": list(found.reasons),
            "device_ids": None if isinstance(chosen, str) else chosen.mesh.device_ids.tolist(),
        }


def make_plans(
    topology: Topology,
    names: Sequence[str],
    ici: Sequence[int],
    dcn: Sequence[int],
    weights: Mapping[str, float] | None,
) -> Plans:
    """Makes the meshes.

    Args:
        topology: The chips.
        names: The axes.
        ici: The size of each inside a slice; one may be -1.
        dcn: The size of each across slices; one may be -1.
        weights: Bytes that each axis gathers.

    Returns:
        Both.

    Raises:
        MeshError: Sizes that do not fit, or weights that are none.
    """
    found = assign(topology, ici, dcn, axis_names=names, weights=weights)
    search = Plan(found.mesh, found.reports, found.score, "search")
    return Plans(found, search, _jax_plan(found))


def _jax_plan(found: Assignment) -> Plan | str:
    """JAX's mesh, with split dims only where it makes none without."""
    refusals: list[str] = []
    for split in (False, True):
        try:
            devices = _jax_devices(found, split)
        except MeshError as error:  # JAX is not there
            return f"JAX's mesh is not known: {str(error).split('. ')[1]}"
        except Exception as error:  # JAX raises five types, some by accident
            lines = str(error).splitlines() or [""]
            refusals.append(f"{type(error).__name__}: {lines[0][:120]}")
            continue
        note = "allow_split_physical_axes=True" if split else "default arguments"
        if refusals:
            note += f"; by default it raises {refusals[0].split(':')[0]}"
        ids = [[device.id for device in devices.reshape(-1)]]
        mesh = Mesh(ids, found.mesh_shape, found.axis_names)
        reports = axis_reports(found.topology, mesh, network=found.network)
        links = [report.links["all-gather"] for report in reports]
        return Plan(mesh, reports, mesh_score(found.mesh_shape, found.weights, links), note)
    return f"JAX raises {refusals[-1].rstrip('.')}"


def _jax_devices(found: Assignment, split: bool) -> Any:
    options: Any = {"strategy": "jax", "allow_split_physical_axes": split}
    if found.topology.num_slices == 1:
        return create_device_mesh(found.ici_mesh_shape, found.topology, **options)
    return create_hybrid_device_mesh(
        found.ici_mesh_shape, found.dcn_mesh_shape, found.topology, **options
    )


def _axis_dict(report: AxisReport) -> dict[str, Any]:
    link = report.link_bytes_per_second
    permute = None if link is None else json_number(report.shift_links * link)
    bandwidth: dict[str, Any] = {
        collective: {
            "links": json_number(report.links[collective]),
            "bytes_per_second": json_number(report.bytes_per_second(collective)),
            "fraction_of_bound": json_number(report.fraction(collective)),
        }
        for collective in COLLECTIVES
    }
    return {
        "name": report.axis,
        "size": report.size,
        "span": None if report.span is None else str(report.span)[5:-1],
        "strategy": report.strategy,
        "crosses_slices": report.crosses_slices,
        "bound_links": json_number(report.bound),
        "bandwidth": bandwidth,
        "permute": {
            "links": json_number(report.shift_links),
            "bytes_per_second": permute,
            "max_hops": report.max_hops,
        },
    }


def _runner_up(other: RunnerUp | None) -> dict[str, Any] | None:
    if other is None:
        return None
    return {
        "score_links": json_number(other.score),
        "spans": [str(span)[5:-1] for span in other.spans],
        "links": [json_number(links) for links in other.links],
    }
