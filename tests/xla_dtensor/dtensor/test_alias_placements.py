"""Alias placements, one entry per tensor dim, wherever placements are taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import xla_dtensor as xd
from xla_dtensor import DeviceMesh, DTensor, distribute_tensor
from xla_dtensor.core import LayoutError
from xla_dtensor.errors import DistributeError, RedistributeError

R = Replicate()
VALUE = torch.arange(64.0).reshape(8, 8)
ALIASES: list[tuple[Any, tuple[Any, ...]]] = [
    (("dp", "None"), (Shard(0), R)),
    (("dp", None), (Shard(0), R)),
    (("None", "tp"), (R, Shard(1))),
    (("dp", "tp"), (Shard(0), Shard(1))),
    (("tp", "dp"), (Shard(1), Shard(0))),
    ((("dp", "tp"), "None"), (Shard(0), Shard(0))),
    ((("tp", "dp"), "None"), (_StridedShard(0, split_factor=4), Shard(0))),
    (("None", ("dp",)), (Shard(1), R)),
    ((None, None), (R, R)),
    (("None", "None"), (R, R)),
    (["dp", "None"], (Shard(0), R)),
    (None, (R, R)),
]


def local(mesh: DeviceMesh, alias: Any) -> Any:
    """What each device has of VALUE."""
    x: Any = distribute_tensor(VALUE, mesh, alias)
    return x.to_local()


MAKERS: dict[str, Callable[[DeviceMesh, Any], Any]] = {
    "distribute_tensor": lambda m, a: distribute_tensor(VALUE, m, a),
    "constructor": lambda m, a: DTensor(local(m, a), m, a),
    "from_local": lambda m, a: DTensor.from_local(local(m, a), m, a),
    "redistribute": lambda m, a: distribute_tensor(VALUE, m).redistribute(m, a or (None, None)),
    "custom_shard": lambda m, a: xd.custom_shard(
        lambda v: v, m, (a or (None, "None"),), (a or (None, "None"),)
    )(distribute_tensor(VALUE, m)),
}


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(("alias", "placements"), ALIASES, ids=str)
def test_functions(mesh: DeviceMesh, make: str, alias: Any, placements: tuple[Any, ...]) -> None:
    check(MAKERS[make](mesh, alias), mesh, placements)


@pytest.mark.parametrize(("alias", "placements"), ALIASES, ids=str)
@pytest.mark.parametrize("name", ["ones", "zeros", "empty", "full", "rand", "randn"])
def test_factories(mesh: DeviceMesh, name: str, alias: Any, placements: tuple[Any, ...]) -> None:
    fill = (3.0,) if name == "full" else ()
    by_name = getattr(xd, name)((8, 8), *fill, device_mesh=mesh, placements=alias)
    assert by_name.shape == (8, 8)
    lies(by_name, mesh, placements)
    if name != "full" and alias is not None:  # HyperParallel's order
        lies(getattr(xd, name)((8, 8), mesh, alias), mesh, placements)


@pytest.mark.parametrize(("alias", "placements"), ALIASES, ids=str)
def test_gradients(mesh: DeviceMesh, alias: Any, placements: tuple[Any, ...]) -> None:
    x: Any = distribute_tensor(VALUE, mesh, alias).requires_grad_()
    x.to_local(grad_placements=alias).mul(2).sum().backward()
    assert x.grad is not None
    lies(x.grad, mesh, placements)
    assert torch.equal(x.grad.cpu(), torch.full((8, 8), 2.0))
    y: Any = distribute_tensor(VALUE, mesh, alias).requires_grad_()
    y.full_tensor(grad_placements=alias).sum().backward()
    assert y.grad is not None
    lies(y.grad, mesh, placements)


def check(made: Any, mesh: DeviceMesh, placements: tuple[Any, ...]) -> None:
    lies(made, mesh, placements)
    assert torch.equal(made.cpu(), VALUE)


def lies(made: Any, mesh: DeviceMesh, placements: tuple[Any, ...]) -> None:
    asked = xd.Layout.from_placements(placements, 2, mesh.value)
    assert tuple(map(type, made.placements)) == tuple(map(type, placements))
    assert made.mesh_layout == asked
    assert made.xla_sharding() == asked.op_sharding()


def test_scalars_and_rows(mesh: DeviceMesh) -> None:
    assert distribute_tensor(torch.tensor(2.0), mesh, ()).placements == (R, R)
    row = distribute_tensor(torch.arange(8.0), mesh, (("dp", "tp"),))
    assert row.local_shape == (1,)
    assert row.redistribute(mesh, ("tp",)).placements == (R, Shard(0))


def test_aliases_and_partial(mesh: DeviceMesh) -> None:
    total: Any = distribute_tensor(VALUE, mesh, ("dp", None)).sum(0)
    assert total.placements == (Partial(), R)
    # An alias has no word for a reduction: it asks for the sum.
    assert total.redistribute(mesh, ("tp",)).placements == (R, Shard(0))


@pytest.mark.parametrize(
    "call",
    [
        lambda m, a: distribute_tensor(VALUE, m, a),
        lambda m, a: DTensor(VALUE, m, a),
        lambda m, a: DTensor.from_local(VALUE, m, a),
        lambda m, a: distribute_tensor(VALUE, m).redistribute(m, a),
        lambda m, a: xd.ones(8, 8, device_mesh=m, placements=a),
        lambda m, a: xd.compute_local_shape_and_global_offset((8, 8), m, a),
    ],
)
@pytest.mark.parametrize(
    ("alias", "error", "text"),
    [
        (("dp",), DistributeError, "one entry per dim. Pass 2 entries"),
        (("dp", "tp", "None"), DistributeError, "one entry per dim. Pass 2 entries"),
        (("dp", "dp"), LayoutError, "dp"),
        (("ep", "None"), LayoutError, "ep"),
        ((("dp", "dp"), "None"), LayoutError, "dp"),
        (("dp", Shard(1)), DistributeError, "aliases and placements cannot be mixed"),
        ("dp", DistributeError, "Placements are a sequence"),
    ],
)
def test_wrong_aliases(
    mesh: DeviceMesh, call: Any, alias: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        call(mesh, alias)


def test_no_aliases_at_all(mesh: DeviceMesh) -> None:
    with pytest.raises(RedistributeError, match="without placements"):
        distribute_tensor(VALUE, mesh).redistribute(mesh, None)
