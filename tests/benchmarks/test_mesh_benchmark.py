"""The mesh benchmark: its claims on a sample, by its own figures and by brute force; its tables.

The score of a sample is counted again by walking every link (link_simulation.py), and the optimum
by the enumeration of test_assignment.py, which shares nothing with that of the benchmark.
"""

from __future__ import annotations

import json
import random
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import mesh, mesh_document
from benchmarks.mesh_cases import every_case, is_power_of_two, power_shapes, real_slices
from benchmarks.mesh_compare import Outcome, Slice, compare
from benchmarks.mesh_optimum import optimum
from benchmarks.mesh_plot import svg_of_gains
from benchmarks.mesh_rings import BLOCKS, is_not_behind, ring_mesh, ring_rows
from benchmarks.mesh_summary import families, faults
from mesh_utils import Network, Topology, assign, axis_reports
from mesh_utils.assignment import mesh_score
from mesh_utils.span import axis_groups, find_span
from tests.mesh_utils import link_simulation as simulation
from tests.mesh_utils.link_simulation import Torus
from tests.mesh_utils.test_assignment import every_mesh
from tests.mesh_utils.test_network import simulated, whole_dims

pytest.importorskip("jax")


def stored() -> dict[str, Any]:
    return mesh_document.stored("mesh")


def some_cases(count: int, most_devices: int, seed: int = 1) -> list[tuple[str, tuple[int, ...]]]:
    every = [
        (case.name, shape)
        for case in every_case()
        if Topology.parse(case.name).num_devices <= most_devices and case.jax_kind is None
        for shape in case.shapes
    ]
    return random.Random(seed).sample(every, count)


# --- the claims, on a sample ---------------------------------------------------------------------


def check_claims(name: str, shape: tuple[int, ...]) -> Outcome:
    found = compare(Slice(name), shape)
    assert not found.is_below_jax, (name, shape)
    assert found.is_optimal, (name, shape)
    assert found.is_exact
    assert found.faults == ()
    assert found.jax_score is not None or found.jax_error
    return found


def test_never_below_jax_and_always_at_the_optimum() -> None:
    found = [check_claims(name, shape) for name, shape in some_cases(50, 600)]
    assert any(outcome.is_better for outcome in found)
    assert any(outcome.jax_default_error for outcome in found)


@pytest.mark.thorough
def test_the_same_on_more_and_larger_slices() -> None:
    for name, shape in some_cases(300, 10_000, seed=2):
        check_claims(name, shape)


def test_where_jax_does_not_raise_by_default_it_makes_the_same_mesh_when_it_may_split() -> None:
    """So that one call stands for both."""
    seen = 0
    for name in ("v5e:16x16", "v5p:4x4x8", "v5p:4x8x12", "tpu7x:4x4x4"):
        on = Slice(name)
        for shape in power_shapes(on.topology.num_devices) or [(32, 12), (8, 48)]:
            plain, _ = on.jax_places(shape, allow_split=False)
            if plain is not None:
                seen += 1
                split, _ = on.jax_places(shape)
                assert split is not None
                assert np.array_equal(plain, split), (name, shape)
    assert seen > 15


# --- the score, by brute force -------------------------------------------------------------------


def walked_links(on: Slice, places: np.ndarray, axis: int) -> tuple[float, bool]:
    """What an axis gets when every link is walked, and whether that is its exact figure."""
    network = on.network
    groups = axis_groups(places, axis)
    span = find_span(network.shape, groups)
    assert span is not None
    box = Torus(network.shape, network.wrap)
    tiled = simulation.groups(box.shape, span.sizes, span.strides)
    there = {frozenset(map(tuple, group[:, 1:4].tolist())) for group in groups}
    assert there == {frozenset(members.values()) for _, members in tiled}
    strategy = network.strategy(span)
    if strategy == "whole dims":
        return whole_dims(box, [dim for dim in range(3) if span.sizes[dim] > 1]), False
    return max(simulated(box, span.sizes, span.strides).values()), strategy != "path"


