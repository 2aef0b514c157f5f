"""compute_local_shape_and_global_offset against PyTorch's own, on every device of the mesh."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor import _utils as torch_utils

import xla_dtensor as xd
from xla_dtensor import DeviceMesh, compute_local_shape_and_global_offset
from xla_dtensor.errors import ArgumentTypeError, DistributeError

R = Replicate()
CHOICES = (R, Partial(), Shard(0), Shard(1), Shard(-1))
SHAPES = ((8, 4), (5, 7), (1, 3), (3, 9), (0, 2))


def at(mesh: DeviceMesh, coordinate: Any, patch: pytest.MonkeyPatch) -> None:
    """Make the mesh say that this process has the device at a coordinate."""
    patch.setattr(mesh, "get_coordinate", lambda: coordinate)
    patch.setattr(mesh, "_coordinate_on_dim", coordinate)  # newer torch looks here


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("placements", list(product(CHOICES, repeat=2)), ids=str)
def test_as_pytorch_says(
    mesh: DeviceMesh,
    monkeypatch: pytest.MonkeyPatch,
    shape: tuple[int, ...],
    placements: tuple[Any, ...],
) -> None:
    for coordinate in product(range(2), range(4)):
        at(mesh, list(coordinate), monkeypatch)
        ours = compute_local_shape_and_global_offset(shape, mesh, placements)
        plain = tuple(Shard(1) if p == Shard(-1) else p for p in placements)
        theirs = torch_utils.compute_local_shape_and_global_offset(torch.Size(shape), mesh, plain)
        assert ours == theirs


def test_three_axes_on_one_dim(runtime: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = xd.init_device_mesh("xla", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
    for size, place in product(range(20), product(range(2), repeat=3)):
        at(mesh, list(place), monkeypatch)
        ours = compute_local_shape_and_global_offset((size,), mesh, [Shard(0)] * 3)
        assert ours == torch_utils.compute_local_shape_and_global_offset(
            torch.Size([size]), mesh, [Shard(0)] * 3
        )


def test_the_parts_are_the_shards(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    value = torch.arange(70).reshape(10, 7)
    x: Any = xd.distribute_tensor(value, mesh, ("dp", "tp"))
    for device, shard in enumerate(x.to_local().addressable_shards()):
        at(mesh, [device // 4, device % 4], monkeypatch)
        shape, offset = compute_local_shape_and_global_offset(x.shape, mesh, x.placements)
        rows = slice(offset[0], offset[0] + shape[0]), slice(offset[1], offset[1] + shape[1])
        assert torch.equal(shard.data, value[rows])


def test_aliases(mesh: DeviceMesh) -> None:
    assert compute_local_shape_and_global_offset((5, 8), mesh, ("dp", "tp")) == ((3, 2), (0, 0))
    assert compute_local_shape_and_global_offset((16,), mesh, (("dp", "tp"),)) == ((2,), (0,))
    assert compute_local_shape_and_global_offset((5, 8), mesh, None) == ((5, 8), (0, 0))
    assert compute_local_shape_and_global_offset((), mesh, ()) == ((), ())


def test_a_process_off_the_mesh(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    at(mesh, None, monkeypatch)
    ours = compute_local_shape_and_global_offset((8, 4), mesh, [Shard(0), R])
    theirs = torch_utils.compute_local_shape_and_global_offset(
        torch.Size([8, 4]), mesh, [Shard(0), R]
    )
    assert ours == theirs == ((0,), ())


@pytest.mark.parametrize(
    ("shape", "placements", "error", "text"),
    [
        ((8.0, 4), [R, R], ArgumentTypeError, "global_shape=\\(8.0, 4\\). A shape is made of"),
        ((-1,), [R, R], ArgumentTypeError, "global_shape=\\(-1,\\)"),
        ((8, 4), [R], DistributeError, "_global_offset was called with 1 placements"),
        ((8, 4), [Shard(2), R], DistributeError, "The dim 2 does not exist"),
    ],
)
def test_bad_input(
    mesh: DeviceMesh, shape: Any, placements: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        compute_local_shape_and_global_offset(shape, mesh, placements)
