"""Kill a job, and see it go on: the main example on several processes of this machine.

    python -m examples.train_job_demo        # or: make demo-hosts

The job of examples/jobs/language_model.yaml runs four times, as `python -m xla_dtensor launch
--local` runs it:

1. from start to end, for comparison, on 4 processes of 2 devices;
2. again, until one of the processes is killed in the middle;
3. it goes on from the last checkpoint, on the same mesh, until SIGTERM tells it to end;
4. it goes on from there, on 2 processes of 4 devices and another mesh, to the end.

Compared are the exit statuses, the states that were loaded with those that were saved, bit by bit,
and the losses with those of the first run. The exit status is 1 if any check fails.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from mesh_utils import JobConfig
from mesh_utils.launch.local import LocalPlan, local_plan
from xla_dtensor.cli.launch_local import LocalRun

JOB = Path(__file__).parent / "jobs" / "language_model.yaml"
OTHER_AXES = {"dp": {}, "fsdp": {"ici": 2}, "tp": {"ici": 4}}
"""A mesh that the launcher would not choose: one slice, more tensor and less data parallelism."""

LOSS_TOLERANCE = 1e-5
_STEP = re.compile(r"\[0\] step (\d+):")


@dataclass(frozen=True)
class Outcome:
    """What one run did.

    Args:
        title: What it was.
        plan: Its processes and axes.
        status: Its exit status.
        reason: The launcher's words for it.
        losses: By step.
        saved: Checksums of states, by step.
        loaded: The step and the checksum of the state that it began with; None for a new one.
    """

    title: str
    plan: LocalPlan
    status: int
    reason: str
    losses: dict[int, float]
    saved: dict[int, str]
    loaded: tuple[int, str] | None

    def row(self) -> tuple[str, str, str, str, str]:
        """Return its row of the table."""
        steps = f"{min(self.losses)}-{max(self.losses)}" if self.losses else "none"
        shape = f"{self.plan.processes} x {self.plan.devices}"
        return self.title, shape, " ".join(map(str, self.plan.axes)), steps, str(self.status)


class Runs:
    """Runs a job again and again, in folders of one place.

    Args:
        job: The job.
        place: Where checkpoints, logs and records go.
        words: Words to add to the job's command.
    """

    def __init__(self, job: JobConfig, place: Path, words: Sequence[str]) -> None:
        self.job, self.place, self.command = job, place, (*job.run.command, *words)

    def run(
        self,
        title: str,
        plan: LocalPlan,
        folder: str,
        when: dict[int, Callable[[LocalRun], None]] | None = None,
    ) -> Outcome:
        """Run the job once; `when` says what to do to it after a step."""
        name = re.sub(r"\W+", "_", title)
        record = self.place / f"{name}.jsonl"
        left = dict(when or {})

        def show(line: str) -> None:
            found = _STEP.match(line)
            if found or not line.startswith("["):
                print(f"  {line}", flush=True)
            if found and int(found[1]) in left:
                left.pop(int(found[1]))(run)

        run = LocalRun(
            self.job,
            plan,
            self.command,
            logs=self.place / f"{name}_logs",
            env={"TRAIN_FOLDER": str(self.place / folder), "TRAIN_RECORD": str(record)},
            timeout_seconds=900,
            show=show,
        )
        sizes = " ".join(map(str, plan.axes))
        print(f"\n{title}: {plan.processes} processes x {plan.devices} devices, {sizes}")
        status = run.run()
        print(f"  exit status {status}: the job {run.reason}", flush=True)
        return Outcome(title, plan, status, run.reason, *_read(record))


def _read(record: Path) -> tuple[dict[int, float], dict[int, str], tuple[int, str] | None]:
    text = record.read_text(encoding="utf-8") if record.exists() else ""
    lines: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]
    losses = {line["step"]: line["loss"] for line in lines if line["event"] == "step"}
    saved = {line["step"]: line["state"] for line in lines if line["event"] == "saved"}
    loaded = [(line["step"], line["state"]) for line in lines if line["event"] == "loaded"]
    return losses, saved, loaded[0] if loaded else None


class Checks:
    """What was found, as lines of PASS and FAIL."""

    def __init__(self) -> None:
        self.failed = 0

    def add(self, is_well: bool, text: str) -> None:
        """Print a line."""
        self.failed += not is_well
        print(f"{'PASS' if is_well else 'FAIL'} {text}")


def check(whole: Outcome, killed: Outcome, ended: Outcome, moved: Outcome, *, at: int) -> bool:
    """Compare the four runs, say what was found, and return whether all is well."""
    checks = Checks()
    checks.add(whole.status == 0, "the job runs to its end and exits with 0")
    checks.add(
        killed.status == 128 + signal.SIGKILL and killed.reason.startswith("process 1 was killed"),
        f"one process is killed: the others are ended, status {killed.status} says so",
    )
    checks.add(
        ended.loaded is not None and ended.loaded[1] == killed.saved.get(ended.loaded[0]),
        "same mesh: the state that is loaded is the one that was saved, bit by bit",
    )
    checks.add(
        bool(ended.losses) and _difference(ended, whole) == 0,
        f"same mesh: {len(ended.losses)} losses equal those of the whole run, bit by bit",
    )
    last = max(ended.losses, default=0)
    checks.add(
        ended.status == 75 and last in ended.saved and at <= last,
        f"SIGTERM after step {at}: all processes save after step {last} and exit with 75",
    )
    checks.add(
        moved.loaded is not None and moved.loaded == (last, ended.saved.get(last)),
        "another mesh: the state that is loaded is the one that was saved, bit by bit",
    )
    steps = sorted(moved.losses)
    checks.add(
        moved.status == 0 and steps == list(range(last + 1, max(whole.losses) + 1)),
        f"another mesh: the job goes on at the next batch, after step {last}",
    )
    difference = _difference(moved, whole)
    checks.add(
        difference <= LOSS_TOLERANCE,
        f"another mesh: {len(steps)} losses equal those of the whole run: max |difference| = "
        f"{difference:.1e} (limit {LOSS_TOLERANCE:.0e})",
    )
    return not checks.failed


def _difference(run: Outcome, whole: Outcome) -> float:
    """The largest difference of a loss; infinite without any, and for what is no number."""
    found = [abs(loss - whole.losses.get(step, math.inf)) for step, loss in run.losses.items()]
    return max((math.inf if math.isnan(each) else each for each in found), default=math.inf)


def show_table(runs: Sequence[Outcome]) -> None:
    """Print a row for each run."""
    rows = [("run", "processes", "axes", "steps", "status"), *(run.row() for run in runs)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    print()
    for row in rows:
        print(
            "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        )
    print()


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--kill-after", type=int, default=9, metavar="STEP")
    parser.add_argument("--end-after", type=int, default=14, metavar="STEP")
    parser.add_argument("--keep", metavar="FOLDER", help="keep checkpoints and logs, there")
    parser.add_argument(
        "words", nargs="*", help="more words for the job's command, after --, such as -- --dim 32"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job four times and compare; return the exit status."""
    options = parse_arguments(arguments)
    os.chdir(Path(__file__).parents[1])  # the job's command names a module of this repository
    place = Path(options.keep).absolute() if options.keep else Path(mkdtemp(prefix="demo-hosts-"))
    job = JobConfig.load(JOB)
    first, second = local_plan(job, 4, 2), local_plan(job, 2, 4, OTHER_AXES)
    runs = Runs(job, place, options.words)
    # The first run of those that are compared keeps its checkpoints in a folder of its own.
    kill = {options.kill_after: lambda run: run.send(signal.SIGKILL, process=1)}
    end = {options.end_after: lambda run: run.send(signal.SIGTERM)}
    whole = runs.run("the whole run", first, "whole")
    killed = runs.run("killed", first, "job", kill)
    ended = runs.run("resumed, told to end", first, "job", end)
    moved = runs.run("resumed elsewhere", second, "job")
    show_table([whole, killed, ended, moved])
    is_well = check(whole, killed, ended, moved, at=options.end_after)
    if not options.keep and is_well:
        shutil.rmtree(place)
    else:
        print(f"checkpoints, logs and records are in {place}", file=sys.stderr)
    return 0 if is_well else 1


if __name__ == "__main__":
    raise SystemExit(main())
