"""What stands in for parts of torchtitan that count on one process per GPU.

==================  ================================  ==============================================
part of a config    here                              what differs
==================  ================================  ==============================================
``dataloader``      :class:`MeshLoader`               one batch of the rows of all ranks
``loss``            :class:`MeshCrossEntropyLoss`,    the global sum; XLA reduces what is sharded
                    :class:`MeshChunkedLoss`
``inner_attention`` :class:`MeshAttention`            a mask of tensors, not a kernel for CUDA
``validator``       :class:`MeshValidator`            a program per batch
``checkpoint``      :class:`MeshCheckpoints`          no storage is compared by its address
==================  ================================  ==============================================

Each takes the place of a field of torchtitan's Config, so torchtitan builds and calls it. Two more
are no parts of a config: :class:`MeshDims` is what ``Trainer.init_distributed`` returns, and
:class:`MeshDevices` what torchtitan asks about its devices.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import os
import resource
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import spmd_types as spmd
import torch
import torch.nn.functional as F
from torch._decomp import register_decomposition
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.attention.flex_attention import and_masks
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.checkpointer.base import MODEL, ModelWrapper
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import (
    IGNORE_INDEX,
    BaseLoss,
    ChunkedLossWrapper,
    CrossEntropyLoss,
)
from torchtitan.components.validate import Validator
from torchtitan.config.override import derive, override
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.parallel_dims import SpmdLayout
from torchtitan.models.common.attention import FlexAttention, VarlenAttention
from torchtitan.models.common.linear import Linear, ScaledBiasRowwiseLinear
from torchtitan.models.common.moe import MoE, RoutedExperts
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts
from torchtitan.observability import structured_logger as sl
from torchtitan.ops.scatter_add import deterministic_scatter_add

import xla_dtensor as xd
from mesh_utils.errors import MeshError
from mesh_utils.hardware import find_chip
from xla_dtensor.core.errors import ArgumentTypeError
from xla_dtensor.dtensor.dtensor import DTensor
from xla_dtensor.dtensor.local import LocalView
from xla_dtensor.dtensor.redistribute import as_plain
from xla_dtensor.hosts.data import shard_batch
from xla_dtensor.hosts.data.rows import row_group

__all__ = [
    "OVERRIDES",
    "MeshAttention",
    "MeshCheckpoints",
    "MeshChunkedLoss",
    "MeshCrossEntropyLoss",
    "MeshDevices",
    "MeshDims",
    "MeshLoader",
    "MeshValidator",
    "attention_masks",
    "balance_experts",
    "loss_on_mesh",
]

OVERRIDES = tuple(
    f"{__name__}.{name}"
    for name in ("flex_on_mesh", "varlen_on_mesh", "experts_on_mesh", "rowwise_on_mesh")
)
_DENSE_AXES = ("dp_replicate", "dp_shard", "cp", "tp")


# ------------------------------------------------------------------------------------------ Devices


class MeshDevices:
    """What torchtitan asks of ``torch.cuda``, answered for this process's devices of XLA."""

    def device_count(self) -> int:
        """Return 1: to torchtitan a process has one device."""
        return 1

    def current_device(self) -> int:
        """Return that device's number."""
        return 0

    def set_device(self, device: Any) -> None:
        """Do nothing: the mesh is the device."""

    def synchronize(self) -> None:
        """Wait for all devices."""
        xd.get_runtime().synchronize()

    def get_device_name(self, device: Any = None) -> str:
        """Return what the runtime calls its devices."""
        return str(xd.get_runtime().device_attributes()[0].get("device_kind", "cpu"))

    def get_device_properties(self, device: Any = None) -> SimpleNamespace:
        """Return the memory of a device; on CPU the host's."""
        of_host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return SimpleNamespace(total_memory=self._most("bytes_limit") or of_host)

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        """Return the peak of the fullest device; on CPU the process's."""
        of_process = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        peak = self._most("peak_bytes_in_use") or of_process
        return {"active_bytes.all.peak": peak, "reserved_bytes.all.peak": peak}

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        """Do nothing: XLA's peak is that since the start."""

    def empty_cache(self) -> None:
        """Do nothing."""

    def _most(self, name: str) -> int:
        statistics = xd.get_runtime().memory_statistics().values()
        return max((device.get(name, 0) for device in statistics), default=0)

    def peak_flops(self) -> float | None:
        """Return a device's peak in bfloat16; None where the chip is not known."""
        try:
            chip = find_chip(self.get_device_name())
        except MeshError:
            return None
        peak = chip.peak("bf16")
        return peak / chip.devices_per_chip if peak else None


