"""A lower bound of what activations take in a decoder's training step, without compiling it.

What must be alive when the backward pass of the last layer begins, whatever the compiler does, if
activations lie as the rules say:

* the input of each layer. Rematerialisation ("full") keeps nothing else of a layer, every other
  policy keeps more; "offload:layer_input" keeps them in the host's memory;
* what the last layer returned: the norm and the loss need it in their backward;
* of the layer that is computed again, both inner values of its feed-forward part: the gradient of
  each of the two is made from the other.

Scores and logits are not in it: memory-lean attention and ``linear_cross_entropy`` hold parts only.
What a program really takes is more: gathered weights, attention, buffers of collectives.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, prod
from typing import TYPE_CHECKING

from xla_dtensor.core.dtypes import itemsize_bytes

if TYPE_CHECKING:
    from xla_dtensor.core.rules import ShardingRules
    from xla_dtensor.plan.model_sizes import ModelSizes
    from xla_dtensor.plan.quick.batch import Batch

__all__ = ["LAYER_INPUT", "ActivationBound", "ActivationPart", "decoder_activations"]

LAYER_INPUT = "layer_input"
"""What the reference models call the input of a layer, for remat="offload:layer_input"."""


@dataclass(frozen=True, slots=True)
class ActivationPart:
    """Equal activations that are alive at the same time.

    Args:
        name: What they are.
        count: How many.
        each_bytes: Of one, on one device.
        why: Why they must be alive.
    """

    name: str
    count: int
    each_bytes: int
    why: str

    @property
    def device_bytes(self) -> int:
        """Bytes of all of them on one device."""
        return self.count * self.each_bytes


@dataclass(frozen=True)
class ActivationBound:
    """A lower bound: the sum of its parts."""

    parts: tuple[ActivationPart, ...]

    @property
    def device_bytes(self) -> int:
        """Bytes on one device, at least."""
        return sum(part.device_bytes for part in self.parts)


def decoder_activations(
    sizes: ModelSizes,
    batch: Batch,
    rules: ShardingRules | None,
    dtype: str = "bfloat16",
    *,
    remat: str = "full",
) -> ActivationBound:
    """Bound what the activations of a reference model take on one device.

    Args:
        sizes: Of the model.
        batch: What it is given, and how that lies.
        rules: Those of the parameters; they say over which axes the feed-forward part is cut.
        dtype: Of activations.
        remat: What the backward keeps of a layer. Inputs of layers that are offloaded lie in the
            host's memory, but for the one that is worked on.

    Returns:
        The bound.

    Example:
        >>> from mesh_utils import JobConfig
        >>> from xla_dtensor.plan.model_sizes import ModelSizes
        >>> from xla_dtensor.plan.quick.batch import batch_of
        >>> job, sizes = JobConfig.load("llama3_8b_v5e"), ModelSizes.load("llama3-8b")
        >>> for part in decoder_activations(sizes, batch_of(job), None).parts:
        ...     print(part.count, part.name, part.each_bytes)
        32 inputs of layers 67108864
        1 the last layer's output 67108864
        2 inner values of a feed-forward part 234881024
    """
    width = itemsize_bytes(dtype)
    parts = prod(batch.sizes[axis] for axis in batch.hidden_axes)
    carry = batch.device_tokens * ceil(sizes.hidden_size / parts) * width
    kind, _, names = remat.partition(":")
    offloaded = kind == "offload" and LAYER_INPUT in (name.strip() for name in names.split(","))
    return ActivationBound(
        (
            ActivationPart(
                "inputs of layers",
                1 if offloaded else sizes.num_hidden_layers,
                carry,
                "the layer that is computed again needs its input"
                if offloaded
                else "rematerialisation keeps the input of each layer until its backward",
            ),
            ActivationPart("the last layer's output", 1, carry, "the norm and the loss need it"),
            ActivationPart(
                "inner values of a feed-forward part",
                2,
                _inner_elements(sizes, batch, rules) * width,
                "the layer that is computed again needs both for the gradient of each",
            ),
        )
    )


def _inner_elements(sizes: ModelSizes, batch: Batch, rules: ShardingRules | None) -> int:
    """Elements on one device of one inner value of a feed-forward part.

    All axes that cut the tokens, and all that cut what experts or inner channels there are, cut it;
    those that cut the weights along the dim that is summed do not.
    """
    experts = sizes.num_local_experts
    path = "model.layers.0.mlp." + ("experts.gate_up_proj" if experts else "up_proj.weight")
    cut = {*batch.batch_axes, *batch.sequence_axes}
    cut |= set(_axes_of_dims(rules, path, 3 if experts else 2, range(2 if experts else 1)))
    parts = prod(batch.sizes[axis] for axis in cut if axis in batch.sizes)
    # An expert has at least the places that its tokens need if all are chosen alike.
    tokens = batch.tokens * (sizes.num_experts_per_tok if experts else 1)
    return ceil(tokens * sizes.intermediate_size / parts)


def _axes_of_dims(
    rules: ShardingRules | None, path: str, ndim: int, dims: Iterable[int]
) -> list[str]:
    rule = next((rule for rule in (rules.rules if rules else ()) if rule.matches(path)), None)
    entries = None if rule is None or rules is None else rule.entries_for(path, ndim, rules.tp_axis)
    if entries is None or isinstance(entries, str):
        return []
    found: list[str] = []
    for dim in dims:
        entry = entries[dim]
        found += [] if entry is None else [entry] if isinstance(entry, str) else list(entry)
    return found
