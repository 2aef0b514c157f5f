"""The meshes of ``python -m xla_dtensor mesh`` as text."""

from __future__ import annotations

import math
from collections.abc import Iterator

from mesh_utils import AxisReport
from mesh_utils.drawing import Drawing
from mesh_utils.network import COLLECTIVES
from xla_dtensor.cli.mesh_plans import Plan, Plans
from xla_dtensor.cli.table import table

__all__ = ["plans_text"]


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
    found = plans.found
    yield f"{found.topology.name}: {found.mesh.axes_text()}"
    yield from (f"  {line}" for line in _reasons(plans, strategy))
    yield ""
    has_rate = found.network.link_bytes_per_second is not None
    unit = "GB/s" if has_rate else "links"
    yield f"modelled, not measured: bus bandwidth per device in {unit} (% of the bound)"
    header = ("", "lies on", *COLLECTIVES, "permute")
    rows = [header, *_rows_of_plan("search", plans.search)]
    if not isinstance(plans.jax, str):
        rows += _rows_of_plan("JAX", plans.jax)
    yield from table(rows)
    if isinstance(plans.jax, str):
        yield f"  {plans.jax}"
    else:
        yield f"  JAX: {plans.jax.note}"
    yield "  an all-reduce takes twice the seconds of an all-gather of as many bytes"
    yield ""
    whose = "the search's mesh" if strategy == "search" else "JAX's mesh"
    several = f", slice 0 of {found.topology.num_slices}" if found.topology.num_slices > 1 else ""
    names = ",".join(map(str, found.axis_names))
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
        rates = [_rate(report, report.links[each], report.fraction(each)) for each in COLLECTIVES]
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
