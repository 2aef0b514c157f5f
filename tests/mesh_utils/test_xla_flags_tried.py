"""Who took which XLA flags: the table covers what jobs can ask for, and the checks made of it."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.metadata import version

import pytest
import yaml

from mesh_utils import JobConfig, JobError
from mesh_utils import xla_flags as xla_flags_tried
from mesh_utils.launch import flag_notes, render
from mesh_utils.launch.variables import job_from, job_text
from mesh_utils.xla_flags import (
    Trial,
    check_taken,
    digest,
    flag_table,
    flags_for,
    same_version,
    trials,
    tried_text,
    versions_of,
)
from tests.libtpu import needs_libtpu
from tools.try_xla_flags import TABLE, Case, cases, table_text, try_case

CASES = [*cases("tpu"), *cases("gpu")]
UNSAFE = [case for case in CASES if case.unsafe]
AXES = {"dp": {"ici": -1}}


def job(accelerator: str = "v6e:2x4", **flags: object) -> JobConfig:
    data = {"name": "x", "accelerator": accelerator, "axes": AXES}
    return JobConfig.parse({**data, "xla_flags": flags} if flags else data)


def refused(monkeypatch: pytest.MonkeyPatch, outcome: str, said: str) -> None:
    """As if libtpu 0.0.50.1 had not taken latency-hiding on v6e."""
    found = tuple(
        replace(
            trial,
            outcomes={**trial.outcomes, "0.0.50.1": outcome},
            said={"0.0.50.1": said},
        )
        if (trial.sets, trial.chip) == (("latency-hiding",), "v6e")
        else trial
        for trial in trials()
    )
    monkeypatch.setattr(xla_flags_tried, "trials", lambda: found)


def test_each_set_was_tried_as_it_is_now() -> None:
    """A set that changed, or a new one: run python -m tools.try_xla_flags."""
    tried = {(trial.sets, trial.unsafe, trial.chip, trial.digest) for trial in trials()}
    known = {(case.sets, case.unsafe, case.chip, digest(case.flags)) for case in CASES}
    assert tried == known


def test_versions_that_were_tried() -> None:
    assert [v.rpartition(".")[0] for v in versions_of("libtpu")] == [
        f"0.0.{minor}" for minor in (42, 44, 46, 48, 50)
    ]
    assert {"0.10.2", "0.11.0", "0.11.2"} <= set(versions_of("jaxlib"))


def test_no_set_was_refused_anywhere() -> None:
    for trial in trials():
        if trial.sets:
            assert set(trial.outcomes.values()) == {"took"}, trial
            assert not trial.said


def test_flags_that_are_unsafe_were_refused() -> None:
    """So the trial can fail. libtpu 0.0.42 takes them, which is why a job may not have them."""
    for unsafe in flag_table().unsafe:
        for trial in trials():
            if trial.unsafe == unsafe.name:
                old, *new = trial.outcomes.values()
                expected = "refused" if trial.chip in unsafe.hardware else "took"
                assert (old, set(new)) == ("took", {expected}), trial
                assert all("Continuation fusion" in text for text in trial.said.values())


def test_table_is_as_the_tool_writes_it() -> None:
    text = TABLE.read_text(encoding="utf-8")
    assert table_text(yaml.safe_load(text)) == text


@pytest.mark.parametrize(
    ("outcome", "said"),
    [("refused", "FAILED_PRECONDITION: no"), ("unknown flag", "unknown flag xla_a")],
)
def test_a_refused_set(monkeypatch: pytest.MonkeyPatch, outcome: str, said: str) -> None:
    refused(monkeypatch, outcome, said)
    flags = flags_for("v6e", 1)
    with pytest.raises(JobError) as caught:
        check_taken(flags, "v6e", "0.0.50", "Job 'x' was to be launched with libtpu 0.0.50")
    others = " or ".join(versions_of("libtpu")[:-1])
    assert str(caught.value) == (
        "Job 'x' was to be launched with libtpu 0.0.50. libtpu 0.0.50.1 does not take its set of "
        f"XLA flags latency-hiding: {said}. Leave latency-hiding out of xla_flags: sets (plan: "
        f"--without-flags latency-hiding), or use libtpu {others}."
    )
    assert check_taken(flags, "v6e", "0.0.48.1", "Job 'x'") == []
    assert check_taken(flags, "v5p", "0.0.50.1", "Job 'x'") == []
    with pytest.raises(JobError, match=r"with libtpu 0.0.50.1. libtpu 0.0.50.1 does not take"):
        render(job(libtpu="0.0.50.1"), "jobset", command=["true"], image="x")
    render(job(libtpu="0.0.50.1", sets=[]), "jobset", command=["true"], image="x")


def test_a_version_that_was_not_tried() -> None:
    (note,) = check_taken(flags_for("v6e", 2), "v6e", "0.0.52.1", "Job 'x'")
    assert note.startswith(
        "the sets of XLA flags latency-hiding, dcn were not tried with libtpu 0.0.52.1, only with "
        "0.0.42.1, "
    )
    (note,) = check_taken(flags_for("h100", 1), "h100", "0.13.0", "Job 'x'")
    assert note.startswith("the set of XLA flags latency-hiding was not tried with jaxlib 0.13.0")
    assert check_taken(flags_for("v6e", 1, []), "v6e", "0.0.52.1", "Job 'x'") == []


def test_what_a_launch_says() -> None:
    said = flag_notes(job())
    assert said[0].startswith("the job does not say which libtpu will run (xla_flags: libtpu)")
    assert said[1] == f"latency-hiding: taken by libtpu {', '.join(versions_of('libtpu'))}"
    assert flag_notes(job(libtpu="0.0.50.1")) == []
    assert flag_notes(job("h100:8", jaxlib="0.11.2")) == []
    assert flag_notes(job(sets=[])) == []
    (note,) = flag_notes(job(libtpu="0.0.99"))
    assert "not tried with libtpu 0.0.99" in note


def test_a_chip_that_no_libtpu_here_compiles_for() -> None:
    assert tried_text(flags_for("v3", 1), "v3") == "latency-hiding: not tried"


def test_the_version_goes_with_the_job() -> None:
    for one in (job(libtpu="0.0.50.1"), job("h100:8", jaxlib="0.11.2"), job()):
        assert job_from({"XLA_DTENSOR_JOB": job_text(one)}).compiler == one.compiler


@pytest.mark.parametrize(
    ("accelerator", "flags", "message"),
    [
        ("v6e:2x4", {"libtpu": 0.12}, r"xla_flags: libtpu=0.12. .* Write such as libtpu: 0.0.50.1"),
        ("v6e:2x4", {"libtpu": "newest"}, r"libtpu='newest'. It is the version of libtpu that"),
        ("v6e:2x4", {"jaxlib": "0.12.0"}, r"'jaxlib' under xla_flags. There is no such key"),
        ("h100:8", {"libtpu": "0.0.50"}, r"'libtpu' under xla_flags. .* one of .*jaxlib|jaxlib"),
    ],
)
def test_bad_versions(accelerator: str, flags: dict[str, object], message: str) -> None:
    with pytest.raises(JobError, match=message):
        job(accelerator, **flags)


def test_versions_are_the_same_by_three_numbers() -> None:
    assert same_version("0.12.0.1", "0.12.0")
    assert not same_version("0.11.0", "0.11.2")


def test_trials_of_one_row() -> None:
    data = {
        "libtpu": {
            "versions": {"0.0.1.2": "jax 0.1"},
            "trials": [
                {
                    "unsafe": "x",
                    "chip": "v6e",
                    "flags": "0",
                    "outcomes": ["refused"],
                    "cpu_seconds": [1.5],
                    "said": {"0.0.1.2": "no"},
                }
            ],
        },
        "jaxlib": {"versions": {}, "trials": []},
    }
    outcomes, seconds, said = {"0.0.1.2": "refused"}, {"0.0.1.2": 1.5}, {"0.0.1.2": "no"}
    assert xla_flags_tried.read_trials(data) == (
        Trial((), "x", "v6e", "0", outcomes, seconds, said),
    )


@needs_libtpu
@pytest.mark.thorough
@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case.chip}-{'+'.join(case.sets) or case.unsafe}"
)
def test_the_libtpu_at_hand_says_the_same(case: Case) -> None:
    at_hand = {"tpu": version("libtpu"), "gpu": version("jaxlib")}
    platform = "gpu" if case in [*cases("gpu")] else "tpu"
    (trial,) = (
        each
        for each in trials()
        if (each.sets, each.unsafe, each.chip) == (case.sets, case.unsafe, case.chip)
    )
    expected = {
        outcome
        for other, outcome in trial.outcomes.items()
        if same_version(other, at_hand[platform])
    }
    assert {try_case(sys.executable, case).outcome} == (expected or {"took"})


@needs_libtpu
def test_the_program_has_five_kinds_of_collectives() -> None:
    case = next(each for each in CASES if each.chip == "v5e" and each.sets)
    found = try_case(sys.executable, replace(case, slices="1"))
    assert found.outcome == "took", found.said
    assert len(found.collectives) == 5


@needs_libtpu
def test_a_name_that_is_gone_is_told_from_a_refusal() -> None:
    for chip in ("v5e", "h100"):
        found = try_case(sys.executable, Case((), "", chip, ("--xla_gone=true",), "1"))
        assert (found.outcome, found.said) == ("unknown flag", "unknown flag xla_gone")
