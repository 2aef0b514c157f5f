"""A job with other axes or another slice, as plain data that another process reads.

    variant = variant_of(replace(job, axes=axes))        {"accelerator": ..., "axes": [...], ...}
    with_variant(JobConfig.load(path), variant)          in the process that compiles

A sweep asks about meshes that no job file names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mesh_utils import JobConfig
from mesh_utils.config_axes import JobAxis
from mesh_utils.errors import JobError

__all__ = ["reporting_job", "variant_of", "with_variant", "without_flags"]

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
    taken = tuple(dict.fromkeys(flag.flag_set for flag in job.xla_flags() if flag.flag_set))
    for name in names:
        if name not in taken:
            raise JobError(
                f"Job {job.name!r} was to be compiled without_flags={name!r}. It takes the sets "
                f"{', '.join(taken) or 'none'}. Pass one of these."
            )
    return replace(job, flag_sets=tuple(each for each in taken if each not in names))


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