def check_score_by_walking(name: str, shape: tuple[int, ...]) -> None:
    on = Slice(name)
    made = assign(on.topology, shape)
    meshes = [on.places_of_ids(made.device_ids), on.jax_places(shape)[0]]
    scores: list[float] = []
    for places in meshes:
        assert places is not None
        walked = [walked_links(on, places, axis) for axis in range(len(shape))]
        score = mesh_score(shape, made.weights, [links for links, _ in walked])
        said = mesh_score(shape, made.weights, on.links(places))
        if all(exact for _, exact in walked):
            assert said == pytest.approx(score, rel=1e-9), (name, shape)
        else:  # the sum over whole dims is reached by the simulation within 2 %
            assert said == pytest.approx(score, rel=0.02), (name, shape)
        scores.append(score)
    assert scores[0] >= scores[1] * 0.98
    assert made.score == pytest.approx(scores[0], rel=0.02)


WALKED = ["v5e:4x4", "v5e:4x8", "v5e:8x8", "v5p:2x2x4", "v5p:2x4x4", "v5p:4x4x4"]


@pytest.mark.parametrize("name", WALKED)
def test_the_score_when_every_link_is_walked(name: str) -> None:
    shapes = power_shapes(Topology.parse(name).num_devices)
    for shape in random.Random(name).sample(shapes, 2):
        check_score_by_walking(name, shape)


@pytest.mark.thorough
@pytest.mark.parametrize("name", [*WALKED, "v5e:8x16", "v5e:16x16", "v5p:4x4x8", "v5p:4x8x8"])
def test_more_scores_when_every_link_is_walked(name: str) -> None:
    shapes = power_shapes(Topology.parse(name).num_devices)
    for shape in random.Random(f"{name} more").sample(shapes, min(10, len(shapes))):
        check_score_by_walking(name, shape)


