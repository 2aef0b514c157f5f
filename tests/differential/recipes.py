"""Ten short training recipes, written for one process per rank with PyTorch's own names.

``run(recipe, mesh)`` is what both sides call: 4 gloo ranks with PyTorch's DTensor, and one process
with 4 devices after ``xla_dtensor.install()``. Each gives the rows of the batch that its model saw,
the loss, and gradients; whole ones, however they lie.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

__all__ = ["RECIPES", "run"]

WORLD = 4
ROWS = 16


class Mlp(nn.Module):
    """Counts the rows that it sees, once each: a row's last feature is its number."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """The whole batch: 16 rows with a class each."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 8, generator=generator)
    return x, torch.randint(0, 8, (ROWS,), generator=generator)


def whole(tensor: Any) -> Any:
    """A gradient or loss as a plain CPU tensor."""
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.detach().cpu()


def gradients(model: nn.Module) -> dict[str, Any]:
    named = model.named_parameters()
    return {n: whole(p.grad).tolist() for n, p in named if p.grad is not None}


def outcome(model: nn.Module, loss: Any, rows: int) -> dict[str, Any]:
    """`rows` is the size of dim 0 of what one call of the model got."""
    return {"rows": rows, "loss": float(whole(loss)), "gradients": gradients(model)}


