"""Drawings: every chip once, and links in the colours of the axes that use them.

`link_simulation.Torus` walks the messages of an axis chip by chip; it is the oracle for the links
that an axis uses. The SVG is read back: from where its lines are, one sees which links they mean.
"""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh_utils import Drawing, Mesh, MeshError, Network, Topology, assign, draw_mesh
from mesh_utils.draw import axis_links, bisection_links, link_ends, slice_links
from mesh_utils.span import axis_groups, mesh_places
from tests.mesh_utils.link_simulation import Chip, Torus

SVG = "{http://www.w3.org/2000/svg}"
Link = frozenset[Chip]

# shape, dims that wrap, twisted
BOXES = [
    ((4, 4, 1), "xy", False),
    ((4, 2, 1), "", False),
    ((3, 5, 1), "y", False),
    ((6, 4, 1), "x", False),
    ((2, 2, 3), "z", False),
    ((4, 3, 2), "xy", False),
    ((4, 4, 4), "xyz", False),
    ((3, 3, 6), "xyz", True),
    ((2, 4, 4), "", False),
]


def synthetic(box: tuple[Chip, str, bool], slices: int = 1, cores: int = 1) -> Topology:
    shape, wraps, twist = box
    return Topology.synthetic(
        shape,
        wrap=tuple(dim in wraps for dim in "xyz"),
        twist=twist,
        num_slices=slices,
        devices_per_chip=cores,
        chips_per_host=(1, 1, 1),
    )


def torus(topology: Topology) -> Torus:
    assert topology.wrap is not None
    return Torus(topology.shape, topology.wrap, topology.twist)


def as_links(network: Network, flags: np.ndarray) -> set[Link]:
    starts, ends, _ = link_ends(network, flags)
    return {
        frozenset({tuple(a), tuple(b)}) for a, b in zip(starts.tolist(), ends.tolist(), strict=True)
    }


def all_links(box: Torus) -> set[Link]:
    found: set[Link] = set()
    for chip in box.chips():
        for dim in range(3):
            other = box.step(chip, dim, 1) if box.shape[dim] > 1 else None
            if other is not None:
                found.add(frozenset({chip, other}))
    return found


def walked(topology: Topology, mesh: Mesh, axis: int) -> set[Link]:
    """The links that messages to the next device along an axis cross, in the first slice."""
    box, found = torus(topology), set[Link]()
    for group in axis_groups(mesh_places(topology, mesh.device_ids), axis).tolist():
        chips: list[Chip] = [(p[1], p[2], p[3]) for p in group if p[0] == 0]
        for start, end in zip(chips, [*chips[1:], *chips[:1]], strict=True):
            for way in box.ways(start, end):
                found |= {frozenset(link) for link in box.walk(start, way)}
    return found


@st.composite
def drawings(draw: st.DrawFn) -> Drawing:
    """A mesh on a small box: searched, in rows, or in any order."""
    box = draw(st.sampled_from(BOXES))
    slices = draw(st.sampled_from([1, 1, 2]))
    topology = synthetic(box, slices, draw(st.sampled_from([1, 1, 2])))
    left, sizes = topology.devices_per_slice, list[int]()
    while left > 1 and len(sizes) < 3:
        size = draw(st.sampled_from([n for n in range(2, left + 1) if left % n == 0]))
        sizes.append(size)
        left //= size
    sizes = [*sizes, left] if left > 1 or not sizes else sizes
    network = Network.of(topology, link_bytes_per_second=1e9, dcn_bytes_per_second=1e8)
    how = draw(st.sampled_from(["search", "rows", "shuffled"]))
    if how == "search" or slices > 1:
        dcn = [slices, *(1 for _ in sizes[1:])]
        mesh = assign(topology, sizes, dcn, network=network).mesh
    else:
        ids = topology.device_ids
        mesh = Mesh(ids if how == "rows" else draw(st.permutations(ids.tolist())), sizes)
    return draw_mesh(topology, mesh, network)


@given(drawings())
def test_links_have_the_axes_that_use_them(drawing: Drawing) -> None:
    box = torus(drawing.topology)
    for number, report in enumerate(drawing.reports):
        used = as_links(drawing.network, drawing.uses[report.axis])
        if report.strategy == "whole dims":
            assert report.span is not None
            dims = [dim for dim in range(3) if report.span.sizes[dim] > 1]
            expected = {
                frozenset({chip, other})
                for chip in box.chips()
                for dim in dims
                if (other := box.step(chip, dim, 1)) is not None
            }
        else:
            expected = walked(drawing.topology, drawing.mesh, number)
        assert used == expected


@given(drawings())
def test_a_group_hangs_together_over_the_links_of_its_axis(drawing: Drawing) -> None:
    places = mesh_places(drawing.topology, drawing.mesh.device_ids)
    for number, flags in enumerate(drawing.uses.values()):
        reach: dict[Chip, set[Chip]] = {}
        for link in as_links(drawing.network, flags):
            joined = set[Chip]().union(*(reach.get(chip, {chip}) for chip in link))
            reach |= dict.fromkeys(joined, joined)
        for group in axis_groups(places, number).tolist():
            chips: set[Chip] = {(p[1], p[2], p[3]) for p in group if p[0] == 0}
            assert not chips or chips <= reach.get(min(chips), {min(chips)})


