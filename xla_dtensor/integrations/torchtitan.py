"""XDTrainer: torchtitan's Trainer, whose step is one program on a mesh.

    python -m xla_dtensor.integrations.torchtitan --module llama3 --config llama3_debugmodel
        --parallelism.spmd_backend full_dtensor --parallelism.tensor_parallel_degree 2

was ``torchrun ... -m torchtitan.train`` with the same flags. One process drives all devices of its
host: a rank of torchtitan's is a device here. torchtitan's own code parses the flags, builds the
model and makes it parallel, builds the optimizer, schedules its rate, loads rows, logs and saves;
the loop is ``Trainer.train``. In it ``train_step`` is ours:

================  ==================================================================================
program           what it does
================  ==================================================================================
``accumulate``    forward and backward of a micro-batch
``update``        the same of the last one; clipping, the optimizer's step, and no more gradients
================  ==================================================================================

What torchtitan makes for one GPU is replaced in the config, which names its parts
(:mod:`xla_dtensor.integrations.torchtitan_parts`); the config that is given stays what it is. What
is changed in torchtitan's modules is in :func:`use_mesh_devices` alone.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import math
import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torchtitan
import torchtitan.components.metrics
import torchtitan.distributed.parallel_dims
import torchtitan.distributed.utils
import torchtitan.tools.utils
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.optimizer import register_moe_load_balancing_hook
from torchtitan.components.quantization.utils import has_quantization
from torchtitan.config import ConfigManager
from torchtitan.config.override import derive
from torchtitan.observability import structured_logger as sl
from torchtitan.tools.logging import init_logger, logger
from torchtitan.trainer import Trainer

import xla_dtensor as xd
from xla_dtensor.core.errors import ArgumentTypeError
from xla_dtensor.integrations import torchtitan_parts as parts
from xla_dtensor.runtimes.base import CompiledStep

__all__ = ["XDTrainer", "main", "use_mesh_devices"]

# Options that ask for another way of running: what is allowed, and what to do instead.
_ALLOWED: dict[str, tuple[Any, str]] = {
    "parallelism.spmd_backend": (
        ("full_dtensor", "partial_dtensor"),
        "it computes on local tensors and calls process groups. Pass full_dtensor",
    ),
    "parallelism.pipeline_parallel_degree": (
        (1,),
        "the step is one program. Use the devices for --parallelism.data_parallel_shard_degree",
    ),
    "parallelism.context_parallel_degree": (
        (1,),
        "torchtitan cuts sequences for process groups. Use --parallelism.tensor_parallel_degree",
    ),
    "parallelism.expert_parallel_degree": (
        (1,),
        "its dispatch sends as many tokens as a host reads. Use "
        "--parallelism.tensor_parallel_degree, which cuts experts too",
    ),
    "training.enable_cpu_offload": (
        (False,),
        "programs keep parameters on the devices. Use more of them",
    ),
    "compile.enable": ((False,), "the step is compiled by XLA as a whole. Leave it out"),
    "comm.mode": (("default",), "XLA communicates. Leave it out"),
    "checkpoint.async_mode": (
        ("disabled", "async"),
        "there is no pinned memory of CUDA's. Pass async",
    ),
    "checkpoint.create_seed_checkpoint": (
        (False,),
        "initial values are the same for every mesh. Leave it out, and set --debug.seed",
    ),
}


def use_mesh_devices() -> parts.MeshDevices:
    """Tell torchtitan that its devices are those of XLA. It asks torch once, when it is imported.

    Returns:
        What it asks from then on.
    """
    devices = parts.MeshDevices()
    modules: Any = (
        torchtitan.tools.utils,
        torchtitan.components.metrics,
        torchtitan.distributed.utils,
    )
    for module in modules:
        # The JAX runtime's tensors report "cpu".
        module.device_type, module.device_module = "cpu", devices
    torchtitan.distributed.parallel_dims.device_type = "xla"  # for init_device_mesh
    return devices


@contextlib.contextmanager
def _local_rank() -> Iterator[None]:
    """Let torchtitan find the variable that torchrun sets; others take it for a job of several."""
    rank = os.environ.get("LOCAL_RANK")
    os.environ.setdefault("LOCAL_RANK", "0")
    try:
        yield
    finally:
        if rank is None:
            del os.environ["LOCAL_RANK"]


class XDTrainer(Trainer):
    """torchtitan's Trainer on all devices.

    It calls :func:`xla_dtensor.init_distributed` and :func:`xla_dtensor.install`.

    Args:
        config: The config, as a ``config_registry`` or torchtitan's ConfigManager makes it.

    Raises:
        ArgumentTypeError: An option asks for another way of running than one program on a mesh.
    """

    parallel_dims: Any

    def __init__(self, config: Trainer.Config) -> None:
        _check(config)
        xd.init_distributed()
        xd.install()
        devices = use_mesh_devices()
        self._update: CompiledStep = xd.compile(self._backward_and_update)
        self._accumulate: CompiledStep = xd.compile(self._backward)
        with _local_rank():
            super().__init__(_on_mesh(config))
        peak = devices.peak_flops()
        if peak:
            self.metrics_processor.gpu_peak_flops = peak

    @property
    def programs(self) -> tuple[CompiledStep, CompiledStep]:
        """The programs: that of accumulation and that of an update."""
        return self._accumulate, self._update

    def init_distributed(self) -> Any:
        """Return what says how the mesh is cut; all devices of the job are in it."""
        devices = len(xd.get_runtime().device_ids())
        return parts.MeshDims.from_config(self.config.parallelism, devices)

    def batch_generator(self, data_iterable: Iterable[Any]) -> Iterator[Any]:
        """Take batches; each has the rows of all ranks, and a rank's tokens are counted."""
        ranks = len(self.parallel_dims.ranks)
        for inputs, labels in super().batch_generator(data_iterable):
            other_tokens = labels.numel() // ranks * (ranks - 1)
            self.metrics_processor.ntokens_since_last_log -= other_tokens
            yield inputs, labels

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        """Run a step: a program per micro-batch."""
        rates = self.lr_schedulers.get_metrics()
        batches = [next(data_iterator) for _ in range(self.gradient_accumulation_steps)]
        with sl.log_trace_span("fwd_bwd"):
            losses, norm = self._run(batches)
        self.checkpointer.maybe_wait_for_staging()
        self.lr_schedulers.step()
        if self.metrics_processor.should_log(self.step):
            self._log(losses, norm, rates)

    def _run(self, batches: list[Any]) -> tuple[list[Any], Any]:
        put = self.parallel_dims.put_rows
        on_mesh = [
            ({name: put(tensor) for name, tensor in inputs.items()}, put(labels))
            for inputs, labels in batches
        ]
        ranks, degree = self.parallel_dims.ranks, self.parallel_dims.get_mesh("batch").size()
        # The host counts its own rows. Of a rank's tokens checkpoints have the number.
        everywhere = len(ranks) == degree
        counted = [labels for _, labels in (batches if everywhere else on_mesh)]
        valid = sum((labels != IGNORE_INDEX).sum() for labels in counted)
        self.ntokens_seen += sum(labels.numel() // degree for _, labels in on_mesh)
        losses = [self._accumulate(*batch, valid) for batch in on_mesh[:-1]]
        loss, norm = self._update(*on_mesh[-1], valid)
        return [*losses, loss], norm

    def _backward(self, inputs: dict[str, Any], labels: Any, valid: Any) -> torch.Tensor:
        tokens, kwargs = parts.model_inputs(self.model_parts[0], inputs, self.parallel_dims)
        return self._forward_backward_body(tokens, labels, valid, kwargs).detach()

    def _backward_and_update(self, *batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        loss = self._backward(*batch)
        norm = torchtitan.distributed.utils.clip_grad_norm_(
            self.model_parts[0].parameters(), self.config.training.max_norm, foreach=True
        )
        self.optimizers.step()
        self.optimizers.zero_grad()
        return loss, norm

    def _log(self, losses: list[Any], norm: Any, rates: dict[str, float]) -> None:
        loss = sum(parts.number(term) for term in losses)
        if not math.isfinite(loss):
            raise RuntimeError(
                f"Loss is not finite (global_avg_loss={loss}) at step {self.step}. Stopping "
                "training."
            )
        seen = self.ntokens_seen * self.parallel_dims.get_mesh("batch").size()
        # There is one loss, of all rows: no rank has one of its own that could be the largest.
        self.metrics_processor.log(
            self.step, loss, loss, parts.number(norm), {"n_tokens_seen": seen, **rates}
        )


def _check(config: Trainer.Config) -> None:
    owner = type(config)._owner
    if owner is not Trainer:
        raise ArgumentTypeError(
            f"An XDTrainer was made with a config of {getattr(owner, '__name__', owner)}, which "
            "has a loop of its own. Pass one of torchtitan.trainer.Trainer.Config."
        )
    if not isinstance(config.checkpoint, CheckpointManager.Config):
        raise ArgumentTypeError(
            f"An XDTrainer was made with checkpoint={type(config.checkpoint).__qualname__}. It "
            "saves as torchtitan's CheckpointManager does. Pass CheckpointManager.Config(...)."
        )
    for path, (allowed, instead) in _ALLOWED.items():
        setting: Any = config
        for name in path.split("."):
            setting = getattr(setting, name)
        if setting not in allowed:
            raise ArgumentTypeError(
                f"An XDTrainer was made with --{path} {setting}. It asks for another way of "
                f"running: {instead}."
            )
    names = {group.optimizer_name for group in config.optimizer.param_groups}
    if "DistMuon" in names:
        raise ArgumentTypeError(
            "An XDTrainer was made with the optimizer DistMuon, which sends parameters by process "
            "groups. Use AdamW or Adam."
        )
    if config.model_spec is not None and has_quantization(config.model_spec.model):
        raise ArgumentTypeError(
            f"An XDTrainer was made with the quantized model {config.model_spec.flavor}. Its "
            "kernels are for GPUs under PyTorch. Use a config without converters."
        )


def _on_mesh(config: Trainer.Config) -> Trainer.Config:
    """Return a copy whose parts are those for a mesh."""
    config = copy.deepcopy(config)
    config.training.disable_cuda_graphs = True
    config.dataloader = parts.MeshLoader.Config(each=config.dataloader)
    config.loss = parts.loss_on_mesh(config.loss)
    config.validator = derive(config.validator, parts.MeshValidator.Config)
    config.checkpoint = derive(config.checkpoint, parts.MeshCheckpoints.Config)
    config.override.imports.extend(parts.OVERRIDES)
    spec: Any = config.model_spec
    if spec is not None and spec.post_optimizer_build_fn is register_moe_load_balancing_hook:
        spec.post_optimizer_build_fn = parts.balance_experts
    return config


def main(args: list[str] | None = None) -> None:
    """Train as ``python -m torchtitan.train`` does.

    Args:
        args: The flags; None for those of the command line.
    """
    init_logger()
    logger.info("torchtitan version: %s", torchtitan.__version__)
    config: Any = ConfigManager().parse_args(args)
    sl.init_structured_logger(
        source="training",
        output_dir=config.dump_folder,
        enable=config.debug.enable_structured_logging,
    )
    trainer = XDTrainer(config)
    try:
        trainer.train()
    finally:
        trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    # Not of this module's second copy, which would be code of the user's to guards.
    importlib.import_module("xla_dtensor.integrations.torchtitan").main()
