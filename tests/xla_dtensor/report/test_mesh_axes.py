"""Naming the mesh axes of groups."""

import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mesh_utils import Mesh
from xla_dtensor.report import HloError, ReplicaGroups
from xla_dtensor.report.collective import Granules, group_axes, pair_axes, transfer_axes

MESH = Mesh.arange((2, 4), ("dp", "tp"))


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ([[0, 1, 2, 3], [4, 5, 6, 7]], ("tp",)),
        ([[7, 5, 6, 4], [1, 0, 3, 2]], ("tp",)),  # any order of groups and members
        ([[0, 4], [1, 5], [2, 6], [3, 7]], ("dp",)),
        ([[0, 4, 1, 5, 2, 6, 3, 7]], ("dp", "tp")),
        ([[0, 1], [2, 3], [4, 5], [6, 7]], ("tp:(2)2",)),
        ([[0, 2], [1, 3], [4, 6], [5, 7]], ("tp:(1)2",)),
        ([[0, 2, 4, 6], [1, 3, 5, 7]], ("dp", "tp:(1)2")),
        ([[i] for i in range(8)], ()),
        ([[0, 5], [1, 4], [2, 7], [3, 6]], None),  # across both axes at once
        ([[0, 1], [2, 3], [4, 6], [5, 7]], None),  # one part here, another there
        ([[0, 1, 4, 7], [2, 3, 5, 6]], None),
        ([[0, 1], [2, 3]], None),  # not all devices
        ([[0, 1, 2, 3], [4, 5, 6, 8]], None),  # a device that there is not
        ([[1, 2], [0, 3], [5, 6], [4, 7]], None),  # tp, but no part of it
    ],
)
def test_groups_on_a_two_axis_mesh(groups, axes):
    assert group_axes(np.array(groups), MESH) == axes


def test_two_parts_of_one_axis_are_both_named():
    groups = np.arange(8).reshape(2, 2, 2).transpose(1, 0, 2).reshape(2, 4)
    assert group_axes(groups, Mesh.arange((8,), ("x",))) == ("x:(1)2", "x:(4)2")


def test_parts_need_not_be_powers_of_two():
    groups = np.arange(12).reshape(2, 3, 2).transpose(0, 2, 1).reshape(4, 3)
    assert group_axes(groups, Mesh.arange((12,), ("x",))) == ("x:(2)3",)


def test_axes_without_names_are_numbers_and_parts_of_them_text():
    mesh = Mesh.arange((2, 4))
    assert group_axes(np.arange(8).reshape(2, 4), mesh) == (1,)
    assert group_axes(np.arange(8).reshape(4, 2), mesh) == ("1:(2)2",)


def test_axes_of_size_one_are_never_named():
    mesh = Mesh.arange((1, 4, 1), ("a", "b", "c"))
    assert group_axes(np.arange(4)[None], mesh) == ("b",)
    assert group_axes(np.arange(4)[:, None], mesh) == ()


@pytest.mark.parametrize("shape", [(2, 2, 2), (2, 4), (3, 4, 2), (1, 6), (8,)])
@pytest.mark.parametrize("permuted", [False, True])
def test_the_groups_of_every_axis_subset_are_named_after_it(shape, permuted):
    """The numbers are places in the mesh, so that a permutation of its devices changes nothing."""
    names = tuple("abc"[: len(shape)])
    ids = np.arange(math.prod(shape))
    mesh = Mesh(np.random.default_rng(0).permutation(ids) if permuted else ids, shape, names)
    for count in range(len(shape) + 1):
        for axes in itertools.combinations(names, count):
            places = np.argsort(mesh.device_ids, axis=None)[mesh.groups(axes)]
            wanted = tuple(axis for axis in axes if mesh.size(axis) > 1)
            assert group_axes(places, mesh) == wanted


