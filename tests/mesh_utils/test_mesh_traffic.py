"""How long collectives over axes take: against closed forms and counts by hand."""

from __future__ import annotations

import numpy as np
import pytest

from mesh_utils import AxisError, Mesh, Network, Span, Topology, TopologyError, assign
from mesh_utils.traffic import MeshTraffic, TrafficSeconds, part_groups

V5E = Topology.parse("v5e:16x16")  # 50 GB/s a link, one way; wraps
GB = 1e9


def traffic(
    shape: tuple[int, ...], names: tuple[str, ...], topology: Topology = V5E
) -> MeshTraffic:
    return MeshTraffic(topology, Mesh.arange(shape, names))


@pytest.mark.parametrize(
    ("collective", "passes"),
    [("all-gather", 1), ("reduce-scatter", 1), ("all-reduce", 2)],
)
def test_a_row_that_wraps_is_a_ring_both_ways(collective, passes):
    """(1 - 1/16) S over two links of 50 GB/s."""
    found = traffic((16, 16), ("a", "b")).seconds(("b",), 16 * GB, collective)
    assert (found.ici, found.dcn) == (pytest.approx(passes * 15 / 100), 0.0)


def test_half_a_row_is_a_line():
    found = traffic((32, 8), ("a", "b")).seconds(("b",), 8 * GB, "all-gather")
    assert found.ici == pytest.approx(7 / 50)


def test_several_axes_at_once_are_one_group():
    """All of 16 x 16: whole dims, whose links add up."""
    found = traffic((2, 16, 8), ("a", "b", "c"))
    whole = Network.of(V5E).seconds(Span((16, 16, 1)), GB, "all-gather")
    assert found.seconds(("a", "b", "c"), GB, "all-gather").ici == pytest.approx(whole)


def test_a_part_of_an_axis_is_that_axis_of_a_finer_mesh():
    coarse, fine = traffic((16, 16), ("a", "b")), traffic((16, 4, 4), ("a", "b", "c"))
    for part, axis in (("b:(1)4", "b"), ("b:(4)4", "c")):
        for kind in ("all-gather", "all-to-all"):
            found = coarse.seconds((part,), GB, kind)
            assert found == fine.seconds((axis,), GB, kind)
            assert found.ici > 0


def test_no_axis_takes_no_time():
    assert traffic((16, 16), ("a", "b")).seconds((), GB, "all-gather") == TrafficSeconds(0.0)
    assert traffic((256, 1), ("a", "b")).seconds(("b",), GB, "all-gather") == TrafficSeconds(0.0)


def test_two_slices_have_a_part_inside_and_a_part_between():
    """Inside: as in one slice. Between: half of each device's share, both ways of an all-reduce."""
    topology = Topology.parse("2xv5e:16x16")
    mesh = assign(topology, (16, 16), (2, 1), axis_names=("dp", "tp")).mesh
    found = MeshTraffic(topology, mesh)
    one = MeshTraffic(V5E, assign(V5E, (16, 16), axis_names=("dp", "tp")).mesh)
    assert topology.chip is not None
    rate = topology.chip.dcn_bytes_per_second
    assert rate is not None
    both = found.seconds(("dp",), GB, "all-reduce")
    assert both.ici == pytest.approx(one.seconds(("dp",), GB, "all-reduce").ici)
    assert both.dcn == pytest.approx(2 * 0.5 * GB / 16 / rate)
    outer = found.seconds(("dp:(1)2",), GB, "all-reduce")
    assert (outer.ici, outer.dcn) == (0.0, pytest.approx(2 * 0.5 * GB / rate))
    assert found.seconds(("dp",), GB, "all-to-all").dcn == pytest.approx(0.5 * GB / rate)
    assert (found.slices(("dp",)), found.slices(("tp",)), found.slices(("dp:(2)16",))) == (2, 1, 1)


@pytest.mark.parametrize("collective", ["all-gather", "all-reduce", "all-to-all"])
def test_the_sum_of_both_parts_is_the_networks(collective):
    topology = Topology.parse("2xv5p:4x4x4")
    found = assign(topology, (16, 4), (2, 1), axis_names=("dp", "tp"))
    seconds = MeshTraffic(topology, found.mesh).seconds(("dp",), GB, collective)
    wanted = found.network.seconds(found.spans[0], GB, collective)
    assert seconds.ici + seconds.dcn == pytest.approx(wanted)


def test_groups_in_no_rows_go_over_a_ring_in_mesh_order():
    """Two pairs that cross: 0-5, 1-4 of a 4 x 4: each link carries one message each way."""
    small = Topology.parse("v5e:4x4")
    groups = np.array([[0, 5], [1, 4]])
    found = MeshTraffic(small, Mesh.arange((16,))).group_seconds(groups, 50 * GB, "all-gather")
    assert 0 < found.ici < 1.1
    assert found.dcn == 0


def test_a_permute_to_the_next_chip_takes_one_link():
    found = traffic((256,), ("a",))
    ring = [(i, (i + 1) % 16) for i in range(16)]
    assert found.permute_seconds(ring, 50 * GB).ici == pytest.approx(1.0)
    far = [(i, (i + 2) % 16) for i in range(16)]
    assert found.permute_seconds(far, 50 * GB).ici == pytest.approx(2.0)
    assert found.permute_seconds([], GB) == TrafficSeconds(0.0)


def test_a_permute_between_slices_goes_over_dcn():
    topology = Topology.parse("2xv5e:4x4")
    ids = topology.device_ids
    found = MeshTraffic(topology, Mesh(ids, (2, 16), ("pp", "tp")))
    seconds = found.permute_seconds(np.stack([ids[:16], ids[16:]], axis=1), GB)
    assert seconds.ici == 0
    assert seconds.dcn == found.dcn_seconds(GB) > 0


def test_gpus_go_through_a_switch():
    topology = Topology.parse("2xh100:8")
    found = MeshTraffic(topology, Mesh(topology.device_ids, (2, 8), ("dp", "tp")))
    assert found.seconds(("tp",), 8 * GB, "all-gather").ici == pytest.approx(7 / 450)
    assert found.permute_seconds(
        topology.device_ids[[[0, 1], [1, 0]]], 450 * GB
    ).ici == pytest.approx(1)


@pytest.mark.parametrize("axis", ["pp", "tp:(3)2", "tp:(0)2", "tp:(2)8", "", 7])
def test_axes_that_are_not_there_are_refused(axis):
    with pytest.raises(AxisError, match=r"(no such axis|do not divide).*Pass"):
        part_groups(Mesh.arange((2, 4), ("dp", "tp")), (axis,))


def test_parts_are_as_xla_numbers_them():
    mesh = Mesh.arange((8, 1), ("x", "y"))
    assert part_groups(mesh, ("x:(1)2", "x:(4)2", "y")).tolist() == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert part_groups(Mesh.arange((2, 4)), (1,)).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert part_groups(Mesh.arange((2, 4)), ("1:(1)2",)).shape == (4, 2)


def test_unknown_bandwidths_are_said_to_be_so():
    box = Topology.synthetic((4, 4), wrap=(False, False), num_slices=2)
    found = MeshTraffic(box, Mesh(box.device_ids, (2, 16), ("dp", "tp")))
    with pytest.raises(TopologyError, match="bandwidth"):
        found.seconds(("tp",), GB, "all-gather")
    with pytest.raises(TopologyError, match="bandwidth of a chip to other slices is not known"):
        found.dcn_seconds(GB)
    with pytest.raises(TopologyError, match="bandwidth of one is not known"):
        found.permute_seconds(box.device_ids[:2], GB)
