"""Device: what is read from JAX, torch_xla and bare ids; synthetic slices; every message."""

import pickle
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh_utils import Device, HybridMesh, MeshError, read_devices, synthetic_devices


def tpu(number: int, **attributes: Any) -> SimpleNamespace:
    """A TPU as JAX shows it: on one slice it has no slice_index."""
    shown = {"platform": "tpu", "device_kind": "TPU v4", "process_index": 3, "core_on_chip": 0}
    return SimpleNamespace(id=number, **{**shown, "coords": [number, 0, 0], **attributes})


# --- reading -------------------------------------------------------------------------------------


def test_bare_ids() -> None:
    expected = tuple(Device(number) for number in range(4))
    assert read_devices(range(4)) == expected
    assert read_devices(np.arange(4).reshape(2, 2)) == expected
    assert read_devices(iter([0, np.int32(1), 2, 3])) == expected


def test_devices_stay_as_they_are() -> None:
    devices = synthetic_devices((2, 2), num_slices=2)
    assert read_devices(devices) == devices
    assert read_devices(np.array(devices, object).reshape(2, 4)) == devices
    assert pickle.loads(pickle.dumps(devices)) == devices


def test_jax_devices_of_one_slice() -> None:
    assert read_devices([tpu(1)]) == (Device(1, 3, None, (1, 0, 0), 0, "TPU v4"),)


def test_jax_devices_of_several_slices() -> None:
    found = read_devices([tpu(100_000, slice_index=0, core_on_chip=1), tpu(200_000, slice_index=1)])
    assert [(device.id, device.slice_index) for device in found] == [(100_000, 0), (200_000, 1)]
    assert [device.core_on_chip for device in found] == [1, 0]


def test_only_the_coords_of_a_tpu_are_kept() -> None:
    gpu = SimpleNamespace(
        id=7,
        platform="gpu",
        device_kind="NVIDIA H100",
        process_index=0,
        slice_index=2,
        coords=(7, 0, 2),
        core_on_chip=1,
    )
    assert read_devices([gpu]) == (Device(7, 0, 2, None, 0, "NVIDIA H100"),)


def test_torch_xla_attributes() -> None:
    on_tpu = [
        {"name": "TPU:4", "coords": [1, 2, 0], "core_on_chip": 1, "slice_index": 1},
        {"name": "TPU:0", "coords": [0, 0, 0], "core_on_chip": 0, "slice_index": 0},
    ]
    assert read_devices(on_tpu) == (
        Device(4, None, 1, (1, 2, 0), 1, "TPU"),
        Device(0, None, 0, (0, 0, 0), 0, "TPU"),
    )
    assert read_devices([{"name": "CPU:3"}]) == (Device(3, kind="CPU"),)


@pytest.mark.only_on("jax")
def test_live_jax_devices(runtime: Any) -> None:
    import jax

    found = read_devices(jax.devices())
    assert [device.id for device in found] == list(runtime.device_ids())
    assert {replace(device, id=0) for device in found} == {Device(0, 0, kind="cpu")}


@pytest.mark.only_on("torch_xla")
def test_live_torch_xla_attributes(runtime: Any) -> None:
    import torch_xla.runtime as xr

    found = read_devices(xr.global_runtime_device_attributes())
    assert sorted(device.id for device in found) == list(runtime.device_ids())
    assert {replace(device, id=0) for device in found} == {Device(0, kind="CPU")}


def test_live_devices_make_a_hybrid_mesh(runtime: Any) -> None:
    """Without slices to read, a size says what a granule is."""
    if runtime.name == "jax":
        import jax

        devices: Any = jax.devices()
    else:
        import torch_xla.runtime as xr

        devices = xr.global_runtime_device_attributes()
    mesh = HybridMesh(devices, ici_mesh_shape=(2, 2), dcn_mesh_shape=(2, 1), granule=4)
    mesh.check_valid()
    assert mesh.device_ids.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    whole = HybridMesh(devices, ici_mesh_shape=(2, 4))
    assert whole.granules == (tuple(range(8)),)


# --- synthetic slices ----------------------------------------------------------------------------

SHAPES = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))