# --- the optimum, by another enumeration ---------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("v5e:8x8", (16, 4)),
        ("v5e:4x8", (2, 2, 8)),
        ("v5p:4x4x4", (4, 4, 4)),
        ("v5p:4x4x12", (6, 32)),
        ("tpu7x:2x2x2", (2, 2, 4)),
        ("v5p:4x4x8_twisted", (8, 16)),
    ],
)
def test_the_enumeration_equals_the_plain_one(name: str, shape: tuple[int, ...]) -> None:
    topology = Topology.parse(name)
    weights = tuple(2.0**axis for axis in range(len(shape)))
    plain = [links for _, links in every_mesh(topology, shape)]
    against = plain[len(plain) // 2]
    found = optimum(Network.of(topology), shape, weights, against)
    assert found is not None
    assert found.meshes == len(plain)
    assert found.score == pytest.approx(max(mesh_score(shape, weights, each) for each in plain))
    gains = [
        max(mine / its for mine, its in zip(each, against, strict=True))
        for each in plain
        if all(mine >= its * (1 - 1e-9) for mine, its in zip(each, against, strict=True))
    ]
    assert found.dominating == pytest.approx(max(gains))


# --- rings made by hand --------------------------------------------------------------------------


def test_hand_made_rings_are_matched_or_beaten_on_every_axis() -> None:
    rows = ring_rows()
    assert [(row["mesh"], row["size"]) for row in rows] == [
        ("hybrid_ring_64x4", 64),
        ("hybrid_ring_64x4", 4),
        ("hybrid_ring_32x8", 32),
        ("hybrid_ring_32x8", 8),
    ]
    assert all(row["matched"] for row in rows)
    assert any(row["search"]["max_hops"] < row["by_hand"]["max_hops"] for row in rows)


@pytest.mark.parametrize("name", BLOCKS)
def test_hand_made_rings_are_rings_of_blocks(name: str) -> None:
    found = ring_mesh(name)
    assert sorted(found.reshape(-1).tolist()) == list(range(256))
    rows, columns = BLOCKS[name]
    for ring in found:
        y, x = ring // 16, ring % 16
        assert (np.ptp(y) + 1, np.ptp(x) + 1) == (rows, columns)
        steps = np.abs(np.diff([*x, x[0]])) + np.abs(np.diff([*y, y[0]]))
        assert (steps == 1).all()
    # The blocks follow each other row by row.
    assert found[:, 0].tolist() == sorted(found[:, 0].tolist(), key=lambda n: (n // 16, n % 16))


def test_a_mesh_that_is_behind_is_seen() -> None:
    topology = Topology.parse("v5e:16x16")
    ring, line = (
        axis_reports(topology, ids)[1] for ids in (ring_mesh("hybrid_ring_64x4"), _lines())
    )
    assert is_not_behind(ring, line)
    assert not is_not_behind(line, ring)


def _lines() -> np.ndarray:
    return np.arange(256).reshape(64, 4)


# --- the cases -----------------------------------------------------------------------------------


def test_every_slice_and_shape_is_there() -> None:
    cases = list(every_case())
    names = {case.name for case in cases}
    assert {"v5e:2x2", "v5e:16x16", "v5p:16x16x16", "tpu7x:16x16x16", "v5p:4x4x12"} <= names
    assert {"v5p:4x4x8_twisted", "v5p:8x16x16_twisted"} <= names
    assert real_slices("v4") == real_slices("v5p")
    assert real_slices("v6e") == real_slices("v5e")
    for case in cases:
        topology = Topology.parse(case.name)
        assert topology.num_chips <= 4096
        assert len(set(case.shapes)) == len(case.shapes)
        assert {int(np.prod(shape)) for shape in case.shapes} == {topology.num_devices}
        sizes = {size for shape in case.shapes for size in shape}
        assert all(map(is_power_of_two, sizes)) == case.is_power
    # Of 2**n devices, axes are where n ones are cut: C(n - 1, axes - 1).
    assert len(next(case for case in cases if case.name == "v5e:16x16").shapes) == 1 + 7 + 21 + 35


# --- tables, plot, faults ------------------------------------------------------------------------


OUTCOME = Outcome((4, 4), 1.5, (1.0, 2.0), 1.5, (1.0, 2.0), "", "", 1.5, 9, 1.0, True, (), 0.1)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"jax_score": 1.6, "best": 1.6}, "4x4: its score 1.5 is below JAX's 1.6"),
        ({"best": 1.51}, "4x4: its score 1.5 is below the optimum 1.51"),
        ({"best": 1.49}, "4x4: its score 1.5 is above the optimum 1.49"),
        ({"is_exact": False}, "4x4: the search says that it is not exact"),
        ({"faults": ("it is torn",)}, "4x4: it is torn"),
    ],
)
def test_what_should_not_be_is_found(change: dict[str, Any], fault: str) -> None:
    assert mesh._faults(OUTCOME) == []
    found = mesh._faults(replace(OUTCOME, **change))
    assert fault in found
    row = {"slice": "v5e:4x4", "faults": found}
    assert f"v5e:4x4 {fault}" in faults([row], [])
    assert faults([], [{"mesh": "by_hand", "axis": 1, "matched": False}]) == [
        "by_hand: axis 1 by hand is ahead of the search's"
    ]


def test_sums() -> None:
    cases = [
        ["16", 2.0, 2.0, 2.0, 1.0, ""],
        ["4x4", 1.5, 1.0, 1.5, 2.0, "default"],
        ["2x8", 1.2, 1.0, 1.3, 1.0, "default"],
        ["8x2", 1.2, None, None, 1.0, "TypeError: no"],
    ]
    row = {"slice": "v5e:4x4", "family": "v5e, v6e", "cases": cases, "meshes": 9, "faults": ["x"]}
    row |= {"search_seconds": 0.4, "slowest_search_seconds": 0.2}
    twisted = {**row, "family": "v5e, v6e, twisted"}
    found = families([row, twisted])
    assert [each["family"] for each in found] == ["v5e, v6e", "v5e, v6e, twisted", "all"]
    one = found[0]
    assert (one["cases"], one["beside_jax"], one["better"], one["below"]) == (4, 3, 2, 0)
    assert (one["enumerated"], one["optimal"], one["dominated"]) == (3, 2, 1)
    assert (one["jax_fails"], one["jax_fails_by_default"], one["faults"]) == (1, 3, 1)
    assert one["median_of_better"] == pytest.approx(1.35)
    assert one["search_milliseconds"] == pytest.approx(100)
    assert found[2] == {**one, "family": "all"}


