"""Starts children until every op is noted; an op that ends its process is noted as a crash."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.op_sweep.judge import Row

__all__ = ["Sweep", "read_notes"]

_ROOT = Path(__file__).resolve().parents[2]
_POLL_SECONDS = 0.5


def read_notes(path: Path) -> tuple[dict[str, dict[str, Any]], str | None]:
    """Return the rows noted so far, by op, and the op that was started last and has no row."""
    rows: dict[str, dict[str, Any]] = {}
    started: str | None = None
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        noted = json.loads(line)
        if "started" in noted:
            started = noted["started"]
        else:
            rows[noted["op"]] = noted
            started = None
    return rows, started


@dataclass(frozen=True)
class Sweep:
    """What is swept, and where it is noted.

    Args:
        runtime: "jax" or "torch_xla".
        seed: Decides inputs and placements.
        samples: Sample inputs per op.
        notes: The file of rows, one JSON object per line; ops that it has are not run again.
        chunk: Ops per child process.
        op_seconds: How long one op may take.
        command: What starts a child.
    """

    runtime: str
    seed: int
    samples: int
    notes: Path
    chunk: int = 40
    op_seconds: float = 240.0
    command: tuple[str, ...] = (sys.executable, "-m", "tools.op_sweep.child")

    def run(self, ops: Sequence[str], until: float = float("inf")) -> Mapping[str, dict[str, Any]]:
        """Sweep these ops.

        Args:
            ops: Full names in ``op_db``.
            until: ``time.monotonic()`` after which no further op is started.

        Returns:
            The rows of all ops noted in the file.
        """
        while True:
            rows, _ = read_notes(self.notes)
            left = [op for op in ops if op not in rows]
            if not left or time.monotonic() > until:
                return rows
            self._run_child(left[: self.chunk], until)

    def _run_child(self, ops: Sequence[str], until: float) -> None:
        command = [
            *self.command,
            "--runtime",
            self.runtime,
            "--ops",
            ",".join(ops),
            "--seed",
            str(self.seed),
        ]
        command += ["--samples", str(self.samples), "--notes", str(self.notes)]
        self.notes.parent.mkdir(parents=True, exist_ok=True)
        log = self.notes.with_suffix(".log")
        with (
            log.open("a", encoding="utf-8") as output,
            subprocess.Popen(command, cwd=_ROOT, stdout=output, stderr=output) as child,
        ):
            ended = self._watch(child, until)
        rows, started = read_notes(self.notes)
        if ended == "stopped":
            self._note({"started": None})
            return
        if started is None and not any(op in rows for op in ops):
            raise RuntimeError(
                f"The child process of the op sweep ended with status={child.returncode} before "
                f"its first op. Its output stands at the end of {log}. Run it alone: "
                f"{' '.join(command)}"
            )
        if started is not None:
            note = f"{ended} (status {child.returncode})"
            row = Row(started, self.seed, self.samples, {ended: 1}, {}, note)
            self._note(row.as_json())

    def _note(self, what: dict[str, Any]) -> None:
        with self.notes.open("a", encoding="utf-8") as notes:
            notes.write(json.dumps(what) + "\n")

    def _watch(self, child: subprocess.Popen[Any], until: float) -> str:
        """Wait for a child; return "crash" where it ended itself, "hang" or "stopped" otherwise."""
        seen, since = -1, time.monotonic()
        while child.poll() is None:
            time.sleep(_POLL_SECONDS)
            size = self.notes.stat().st_size if self.notes.exists() else 0
            if size != seen:
                seen, since = size, time.monotonic()
            if time.monotonic() > until or time.monotonic() - since > self.op_seconds:
                ended = "stopped" if time.monotonic() > until else "hang"
                child.kill()
                return ended
        return "crash"
