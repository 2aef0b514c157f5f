"""The table of XLA flags, and that libtpu and jaxlib know every flag in it.

Both end a process that is started with a name or a value that they do not know. So all flags are
given to a process at once, and each wrong one alone shows that the check can fail.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from mesh_utils import JobConfig, JobError, chips, find_chip
from mesh_utils.job import job_names
from mesh_utils.xla_flags import (
    FlagTable,
    UnsafeFlags,
    XlaFlag,
    flag_environment,
    flag_table,
    flags_for,
)
from tests.libtpu import needs_libtpu
from xla_dtensor.plan.aot import LIBTPU_ENVIRONMENT

TPUS = [chip.name for chip in chips() if chip.platform == "tpu"]
GPUS = [chip.name for chip in chips() if chip.platform == "gpu"]
EVERY = [flag for each in flag_table().sets.values() for flag in each.flags]
LOAD_LIBTPU = """
from jax.experimental import topologies
assert len(topologies.get_topology_desc("v5e:4x4", platform="tpu").devices) == 16
"""
LOAD_JAXLIB = "import jax; jax.devices()"


def start(program: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
    }
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=kept | LIBTPU_ENVIRONMENT | variables,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def written(flags: Iterable[XlaFlag]) -> str:
    """All flags; of two values of one flag both, the later one holds."""
    return " ".join(dict.fromkeys(map(str, flags)))


needs_jaxlib = pytest.mark.skipif(
    importlib.util.find_spec("jaxlib") is None, reason="jaxlib is not installed"
)


@needs_libtpu
def test_libtpu_knows_every_flag() -> None:
    flags = [flag for flag in EVERY if set(flag.hardware) & set(TPUS)]
    done = start(LOAD_LIBTPU, LIBTPU_INIT_ARGS=written(flags))
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(flags) > 30


@needs_libtpu
@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--xla_tpu_enable_latency_hiding_schedule=true", "Unknown command line flag"),
        ("--xla_tpu_enable_latency_hiding_scheduler=perhaps", "Illegal value 'perhaps'"),
    ],
)
def test_libtpu_refuses_others(flag: str, message: str) -> None:
    done = start(LOAD_LIBTPU, LIBTPU_INIT_ARGS=flag)
    assert done.returncode != 0
    assert message in done.stderr + done.stdout


@needs_jaxlib
def test_jaxlib_knows_every_flag_of_gpus() -> None:
    flags = [flag for flag in EVERY if set(flag.hardware) & set(GPUS)]
    done = start(LOAD_JAXLIB, XLA_FLAGS=written(flags))
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(flags) > 10


@needs_jaxlib
def test_jaxlib_refuses_others() -> None:
    done = start(LOAD_JAXLIB, XLA_FLAGS="--xla_gpu_gone=on")
    assert done.returncode != 0
    assert "Unknown flag in XLA_FLAGS" in done.stderr


def test_table() -> None:
    table = flag_table()
    table.check_valid()
    assert {each.when for each in table.sets.values()} == {"always", "several_slices", "asked"}
    for flag in EVERY:
        assert flag.reason, flag
        assert "://" in flag.source or "docs/plan.md of this project" in flag.source, flag
        assert set(flag.hardware) <= {*TPUS, *GPUS}


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"hardware": ("v5q",)}, "is for 'v5q'"),
        ({"name": "--xla_a"}, "--xla_a is no flag"),
        ({"value": "1 2"}, "is no flag"),
        ({"hardware": ("v5e", "v5e")}, "twice for v5e"),
    ],
)
def test_table_can_be_wrong(changes: dict[str, object], fault: str) -> None:
    good = flag_table().sets["dcn"]
    wrong = replace(good.flags[0], **changes)  # type: ignore[arg-type]
    with pytest.raises(JobError, match=fault):
        FlagTable({"dcn": replace(good, flags=(wrong,))}).check_valid()
    with pytest.raises(JobError, match="when='never'"):
        FlagTable({"dcn": replace(good, when="never")}).check_valid()


@pytest.mark.parametrize("chip", [*TPUS, *GPUS])
def test_default_sets(chip: str) -> None:
    one, two = flags_for(chip, 1), flags_for(chip, 2)
    assert {flag.flag_set for flag in one} == {"latency-hiding"}
    assert set(one) <= set(two)
    assert {flag.flag_set for flag in two} <= {"latency-hiding", "dcn"}
    for flag in two:
        assert chip in flag.hardware
        gpu_only = flag.name.startswith("xla_gpu_")
        assert gpu_only == (find_chip(chip).platform == "gpu")


def test_own_flags_win() -> None:
    found = flags_for("v6e", 1, ["dense-vmem"], {"xla_tpu_scoped_vmem_limit_kib": 1, "xla_b": True})
    assert list(map(str, found)) == ["--xla_tpu_scoped_vmem_limit_kib=1", "--xla_b=true"]


def test_environment() -> None:
    assert flag_environment("v5e", []) == {}
    assert flag_environment("v5e", flags_for("v5e", 1, [], {"xla_a": 1, "xla_b": "x"})) == {
        "LIBTPU_INIT_ARGS": "--xla_a=1 --xla_b=x"
    }
    assert flag_environment("gb200", flags_for("gb200", 1)).keys() == {"XLA_FLAGS"}


@needs_libtpu
def test_libtpu_starts_with_the_flags_of_each_job() -> None:
    """One process for all jobs of a chip: libtpu reads LIBTPU_INIT_ARGS when it starts."""
    jobs = [JobConfig.load(name) for name in job_names()]
    lines = {job.environment().get("LIBTPU_INIT_ARGS", "") for job in jobs} - {""}
    assert len(lines) > 5
    flags = dict.fromkeys(flag for line in lines for flag in line.split())
    done = start(LOAD_LIBTPU, LIBTPU_INIT_ARGS=" ".join(flags))
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("unsafe", flag_table().unsafe, ids=lambda each: each.name)
def test_unsafe_flags_are_refused(unsafe: UnsafeFlags) -> None:
    for chip in unsafe.hardware:
        with pytest.raises(
            JobError, match=r"Together all-.*Leave out one of them, or add"
        ) as caught:
            flags_for(chip, 1, None, unsafe.flags)
        assert all(name in str(caught.value) for name in [*unsafe.flags, *unsafe.unless])
        found = flags_for(chip, 1, None, {**unsafe.flags, **unsafe.unless})
        assert {flag.name for flag in found} >= {*unsafe.flags, *unsafe.unless}
        for name in unsafe.flags:  # each alone is safe
            flags_for(chip, 1, [], {name: True})
    assert {flag.name for flag in flags_for("v5e", 1, None, unsafe.flags)} >= set(unsafe.flags)


def test_slow_sets_are_measured() -> None:
    slow = {name: each.slow for name, each in flag_table().sets.items() if each.slow is not None}
    assert "dense-vmem" in slow
    for name, cost in slow.items():
        assert cost.seconds > 2 * cost.without > 0, name
        assert "libtpu" in cost.program, name


def test_document_lists_every_flag() -> None:
    root = Path(__file__).resolve().parents[2]
    text = (root / "docs" / "jobs.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\| `(\w+)=(\S+)` \| ([^|]+) \|", text, re.MULTILINE)
    names = {tuple(TPUS): "TPU", tuple(GPUS): "GPU"}
    known = [
        (flag.name, flag.value, names.get(flag.hardware, ", ".join(flag.hardware)))
        for flag in EVERY
    ]
    assert shown == known
