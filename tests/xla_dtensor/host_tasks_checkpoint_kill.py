"""Kill points of checkpoints, without devices: run in a process of its own, which forks.

    python -m tests.xla_dtensor.host_tasks_checkpoint_kill FOLDER TRIALS SEED

Every trial begins with a folder of whole checkpoints, does something to a save or a load, and then
demands: the checkpoints from before are there, all that are there load bit-equal, every refusal
names a file, and the next save succeeds and leaves nothing behind. Prints how often what happened,
as JSON.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.xla_dtensor.host_tasks_checkpoint_points import (
    FullDisk,
    Points,
    PowerCut,
    PowerLoss,
    slow,
)
from xla_dtensor import checkpoint
from xla_dtensor.errors import CheckpointError

__all__ = ["KINDS", "state_of", "trial"]

_KEEP = 3


def state_of(step: int) -> dict[str, Any]:
    """A state whose values tell the step."""
    return {
        "w": torch.arange(900.0).reshape(30, 30) + step,
        "half": torch.arange(70).bfloat16() * step,
        "inner": {"n": torch.tensor(step), "empty": torch.empty(0, 3)},
        "epoch": step,
        "names": ["a", {"b": step}],
    }


def blank() -> dict[str, Any]:
    """A state of the same form with other values."""
    state = state_of(-7)
    return {**state, "epoch": None, "names": None}


def check(folder: Path, at_least: list[int]) -> list[int]:
    """Load every checkpoint and compare it; those named have to be there."""
    found = checkpoint.steps(folder)
    assert set(at_least) <= set(found), (at_least, found, os.listdir(folder))
    for step in found:
        state, expected = blank(), state_of(step)
        assert checkpoint.load(folder, state, step=step, rng=False) == step
        for name in ("w", "half"):
            assert torch.equal(state[name], expected[name]), (step, name)
        assert torch.equal(state["inner"]["n"], expected["inner"]["n"])
        assert (state["epoch"], state["names"]) == (step, expected["names"])
    return found


def save(folder: Path, step: int, background: bool) -> None:
    """Save, perhaps in the background."""
    if background:
        checkpoint.async_save(folder, state_of(step), step=step, keep=_KEEP).wait()
    else:
        checkpoint.save(folder, state_of(step), step=step, keep=_KEEP)


def in_child(work: Callable[[], None], then: Callable[[int], None] = lambda _: None) -> int:
    """Do something in a forked process and return its status; `then` runs beside it."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    then(child)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def drawn_point(folder: Path, work: Callable[[Path], object], draw: random.Random) -> int:
    """A point of some work, found out on a copy of the folder: each kind is as likely as others."""
    copy = folder.with_name("copy")
    shutil.copytree(folder, copy)
    with Points() as points:
        work(copy)
    shutil.rmtree(copy)
    kind = draw.choice(sorted(set(points.seen)))
    return draw.choice([i for i, seen in enumerate(points.seen) if seen == kind])


def saving(folder: Path, draw: random.Random) -> tuple[int, Callable[[Path], None]]:
    """A save of mostly a new step, sometimes of the newest once more; half in the background."""
    step = (checkpoint.latest(folder) or 0) + draw.choice((0, 1, 1, 1))
    background = draw.random() < 0.5
    return step, lambda where: save(where, step, background)


