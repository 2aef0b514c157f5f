"""The mesh over all devices that a submesh is part of."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh_utils import Mesh
from mesh_utils.mesh import _derived
from xla_dtensor.core import Layout, LayoutError, local_shape
from xla_dtensor.core.spanning import layout_on_span, region_of, spanning_mesh

ROOT = Mesh.arange((2, 2, 4), ("pp", "dp", "tp"))


@st.composite
def submeshes(draw: st.DrawFn) -> Mesh:
    """Some axes of a root, perhaps cut into factors or joined first, in any order."""
    shape = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=3))
    names = [f"axis{number}" for number in range(len(shape))]
    ids = np.arange(math.prod(shape))
    if draw(st.booleans()):
        ids = ids[::-1].copy()
    mesh = Mesh(ids, tuple(shape), tuple(names))
    big = [name for name, size in zip(names, shape, strict=True) if size in (4, 6)]
    if big and draw(st.booleans()):
        axis = draw(st.sampled_from(big))
        inner = mesh.size(axis) // 2
        mesh = mesh.factored({axis: [("outer", 2), ("inner", inner)]})
    kept = draw(st.lists(st.sampled_from(mesh.axis_names), min_size=1, unique=True))
    taken = mesh[tuple(kept)]
    if len(kept) > 1 and draw(st.booleans()):
        taken = taken.flattened(tuple(kept[:2]), "joined")
    return taken


@given(submeshes())
def test_each_axis_is_in_the_span_and_walks_the_same_devices(mesh: Mesh) -> None:
    span = spanning_mesh(mesh)
    root = mesh.root
    assert sorted(span.device_ids.ravel()) == sorted(root.device_ids.ravel())
    groups = {frozenset(group) for group in span.groups(mesh.axis_names).tolist()}
    assert frozenset(mesh.device_ids.ravel().tolist()) in groups
    for axis in mesh.axis_names:
        assert span.size(axis) == mesh.size(axis)
    for group in span.groups(tuple(mesh.axis_names)).tolist():
        if set(group) == set(mesh.device_ids.ravel().tolist()):
            order = [
                tuple(
                    dict(zip(span.axis_names, span.coordinates(device), strict=True))[axis]
                    for axis in mesh.axis_names
                )
                for device in mesh.device_ids.ravel().tolist()
            ]
            assert order == list(np.ndindex(*mesh.mesh_shape))


@given(submeshes())
def test_a_region_is_over_the_axes_of_the_submesh(mesh: Mesh) -> None:
    region = region_of(mesh)
    assert set(region.axes) == set(mesh.axis_names)
    assert region.mesh == spanning_mesh(mesh)


@given(submeshes(), st.data())
def test_a_layout_keeps_its_shards(mesh: Mesh, data: st.DataObject) -> None:
    axis = data.draw(st.sampled_from(mesh.axis_names))
    layout = Layout(mesh, ((axis,), ()))
    on_span = layout_on_span(layout)
    shape = (2 * mesh.size(axis), 3)
    for device in mesh.device_ids.ravel().tolist():
        mine = local_shape(layout, shape, mesh.coordinates(device))
        assert local_shape(on_span, shape, on_span.mesh.coordinates(device)) == mine


SPANS = {
    "all devices": (ROOT, ROOT),
    "an axis of the root": (ROOT["dp"], ROOT),
    "axes in another order": (ROOT["tp", "dp"], ROOT),
    "one device": (Mesh.arange((1,), ("x",)), Mesh.arange((1,), ("x",))),
    "axes joined": (
        ROOT["dp", "tp"].flattened(("dp", "tp"), "both"),
        Mesh.arange((2, 8), ("rest0", "both")),
    ),
    "axes apart, joined": (
        ROOT["pp", "tp"].flattened(("pp", "tp"), "both"),
        Mesh([0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15], (2, 8), ("rest0", "both")),
    ),
}


@pytest.mark.parametrize("name", SPANS)
def test_span(name: str) -> None:
    mesh, expected = SPANS[name]
    assert spanning_mesh(mesh) == expected


def test_a_submesh_at_another_place_has_the_same_span() -> None:
    assert spanning_mesh(ROOT.slice(pp=1, tp=2)) == ROOT


def test_what_is_known_of_the_other_axes() -> None:
    layout = Layout.parse("[-, tp, -]", ROOT["tp"])
    assert str(layout_on_span(layout)) == "[-?, tp, -?]"
    assert str(layout_on_span(layout, (("dp", 1),))) == "[-?, tp.dp, -?]"
    assert str(layout_on_span(layout, (("dp", 1), ("pp", 0)))) == "[pp, tp.dp, -]"


def test_a_submesh_that_is_no_part_in_digits() -> None:
    odd = _derived(np.array([0, 1, 2, 5]), ("y",), Mesh.arange((6,), ("x",)))
    with pytest.raises(LayoutError) as raised:
        spanning_mesh(odd)
    assert str(raised.value) == (
        "A tensor on the submesh (y=4) was asked for. Its axes are no mixed-radix part of the root "
        "(x=6). Cut the submesh out of the root by axis names."
    )
