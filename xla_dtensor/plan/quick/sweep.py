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
from xla_dtensor.core.rules import ShardingPlan, read_rules
from xla_dtensor.plan.model_sizes import ModelSizes
from xla_dtensor.plan.quick.activations import decoder_activations
from xla_dtensor.plan.quick.batch import Batch, batch_of
from xla_dtensor.plan.quick.estimate import Gradients, QuickEstimate, quick_estimate, quick_plan
from xla_dtensor.plan.quick.optimizer import ADAMW, OptimizerState
from xla_dtensor.plan.quick.traffic import gathered_bytes, traffic

__all__ = [
    "QuickCase",
    "SweptMesh",
    "max_batch",
    "quick_sweep",
    "slices_not_refused",
    "smallest_slice",
]

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
        """Make the case of a reference model.

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
            self._axes,
            self.job.chip,
            optimizer=self.optimizer,
            gradients=self.gradients,
            activations=bound,
            same_as=self.same_as,
            unmatched="replicate" if rules is None else "error",
        )

    @property
    def _axes(self) -> dict[str, int]:
        return {axis.name: axis.size for axis in self.job.axes}

    def plan(self) -> ShardingPlan:
        """How the parameters lie: see `quick_plan`."""
        rules = self.job.sharding
        return quick_plan(
            self.parameters,
            rules,
            self._axes,
            same_as=self.same_as,
            unmatched="error" if rules else "replicate",
        )

    def empty_cut(self) -> str | None:
        """Say which dim is cut into more parts than it is long; None if none is."""
        for tensor in self.plan().tensors:
            for dim, extent in enumerate(tensor.facts.shape):
                parts = tensor.layout.num_shards(dim)
                if parts > extent:
                    return f"dim {dim} of {tensor.path} is {extent} long and cut into {parts}"
        return None

    def communication(self, sequences: int) -> tuple[dict[str, float], dict[str, float]]:
        """Model what a step moves on the best mesh.

        Args:
            sequences: Of the whole batch.

        Returns:
            For each axis the seconds of its collectives, without overlap, and its bandwidth for
            gathers in bytes per second.
        """
        moved = traffic(self.plan(), self.batch(sequences=sequences), self.sizes, self.dtype)
        weights = {axis.name: gathered_bytes(moved, axis.name) for axis in self.job.axes}
        found = assign(
            self.job.topology(),
            self.job.ici_mesh_shape,
            self.job.dcn_mesh_shape,
            axis_names=self.job.axis_names,
            weights=weights if any(weights.values()) else None,
        )
        spans = dict(zip(self.job.axis_names, found.spans, strict=True))
        seconds = dict.fromkeys(self.job.axis_names, 0.0)
        for one in moved:
            seconds[one.axis] += found.network.seconds(
                spans[one.axis], one.size_bytes, one.collective
            )
        link = found.network.link_bytes_per_second or inf
        rates = dict(zip(self.job.axis_names, (links * link for links in found.links), strict=True))
        return seconds, rates


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
    """Look at every mesh of a pattern.

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
    whole = case.job.topology().num_devices if sequences is None else sequences
    found = [_swept(case.with_axes(axes), whole) for axes in _meshes(case.job, pattern)]
    return tuple(sorted(found, key=lambda mesh: (mesh.refused is not None, mesh.total_seconds)))


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
    asked = f"A sweep of {pattern!r} was asked for"
    for part in pattern.split(","):
        name, _, size = (word.strip() for word in part.partition("="))
        if name not in sizes:
            raise JobError(
                f"{asked} for job {job.name!r}. It has no axis {name!r}. "
                f"Pass {nearest(name, sizes)}."
            )
        if size != "*" and not (size.isdecimal() and int(size)):
            raise JobError(
                f"{asked}. {size!r} is no size of axis {name!r}. Pass such as fsdp=*,tp=4."
            )
        sizes[name] = None if size == "*" else int(size)
    total = job.topology().devices_per_slice
    known = prod(size for size in sizes.values() if size is not None)
    free = [name for name, size in sizes.items() if size is None]
    choices = [] if total % known else list(_factors(total // known, len(free)))
    if not choices or len(choices) > _MOST_MESHES:
        count = "No mesh has" if not choices else f"{len(choices)} meshes have"
        raise JobError(
            f"{asked} on {total} devices of a slice. {count} those sizes. "
            f"Pass sizes that divide {total}, with * for one to three axes."
        )
    for choice in choices:
        filled = {**sizes, **dict(zip(free, choice, strict=True))}
        yield tuple(replace(axis, ici=filled[axis.name] or 1, weight=None) for axis in job.axes)


def _factors(total: int, count: int) -> Iterator[tuple[int, ...]]:
    """Every way to write a number as a product of so many."""
    if count == 0:
        if total == 1:
            yield ()
        return
    if count == 1:
        yield (total,)
        return
    for first in range(total, 0, -1):
        if total % first == 0:
            for rest in _factors(total // first, count - 1):
                yield (first, *rest)


def smallest_slice(case: QuickCase, chip: str) -> tuple[JobConfig, QuickEstimate] | None:
    """Find the smallest slice that is not refused.

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
    """List the slices that the quick estimate does not refuse, the smallest first.

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
        others = prod(axis.ici for axis in case.job.axes if axis != largest)
        devices = prod(shape) * kind.devices_per_chip
        if devices % others:
            continue
        axes = tuple(
            JobAxis(axis.name, devices // others if axis == largest else axis.ici)
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
    """Find the largest batch that the lower bound does not refuse.

    Args:
        case: A job with a reference model.

    Returns:
        Sequences per part of the batch, and what they take at least: an upper bound of what fits.
        None where even one does not, or where no bound is known.

    Example:
        >>> max_batch(QuickCase.of(JobConfig.load("llama3_8b_v5e")))[0]
        6
    """
    one = case.estimate()
    if one.batch_cannot_fit or one.activations is None or one.capacity_bytes is None:
        return None
    low, high = 1, 2
    while high < _MOST_PER_GROUP and not case.estimate(high).batch_cannot_fit:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if case.estimate(middle).batch_cannot_fit else (middle, high)
    return low, case.estimate(low)
