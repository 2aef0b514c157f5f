"""What a training step moves over each mesh axis, in a model that only reads the sharding rules.

An axis that cuts the batch (or sequences) is a data axis. A parameter that it cuts as well is
gathered before use and its gradient reduced and scattered (FSDP); one that it does not cut has its
gradient all-reduced. An axis that cuts a weight and no tokens is a tensor-parallel one: where it
cuts the dim that a matmul sums, the result is all-reduced. Experts that a data axis cuts send
tokens around. Per step, with layers that are computed again in the backward pass:

    gathered parameter        all-gather, forward and backward; reduce-scatter of the gradient
    copied parameter          all-reduce of the gradient
    summed dim of a layer     all-reduce of (tokens, out): forward, again, and for the input
    cut vocabulary            all-reduce of (tokens, hidden), once for embedding and output each
    experts                   all-to-all of arriving and leaving tokens: forward, again, backward
    cut sequence              all-gather of keys and values, forward and again; reduce-scatter back

It ranks meshes. It is not what a compiler makes: that is found by compiling.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mesh_utils.network import Collective
from xla_dtensor.core.dtypes import itemsize_bytes

if TYPE_CHECKING:
    from xla_dtensor.core.rules import PlannedTensor, ShardingPlan
    from xla_dtensor.plan.model_sizes import ModelSizes
    from xla_dtensor.plan.quick.batch import Batch

__all__ = ["Transfer", "gathered_bytes", "traffic"]

CAPACITY = 1.25
"""Places of an expert per token that comes if all are chosen alike, as in the reference model."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """Equal collectives over one axis, summed.

    Args:
        axis: Over which axis.
        collective: Of which kind.
        size_bytes: Of one step, on each device: the results of all-gathers, the operands of others.
    """

    axis: str
    collective: Collective
    size_bytes: float


def traffic(
    plan: ShardingPlan, batch: Batch, sizes: ModelSizes | None = None, dtype: str = "bfloat16"
) -> tuple[Transfer, ...]:
    """Sum what a step moves over each axis.

    Args:
        plan: How the parameters lie.
        batch: The tokens.
        sizes: Of the model; None leaves experts and cut sequences out.
        dtype: Of activations.

    Returns:
        One entry per axis and kind of collective; axes of one device are left out.

    Example:
        >>> from mesh_utils import Mesh
        >>> from xla_dtensor.plan.quick.estimate import quick_plan
        >>> from xla_dtensor.plan.quick.batch import Batch
        >>> plan = quick_plan([("w", (8, 8), "bf16")], {"w": ["fsdp", None]}, {"fsdp": 4})
        >>> for one in traffic(plan, Batch(4, 8, ("fsdp",), (), {"fsdp": 4})):
        ...     print(one.axis, one.collective, one.size_bytes)
        fsdp all-gather 256.0
        fsdp reduce-scatter 128.0
    """
    sums: dict[tuple[str, Collective], float] = {}
    width = itemsize_bytes(dtype)
    for tensor in plan.tensors:
        if tensor.facts.same_as is None:
            for one in _of_parameter(tensor, batch, sizes, width):
                key = (one.axis, one.collective)
                sums[key] = sums.get(key, 0.0) + one.size_bytes
    for one in _of_sequences(batch, sizes, width):
        key = (one.axis, one.collective)
        sums[key] = sums.get(key, 0.0) + one.size_bytes
    return tuple(
        Transfer(axis, collective, size)
        for (axis, collective), size in sums.items()
        if batch.sizes.get(axis, 1) > 1 and size
    )


def gathered_bytes(transfers: tuple[Transfer, ...], axis: str) -> float:
    """What an axis moves, in bytes of an all-gather that takes as long.

    Args:
        transfers: Of a step.
        axis: The axis.

    Returns:
        Bytes: an all-reduce counts twice.
    """
    return sum(
        one.size_bytes * (2 if one.collective == "all-reduce" else 1)
        for one in transfers
        if one.axis == axis
    )


def _cuts(tensor: PlannedTensor) -> Mapping[str, int]:
    """Axis -> the dim that it cuts."""
    return {str(axis): dim for dim, axes in enumerate(tensor.layout.dims) for axis in axes}


def _of_parameter(
    tensor: PlannedTensor, batch: Batch, sizes: ModelSizes | None, width: int
) -> Iterator[Transfer]:
    cuts, shape, size = _cuts(tensor), tensor.facts.shape, batch.sizes
    data = (*batch.batch_axes, *batch.sequence_axes)
    is_expert = len(shape) == 3
    gathered = [a for a, dim in cuts.items() if a in data and not (is_expert and dim == 0)]
    held = float(tensor.device_bytes)
    for axis in data:
        if axis not in cuts:
            yield Transfer(axis, "all-reduce", held)
    for axis in reversed(gathered):  # the innermost cut is joined first
        held *= size[axis]
        yield Transfer(axis, "all-gather", 2 * held)
        yield Transfer(axis, "reduce-scatter", held)
    for axis, dim in cuts.items():
        if axis not in gathered:
            yield from _of_tokens(tensor, axis, dim, batch, sizes, width)


def _of_tokens(
    tensor: PlannedTensor, axis: str, dim: int, batch: Batch, sizes: ModelSizes | None, width: int
) -> Iterator[Transfer]:
    """What the tokens move because an axis cuts a weight and does not gather it."""
    shape, tokens = tensor.facts.shape, batch.device_tokens * width
    is_layers = ".layers." in f".{tensor.path}"
    if len(shape) == 2 and is_layers and dim == 1:
        yield Transfer(axis, "all-reduce", 3.0 * tokens * shape[0])
    elif len(shape) == 2 and not is_layers and dim == 0:
        yield Transfer(axis, "all-reduce", 1.0 * tokens * shape[1])
    elif len(shape) == 3 and dim == 0 and sizes is not None:
        choices = sizes.num_experts_per_tok
        if axis in (*batch.batch_axes, *batch.sequence_axes):
            sent = CAPACITY * choices * tokens * sizes.hidden_size
            yield Transfer(axis, "all-to-all", 3 * sent)
        elif tensor.path.endswith("down_proj"):
            yield Transfer(axis, "all-reduce", 3.0 * tokens * sizes.hidden_size)


def _of_sequences(batch: Batch, sizes: ModelSizes | None, width: int) -> Iterator[Transfer]:
    if sizes is None:
        return
    held = 2.0 * sizes.num_key_value_heads * sizes.head_dim * width * batch.device_tokens
    for axis in reversed(batch.sequence_axes):
        held *= batch.sizes[axis]
        yield Transfer(axis, "all-gather", 2 * held * sizes.num_hidden_layers)
        yield Transfer(axis, "reduce-scatter", held * sizes.num_hidden_layers)
