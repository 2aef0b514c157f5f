"""Short training recipes, written for one process per rank with PyTorch's own names.

``run(recipe, mesh, counting)`` is what both sides call: 4 gloo ranks with PyTorch's DTensor, and
one process with 4 devices after ``xla_dtensor.install()``. Each gives the rows of the batch that
its model saw, the loss, and gradients; whole ones, however they lie. What a recipe calls its step
goes through `counting`, which runs it and counts the bytes that it reduces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

__all__ = ["RECIPES", "Counting", "run"]

WORLD = 4
ROWS = 16


class Counting(Protocol):
    """Runs steps, and knows what they reduced."""

    mesh: Any
    reduced: dict[str, dict[str, int]]

    def __call__(self, step: Callable[..., Any], *inputs: Any) -> Any: ...


class Mlp(nn.Module):
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


def from_local_batch(mesh: Any, call: Counting) -> dict[str, Any]:
    """Data parallel: each rank wraps the rows that it loaded."""
    model = distribute_module(Mlp(), mesh)
    x = DTensor.from_local(own_rows(mesh)[0], mesh, [Shard(0)])
    loss = call(lambda x: backward(((model(x) - x) ** 2).mean()), x)
    return outcome(model, loss, x.shape[0])


def backward(loss: torch.Tensor) -> torch.Tensor:
    loss.backward()
    return loss.detach()


def fsdp_own_batch(mesh: Any, call: Counting) -> dict[str, Any]:
    """FSDP with the rank's own rows."""
    model: Any = fully_shard(Mlp(), mesh=mesh)
    x, y = own_rows(mesh)
    loss = call(lambda x, y: backward(F.cross_entropy(model(x), y.to(x.device))), x, y)
    return outcome(model, loss, x.shape[0])


def fsdp_accumulation(mesh: Any, call: Counting, microbatches: int) -> dict[str, Any]:
    """FSDP over DTensor rows, gradients synchronized with the last microbatch only."""
    return accumulated(fully_shard(Mlp(), mesh=mesh), mesh, call, microbatches)


def fsdp_unsharded_by_hand(mesh: Any, call: Counting) -> dict[str, Any]:
    """The same in 4 microbatches, each with parameters that unshard() has gathered before."""
    model: Any = fully_shard(Mlp(), mesh=mesh)
    return accumulated(model, mesh, call, 4, before=model.unshard)


