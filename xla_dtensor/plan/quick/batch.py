"""The batch of a job: how large it is and how it lies, read from the rule for what layers return.

    activations:
      "model.layers.*": [[dp, fsdp], cp, null]        batch over dp and fsdp, sequence over cp

Without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from mesh_utils.errors import JobError
from xla_dtensor.core.rules import read_rules

if TYPE_CHECKING:
    from mesh_utils import JobConfig
    from xla_dtensor.core.rules import ShardingRules

__all__ = ["LAYER", "Batch", "axes_of_tokens", "batch_of"]

LAYER = "model.layers.0"
"""The module whose output says how tokens lie."""


@dataclass(frozen=True)
class Batch:
    """Sequences of tokens on a mesh.

    Args:
        sequences: Of the whole batch.
        length: Tokens of a sequence.
        batch_axes: The axes that cut the batch.
        sequence_axes: The axes that cut sequences.
        sizes: The size of each axis of the mesh.
        hidden_axes: The axes that cut the hidden dim of what goes from layer to layer.
    """

    sequences: int
    length: int
    batch_axes: tuple[str, ...]
    sequence_axes: tuple[str, ...]
    sizes: Mapping[str, int]
    hidden_axes: tuple[str, ...] = ()

    @property
    def placement(self) -> tuple[tuple[str, ...] | None, tuple[str, ...] | None]:
        """How (sequences, length) lies: axes per dim, or None."""
        return (self.batch_axes or None, self.sequence_axes or None)

    @property
    def groups(self) -> int:
        """Into how many parts the batch is cut."""
        return prod(self.sizes[axis] for axis in self.batch_axes)

    @property
    def tokens(self) -> int:
        """Tokens of the whole batch."""
        return self.sequences * self.length

    @property
    def device_tokens(self) -> int:
        """Tokens on one device."""
        parts = prod(self.sizes[axis] for axis in self.sequence_axes)
        return -(-self.sequences // self.groups) * -(-self.length // parts)


def axes_of_tokens(
    rules: ShardingRules | None, sizes: Mapping[str, int]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Say which axes cut the batch, and which cut sequences.

    Args:
        rules: The first one for what "model.layers.0" returns counts.
        sizes: The axes of the mesh.

    Returns:
        Both; without such a rule, all axes but the tensor-parallel one cut the batch.

    Example:
        >>> rules = read_rules({"activations": {"model.layers.*": [["dp", "fsdp"], None, None]}})
        >>> axes_of_tokens(rules, {"dp": 2, "fsdp": 4, "tp": 4})
        (('dp', 'fsdp'), ())
    """
    for rule in rules.activations if rules is not None else ():
        if rule.matches_module(LAYER) and rule.entries is not None and len(rule.entries) == 3:
            batch, sequence = (_axes(entry) for entry in rule.entries[:2])
            return batch, sequence
    tp_axis = "tp" if rules is None else rules.tp_axis
    return tuple(axis for axis in sizes if axis != tp_axis), ()


def _axes_of_hidden(rules: ShardingRules | None) -> tuple[str, ...]:
    for rule in rules.activations if rules is not None else ():
        if rule.matches_module(LAYER) and rule.entries is not None and len(rule.entries) == 3:
            return _axes(rule.entries[2])
    return ()


def batch_of(
    job: JobConfig, *, sequence: int = 8192, per_group: int = 1, sequences: int | None = None
) -> Batch:
    """Say what batch a job's mesh takes.

    Args:
        job: The job.
        sequence: Tokens of a sequence.
        per_group: Sequences per part of the batch; each group of devices between which the batch
            is cut has one part.
        sequences: Of the whole batch, in place of `per_group`.

    Returns:
        The batch.

    Raises:
        JobError: Sizes that are not positive, or that the axes do not divide.

    Example:
        >>> from mesh_utils import JobConfig
        >>> batch_of(JobConfig.load("llama3_70b_v5p_2slices")).sequences
        256
    """
    sizes = {axis.name: axis.size for axis in job.axes}
    rules = None if job.sharding is None else read_rules(job.sharding)
    batch_axes, sequence_axes = axes_of_tokens(rules, sizes)
    groups = prod(sizes[axis] for axis in batch_axes)
    whole = per_group * groups if sequences is None else sequences
    hidden = _axes_of_hidden(rules)
    found = Batch(whole, sequence, batch_axes, sequence_axes, sizes, hidden)
    parts = prod(sizes[axis] for axis in sequence_axes)
    if min(sequence, whole) < 1 or whole % groups or sequence % parts:
        raise JobError(
            f"Job {job.name!r} was given sequences={whole} of length={sequence}. Its axes cut them "
            f"into {groups} and {parts} parts. Pass positive multiples of these."
        )
    return found


def _axes(entry: object) -> tuple[str, ...]:
    if entry is None or entry == "None":
        return ()
    several = entry if isinstance(entry, (tuple, list)) else (entry,)
    return tuple(str(axis) for axis in several if axis not in (None, "None"))
