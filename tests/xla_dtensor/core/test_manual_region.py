"""ManualRegion: its axes, the shapes inside it, what may cross its border; every message."""

from __future__ import annotations

import re

import pytest

from mesh_utils import AxisError, Mesh
from xla_dtensor.core import Layout, LayoutError, ManualRegion

MESH = Mesh.arange((2, 4), ("dp", "tp"))
THREE = Mesh.arange((2, 1, 4), ("dp", "sp", "tp"))


@pytest.mark.parametrize(
    ("axes", "kept", "sizes"),
    [
        (None, ("dp", "tp"), (2, 4)),
        (("tp", "dp"), ("dp", "tp"), (2, 4)),
        (("tp",), ("tp",), (4,)),
        ((1,), ("tp",), (4,)),
        ((1, "dp"), ("dp", "tp"), (2, 4)),
        (iter(["dp"]), ("dp",), (2,)),
    ],
)
def test_axes_are_names_in_mesh_order(axes: object, kept: object, sizes: object) -> None:
    region = ManualRegion.over(MESH, axes)  # pyright: ignore
    assert (region.axes, region.sizes) == (kept, sizes)
    assert region == ManualRegion.over(MESH, region.axes)
    assert hash(region) == hash(ManualRegion.over(MESH, region.axes))


def test_is_whole() -> None:
    assert ManualRegion.over(MESH).is_whole
    assert not ManualRegion.over(MESH, ["tp"]).is_whole
    assert ManualRegion.over(THREE, ["dp", "tp"]).is_whole
    assert not ManualRegion.over(THREE, ["sp"]).is_whole


@pytest.mark.parametrize("axes", [(), ("tp", "tp"), ("tp", 1)])
def test_no_axis_or_one_twice(axes: tuple[str | int, ...]) -> None:
    message = (
        f"A manual region over axes={axes} was asked for on a mesh (dp=2, tp=4). It needs at least "
        "one axis, and each only once. Pass some of the mesh's axes, or None for all."
    )
    with pytest.raises(LayoutError, match=re.escape(message)):
        ManualRegion.over(MESH, axes)


def test_an_unknown_axis() -> None:
    with pytest.raises(AxisError, match="nowhere"):
        ManualRegion.over(MESH, ["nowhere"])


@pytest.mark.parametrize(
    ("spec", "shape", "tile"),
    [
        (("tp", None), (10, 6), (3, 6)),
        ((("dp", "tp"), None), (16, 3), (2, 3)),
        ((None, "dp"), (5, 5), (5, 3)),
        ((None, None), (5, 7), (5, 7)),
    ],
)
def test_tile_shapes(
    spec: tuple[object, ...], shape: tuple[int, ...], tile: tuple[int, ...]
) -> None:
    layout = Layout.from_partition_spec(spec, MESH)
    assert ManualRegion.over(MESH).tile_shape(layout, shape) == tile


def test_the_axes_along_which_a_tensor_is_copied() -> None:
    region = ManualRegion.over(MESH)
    copied = [
        region.copied_axes(Layout.from_partition_spec(spec, MESH))
        for spec in (("tp", None), (None, "dp"), ("dp", "tp"), ((("tp", "dp")), None), (None, None))
    ]
    assert copied == [("dp",), ("tp",), (), (), ("dp", "tp")]
    inner = ManualRegion.over(MESH, ["tp"])
    assert inner.copied_axes(Layout.from_partition_spec((None, None), MESH)) == ("tp",)


def test_layouts_that_may_cross_the_border() -> None:
    region = ManualRegion.over(MESH, ["tp"])
    region.check_layout(Layout.from_partition_spec(("tp", None), MESH))
    region.check_layout(Layout.from_partition_spec((None, None), MESH))


def test_a_layout_over_an_axis_that_is_not_manual() -> None:
    message = (
        "The layout [dp, tp] was given for a manual region over the axes ('tp',). At its border "
        "only manual axes may be named, on the region's own mesh. Leave ['dp'] out of the "
        "partition spec."
    )
    with pytest.raises(LayoutError, match=re.escape(message)):
        ManualRegion.over(MESH, ["tp"]).check_layout(Layout.parse("[dp, tp]", MESH))


def test_a_layout_on_another_mesh() -> None:
    with pytest.raises(LayoutError, match=r"Leave the other mesh out of the partition spec\."):
        ManualRegion.over(MESH).check_layout(Layout.parse("[tp]", THREE))


def test_a_layout_that_is_no_tiling() -> None:
    with pytest.raises(LayoutError, match="its shards are no tiles"):
        ManualRegion.over(MESH).check_layout(Layout.parse("[~4.dp]", MESH))
