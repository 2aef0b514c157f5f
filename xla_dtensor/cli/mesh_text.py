"""The meshes of ``python -m xla_dtensor mesh`` as text.

The meshes that ``python -m xla_dtensor mesh`` compares: the search's and JAX's.

The facts of a topology as text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mesh_utils import Assignment, AxisReport, Mesh, MeshError, Topology, assign, axis_reports
from mesh_utils.assignment import RunnerUp, mesh_score
from mesh_utils.draw import Drawing
from mesh_utils.jax_compat import create_device_mesh, create_hybrid_device_mesh
from mesh_utils.network import COLLECTIVES
from xla_dtensor.cli.subcommand import gigabytes_per_second, json_number, table

__all__ = ["make_plans", "plans_text", "topology_text"]


# --------------------------------------------- The meshes that python -m xla_dtensor mesh compares


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
        assignment, chosen = self.found, self.mesh_of(strategy)
        columns = (
            assignment.axis_names,
            assignment.ici_mesh_shape,
            assignment.dcn_mesh_shape,
            assignment.weights,
        )
        keys = ("name", "ici", "dcn", "weight")
        return {
            "modelled": True,
            "topology": assignment.topology.name,
            "axes": [dict(zip(keys, row, strict=True)) for row in zip(*columns, strict=True)],
            "strategy": strategy,
            "bound_links": json_number(assignment.bound),
            "is_exact": assignment.is_exact,
            "choices": assignment.choices,
            "search": self.search.to_dict(),
            "jax": {"refused": self.jax} if isinstance(self.jax, str) else self.jax.to_dict(),
            "runner_up": _runner_up(assignment.runner_up),
            "reasons": list(assignment.reasons),
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
    assignment = assign(topology, ici, dcn, axis_names=names, weights=weights)
    search = Plan(assignment.mesh, assignment.reports, assignment.score, "search")
    return Plans(assignment, search, _jax_plan(assignment))


def _jax_plan(assignment: Assignment) -> Plan | str:
    """JAX's mesh, with split dims only where it makes none without."""
    refusals: list[str] = []
    for split in (False, True):
        try:
            devices = _jax_devices(assignment, split)
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
        mesh = Mesh(ids, assignment.mesh_shape, assignment.axis_names)
        reports = axis_reports(assignment.topology, mesh, network=assignment.network)
        links = [report.links["all-gather"] for report in reports]
        return Plan(
            mesh, reports, mesh_score(assignment.mesh_shape, assignment.weights, links), note
        )
    return f"JAX raises {refusals[-1].rstrip('.')}"


