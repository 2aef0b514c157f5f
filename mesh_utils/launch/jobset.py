"""JobSet: a replica per slice, a pod per host.

What GKE sets in pods of TPU slices (TPU_WORKER_ID, TPU_WORKER_HOSTNAMES and, for several slices,
MEGASCALE_NUM_SLICES, MEGASCALE_SLICE_ID, MEGASCALE_COORDINATOR_ADDRESS) is not set here; libtpu and
jax.distributed.initialize() read it. For GPUs nobody sets anything, so these pods have
JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID and, for several slices,
JAX_PARTITION_INDEX.

A pod that ends with the status 75 was told to end, and has saved; it fails its job at once, for the
reason PodFailurePolicy, on which the JobSet starts again without counting a restart. So does a pod
that Kubernetes itself disrupts, as by preemption or the drain of a node.
"""

from collections.abc import Mapping

from mesh_utils.errors import JobError
from mesh_utils.launch.text import fill, kubernetes_text, node_arch, yaml_list, yaml_text, yaml_word
from mesh_utils.launch.work import PREEMPTED, Work

_PORT = 8476
_ON_ONE_NODE_POOL = """annotations:
    # A node pool is an NVLink domain: the pods of a slice share one.
    alpha.jobset.sigs.k8s.io/exclusive-topology: cloud.google.com/gke-nodepool"""


def jobset(work: Work) -> str:
    """Renders a JobSet.

    Args:
        work: the job and its command.

    Returns:
        YAML for kubectl apply.

    Raises:
        JobError: no image; a chip that GKE does not have; several slices of one host.
    """
    job, topology = work.job, work.job.topology()
    if job.chip.gke_name is None:
        raise JobError(
            f"Job {job.name!r} was to be launched with 'jobset'. No label of GKE is known for "
            f"{job.chip.title}. Pass 'queued', or a job for another chip."
        )
    is_tpu = job.chip.platform == "tpu"
    if is_tpu and job.num_slices > 1 and work.hosts_per_slice == 1:
        raise JobError(
            f"Job {job.name!r} was to be launched with 'jobset': {topology.name}. GKE joins only "
            "slices of several hosts. Pass 'queued', or a job with larger slices."
        )
    labels = ""
    if "queue" in work.options:
        labels = f"labels: {{kueue.x-k8s.io/queue-name: {yaml_text(work.options['queue'])}}}"
    namespace = work.options.get("namespace")
    common = {
        "title": work.title,
        "name": yaml_word(work.name),
        "namespace": "" if namespace is None else f"namespace: {yaml_text(namespace)}",
        "labels": labels,
        "max_restarts": work.count("max_restarts"),
        "preempted": PREEMPTED,
        "grace_seconds": work.grace_seconds,
        "slices": job.num_slices,
        "hosts_per_slice": work.hosts_per_slice,
        "accelerator": yaml_text(job.chip.gke_name),
        "image": yaml_text(work.needed_image("jobset")),
        "chips_per_host": work.chips_per_host,
    }
    if is_tpu:
        return fill("jobset_tpu.yaml", common | _tpu_parts(work))
    return fill("jobset_gpu.yaml", common | _gpu_parts(work))


def _tpu_parts(work: Work) -> dict[str, object]:
    command = [kubernetes_text(word) for word in work.command]
    return {
        "topology": yaml_text(work.shape),
        "env": yaml_list(_env(work.env), 20),
        "command": yaml_list(command, 20),
    }


def _gpu_parts(work: Work) -> dict[str, object]:
    coordinator = {
        "JAX_COORDINATOR_ADDRESS": f"{work.name}-slice-0-0.{work.name}:{_PORT}",
        "JAX_NUM_PROCESSES": str(work.hosts),
    }
    # Kubernetes cannot add and multiply.
    line = (
        f"NODE=$((JOB_INDEX * {work.hosts_per_slice} + POD_INDEX)); "
        f'export JAX_PROCESS_ID="$NODE"; {work.partition}; exec "$@"'
    ).replace("; ; ", "; ")
    words = ["bash", "-c", line, "bash", *work.command]
    arch = node_arch(work.job.chip)
    toleration = ""
    if arch is not None:
        key = "key: kubernetes.io/arch, operator: Equal"
        toleration = f"- {{{key}, value: {arch}, effect: NoSchedule}}"
    template = work.options.get("claim_template")
    claims = "" if template is None else "claims: [{name: nvlink-domain}]"
    return {
        "annotations": _ON_ONE_NODE_POOL if work.hosts_per_slice > 1 else "",
        "arch_toleration": toleration,
        "resource_claims": ""
        if template is None
        else "resourceClaims: [{name: nvlink-domain, resourceClaimTemplateName: "
        f"{yaml_text(template)}}}]",
        "container_claims": claims,
        "env": yaml_list(_env(coordinator | dict(work.env)), 20),
        "command": yaml_list(map(kubernetes_text, words), 20),
    }


def _env(env: Mapping[str, str]) -> list[str]:
    pairs = env.items()
    return [f"{{name: {name}, value: {kubernetes_text(value)}}}" for name, value in pairs]
