"""Groups of a mesh axis's members after install(), and their numbers."""

# torch does not list these names in __all__, and knows no other group than its own.
# pyright: reportPrivateImportUsage=false, reportArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import local_map

import xla_dtensor as xd
from mesh_utils import Mesh
from xla_dtensor.dtensor.mesh import AxisGroup, MemberNumber
from xla_dtensor.errors import LocalViewError, MeshRankError, ProcessGroupError


@pytest.fixture
def group(mesh: xd.DeviceMesh) -> Iterator[Any]:
    xd.install()
    yield mesh.get_group("tp")
    xd.uninstall()


def test_size_and_numbers(group: Any, mesh: xd.DeviceMesh) -> None:
    assert isinstance(group, AxisGroup)
    assert group == mesh["tp"].get_group()
    assert dist.get_world_size(group) == group.size() == 4
    assert repr(dist.get_rank(group)) == "MemberNumber(tp: 0, 1, 2, 3)"


def test_functional_collectives_take_it(group: Any, mesh: xd.DeviceMesh) -> None:
    rows = xd.distribute_tensor(torch.arange(8.0), mesh, [Replicate(), Shard(0)])
    summed: Any = funcol.all_reduce(rows.to_local(), "sum", group)
    assert summed.tolist() == [0 + 2 + 4 + 6, 1 + 3 + 5 + 7]


@pytest.mark.parametrize("compiled", [False, True])
def test_numbers_among_local_views(group: Any, mesh: xd.DeviceMesh, compiled: bool) -> None:
    """Each device looks up its own rows of a table, and the parts are summed."""
    table = torch.arange(16.0).reshape(8, 2)
    ids = torch.tensor([[0, 7, 3], [5, 1, 2]])

    def look_up(rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        start = dist.get_rank(group) * 2
        mine = (ids >= start) & (ids < start + rows.shape[0])
        found = torch.nn.functional.embedding((ids - start).clamp(0, 1), rows)
        return funcol.all_reduce(found * mine.unsqueeze(-1), "sum", group)

    by_rank = local_map(
        look_up,
        out_placements=([Replicate(), Replicate()],),  # pyright: ignore
        in_placements=([Replicate(), Shard(0)], [Replicate(), Replicate()]),
        device_mesh=mesh,
    )
    run: Callable[..., Any] = xd.compile(by_rank) if compiled else by_rank
    rows = xd.distribute_tensor(table, mesh, [Replicate(), Shard(0)])
    found = run(rows, xd.distribute_tensor(ids, mesh))
    assert torch.equal(found.full_tensor().cpu(), table[ids])


def test_numbers_are_integers_where_members_agree() -> None:
    number = AxisGroup(Mesh.arange((4,), ("tp",)), "tp").rank()
    assert repr(10 - number * 2 + 1) == "MemberNumber(tp: 11, 9, 7, 5)"
    assert repr(-(number // 2) % 3) == "MemberNumber(tp: 0, 0, 2, 2)"
    assert repr(number + number) == "MemberNumber(tp: 0, 2, 4, 6)"
    assert number < 4
    assert number >= 0
    assert number != 4
    assert number == number
    assert int(number * 0 + 3) == 3
    assert [5, 6][number // 4] == 5
    assert bool(number + 1)


def test_where_members_differ() -> None:
    number = MemberNumber("tp", range(2))
    for ask in (
        lambda: number == 0,
        lambda: number < 1,
        lambda: bool(number),
        lambda: [1, 2][number],
        lambda: min(1, number),
    ):
        with pytest.raises(LocalViewError, match=r"not the same on each\. Compute it with tensors"):
            ask()
    with pytest.raises(LocalViewError, match="different axes"):
        _ = number + MemberNumber("dp", range(2))
    with pytest.raises(LocalViewError, match=r"but no local view\. Each member has its own"):
        _ = torch.ones(2) + number  # pyright: ignore[reportOperatorIssue]
    with pytest.raises(TypeError):
        _ = number + "1"


def test_refusals(group: Any, mesh: xd.DeviceMesh) -> None:
    with pytest.raises(MeshRankError, match=r"each has members of its own\. Pass mesh_dim"):
        mesh.get_group()
    with pytest.raises(ProcessGroupError, match="The group_name of the members along 'tp'"):
        group.group_name  # noqa: B018
    with pytest.raises(ProcessGroupError, match="so no axis has a group"):
        dist.get_process_group_ranks(group)
    with pytest.raises(AttributeError, match="no attribute 'colour'"):
        group.colour  # noqa: B018
    xd.uninstall()
    with pytest.raises(ProcessGroupError, match="so no axis has a group"):
        mesh.get_group("tp")