@dataclass(frozen=True)
class _Ranks:
    """Stands for the mesh of the batch: of its ranks this process has several."""

    mine: range
    count: int

    def size(self) -> int:
        return self.count

    def get_local_rank(self) -> range:
        return self.mine


class MeshDims(ParallelDims):
    """torchtitan's ParallelDims, whose ranks are devices of this and other processes."""

    @functools.cached_property
    def ranks(self) -> range:
        """Which ranks of the batch are this process's."""
        count = self.dp_replicate * self.dp_shard
        shape = (count, self.world_size // count)
        rows = row_group(xd.init_device_mesh("xla", shape, mesh_dim_names=("batch", "tp")))
        return range(rows.index * rows.devices, (rows.index + 1) * rows.devices)

    def get_mesh(self, dims: str | list[str]) -> Any:
        """Return a mesh; for "batch" what says which rows are this process's."""
        if dims == "batch":
            return _Ranks(self.ranks, self.dp_replicate * self.dp_shard)
        return super().get_mesh(dims)

    def get_all_one_dimensional_meshes(self) -> dict[str, Any]:
        """Return none: torchtitan sets time limits for their process groups."""
        return {}

    def put_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Put this process's rows of a batch on the mesh, as the model takes its inputs."""
        return self._as_input(shard_batch(tensor, *self._rows()))

    def cut_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Lay the rows of a tensor as those of a batch; inside a program."""
        if isinstance(tensor, DTensor):
            return tensor.redistribute(*self._rows())
        return self._as_input(xd.distribute_tensor(tensor, *self._rows()))

    def put_whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """Put a tensor on the mesh, whole on each device."""
        mesh, _ = self._rows()
        return self._as_input(xd.distribute_tensor(tensor, mesh, [Replicate()] * mesh.ndim))

    def _rows(self) -> tuple[Any, list[Placement]]:
        axes = [*_DENSE_AXES] if self._is_full else ["dp_replicate", "fsdp"]
        mesh: Any = self.get_activated_mesh(axes)
        sizes = zip(mesh.mesh_dim_names, mesh.shape, strict=True)
        # torchtitan calls it Replicate where an axis has one device.
        return mesh, [Replicate() if axis == "tp" or n == 1 else Shard(0) for axis, n in sizes]

    def _as_input(self, tensor: Any) -> torch.Tensor:
        """Under partial_dtensor a plain tensor, which lies on the mesh all the same."""
        return tensor if self._is_full else as_plain(tensor)

    @property
    def _is_full(self) -> bool:
        return self.spmd_backend == "full_dtensor"


# --------------------------------------------------------------------------------------------- Data


class MeshLoader(BaseDataLoader):
    """One loader per rank of this process; their batches, one behind the other, are one batch.

    So a run sees the rows that it would see on as many GPUs, and its checkpoints have the states
    of the same loaders.

    Args:
        config: The config; `each` is that of one rank's loader.
        dp_world_size: How many ranks there are.
        dp_rank: Which of them are this process's.
        **kwargs: As for a rank's loader.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """A loader of all ranks: `each` is the config of one rank's."""

        each: BaseDataLoader.Config

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: range | int, **kwargs: Any
    ) -> None:
        ranks = [dp_rank] if isinstance(dp_rank, int) else dp_rank
        self.loaders: list[Any] = [
            config.each.build(dp_world_size=dp_world_size, dp_rank=rank, **kwargs) for rank in ranks
        ]

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        # As soon as one has no more rows: a step takes those of all.
        for batches in zip(*self.loaders, strict=False):
            inputs, labels = zip(*batches, strict=True)
            batch_inputs = {
                name: torch.cat([rank_inputs[name] for rank_inputs in inputs]) for name in inputs[0]
            }
            yield batch_inputs, torch.cat(labels)

    def state_dict(self) -> dict[str, Any]:
        """Return the loaders' states, each under its rank's name."""
        states = [loader.state_dict() for loader in self.loaders]
        return {name: value for state in states for name, value in state.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give each loader its state."""
        for loader in self.loaders:
            loader.load_state_dict(state_dict)


# --------------------------------------------------------------------------------------------- Loss


def _cross_entropy(
    pred: torch.Tensor, labels: torch.Tensor, *, global_vocab_size: int | None = None
) -> torch.Tensor:
    with loss_parallel():
        return F.cross_entropy(
            pred.flatten(0, 1).float(),
            labels.flatten(0, 1),
            reduction="sum",
            ignore_index=IGNORE_INDEX,
        )


class MeshCrossEntropyLoss(CrossEntropyLoss):
    """torchtitan's CrossEntropyLoss, of the whole batch; it asks for no rank."""

    @dataclass(kw_only=True, slots=True)
    class Config(CrossEntropyLoss.Config):
        """As torchtitan's."""

    def __init__(self, config: Config, *, compile_config: Any = None) -> None:
        super().__init__(config)
        self.fn = _cross_entropy


class MeshChunkedLoss(ChunkedLossWrapper):
    """torchtitan's ChunkedLossWrapper, which cuts the sequence of the whole batch."""

    lm_head: Any

    @dataclass(kw_only=True, slots=True)
    class Config(ChunkedLossWrapper.Config):
        """As torchtitan's."""

    def __call__(
        self,
        pred: torch.Tensor,
        labels: torch.Tensor,
        global_valid_tokens: torch.Tensor | None = None,
        **loss_inputs: Any,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Compute the loss chunk by chunk, each with its backward, so that one's logits live."""
        size, remainder = divmod(pred.shape[1], self.num_chunks)
        if remainder:
            raise ArgumentTypeError(
                f"The loss was to be computed in num_chunks={self.num_chunks} of a sequence of "
                f"{pred.shape[1]}. It is no multiple. Set --loss.num_chunks or --training.seq_len."
            )
        is_training = pred.requires_grad
        total: Any = 0.0
        metrics: dict[str, torch.Tensor] = {}
        gradients: list[Any] = []
        self.lm_head.set_reshard_after_forward(False)  # one gather serves all chunks
        for index, hidden in enumerate(pred.detach().split(size, 1)):
            hidden.requires_grad_(is_training)
            label, inputs = _chunk((labels, loss_inputs), size, index)
            loss, chunk_metrics = self.loss_fn(
                self.lm_head(hidden), label, global_valid_tokens, **inputs
            )
            metrics = self._combine_chunk_metrics(metrics, chunk_metrics)
            total = total + loss.detach()
            if is_training:
                loss.backward()
                gradients.append(hidden.grad)
        self.lm_head.set_reshard_after_forward(True)
        if is_training:
            gradient = torch.cat(gradients, 1)
            total = self._gradient_backprop(pred, gradient, total, self.lm_head, False)
        return total, metrics


def _chunk(tree: Any, size: int, index: int) -> Any:
    def cut(leaf: Any) -> Any:
        return leaf.split(size, 1)[index] if isinstance(leaf, torch.Tensor) else leaf

    return pytree.tree_map(cut, tree)


def loss_on_mesh(config: BaseLoss.Config) -> BaseLoss.Config:
    """Return the config of a loss that computes the same on the mesh; others stay themselves."""
    if type(config) is ChunkedLossWrapper.Config:
        return derive(config, MeshChunkedLoss.Config, loss_fn=loss_on_mesh(config.loss_fn))
    if type(config) is CrossEntropyLoss.Config:
        return derive(config, MeshCrossEntropyLoss.Config)
    return config


# --------------------------------------------------------------------------------------- Parameters
#
# A rank of gpt_oss takes its own gradients of sinks and of experts' biases for whole ones: FSDP
# sums them later, or what it adds is scaled and its gradient is not. Here a device adds its part of
# what all have, and gradients are sums.


def _in_parts(module: Any) -> Any:
    """Return a copy of a module with each device's part of its parameters.

    Args:
        module: A module whose results are summed up over "tp", or are cut there.
    """
    twin = copy.copy(module)
    for name, parameter in module.named_parameters(recurse=False):
        part = parameter
        if isinstance(parameter, DTensor):
            names, placements = parameter.device_mesh.mesh_dim_names or (), parameter.placements
            summed = [
                Partial() if placement.is_replicate() else placement for placement in placements
            ]
            part = parameter.to_local(grad_placements=summed)
            if "tp" in names and placements[names.index("tp")].is_replicate():
                part = part / parameter.device_mesh["tp"].size()
        vars(twin)[name] = part
    return twin


@override(target=ScaledBiasRowwiseLinear.Config, exact=True)
def rowwise_on_mesh(config: ScaledBiasRowwiseLinear.Config) -> Linear.Config:
    """Return the config of a Linear of DTensors: what it gives is summed, and the bias added."""
    sharding = config.sharding_config
    return derive(
        config, Linear.Config, sharding_config=sharding and replace(sharding, local_map=None)
    )


# ---------------------------------------------------------------------------------------- Attention
#
# The models make masks of functions (of a row, a head, a query and a key) for FlexAttention's
# kernel, which is for CUDA. They make them here too, from the positions on the mesh; the functions
# are then called with all indices at once.


class MeshAttention(FlexAttention):
    """Attention as torch defines it, for XLA to compile, with the mask as a tensor of bools."""

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        """As FlexAttention's, and the window of a VarlenAttention."""

        window_size: tuple[int, int] = (-1, 0)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.window = config.window_size[0]

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: Any,
        scale: float | None = None,
        enable_gqa: bool = False,
        out_transform: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Compute attention of (rows, length, heads, size) tensors, whole or each device's part."""
        if kwargs.get("score_mod") is not None:
            raise ArgumentTypeError(
                f"Attention was called with score_mod={kwargs['score_mod']}, which is a part of "
                "FlexAttention's kernel. Use a model without it."
            )
        q, k, v = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
        mask = attention_masks
        if isinstance(q, LocalView) and isinstance(mask, DTensor):
            mask = mask.to_local()
        if self.window >= 0:
            at = torch.arange(q.shape[2])
            mask = mask & (at.unsqueeze(1) - at <= self.window)
        if out_transform is None:
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa
            )
            return out.transpose(1, 2)
        out, sums = _with_sums(q, k, v, mask, q.shape[-1] ** -0.5 if scale is None else scale)
        if inspect.ismethod(out_transform):  # it reads its module's parameters
            out_transform = functools.partial(
                out_transform.__func__, _in_parts(out_transform.__self__)
            )
        return out_transform(out.transpose(1, 2), sums.transpose(1, 2))


def _with_sums(q: Any, k: Any, v: Any, mask: Any, scale: float) -> tuple[Any, Any]:
    """Return attention and the logarithms of the sums its weights were divided by."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT).float() * scale
    scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(-1).to(v.dtype) @ v, scores.logsumexp(-1)


@override(target=FlexAttention.Config, exact=True)
def flex_on_mesh(config: FlexAttention.Config) -> MeshAttention.Config:
    """Return the config of what takes a FlexAttention's place."""
    return derive(config, MeshAttention.Config)


@override(target=VarlenAttention.Config)
def varlen_on_mesh(config: VarlenAttention.Config) -> MeshAttention.Config:
    """Return the config of what takes a VarlenAttention's place."""
    if config.window_size[1] != 0:
        raise ArgumentTypeError(
            f"A VarlenAttention has window_size={config.window_size}. Here a query sees nothing "
            "that is behind it. Use a model whose windows end with 0."
        )
    return derive(config, MeshAttention.Config)


def attention_masks(model: Any, positions: torch.Tensor, dims: MeshDims) -> Any:
    """Return the masks that a model wants, of the positions of a batch; inside a program.

    Args:
        model: The model.
        positions: The position of each token in its document.
        dims: Where tensors lie.
    """
    attention = model.config.first_attention
    if attention is None or not isinstance(attention.inner_attention, MeshAttention.Config):
        return None

    def mask(positions: Any, config: Any, functions: Sequence[Any]) -> torch.Tensor:
        rows, length = positions.shape
        at = torch.arange(length)
        row, head = torch.arange(rows).view(-1, 1, 1, 1), torch.zeros((1, 1, 1, 1))
        attention_mask = and_masks(*functions)(
            row, head, at.view(1, 1, -1, 1), at.view(1, 1, 1, -1)
        )
        return dims.cut_rows(attention_mask)

    vars(model)["_create_flex_attention_mask"] = mask
    try:
        with _MadeOnMesh(dims):
            return model.get_attention_masks(positions)
    finally:
        del vars(model)["_create_flex_attention_mask"]


class _MadeOnMesh(TorchFunctionMode):
    """Puts tensors that are made on the mesh, as they will be written to."""

    def __init__(self, dims: MeshDims) -> None:
        super().__init__()
        self.dims = dims

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        return self.dims.put_whole(output) if func in (torch.full, torch.arange) else output


# ------------------------------------------------------------------------------------------ Experts


@register_decomposition(deterministic_scatter_add._opoverload)
def _scatter_add(out: torch.Tensor, index: torch.Tensor, src: torch.Tensor) -> torch.Tensor:
    return out.scatter_add(0, index, src)


class MeshRoutedExperts(RoutedExperts):
    """torchtitan's RoutedExperts; each device counts its own tokens: the counts given are of all.

    Args:
        config: The config.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        """As torchtitan's."""

    def forward(
        self,
        x_BLD: torch.Tensor,
        topk_scores_BLK: torch.Tensor,
        topk_expert_ids_BLK: torch.Tensor,
        num_local_tokens_per_expert_E: torch.Tensor,
    ) -> torch.Tensor:
        """Compute what the experts give for each token."""
        experts = torch.arange(num_local_tokens_per_expert_E.shape[0])
        counts = (topk_expert_ids_BLK.unsqueeze(-1) == experts).sum((0, 1, 2))
        return super().forward(x_BLD, topk_scores_BLK, topk_expert_ids_BLK, counts)


class MeshBiasedExperts(GptOssGroupedExperts):
    """gpt_oss's experts, with each device's part of the biases."""

    @dataclass(kw_only=True, slots=True)
    class Config(GptOssGroupedExperts.Config):
        """As torchtitan's."""

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        """Compute a device's part of what experts give for tokens that lie by expert."""
        out = GptOssGroupedExperts.forward(_in_parts(self), x_RD, num_tokens_per_expert_E)
        return out.type_as(x_RD)


@override(target=MoE.Config)
def experts_on_mesh(config: MoE.Config) -> MoE.Config:
    """Return a config whose counts of tokens are those of all rows, the same on each device."""
    sharding = config.sharding_config
    if sharding is not None:
        states = {name: _whole_layout(layout) for name, layout in sharding.state_shardings.items()}
        config.sharding_config = replace(sharding, state_shardings=states)
    routed = config.routed_experts
    if type(routed.inner_experts) is GptOssGroupedExperts.Config:
        routed.inner_experts = derive(routed.inner_experts, MeshBiasedExperts.Config)
    if type(routed) is RoutedExperts.Config:
        config.routed_experts = derive(routed, MeshRoutedExperts.Config)
    return config


def _whole_layout(layout: SpmdLayout) -> SpmdLayout:
    kinds = {axis: spmd.R if kind is spmd.P else kind for axis, kind in layout.axis_types.items()}
    return replace(layout, axis_types=kinds)


def balance_experts(optimizers: Any, model_parts: Sequence[Any], parallel_dims: Any) -> None:
    """Register torchtitan's balancing of experts; counts of tokens are of the whole batch here."""
    blocks = [block for model in model_parts for block in model.layers.values()]
    experts = [block.moe for block in blocks if getattr(block, "moe_enabled", False)]
    balanced = [moe for moe in experts if moe.load_balance_coeff is not None]

    @torch.no_grad()
    def balance(*args: Any, **kwargs: Any) -> None:
        for moe in balanced:
            tokens = moe.tokens_per_expert_E
            change = moe.load_balance_coeff * torch.sign(tokens.mean() - tokens)
            moe.expert_bias_E.add_(change - change.mean())
            tokens.zero_()

    if balanced:
        optimizers.register_step_pre_hook(balance)


# ----------------------------------------------------------------------- Validation and checkpoints


class MeshValidator(Validator):
    """torchtitan's Validator, with a program per batch.

    Args:
        config: The config.
        **kwargs: As for a Validator.
    """

    parallel_dims: MeshDims

    @dataclass(kw_only=True, slots=True)
    class Config(Validator.Config):
        """As torchtitan's."""

    def __init__(self, config: Config, **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        self.dl_config: Any = MeshLoader.Config(each=self.dl_config)
        self.program = xd.compile(self._loss)

    def _loss(
        self, model: Any, inputs: dict[str, Any], labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, kwargs = model_inputs(model, inputs, self.parallel_dims)
        with self.validation_context():
            loss, _ = self.loss_fn(model(tokens, **kwargs), labels)
        return loss, (labels != IGNORE_INDEX).sum()

    @sl.log_trace_span("eval")
    @torch.no_grad()
    def validate(self, model_parts: list[Any], step: int) -> None:
        """Log the mean loss of the validation rows."""
        sl.add_step_tag("eval")
        (model,), put = model_parts, self.parallel_dims.put_rows
        model.eval()
        loader = self.dl_config.build(
            dp_world_size=self.dp_world_size,
            dp_rank=self.dp_rank,
            tokenizer=self.tokenizer,
            seq_len=self.seq_len,
            local_batch_size=self.local_batch_size,
        )
        config: Any = self.config
        outputs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for inputs, labels in itertools.islice(loader, None if config.steps < 0 else config.steps):
            ranks = len(self.parallel_dims.ranks)
            self.metrics_processor.ntokens_since_last_log += labels.numel() // ranks
            on_mesh = {name: put(tensor) for name, tensor in inputs.items()}
            outputs.append(self.program(model, on_mesh, put(labels)))
        losses, tokens = (
            sum(number(tensor) for tensor in column) for column in zip(*outputs, strict=True)
        )
        self.metrics_processor.log_validation(loss=losses / tokens, step=step)
        model.train()


def model_inputs(
    model: Any, inputs: Mapping[str, Any], dims: MeshDims
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return what a model is called with; inside a program."""
    kwargs = dict(inputs)
    tokens = kwargs.pop("input")
    masks = attention_masks(model, kwargs["positions"], dims) if "positions" in kwargs else None
    return tokens, kwargs if masks is None else {**kwargs, "attention_masks": masks}


def number(value: Any) -> float:
    """Return a number that a program has computed."""
    return float((value.full_tensor() if isinstance(value, DTensor) else value).item())


class _ModelState(ModelWrapper):
    """The model's state; a fused weight's parts are made anew on each save."""

    def state_dict(self) -> dict[str, Any]:
        self.cached_state_dict = self._get_state_dict()
        return self.cached_state_dict


class MeshCheckpoints(CheckpointManager):
    """torchtitan's CheckpointManager, of a model on the mesh.

    Args:
        config: The config.
        model_parts: The model.
        **kwargs: As for a CheckpointManager.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """As torchtitan's."""

    def __init__(self, config: Config, *, model_parts: list[Any], **kwargs: Any) -> None:
        super().__init__(config, model_parts=model_parts, **kwargs)
        if self.enable:
            self.states[MODEL] = _ModelState(model_parts)
