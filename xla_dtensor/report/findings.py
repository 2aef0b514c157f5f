"""What to look at in a compiled step, the worst first, each with the fix to try.

    does-not-fit                 it takes more memory than there is; the three largest causes
    tensor-parallel-over-dcn     activations cross slices while the forward waits for them
    vocabulary-unsharded         a vocabulary matrix is whole where the rest is sharded
    tensor-unsharded             so is another large tensor
    state-unsharded              all state is whole, and takes much of the memory
    optimizer-state-unsharded    moments lie in fewer shards than their parameters
    activation-gathered          an activation is gathered over an axis that no weight uses
    attention-gathered           attention gathers more than keys and values of a cut sequence
    experts-gathered             experts are gathered over the axis that cuts them
    batch-replicated             an axis gathers weights, and its devices have the same batch
    axis-idle                    an axis cuts nothing
    full-rematerialization       XLA gathered an array whole to shard it in another way
    sharding-differs             XLA chose another layout than was asked for
    axis-of-size-1               an axis of the mesh does nothing
    groups-along-no-axes         XLA made groups of devices that are no axis of the mesh
    hlo-unread                   a part of the program could not be read

The codes stay the same from version to version. Right plans have no findings (an axis of size 1 is
a note): where the numbers that decide come from stands beside them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from mesh_utils import Mesh
from xla_dtensor.report.collective import (
    DCN_TARGET,
    TRANSFER_TYPE,
    Collective,
    axis_names,
    base_axes,
)
from xla_dtensor.report.finding import (
    SEVERITIES,
    SMALL_GATHER_BYTES,
    CollectiveLine,
    Finding,
    Origin,
    origin_of,
    starred,
)
from xla_dtensor.report.hlo_text import ArrayShape
from xla_dtensor.report.memory import axis_dims, free_axes, is_sharded_over, is_vocabulary, shards
from xla_dtensor.report.reading import HloReading, rematerialization_findings
from xla_dtensor.report.report import Evidence, Held
from xla_dtensor.report.roofline import Roofline
from xla_dtensor.report.texts import bytes_text, seconds_text

if TYPE_CHECKING:
    from xla_dtensor.report.memory import MemoryReport

__all__ = ["findings"]


# ------------------------------------ Findings about axes of the mesh that do nothing for the step
#
# Devices that compute the same.
#
# An axis earns its devices by cutting something that is computed: the batch, the sequence, or
# weights that stay cut (tensor and expert parallelism). Two kinds of plans waste them:
#
# - the axis cuts nothing that goes into the step, and nothing is sent over it: all its devices hold
#   and compute the same;
# - the axis cuts weights, which are gathered for use (FSDP), but not the batch: its devices gather
#   the same weights for the same tokens. Memory is saved, and no time.

_WEIGHTS = ("parameter", "frozen parameter")


def _axis_findings(
    evidence: Evidence, collectives: Iterable[Collective], gathered: Iterable[str]
) -> Iterator[Finding]:
    """Axes whose devices compute the same, of the collectives and the axes that gather weights."""
    inputs = [tensor for tensor in evidence.held if tensor.role == "argument" and tensor.shape]
    laid = {id(tensor): axis_dims(tensor, evidence.mesh) for tensor in evidence.held}
    if not inputs or any(laid[id(tensor)] is None for tensor in inputs):
        return
    cut = {
        axis
        for tensor in evidence.held
        for axis, dim in (laid[id(tensor)] or {}).items()
        if dim is not None
    }
    of_inputs = _batch_axes(evidence)
    collectives = tuple(collectives)
    talking = {axis for collective in collectives for axis in _names(collective)}
    # Products that are summed over an axis are shared by its devices: tensor parallelism.
    summed = {
        axis for collective in collectives if _sums(collective) for axis in _names(collective)
    }
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


def _names(collective: Collective) -> set[str]:
    axes = base_axes(collective.axes)
    return {"mixed"} if axes is None else set(axes)


def _sums(collective: Collective) -> bool:
    """Whether it sums arrays, and not only numbers of statistics, in the forward."""
    if collective.kind not in ("all-reduce", "reduce-scatter"):
        return False
    is_array = any(sum(dim > 1 for dim in array.dims) > 1 for array in collective.results)
    return is_array and origin_of(collective.op_name, collective.source).phase == "forward"


def _batch_axes(evidence: Evidence, dim: int | None = None) -> set[str]:
    """The axes that cut what the step is given: along a dim, or along any."""
    axes: set[str] = set()
    for tensor in evidence.held:
        if tensor.role == "argument":
            dims = axis_dims(tensor, evidence.mesh) or {}
            axes |= {
                axis for axis, at in dims.items() if at is not None and (dim is None or at == dim)
            }
    return axes


# --------------------------------------------------------- Findings about gathers inside attention
#
# Attention needs all keys and values of a sequence, of the heads that a device has. So of a
# sequence that is cut over an axis (context parallelism) keys and values are gathered there, one
# array each, or both as one; with heads cut over an axis (tensor parallelism) nothing is but, where
# the residual is cut as well, the input, once. What is more than that is not needed:
#
# - queries, scores or results gathered over the sequence's axis;
# - anything of the batch gathered over an axis that cuts it;
# - queries, keys, values or results gathered over the axis of the heads: each of its devices then
#   computes the heads of all. Where the axis has more devices than there are heads of keys, each
#   has a part of one, and keys and values are gathered along their last dim: that is right.
#
# Counted are the arrays of at least SMALL_GATHER_BYTES that are gathered in the forward of one
# attention module, as often as each other.

_KEYS_AND_VALUES = 2
"""Arrays that may be gathered; over the axis of the heads that is the input, or parts of heads."""

_HEADED_DIMS = 4
"""Dims of queries, keys and values whose heads have a dim of their own."""

_ATTENTION = re.compile(r"att(?:entio)?n", re.IGNORECASE)


def _is_attention(module: str | None) -> bool:
    """Whether a module is attention, or a part of it, by its name: layers.*.self_attn.q_proj."""
    return module is not None and _ATTENTION.search(module) is not None


def _attention_findings(evidence: Evidence, moves: Iterable[Move]) -> Iterator[Finding]:
    """Gathers of activations inside attention that it does not need."""
    batch, sequence = _batch_axes(evidence, 0), _batch_axes(evidence, 1)
    places: dict[tuple[str, str, int], list[tuple[Move, ArrayShape]]] = {}
    for move in moves:
        large = [array for array in move.activations if array.bytes >= SMALL_GATHER_BYTES]
        if not move.is_gather or move.origin.phase != "forward" or not large or not move.axes:
            continue
        module = move.origin.module
        if module is None or not _is_attention(module):
            continue
        # A loop that XLA has peeled has some of its collectives a second time, run less often.
        key = _block(module), axis_names(move.axes), move.times
        places.setdefault(key, []).extend((move, array) for array in large)
    said: set[tuple[str, str]] = set()
    for (block, axes, _), gathered in places.items():
        names = set(gathered[0][0].axes or ())
        allowed = _KEYS_AND_VALUES
        if names & batch or (
            not names <= sequence and any(_joins_heads(*pair) for pair in gathered)
        ):
            allowed = 0
        if len(gathered) > allowed and (block, axes) not in said:
            said.add((block, axes))
            yield _finding(block, axes, gathered, _why(names, batch, sequence))


def _block(module: str) -> str:
    """The attention itself, of which q_proj and others are parts."""
    parts = module.split(".")
    first = next(place for place, part in enumerate(parts) if _ATTENTION.search(part))
    return ".".join(parts[: first + 1])


def _joins_heads(move: Move, array: ArrayShape) -> bool:
    """Whether heads become more by it: a dim other than the last of an array that has heads."""
    if len(array.dims) < _HEADED_DIMS:
        return False
    at = move.collective.results.index(array)
    operands = move.collective.operands
    if at >= len(operands) or len(operands[at].dims) != len(array.dims):
        return False
    pairs = zip(operands[at].dims, array.dims, strict=True)
    grown = [dim for dim, (small, large) in enumerate(pairs) if small != large]
    return bool(grown) and grown[0] != len(array.dims) - 1


def _why(names: set[str], batch: set[str], sequence: set[str]) -> tuple[str, str]:
    if names & batch:
        return (
            "the batch is cut over that axis, and no sequence needs another one's values",
            "Keep the batch sharded: look for a placement that asks for it whole, or an op without "
            "a rule for that dim.",
        )
    if names <= sequence:
        return (
            "of a cut sequence only keys and values are needed whole, an array each",
            "Gather keys and values only, where the heads are fewest: queries and results stay cut "
            "as the sequence is.",
        )
    return (
        "heads are cut over that axis, so that each device needs its own only",
        "Keep the heads sharded from the projections to the output projection: look for a "
        "placement, a reshape or an attention kernel that asks for them whole.",
    )


def _finding(
    block: str, axes: str, gathered: list[tuple[Move, ArrayShape]], why: tuple[str, str]
) -> Finding:
    arrays = ", ".join(str(array) for _, array in gathered[:3])
    more = len(gathered) - 3
    size = sum(array.bytes for _, array in gathered)
    return Finding(
        "warning",
        "attention-gathered",
        f"Attention gathers {'an array' if len(gathered) == 1 else f'{len(gathered)} arrays'} over "
        f"axis {axes} in {block}",
        f"{arrays}{f' and {more} more' if more > 0 else ''}: {bytes_text(size)} on each device, "
        f"{gathered[0][0].times} times a step; {why[0]}.",
        why[1],
        gathered[-1][0].origin,
    )


# ------------------------------------------------- What a collective moves, as far as findings ask
#
# Weights or activations, over which axes.
#
# Weights are told by their shapes: each dim of an array divides one of the weight's, in any order,
# and in a loop one layer of those that are stacked.


@dataclass(frozen=True)
class Move:
    """A collective and what it moves.

    Attributes:
        collective: the instruction.
        origin: whose it is.
        axes: the axes that it spans, of parts the whole; None if it follows none.
        activations: what comes out and is no weight.
    """

    collective: Collective
    origin: Origin
    axes: tuple[str, ...] | None
    activations: tuple[ArrayShape, ...]

    @property
    def times(self) -> int:
        """How often it runs in a step, at least."""
        return 1 if self.collective.executions is None else self.collective.executions

    @property
    def is_gather(self) -> bool:
        """Whether it is an all-gather."""
        return self.collective.kind == "all-gather"

    @property
    def gathers_weights(self) -> bool:
        """Whether it gathers weights and nothing else."""
        return self.is_gather and not self.activations


def _moves(collectives: Iterable[Collective], tensors: Iterable[Held]) -> tuple[Move, ...]:
    """What each collective moves, in their order."""
    weights = [tensor for tensor in tensors if tensor.role in _WEIGHTS]
    return tuple(
        Move(
            collective,
            origin_of(collective.op_name, collective.source),
            base_axes(collective.axes),
            tuple(
                array
                for array in collective.results
                if _weight_of(array, weights, collective) is None
            ),
        )
        for collective in collectives
    )


def _are_weights(arrays: Iterable[ArrayShape], weights: list[Held], collective: Collective) -> bool:
    """Whether all arrays can be weights. Where nobody says what the weights are, they can."""
    return not weights or None not in (_weight_of(array, weights, collective) for array in arrays)


def _weight_of(array: ArrayShape, weights: Iterable[Held], collective: Collective) -> Held | None:
    """The first weight that an operand or result can be, whole or in shards, transposed or not."""
    dims = sorted(dim for dim in array.dims if dim > 1)
    for weight in weights:
        shapes = [weight.shape, *([weight.shape[1:]] if _is_stacked(weight, collective) else [])]
        for shape in shapes:
            extents = sorted(dim for dim in shape if dim > 1)
            if len(extents) == len(dims) and all(
                large % small == 0 for small, large in zip(dims, extents, strict=True)
            ):
                return weight
    return None


def _largest_weight(collective: Collective, weights: list[Held]) -> int:
    """The bytes of the largest weight, vocabulary matrices aside where there are others.

    In a loop, of weights that are stacked layer by layer one layer's count.
    """
    layers = [weight for weight in weights if not is_vocabulary(weight)] or weights
    return max(
        weight.global_bytes
        // weight.layers
        // (weight.shape[0] if _is_stacked(weight, collective) else 1)
        for weight in layers
    )


def _is_stacked(weight: Held, collective: Collective) -> bool:
    layers = weight.shape[0] if len(weight.shape) > 1 else 0
    return collective.in_loop and bool(layers) and layers == collective.executions


# -------------------------------------------------------------------------- Findings about experts
#
# Weights that are gathered where the tokens should travel.
#
# Experts that are cut over an axis of their own stay where they are; tokens go to them and come
# back (all-to-all). An axis that gathers other weights too is FSDP's, and may gather experts as
# well.

_EXPERT_DIMS = 3
"""Experts are stacked: (experts, in, out)."""


def _expert_findings(evidence: Evidence, moves: Iterable[Move]) -> Iterator[Finding]:
    """Experts that are gathered over the axis that cuts them; a finding for each axis."""
    weights = [tensor for tensor in evidence.held if tensor.role in _WEIGHTS]
    experts = [tensor for tensor in weights if len(tensor.shape) == _EXPERT_DIMS]
    cut = {axis: tensor for tensor in experts for axis in _expert_axes(tensor, evidence)}
    if not cut:
        return
    matrices = [tensor for tensor in weights if len(tensor.shape) < _EXPERT_DIMS]
    gathers_over: dict[str, list[tuple[Move, Held]]] = {}
    fsdp: set[str] = set()
    for move in moves:
        if not move.is_gather or not move.axes:
            continue
        axes = set(move.axes)
        for array in move.collective.results:
            if _weight_of(array, matrices, move.collective) is not None:
                fsdp |= axes
                continue
            tensor = _weight_of(array, experts, move.collective)
            if tensor is not None and move.origin.phase == "forward":
                for axis in axes & set(_expert_axes(tensor, evidence)):
                    gathers_over.setdefault(axis, []).append((move, tensor))
    for axis, gathers in gathers_over.items():
        if axis in fsdp:
            continue
        move, tensor = gathers[0]
        size = sum(m.collective.result_bytes * m.times for m, _ in gathers)
        yield Finding(
            "warning",
            "experts-gathered",
            f"Experts are gathered over axis {axis}, which cuts them: {starred(tensor.name)}",
            f"{bytes_text(size)} a step in the forward on each device, which then computes all "
            "experts for its tokens.",
            f"Let the tokens travel: pin what arrives at the experts as they are cut over {axis} "
            "(an all-to-all there and one back), and leave the experts where they are.",
            move.origin,
        )


def _expert_axes(expert: Held, evidence: Evidence) -> list[str]:
    dims = axis_dims(expert, evidence.mesh) or {}
    return [axis for axis, dim in dims.items() if dim == 0]


# -------------------------------------------------------------- Findings about what lies in memory
#
# Does it fit, what is held whole, what XLA chose otherwise.
#
# Whether a tensor should be sharded is judged by the plan itself: next to the others of its kind. A
# plan that keeps all parameters whole (plain data parallelism) is as right as one that shards all
# of them, as long as it fits; one that shards all but the vocabulary matrix has forgotten one.

CAUSES = 3
"""The largest causes of a program that does not fit: more would bury the one to change."""

FEWER_SHARDS = 4
"""A tensor with so many times fewer shards than most of the plan's bytes have is left unsharded. A
factor of 2 can be a dim that an axis does not divide, or a second axis that only some use."""

SMALL_SHARE = 0.005
"""Of the usable HBM. What takes less, with its gradient and optimizer state, is not worth a
change: norms and biases are held whole in right plans."""

SMALL_BYTES = 16 * 2**20
"""The same where the size of the HBM is not known."""

LARGE_STATE = 0.25
"""Of the usable HBM. Where everything is held whole, from here on sharding it pays."""

MOST = 5
"""Findings of one kind; those of more tensors are summed up in the last."""

_STATE = ("parameter", "frozen parameter", "gradient", "optimizer state")


def _state_findings(evidence: Evidence, memory: MemoryReport | None) -> Iterator[Finding]:
    """What is the matter with what lies in memory."""
    if memory is not None and memory.fits is False:
        yield _does_not_fit(memory, evidence)
    capacity = None if memory is None else memory.capacity_bytes
    yield from _unsharded(evidence, capacity)
    yield from _differing(evidence.held)
    ones = [str(axis) for axis in evidence.mesh.axis_names if evidence.mesh.size(axis) == 1]
    if ones and evidence.mesh.size() > 1:
        names, verb = ", ".join(ones), "has" if len(ones) == 1 else "have"
        yield Finding(
            "note",
            "axis-of-size-1",
            f"Mesh axis {names} {verb} size 1",
            "Nothing is sharded over it, and placements that name it do nothing.",
            "Give it a size, or leave it out of the mesh.",
        )


# ------------------------------------------------------------------------- does it fit


def _does_not_fit(memory: MemoryReport, evidence: Evidence) -> Finding:
    causes = memory.causes[:CAUSES]
    words = " ".join(f"({place}) {cause.text}" for place, cause in enumerate(causes, 1))
    needed, there = memory.total_bytes, memory.capacity_bytes or 0
    return Finding(
        "error",
        "does-not-fit",
        f"The step does not fit: {bytes_text(needed - there)} too much on each device",
        f"It needs {bytes_text(needed)} of {bytes_text(there)}. The largest causes: {words}",
        _room(causes[0].kind if causes else "", evidence),
    )


def _room(cause: str, evidence: Evidence) -> str:
    if cause == "temporaries":
        return (
            "Keep less for the backward: scan_layers(remat='full') or torch's checkpoint; or give "
            "each device a smaller batch, or shard the sequence over an axis."
        )
    if cause == "program":
        return "Run equal layers as a loop: scan_layers."
    state = [tensor for tensor in evidence.held if tensor.role in _STATE]
    if _typical_shards(state) < evidence.mesh.size():
        return (
            "Shard the state over more devices (fully_shard over every axis), or take more chips."
        )
    return "Take more chips, optimizer state of fewer bytes, or gradients in bfloat16."


# ------------------------------------------------------------------------- held whole


def _device_bytes(tensors: Iterable[Held]) -> int:
    return sum(tensor.device_bytes for tensor in tensors)


def _least_sharded(tensors: Iterable[Held]) -> Held:
    return min(tensors, key=lambda tensor: (shards(tensor), -tensor.device_bytes))


def _unsharded(evidence: Evidence, capacity: int | None) -> Iterator[Finding]:
    state = [tensor for tensor in evidence.held if tensor.role in _STATE and tensor.device_bytes]
    finding = _optimizer_finding(state, evidence.mesh, capacity)
    if finding is not None:
        yield finding
        state = [tensor for tensor in state if tensor.role != "optimizer state"]
    # A parameter with its gradient and its optimizer state: they are sharded alike.
    groups: dict[str, list[Held]] = {}
    for tensor in state:
        groups.setdefault(tensor.name.split(" ")[0], []).append(tensor)
    typical = _typical_shards(state)
    least = SMALL_BYTES if capacity is None else SMALL_SHARE * capacity
    if typical == 1:
        yield from _all_whole(evidence, state, capacity)
        return
    layer_groups: dict[str, list[list[Held]]] = {}
    for name, group in groups.items():
        worst = _least_sharded(group)
        few = shards(worst) * FEWER_SHARDS <= typical
        if few and free_axes(worst, evidence.mesh) and _device_bytes(group) >= least:
            layer_groups.setdefault(starred(name), []).append(group)
    ranked = sorted(layer_groups.items(), key=lambda pair: -sum(map(_device_bytes, pair[1])))
    for name, alike in islice(ranked, MOST):
        yield _unsharded_finding(name, alike, typical, evidence.mesh)


def _optimizer_finding(state: list[Held], mesh: Mesh, capacity: int | None) -> Finding | None:
    """Moments that lie otherwise than their parameters, most of them: made before sharding."""
    moments = [tensor for tensor in state if tensor.role == "optimizer state"]
    parameters = {tensor.name: tensor for tensor in state if tensor.role == "parameter"}
    owned = [(tensor, parameters.get(tensor.name.split(" ")[0])) for tensor in moments]
    less = [
        tensor
        for tensor, owner in owned
        if owner is not None
        and tensor.shape == owner.shape
        and shards(tensor) * FEWER_SHARDS <= shards(owner)
    ]
    size = _device_bytes(less)
    least = SMALL_BYTES if capacity is None else SMALL_SHARE * capacity
    # Of a few tensors the finding about each says more.
    if size < max(least, _device_bytes(moments) / 2) or mesh.size() == 1:
        return None
    typical = _typical_shards(parameters.values())
    should = sum(tensor.global_bytes for tensor in less) // typical
    number = sum(tensor.layers for tensor in less)
    return Finding(
        "warning",
        "optimizer-state-unsharded",
        "The optimizer's state is sharded less than the parameters",
        f"{number} arrays take {bytes_text(size)} on each device; sharded as their parameters, "
        f"in {typical}, they would take {bytes_text(should)}.",
        "Make the optimizer of the sharded parameters: after shard_module, fully_shard or loading, "
        "not before.",
    )


def _unsharded_finding(name: str, alike: list[list[Held]], typical: int, mesh: Mesh) -> Finding:
    worst = _least_sharded(alike[0])
    size = sum(map(_device_bytes, alike))
    axes = ", ".join(free_axes(worst, mesh))
    number = sum(group[0].layers for group in alike)
    count = "" if number == 1 else f"{number} of them; "
    vocabulary = is_vocabulary(alike[0][0])
    parts = shards(worst)
    saved = size - size * parts / typical
    return Finding(
        "warning",
        "vocabulary-unsharded" if vocabulary else "tensor-unsharded",
        f"The {'vocabulary matrix' if vocabulary else worst.role} {name} is "
        + ("whole on every device" if parts == 1 else f"in {parts} shards only"),
        f"{count}{bytes_text(size)} on each device with gradients and optimizer state, where most "
        f"of the state has {typical} shards; as many would save {bytes_text(saved)}.",
        f"Shard a dim of it over {axes}: shape {tuple(worst.shape)} can be divided."
        + (" With loss_parallel its logits stay sharded too." if vocabulary else ""),
    )


def _all_whole(evidence: Evidence, state: list[Held], capacity: int | None) -> Iterator[Finding]:
    """Plain data parallelism is right until its state fills the memory."""
    size = _device_bytes(state)
    if capacity is None or evidence.mesh.size() == 1 or size < LARGE_STATE * capacity:
        return
    largest = max(state, key=lambda tensor: tensor.device_bytes)
    yield Finding(
        "warning",
        "state-unsharded",
        "Parameters, gradients and optimizer state are whole on every device",
        f"They take {bytes_text(size)} of {bytes_text(capacity)}; the largest is {largest.name} "
        f"with {bytes_text(largest.device_bytes)}.",
        "Shard them: fully_shard, or a plan that shards each parameter over the data axis.",
    )


def _typical_shards(state: Iterable[Held]) -> int:
    """The number of shards that half of the bytes have at least."""
    ranked = sorted(((shards(tensor), tensor.global_bytes) for tensor in state), reverse=True)
    half, total = sum(size for _, size in ranked) / 2, 0
    for parts, size in ranked:
        total += size
        if total >= half:
            return parts
    return 1


# --------------------------------------------------------------------------------- Asked and chosen


def _differing(tensors: Iterable[Held]) -> Iterator[Finding]:
    groups: dict[tuple[str, str, str], list[Held]] = {}
    for tensor in tensors:
        requested, chosen = _words(tensor.requested), _words(tensor.chosen)
        if requested and chosen and requested != chosen:
            groups.setdefault((starred(tensor.name), requested, chosen), []).append(tensor)
    ranked = sorted(groups.items(), key=lambda pair: -_device_bytes(pair[1]))
    for (name, requested, chosen), alike in ranked[:MOST]:
        size = _device_bytes(alike)
        number = sum(tensor.layers for tensor in alike)
        more = f" ({number} of them)" if number > 1 else ""
        hidden = len(ranked) - MOST
        last = f" {hidden} more differ." if hidden > 0 and name == ranked[MOST - 1][0][0] else ""
        yield Finding(
            "warning",
            "sharding-differs",
            f"{name} is laid out otherwise than asked{more}",
            f"Asked for: {requested}. XLA chose: {chosen}, {bytes_text(size)} on each device."
            f"{last}",
            "Ask for what XLA chose, or pin it in the step with redistribute.",
        )


def _words(text: str | None) -> str:
    return " ".join((text or "").split())


# ----------------------------------------------------- Findings about what devices send each other
#
# What is right depends on what moves. Weights may be gathered (FSDP), and gradients may be reduced
# over any network, since both can hide behind compute; activations of one layer are waited for. So
# each rule first asks what a collective moves:
#
# - over DCN in the forward: activations, unless it is a gather of a weight or a point-to-point send
#   (a pipeline);
# - a gather in the forward whose result has no weight's shape: activations. It is right where the
#   weights of the next product are sharded over the same axis and stay so (Megatron with a sharded
#   sequence); inside attention the finding above judges.

SMALL_MESSAGE_BYTES = 64 * 1024
"""Losses, norms and counters are reduced over every axis in right plans: they are a few bytes."""

LARGE_GATHER = 2
"""A gathered activation is worth a finding from so many times the largest weight of a layer on: it
then moves more than the weights themselves would."""


def _traffic_findings(evidence: Evidence, roofline: Roofline | None) -> Iterator[Finding]:
    """Collectives that should not be, or not there."""
    collectives = evidence.reading.collectives
    moves = _moves(collectives, evidence.held)
    weights = [tensor for tensor in evidence.held if tensor.role in _WEIGHTS]
    # The axes over which weights are gathered for use, as FSDP does.
    gathers = (move.axes or () for move in moves if weights and move.gathers_weights)
    gathered = frozenset(axis for axes in gathers for axis in axes)
    yield from _over_dcn(moves, weights, roofline)
    if weights:
        yield from _gathered_activations(moves, weights, gathered, evidence.mesh)
        yield from _attention_findings(evidence, moves)
        yield from _expert_findings(evidence, moves)
    yield from _axis_findings(evidence, collectives, gathered)


# ------------------------------------------------------------------------- DCN


def _over_dcn(
    moves: Sequence[Move], weights: list[Held], roofline: Roofline | None
) -> Iterator[Finding]:
    moves_over: dict[str, list[Move]] = {}
    for move in moves:
        collective = move.collective
        attributes = dict(collective.frontend_attributes)
        transfer = attributes.get(TRANSFER_TYPE, "ONE_TO_ONE")
        is_transfer = collective.kind == "send" and DCN_TARGET in attributes
        if is_transfer and transfer != "ONE_TO_ONE" and move.origin.phase == "forward":
            arrays = collective.operands
            is_weight = transfer == "ALL_GATHER" and _are_weights(arrays, weights, collective)
            if not is_weight and collective.operand_bytes >= SMALL_MESSAGE_BYTES:
                moves_over.setdefault(axis_names(move.axes), []).append(move)
    for axes, slow in moves_over.items():
        times = sum(move.times for move in slow)
        size = sum(move.times * move.collective.operand_bytes for move in slow)
        modelled = "" if roofline is None else f"; DCN {seconds_text(roofline.dcn_seconds)} a step"
        yield Finding(
            "warning",
            "tensor-parallel-over-dcn",
            f"Activations cross slices over axis {axes}, and the forward waits for them",
            f"{times} transfers a step in the forward alone, {bytes_text(size)} from each device"
            + (f"{modelled} (modelled)." if modelled else "."),
            f"Keep axis {axes} inside a slice, and put a data axis across slices: its gradients "
            "are reduced once a step, and nothing waits for them.",
            slow[0].origin,
        )


# ------------------------------------------------------------------------- gathers


def _gathered_activations(
    moves: Sequence[Move], weights: list[Held], gathered: frozenset[str], mesh: Mesh
) -> Iterator[Finding]:
    groups: dict[tuple[str, str | None], list[tuple[Move, int]]] = {}
    for move in moves:
        collective, axes = move.collective, move.axes or ()
        if not move.is_gather or move.origin.phase != "forward" or not axes:
            continue
        if _is_attention(move.origin.module):
            continue
        # Megatron: the weights of the next product are sharded over the axis, and stay so.
        is_sharded = not gathered.intersection(axes) and any(
            is_sharded_over(weight, axis, mesh) for weight in weights for axis in axes
        )
        size = max((array.bytes for array in move.activations), default=0)
        if not is_sharded and size >= LARGE_GATHER * _largest_weight(collective, weights) > 0:
            groups.setdefault((axis_names(move.axes), move.origin.module), []).append((move, size))
    for (axes, module), gathers in groups.items():
        move, size = gathers[0]
        array = max(move.collective.results, key=lambda part: part.bytes)
        yield Finding(
            "warning",
            "activation-gathered",
            f"An activation is gathered over axis {axes}"
            + ("" if module is None else f" in {module}"),
            f"{array}, {bytes_text(size)} on each device, {sum(m.times for m, _ in gathers)} times "
            "a step; no weight is sharded over that axis there, so its devices then compute the "
            "same.",
            f"Keep it sharded over {axes} through this module: look for a placement that asks for "
            "it whole, or for an op without a rule for that dim.",
            move.origin,
        )


# ----------------------------------------------------------------------------------------- Findings

_SHOWN = 3


def findings(
    evidence: Evidence,
    memory: MemoryReport | None = None,
    lines: Iterable[CollectiveLine] = (),
    roofline: Roofline | None = None,
) -> tuple[Finding, ...]:
    """Looks for what is likely not meant.

    Args:
        evidence: what the compiled step left behind.
        memory: its memory report; None leaves out what needs one.
        lines: its collectives, summed; those that follow no axes of the mesh are told.
        roofline: its modelled times; None leaves them out of the texts.

    Returns:
        The findings: errors, then warnings, then notes.

    Example:
        >>> from mesh_utils import Mesh
        >>> found = findings(Evidence("a step", "HloModule m", Mesh.arange((1, 8), ("pp", "dp"))))
        >>> [each.code for each in found]
        ['axis-of-size-1']
    """
    cut_again = list(rematerialization_findings(evidence))
    listed = [
        *_state_findings(evidence, memory),
        # What is gathered only to be cut again is said once.
        *(
            finding
            for finding in _traffic_findings(evidence, roofline)
            if not _is_said(finding, cut_again)
        ),
        *cut_again,
        *_unread(evidence.reading, lines),
    ]
    return tuple(sorted(listed, key=lambda finding: SEVERITIES.index(finding.severity)))


def _is_said(finding: Finding, earlier: Iterable[Finding]) -> bool:
    if finding.code != "activation-gathered" or finding.origin is None:
        return False
    here = finding.origin
    return any(
        previous.origin is not None
        and (previous.origin.module, previous.origin.op) == (here.module, here.op)
        for previous in earlier
    )


def _unread(reading: HloReading, lines: Iterable[CollectiveLine]) -> Iterator[Finding]:
    if reading.unread:
        shown = "; ".join(map(str, reading.unread[:_SHOWN]))
        more = len(reading.unread) - _SHOWN
        yield Finding(
            "note",
            "hlo-unread",
            f"{len(reading.unread)} parts of the program could not be read",
            shown + (f"; and {more} more." if more > 0 else "."),
            "The numbers leave them out. Please report it, with the program and XLA's version.",
        )
    mixed = [line for line in lines if line.axes is None and line.kind not in ("send", "recv")]
    if mixed and not reading.unread:
        largest = max(mixed, key=lambda line: line.bytes_per_device)
        yield Finding(
            "note",
            "groups-along-no-axes",
            f"{len(mixed)} kinds of collectives follow no axes of the mesh",
            f"The largest is {largest.kind}; XLA made groups that are no axis and no part of one.",
            "Their bytes are counted under 'mixed'.",
            largest.origin,
        )
