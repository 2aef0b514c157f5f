"""The mesh of a job, on the devices of a launcher's processes and on others."""

from __future__ import annotations

import pytest

from mesh_utils import JobConfig, JobError
from mesh_utils.launch.variables import JOB, LOCAL_AXES, job_text
from xla_dtensor import job_mesh
from xla_dtensor.errors import DistributeError
from xla_dtensor.runtimes import Runtime

NAME = "llama3_70b_v5p_2slices"


def test_the_launchers_axes(runtime: Runtime) -> None:
    told = {
        JOB: job_text(JobConfig.load(NAME)),
        LOCAL_AXES: "{dp: {}, fsdp: {dcn: 2, ici: 2}, tp: {ici: 2}}",
    }
    mesh = job_mesh(environment=told)
    assert mesh.mesh_dim_names == ("dp", "fsdp", "tp")
    assert mesh.mesh.tolist() == [[[0, 1], [2, 3], [4, 5], [6, 7]]]
    assert job_mesh(JobConfig.load(NAME), environment=told) == mesh


def test_other_devices(runtime: Runtime) -> None:
    with pytest.raises(DistributeError, match=r"on 8 devices of the runtime .*They are not those"):
        job_mesh(JobConfig.load(NAME), environment={})
    with pytest.raises(JobError, match=r"dp=4 was asked for on 8 devices. It takes 4"):
        job_mesh(JobConfig.load(NAME), environment={LOCAL_AXES: "{dp: {ici: 4}}"})
    with pytest.raises(JobError, match=r"XLA_DTENSOR_JOB is not set"):
        job_mesh(environment={})
