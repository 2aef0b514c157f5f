"""The facts of a topology as text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from xla_dtensor.cli.table import gigabytes_per_second, table

__all__ = ["topology_text"]


def topology_text(facts: dict[str, Any]) -> str:
    """Writes the facts of a topology.

    Args:
        facts: What `topology_facts` returns.

    Returns:
        Lines, aligned.
    """
    what = "NVLink domains" if facts["torus_rank"] == 0 else "slices"
    several = "" if facts["slices"] == 1 else f", {facts['slices']} {what}"
    return "\n".join(
        [f"{facts['name']}: {facts['title']}{several}", *table(list(_rows_of_facts(facts)))]
    )


def _rows_of_facts(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    is_gpu = facts["torus_rank"] == 0
    chip = "GPU" if is_gpu else "chip"
    shape = " x ".join(map(str, facts["shape"]))
    each = f" in each {'domain' if is_gpu else 'slice'}" if facts["slices"] > 1 else ""
    yield f"{chip}s", f"{facts['chips']}: {shape}{each}"
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
    others = [each["value"] for each in figure["others"] if each["value"] is not None]
    far = [each for each in others if abs(each - figure["value"]) > 0.01 * figure["value"]]
    said = ", ".join(dict.fromkeys(gigabytes_per_second(each) for each in far))
    return gigabytes_per_second(figure["value"]) + (f" (others say {said})" if said else "")


def _peak(figure: dict[str, Any], chips: int, chip: str) -> str:
    value = figure["value"]
    if value is None:
        return f"not known: {figure['reason']}"
    return f"{value / 1e12:.6g} TFLOP/s per {chip}, {value * chips / 1e15:.4g} PFLOP/s in all"


def _plain(figure: dict[str, Any]) -> str:
    return "?" if figure["value"] is None else f"{figure['value']:g}"
