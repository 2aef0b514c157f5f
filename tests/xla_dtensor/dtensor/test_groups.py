"""fully_shard beside tensor parallelism, each data-parallel device with rows of its own."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import xla_dtensor as xd
from xla_dtensor.dtensor.groups import GroupDTensor
from xla_dtensor.errors import LocalViewError, RedistributeError
from xla_dtensor.report import collectives

R = Replicate()
FEATURES, LENGTH, CLASSES = 16, 8, 12


class Block(nn.Module):
    """Attention of four heads and an MLP, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(FEATURES), nn.LayerNorm(FEATURES)
        self.q, self.k, self.v = (nn.Linear(FEATURES, FEATURES, bias=False) for _ in range(3))
        self.out = nn.Linear(FEATURES, FEATURES, bias=False)
        self.up, self.down = nn.Linear(FEATURES, 32), nn.Linear(32, FEATURES)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        heads = [f(x).unflatten(-1, (-1, 4)).transpose(1, 2) for f in (self.q, self.k, self.v)]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, FEATURES)
        self.block = Block()
        self.head = nn.Linear(FEATURES, CLASSES, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.embedding(tokens)))


def tensor_parallel() -> dict[str, Any]:
    names = {"q": 0, "k": 0, "v": 0, "up": 0, "out": 1, "down": 1}
    styles = (ColwiseParallel, RowwiseParallel)
    return {f"block.{name}": styles[dim]() for name, dim in names.items()}


def sequence_parallel() -> dict[str, Any]:
    """torchtitan's plan: between the linears each device has some positions of the sequence."""
    plan: dict[str, Any] = {
        f"block.{name}": ColwiseParallel(input_layouts=Shard(1)) for name in ("q", "k", "v", "up")
    }
    for name in ("out", "down"):
        plan[f"block.{name}"] = RowwiseParallel(output_layouts=Shard(1))
    for name in ("norm1", "norm2"):
        plan[f"block.{name}"] = SequenceParallel()
    plan["embedding"] = RowwiseParallel(input_layouts=R, output_layouts=Shard(1))
    plan["head"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=R)
    return plan


PLANS = {"tensor parallel": tensor_parallel, "sequence parallel": sequence_parallel}


@pytest.fixture(scope="module")
def plain() -> Decoder:
    torch.manual_seed(0)
    return Decoder()


@pytest.fixture(autouse=True)
def installed(mesh: xd.DeviceMesh) -> Iterator[None]:
    xd.install()
    yield
    xd.uninstall()


def made(plain: Decoder, mesh: xd.DeviceMesh, plan: str, dim: int | None = None) -> Any:
    model: Any = parallelize_module(copy.deepcopy(plain), mesh["tp"], PLANS[plan]())
    place = None if dim is None else (lambda p: Shard(min(dim, p.ndim - 1)))
    xd.fully_shard(model.block, mesh=mesh["dp"], shard_placement_fn=place)
    return xd.fully_shard(model, mesh=mesh["dp"], shard_placement_fn=place)


def tokens(microbatches: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return list(torch.randint(0, CLASSES, (8, LENGTH), generator=generator).chunk(microbatches))


def rows(part: torch.Tensor, mesh: xd.DeviceMesh) -> Any:
    return xd.distribute_tensor(part, mesh["dp"], [Shard(0)]).to_local()


def loss_of(model: Any, part: Any, microbatches: int) -> torch.Tensor:
    logits = model(part)
    return F.cross_entropy(logits.flatten(0, 1), part.flatten()) / microbatches


def compare(model: nn.Module, plain: nn.Module) -> None:
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad, msg=name)
        assert ours.grad.placements == ours.placements  # pyright: ignore


def accumulate(model: Any, parts: Any) -> None:
    for number, part in enumerate(parts):
        model.set_requires_gradient_sync(number == len(parts) - 1)
        loss_of(model, part, len(parts)).backward()


@pytest.mark.thorough
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("plan", PLANS)
def test_gradients_are_plain_torchs(
    mesh: xd.DeviceMesh, plain: Decoder, plan: str, dim: int
) -> None:
    model, reference = made(plain, mesh, plan, dim), copy.deepcopy(plain)
    accumulate(model, [rows(part, mesh) for part in tokens(2)])
    for part in tokens(2):
        loss_of(reference, part, 2).backward()
    compare(model, reference)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.last = nn.Linear(8, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x + self.down(torch.relu(self.up(x))))


def mlp(mesh: xd.DeviceMesh) -> tuple[Any, Mlp]:
    torch.manual_seed(0)
    reference = Mlp()
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    model: Any = parallelize_module(copy.deepcopy(reference), mesh["tp"], plan)
    return xd.fully_shard(model, mesh=mesh["dp"]), reference


def reduced_over_dp(mesh: xd.DeviceMesh, microbatches: int) -> int:
    model, reference = mlp(mesh)
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))

    def step(*parts: Any) -> None:
        for number, part in enumerate(parts):
            model.set_requires_gradient_sync(number == len(parts) - 1)
            (model(part).square().mean() / len(parts)).backward()

    compiled = xd.compile(step)
    compiled(*(rows(part, mesh) for part in x.chunk(microbatches)))
    reference(x).square().mean().backward()
    compare(model, reference)
    found = [
        each
        for each in collectives(compiled.hlo(), mesh.value)
        if each.kind in ("all-reduce", "reduce-scatter") and "dp" in (each.axes or ())
    ]
    assert all(each.axes == ("dp",) and each.executions == 1 for each in found)
    return sum(each.operand_bytes for each in found)


