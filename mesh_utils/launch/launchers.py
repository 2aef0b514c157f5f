"""JobSet, xpk, queued resources, torchrun and Slurm: what each needs besides a job and its command.

Their texts are templates of tpu_configs/launch. What GKE sets in pods of TPU slices (TPU_WORKER_ID,
TPU_WORKER_HOSTNAMES and, for several slices, MEGASCALE_NUM_SLICES, MEGASCALE_SLICE_ID,
MEGASCALE_COORDINATOR_ADDRESS) is not set there; libtpu and jax.distributed.initialize() read it.
For GPUs nobody sets anything, so their pods have JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES,
JAX_PROCESS_ID and, for several slices, JAX_PARTITION_INDEX.

A pod that ends with the status 75 was told to end, and has saved; it fails its job at once, for the
reason PodFailurePolicy, on which the JobSet starts again without counting a restart. So does a pod
that Kubernetes itself disrupts, as by preemption or the drain of a node.
"""

import base64
import re
import shlex

from mesh_utils.errors import JobError
from mesh_utils.launch.text import fill, launcher_name, node_arch
from mesh_utils.launch.work import Work

__all__ = ["jobset", "queued", "slurm", "torchrun", "xpk"]

# xpk writes commands and values into YAML as they are, and Kubernetes expands $( there.
_FRAGILE = re.compile(r"[^\x20-\x7e]|[\"\\$]")
_CAPACITIES = ("spot", "reserved")
_LABEL_VALUE = r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
_DNS_LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"


def jobset(work: Work) -> str:
    """Renders a JobSet.

    Args:
        work: the job and its command.

    Returns:
        YAML for kubectl apply.

    Raises:
        JobError: no image; a chip that GKE does not have; several slices of one host; a namespace
            or a queue that Kubernetes would refuse.
    """
    job = work.job
    if job.chip.gke_name is None:
        raise JobError(
            f"Job {job.name!r} was to be launched with 'jobset'. No label of GKE is known for "
            f"{job.chip.title}. Pass 'queued', or a job for another chip."
        )
    is_tpu = job.chip.platform == "tpu"
    if is_tpu and job.num_slices > 1 and work.hosts_per_slice == 1:
        raise JobError(
            f"Job {job.name!r} was to be launched with 'jobset': {job.topology().name}. GKE joins "
            "only slices of several hosts. Pass 'queued', or a job with larger slices."
        )
    _check_name(work, "namespace", _DNS_LABEL, "lower-case letters, digits and dashes")
    _check_name(work, "queue", _LABEL_VALUE, "letters, digits, dashes, dots and underscores")
    return fill("jobset.yaml", work, is_tpu=is_tpu, arch=node_arch(job.chip))


def _check_name(work: Work, option: str, pattern: str, letters: str) -> None:
    label = work.options.get(option)
    if label is not None and not re.fullmatch(pattern, label):
        raise JobError(
            f"Job {work.job.name!r} was to be launched with {option}={label!r}. Kubernetes takes "
            f"at most 63 {letters} there, a letter or digit first and last. Pass such a name."
        )


def xpk(work: Work) -> str:
    """Renders the call of xpk.

    Args:
        work: the job and its command.

    Returns:
        A shell script.

    Raises:
        JobError: a chip that xpk does not have, or a variable that xpk would garble.
    """
    job = work.job
    if job.chip.platform == "tpu":
        prefix = launcher_name("xpk_slice", job.chip, "Pass another launcher")
        device_type, count = f"{prefix}-{work.shape}", f"--num-slices={job.num_slices}"
    else:
        device_type = launcher_name("xpk_node", job.chip, "Pass another launcher")
        count = f"--num-nodes={work.hosts}"
    for name, value in work.env.items():
        if _FRAGILE.search(value):
            raise JobError(
                f"Job {job.name!r} was to be launched with 'xpk' and {name}={value!r}. xpk writes "
                "values into YAML as they are, which does not take quotes, backslashes, dollars "
                f"and line breaks. Pass 'jobset', or set {name} in the command."
            )
    command = shlex.join(work.command)
    if _FRAGILE.search(command):
        command = f"bash <(base64 -d <<< {base64.b64encode(command.encode()).decode()})"
    return fill("xpk.sh", work, device_type=device_type, count=count, command=command)


def queued(work: Work) -> str:
    """Renders the script for queued resources.

    Args:
        work: the job and its command.

    Returns:
        A shell script that asks for the slices, waits for them, and runs the command on all hosts.

    Raises:
        JobError: a chip whose runtime version is not known, or an unknown capacity.
    """
    job = work.job
    version = work.options.get("runtime_version") or launcher_name(
        "runtime_version", job.chip, "Pass runtime_version="
    )
    capacity = work.options.get("capacity", _CAPACITIES[0])
    if capacity not in _CAPACITIES:
        raise JobError(
            f"Job {job.name!r} was to be launched with capacity={capacity!r}. There is no such "
            f"capacity. Pass one of {', '.join(_CAPACITIES)}, or leave it out."
        )
    pairs = [f"{name}={value}" for name, value in work.env.items()]
    if work.image is None:
        words = ["env", *pairs, *work.command] if pairs else list(work.command)
    else:
        run = ["sudo", "docker", "run", "--rm", "--privileged", "--network=host"]
        words = [*run, *(f"--env={pair}" for pair in pairs), work.image, *work.command]
    return fill(
        "queued.sh",
        work,
        topology=job.topology(),
        runtime_version=version,
        command=shlex.join(words),
    )


def torchrun(work: Work) -> str:
    """Renders the script for torchrun.

    Args:
        work: the job and its command.

    Returns:
        A shell script to run on each node.

    Raises:
        JobError: an image, which torchrun does not start.
    """
    if work.image is not None:
        raise JobError(
            f"Job {work.job.name!r} was to be launched with 'torchrun' and image={work.image!r}. "
            "torchrun starts processes, not containers. Pass no image, or 'slurm' or 'jobset'."
        )
    return fill("torchrun.sh", work)


def slurm(work: Work) -> str:
    """Renders the batch script for Slurm.

    Args:
        work: the job and its command.

    Returns:
        A shell script for sbatch.
    """
    return fill("slurm.sh", work)
