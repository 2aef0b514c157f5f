"""Replica groups in every syntax of XLA."""

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xla_dtensor.report import HloError, ReplicaGroups

PAIRS = ((0, 1), (2, 3))


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,1},{2,3}}", PAIRS),
        ("{{0}}", ((0,),)),
        ("{ {0, 1}, {2, 3} }", PAIRS),
        ("{{0},{1,2}}", ((0,), (1, 2))),
        ("{}", ()),
        ("[2,2]<=[4]", PAIRS),
        ("[2,2]<=[2,2]T(1,0)", ((0, 2), (1, 3))),
        ("[4,2]<=[2,2,2]T(2,0,1)", ((0, 2), (4, 6), (1, 3), (5, 7))),
        ("mesh['axis_0'=2,'axis_1'=2] {'axis_1'}", PAIRS),
        ("mesh['axis_0'=2,'axis_1'=2] {'axis_0'}", ((0, 2), (1, 3))),
        ("mesh[a=2,b=2] {b}", PAIRS),
        ("mesh['a'=2,'b'=2] {'b','a'}", ((0, 2, 1, 3),)),
        ("mesh['a'=2,'b'=2] {'a','b'}", ((0, 1, 2, 3),)),
        ("mesh['a'=2,'b'=2] {}", ((0,), (1,), (2,), (3,))),
        ("mesh['a'=1,'b'=2] {'a'}", ((0,), (1,))),
        ("mesh['a'=8] {'a':(1)2}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['a'=8] {'a':(4)2}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("mesh['a'=8] {'a':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['a'=8] {'a':(4)2,'a':(1)2}", ((0, 4, 1, 5), (2, 6, 3, 7))),
        ("mesh['a'=8] {'a':(1)4}", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("mesh['a'=2,'b'=2], device_ids=([2,2]<=[2,2]T(1,0)) {'b'}", ((0, 2), (1, 3))),
        ("mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}", ((0, 2), (1, 3))),
        ("mesh['a'=2,'b'=2], device_ids=([[3,2],[1,0]]) {'b'}", ((3, 2), (1, 0))),
        ("maximal_mesh[device_id=3] {}", ((3,),)),
    ],
)
def test_every_syntax(text, groups):
    assert ReplicaGroups.parse(text).groups == groups


def test_no_groups_mean_all_devices():
    groups = ReplicaGroups.parse("{}")
    assert groups.is_all_devices
    assert (groups.num_groups, groups.group_size) == (1, None)
    assert groups.array() is None
    all_of_four = groups.array(4)
    assert all_of_four is not None
    assert all_of_four.tolist() == [[0, 1, 2, 3]]


def test_groups_are_values():
    one, same = ReplicaGroups.parse("[2,2]<=[4]"), ReplicaGroups(np.arange(4).reshape(2, 2))
    assert (one, hash(one)) == (same, hash(same))
    assert one != ReplicaGroups([[0, 1, 2, 3]])
    assert one != ReplicaGroups([[2, 3], [0, 1]])
    assert one != PAIRS
    assert repr(one) == "ReplicaGroups(2 of 2, [0, 1], ...)"
    array = one.array()
    assert array is not None
    with pytest.raises(ValueError, match="read-only"):
        array[0, 0] = 9


def test_groups_of_different_sizes_have_no_array():
    groups = ReplicaGroups.parse("{{0},{1,2}}")
    assert groups.group_size is None
    assert groups.array() is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "syntaxes"),
        ("0,1", "syntaxes"),
        ("{{0,1},{2,3}", "syntaxes"),
        ("{{0,1},{}}", "syntaxes"),
        ("{{0,x}}", "syntaxes"),
        ("{{0,1}} trailing", "syntaxes"),
        ("{{0,1},{1,2}}", "two groups"),
        ("[2,2]<=[8]", "differ in size"),
        ("[2,2]<=[2,2]T(0,0)", "no permutation"),
        ("[2,2]<=[2,2]T(0)", "no permutation"),
        ("[4]<=[4]", "syntaxes"),
        ("mesh['a'=2,'b'=2] {'c'}", "no axis"),
        ("mesh['a'=2,'b'=2] {'a','a'}", "overlap"),
        ("mesh['a'=8] {'a':(1)4,'a':(2)2}", "overlap"),
        ("mesh['a'=8] {'a':(1)3}", "do not divide"),
        ("mesh['a'=8] {'a':(0)2}", "size 1 or more"),
        ("mesh['a'=x] {'a'}", "'name'=size"),
        ("mesh['a'=2,'a'=2] {'a'}", "'name'=size"),
        ("mesh['a'=2], device_ids=([0,1,2]) {'a'}", "has 3 ids"),
        ("mesh['a'=2], device_ids=([0,0]) {'a'}", "two groups"),
    ],
)
def test_malformed_groups_say_what_why_and_what_instead(text, why):
    with pytest.raises(HloError) as caught:
        ReplicaGroups.parse(text)
    asked, refused, instead = str(caught.value).split(". ", 2)
    assert asked == f"The replica groups {text!r} were given"
    assert why in refused
    assert instead.startswith("Pass them as XLA prints them")


def explicit(groups: np.ndarray) -> str:
    return "{" + ",".join("{" + ",".join(map(str, group)) + "}" for group in groups.tolist()) + "}"


@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    seed=st.integers(0, 2**32 - 1),
)
def test_one_layout_printed_in_all_syntaxes_reads_as_equal_groups(shape, seed):
    """Groups along some dims of an array, in any order of the dims."""
    choose = random.Random(seed)
    names = [f"'axis_{dim}'" for dim in range(len(shape))]
    members = choose.sample(range(len(shape)), choose.randint(0, len(shape)))
    others = [dim for dim in range(len(shape)) if dim not in members]
    size = math.prod(shape[dim] for dim in members)
    groups = np.arange(math.prod(shape)).reshape(shape).transpose(*others, *members)
    groups = groups.reshape(-1, size)

    axes = ",".join(f"{name}={extent}" for name, extent in zip(names, shape, strict=True))
    dims = ",".join(map(str, shape))
    perm = ",".join(map(str, [*others, *members]))
    texts = [
        explicit(groups),
        f"[{groups.shape[0]},{size}]<=[{dims}]T({perm})",
        f"mesh[{axes}] {{{','.join(names[dim] for dim in members)}}}",
        f"mesh[{axes}], device_ids=([{dims}]<=[{groups.size}]) "
        f"{{{','.join(names[dim] for dim in members)}}}",
    ]
    parsed = [ReplicaGroups.parse(text) for text in texts]
    assert {group.groups for group in parsed} == {tuple(map(tuple, groups.tolist()))}
    assert len(set(parsed)) == 1


@given(before=st.integers(1, 4), size=st.integers(1, 4), after=st.integers(1, 4))
def test_a_part_of_an_axis_is_the_same_part_of_an_iota(before, size, after):
    whole = before * size * after
    part = ReplicaGroups.parse(f"mesh['a'={whole}] {{'a':({before}){size}}}")
    iota = ReplicaGroups.parse(f"[{before * after},{size}]<=[{before},{size},{after}]T(0,2,1)")
    assert part == iota


def test_a_quarter_million_devices_read_at_once():
    groups = ReplicaGroups.parse("[512,512]<=[512,512]T(1,0)")
    array = groups.array()
    assert array is not None
    assert array[1, :3].tolist() == [1, 513, 1025]
