"""install(): torch's own functions lead here for "xla" meshes, and only for them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol
import torch.distributed.fsdp
import torch.distributed.tensor._random
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import local_map
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import xla_dtensor as xd
from xla_dtensor.errors import LocalViewError
from xla_dtensor.nn.install import is_installed

R = Replicate()
# Looked up when they are used: install() replaces what is in them. (Any: torch does not say what
# they export.)
dist: Any = torch.distributed
torch_tensor: Any = torch.distributed.tensor
style: Any = torch_tensor.parallel.style


@pytest.fixture
def installed(mesh: xd.DeviceMesh) -> Iterator[None]:
    xd.install()
    yield
    xd.uninstall()


def names() -> list[Any]:
    return [
        torch_tensor.distribute_tensor,
        torch_tensor.distribute_module,
        torch_tensor.DTensor.from_local,
        torch_tensor.zeros,
        torch_tensor._api.distribute_tensor,
        style.distribute_tensor,
        style.distribute_module,
        dist.init_device_mesh,
        funcol.all_reduce,
        funcol.wait_tensor,
        torch_tensor._random.manual_seed,
        torch_tensor._random.is_rng_supported_mesh,
        dist.fsdp.fully_shard,
        torch_tensor.parallel.loss_parallel,
        torch_tensor.parallel.loss.loss_parallel,
    ]


def test_uninstall_puts_everything_back(mesh: xd.DeviceMesh) -> None:
    before = names()
    xd.install()
    assert is_installed()
    assert all(a is not b for a, b in zip(names(), before, strict=True))
    once = names()
    xd.install()
    assert names() == once
    xd.uninstall()
    assert not is_installed()
    assert all(a is b for a, b in zip(names(), before, strict=True))
    xd.uninstall()


@pytest.mark.usefixtures("installed")
class TestInstalled:
    def test_constructors(self, mesh: xd.DeviceMesh) -> None:
        d = torch_tensor.distribute_tensor(torch.arange(8.0), mesh, [Shard(0), R])
        assert type(d) is xd.DTensor
        assert type(torch_tensor.ones(8, device_mesh=mesh, placements=[Shard(0), R])) is xd.DTensor
        with mesh:
            assert type(torch_tensor.zeros(8)) is xd.DTensor
        view = d.to_local()
        again = torch_tensor.DTensor.from_local(view, mesh, [Shard(0), R])
        assert type(again) is xd.DTensor
        assert torch.equal(again.cpu(), torch.arange(8.0))
        assert type(dist.init_device_mesh("xla", (8,))) is xd.DeviceMesh

    def test_other_devices_are_torchs(self, mesh: xd.DeviceMesh) -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            cpu = dist.init_device_mesh("cpu", (1,))
            stock = dist.device_mesh.DeviceMesh
            assert type(cpu) is stock
            made = [
                torch_tensor.distribute_tensor(torch.ones(4), cpu, [Shard(0)]),
                torch_tensor.DTensor.from_local(torch.ones(4), cpu, [Shard(0)]),
                torch_tensor.zeros(4, device_mesh=cpu, placements=[Shard(0)]),
            ]
            assert {type(d) for d in made} == {torch_tensor.DTensor}
            linear = parallelize_module(nn.Linear(4, 4), cpu, ColwiseParallel())
            assert type(linear.weight.data) is torch_tensor.DTensor
            summed = funcol.all_reduce(torch.ones(2), "sum", cpu)
            assert torch.equal(summed + 0, torch.ones(2))
        finally:
            dist.destroy_process_group()

    def test_seeds(self, mesh: xd.DeviceMesh) -> None:
        assert torch_tensor._random.is_rng_supported_mesh(mesh)
        drawn = []
        for _ in range(2):
            torch_tensor._random.manual_seed(7, mesh)
            drawn.append(torch_tensor.rand(8, device_mesh=mesh, placements=[Shard(0), R]).cpu())
        assert torch.equal(*drawn)

    def test_functional_collectives(self, mesh: xd.DeviceMesh) -> None:
        x = torch.arange(1.0, 33.0)
        view: Any = xd.distribute_tensor(x, mesh, [R, Shard(0)]).to_local()
        rows = x.reshape(4, 8)
        tp = (mesh, 1)
        expected = {
            "sum": rows.sum(0),
            "avg": rows.mean(0),
            "max": rows.amax(0),
            "min": rows.amin(0),
            "product": rows.prod(0),
        }
        for op, value in expected.items():
            reduced: Any = funcol.all_reduce(view, op, tp)
            torch.testing.assert_close(reduced.wait().cpu(), value)
            part: Any = funcol.reduce_scatter_tensor(view, op, 0, mesh["tp"])
            blocks = [s.data for s in part.addressable_shards()][:4]
            torch.testing.assert_close(torch.cat(blocks), value)
        assert torch.equal(funcol.all_gather_tensor(view, 0, tp).cpu(), x)
        assert torch.equal(funcol.broadcast(view, 2, tp).cpu(), rows[2])
        moved: Any = funcol.permute_tensor(view, [1, 2, 3, 0], tp)
        assert torch.equal(moved.addressable_shards()[1].data, rows[0])
        exchanged: Any = funcol.all_to_all_single(view, None, None, tp)
        assert torch.equal(exchanged.cpu(), rows.reshape(4, 4, 2)[:, 0].reshape(-1))
        assert funcol.wait_tensor(view) is view
        with pytest.raises(LocalViewError, match="no such reduction"):
            funcol.all_reduce(view, "bxor", tp)
        with pytest.raises(LocalViewError, match="there is no process group"):
            funcol.all_reduce(view, "sum", [0, 1])
        with pytest.raises(LocalViewError, match="their blocks have one size"):
            funcol.all_to_all_single(view, [1, 2, 2, 3], None, tp)
        with pytest.raises(LocalViewError, match="numbered from 0"):
            funcol.broadcast(view, 4, tp)

    @pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.bfloat16])
    def test_functional_collectives_keep_the_dtype(
        self, mesh: xd.DeviceMesh, dtype: torch.dtype
    ) -> None:
        rows = (torch.arange(32).reshape(4, 8) % 7).to(dtype)
        view: Any = xd.distribute_tensor(rows.reshape(-1), mesh, [R, Shard(0)]).to_local()
        whole = rows if dtype == torch.bfloat16 else rows.to(torch.int64)
        expected = {"sum": whole.sum(0), "max": whole.amax(0), "product": whole.prod(0)}
        for op, value in expected.items():
            reduced: Any = funcol.all_reduce(view, op, (mesh, 1))
            part: Any = funcol.reduce_scatter_tensor(view, op, 0, mesh["tp"])
            scattered = torch.cat([s.data for s in part.addressable_shards()][:4])
            for found in (reduced.cpu(), scattered):
                torch.testing.assert_close(found, value.to(dtype))
        torch.testing.assert_close(funcol.broadcast(view, 2, (mesh, 1)).cpu(), rows[2])

    def test_a_script_with_torchs_names_only(self, mesh: xd.DeviceMesh) -> None:
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import loss_parallel

        torch.manual_seed(0)
        plain = Model()
        model: Any = copy.deepcopy(plain)
        parallelize_module(
            model,
            mesh["tp"],
            {
                "block.up": ColwiseParallel(),
                "block.down": RowwiseParallel(),
                "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
            },
        )
        fully_shard(model.block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        assert xd.FSDPModule in type(model).__mro__
        tokens, classes = torch.randint(0, 24, (4, 8)), torch.randint(0, 24, (32,))
        with loss_parallel():
            logits = model(tokens)
            assert logits.placements == (Shard(2),)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), classes)
            loss.backward()
        expected = nn.functional.cross_entropy(plain(tokens).flatten(0, 1), classes)
        expected.backward()
        torch.testing.assert_close(torch.tensor(loss.item()), expected.detach())
        for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.cpu(), theirs.grad, msg=name)

    def test_local_map(self, mesh: xd.DeviceMesh) -> None:
        def partial_product(a: Any, b: Any) -> Any:
            assert (tuple(a.shape), tuple(b.shape)) == ((4, 2), (2, 3))
            return funcol.all_reduce(a @ b, "sum", (mesh, 1))

        a, b = torch.randn(8, 8), torch.randn(8, 3)
        columns, rows = [Shard(0), Shard(1)], [R, Shard(0)]
        make: Any = local_map
        mapped = make(
            partial_product, [Shard(0), R], (columns, rows), (columns, [Partial(), Shard(0)])
        )
        da: Any = xd.distribute_tensor(a, mesh, columns).requires_grad_()
        db: Any = xd.distribute_tensor(b, mesh, rows).requires_grad_()
        out = mapped(da, db)
        torch.testing.assert_close(out.cpu(), a @ b)
        out.square().sum().backward()
        a, b = a.requires_grad_(), b.requires_grad_()
        (a @ b).square().sum().backward()
        torch.testing.assert_close(da.grad.cpu(), a.grad)
        torch.testing.assert_close(db.grad.cpu(), b.grad)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(24, 16)
        self.block = Block()
        self.head = nn.Linear(16, 24)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.embed(tokens)))


PLANS: dict[str, dict[str, Any]] = {
    "tensor": {"block.up": ColwiseParallel(), "block.down": RowwiseParallel()},
    "sequence": {
        "embed": RowwiseParallel(input_layouts=R, output_layouts=Shard(1)),
        "block.norm": SequenceParallel(),
        "block.up": ColwiseParallel(input_layouts=Shard(1)),
        "block.down": RowwiseParallel(output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=R),
    },
    "prepared": {
        "block": PrepareModuleInput(input_layouts=R, desired_input_layouts=R),
        "block.up": ColwiseParallel(use_local_output=False),
        "block.down": RowwiseParallel(use_local_output=False),
        "head": PrepareModuleOutput(output_layouts=R, desired_output_layouts=Shard(-1)),
    },
}


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("plan", PLANS)
def test_torchs_own_plans(mesh: xd.DeviceMesh, plan: str) -> None:
    torch.manual_seed(0)
    plain = Model()
    model = copy.deepcopy(plain)
    parallelize_module(model, mesh["tp"], PLANS[plan])
    tokens, classes = torch.randint(0, 24, (4, 8)), torch.randint(0, 24, (32,))

    def loss_of(model: nn.Module) -> torch.Tensor:
        logits = model(tokens)
        if isinstance(logits, xd.LocalView) and plan == "prepared":
            logits = xd.DTensor.from_local(logits, mesh["tp"], [Shard(-1)])
        return nn.functional.cross_entropy(logits.flatten(0, 1), classes)

    expected, loss = loss_of(plain), loss_of(model)
    torch.testing.assert_close(torch.tensor(loss.item()), expected.detach())
    expected.backward()
    loss.backward()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None, name
        grad = ours.grad.cpu() if isinstance(ours.grad, xd.DTensor) else ours.grad
        torch.testing.assert_close(grad, theirs.grad, msg=name)