def die(what: str, file: Any, data: Any) -> None:
    """An `act`: SIGKILL, in the middle of a write."""
    if what == "write":
        file.write(memoryview(data)[: len(data) // 2])
        file.flush()
    os.kill(os.getpid(), signal.SIGKILL)


# ---------------------------------------------------------------------- the trials


def killed_saving(folder: Path, draw: random.Random) -> str:
    """SIGKILL before some operation of a save, in this thread or in the background."""
    before = checkpoint.steps(folder)
    new, work = saving(folder, draw)
    at = drawn_point(folder, work, draw)

    def dying() -> None:
        with Points(at=at, act=die):
            work(folder)

    assert in_child(dying) == -signal.SIGKILL
    found = check(folder, before[-_KEEP + 1 :])
    return "saved" if new in found else "not saved"


def killed_loading(folder: Path, draw: random.Random) -> str:
    """SIGKILL in the middle of a load."""
    before = checkpoint.steps(folder)
    at = drawn_point(folder, lambda where: checkpoint.load(where, blank()), draw)

    def dying() -> None:
        with Points(at=at, act=die):
            checkpoint.load(folder, blank())

    assert in_child(dying) == -signal.SIGKILL
    assert check(folder, before) == before
    return "untouched"


def power_cut(folder: Path, draw: random.Random) -> str:
    """The machine goes off, and what was not synced is lost."""
    before = checkpoint.steps(folder)
    new, work = saving(folder, draw)
    at = drawn_point(folder, work, draw)
    cut = PowerCut(folder, draw)
    try:
        with Points(at=at, act=cut, watch=cut.watch):
            work(folder)
        raise AssertionError("the power did not go")
    except PowerLoss:
        cut.lose()
    found = check(folder, before[-_KEEP + 1 :])
    return "saved" if new in found else "not saved"


def full_disk(folder: Path, draw: random.Random) -> str:
    """From some operation on nothing more can be written."""
    before = checkpoint.steps(folder)
    new, work = saving(folder, draw)
    full = FullDisk(draw)
    at = drawn_point(folder, work, draw)
    refused = ""
    try:
        with Points(at=at, act=full):
            work(folder)
    except CheckpointError as error:
        refused = str(error)
    assert not refused or (str(folder) in refused and "No space left" in refused), refused
    found = check(folder, before[-_KEEP + 1 :])
    # What could not be made durable may be there, but then it is whole: check() has loaded it.
    if not full.refused:
        assert not refused
    if not refused:
        assert new in found
    elif new not in found:
        assert not [n for n in os.listdir(folder) if "partial" in n], os.listdir(folder)
    return "refused" if refused else "saved"


def damaged(folder: Path, draw: random.Random) -> str:
    """A file of the newest checkpoint is truncated, has a bit flipped, or is missing."""
    *before, last = checkpoint.steps(folder)
    files = sorted((folder / f"step_{last:08d}").iterdir())
    file = draw.choice([f for f in files if f.name != ".metadata"])
    how = draw.choice(("truncated", "flipped", "missing"))
    content = bytearray(file.read_bytes())
    if how == "truncated":
        file.write_bytes(content[: draw.randrange(len(content))])
    elif how == "flipped":
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        file.write_bytes(content)
    else:
        file.unlink()
    state, expected, refused = blank(), state_of(last), ""
    try:
        found = checkpoint.load(folder, state, rng=False)
        outcome = "loaded, as the byte is not used"
        if file.name == "manifest.json" and how == "missing":
            outcome = "no checkpoint"
            expected = state_of(found)
            assert found == (before or [None])[-1]
        else:
            assert (found, how) == (last, "flipped")
        assert torch.equal(state["w"], expected["w"])
        assert torch.equal(state["half"], expected["half"])
        assert state["names"] == expected["names"]
    except CheckpointError as error:
        outcome = f"{how}, refused"
        refused = str(error)
    assert not refused or str(file) in refused or not before, refused
    for step in before:
        assert checkpoint.load(folder, blank(), step=step) == step
    shutil.rmtree(folder / f"step_{last:08d}")
    return outcome


def slow_writer(folder: Path, draw: random.Random) -> str:
    """While a slow process writes, and is perhaps killed, another one looks and loads."""
    before = checkpoint.steps(folder)
    new, work = saving(folder, draw)

    def writing() -> None:
        with Points(at=0, act=slow(0.001)):
            work(folder)

    def beside(child: int) -> None:
        stop, refused = time.monotonic() + draw.uniform(0, 0.15), ""
        while time.monotonic() < stop:
            found = checkpoint.latest(folder)
            state = blank()
            try:
                step = checkpoint.load(folder, state, step=found, only=["w"], rng=False)
            except CheckpointError as error:  # removed or replaced while it was read
                refused = str(error)
                continue
            assert torch.equal(state["w"], state_of(step)["w"])
        os.kill(child, signal.SIGKILL)
        assert not refused or str(folder) in refused, refused

    in_child(writing, beside)
    found = check(folder, before[-_KEEP + 1 :])
    return "saved" if new in found else "not saved"


KINDS = {
    each.__name__: each
    for each in (killed_saving, killed_loading, power_cut, full_disk, damaged, slow_writer)
}


def trial(folder: Path, draw: random.Random, kind: str) -> str:
    """Make one trial, save once more, and return what happened."""
    outcome = KINDS[kind](folder, draw)
    last = checkpoint.latest(folder) or 0
    save(folder, last + 1, background=False)
    found = check(folder, [last + 1])
    names = sorted(os.listdir(folder))
    assert names == [f"step_{s:08d}" for s in found], names
    assert len(found) <= _KEEP
    return outcome


def main(root: Path, trials: int, seed: int) -> None:
    """Make all trials."""
    torch.set_num_threads(1)
    folder = root / "run"
    for step in (1, 2, 3):
        save(folder, step, background=False)
    outcomes: Counter[str] = Counter()
    for number in range(trials):
        draw = random.Random(f"{seed} {number}")
        kind = list(KINDS)[number % len(KINDS)]
        try:
            outcomes[f"{kind}: {trial(folder, draw, kind)}"] += 1
        except BaseException as error:
            raise AssertionError(f"trial {number} of seed={seed}, {kind}") from error
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