def test_plot() -> None:
    cases = [["4x4", score, 1.0, score, 1.0, ""] for score in (1.0, 1.2, 2.6)]
    cases.append(["2x8", 1.0, None, 1.0, 1.0, "ValueError: no"])
    rows = [{"family": name, "cases": cases} for name in ("v5e, v6e", "tpu7x")]
    tree = ElementTree.fromstring(svg_of_gains(rows))
    curves = [each for each in tree.iter() if each.tag.endswith("polyline")]
    assert [curve.attrib["data-family"] for curve in curves] == ["v5e, v6e", "tpu7x"]
    points = [tuple(map(float, p.split(","))) for p in curves[0].attrib["points"].split()]
    assert len(points) == 3
    assert points == sorted(points)
    heights = [y for _, y in points]
    assert heights == sorted(heights)  # downwards, from the largest gain on


def test_a_sample_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert mesh.main(["--sample", "12", "--results", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "Nothing is below JAX, below an optimum, or failed." in printed
    assert "12 cases" in printed
    found = json.loads((tmp_path / "mesh.json").read_text())
    assert found["sample"] == 12
    assert sum(len(row["cases"]) for row in found["slices"]) == 12
    assert all(
        len(case) == len(found["columns"]) for row in found["slices"] for case in row["cases"]
    )
    with pytest.raises(SystemExit, match="It is none of the slices that are compared"):
        mesh.main(["--slice", "v5e:3x3"])


# --- what is stored and written ------------------------------------------------------------------


def test_the_stored_run_is_whole_and_without_fault() -> None:
    found = stored()
    assert found["sample"] is None
    assert found["faults"] == []
    asked = {(case.name, case.jax_kind): len(case.shapes) for case in every_case()}
    ran = {(row["slice"], row["jax_kind"]): len(row["cases"]) for row in found["slices"]}
    assert ran == asked
    assert all(case[3] is not None for row in found["slices"] for case in row["cases"])
    assert rounded(found["families"]) == rounded(families(found["slices"]))


def rounded(data: Any) -> Any:
    """Round floats: from Python 3.12 on `sum` adds them up more exactly than before."""
    return json.loads(json.dumps(data), parse_float=lambda text: f"{float(text):.9g}")


def test_the_document_shows_what_is_stored() -> None:
    text = mesh_document.DOCUMENT.read_text(encoding="utf-8")
    found = mesh_document.tables(mesh_document.stored("mesh"), mesh_document.stored("mesh_libtpu"))
    assert mesh_document.filled(text, found) == text
    assert mesh_document.FIGURE.read_text(encoding="utf-8") == svg_of_gains(stored()["slices"])
    assert "figures/mesh.svg" in text
    with pytest.raises(ValueError, match="The document has no place for it"):
        mesh_document.filled("nothing", {"a": ["|"]})


def test_stored_scores_are_those_of_today() -> None:
    """A sample of them, so that a search that changes does not leave old figures behind."""
    rows = {(row["slice"], row["jax_kind"]): row for row in stored()["slices"]}
    for name, shape in some_cases(15, 300, seed=3):
        columns = {case[0]: case for case in rows[name, None]["cases"]}
        kept = columns["x".join(map(str, shape))]
        today = compare(Slice(name), shape)
        assert kept[1] == pytest.approx(today.score, rel=1e-4)
        assert kept[3] == pytest.approx(today.best, rel=1e-4)
        assert kept[4] == pytest.approx(today.dominating, rel=1e-4)