def _jax_devices(assignment: Assignment, split: bool) -> Any:
    options: Any = {"strategy": "jax", "allow_split_physical_axes": split}
    if assignment.topology.num_slices == 1:
        return create_device_mesh(assignment.ici_mesh_shape, assignment.topology, **options)
    return create_hybrid_device_mesh(
        assignment.ici_mesh_shape, assignment.dcn_mesh_shape, assignment.topology, **options
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


def _runner_up(runner_up: RunnerUp | None) -> dict[str, Any] | None:
    if runner_up is None:
        return None
    return {
        "score_links": json_number(runner_up.score),
        "spans": [str(span)[5:-1] for span in runner_up.spans],
        "links": [json_number(links) for links in runner_up.links],
    }


# ------------------------------------------------ The meshes of python -m xla_dtensor mesh as text


def plans_text(plans: Plans, strategy: str, drawing: Drawing) -> str:
    """Writes the meshes.

    Args:
        plans: The meshes.
        strategy: Which of them is drawn: "search" or "jax".
        drawing: Its drawing.

    Returns:
        Lines: the reasons, the bandwidths of both meshes, and the drawing.
    """
    return "\n".join(_lines(plans, strategy, drawing))


def _lines(plans: Plans, strategy: str, drawing: Drawing) -> Iterator[str]:
    assignment = plans.found
    yield f"{assignment.topology.name}: {assignment.mesh.axes_text()}"
    yield from (f"  {line}" for line in _reasons(plans, strategy))
    yield ""
    has_rate = assignment.network.link_bytes_per_second is not None
    unit = "GB/s" if has_rate else "links"
    yield f"modelled, not measured: bus bandwidth per device in {unit} (% of the bound)"
    header = ("", "lies on", *COLLECTIVES, "permute")
    rows = list(_rows_of_plan("search", plans.search))
    if not isinstance(plans.jax, str):
        rows += _rows_of_plan("JAX", plans.jax)
    yield from table(rows, header)
    if isinstance(plans.jax, str):
        yield f"  {plans.jax}"
    else:
        yield f"  JAX: {plans.jax.note}"
    yield "  an all-reduce takes twice the seconds of an all-gather of as many bytes"
    yield ""
    whose = "the search's mesh" if strategy == "search" else "JAX's mesh"
    several = (
        f", slice 0 of {assignment.topology.num_slices}"
        if assignment.topology.num_slices > 1
        else ""
    )
    names = ",".join(map(str, assignment.axis_names))
    yield f"{whose}{several}: {names} of each chip"
    yield from (f"  {line}".rstrip() for line in drawing.text().splitlines())


def _reasons(plans: Plans, strategy: str) -> Iterator[str]:
    """Why the search's mesh is as it is; of JAX's mesh, which has no reasons, what its axes get."""
    if strategy == "search" or isinstance(plans.jax, str):
        yield from plans.found.reasons
        return
    yield f"JAX's mesh: score {plans.jax.score:.3g} links modelled"
    yield from map(str, plans.jax.reports)
    yield f"the search's mesh: {plans.found.reasons[0]}"


def _rows_of_plan(whose: str, plan: Plan) -> Iterator[tuple[str, ...]]:
    score = "" if math.isinf(plan.score) else f"score {plan.score:.3g} links"
    yield (whose, score, *("" for _ in COLLECTIVES), "")
    for report in plan.reports:
        where = "no rows of chips" if report.span is None else str(report.span)[5:-1]
        rates = [
            _rate(report, report.links[collective], report.fraction(collective))
            for collective in COLLECTIVES
        ]
        hops = f", {report.max_hops} hop{'' if report.max_hops == 1 else 's'}"
        hops = hops if report.max_hops else ", over DCN" if report.crosses_slices else ""
        permute = "-" if report.size == 1 else _rate(report, report.shift_links, None) + hops
        yield (f"  {report.axis}={report.size}", where, *rates, permute)


def _rate(report: AxisReport, links: float, fraction: float | None) -> str:
    """A bandwidth; "-" where nothing moves, "?" where it was not counted."""
    if report.size == 1:
        return "-"
    if math.isnan(links):
        return "?"
    share = "" if fraction is None else f" ({100 * fraction:.0f} %)"
    if math.isinf(links):
        return "on chip"
    link = report.link_bytes_per_second
    return f"{links if link is None else links * link / 1e9:.4g}{share}"


# ----------------------------------------------------------------- The facts of a topology as text


def topology_text(facts: dict[str, Any]) -> str:
    """Writes the facts of a topology.

    Args:
        facts: What `topology_facts` returns.

    Returns:
        Lines, aligned.
    """
    what = "NVLink domains" if facts["torus_rank"] == 0 else "slices"
    several = "" if facts["slices"] == 1 else f", {facts['slices']} {what}"
    return "\n".join([f"{facts['name']}: {facts['title']}{several}", *table(_rows_of_facts(facts))])


def _rows_of_facts(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    is_gpu = facts["torus_rank"] == 0
    chip = "GPU" if is_gpu else "chip"
    shape = " x ".join(map(str, facts["shape"]))
    where = f" in each {'domain' if is_gpu else 'slice'}" if facts["slices"] > 1 else ""
    yield f"{chip}s", f"{facts['chips']}: {shape}{where}"
    if not is_gpu:
        yield "cores", str(facts["cores"])
        yield "devices", f"{facts['devices']}, as JAX sees them"
    host = "x".join(map(str, facts["chips_per_host"]))
    yield "hosts", f"{facts['hosts']}, each of {host}"
    if not facts["is_real"]:
        yield "offered", "no: this is no slice that can be had"
    yield from _switch(facts) if is_gpu else _torus(facts)
    yield "DCN", f"{_speed(facts['dcn_bandwidth_per_chip'])} one way per {chip}"
    yield "HBM", _memory(facts, chip)
    yield "HBM bandwidth", f"{_speed(facts['hbm_bandwidth'])} per {chip}"
    for dtype, figure in facts["peak_flops"].items():
        yield f"peak {dtype}", _peak(figure, facts["chips"], chip)
    yield from _lines_of_names(facts["names"], facts["slices"])
    if facts["nearest"]:
        yield "nearest slices", ", ".join(facts["nearest"])
    for line in facts["assumptions"]:
        yield "assumed", line


def _torus(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    ici = facts["ici"]
    yield "torus", f"{facts['torus_rank']}-D{', twisted' if facts['twist'] else ''}"
    if facts["wrap"] is None:
        yield "wraps", "not known: --wrap xy or --wrap none says it"
    else:
        dims = [name for name, wraps in zip("xyz", facts["wrap"], strict=False) if wraps]
        yield "wraps", f"in {' and '.join(dims)}" if dims else "no"
    count = _plain(ici["links_per_chip"])
    total = "" if ici["links_per_slice"] is None else f", {ici['links_per_slice']} in a slice"
    speed = f"{_speed(ici['link_bandwidth'])} one way each"
    yield "ICI links", f"up to {count} per chip{total}; {speed}"
    if ici["bisection_links"] is not None:
        rate = ici["bisection_bandwidth"]
        speed = "" if rate is None else f", {gigabytes_per_second(rate)} one way"
        yield "bisection", f"{ici['bisection_links']} links{speed}: a plane through the middle"


def _switch(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    ici = facts["ici"]
    count = ici["links_per_chip"]["value"]
    rate = ici["link_bandwidth"]["value"]
    total = "" if None in (count, rate) else f": {gigabytes_per_second(count * rate)} per GPU"
    speed = f"{_speed(ici['link_bandwidth'])} one way each{total}"
    yield "NVLink", f"{_plain(ici['links_per_chip'])} links to a switch, {speed}"


def _lines_of_names(names: dict[str, Any], slices: int) -> Iterator[tuple[str, str]]:
    if names["gke_topology"] is None:
        return
    several = "" if slices == 1 else f", {slices} of them"
    cloud = names["cloud"]
    yield "Cloud", f"{cloud}{several}" if cloud else "no accelerator type stands for this shape"
    if names["gke_accelerator"] is not None:
        machines = f", machine type {' or '.join(names['machine_types'])}"
        yield "GKE", f"{names['gke_accelerator']}, topology {names['gke_topology']}{machines}"
    yield "libtpu", names["libtpu"]
    yield "JAX", " or ".join(repr(kind) for kind in names["jax_device_kinds"])


def _memory(facts: dict[str, Any], chip: str) -> str:
    hbm, usable = facts["hbm"]["value"], facts["usable_hbm_per_device"]["value"]
    if hbm is None:
        return f"not known: {facts['hbm']['reason']}"
    # As it is sold: TPUs by GiB, GPUs by GB.
    unit, size = ("GB", 1e9) if chip == "GPU" else ("GiB", 2.0**30)
    total = f"{hbm / size:.4g} {unit} per {chip}, {hbm * facts['chips'] / size:,.0f} {unit} in all"
    return total if usable is None else f"{total}; {usable / size:.4g} {unit} usable per device"


def _speed(figure: dict[str, Any]) -> str:
    if figure["value"] is None:
        return "not known"
    rates = [rate["value"] for rate in figure["others"] if rate["value"] is not None]
    far = [rate for rate in rates if abs(rate - figure["value"]) > 0.01 * figure["value"]]
    words = ", ".join(dict.fromkeys(gigabytes_per_second(rate) for rate in far))
    return gigabytes_per_second(figure["value"]) + (f" (others say {words})" if words else "")


def _peak(figure: dict[str, Any], chips: int, chip: str) -> str:
    peak = figure["value"]
    if peak is None:
        return f"not known: {figure['reason']}"
    return f"{peak / 1e12:.6g} TFLOP/s per {chip}, {peak * chips / 1e15:.4g} PFLOP/s in all"


def _plain(figure: dict[str, Any]) -> str:
    return "?" if figure["value"] is None else f"{figure['value']:g}"
