"""How launchers start a job again that was told to end; compiled programs; what a job file runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from mesh_utils import JobError
from mesh_utils.launch import LAUNCHERS, launchers_for, render
from mesh_utils.launch.work import PREEMPTED
from tests.mesh_utils.launch_stand_ins import (
    IMAGE,
    WORDS,
    call,
    job,
    make_tools,
    option,
    pod_of,
    shell,
    small,
    variables_of,
)


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tools(tmp_path_factory.mktemp("restart_tools"))


@pytest.mark.parametrize("name", ["llama3_8b_v5e", "llama3_70b_gb200"])
def test_jobset(name: str) -> None:
    text = render(job(name), "jobset", command=WORDS, image=IMAGE, max_restarts="3")
    policy = yaml.safe_load(text)["spec"]["failurePolicy"]
    (rule,) = policy["rules"]
    assert policy["maxRestarts"] == 3
    assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
    replicated, pod = pod_of(text)
    spec = replicated["template"]["spec"]
    on_status, on_disruption = spec["podFailurePolicy"]["rules"]
    assert (on_status["action"], on_disruption["action"]) == ("FailJob", "FailJob")
    exit_codes = on_status["onExitCodes"]
    assert (exit_codes["operator"], exit_codes["values"]) == ("In", [75])
    assert exit_codes["containerName"] == pod["containers"][0]["name"]
    assert on_disruption["onPodConditions"] == [{"type": "DisruptionTarget"}]
    assert pod["restartPolicy"] == "Never"
    assert pod["terminationGracePeriodSeconds"] == 120
    assert yaml.safe_load(text)["spec"]["coordinator"] == {"replicatedJob": replicated["name"]}


def test_status_is_that_of_preemption() -> None:
    from xla_dtensor.hosts.preemption import EXIT_STATUS

    assert PREEMPTED == EXIT_STATUS == 75


def test_xpk(tools: Path) -> None:
    text = render(job(), "xpk", command=WORDS, max_restarts="5", grace_seconds="300")
    (called,) = call(text, tools, CLUSTER="c", PROJECT="p", ZONE="z")
    assert option(called, "restart-on-exit-codes") == "75"
    assert option(called, "max-restarts") == "5"
    assert option(called, "termination-grace-period-seconds") == "300"


def test_torchrun(tools: Path) -> None:
    text = render(job("llama3_70b_h100"), "torchrun", command=WORDS, max_restarts="2")
    (called,) = call(text, tools, MASTER_ADDR="head", NODE_RANK="3")
    assert option(called, "max-restarts") == "2"


@pytest.mark.parametrize("status", [0, 1, 75, 143])
def test_slurm(status: int, tools: Path, tmp_path: Path) -> None:
    """Only a program that was told to end, and has saved, is queued again."""
    for name, line in (("srun", f"exit {status}"), ("scontrol", 'echo "$@" > "$ASKED"')):
        (tmp_path / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / name).chmod(0o755)
    text = render(job("llama3_70b_h100"), "slurm", command=WORDS, grace_seconds="90")
    asked = tmp_path / "asked"
    done = shell(text, tmp_path, SLURM_JOB_ID="7", ASKED=str(asked))
    assert done.returncode == status
    assert asked.exists() == (status == 75)
    if status == 75:
        assert asked.read_text() == "requeue 7\n"
    directives = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", text, re.MULTILINE))
    assert directives["signal"] == "USR1@90"
    assert "requeue" in directives


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_compiled_programs(launcher: str) -> None:
    name = "llama3_70b_h100" if launcher in ("torchrun", "slurm") else "llama3_8b_v5e"
    image = None if launcher == "torchrun" else IMAGE
    assert launcher in launchers_for(job(name))
    text = render(job(name), launcher, command=WORDS, image=image, compile_cache="gs://x/y")
    assert re.search(r"JAX_COMPILATION_CACHE_DIR\W+(value: \W*)?gs://x/y", text)
    assert "JAX_COMPILATION_CACHE_DIR" not in render(
        job(name), launcher, command=WORDS, image=image
    )


RUN: dict[str, Any] = {
    "command": "python 'a b.py' --steps 3",
    "image": "us/x:1",
    "env": {"A": 1, "B": "$x"},
    "compile_cache": "gs://x/y",
    "grace_seconds": 60,
}


def test_job_file_says_what_runs() -> None:
    found = small(accelerator="v5e:4x4", run=RUN)
    text = render(found, "jobset")
    (container,) = pod_of(text)[1]["containers"]
    assert container["command"] == ["python", "a b.py", "--steps", "3"]
    assert container["image"] == "us/x:1"
    given = variables_of(container)
    assert (given["A"], given["B"]) == ("1", "$x")
    assert given["JAX_COMPILATION_CACHE_DIR"] == "gs://x/y"
    assert pod_of(text)[1]["terminationGracePeriodSeconds"] == 60
    text = render(found, "jobset", command=["true"], image="y", env={"A": "2"}, grace_seconds="5")
    (container,) = pod_of(text)[1]["containers"]
    assert (container["command"], container["image"]) == (["true"], "y")
    assert (variables_of(container)["A"], variables_of(container)["B"]) == ("2", "$x")
    assert pod_of(text)[1]["terminationGracePeriodSeconds"] == 5


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ("python x.py", r"run='python x.py'. What a job runs is a mapping of keys"),
        ({"commands": "x"}, r"'commands' under run. There is no such key. Write 'command'"),
        ({"command": []}, r"run: command=\[\]. A command is a list of words, or one line"),
        ({"command": "a 'b"}, r"run: command=\"a 'b\"."),
        ({"command": [["a"]]}, r"run: command=\[\['a'\]\]"),
        ({"image": 3}, r"run: image=3. It has to be text on one line"),
        ({"env": ["A=b"]}, r"run: env=\['A=b'\]. Variables are names with text or numbers"),
        ({"env": {"A b": "c"}}, r"run: env=.*Variables are names"),
        ({"env": {"A": True}}, r"and 'true' in quotes"),
        ({"compile_cache": ""}, r"run: compile_cache=''"),
        ({"grace_seconds": 0}, r"run: grace_seconds=0. That is no number of seconds. Write 1 or"),
        ({"grace_seconds": "1m"}, r"run: grace_seconds='1m'"),
    ],
)
def test_refusals_of_a_job_file(run: Any, message: str) -> None:
    with pytest.raises(JobError, match=message):
        small(run=run)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"env": {"XLA_DTENSOR_JOB": "x"}}, r"launcher sets that variable itself.*its own keys"),
        ({"env": {"XLA_DTENSOR_LOCAL_AXES": "x"}}, r"launcher sets that variable itself"),
        (
            {"env": {"JAX_COMPILATION_CACHE_DIR": "x"}, "compile_cache": "y"},
            r"sets that variable itself. Write it under run: compile_cache",
        ),
        ({"grace_seconds": "soon"}, r"grace_seconds='soon'. That is no number"),
        ({"command": None}, r"command=\(\). A command is a list of words"),
    ],
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"command": WORDS, "image": IMAGE, **changes}
    with pytest.raises(JobError, match=message):
        render(job("llama3_8b_v5e"), "jobset", **arguments)
