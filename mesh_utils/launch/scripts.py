"""Shell scripts: xpk, queued resources, torchrun and Slurm."""

import base64
import re
import shlex

from mesh_utils.errors import JobError
from mesh_utils.launch.text import exports, fill, launcher_name, settings, shell_lines
from mesh_utils.launch.work import PREEMPTED, Work

# xpk writes commands and values into YAML as they are, and Kubernetes expands $( there.
_FRAGILE = re.compile(r"[^\x20-\x7e]|[\"\\$]")
_CAPACITIES = ("spot", "reserved")


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
    wanted = {"CLUSTER": "your GKE cluster", "PROJECT": "your project", "ZONE": "its zone"}
    image = [] if work.image is None else [f"--docker-image={work.image}"]
    return fill(
        "xpk.sh",
        {
            "title": work.title,
            "settings": settings(work.options, wanted),
            "name": work.name,
            "device_type": shlex.quote(device_type),
            "count": count,
            "priority": shlex.quote(work.options.get("priority", "medium")),
            "max_restarts": work.count("max_restarts"),
            "preempted": PREEMPTED,
            "grace_seconds": work.grace_seconds,
            "image": shell_lines(image, 2),
            "env": shell_lines([f"--env={name}={each}" for name, each in work.env.items()], 2),
            "command": shlex.quote(f"--command={_xpk_command(work)}"),
        },
    )


def _xpk_command(work: Work) -> str:
    line = shlex.join(work.command)
    if not _FRAGILE.search(line):
        return line
    encoded = base64.b64encode(line.encode()).decode()
    return f"bash <(base64 -d <<< {encoded})"


def queued(work: Work) -> str:
    """Renders the script for queued resources.

    Args:
        work: the job and its command.

    Returns:
        A shell script that asks for the slices, waits for them, and runs the command on all hosts.

    Raises:
        JobError: a chip whose runtime version is not known, or an unknown capacity.
    """
    job, topology = work.job, work.job.topology()
    version = work.options.get("runtime_version") or launcher_name(
        "runtime_version", job.chip, "Pass runtime_version="
    )
    cloud = topology.cloud_name
    slice_type = [f"--accelerator-type={cloud}"]
    if cloud is None:
        slice_type = [f"--type={job.chip.cloud_names[0]}", f"--topology={work.shape}"]
    if job.num_slices == 1:
        nodes = [f"--node-id={work.name}"]
    else:
        nodes = [f"--node-count={job.num_slices}", f"--node-prefix={work.name}"]
    if "capacity" in work.options:
        nodes.append(f"--{_capacity(work)}")
    wanted = {"PROJECT": "your project", "ZONE": "a zone with that accelerator"}
    pairs = [f"{name}={value}" for name, value in work.env.items()]
    if work.image is None:
        words = ["env", *pairs, *work.command] if pairs else list(work.command)
    else:
        run = ["sudo", "docker", "run", "--rm", "--privileged", "--network=host"]
        words = [*run, *(f"--env={pair}" for pair in pairs), work.image, *work.command]
    return fill(
        "queued.sh",
        {
            "title": work.title,
            "settings": settings(work.options, wanted),
            "name": work.name,
            "slice_type": shlex.join(slice_type),
            "runtime_version": shlex.quote(version),
            "nodes": shlex.join(nodes),
            "hosts": work.hosts,
            "command": shlex.quote(f"--command={shlex.join(words)}"),
        },
    )


def _capacity(work: Work) -> str:
    asked = work.options["capacity"]
    if asked not in _CAPACITIES:
        raise JobError(
            f"Job {work.job.name!r} was to be launched with capacity={asked!r}. There is no such "
            f"capacity. Pass one of {', '.join(_CAPACITIES)}, or leave it out."
        )
    return asked


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
    return fill(
        "torchrun.sh",
        {
            "title": work.title,
            "hosts": work.hosts,
            "last_node": work.hosts - 1,
            "chips_per_host": work.chips_per_host,
            "exports": exports(work.env),
            "command": shell_lines(work.command, 2),
            "partition": work.partition.replace("NODE", "GROUP_RANK"),
            "max_restarts": work.count("max_restarts"),
        },
    )


def slurm(work: Work) -> str:
    """Renders the batch script for Slurm.

    Args:
        work: the job and its command.

    Returns:
        A shell script for sbatch.
    """
    directives = [
        f"#SBATCH --{name}={work.options[name]}"
        for name in ("partition", "account", "time")
        if name in work.options
    ]
    if work.hosts_per_slice > 1:
        # Of topology/block: so many nodes of each block, and a block is an NVLink domain.
        directives.append(f"#SBATCH --segment={work.hosts_per_slice}")
    image = "" if work.image is None else shlex.quote(f"--container-image={work.image}")
    return fill(
        "slurm.sh",
        {
            "title": work.title,
            "name": work.name,
            "hosts": work.hosts,
            "chips_per_host": work.chips_per_host,
            "directives": "\n".join(directives),
            "exports": exports(work.env),
            "command": shell_lines(work.command, 2),
            "image": image,
            "partition": work.partition.replace("NODE", "SLURM_NODEID"),
            "preempted": PREEMPTED,
            "signal": f"USR1@{work.grace_seconds}",
            "grace_seconds": work.grace_seconds,
        },
    )