@pytest.mark.only_on("jax")
@pytest.mark.parametrize("microbatches", [1, 4])
def test_gradients_are_reduced_once(mesh: xd.DeviceMesh, microbatches: int) -> None:
    # tp has cut `up`, its bias and the weight of `down` in four.
    held = 4 * ((16 * 8 + 16 + 8 * 16) // 4 + 8 + 4 * 8)
    assert reduced_over_dp(mesh, microbatches) == held


@pytest.mark.thorough
@pytest.mark.only_on("torch_xla")
def test_gradients_are_reduced_once_on_torch_xla(mesh: xd.DeviceMesh) -> None:
    # XLA moves a little of it along tp as well; the number of microbatches changes nothing.
    assert reduced_over_dp(mesh, 1) == reduced_over_dp(mesh, 4) > 0


def test_a_sync_follows_with_the_global_batch(mesh: xd.DeviceMesh) -> None:
    model, reference = mlp(mesh)
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    model.set_requires_gradient_sync(False)
    model(xd.distribute_tensor(x[:8], mesh, [Shard(0), R])).square().mean().backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    model.set_requires_gradient_sync(True)
    model(x[8:]).square().mean().backward()
    for part in (x[:8], x[8:]):
        reference(part).square().mean().backward()
    compare(model, reference)


@pytest.fixture
def group(mesh: xd.DeviceMesh) -> Any:
    """(4, 8) on each device of dp, sharded over tp along its last dim."""
    x = torch.arange(64.0).reshape(8, 8)
    view = xd.distribute_tensor(x, mesh["dp"], [Shard(0)]).to_local()
    made = xd.DTensor.from_local(view, mesh["tp"], [R])
    assert type(made) is GroupDTensor
    return made.redistribute(placements=[Shard(1)])


class TestGroupDTensor:
    def test_what_it_is(self, group: Any, mesh: xd.DeviceMesh) -> None:
        assert (tuple(group.shape), group.placements) == ((4, 8), (Shard(1),))
        assert (group.device_mesh, group.region.axes) == (mesh["tp"], ("dp",))
        product = group.sum(-1)
        assert type(product) is GroupDTensor
        assert product.placements[0].is_partial()

    def test_there_and_back(self, group: Any, mesh: xd.DeviceMesh) -> None:
        x = torch.arange(64.0).reshape(8, 8)
        local = group.to_local()
        assert (tuple(local.shape), local.region.axes) == ((4, 2), ("dp", "tp"))
        for shard in local.addressable_shards():
            dp, tp = divmod(shard.device_id, 4)
            assert torch.equal(shard.data, x[dp * 4 : dp * 4 + 4, tp * 2 : tp * 2 + 2])
        again: Any = xd.DTensor.from_local(local, mesh["tp"], [Shard(1)]) * 2
        whole = again.full_tensor()
        assert (tuple(whole.shape), whole.region.axes) == ((4, 8), ("dp",))
        assert torch.equal(xd.DTensor.from_local(whole, mesh["dp"], [Shard(0)]).cpu(), x * 2)

    def test_the_gradient_of_moving(self, mesh: xd.DeviceMesh) -> None:
        x: Any = xd.distribute_tensor(torch.ones(8, 8), mesh["dp"], [Shard(0)]).requires_grad_()
        group: Any = xd.DTensor.from_local(x.to_local(), mesh["tp"], [R])
        weight = torch.arange(8.0)
        weighted: Any = group * weight
        moved: Any = weighted.redistribute(placements=[Shard(1)])
        local = moved.to_local()
        xd.DTensor.from_local(local, mesh, [Shard(0), Shard(1)]).sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad.cpu(), weight.expand(8, 8))

    def test_in_place(self, group: Any, mesh: xd.DeviceMesh) -> None:
        assert group.add_(1) is group
        assert group.to_local().tolist() == [[1.0, 2.0], [9.0, 10.0], [17.0, 18.0], [25.0, 26.0]]

    def test_refusals(self, group: Any, mesh: xd.DeviceMesh) -> None:
        for call in (group.cpu, group.xla_sharding, lambda: group.sum().item()):
            with pytest.raises(LocalViewError, match="has a value of its own: it is in"):
                call()
        with pytest.raises(RedistributeError, match="along its own mesh's axes only"):
            group.redistribute(mesh, [R, R])
        with pytest.raises(LocalViewError, match="taken for a different shard on each device"):
            xd.DTensor.from_local(group.full_tensor(), mesh["tp"], [Shard(0)])
        unmanaged = xd.distribute_tensor(torch.ones(8), mesh["tp"], [R]).requires_grad_()
        with pytest.raises(LocalViewError, match="that fully_shard does not manage"):
            group.mul(unmanaged)
        assert type(group * unmanaged.detach()) is GroupDTensor
