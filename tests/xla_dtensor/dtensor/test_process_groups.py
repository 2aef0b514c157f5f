"""Process groups: asking for one, and torch.distributed's collectives, are refused alike."""

# torch does not list these names in __all__.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

import xla_dtensor as xd
from xla_dtensor.errors import ProcessGroupError

NO_GROUP = (
    "The process group of an axis of the mesh (dp=2, tp=4) was asked for. One program runs on all "
    "its devices, and XLA makes their communication, so no axis has a group. Use redistribute, "
    "fully_shard in place of DistributedDataParallel, and collectives on x.to_local()."
)


@pytest.fixture
def gloo() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_groups_of_a_mesh(mesh: xd.DeviceMesh) -> None:
    d = xd.distribute_tensor(torch.ones(8), mesh)
    for ask in (
        mesh.get_group,
        lambda: mesh.get_group("dp"),
        mesh.get_all_groups,
        lambda: funcol.all_reduce(d, "sum", (mesh, 0)),
    ):
        with pytest.raises(ProcessGroupError) as raised:
            ask()
        assert str(raised.value) == NO_GROUP
        assert isinstance(raised.value, RuntimeError)


@pytest.mark.usefixtures("gloo")
def test_collectives_of_processes(mesh: xd.DeviceMesh) -> None:
    d = xd.distribute_tensor(torch.ones(8), mesh)
    for call in (
        lambda: dist.all_reduce(d),
        lambda: dist.broadcast(d, 0),
        lambda: funcol.all_reduce(d, "sum", dist.group.WORLD),  # pyright: ignore
    ):
        with pytest.raises(ProcessGroupError, match="Its value is whole, and processes have no"):
            call()
    assert torch.equal(d.cpu(), torch.ones(8))
