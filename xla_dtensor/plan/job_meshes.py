"""The mesh of the job that this process is part of, wherever a launcher started it.

    xd.init_distributed()
    mesh = xd.job_mesh()

On the chips that the job file names, the mesh is the searched one of ``JobConfig.mesh``. Where
``launch --local`` runs the job, it has the same axes with the sizes that the launcher chose.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from mesh_utils import JobConfig, Mesh, MeshError
from mesh_utils.job import read_sizes, read_yaml
from mesh_utils.launch.local import local_mesh_ids
from mesh_utils.launch.variables import LOCAL_AXES, job_from
from xla_dtensor.core.errors import DistributeError
from xla_dtensor.dtensor.mesh import DeviceMesh, as_device_mesh
from xla_dtensor.runtimes.registry import get_runtime

__all__ = ["job_mesh"]


def job_mesh(
    job: JobConfig | None = None, *, environment: Mapping[str, str] | None = None
) -> DeviceMesh:
    """Return the mesh of a job on the devices that are there.

    Args:
        job: The job; the one that the launcher wrote into the environment when None.
        environment: Variables by name; this process's when None.

    Returns:
        The mesh, with all axes of the job.

    Raises:
        JobError: No job was passed, and no launcher said one; or other devices than it takes.
        DistributeError: The devices are not those that the job names.

    Example:
        >>> job = JobConfig.load("llama3_70b_v5p_2slices")
        >>> axes = "{dp: {dcn: 2}, fsdp: {ici: 2}, tp: {ici: 2}}"
        >>> job_mesh(job, environment={"XLA_DTENSOR_LOCAL_AXES": axes})
        DeviceMesh((dp=2, fsdp=2, tp=2), device: 'xla')
    """
    variables = os.environ if environment is None else environment
    job = job_from(variables) if job is None else job
    runtime = get_runtime()
    if variables.get(LOCAL_AXES):
        axes = read_sizes(read_yaml(variables[LOCAL_AXES], LOCAL_AXES), LOCAL_AXES)
        ids = local_mesh_ids(axes, runtime.device_ids())
        local = Mesh(ids.ravel().tolist(), ids.shape, [axis.name for axis in axes])
        mesh = as_device_mesh(local)
        runtime.root(mesh.value)
        return mesh
    try:
        mesh = as_device_mesh(job.mesh(runtime.device_attributes()))
    except MeshError as error:
        count = len(runtime.device_ids())
        raise DistributeError(
            f"The mesh of job {job.name!r} was asked for on {count} devices of the runtime "
            f"{runtime.name!r}. They are not those of {job.topology().name}: {error} Start the "
            "program on those, or with python -m xla_dtensor launch --local."
        ) from error
    runtime.root(mesh.value)
    return mesh
