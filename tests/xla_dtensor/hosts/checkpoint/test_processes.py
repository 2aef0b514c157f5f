"""Checkpoints of jobs over several processes: resharding, agreement, failure, and being killed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.hosts import HostError, Hosts
from xla_dtensor import checkpoint
from xla_dtensor.runtimes import Runtime

TASKS = "tests.xla_dtensor.host_tasks_checkpoint"
SHAPES = ((1, 8), (2, 4), (4, 2))


@pytest.mark.only_on("jax")
def test_between_one_process_and_two(
    hosts: Callable[..., Hosts], runtime: Runtime, tmp_path: Path
) -> None:
    from tests.xla_dtensor.host_tasks_checkpoint import load_drawn, save_drawn

    two, folder = hosts(2, 4), str(tmp_path)
    save_drawn(folder, cases=12, step=1)
    assert two.run(f"{TASKS}:load_drawn", folder=folder, cases=12, where="2", step=1) == [[], []]
    two.run(f"{TASKS}:save_drawn", folder=folder, cases=12, step=2, copied=True)
    assert load_drawn(folder, cases=12, where="1", step=2) == []
    assert two.run(f"{TASKS}:load_drawn", folder=folder, cases=12, where="3", step=2) == [[], []]
    files = [f.name.partition("_")[2] for f in sorted((tmp_path / "step_00000002").iterdir())]
    assert sorted(files) == ["", "", "00000.distcp", "00001.distcp"]
    assert checkpoint.verify(folder) == 2


@pytest.mark.only_on("jax")
@pytest.mark.thorough
def test_between_any_numbers_of_processes(hosts: Callable[..., Hosts], tmp_path: Path) -> None:
    cases, pairs = 36, 0
    for source in SHAPES:
        folder, step = str(tmp_path / str(source[0])), source[0]
        saved = f"{TASKS}:save_drawn"
        hosts(*source).run(saved, folder=folder, cases=cases, step=step, copied=step == 4)
        for target in SHAPES:
            wrong = hosts(*target).run(
                f"{TASKS}:load_drawn", folder=folder, cases=cases, where=f"{target}", step=step
            )
            assert wrong == [[]] * target[0]
            pairs += cases
    assert pairs >= 300


def test_each_process_gets_its_own_values(hosts: Callable[..., Hosts], tmp_path: Path) -> None:
    found = hosts(2, 4).run(f"{TASKS}:values_of_processes", folder=str(tmp_path))
    assert found == [[7, "process 0", [0] * 3], [7, "process 1", [1] * 3]]
    # One process cannot know which of them it is.
    state = {"same": 0, "own": ""}
    with pytest.raises(checkpoint.CheckpointError, match=r"Each of 2 processes saved another one"):
        checkpoint.load(tmp_path, state, only=["same", "own"])
    assert checkpoint.load(tmp_path, state, only=["same"]) == 1
    assert state["same"] == 7


@pytest.mark.parametrize("process", [0, 1])
@pytest.mark.parametrize("what", ["full disk", "other state", "in the background"])
def test_a_process_that_fails_fails_all(
    what: str, process: int, hosts: Callable[..., Hosts], tmp_path: Path
) -> None:
    two, folder = hosts(2, 4), str(tmp_path)
    two.run(f"{TASKS}:save_rows", folder=folder, mesh_shape=(2, 4), step=1)
    said = two.run(
        f"{TASKS}:fail_in_one", folder=folder, mesh_shape=(2, 4), process=process, what=what
    )
    if what == "other state":
        assert all("A state with 'y' was to be saved. Process 0 has" in text for text in said)
    else:
        file = rf"_0000{process}.distcp was to be written. The file system refused it: No space"
        assert all(file in text for text in said)
        assert said[1 - process].startswith(f"In process {process} of 2: The file {folder}")
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]
    assert two.run(f"{TASKS}:check_rows", folder=folder, mesh_shape=(4, 2)) == [1, 1]


def test_a_slow_writer_is_waited_for(hosts: Callable[..., Hosts], tmp_path: Path) -> None:
    two, folder = hosts(2, 4), str(tmp_path)
    two.run(f"{TASKS}:save_rows", folder=folder, mesh_shape=(8,), step=1, pause=0.01)
    assert two.run(f"{TASKS}:check_rows", folder=folder, mesh_shape=(2, 4)) == [1, 1]


@contextmanager
def group(processes: int, devices: int) -> Iterator[Hosts]:
    """A group of processes that are killed."""
    found = Hosts(processes, devices)
    try:
        yield found
    finally:
        found.close()


@pytest.mark.only_on("jax")
@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(6))
def test_jobs_that_are_killed(
    seed: int, hosts: Callable[..., Hosts], runtime: Runtime, tmp_path: Path
) -> None:
    """One process of the job, or all of them, at a random time of many saves."""
    draw = random.Random(seed)
    folder = str(tmp_path)
    victims = [0, 1] if seed % 3 == 2 else [seed % 3]
    with group(2, 4) as job:
        job.run(f"{TASKS}:save_rows", folder=folder, mesh_shape=(2, 4), step=1)

        def strike() -> None:
            time.sleep(draw.uniform(0.3, 2.5))
            for victim in victims:
                job.kill(victim)

        import threading

        striker = threading.Thread(target=strike)
        striker.start()
        with pytest.raises(HostError):
            job.run(
                f"{TASKS}:save_again_and_again",
                folder=folder,
                mesh_shape=(2, 4),
                first=2,
                timeout_seconds=6,
            )
        striker.join()
    found = checkpoint.steps(folder)
    assert found
    for step in found:
        assert checkpoint.verify(folder, step=step) == step
    # Another job, on another mesh, resumes with it, and clears what was left.
    two = hosts(2, 4)
    assert two.run(f"{TASKS}:check_rows", folder=folder, mesh_shape=(4, 2)) == [found[-1]] * 2
    last = found[-1] + 1
    two.run(f"{TASKS}:save_rows", folder=folder, mesh_shape=(4, 2), step=last)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"step_{step:08d}" for step in [*found, last]]
