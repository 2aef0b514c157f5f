"""``launch --local``: what processes are told, what is shown of them, and how a run ends."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from mesh_utils import JobConfig
from mesh_utils.launch import render
from mesh_utils.launch.local import local_plan
from mesh_utils.launch.variables import JOB, job_from
from tests.mesh_utils.launch_stand_ins import pod_of, variables_of
from xla_dtensor.cli.launch import add_launch
from xla_dtensor.cli.launch_local import LocalRun, local_environment

# The launcher forks, as a process without JAX; here others may have imported it.
pytestmark = pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")

ROOT = Path(__file__).resolve().parents[3]
FILE = """
name: tiny
accelerator: 2xv5e:4x4
axes: {dp: {dcn: -1}, fsdp: {ici: -1}, tp: {ici: 4}}
run: {command: [bash, -c, 'echo from the file'], env: {A: b c}, compile_cache: gs://x/y}
"""
HERE = {
    "JAX_PLATFORMS",
    "JAX_NUM_CPU_DEVICES",
    "JAX_COORDINATOR_ADDRESS",
    "JAX_NUM_PROCESSES",
    "JAX_PROCESS_ID",
    "JAX_PARTITION_INDEX",
    "XLA_DTENSOR_LOCAL_AXES",
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    found = tmp_path_factory.mktemp("local") / "job.yaml"
    found.write_text(FILE)
    return str(found)


def launch(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    add_launch(parser.add_subparsers())
    asked = parser.parse_args(["launch", *arguments])
    return asked.command(asked)


def test_what_runs_here_is_what_is_shipped(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command, and the variables of the JobSet; what is added says where it runs."""
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)  # the tests' own
    show = "import json, os; print('told', json.dumps(dict(os.environ)))"
    job = JobConfig.load(path)
    command = ["python", "-c", show]
    lines: list[str] = []
    run = LocalRun(job, local_plan(job, 4, 2), command, logs=tmp_path, show=lines.append)
    assert run.run() == 0
    (container,) = pod_of(render(job, "jobset", command=command, image="x"))[1]["containers"]
    shipped = variables_of(container)
    assert shipped.pop("JAX_COMPILATION_CACHE_DIR") == "gs://x/y"  # not on CPUs
    told = {
        int(line[1]): json.loads(line.partition("told ")[2]) for line in lines if "told" in line
    }
    assert sorted(told) == [0, 1, 2, 3]
    for process, variables in told.items():
        assert {name: variables[name] for name in shipped} == shipped
        assert variables["A"] == "b c"
        assert job_from(variables).axes == job.axes
        assert variables["JAX_PROCESS_ID"] == str(process)
        assert (variables["JAX_NUM_PROCESSES"], variables["JAX_NUM_CPU_DEVICES"]) == ("4", "2")
        assert variables["JAX_PARTITION_INDEX"] == str(process // 2)
        assert variables["XLA_DTENSOR_LOCAL_AXES"] == (
            "{dp: {dcn: 2}, fsdp: {ici: 2}, tp: {ici: 2}}"
        )
        assert "JAX_COMPILATION_CACHE_DIR" not in variables
        assert "device_count" not in variables.get("XLA_FLAGS", "")
    addresses = {variables["JAX_COORDINATOR_ADDRESS"] for variables in told.values()}
    assert len(addresses) == 1
    assert re.fullmatch(r"127\.0\.0\.1:\d+", addresses.pop())
    given = local_environment(job, local_plan(job, 4, 2), 0, "h:1", {})
    assert given.keys() == shipped.keys() | HERE


def test_lines_are_prefixed_and_kept(
    path: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = 'echo "out $JAX_PROCESS_ID"; echo "err $JAX_PROCESS_ID" >&2; printf last'
    logs = tmp_path / "logs"
    assert launch(path, "--local", "2", "--logs", str(logs), "--command", "bash", "-c", script) == 0
    shown = capfd.readouterr()
    expected = [f"[{n}] {word}" for n in "01" for word in (f"err {n}", "last", f"out {n}")]
    assert sorted(shown.out.splitlines()) == sorted(expected)
    assert (logs / "process_1.log").read_text() == "out 1\nerr 1\nlast\n"
    assert "job tiny: 2 processes x 2 CPU devices, dp=2 (2 over DCN) fsdp=2 tp=1" in shown.err
    assert re.search(r"job tiny ended after .* s; logs are in ", shown.err)


def test_command_of_the_job_file(
    path: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch(path, "--local", "1", "--logs", str(tmp_path)) == 0
    assert capfd.readouterr().out == "[0] from the file\n"


def test_one_fails_and_all_end(
    path: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = '[ "$JAX_PROCESS_ID" = 2 ] && { echo why; exit 7; }; sleep 60'
    started = time.monotonic()
    assert (
        launch(path, "--local", "4", "--logs", str(tmp_path), "--command", "bash", "-c", script)
        == 7
    )
    assert time.monotonic() - started < 30
    said = capfd.readouterr().err
    assert re.search(
        r"process 2 ended with status 7 after .*, and the others were ended; logs", said
    )
    assert "its last lines:\n    why" in said


def outcome(path: str, logs: Path, script: str, **changes: object) -> tuple[int, LocalRun]:
    job = JobConfig.load(path)
    given: dict[str, object] = {"logs": logs, "show": lambda line: None, **changes}
    run = LocalRun(job, local_plan(job, 2, 1), ["bash", "-c", script], **given)  # pyright: ignore
    return run.run(), run


def test_one_is_killed(path: str, tmp_path: Path) -> None:
    status, run = outcome(path, tmp_path, '[ "$JAX_PROCESS_ID" = 1 ] && kill -9 $$; sleep 60')
    assert status == 128 + 9
    assert run.reason.startswith("process 1 was killed by SIGKILL after ")


def test_processes_that_do_not_end_are_killed(path: str, tmp_path: Path) -> None:
    """JAX catches SIGTERM, and a process may wait for one that has gone."""
    script = "trap '' TERM; [ $JAX_PROCESS_ID = 0 ] && exit 3; while true; do sleep 0.1; done"
    started = time.monotonic()
    assert outcome(path, tmp_path, script)[0] == 3
    assert time.monotonic() - started < 30


@pytest.mark.parametrize(("first", "second", "status"), [(75, 75, 75), (75, 0, 75), (75, 4, 4)])
def test_told_to_end_and_saved(
    path: str, tmp_path: Path, first: int, second: int, status: int
) -> None:
    script = f"[ $JAX_PROCESS_ID = 0 ] && exit {first}; sleep 0.5; exit {second}"
    found, run = outcome(path, tmp_path, script)
    assert found == status
    assert ("start it again to go on" in run.reason) == (status == 75)


def test_timeout(path: str, tmp_path: Path) -> None:
    status, run = outcome(path, tmp_path, "sleep 60", timeout_seconds=0.5)
    assert status == 124
    assert run.reason.startswith("took longer than 0.5 s and was ended; logs are in ")


def test_a_command_that_is_not_there(
    path: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert (
        launch(path, "--local", "2", "--logs", str(tmp_path), "--command", "no-such-tool", "x") == 2
    )
    assert "'no-such-tool' was asked for. The system says: No such file" in capfd.readouterr().err


# signals


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(path: str, tmp_path: Path) -> Iterator[Start]:
    """Starts the launcher as a process of its own, and waits until the job's processes run."""
    started: list[subprocess.Popen[str]] = []

    def begin(script: str, *arguments: str) -> subprocess.Popen[str]:
        words = [sys.executable, "-u", "-m", "xla_dtensor", "launch", path, "--local", "2"]
        words += ["--logs", str(tmp_path), *arguments, "--command", "bash", "-c", script]
        child = subprocess.Popen(
            words,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            start_new_session=True,
        )
        started.append(child)
        assert child.stdout is not None
        for _ in range(2):
            assert "ready" in child.stdout.readline()
        return child

    yield begin
    for child in started:
        child.kill()
        child.communicate()


LOOP = "echo ready $$; while true; do sleep 0.1; done"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT"])
def test_signals_are_passed_on(start: Start, name: str) -> None:
    word = name.removeprefix("SIG")
    child = start(f"trap 'echo got {word}; exit 75' {word}; {LOOP}")
    child.send_signal(signal.Signals[name])
    out, err = child.communicate(timeout=60)
    assert child.returncode == 75
    assert sorted(out.splitlines()) == [f"[0] got {word}", f"[1] got {word}"]
    assert "was told to end, and has saved" in err


def test_who_does_not_end_is_killed_after_the_grace(start: Start) -> None:
    child = start(f"trap '' TERM; {LOOP}", "--grace", "0.5")
    child.terminate()
    _, err = child.communicate(timeout=60)
    assert child.returncode == 128 + signal.SIGTERM
    assert "got SIGTERM: process 0 was killed by SIGKILL, process 1 was killed by SIGKILL" in err


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux can tell children")
def test_a_killed_launcher_leaves_no_process(path: str, tmp_path: Path) -> None:
    words = [sys.executable, "-u", "-m", "xla_dtensor", "launch", path, "--local", "2"]
    words += ["--logs", str(tmp_path), "--command", "bash", "-c", LOOP]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT) as child:
        assert child.stdout is not None
        numbers = [int(child.stdout.readline().split()[-1]) for _ in range(2)]
        child.kill()
    deadline = time.monotonic() + 30
    while any(map(runs, numbers)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def runs(number: int) -> bool:
    try:
        state = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


# printing, refusing


def test_print(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(path, "--local", "2", "--devices", "4", "--print") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    for index, line in enumerate(lines):
        told = subprocess.run(
            ["bash", "-c", line.replace("bash -c 'echo from the file'", "env -0")],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split("\0")
        assert f"JAX_PROCESS_ID={index}" in told
        assert "XLA_DTENSOR_LOCAL_AXES={dp: {dcn: 2}, fsdp: {ici: 2}, tp: {ici: 2}}" in told
        assert job_from(dict(each.split("=", 1) for each in told if each.startswith(JOB)))


def test_print_is_what_launch_does_without_local(
    path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(path, "--image", "x", "--print") == 0
    printed = capsys.readouterr()
    assert launch(path, "--image", "x") == 0
    assert capsys.readouterr() == printed
    assert yaml.safe_load(printed.out)["kind"] == "JobSet"
    (container,) = pod_of(printed.out)[1]["containers"]
    assert container["command"] == ["bash", "-c", "echo from the file"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--local", "0"], r"error: Job 'tiny' was to run here on 0 processes of 2 devices"),
        (["--local", "2", "--with", "xpk"], r"error: --local was given with --with, --image or"),
        (["--local", "2", "--axes", "{dp: 2}"], r"error: Job 'tiny' was to run.*with axis dp=2"),
        (["--local", "2", "--axes", "{dp: "], r"error: Job file '--axes' was read. It is no YAML"),
        (["--local", "2", "--env", "JAX_COMPILATION_CACHE_DIR=x"], r"launcher sets that variable"),
        (["--devices", "2"], r"error: --devices 2 was given without --local"),
        (["--timeout", "0"], r"error: --timeout 0.0 was given without --local"),
    ],
)
def test_refusals(
    path: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(path, *arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert re.search(message, shown.err)


def test_it_needs_no_tensor_libraries(path: str, tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from xla_dtensor.cli import main\n"
        f"status = main(['launch', {path!r}, '--local', '1', '--logs', {str(tmp_path)!r}])\n"
        "sys.exit(sorted({'torch', 'jax', 'torch_xla'} & set(sys.modules)) or status)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=os.environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "[0] from the file\n"), done.stderr
