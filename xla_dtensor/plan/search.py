"""Which mesh, slice or batch a job should have, found by compiling the best by the quick estimate.

    compiled_sweep(case, "fsdp=*,tp=*", compile, budget=Budget(600))     meshes, the best first
    compiled_smallest(case, "v5e", compile, budget=...)                  slices, until one fits
    compiled_batch(case, compile, budget=...)                            batches around the limit

`compile` is given a job, the sequences per part of the batch, and how long it may take; it returns
the evidence, or raises CompileError, which is noted and is no end. One program after the other is
compiled until the budget is spent. Nothing runs: memory is the compiler's, seconds are modelled.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeAlias

from mesh_utils import JobConfig
from mesh_utils.errors import JobError
from mesh_utils.job import JobAxis
from xla_dtensor.core.errors import CompileError
from xla_dtensor.plan.estimate import QuickEstimate
from xla_dtensor.plan.model_sizes import ModelSizes
from xla_dtensor.plan.sweep import (
    QuickCase,
    SweptMesh,
    max_batch,
    quick_sweep,
    slices_not_refused,
)
from xla_dtensor.report.compile_report import CompileReport
from xla_dtensor.report.report import Evidence

__all__ = [
    "HUGGING_FACE",
    "REFERENCE",
    "Budget",
    "Compile",
    "Trial",
    "compiled_batch",
    "compiled_smallest",
    "compiled_sweep",
    "is_too_large",
    "maker_of",
    "reporting_job",
    "short",
    "variant_of",
    "with_variant",
    "without_flags",
]


# -------------------------------------------------------------------------------------- Job variant
#
# A job with other axes or another slice, as plain data that another process reads.
#
#     variant = variant_of(replace(job, axes=axes))        {"accelerator": ..., "axes": [...], ...}
#     with_variant(JobConfig.load(path), variant)          in the process that compiles
#
# A sweep asks about meshes that no job file names.

_REPORTS_TOO_MUCH = "xla_tpu_no_crash_on_oom"


def variant_of(job: JobConfig) -> dict[str, Any]:
    """Say in what a job may differ from its file.

    Args:
        job: The job.

    Returns:
        Values that JSON has.

    Example:
        >>> variant_of(JobConfig.load("llama3_8b_v5e"))["axes"]
        [['fsdp', 256, 1]]
    """
    return {
        "accelerator": job.accelerator,
        "num_slices": job.num_slices,
        "wrap": None if job.wrap is None else list(job.wrap),
        "axes": [[axis.name, axis.ici, axis.dcn] for axis in job.axes],
    }


def with_variant(job: JobConfig, variant: Mapping[str, Any] | None) -> JobConfig:
    """Return a job as a variant says.

    Args:
        job: The job of the file.
        variant: What :func:`variant_of` returned; None leaves the job as it is.

    Returns:
        The job.

    Example:
        >>> job = JobConfig.load("llama3_8b_v5e")
        >>> with_variant(job, variant_of(job)).axes == job.axes
        True
    """
    if variant is None:
        return job
    wrap = variant["wrap"]
    return replace(
        job,
        accelerator=variant["accelerator"],
        num_slices=variant["num_slices"],
        wrap=None if wrap is None else tuple(wrap),
        axes=tuple(JobAxis(name, ici, dcn) for name, ici, dcn in variant["axes"]),
    )


def without_flags(job: JobConfig, names: Sequence[str]) -> JobConfig:
    """Return a job without some of its sets of XLA flags.

    Args:
        job: The job.
        names: Sets that it takes.

    Returns:
        The job.

    Raises:
        JobError: It does not take such a set.

    Example:
        >>> without_flags(JobConfig.load("llama3_8b_v5e"), ["dense-vmem"]).flag_sets
        ('latency-hiding', 'reduce-scatter-layout')
    """
    if not names:
        return job
    sets = tuple(dict.fromkeys(flag.flag_set for flag in job.xla_flags() if flag.flag_set))
    for name in names:
        if name not in sets:
            raise JobError(
                f"Job {job.name!r} was to be compiled without_flags={name!r}. It takes the sets "
                f"{', '.join(sets) or 'none'}. Pass one of these."
            )
    return replace(job, flag_sets=tuple(flag_set for flag_set in sets if flag_set not in names))


def reporting_job(job: JobConfig) -> JobConfig:
    """Return the job with the flag that lets libtpu compile some programs that do not fit.

    Without it libtpu says how much is too much and gives no program, so that nobody learns of what.
    With it libtpu 0.0.42.1 to 0.0.46.3 gave one where inputs and results were too much, and refused
    it where temporaries were, or a single array; 0.0.48.1 and newer refuse each.

    Args:
        job: The job.

    Returns:
        The job; as it is where the chip is no TPU.

    Example:
        >>> reporting_job(JobConfig.load("llama3_8b_v5e")).flags
        {'xla_tpu_no_crash_on_oom': True}
    """
    if not job.chip.torus_rank or _REPORTS_TOO_MUCH in job.flags:
        return job
    return replace(job, flags={**job.flags, _REPORTS_TOO_MUCH: True})


# ------------------------------------------------------------------------- Who makes a job's model
#
# A reference model, Hugging Face Transformers, or the user's function.
#
#     maker_of("llama3-8b")               the reference models
#     maker_of("my_file:training")        the function itself
#     maker_of("qwen3/config.json")       Transformers, where the reference models cannot be like it
#
# Without torch.

Maker: TypeAlias = Literal["reference", "transformers", "function"]

REFERENCE = "xla_dtensor.models.training:make"
HUGGING_FACE = "xla_dtensor.models.hugging_face:make"


def maker_of(name: str) -> Maker:
    """Say who makes a model.

    Args:
        name: A reference model, the path of a config.json, or "module:function".

    Returns:
        "transformers" for a config that the reference models refuse and that names a type.

    Raises:
        JobError: No such model or file; or only Transformers has it, and is not installed.

    Example:
        >>> maker_of("mixtral-8x7b"), maker_of("my_file:training")
        ('reference', 'function')
    """
    if ":" in name:
        return "function"
    try:
        ModelSizes.load(name)
    except JobError as error:
        if not isinstance(_model_type(name), str):
            raise
        if find_spec("transformers") is None:
            raise JobError(
                f"{str(error).partition(' Pass ')[0]} Transformers might make it, and is not "
                "installed. Install transformers, or pass a module:function that makes your model."
            ) from None
        return "transformers"
    return "reference"


def _model_type(name: str) -> Any:
    try:
        config = json.loads(Path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return config.get("model_type") if isinstance(config, dict) else None


# -------------------------------------------------------------------------------------- Plan search

Outcome: TypeAlias = Literal["fits", "unknown", "not compiled", "does not fit", "refused"]
Compile: TypeAlias = Callable[[JobConfig, int, float], Evidence]

_LONGEST = 200
_NAMES_AN_ERROR = re.compile(r"[\w.]+(Error|Exception): ")
"""Characters of a refusal in a table."""

_STRAIGHT = 6
"""After so many batches the line through them does not hold."""

_ORDER: tuple[Outcome, ...] = ("fits", "unknown", "not compiled", "does not fit", "refused")


class Budget:
    """Seconds that are spent as time goes by.

    Args:
        seconds: How many; the first program may take all of them.
        now: The clock.

    Example:
        >>> Budget(60, now=lambda: 5.0).left
        60.0
    """

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._now, self._start = now, now()

    @property
    def left(self) -> float:
        """What is left; negative when it is overspent."""
        return self.seconds - (self._now() - self._start)


@dataclass(frozen=True)
class Trial:
    """One candidate, and what became of it.

    Args:
        job: The job with its axes and slice.
        per_group: Sequences per part of the batch.
        outcome: "unknown" where it was compiled and nothing says what a device has.
        estimate: The quick one; None if the batch cannot be cut so.
        modelled: Seconds of each axis's collectives, by the rules; empty where they were not asked.
        report: Of the compiled step.
        evidence: What the report was made of.
        refused: Why it cannot be, or why the compiler did not do it.
        seconds: How long compiling took.
    """

    job: JobConfig
    per_group: int
    outcome: Outcome
    estimate: QuickEstimate | None = None
    modelled: dict[str, float] = field(default_factory=dict[str, float])
    report: CompileReport | None = field(default=None, repr=False)
    evidence: Evidence | None = field(default=None, repr=False)
    refused: str | None = None
    seconds: float = 0.0

    @property
    def step_seconds(self) -> float | None:
        """Modelled seconds of the compiled step, all overlapped; None where there are none."""
        roofline = None if self.report is None else self.report.roofline
        return None if roofline is None else roofline.step_seconds


def compiled_sweep(
    case: QuickCase,
    pattern: str,
    compile: Compile,
    *,
    budget: Budget,
    best: int = 3,
    sequences: int | None = None,
) -> tuple[Trial, ...]:
    """Rank meshes by the model, compile the best of them, and rank those by their reports.

    Args:
        case: The job.
        pattern: Axes with their sizes, "*" for any: see ``quick_sweep``.
        compile: See the module docstring.
        budget: For all of them.
        best: How many are compiled until they fit; refused ones and those too large do not count.
        sequences: Of the whole batch; one per device by default.

    Returns:
        All meshes: those that fit by the compiler, the least modelled step first; those that were
        not compiled, by their modelled communication; those that do not fit; those refused.

    Raises:
        JobError: As ``quick_sweep``.
    """
    meshes = quick_sweep(case, pattern, sequences=sequences)
    count = case.job.topology().num_devices if sequences is None else sequences
    trials: list[Trial] = []
    to_compile = best
    for mesh in meshes:
        trial = _of_mesh(case, mesh, count)
        if trial.outcome == "not compiled" and to_compile and budget.left > 0:
            trial = _compiled(trial, compile, budget)
            to_compile -= trial.outcome in ("fits", "unknown")
        trials.append(trial)
    return tuple(sorted(trials, key=_rank))


def _of_mesh(case: QuickCase, mesh: SweptMesh, sequences: int) -> Trial:
    job = case.with_axes(mesh.axes).job
    per_group = 1
    if mesh.estimate is not None:
        per_group = sequences // case.with_axes(mesh.axes).batch().groups
    return Trial(
        job,
        per_group,
        "not compiled" if mesh.refused is None else "refused",
        mesh.estimate,
        dict(mesh.seconds),
        refused=mesh.refused,
    )


def _rank(trial: Trial) -> tuple[int, float, float]:
    order = _ORDER.index(trial.outcome)
    roofline = None if trial.report is None else trial.report.roofline
    if roofline is None:
        return order, float("inf"), sum(trial.modelled.values())
    # Of two whose longest part is the same to 1 in 1000, the one that relies on overlap less.
    return order, float(f"{roofline.step_seconds:.3g}"), roofline.step_seconds_no_overlap


def _compiled(trial: Trial, compile: Compile, budget: Budget) -> Trial:
    start = budget.left
    try:
        evidence = compile(trial.job, trial.per_group, start)
    except CompileError as error:
        spent = start - budget.left
        why: Outcome = "does not fit" if is_too_large(error) else "refused"
        return replace(trial, outcome=why, refused=short(str(error)), seconds=spent)
    report = CompileReport.of(evidence)
    outcome: Outcome = "unknown"
    if report.fits is not None:
        outcome = "fits" if report.fits else "does not fit"
    spent = start - budget.left
    return replace(trial, outcome=outcome, report=report, evidence=evidence, seconds=spent)


def is_too_large(error: CompileError) -> bool:
    """Tell whether the compiler gave no program because a device's memory is too small.

    Args:
        error: What was raised.

    Returns:
        Whether libtpu said so.
    """
    return "RESOURCE_EXHAUSTED" in str(error)


def short(text: str) -> str:
    r"""Cut a refusal to the line that says most: the last that names an error, or the last of all.

    Args:
        text: The message of a CompileError.

    Returns:
        One line of at most 200 characters.

    Example:
        >>> short("It ended. Mend what it says last:\nTraceback\nJaxRuntimeError: too much\nSee E1")
        'JaxRuntimeError: too much'
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    line = next(filter(_NAMES_AN_ERROR.match, reversed(lines)), lines[-1] if lines else "")
    if len(lines) == 1 and ". " in line:
        line = ". ".join(line.split(". ")[1:2])
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 3]}..."


