"""Findings about axes of the mesh that do nothing for the step: devices that compute the same.

An axis earns its devices by cutting something that is computed: the batch, the sequence, or weights
that stay cut (tensor and expert parallelism). Two kinds of plans waste them:

- the axis cuts nothing that goes into the step, and nothing is sent over it: all its devices hold
  and compute the same;
- the axis cuts weights, which are gathered for use (FSDP), but not the batch: its devices gather
  the same weights for the same tokens. Memory is saved, and no time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from xla_dtensor.report.attribution import origin_of
from xla_dtensor.report.collective import Collective
from xla_dtensor.report.evidence import Evidence
from xla_dtensor.report.finding import Finding
from xla_dtensor.report.held_shards import axis_dims

__all__ = ["axis_findings", "batch_axes"]

_WEIGHTS = ("parameter", "frozen parameter")


def axis_findings(
    evidence: Evidence, collectives: Iterable[Collective], gathered: Iterable[str]
) -> Iterator[Finding]:
    """Finds axes whose devices compute the same.

    Args:
        evidence: what the compiled step left behind.
        collectives: those of its program.
        gathered: the axes over which weights are gathered for use.

    Yields:
        The findings; none where the evidence does not say what goes in and how it lies.
    """
    inputs = [one for one in evidence.held if one.role == "argument" and one.shape]
    laid = {id(one): axis_dims(one, evidence.mesh) for one in evidence.held}
    if not inputs or any(laid[id(one)] is None for one in inputs):
        return
    cut = {
        axis
        for one in evidence.held
        for axis, dim in (laid[id(one)] or {}).items()
        if dim is not None
    }
    of_inputs = batch_axes(evidence)
    collectives = tuple(collectives)
    talking = {axis for each in collectives for axis in _names(each)}
    # Products that are summed over an axis are shared by its devices: tensor parallelism.
    summed = {axis for each in collectives if _sums(each) for axis in _names(each)}
    fsdp = set(gathered) - summed
    for axis, size in zip(evidence.mesh.axis_names, evidence.mesh.mesh_shape, strict=True):
        name = str(axis)
        if size == 1 or name in of_inputs:
            continue
        if name not in cut and name not in talking and "mixed" not in talking:
            yield Finding(
                "warning",
                "axis-idle",
                f"Axis {name} cuts nothing: its {size} devices compute the same",
                "Neither the step's inputs nor its state are sharded over it, and nothing is sent "
                f"over it; 1 in {size} of these devices would do.",
                f"Shard the batch over {name}, or the weights, or give its devices to another "
                "axis.",
            )
        elif name in fsdp:
            yield Finding(
                "warning",
                "batch-replicated",
                f"The batch is whole on all {size} devices of axis {name}",
                f"Weights are gathered over {name} for use, and each of its devices then computes "
                f"the same with them: {size} times the compute.",
                f"Shard the inputs of the step over {name} too: their batch, or their sequence.",
            )


def _names(item: Collective) -> set[str]:
    axes = ("mixed",) if item.axes is None else item.axes
    return {str(axis).partition(":")[0] for axis in axes}


def _sums(item: Collective) -> bool:
    """Whether it sums arrays, and not only numbers of statistics, in the forward."""
    if item.kind not in ("all-reduce", "reduce-scatter"):
        return False
    is_array = any(sum(dim > 1 for dim in array.dims) > 1 for array in item.results)
    return is_array and origin_of(item.op_name, item.source).phase == "forward"


def batch_axes(evidence: Evidence, dim: int | None = None) -> set[str]:
    """Lists the axes that cut what the step is given.

    Args:
        evidence: what the compiled step left behind.
        dim: that they cut; None for any.

    Returns:
        Their names.

    Example:
        >>> from xla_dtensor.report.evidence import Held
        >>> tokens = Held("tokens", "argument", (8, 64), "s32", (4, 64), "[dp, -]")
        >>> batch_axes(Evidence("t", "HloModule m", Mesh([0, 1], (2,), ("dp",)), held=(tokens,)))
        {'dp'}
    """
    found: set[str] = set()
    for one in evidence.held:
        if one.role == "argument":
            dims = axis_dims(one, evidence.mesh) or {}
            found |= {
                axis for axis, at in dims.items() if at is not None and (dim is None or at == dim)
            }
    return found
