"""Jobs scaled down to one machine: what stays of the axes, and which devices they join."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh_utils import JobConfig, JobError
from mesh_utils.job import JobAxis, job_names
from mesh_utils.launch.local import LocalPlan, local_mesh_ids, local_plan
from mesh_utils.launch.variables import JOB, axes_text, job_from, job_text
from tests.mesh_utils.launch_stand_ins import job, small


def check(found: JobConfig, plan: LocalPlan) -> None:
    """What the rule promises."""
    assert tuple(axis.name for axis in plan.axes) == found.axis_names
    assert prod(axis.dcn for axis in plan.axes) == plan.slices
    assert prod(axis.ici for axis in plan.axes) * plan.slices == plan.processes * plan.devices
    assert plan.slices == max(
        n for n in range(1, plan.processes + 1) if plan.processes % n == 0 and n <= found.num_slices
    )
    for here, there in zip(plan.axes, found.axes, strict=True):
        assert here.ici <= there.ici
        assert here.dcn <= there.dcn


@given(st.sampled_from(job_names()), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4]))
def test_every_job(name: str, processes: int, devices: int) -> None:
    found = job(name)
    try:
        plan = local_plan(found, processes, devices)
    except JobError:
        # A slice is smaller than what is here, or its sizes have no such factors (3, in 72 GPUs).
        inside = processes * devices // min(processes, found.num_slices)
        assert inside > found.topology().devices_per_slice or "gb200" in name
        return
    check(found, plan)
    slices = [plan.slice_of(process) for process in range(processes)]
    assert slices == sorted(slices)
    assert [slices.count(each) for each in set(slices)] == [processes // plan.slices] * plan.slices


@pytest.mark.parametrize(
    ("name", "processes", "devices", "axes"),
    [
        ("llama3_70b_v5p_2slices", 4, 2, "dp=2 (2 over DCN) fsdp=2 tp=2"),
        ("llama3_70b_v5p_2slices", 2, 4, "dp=2 (2 over DCN) fsdp=2 tp=2"),
        ("llama3_70b_v5p_2slices", 1, 2, "dp=1 fsdp=2 tp=1"),
        ("llama3_70b_v5p_2slices", 1, 8, "dp=1 fsdp=4 tp=2"),
        ("llama3_8b_v5e_4slices", 4, 2, "dp=4 (4 over DCN) fsdp=2"),
        ("llama3_8b_v5e_4slices", 2, 4, "dp=2 (2 over DCN) fsdp=4"),
        ("llama3_405b_v6e_2slices", 4, 2, "fsdp=4 (2 over DCN) tp=2"),
        ("llama3_70b_v6e_long", 4, 1, "fsdp=2 cp=2"),
        ("llama3_70b_h100", 4, 2, "fsdp=4 (4 over DCN) tp=2"),
    ],
)
def test_sizes(name: str, processes: int, devices: int, axes: str) -> None:
    assert " ".join(map(str, local_plan(job(name), processes, devices).axes)) == axes


def test_given_sizes() -> None:
    found = job("llama3_70b_v5p_2slices")
    axes = {"dp": {}, "fsdp": {"ici": -1}, "tp": {"ici": 2}}
    plan = local_plan(found, 2, 4, axes)
    assert (" ".join(map(str, plan.axes)), plan.slices) == ("dp=1 fsdp=4 tp=2", 1)
    plan = local_plan(found, 2, 4, {"dp": {"dcn": -1}, "fsdp": {"ici": 4}, "tp": {}})
    assert (" ".join(map(str, plan.axes)), plan.slices) == ("dp=2 (2 over DCN) fsdp=4 tp=1", 2)


@pytest.mark.parametrize(
    ("processes", "devices", "axes", "message"),
    [
        (0, 2, None, r"on 0 processes of 2 devices. There has to be one of each. Pass 1 or more"),
        (8, 4, None, r"32 for each of 1 slices. A slice of the job has 16.*Pass fewer"),
        (4, 2, {"dp": {"dcn": 2}}, r"with axes dp. Those of the job are dp, tp, in that order"),
        (4, 2, {"dp": {"dcn": 3}, "tp": {}}, r"multiply to 3. .*Pass dcn sizes whose product div"),
        (4, 2, {"dp": {"ici": 3}, "tp": {"ici": 2}}, r"axes dp=3, tp=2. 1 slices of 8 devices"),
        (4, 2, {"dp": {"ici": 3}, "tp": {"ici": -1}}, r"1 slices of 8 devices are here"),
        (4, 2, {"dp": {"ici": -1}, "tp": {"ici": -1}}, r"1 slices of 8 devices are here"),
        (4, 2, {"dp": 2, "tp": 4}, r"with axis dp=2. Nothing says whether that is inside slices"),
    ],
)
def test_refusals(processes: int, devices: int, axes: Any, message: str) -> None:
    with pytest.raises(JobError, match=message):
        local_plan(small(), processes, devices, axes)


def test_sizes_that_cannot_be_made() -> None:
    axes = {"dp": {"dcn": -1}, "a": {"ici": 3}, "b": {"ici": 3}}
    found = small(accelerator="gb200:36", axes=axes | {"c": {"ici": 4}})
    with pytest.raises(JobError, match=r"32 devices are not to be made of sizes up to 1 x 3 x 12"):
        local_plan(small(accelerator="gb200:36", axes=axes | {"b": {"ici": 12}}), 1, 32)
    check(found, local_plan(found, 1, 8))


def test_what_crosses_processes() -> None:
    """A dcn axis steps from slice to slice; the last axis stays in a process."""
    plan = local_plan(job("llama3_70b_v5p_2slices"), 4, 2)
    ids = np.array(local_mesh_ids(plan.axes, range(8)))
    slices = np.vectorize(lambda device: plan.slice_of(device // plan.devices))(ids)
    assert (slices == np.arange(2)[:, None, None]).all()
    assert (ids // plan.devices == ids[..., :1] // plan.devices).all()  # tp=2


@given(
    st.lists(
        st.tuples(st.sampled_from([1, 2, 3]), st.sampled_from([1, 2, 3])), min_size=1, max_size=3
    )
)
def test_mesh_is_the_hybrid_one(sizes: list[tuple[int, int]]) -> None:
    """Laid out as HybridMesh lays out slices, row by row."""
    from mesh_utils import HybridMesh, synthetic_devices

    axes = [JobAxis(f"a{n}", ici, dcn) for n, (ici, dcn) in enumerate(sizes)]
    ici, dcn = prod(a.ici for a in axes), prod(a.dcn for a in axes)
    devices = synthetic_devices((ici,), num_slices=dcn, chips_per_host=(1,))
    hybrid = HybridMesh(
        devices,
        ici_mesh_shape=[a.ici for a in axes],
        dcn_mesh_shape=[a.dcn for a in axes],
        order="row-major",
    )
    ids = [device.id for device in devices]
    assert local_mesh_ids(axes, ids).tolist() == hybrid.device_ids.tolist()


def test_mesh_of_other_devices() -> None:
    with pytest.raises(JobError, match=r"axes tp=4 was asked for on 3 devices. It takes 4. Start"):
        local_mesh_ids([JobAxis("tp", 4)], range(3))


@pytest.mark.parametrize("name", job_names())
def test_a_job_is_read_from_its_text(name: str) -> None:
    found = job(name)
    text = job_text(found)
    assert job_from({JOB: text}) == found
    assert "\n" not in text
    assert not set('"\\$') & set(text)  # xpk takes none of these


def test_text_of_everything() -> None:
    axes = {"dp": {"ici": 2, "weight": 1.5}, "tp": {"ici": -1, "weight": 2}}
    flags = {"sets": [], "flags": {"xla_tpu_scoped_vmem_limit_kib": 98304}}
    found = small(
        accelerator="v3-32", wrap=[True, True], axes=axes, xla_flags=flags, model="llama3-8b"
    )
    assert job_from({JOB: job_text(found)}) == found
    assert axes_text(found.axes) == "{dp: {ici: 2, weight: 1.5}, tp: {ici: 16, weight: 2.0}}"


def test_no_job() -> None:
    with pytest.raises(JobError, match=r"XLA_DTENSOR_JOB is not set. Launchers set it. Start the"):
        job_from({})
