"""docs/topology.md says what the model says, and its session runs."""

from __future__ import annotations

import doctest
import re

import numpy as np
import pytest

from mesh_utils import Mesh, Network, Span, Topology, assign, axis_reports, find_chip
from mesh_utils.assignment import mesh_score
from mesh_utils.jax_compat import create_device_mesh
from tests.documents import ROOT, blocks

TEXT = (ROOT / "docs" / "topology.md").read_text(encoding="utf-8")
PART = re.compile(r"([xyz])(\d+)(?:@(\d+))?")


def rows(first_cell: str) -> list[list[str]]:
    """The rows of the table whose header begins with that cell."""
    lines = TEXT.splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith(f"| {first_cell} |"))
    found: list[list[str]] = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        found.append([cell.strip() for cell in line.strip("|").split("|")])
    return found


def read_span(text: str, network: Network) -> Span:
    sizes, strides, cores, slices = [1, 1, 1], [1, 1, 1], 1, 1
    for word in text.split():
        if word == "core":
            cores = network.cores
        elif word.startswith("slice"):
            slices = int(word.removeprefix("slice"))
        else:
            part = PART.fullmatch(word)
            assert part is not None, word
            dim = "xyz".index(part[1])
            sizes[dim], strides[dim] = int(part[2]), int(part[3] or 1)
    return Span((sizes[0], sizes[1], sizes[2]), (strides[0], strides[1], strides[2]), cores, slices)


@pytest.mark.parametrize("row", rows("topology"), ids=lambda row: f"{row[0]} {row[1]}")
def test_modelled_columns(row: list[str]) -> None:
    name, where, strategy, gather, measured_gather, exchange, measured_exchange = row
    network = Network.of(Topology.parse(name.strip("`")))
    span = read_span(where, network)
    assert network.strategy(span) == strategy
    assert f"{network.bytes_per_second(span) / 1e9:.4g}" == gather
    assert f"{network.bytes_per_second(span, 'all-to-all') / 1e9:.4g}" == exchange
    # Whoever measures fills these in, and takes this line out.
    assert (measured_gather, measured_exchange) == ("", "")


@pytest.mark.parametrize("row", rows("chip"), ids=lambda row: row[0])
def test_figures_of_the_chips(row: list[str]) -> None:
    name, link, others, links, dcn, devices = row
    chip = find_chip(name)
    figure = chip.figure("ici_link_bandwidth")
    assert link == _gigabytes(figure.value)
    different = [each.value for each in figure.others if each.value != figure.value]
    assert others == ", ".join(dict.fromkeys(map(_gigabytes, different)))
    assert links == str(chip.figure("ici_links").whole)
    assert dcn == _gigabytes(chip.dcn_bytes_per_second)
    assert devices == str(chip.devices_per_chip)


@pytest.mark.parametrize("row", rows("slice"), ids=lambda row: f"{row[0]} {row[1]}")
def test_searched_meshes(row: list[str]) -> None:
    name, axes, gather, by_jax, score, jax_score, bound, _ = row
    topology = Topology.parse(name.strip("`"))
    shape = tuple(int(axis.partition("=")[2]) for axis in axes.split(", "))
    found = assign(topology, shape)
    link = Network.of(topology).link_bytes_per_second
    assert found.is_exact
    assert link is not None
    assert ", ".join(f"{each * link / 1e9:.4g}" for each in found.links) == gather
    assert f"{found.score * link / 1e9:.4g}" == score
    assert f"{found.bound * link / 1e9:.4g}" == bound
    pytest.importorskip("jax")
    raised, made = "", np.empty(0, object)
    try:
        made = create_device_mesh(shape, topology, strategy="jax", allow_split_physical_axes=True)
    except Exception as error:  # the page names the type
        raised = f"raises {type(error).__name__}"
    if by_jax.startswith("raises") and not raised:
        pytest.skip("this version of jax makes a mesh here")
    if raised and not by_jax.startswith("raises"):
        pytest.skip("the page is of JAX 0.12; this older version raises here")
    if raised:
        assert (by_jax, jax_score) == (raised, "")
        return
    ids = [device.id for device in made.reshape(-1)]
    links = [report.links["all-gather"] for report in axis_reports(topology, Mesh(ids, shape))]
    assert ", ".join(f"{each * link / 1e9:.4g}" for each in links) == by_jax
    assert f"{mesh_score(shape, found.weights, links) * link / 1e9:.4g}" == jax_score
    assert found.score > mesh_score(shape, found.weights, links)


def test_every_assumption_can_fail() -> None:
    assumptions = rows("#")
    assert [row[0] for row in assumptions] == [str(n) for n in range(1, len(assumptions) + 1)]
    assert all(row[3] for row in assumptions)


def test_the_session_runs() -> None:
    (session,) = blocks(TEXT, "python")
    test = doctest.DocTestParser().get_doctest(session, {}, "topology.md", None, 0)
    assert test.examples
    assert doctest.DocTestRunner(verbose=False).run(test).failed == 0


def _gigabytes(value: float | None) -> str:
    return "" if value is None else f"{value / 1e9:g}"