def fsdp_beside_tp(mesh: Any, call: Counting, microbatches: int) -> dict[str, Any]:
    """The same on a mesh of two axes, with the linears tensor-parallel along the other one."""
    both = init_device_mesh(mesh.device_type, (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    model = parallelize_module(Mlp(), both["tp"], plan)
    call.mesh = both
    return accumulated(fully_shard(model, mesh=both["dp"]), both["dp"], call, microbatches)


def accumulated(
    model: Any,
    mesh: Any,
    call: Counting,
    microbatches: int,
    before: Callable[[], Any] = lambda: None,
) -> dict[str, Any]:
    x, _ = data()

    def step(*batches: Any) -> Any:
        total: Any = 0.0
        for i, mine in enumerate(batches):
            model.set_requires_gradient_sync(i == microbatches - 1)
            before()
            total = total + backward(((model(mine) - mine) ** 2).mean() / microbatches)
        return total

    parts = [DTensor.from_local(part, mesh, [Replicate()]) for part in x.chunk(microbatches)]
    mine = [part.redistribute(placements=[Shard(0)]).to_local() for part in parts]
    own = call(step, *mine)
    loss = DTensor.from_local(own / mesh.size(), mesh, [Partial()])
    return outcome(model, loss, sum(part.shape[0] for part in parts))


def tensor_parallel_mlp(mesh: Any, call: Counting) -> dict[str, Any]:
    """parallelize_module on the two linears of an MLP; all ranks load the same batch."""
    model = parallelize_module(Mlp(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    x, _ = data()
    loss = call(lambda x: backward((model(x) ** 2).mean()), x)
    return outcome(model, loss, x.shape[0])


def tensor_parallel_accumulation(mesh: Any, call: Counting) -> dict[str, Any]:
    """The same in 4 microbatches."""
    model = parallelize_module(Mlp(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    x, _ = data()

    def step(*parts: Any) -> Any:
        return sum(backward((model(part) ** 2).mean() / len(parts)) for part in parts)

    return outcome(model, call(step, *x.chunk(4)), x.shape[0])


def sequence_parallel_norm(mesh: Any, call: Counting) -> dict[str, Any]:
    """SequenceParallel on a norm between replicated linears, its input sharded by hand."""
    model = nn.Sequential(nn.LayerNorm(8))
    model = parallelize_module(model, mesh, {"0": SequenceParallel(use_local_output=False)})
    x, _ = data()
    rank, length = mesh.get_local_rank(), ROWS // WORLD
    part = x.reshape(1, ROWS, 8)[:, rank * length : (rank + 1) * length]
    loss = call(lambda part: backward((model(part) ** 3).mean()), part)
    return outcome(model, loss, part.shape[1])


def vocabulary_parallel_loss(mesh: Any, call: Counting) -> dict[str, Any]:
    """Cross entropy on logits whose classes are sharded, under loss_parallel."""
    plan: dict[str, Any] = {
        "up": ColwiseParallel(output_layouts=Replicate()),
        "down": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    model = parallelize_module(Mlp(), mesh, plan)
    x, y = data()

    def step(x: Any, y: Any) -> Any:
        with loss_parallel():
            return backward(F.cross_entropy(model(x), y))

    return outcome(model, call(step, x, y), x.shape[0])


def rank_dependent_slice(mesh: Any, call: Counting) -> dict[str, Any]:
    """A rank takes its columns of a plain weight by its number, and all add up."""
    model = Mlp()
    x, _ = data()
    rank, size = mesh.get_local_rank(), 16 // WORLD
    mine = slice(rank * size, (rank + 1) * size)
    hidden = torch.relu(F.linear(x, model.up.weight[mine], model.up.bias[mine]))
    part = F.linear(hidden, model.down.weight[:, mine])
    whole_part = call(lambda p: DTensor.from_local(p, mesh, [Partial()]).full_tensor(), part)
    return {"rows": x.shape[0], "loss": float(whole((whole_part**2).mean())), "gradients": {}}


def manual_all_reduce(mesh: Any, call: Counting) -> dict[str, Any]:
    """The loss of a rank's own rows, averaged over the ranks for the log."""
    mesh = init_device_mesh(mesh.device_type, (WORLD,), mesh_dim_names=("dp",))
    x, _ = own_rows(mesh)
    torch.manual_seed(0)
    loss = (Mlp()(x) ** 2).mean().detach()
    mean = loss.clone()
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    return {"rows": x.shape[0], "loss": float(loss), "mean": float(mean), "gradients": {}}


def lora(mesh: Any, call: Counting) -> dict[str, Any]:
    """A frozen, sharded linear with a trainable low-rank adapter beside it."""
    plan = ColwiseParallel(output_layouts=Replicate(), use_local_output=False)
    base = parallelize_module(nn.Linear(8, 16), mesh, plan).requires_grad_(False)
    adapter = {"a": nn.Linear(8, 2, False), "b": nn.Linear(2, 16, False)}
    adapter = {name: distribute_module(linear, mesh) for name, linear in adapter.items()}
    model = nn.ModuleDict({"base": base, **adapter})
    x = DTensor.from_local(data()[0], mesh, [Replicate()])

    def step(x: Any) -> Any:
        return backward(((model["base"](x) + model["b"](model["a"](x))) ** 2).mean())

    return outcome(model, call(step, x), x.shape[0])


def clipped(mesh: Any, call: Counting) -> dict[str, Any]:
    """clip_grad_norm_ over the sharded parameters of a tensor-parallel MLP."""
    model = parallelize_module(Mlp(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    x, _ = data()

    def step(x: Any) -> Any:
        backward((model(x) ** 2).mean())
        return nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    return outcome(model, call(step, x), x.shape[0])


RECIPES: dict[str, Callable[[Any, Counting], dict[str, Any]]] = {
    "data parallel, from_local of own rows": from_local_batch,
    "FSDP, own rows": fsdp_own_batch,
    "FSDP, 1 microbatch": lambda mesh, call: fsdp_accumulation(mesh, call, 1),
    "FSDP, 4 microbatches": lambda mesh, call: fsdp_accumulation(mesh, call, 4),
    "FSDP, 4 microbatches after unshard()": fsdp_unsharded_by_hand,
    "FSDP beside tensor parallelism, 1 microbatch": lambda mesh, call: fsdp_beside_tp(
        mesh, call, 1
    ),
    "FSDP beside tensor parallelism, 4 microbatches": lambda mesh, call: fsdp_beside_tp(
        mesh, call, 4
    ),
    "tensor-parallel MLP": tensor_parallel_mlp,
    "tensor-parallel MLP, 4 microbatches": tensor_parallel_accumulation,
    "sequence-parallel norm, own rows": sequence_parallel_norm,
    "vocabulary-parallel cross entropy": vocabulary_parallel_loss,
    "slice by get_local_rank": rank_dependent_slice,
    "all_reduce of a loss": manual_all_reduce,
    "LoRA adapter": lora,
    "clip_grad_norm_": clipped,
}


def run(name: str, mesh: Any, counting: Counting) -> dict[str, Any]:
    """Run a recipe with the same initial weights everywhere; an error is an outcome too."""
    torch.manual_seed(0)
    try:
        return {**RECIPES[name](mesh, counting), "reduced": counting.reduced}
    except Exception as error:
        return {"error": type(error).__name__, "message": str(error)}
