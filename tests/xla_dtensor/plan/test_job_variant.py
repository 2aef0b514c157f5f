"""Jobs with other axes, slices or flags than their files."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mesh_utils import JobConfig
from mesh_utils.errors import JobError
from xla_dtensor.plan.search import reporting_job, variant_of, with_variant, without_flags


@pytest.mark.parametrize("name", ["llama3_8b_v5e", "llama3_70b_v5p_2slices"])
def test_a_variant_is_the_job(name: str) -> None:
    job = JobConfig.load(name)
    assert with_variant(job, None) is job
    other = replace(job, axes=tuple(reversed(job.axes)))
    assert with_variant(job, variant_of(other)) == other


def test_flags_left_out() -> None:
    job = JobConfig.load("llama3_8b_v5e")
    less = without_flags(job, ["dense-vmem"])
    assert "xla_tpu_scoped_vmem_limit_kib" in str(job.environment())
    assert "xla_tpu_scoped_vmem_limit_kib" not in str(less.environment())
    assert "latency_hiding" in str(less.environment())
    assert without_flags(job, []) is job


def test_flags_that_a_job_takes_by_itself_can_be_left_out() -> None:
    job = replace(JobConfig.load("llama3_70b_v5p_2slices"), flag_sets=None)
    assert without_flags(job, ["dcn"]).flag_sets == ("latency-hiding",)


def test_flags_that_it_does_not_take() -> None:
    with pytest.raises(JobError, match=r"takes the sets latency-hiding, .*dense-vmem\. Pass one"):
        without_flags(JobConfig.load("llama3_8b_v5e"), ["dcn"])


def test_what_does_not_fit_is_compiled_all_the_same() -> None:
    job = reporting_job(JobConfig.load("llama3_8b_v5e"))
    assert job.flags["xla_tpu_no_crash_on_oom"] is True
    assert reporting_job(job) is job
