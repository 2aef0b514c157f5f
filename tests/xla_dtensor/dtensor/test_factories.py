"""Tensors made on the mesh: values, how they lie, seeds, arguments and messages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from xla_dtensor import DeviceMesh
from xla_dtensor.core import LayoutError
from xla_dtensor.dtensor import dtensor as factories
from xla_dtensor.errors import ArgumentTypeError, DistributeError
from xla_dtensor.runtimes import Runtime

PLACEMENTS = (
    [Shard(0), Shard(1)],
    [Replicate(), Shard(0)],
    [Shard(0), Shard(0)],
    [Replicate(), Replicate()],
)
MAKERS: list[tuple[Callable[..., Any], float]] = [
    (factories.ones, 1.0),
    (factories.zeros, 0.0),
]


@pytest.mark.parametrize("placements", PLACEMENTS, ids=str)
@pytest.mark.parametrize("shape", [(16, 8), (10, 7), (3, 5)])
@pytest.mark.parametrize(("make", "value"), MAKERS)
def test_values_and_shards(
    runtime: Runtime,
    mesh: DeviceMesh,
    make: Callable[..., Any],
    value: float,
    shape: tuple[int, ...],
    placements: list[Any],
) -> None:
    made = make(shape, device_mesh=mesh, placements=placements)
    assert torch.equal(made.cpu(), torch.full(shape, value))
    asked = made.mesh_layout.op_sharding(runtime.root(mesh.value))
    assert made.xla_sharding() == asked
    tile = asked.shape_per_tile(shape)
    held = {shard.num_bytes_on_device for shard in made.addressable_shards()}
    assert held == {tile[0] * tile[1] * 4}


@pytest.mark.parametrize(
    ("fill", "dtype"), [(7, torch.int64), (2.5, torch.float32), (True, torch.bool)]
)
def test_full_takes_its_dtype_from_the_value(
    runtime: Runtime, mesh: DeviceMesh, fill: Any, dtype: torch.dtype
) -> None:
    made = factories.full((6, 4), fill, device_mesh=mesh, placements=[Shard(0), Replicate()])
    assert made.dtype == dtype
    assert torch.equal(made.cpu(), torch.full((6, 4), fill))


def test_full_keeps_large_integers(runtime: Runtime, mesh: DeviceMesh) -> None:
    assert factories.full((2,), 2**40 + 1, device_mesh=mesh).tolist() == [2**40 + 1] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int32])
def test_dtype(runtime: Runtime, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    assert factories.ones(4, dtype=dtype, device_mesh=mesh).dtype == dtype
    if dtype.is_floating_point:
        assert factories.randn(4, dtype=dtype, device_mesh=mesh).dtype == dtype


@pytest.mark.parametrize("make", [factories.rand, factories.randn])
def test_values_do_not_depend_on_the_placements(
    runtime: Runtime, mesh: DeviceMesh, make: Callable[..., Any]
) -> None:
    drawn = []
    for placements in PLACEMENTS:
        runtime.manual_seed(11)
        drawn.append(make(10, 8, device_mesh=mesh, placements=placements).cpu())
    assert all(torch.equal(drawn[0], other) for other in drawn[1:])
    again = make(10, 8, device_mesh=mesh).cpu()
    assert not torch.equal(drawn[0], again)


def test_distributions(runtime: Runtime, mesh: DeviceMesh) -> None:
    runtime.manual_seed(0)
    uniform = factories.rand(400, 200, device_mesh=mesh, placements=[Shard(0), Shard(1)]).cpu()
    normal = factories.randn(400, 200, device_mesh=mesh, placements=[Shard(0), Shard(1)]).cpu()
    assert uniform.min() >= 0
    assert uniform.max() < 1
    assert uniform.mean().item() == pytest.approx(0.5, abs=0.01)
    assert normal.mean().item() == pytest.approx(0, abs=0.02)
    assert normal.std().item() == pytest.approx(1, abs=0.02)
    # No two shards hold the same draws.
    assert len({round(float(block.sum()), 3) for block in normal.chunk(8)}) == 8


def test_ways_to_write_it(runtime: Runtime, mesh: DeviceMesh) -> None:
    rows = [Shard(0), Replicate()]
    ways = [
        factories.ones(8, 4, device_mesh=mesh, placements=rows),
        factories.ones((8, 4), device_mesh=mesh, placements=rows),
        factories.ones(torch.Size([8, 4]), mesh, rows),
        factories.ones(8, 4, mesh, ("dp", None)),
        factories.full([8, 4], 1.0, mesh, rows),
    ]
    with mesh:
        ways.append(factories.ones(8, 4, placements=rows))
    for made in ways:
        assert (made.shape, made.placements) == ((8, 4), (Shard(0), Replicate()))
    assert factories.ones(device_mesh=mesh).shape == ()
    assert factories.ones(3, device_mesh=mesh).placements == (Replicate(), Replicate())


def test_requires_grad(runtime: Runtime, mesh: DeviceMesh) -> None:
    leaf = factories.rand(4, requires_grad=True, device_mesh=mesh, placements=[Shard(0), Shard(0)])
    (leaf * 3).sum().backward()
    assert leaf.is_leaf
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [3.0] * 4


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: factories.ones(2), DistributeError, "ones was called without a mesh"),
        (lambda m: factories.ones(-1, device_mesh=m), ArgumentTypeError, r"size=\(-1,\)"),
        (lambda m: factories.ones("a", device_mesh=m), ArgumentTypeError, "size="),
        (
            lambda m: factories.zeros(2, m, [Replicate()] * 2, [Replicate()] * 2),
            ArgumentTypeError,
            r"Pass \(size, mesh, placements\)",
        ),
        (
            lambda m: factories.ones(2, device_mesh=m, placements=[Partial(), Replicate()]),
            DistributeError,
            "Partial",
        ),
        (
            lambda m: factories.ones(2, layout=torch.sparse_coo, device_mesh=m),
            DistributeError,
            "layout=torch.sparse_coo",
        ),
        (lambda m: factories.ones(2, m, ("zz",)), LayoutError, "zz"),
    ],
)
def test_refuses(
    runtime: Runtime,
    mesh: DeviceMesh,
    call: Callable[[Any], Any],
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        call(mesh)


def test_no_public_name_is_also_a_module() -> None:
    """Importing ``xla_dtensor.x`` would put the module in the place of ``xla_dtensor.x()``."""
    import xla_dtensor

    folder = Path(xla_dtensor.__file__).parent
    modules = {path.stem for path in folder.iterdir()}
    assert modules.isdisjoint(set(xla_dtensor.__all__))