@given(SHAPES, st.integers(1, 3), st.integers(1, 2))
def test_synthetic_devices_are_numbered_and_listed_like_libtpus(
    hosts: tuple[int, int, int], num_slices: int, cores: int
) -> None:
    x, y, z = hosts[0] * 2, hosts[1] * 2, hosts[2]
    devices = synthetic_devices((x, y, z), num_slices, cores)
    assert len({device.id for device in devices}) == x * y * z * cores * num_slices
    processes = [device.process_index for device in devices]
    assert processes == [place // (4 * cores) for place in range(len(devices))]
    for device in devices:
        assert device.coords is not None
        at_x, at_y, at_z = device.coords
        local = device.core_on_chip + cores * (at_x + x * (at_y + y * at_z))
        start = 0 if num_slices == 1 else 100_000 * ((device.slice_index or 0) + 1)
        assert device.id == start + local
        host = at_x // 2 + x // 2 * (at_y // 2 + y // 2 * at_z)
        per_slice = x * y * z // 4
        assert device.process_index == host + per_slice * (device.slice_index or 0)
    assert ({device.slice_index for device in devices} == {None}) == (num_slices == 1)


def test_hosts_are_not_larger_than_slices() -> None:
    assert [device.process_index for device in synthetic_devices((1, 2))] == [0, 0]
    eight = synthetic_devices((4, 4), chips_per_host=(4, 2, 1))
    assert [device.process_index for device in eight] == [0] * 8 + [1] * 8
    assert [device.id for device in eight] == list(range(16))


# --- messages ------------------------------------------------------------------------------------

PASS = (
    "Pass jax.devices(), xr.global_runtime_device_attributes() of torch_xla, Devices or device ids."
)
SYNTHETIC = (
    "Slices are made of whole hosts, and libtpu numbers at most 100000 devices in each of several "
    "slices. Pass counts of 1 or more, and a slice_shape that chips_per_host divides."
)

CASES: list[tuple[Callable[[], object], str]] = [
    (
        lambda: read_devices({"name": "TPU:0"}),
        f"Devices were given as one dict. That is no list of devices. {PASS}",
    ),
    (
        lambda: read_devices(8),  # type: ignore[arg-type]
        f"Devices were given as one int. That is no list of devices. {PASS}",
    ),
    (
        lambda: read_devices([]),
        f"No devices were given. A mesh has at least one device. {PASS}",
    ),
    (
        lambda: read_devices([0, "TPU:1"]),
        f"Device 1 of the list is 'TPU:1'. It is no device that is known here. {PASS}",
    ),
    (
        lambda: read_devices([True]),
        f"Device 0 of the list is True. It is no device that is known here. {PASS}",
    ),
    (
        lambda: read_devices([{"name": "TPU:0"}, {"coords": [0, 0, 0]}]),
        "Device 1 of the list is {'coords': [0, 0, 0]}. It has no name such as 'TPU:3', from which "
        "torch_xla's devices get their id. Pass xr.global_runtime_device_attributes() as it is.",
    ),
    (
        lambda: read_devices([{"name": "TPU"}]),
        "Device 0 of the list is {'name': 'TPU'}. It has no name such as 'TPU:3', from which "
        "torch_xla's devices get their id. Pass xr.global_runtime_device_attributes() as it is.",
    ),
    (
        lambda: read_devices([tpu(0, coords=[0, 1])]),
        "Device 0 has coords=[0, 1]. A chip has three coordinates, x, y and z. "
        "Pass the coords that the runtime gives.",
    ),
    (
        lambda: read_devices([{"name": "TPU:0", "coords": "0,0,0"}]),
        "Device 0 has coords='0,0,0'. A chip has three coordinates, x, y and z. "
        "Pass the coords that the runtime gives.",
    ),
    (
        lambda: read_devices([0, 1, 2, 1]),
        "Device 1 was given twice, in a list of 4 devices. A device has one place in a mesh. "
        "Pass each device once.",
    ),
    (
        lambda: read_devices([tpu(0, slice_index=0), tpu(1), tpu(2)]),
        "3 devices were given, of which 1 have slice_index and 2 have not, such as device 1. "
        "Devices of one job are described alike. Pass devices of one source.",
    ),
    (
        lambda: read_devices([{"name": "TPU:0", "coords": [0, 0, 0]}, {"name": "TPU:1"}]),
        "2 devices were given, of which 1 have coords and 1 have not, such as device 1. "
        "Devices of one job are described alike. Pass devices of one source.",
    ),
    (
        lambda: read_devices([Device(0, process_index=0), 1]),
        "2 devices were given, of which 1 have process_index and 1 have not, such as device 1. "
        "Devices of one job are described alike. Pass devices of one source.",
    ),
    (
        lambda: synthetic_devices((2, 0)),
        "Devices were asked for with slice_shape=(2, 0). That is no box of chips. "
        "Pass up to three positive integers: the chips in x, y and z.",
    ),
    (
        lambda: synthetic_devices((2, 2), chips_per_host=(1, 1, 1, 1)),
        "Devices were asked for with chips_per_host=(1, 1, 1, 1). That is no box of chips. "
        "Pass up to three positive integers: the chips in x, y and z.",
    ),
    (
        lambda: synthetic_devices((3, 2)),
        "Devices were asked for with slice_shape=(3, 2, 1), num_slices=1, cores_per_chip=1, "
        f"chips_per_host=(2, 2, 1). {SYNTHETIC}",
    ),
    (
        lambda: synthetic_devices((2, 2), num_slices=0),
        "Devices were asked for with slice_shape=(2, 2, 1), num_slices=0, cores_per_chip=1, "
        f"chips_per_host=(2, 2, 1). {SYNTHETIC}",
    ),
    (
        lambda: synthetic_devices((64, 64, 32), num_slices=2),
        "Devices were asked for with slice_shape=(64, 64, 32), num_slices=2, cores_per_chip=1, "
        f"chips_per_host=(2, 2, 1). {SYNTHETIC}",
    ),
]


@pytest.mark.parametrize(("ask", "message"), CASES)
def test_messages(ask: Callable[[], object], message: str) -> None:
    with pytest.raises(MeshError) as caught:
        ask()
    assert str(caught.value) == message