@given(
    shape=st.lists(st.integers(2, 3), min_size=1, max_size=3),
    size=st.integers(2, 4),
    seed=st.integers(0, 2**32 - 1),
)
def test_random_groups_are_named_only_if_they_are_that_axis(shape, size, seed):
    """A name means that the groups of that name are these groups, as sets."""
    count = math.prod(shape)
    assume(count % size == 0)
    places = list(range(count))
    random.Random(seed).shuffle(places)
    groups = np.array(places).reshape(-1, size)
    names = tuple("abc"[: len(shape)])
    axes = group_axes(groups, Mesh.arange(shape, names))
    if axes is not None:
        mesh_text = ",".join(f"'{n}'={s}" for n, s in zip(names, shape, strict=True))
        refs = ",".join(f"'{axis[0]}'{axis[1:]}" for axis in map(str, axes))
        named = ReplicaGroups.parse(f"mesh[{mesh_text}] {{{refs}}}").groups
        assert set(map(frozenset, named)) == set(map(frozenset, groups.tolist()))


def test_a_wrong_attribution_would_be_noticed():
    """The test above can fail: a namer that says "tp" for groups of dp does not pass its check."""
    dp = [[0, 4], [1, 5], [2, 6], [3, 7]]
    tp = ReplicaGroups.parse("mesh['dp'=2,'tp'=4] {'tp'}").groups
    assert set(map(frozenset, tp)) != set(map(frozenset, dp))
    assert group_axes(np.array(dp), MESH) != ("tp",)
    assert group_axes(np.array(dp), Mesh.arange((4, 2), ("dp", "tp"))) == ("dp:(1)2",)


@pytest.mark.parametrize(
    ("pairs", "axes"),
    [
        ([(0, 1), (1, 0)], ("tp",)),
        ([(0, 4)], ("dp",)),
        ([(0, 5)], ("dp", "tp")),
        ([(0, 1), (0, 4)], ("dp", "tp")),
        ([(0, 0), (5, 5)], ()),
        ([], ()),
    ],
)
def test_permutes_go_along_the_axes_on_which_coordinates_change(pairs, axes):
    assert pair_axes(np.array(pairs, int), MESH) == axes


def test_granules_unfold_what_one_slice_does():
    tp_over_two_slices = Granules([0, 0, 1, 1] * 2)
    assert tp_over_two_slices.local_to_mesh(np.array([[0, 1], [2, 3]])).tolist() == [
        [0, 1],
        [4, 5],
        [2, 3],
        [6, 7],
    ]


def test_granules_of_different_sizes_are_refused():
    with pytest.raises(HloError, match=r"Granules of \[3, 1\] devices were given\. .*\. Pass"):
        Granules([0, 0, 0, 1])


# What XLA printed for two v5e 2x2 slices; their devices have the ids 100000... and 200000...
TWO_SLICES = Mesh(
    [100000, 100001, 200000, 200001, 100002, 100003, 200002, 200003], (2, 4), ("dp", "tp")
)
SLICE_OF = Granules([0, 0, 1, 1] * 2)


@pytest.mark.parametrize(
    ("target", "axes"),
    [
        ("{1,2}x{0:3}", ("tp:(1)2",)),
        ("{1:2}x{0,1,2,3}", ("tp:(1)2",)),
        ("{{100000->200000},{100001->200001}}", ("tp",)),
        ("{{100000->100002}}", ("dp",)),
        (
            "{{100000,100001,200000,200001},{100002,100003,200002,200003}}",
            ("tp",),
        ),
        ("{1,3}x{0:3}", None),  # no third slice
        ("{1,2}x{0:7}", None),  # no 8 devices in a slice
        ("{0,1}x{0:3}", None),  # slices are counted from 1
        ("{{7->8}}", None),  # ids of no device
        ("{{100000,200000},{100001}}", None),
        ("something else", None),
    ],
)
def test_transfers_between_slices(target, axes):
    assert transfer_axes(target, TWO_SLICES, SLICE_OF) == axes


def test_a_product_of_slices_is_not_guessed_without_granules():
    assert transfer_axes("{1,2}x{0:3}", TWO_SLICES, None) is None
