"""torchtitan's Llama debug model, made parallel by torchtitan, on the "xla" devices.

What differs from torchtitan's own trainer is what docs/torchtitan.md lists.
"""

# torchtitan is installed for the newest torch only.
# pyright: reportMissingImports=false

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel

import xla_dtensor as xd

NUM_DEVICES = 8
NUM_LAYERS = 2
BATCH, LENGTH, VOCABULARY = 8, 32, 2048
TOKENS = BATCH * LENGTH


@dataclass(frozen=True)
class Job:
    """What torchtitan is asked for.

    Args:
        parallelism: Fields of torchtitan's ParallelismConfig.
        checkpointing: "full", "selective" or None.
        training: Fields of its TrainingConfig.
        compile_config: Fields of its CompileConfig.
    """

    parallelism: dict[str, Any]
    checkpointing: str | None = None
    training: dict[str, Any] = dataclasses.field(default_factory=dict)
    compile_config: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def is_full_dtensor(self) -> bool:
        return self.parallelism.get("spmd_backend") == "full_dtensor"


def job(
    *,
    shard: int = 1,
    replicate: int = 1,
    tensor: int = 1,
    backend: str = "partial_dtensor",
    checkpointing: str | None = None,
    training: dict[str, Any] | None = None,
    compile_config: dict[str, Any] | None = None,
    **more: Any,
) -> Job:
    """A job by short names."""
    degrees = {
        "data_parallel_shard_degree": shard,
        "data_parallel_replicate_degree": replicate,
        "tensor_parallel_degree": tensor,
        "spmd_backend": backend,
        **more,
    }
    return Job(degrees, checkpointing, training or {}, compile_config or {})


JOBS = {
    "FSDP": job(shard=8),
    "HSDP": job(replicate=2, shard=4),
    "TP": job(tensor=8),
    "FSDP+TP": job(shard=2, tensor=4),
    "FSDP+TP, no sequence parallel": job(shard=2, tensor=4, enable_sequence_parallel=False),
    "HSDP+TP": job(replicate=2, shard=2, tensor=2),
    "FSDP+TP, full checkpointing": job(shard=2, tensor=4, checkpointing="full"),
    "FSDP+TP, selective checkpointing": job(shard=2, tensor=4, checkpointing="selective"),
    "FSDP+TP, never resharded": job(shard=2, tensor=4, fsdp_reshard_after_forward="never"),
    "full_dtensor, FSDP": job(shard=8, backend="full_dtensor"),
    "full_dtensor, FSDP+TP": job(shard=2, tensor=4, backend="full_dtensor"),
    "full_dtensor, HSDP+TP": job(replicate=2, shard=2, tensor=2, backend="full_dtensor"),
}


@dataclass
class Run:
    """A job that torchtitan has applied to a model.

    Args:
        job: The job.
        dims: torchtitan's ParallelDims.
        model: The parallel model.
        plain: The same one before.
    """

    job: Job
    dims: Any
    model: Any
    plain: Any

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and labels: the global batch."""
        generator = torch.Generator().manual_seed(1)
        shape = (BATCH, LENGTH)
        tokens, labels = (
            torch.randint(0, VOCABULARY, shape, generator=generator) for _ in range(2)
        )
        if not self.job.is_full_dtensor:
            return tokens, labels
        mesh = self.dims.get_activated_mesh(["dp_replicate", "dp_shard", "cp", "tp"])
        lie = [Replicate() if name == "tp" else Shard(0) for name in mesh.mesh_dim_names]
        return xd.distribute_tensor(tokens, mesh, lie), xd.distribute_tensor(labels, mesh, lie)

    def step(self, optimizer: torch.optim.Optimizer | None = None) -> Callable[..., Any]:
        """The step of the parallel model; see :func:`step_of`."""
        return step_of(self.model, optimizer)

    def losses(self, count: int, compiled: bool) -> tuple[list[float], list[float]]:
        """Losses of `count` steps of AdamW: the parallel model's, and the plain one's."""
        found = []
        for model, batch in ((self.model, self.batch()), (self.plain, plain_batch(self))):
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            step = step_of(model, optimizer)
            step = xd.compile(step) if compiled and model is self.model else step
            found.append([number(step(*batch)) for _ in range(count)])
        return found[0], found[1]


def plain_batch(run: Run) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, labels = run.batch()
    return whole(tokens), whole(labels)


def whole(value: Any) -> torch.Tensor:
    """The value on the host."""
    return value.full_tensor().cpu() if isinstance(value, DTensor) else value


def number(value: Any) -> float:
    return float(whole(value).item())


def parallelized(asked: Job) -> Run:
    """Let torchtitan build its debug model and make it parallel."""
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
    from torchtitan.distributed.utils import set_spmd_backend
    from torchtitan.models.llama3 import parallelize_llama

    parallelism = ParallelismConfig(**asked.parallelism)
    set_spmd_backend(parallelism.spmd_backend)
    torch.manual_seed(0)
    model: Any = config(parallelism).build()
    model.init_states()
    plain = copy.deepcopy(model)
    dims = ParallelDims.from_config(parallelism, world_size=NUM_DEVICES)
    kinds = {None: None, "full": FullAC.Config(), "selective": SelectiveAC.Config()}
    options = {"mixed_precision_param": "float32", "seq_len": LENGTH} | asked.training
    parallel = parallelize_llama(
        model,
        parallel_dims=dims,
        training=TrainingConfig(**options),
        parallelism=parallelism,
        compile_config=CompileConfig(**asked.compile_config),
        ac_config=kinds[asked.checkpointing],
        dump_folder="",
    )
    return Run(asked, dims, parallel, plain)


def config(parallelism: Any) -> Any:
    """The debug model's config, with two layers and causal attention that CPUs can run."""
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry
    from torchtitan.models.llama3.sharding import set_llama3_sharding_config

    # Its registry says no more than "a model".
    made: Any = copy.deepcopy(model_registry("debugmodel").model)
    made.layers = made.layers[:NUM_LAYERS]
    for layer in made.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
        layer.attention.rope = dataclasses.replace(layer.attention.rope, max_seq_len=LENGTH)
    # What the trainer's update_from_config calls.
    set_llama3_sharding_config(made, enable_sp=parallelism.enable_sequence_parallel)
    return made


def loss_of(pred: Any, labels: torch.Tensor) -> torch.Tensor:
    """torchtitan's loss; under tensor parallelism torch's, which knows that logits are sharded."""
    from torchtitan.components.loss import IGNORE_INDEX, cross_entropy_loss

    over_tp = isinstance(pred, DTensor) and "tp" in (pred.device_mesh.mesh_dim_names or ())
    if not over_tp:
        return cross_entropy_loss(pred, labels)
    return F.cross_entropy(
        pred.flatten(0, 1).float(),
        labels.flatten(0, 1),
        reduction="sum",
        ignore_index=IGNORE_INDEX,
    )


def step_of(model: Any, optimizer: torch.optim.Optimizer | None = None) -> Callable[..., Any]:
    """Forward and backward as in the trainer; with an optimizer, clipping and its step."""
    from torchtitan.distributed.utils import clip_grad_norm_

    def step(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        with loss_parallel():
            loss = loss_of(model(tokens), labels) / TOKENS
            loss.backward()
        if optimizer is not None:
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        return loss

    return step