@given(drawings())
def test_the_svg_shows_what_the_drawing_says(drawing: Drawing) -> None:
    picture = ElementTree.fromstring(drawing.svg())
    squares = {
        read_chip(each.attrib["data-chip"]): tuple(float(each.attrib[k]) for k in ("x", "y"))
        for each in picture.iter(f"{SVG}rect")
        if "data-chip" in each.attrib
    }
    assert len(squares) == np.prod(drawing.topology.shape)
    side = next(
        float(each.attrib["width"]) for each in picture.iter(f"{SVG}rect") if "rx" in each.attrib
    )
    flags = {str(axis): uses for axis, uses in drawing.uses.items()}
    flags["none"] = slice_links(drawing.network) & ~np.any(list(flags.values()), axis=0)
    for name, uses in flags.items():
        plain, stubs = read_lines(picture, name, squares, side)
        starts, ends, dims = (part.tolist() for part in link_ends(drawing.network, uses))
        lines, ends_of_stubs = Counter[Link](), Counter[tuple[Chip, int]]()
        for start, end, dim in zip(starts, ends, dims, strict=True):
            if dim == 2 or start[dim] == drawing.topology.shape[dim] - 1:
                ends_of_stubs[tuple(start), dim] += 1
                ends_of_stubs[tuple(end), -1 - dim] += 1
            else:
                lines[frozenset({tuple(start), tuple(end)})] += 1
        assert (plain, stubs) == (lines, ends_of_stubs)


def read_chip(text: str) -> Chip:
    x, y, z = map(int, text.split(","))
    return (x, y, z)


def read_lines(
    picture: ElementTree.Element, name: str, squares: dict[Chip, tuple[float, ...]], side: float
) -> tuple[Counter[Link], Counter[tuple[Chip, int]]]:
    """The links of an axis, from where its lines are: those between two chips, and the stubs.

    A stub is its chip and its dim, -1 - dim where it leads downwards.
    """
    lines, stubs = Counter[Link](), Counter[tuple[Chip, int]]()
    groups = [each for each in picture.iter(f"{SVG}g") if each.get("data-axis") == name]
    paths = [path.attrib["d"] for group in groups for path in group.iter(f"{SVG}path")]
    number = r"(-?[\d.]+)"
    pattern = re.compile(rf"M{number} {number}L{number} {number}")
    top = min(y for _, y in squares.values())
    for found in pattern.finditer("".join(paths)):
        x, y, to_x, to_y = map(float, found.groups())
        if max(y, to_y) < top - 23:
            continue  # the sample in the legend
        (here, dim) = touched(squares, side, x, y, (to_x - x, to_y - y))
        at_end = touched(squares, side, to_x, to_y, (x - to_x, y - to_y))
        assert here is not None
        if at_end[0] is not None:
            assert at_end[1] == -1 - dim
            lines[frozenset({here, at_end[0]})] += 1
        else:
            stubs[here, dim] += 1
    return lines, stubs


def touched(
    squares: dict[Chip, tuple[float, ...]], side: float, x: float, y: float, way: tuple[float, ...]
) -> tuple[Chip | None, int]:
    """The chip at whose edge a line begins, and the dim in which it leads."""
    if way[0] and way[1]:  # slanted, from a corner: z
        dim, corner = (2, (side, 0.0)) if way[0] > 0 else (-3, (0.0, side))
        middle, near = corner, 8.0
    else:
        dim = 0 if way[0] > 0 else -1 if way[0] < 0 else 1 if way[1] > 0 else -2
        middle = {
            0: (side, side / 2),
            -1: (0.0, side / 2),
            1: (side / 2, side),
            -2: (side / 2, 0.0),
        }[dim]
        near = 13.0
    for chip, (left, top) in squares.items():
        off = (x - left - middle[0], y - top - middle[1])
        along = off[0] if dim in (0, -1) else off[1] if dim in (1, -2) else off[0] - off[1]
        if max(map(abs, off)) < near and abs(along) < 0.25:
            return chip, dim
    return None, dim


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("v5e:16x16", (64, 4)),
        ("v5p:4x4x8", (8, 4, 4)),
        ("tpu7x:4x4x4", (16, 8)),
        ("v5p:4x4x8_twisted", (32, 4)),
        ("gb200:72", (9, 8)),
        ("2xv5e:4x4", (4, 4)),
    ],
)
def test_every_chip_is_drawn_once_with_its_places(name: str, shape: tuple[int, ...]) -> None:
    topology = Topology.parse(name)
    dcn = (topology.num_slices, *(1 for _ in shape[1:]))
    found = assign(topology, shape, dcn)
    drawing = draw_mesh(topology, found.mesh)
    svg = ElementTree.fromstring(drawing.svg())
    chips = [each.attrib["data-chip"] for each in svg.iter(f"{SVG}rect") if "rx" in each.attrib]
    everywhere = itertools.product(*(range(size) for size in topology.shape))
    assert sorted(chips) == sorted(",".join(map(str, chip)) for chip in everywhere)
    texts = [each.text or "" for each in svg.iter(f"{SVG}text")]
    spots: list[tuple[int, ...]] = []
    for label in texts[: len(chips)]:
        ranges = [list(map(int, part.split("-"))) for part in label.split(",")]
        spots += itertools.product(*(range(each[0], each[-1] + 1) for each in ranges))
    assert sorted(spots) == list(itertools.product(*(range(size) for size in shape)))
    words = drawing.text()
    if len(chips) <= 512:
        assert all(words.count(f" {label}") >= 1 for label in texts[: len(chips)])
    # Nothing lies outside of the picture.
    for line in drawing.scene.words:
        assert line.x + 0.602 * line.size * len(line.text) <= drawing.scene.width
    for each in svg.iter(f"{SVG}rect"):
        if "rx" in each.attrib:
            assert float(each.attrib["x"]) + float(each.attrib["width"]) < float(
                svg.attrib["width"]
            )
            assert float(each.attrib["y"]) + float(each.attrib["width"]) < float(
                svg.attrib["height"]
            )


