"""Which meshes a job could have, which slice it needs, and which batch: by the quick estimate.

    quick_sweep(case, "fsdp=*,tp=*")        every mesh of the slice, the least communication first
    smallest_slice(case, "v5e")             the first slice that is not refused
    max_batch(case)                         the largest batch that is not refused

A `QuickCase` is a job with a model. Communication is modelled twice over: what is moved is read
from the rules (`traffic`), how fast each axis is comes from the model of the network
(``mesh_utils.network``). "Not refused" means that the exact part and the lower bound of activations
fit; only compiling tells whether the rest does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import inf, prod

from mesh_utils import JobConfig, assign, find_chip
from mesh_utils.errors import JobError
from mesh_utils.job import JobAxis, nearest
from mesh_utils.network import Collective
from xla_dtensor.core.dtypes import itemsize_bytes
from xla_dtensor.core.rules import PlannedTensor, ShardingPlan, read_rules
from xla_dtensor.plan.estimate import (
    ADAMW,
    Batch,
    Gradients,
    OptimizerState,
    QuickEstimate,
    batch_of,
    decoder_activations,
    quick_estimate,
    quick_plan,
)
from xla_dtensor.plan.model_sizes import ModelSizes

__all__ = [
    "QuickCase",
    "SweptMesh",
    "Transfer",
    "gathered_bytes",
    "max_batch",
    "quick_sweep",
    "slices_not_refused",
    "smallest_slice",
    "traffic",
]


# --------------------------------------------------- What a training step moves over each mesh axis
#
# The model reads only the sharding rules. An axis that cuts the batch (or sequences) is a data
# axis. A parameter that it cuts as well is gathered before use and its gradient reduced and
# scattered (FSDP); one that it does not cut has its gradient all-reduced. An axis that cuts a
# weight and no tokens is a tensor-parallel one: where it cuts the dim that a matmul sums, the
# result is all-reduced. Experts that a data axis cuts send tokens around. Per step, with layers
# that are computed again in the backward pass:
#
#     gathered parameter        all-gather, forward and backward; reduce-scatter of the gradient
#     copied parameter          all-reduce of the gradient
#     summed dim of a layer     all-reduce of (tokens, out): forward, again, and for the input
#     cut vocabulary            all-reduce of (tokens, hidden), once for embedding and output each
#     experts                   all-to-all of arriving and leaving tokens: forward, again, backward
#     cut sequence              all-gather of keys and values, forward, again; reduce-scatter back
#
# It ranks meshes. It is not what a compiler makes: that is found by compiling.

_CAPACITY = 1.25
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
    """Sums what a step moves over each axis.

    Args:
        plan: How the parameters lie.
        batch: The tokens.
        sizes: Of the model; None leaves experts and cut sequences out.
        dtype: Of activations.

    Returns:
        One entry per axis and kind of collective; axes of one device are left out.

    Example:
        >>> from mesh_utils import Mesh
        >>> plan = quick_plan([("w", (8, 8), "bf16")], {"w": ["fsdp", None]}, {"fsdp": 4})
        >>> for one in traffic(plan, Batch(4, 8, ("fsdp",), (), {"fsdp": 4})):
        ...     print(one.axis, one.collective, one.size_bytes)
        fsdp all-gather 256.0
        fsdp reduce-scatter 128.0
    """
    width = itemsize_bytes(dtype)
    transfers = [
        transfer
        for tensor in plan.tensors
        if tensor.facts.same_as is None
        for transfer in _of_parameter(tensor, batch, sizes, width)
    ]
    sums: dict[tuple[str, Collective], float] = {}
    for transfer in [*transfers, *_of_sequences(batch, sizes, width)]:
        key = (transfer.axis, transfer.collective)
        sums[key] = sums.get(key, 0.0) + transfer.size_bytes
    return tuple(
        Transfer(axis, collective, size)
        for (axis, collective), size in sums.items()
        if batch.sizes.get(axis, 1) > 1 and size
    )


def gathered_bytes(transfers: tuple[Transfer, ...], axis: str) -> float:
    """What an axis moves, in bytes of an all-gather as long: an all-reduce counts twice."""
    return sum(
        transfer.size_bytes * (2 if transfer.collective == "all-reduce" else 1)
        for transfer in transfers
        if transfer.axis == axis
    )


def _of_parameter(
    tensor: PlannedTensor, batch: Batch, sizes: ModelSizes | None, width: int
) -> Iterator[Transfer]:
    cuts = {str(axis): dim for dim, axes in enumerate(tensor.layout.dims) for axis in axes}
    shape, size = tensor.facts.shape, batch.sizes
    data_axes = (*batch.batch_axes, *batch.sequence_axes)
    is_expert = len(shape) == 3
    gathered = [a for a, dim in cuts.items() if a in data_axes and not (is_expert and dim == 0)]
    num_bytes = float(tensor.device_bytes)
    for axis in data_axes:
        if axis not in cuts:
            yield Transfer(axis, "all-reduce", num_bytes)
    for axis in reversed(gathered):  # the innermost cut is joined first
        num_bytes *= size[axis]
        yield Transfer(axis, "all-gather", 2 * num_bytes)
        yield Transfer(axis, "reduce-scatter", num_bytes)
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
            sent = _CAPACITY * choices * tokens * sizes.hidden_size
            yield Transfer(axis, "all-to-all", 3 * sent)
        elif tensor.path.endswith("down_proj"):
            yield Transfer(axis, "all-reduce", 3.0 * tokens * sizes.hidden_size)


def _of_sequences(batch: Batch, sizes: ModelSizes | None, width: int) -> Iterator[Transfer]:
    if sizes is None:
        return
    num_bytes = 2.0 * sizes.num_key_value_heads * sizes.head_dim * width * batch.device_tokens
    for axis in reversed(batch.sequence_axes):
        num_bytes *= batch.sizes[axis]
        yield Transfer(axis, "all-gather", 2 * num_bytes * sizes.num_hidden_layers)
        yield Transfer(axis, "reduce-scatter", num_bytes * sizes.num_hidden_layers)


# ------------------------------------------------------------------------------ A job with a model

_MOST_MESHES = 256
_MOST_PER_GROUP = 1 << 20


@dataclass(frozen=True)
class QuickCase:
    """A job, the model it trains, and how.

    Args:
        job: Its chips, axes and rules.
        parameters: Path, shape and dtype of each.
        sizes: Of a reference model; None for a model of which only the parameters are known.
        optimizer: What it keeps.
        dtype: Of activations.
        sequence: Tokens of a sequence.
        same_as: Of tied parameters: path -> the path listed before.
        gradients: Whether all of them are alive at once.
        remat: What the backward keeps of a layer, as ``scan_layers`` says it.
    """

    job: JobConfig
    parameters: tuple[tuple[str, tuple[int, ...], str], ...]
    sizes: ModelSizes | None = None
    optimizer: OptimizerState = ADAMW
    dtype: str = "bfloat16"
    sequence: int = 8192
    same_as: Mapping[str, str] = field(default_factory=dict[str, str])
    gradients: Gradients = "together"
    remat: str = "full"

    @classmethod
    def of(
        cls,
        job: JobConfig,
        model: ModelSizes | str | None = None,
        *,
        dtype: str = "bfloat16",
        optimizer: OptimizerState = ADAMW,
        sequence: int = 8192,
    ) -> QuickCase:
        """Makes the case of a reference model.

        Args:
            job: The job.
            model: Its sizes or name; None for the one that the job names.
            dtype: Of parameters and activations.
            optimizer: What it keeps.
            sequence: Tokens of a sequence.

        Returns:
            The case.

        Raises:
            JobError: The job names no model, or one that there is not.
        """
        if model is None and job.model is None:
            raise JobError(
                f"An estimate of job {job.name!r} was asked for. It names no model. "
                "Write model: llama3-8b into the job, or pass --model."
            )
        sizes = model if isinstance(model, ModelSizes) else ModelSizes.load(str(model or job.model))
        listed = tuple((name, shape, dtype) for name, shape in sizes.parameters())
        return cls(job, listed, sizes, optimizer, dtype, sequence)

    def with_axes(self, axes: tuple[JobAxis, ...]) -> QuickCase:
        """The same with other sizes of axes."""
        return replace(self, job=replace(self.job, axes=axes))

    def batch(self, per_group: int = 1, sequences: int | None = None) -> Batch:
        """The batch: see `batch_of`."""
        return batch_of(self.job, sequence=self.sequence, per_group=per_group, sequences=sequences)

    def estimate(self, per_group: int = 1, sequences: int | None = None) -> QuickEstimate:
        """What it takes on each device: see `quick_estimate`.

        Args:
            per_group: Sequences per part of the batch.
            sequences: Of the whole batch, in place of it.

        Returns:
            The estimate; activations are bounded for reference models only.
        """
        rules = None if self.job.sharding is None else read_rules(self.job.sharding)
        bound = None
        if self.sizes is not None:
            batch = self.batch(per_group, sequences)
            bound = decoder_activations(self.sizes, batch, rules, self.dtype, remat=self.remat)
        return quick_estimate(
            self.parameters,
            rules,
            {axis.name: axis.size for axis in self.job.axes},
            self.job.chip,
            optimizer=self.optimizer,
            gradients=self.gradients,
            activations=bound,
            same_as=self.same_as,
            unmatched="replicate" if rules is None else "error",
        )

    def plan(self) -> ShardingPlan:
        """How the parameters lie: see `quick_plan`."""
        axes = {axis.name: axis.size for axis in self.job.axes}
        unmatched = "error" if self.job.sharding else "replicate"
        return quick_plan(
            self.parameters, self.job.sharding, axes, same_as=self.same_as, unmatched=unmatched
        )

    def empty_cut(self) -> str | None:
        """Says which dim is cut into more parts than it is long; None if none is."""
        for tensor in self.plan().tensors:
            for dim, extent in enumerate(tensor.facts.shape):
                parts = tensor.layout.num_shards(dim)
                if parts > extent:
                    return f"dim {dim} of {tensor.path} is {extent} long and cut into {parts}"
        return None

    def communication(self, sequences: int) -> tuple[dict[str, float], dict[str, float]]:
        """Models what a step moves on the best mesh.

        Args:
            sequences: Of the whole batch.

        Returns:
            For each axis the seconds of its collectives, without overlap, and its bandwidth for
            gathers in bytes per second.
        """
        transfers = traffic(self.plan(), self.batch(sequences=sequences), self.sizes, self.dtype)
        weights = {axis.name: gathered_bytes(transfers, axis.name) for axis in self.job.axes}
        assignment = assign(
            self.job.topology(),
            self.job.ici_mesh_shape,
            self.job.dcn_mesh_shape,
            axis_names=self.job.axis_names,
            weights=weights if any(weights.values()) else None,
        )
        network = assignment.network
        spans = dict(zip(self.job.axis_names, assignment.spans, strict=True))
        seconds = dict.fromkeys(self.job.axis_names, 0.0)
        for transfer in transfers:
            span = spans[transfer.axis]
            seconds[transfer.axis] += network.seconds(
                span, transfer.size_bytes, transfer.collective
            )
        link = network.link_bytes_per_second or inf
        rates = (links * link for links in assignment.links)
        return seconds, dict(zip(self.job.axis_names, rates, strict=True))


@dataclass(frozen=True)
class SweptMesh:
    """One mesh of a sweep.

    Args:
        axes: Its axes.
        estimate: What it takes; None if the batch cannot be cut so.
        seconds: Modelled seconds of the collectives over each axis, in one step.
        bytes_per_second: Modelled bandwidth of each axis.
        refused: Why it cannot be; None for a mesh that may fit.
    """

    axes: tuple[JobAxis, ...]
    estimate: QuickEstimate | None
    seconds: Mapping[str, float]
    bytes_per_second: Mapping[str, float]
    refused: str | None = None

    @property
    def total_seconds(self) -> float:
        """Modelled seconds of all collectives of a step, one after the other."""
        return sum(self.seconds.values())


def quick_sweep(
    case: QuickCase, pattern: str, *, sequences: int | None = None
) -> tuple[SweptMesh, ...]:
    """Looks at every mesh of a pattern.

    Args:
        case: A job with a model. Its slices, and the sizes of axes across slices, stay.
        pattern: Axes of the job with a size inside a slice each, "*" for any: "fsdp=*,tp=*". Axes
            that are not named keep theirs.
        sequences: Of the whole batch, the same for every mesh; one per device by default.

    Returns:
        The meshes, those that may fit first, the least modelled communication first.

    Raises:
        JobError: A pattern that cannot be read, that no mesh fits, or that too many do.

    Example:
        >>> case = QuickCase.of(JobConfig.load("llama3_70b_v5p"))
        >>> len(quick_sweep(case, "fsdp=*,tp=*"))
        10
    """
    count = case.job.topology().num_devices if sequences is None else sequences
    meshes = [_swept(case.with_axes(axes), count) for axes in _meshes(case.job, pattern)]
    return tuple(sorted(meshes, key=lambda mesh: (mesh.refused is not None, mesh.total_seconds)))


def _swept(case: QuickCase, sequences: int) -> SweptMesh:
    try:
        estimate = case.estimate(sequences=sequences)
    except JobError:
        groups = case.batch(per_group=1).groups
        why = f"a batch of {sequences} cannot be cut into {groups}"
        return SweptMesh(case.job.axes, None, {}, {}, why)
    empty = case.empty_cut()
    if empty is not None:
        return SweptMesh(case.job.axes, estimate, {}, {}, empty)
    seconds, rates = case.communication(sequences)
    why = None
    if estimate.cannot_fit:
        why = f"cannot fit: {estimate.proof}"
    elif estimate.batch_cannot_fit:
        why = "does not fit with this batch, by the lower bound"
    return SweptMesh(case.job.axes, estimate, seconds, rates, why)


def _meshes(job: JobConfig, pattern: str) -> Iterator[tuple[JobAxis, ...]]:
    """Every choice of axes whose sizes multiply to a slice."""
    sizes: dict[str, int | None] = {axis.name: axis.ici for axis in job.axes}
    start = f"A sweep of {pattern!r} was asked for"
    for part in pattern.split(","):
        name, _, size = (word.strip() for word in part.partition("="))
        if name not in sizes:
            raise JobError(
                f"{start} for job {job.name!r}. It has no axis {name!r}. "
                f"Pass {nearest(name, sizes)}."
            )
        if size != "*" and not (size.isdecimal() and int(size)):
            raise JobError(
                f"{start}. {size!r} is no size of axis {name!r}. Pass such as fsdp=*,tp=4."
            )
        sizes[name] = None if size == "*" else int(size)
    total = job.topology().devices_per_slice
    fixed = prod(size for size in sizes.values() if size is not None)
    free = [name for name, size in sizes.items() if size is None]
    choices = [] if total % fixed else list(_factors(total // fixed, len(free)))
    if not choices or len(choices) > _MOST_MESHES:
        count = "No mesh has" if not choices else f"{len(choices)} meshes have"
        raise JobError(
            f"{start} on {total} devices of a slice. {count} those sizes. "
            f"Pass sizes that divide {total}, with * for one to three axes."
        )
    for choice in choices:
        filled = {**sizes, **dict(zip(free, choice, strict=True))}
        yield tuple(replace(axis, ici=filled[axis.name] or 1, weight=None) for axis in job.axes)


def _factors(total: int, count: int) -> Iterator[tuple[int, ...]]:
    """Every way to write a number as a product of so many."""
    if count <= 1:
        if count or total == 1:
            yield (total,) * count
        return
    for first in range(total, 0, -1):
        if total % first == 0:
            for factors in _factors(total // first, count - 1):
                yield (first, *factors)


def smallest_slice(case: QuickCase, chip: str) -> tuple[JobConfig, QuickEstimate] | None:
    """Finds the smallest slice that is not refused.

    Args:
        case: A job with a model. Its largest axis takes what a slice has; others keep their size
            inside a slice, and there are no copies across slices.
        chip: The chip, such as "v5e".

    Returns:
        The job on that slice, and what it takes with one sequence per part of the batch; None if
        every slice is refused.

    Raises:
        MeshError: No such chip.

    Example:
        >>> found = smallest_slice(QuickCase.of(JobConfig.load("llama3_8b_v5e")), "v5e")
        >>> found[0].accelerator
        'v5e:2x4'
    """
    return next(slices_not_refused(case, chip), None)


def slices_not_refused(case: QuickCase, chip: str) -> Iterator[tuple[JobConfig, QuickEstimate]]:
    """Lists the slices that the quick estimate does not refuse, the smallest first.

    Args:
        case: As for :func:`smallest_slice`.
        chip: The chip, such as "v5e".

    Yields:
        The job on each slice, and what it takes.

    Raises:
        MeshError: No such chip.
    """
    kind = find_chip(chip)
    largest = max(case.job.axes, key=lambda axis: axis.ici)
    shapes = kind.slices.shapes
    if not kind.torus_rank:
        shapes = tuple((count, 1, 1) for count in range(1, shapes[0][0] + 1))
    for shape in sorted(shapes, key=prod):
        divisor = prod(axis.ici for axis in case.job.axes if axis != largest)
        devices = prod(shape) * kind.devices_per_chip
        if devices % divisor:
            continue
        axes = tuple(
            JobAxis(axis.name, devices // divisor if axis == largest else axis.ici)
            for axis in case.job.axes
        )
        rank = kind.torus_rank or 1
        name = f"{kind.name}:{'x'.join(map(str, shape[:rank]))}"
        # Flags are of the job's own chip, and say nothing of memory.
        job = replace(
            case.job, accelerator=name, num_slices=1, axes=axes, wrap=None, flag_sets=None, flags={}
        )
        try:
            estimate = replace(case, job=job).estimate()
        except JobError:  # a sequence that this mesh cannot cut
            continue
        if not estimate.batch_cannot_fit and estimate.capacity_bytes is not None:
            yield job, estimate


def max_batch(case: QuickCase) -> tuple[int, QuickEstimate] | None:
    """Finds the largest batch that the lower bound does not refuse.

    Args:
        case: A job with a reference model.

    Returns:
        Sequences per part of the batch, and what they take at least: an upper bound of what fits.
        None where even one does not, or where no bound is known.

    Example:
        >>> max_batch(QuickCase.of(JobConfig.load("llama3_8b_v5e")))[0]
        6
    """
    smallest = case.estimate()
    if smallest.batch_cannot_fit or smallest.activations is None or smallest.capacity_bytes is None:
        return None
    low, high = 1, 2
    while high < _MOST_PER_GROUP and not case.estimate(high).batch_cannot_fit:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if case.estimate(middle).batch_cannot_fit else (middle, high)
    return low, case.estimate(low)
