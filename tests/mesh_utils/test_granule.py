"""Granules: by slice, process, size or function; every message."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh_utils import Device, Granule, MeshError, granules, synthetic_devices

TWO_SLICES = synthetic_devices((2, 2), num_slices=2, kind="TPU v4")


def ids(devices: object, granule: Granule = "slice") -> list[list[int]]:
    found = granules(devices, granule)  # type: ignore[arg-type]
    return [[device.id for device in each] for each in found]


def gpus(hosts: int, per_host: int, slice_of_host: Callable[[int], int]) -> list[Device]:
    return [
        Device(
            n, process_index=n // per_host, slice_index=slice_of_host(n // per_host), kind="B200"
        )
        for n in range(hosts * per_host)
    ]


def rack(device: Device) -> str:
    return "ab"[device.id % 2]


def test_slices() -> None:
    slices = [list(range(100_000, 100_004)), list(range(200_000, 200_004))]
    assert ids(TWO_SLICES) == slices
    assert ids(reversed(TWO_SLICES)) == slices


def test_devices_without_a_slice_are_one() -> None:
    assert ids(range(4)) == [[0, 1, 2, 3]]
    assert len(granules(synthetic_devices((4, 4)))) == 1


def test_slices_are_in_the_order_of_their_index_and_not_of_ids() -> None:
    devices = [Device(n, slice_index=index) for n, index in enumerate([10, 10, 9, 9])]
    assert ids(devices) == [[2, 3], [0, 1]]


def test_processes() -> None:
    assert ids(synthetic_devices((4, 2)), "process") == [[0, 1, 4, 5], [2, 3, 6, 7]]
    one_gpu_each = [Device(n, process_index=3 - n) for n in range(4)]
    assert ids(one_gpu_each, "process") == [[3], [2], [1], [0]]


def test_a_size_joins_devices_that_follow_each_other_by_id() -> None:
    assert ids([5, 0, 3, 7], 2) == [[0, 3], [5, 7]]
    # An NVL72 rack: 18 hosts of 4, each of which the runtime may call a slice.
    racks = granules(gpus(36, 4, lambda host: host), 72)
    assert [{device.process_index for device in each} for each in racks] == [
        set(range(18)),
        set(range(18, 36)),
    ]


def test_a_function_names_the_granule() -> None:
    assert ids(range(6), rack) == [[0, 2, 4], [1, 3, 5]]
    assert ids(range(6), lambda device: (-(device.id // 3), "x")) == [[3, 4, 5], [0, 1, 2]]


@given(st.integers(1, 6), st.integers(1, 6), st.randoms())
def test_the_order_of_the_list_does_not_matter(count: int, size: int, random: object) -> None:
    devices = [Device(n, slice_index=n % count) for n in range(count * size)]
    shuffled = devices[:]
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    found = granules(shuffled)
    assert found == granules(devices)
    assert [each[0].slice_index for each in found] == list(range(count))
    assert {len(each) for each in found} == {size}
    assert len(granules(shuffled, size)) == count


RAGGED = [
    replace(device, slice_index=min(n // 3, 2)) for n, device in enumerate(map(Device, range(10)))
]

CASES: list[tuple[Callable[[], object], str]] = [
    (
        lambda: granules(RAGGED),
        "granule='slice' was asked for: it makes 3 granules of 3 to 4 devices; granule 2 has 4, "
        "others have 3. Granules of one mesh have one size. "
        "Leave out devices until they have, or pass another granule.",
    ),
    (
        lambda: granules(range(12), 8),
        "granule=8 was asked for, with 12 devices. They are no whole number of granules of 8. "
        "Pass a size that divides 12, such as 6.",
    ),
    (
        lambda: granules(range(12), 0),
        "granule=0 was asked for, with 12 devices. They are no whole number of granules of 0. "
        "Pass a size that divides 12, such as 1.",
    ),
    (
        lambda: granules(range(4), "host"),  # type: ignore[arg-type]
        "granule='host' was asked for, with 4 devices. There is no such granule. "
        "Pass 'slice', 'process', a number of devices, or a function of a Device.",
    ),
    (
        lambda: granules(range(4), True),
        "granule=True was asked for, with 4 devices. There is no such granule. "
        "Pass 'slice', 'process', a number of devices, or a function of a Device.",
    ),
    (
        lambda: granules([{"name": "TPU:0"}, {"name": "TPU:1"}], "process"),
        "granule='process' was asked for, with 2 devices. They have no process_index, which "
        "torch_xla and bare ids do not tell. "
        "Pass granule='slice', or the number of devices per process.",
    ),
    (
        lambda: granules(TWO_SLICES, rack),
        "granule=rack was asked for: it puts devices of the slices 0 and 1 into one granule. "
        "Slices of TPUs are joined by DCN only. "
        "Pass granule='slice', or one that divides slices.",
    ),
    (
        lambda: granules(TWO_SLICES, 8),
        "granule=8 was asked for: it puts devices of the slices 0 and 1 into one granule. "
        "Slices of TPUs are joined by DCN only. "
        "Pass granule='slice', or one that divides slices.",
    ),
]


@pytest.mark.parametrize(("ask", "message"), CASES)
def test_granule_messages(ask: Callable[[], object], message: str) -> None:
    with pytest.raises(MeshError) as caught:
        ask()
    assert str(caught.value) == message


def test_keys_without_an_order() -> None:
    with pytest.raises(MeshError, match=r"Its keys, such as \[0, 'odd'\], have no order"):
        granules(range(4), lambda device: device.id % 2 and "odd")


def test_keys_of_no_set() -> None:
    with pytest.raises(MeshError, match=r"It gives \[0\] for device 0, which cannot be the key"):
        granules(range(4), lambda device: [device.id])  # type: ignore[arg-type,return-value]
