"""The environment variables by which a launcher tells a program its job.

    XLA_DTENSOR_JOB             the job, as one line of YAML: the same wherever it runs
    XLA_DTENSOR_LOCAL_AXES      the axes, scaled down, where `launch --local` runs the job
    JAX_COMPILATION_CACHE_DIR   where XLA keeps compiled programs, for the next start

The first two are read by `job_from`; JAX reads the last. So a program needs no path to its job
file, and an image need not hold it.
"""

from collections.abc import Mapping, Sequence
from typing import cast

from mesh_utils.errors import JobError
from mesh_utils.job import JobAxis, JobConfig, read_yaml
from mesh_utils.xla_flags import COMPILERS

JOB = "XLA_DTENSOR_JOB"
LOCAL_AXES = "XLA_DTENSOR_LOCAL_AXES"
COMPILE_CACHE = "JAX_COMPILATION_CACHE_DIR"


def job_text(job: JobConfig) -> str:
    """Writes a job as one line of YAML.

    What it runs is left out: whoever reads this is that.

    Args:
        job: the job.

    Returns:
        YAML that `JobConfig.parse` reads. Without quotes and dollars, unless a name has them.

    Example:
        >>> axes = {"dp": {"dcn": -1}, "tp": {"ici": -1}}
        >>> job = JobConfig.parse({"name": "x", "accelerator": "2xv5e:4x4", "axes": axes})
        >>> print(job_text(job))
        {name: x, accelerator: '2xv5e:4x4', num_slices: 2, axes: {dp: {dcn: 2}, tp: {ici: 16}}}
    """
    document: dict[str, object] = {
        "name": job.name,
        "accelerator": job.accelerator,
        "num_slices": job.num_slices,
    }
    if job.wrap is not None:
        document["wrap"] = list(job.wrap)
    if job.model is not None:
        document["model"] = job.model
    document["axes"] = _axes_data(job.axes)
    if job.sharding is not None:
        document["sharding"] = job.sharding
    flags: dict[str, object] = {}
    if job.flag_sets is not None:
        flags["sets"] = list(job.flag_sets)
    if job.flags:
        flags["flags"] = dict(job.flags)
    if job.compiler is not None:
        flags[COMPILERS[job.chip.platform]] = job.compiler
    if flags:
        document["xla_flags"] = flags
    return _one_line(document)


def job_from(environment: Mapping[str, str]) -> JobConfig:
    """Reads the job that a launcher wrote into the environment.

    Args:
        environment: variables by name, such as os.environ.

    Returns:
        The job.

    Raises:
        JobError: there is none.
        MeshError: what is there is no job.

    Example:
        >>> text = job_text(JobConfig.load("llama3_8b_v5e"))
        >>> job_from({JOB: text}).axes == JobConfig.load("llama3_8b_v5e").axes
        True
    """
    text = environment.get(JOB)
    if not text:
        raise JobError(
            f"The job of this process was asked for, and {JOB} is not set. Launchers set it. Start "
            "the program with python -m xla_dtensor launch, or pass JobConfig.load(...)."
        )
    return JobConfig.parse(cast("Mapping[str, object]", read_yaml(text, JOB)))


def axes_text(axes: Sequence[JobAxis]) -> str:
    """Writes axes as one line of YAML, sizes of 1 left out.

    Args:
        axes: the axes.

    Returns:
        YAML as under `axes` of a job file.

    Example:
        >>> axes_text([JobAxis("dp", 1, 2), JobAxis("tp", 4), JobAxis("cp")])
        '{dp: {dcn: 2}, tp: {ici: 4}, cp: {}}'
    """
    return _one_line(_axes_data(axes))


def _axes_data(axes: Sequence[JobAxis]) -> dict[str, dict[str, object]]:
    entries: dict[str, dict[str, object]] = {}
    for axis in axes:
        sizes: dict[str, object] = {}
        if axis.dcn != 1:
            sizes["dcn"] = axis.dcn
        if axis.ici != 1:
            sizes["ici"] = axis.ici
        if axis.weight is not None:
            sizes["weight"] = axis.weight
        entries[axis.name] = sizes
    return entries


def _one_line(document: object) -> str:
    import yaml

    text = yaml.safe_dump(document, default_flow_style=True, width=float("inf"), sort_keys=False)
    return text.strip()