def own_rows(mesh: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What a distributed sampler gives a rank."""
    x, y = data()
    rank, rows = mesh.get_local_rank(), ROWS // WORLD
    return x[rank * rows : (rank + 1) * rows], y[rank * rows : (rank + 1) * rows]


def from_local_batch(mesh: Any) -> dict[str, Any]:
    """Data parallel: each rank wraps the rows that it loaded."""
    model = distribute_module(Mlp(), mesh)
    x = DTensor.from_local(own_rows(mesh)[0], mesh, [Shard(0)])
    loss = ((model(x) - x) ** 2).mean()
    loss.backward()
    return outcome(model, loss, x.shape[0])


def fsdp_own_batch(mesh: Any) -> dict[str, Any]:
    """FSDP with the rank's own rows, the loss averaged for the log."""
    model: Any = fully_shard(Mlp(), mesh=mesh)
    x, y = own_rows(mesh)
    loss = F.cross_entropy(model(x), y.to(x.device))
    loss.backward()
    return outcome(model, loss, x.shape[0])


def fsdp_accumulation(mesh: Any, microbatches: int) -> dict[str, Any]:
    """FSDP over DTensor rows, gradients synchronized with the last microbatch only."""
    model: Any = fully_shard(Mlp(), mesh=mesh)
    x, _ = data()
    total, rows = 0.0, 0
    for i in range(microbatches):
        model.set_requires_gradient_sync(i == microbatches - 1)
        part = x.chunk(microbatches)[i]
        mine = DTensor.from_local(part, mesh, [Replicate()]).redistribute(placements=[Shard(0)])
        mine = mine.to_local()
        loss = ((model(mine) - mine) ** 2).mean() / microbatches
        loss.backward()
        mean = DTensor.from_local(loss.detach() / WORLD, mesh, [_partial()]).full_tensor()
        total, rows = total + float(whole(mean)), rows + part.shape[0]
    return {"rows": rows, "loss": total, "gradients": gradients(model)}


def _partial() -> Any:
    from torch.distributed.tensor import Partial

    return Partial()


def tensor_parallel_mlp(mesh: Any) -> dict[str, Any]:
    """parallelize_module on the two linears of an MLP; all ranks load the same batch."""
    model = parallelize_module(Mlp(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    x, _ = data()
    loss = (model(x) ** 2).mean()
    loss.backward()
    return outcome(model, loss, x.shape[0])


def sequence_parallel_norm(mesh: Any) -> dict[str, Any]:
    """SequenceParallel on a norm between replicated linears, its input sharded by hand."""
    model = nn.Sequential(nn.LayerNorm(8))
    model = parallelize_module(model, mesh, {"0": SequenceParallel(use_local_output=False)})
    x, _ = data()
    rank, length = mesh.get_local_rank(), ROWS // WORLD
    part = x.reshape(1, ROWS, 8)[:, rank * length : (rank + 1) * length]
    loss = (model(part) ** 3).mean()
    loss.backward()
    return outcome(model, loss, part.shape[1])


def vocabulary_parallel_loss(mesh: Any) -> dict[str, Any]:
    """Cross entropy on logits whose classes are sharded, under loss_parallel."""
    plan: dict[str, Any] = {
        "up": ColwiseParallel(output_layouts=Replicate()),
        "down": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    model = parallelize_module(Mlp(), mesh, plan)
    x, y = data()
    with loss_parallel():
        loss = F.cross_entropy(model(x), y)
        loss.backward()
    return outcome(model, loss, x.shape[0])


def rank_dependent_slice(mesh: Any) -> dict[str, Any]:
    """A rank takes its columns of a plain weight by its number, and all add up."""
    model = Mlp()
    x, _ = data()
    rank, size = mesh.get_local_rank(), 16 // WORLD
    mine = slice(rank * size, (rank + 1) * size)
    hidden = torch.relu(F.linear(x, model.up.weight[mine], model.up.bias[mine]))
    part = F.linear(hidden, model.down.weight[:, mine])
    loss = (DTensor.from_local(part, mesh, [_partial()]).full_tensor() ** 2).mean()
    return {"rows": x.shape[0], "loss": float(whole(loss)), "gradients": {}}


def manual_all_reduce(mesh: Any) -> dict[str, Any]:
    """The loss of a rank's own rows, averaged over the ranks for the log."""
    x, _ = own_rows(mesh)
    torch.manual_seed(0)
    loss = (Mlp()(x) ** 2).mean().detach()
    dist.all_reduce(loss)
    return {"rows": x.shape[0], "loss": float(loss) / WORLD, "gradients": {}}


def lora(mesh: Any) -> dict[str, Any]:
    """A frozen, sharded linear with a trainable low-rank adapter beside it."""
    base = parallelize_module(
        nn.Linear(8, 16), mesh, ColwiseParallel(output_layouts=Replicate())
    ).requires_grad_(False)
    model = nn.ModuleDict({"base": base, "a": nn.Linear(8, 2, False), "b": nn.Linear(2, 16, False)})
    x, _ = data()
    loss = ((model["base"](x) + model["b"](model["a"](x))) ** 2).mean()
    loss.backward()
    return outcome(model, loss, x.shape[0])


def clipped(mesh: Any) -> dict[str, Any]:
    """clip_grad_norm_ over the sharded parameters of a tensor-parallel MLP."""
    model = parallelize_module(Mlp(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    x, _ = data()
    (model(x) ** 2).mean().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    return outcome(model, norm, x.shape[0])


RECIPES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "data parallel, from_local of own rows": from_local_batch,
    "FSDP, own rows": fsdp_own_batch,
    "FSDP, 1 microbatch": lambda mesh: fsdp_accumulation(mesh, 1),
    "FSDP, 4 microbatches": lambda mesh: fsdp_accumulation(mesh, 4),
    "tensor-parallel MLP": tensor_parallel_mlp,
    "sequence-parallel norm, own rows": sequence_parallel_norm,
    "vocabulary-parallel cross entropy": vocabulary_parallel_loss,
    "slice by get_local_rank": rank_dependent_slice,
    "all_reduce of a loss": manual_all_reduce,
    "LoRA adapter": lora,
    "clip_grad_norm_": clipped,
}


def run(name: str, mesh: Any) -> dict[str, Any]:
    """Run a recipe with the same initial weights everywhere; an error is an outcome too."""
    torch.manual_seed(0)
    try:
        return RECIPES[name](mesh)
    except Exception as error:
        return {"error": type(error).__name__, "message": str(error)}