def test_the_legend_says_what_each_axis_gets() -> None:
    found = assign(Topology.parse("v5e:16x16"), (64, 4), axis_names=("fsdp", "tp<&>"))
    svg = ElementTree.fromstring(draw_mesh(found.topology, found.mesh).svg())
    texts = [each.text or "" for each in svg.iter(f"{SVG}text")]
    assert "v5e:16x16: fsdp=64, tp<&>=4" in texts
    assert "tp<&>=4 on x2 y2: 100 GB/s all-gather, 50 % of the bound (snake)" in texts, texts[256:]
    assert any("modelled, not measured" in text for text in texts)
    groups = [
        each.attrib["data-axis"] for each in svg.iter(f"{SVG}g") if "data-axis" in each.attrib
    ]
    assert sorted(groups) == ["fsdp", "none", "tp<&>"]


def test_the_same_mesh_has_the_same_picture() -> None:
    topology = Topology.parse("v5p:4x4x4")
    made = [draw_mesh(topology, assign(topology, (16, 4)).mesh).svg() for _ in range(2)]
    assert made[0] == made[1]
    assert "http" not in made[0].replace('xmlns="http://www.w3.org/2000/svg"', "")


# --- links and cuts -------------------------------------------------------------------------------


@pytest.mark.parametrize("box", BOXES, ids=str)
def test_the_links_of_a_slice(box: tuple[Chip, str, bool]) -> None:
    topology = synthetic(box)
    network = Network.of(topology)
    there = slice_links(network)
    # A dim of two chips has one link between them; longer ones that wrap have one per chip.
    assert as_links(network, there) == all_links(torus(topology))
    assert int(there.sum()) == len(all_links(torus(topology)))


@pytest.mark.parametrize("box", BOXES, ids=str)
def test_bisection(box: tuple[Chip, str, bool]) -> None:
    topology = synthetic(box)
    cuts: list[int] = []
    for dim, size in enumerate(topology.shape):
        if size > 1:
            low = {chip for chip in torus(topology).chips() if chip[dim] < size // 2}
            cuts.append(sum(len(link & low) == 1 for link in all_links(torus(topology))))
    assert bisection_links(Network.of(topology)) == min(cuts)


def test_bisections_that_are_known() -> None:
    known = {"v5e:16x16": 32, "v5e:8x16": 16, "v5p:8x8x8": 128, "v5p:4x4x8": 32, "h100:8": 0}
    known["v5p:4x4x8_twisted"] = 64
    for name, links in known.items():
        assert bisection_links(Network.of(Topology.parse(name))) == links


def test_axis_links_of_rings_and_lines() -> None:
    topology = Topology.parse("v5e:8x16")
    uses = axis_links(topology, Mesh.arange((16, 8), ("dp", "tp")))
    there = slice_links(Network.of(topology))
    assert np.array_equal(uses["dp"], there & (np.arange(3) == 1))
    assert np.array_equal(uses["tp"], there & (np.arange(3) == 0))
    halves = axis_links(topology, Mesh.arange((32, 4), ("dp", "tp")))["tp"]
    assert halves[:, 0, 0, 0].tolist() == [True, True, True, False, True, True, True, False]


# --- files ----------------------------------------------------------------------------------------


def small() -> Drawing:
    return draw_mesh(Topology.parse("v5e:2x2"), Mesh.arange((2, 2), ("dp", "tp")))


def test_save_svg(tmp_path: Path) -> None:
    small().save(tmp_path / "mesh.svg")
    assert (tmp_path / "mesh.svg").read_text(encoding="utf-8") == small().svg()


@pytest.mark.parametrize("name", ["mesh.pdf", "mesh.png", "mesh", "svg"])
def test_other_formats_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(MeshError, match=r"Drawings are SVG, .*Pass a name that ends in \.svg"):
        small().save(tmp_path / name)
    assert list(tmp_path.iterdir()) == []