def compiled_smallest(
    case: QuickCase, chip: str, compile: Compile, *, budget: Budget
) -> tuple[Trial, ...]:
    """Compile for one slice after the other, the smallest first, until one fits.

    Args:
        case: The job.
        chip: The chip.
        compile: See the module docstring.
        budget: For all of them.

    Returns:
        What was tried, in that order; the last fits, unless the budget or the slices came to an
        end. The first that the budget left out is named as well.

    Raises:
        MeshError: No such chip.
    """
    trials: list[Trial] = []
    for job, estimate in slices_not_refused(case, chip):
        trial = Trial(job, 1, "not compiled", estimate)
        if budget.left > 0:
            trial = _compiled(trial, compile, budget)
        trials.append(trial)
        if trial.outcome in ("fits", "unknown", "not compiled"):
            break
    return tuple(trials)


def compiled_batch(case: QuickCase, compile: Compile, *, budget: Budget) -> tuple[Trial, ...]:
    """Compile batches until the largest that fits is known, or the budget is spent.

    The first is the largest that the quick estimate does not refuse. Memory grows nearly in a line
    with the batch, so the next is where that line meets what a device has.

    Args:
        case: The job, with a reference model.
        compile: See the module docstring.
        budget: For all of them.

    Returns:
        What was tried, in that order; nothing where the quick estimate refuses one sequence.
    """
    most = max_batch(case)
    if most is None:
        return ()
    trials: list[Trial] = []
    fits, too_many = 0, most[0] + 1
    count = most[0]
    while too_many - fits > 1 and budget.left > 0:
        trial = _compiled(
            Trial(case.job, count, "not compiled", case.estimate(count)), compile, budget
        )
        trials.append(trial)
        if trial.outcome in ("fits", "unknown"):
            fits = count
        else:
            too_many = count
        count = _next_count(trials, fits, too_many)
    return tuple(trials)


def _next_count(tried: list[Trial], fits: int, too_many: int) -> int:
    """Where the line through what was compiled meets the capacity, inside what is left."""
    points = [
        (trial.per_group, trial.report.memory.total_bytes, trial.report.memory.capacity_bytes or 0)
        for trial in tried
        if trial.report is not None
    ]
    low, high = fits + 1, max(fits + 1, too_many - 1)
    if not points or len(tried) > _STRAIGHT:
        return (low + high) // 2
    count, total, capacity = points[-1]
    base = tried[-1].estimate
    base_bytes = 0 if base is None else base.exact_bytes
    other_points = [point for point in points[:-1] if point[0] != count]
    if other_points:
        nearest = min(other_points, key=lambda point: abs(point[1] - capacity))
        slope = (total - nearest[1]) / (count - nearest[0])
    else:
        slope = (total - base_bytes) / count
    if slope <= 0:
        return (low + high) // 2
    met = count + (capacity - total) / slope
    return min(high, max(low, int(met)))
