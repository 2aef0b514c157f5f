"""Give children turns: what is compared runs in several processes, one step after the other.

A machine that slows down for a while then slows down all of it. A child builds its steps, says
that it is ready, and trains only when it is told to: see `benchmarks.step_child`.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.child import ChildFailedError

__all__ = ["Child", "timed_in_turns"]

_ROOT = Path(__file__).resolve().parents[1]


class Child:
    """A process of `benchmarks.step_child`, ready for turns.

    Args:
        options: Its arguments.
        environment: Variables that it gets besides this process's.
        python: Runs it; this process's own where none is given.

    Raises:
        ChildFailedError: It ended before it was ready.
    """

    def __init__(
        self,
        options: Sequence[str],
        environment: Mapping[str, str],
        python: str = sys.executable,
    ) -> None:
        self._options = " ".join(options)
        self._process = subprocess.Popen(
            [python, "-m", "benchmarks.step_child", *options],
            cwd=_ROOT,
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.rows: dict[str, dict[str, Any]] = {}
        while "ready" not in (row := self._next()):
            self.rows[row["way"]] = row

    def turn(self, way: str, steps: int) -> list[float]:
        """Trains that many steps in one way; returns their seconds."""
        given: Any = self._process.stdin
        given.write(f"go {steps} {way}\n")
        given.flush()
        return self._next()["seconds"]

    def end(self) -> None:
        """Ends it."""
        given: Any = self._process.stdin
        given.close()
        self._process.wait(timeout=120)
        self.kill()

    def kill(self) -> None:
        """Ends it at once, and closes what led to it."""
        self._process.kill()
        self._process.wait()
        for end in (self._process.stdin, self._process.stdout):
            if end is not None:
                end.close()

    def _next(self) -> dict[str, Any]:
        printed: Any = self._process.stdout
        for line in printed:
            if line.startswith("{"):
                return json.loads(line)
        status = self._process.wait()
        self.kill()
        raise ChildFailedError(
            f"The child process `step_child {self._options}` ended with status={status}. What it "
            "printed stands above. Pass --processes with the others."
        )


def timed_in_turns(children: Sequence[Child], rounds: int, steps: int) -> list[dict[str, Any]]:
    """Times every way of every child in turns.

    Args:
        children: All ready.
        rounds: How many turns each way has.
        steps: Steps in one turn. The first of a turn is not counted: its caches are another
            process's.

    Returns:
        The children's rows, each with its steps' seconds: median, least and number, and the median
        of each turn, by which two ways are compared round by round.
    """
    turns: dict[str, list[list[float]]] = {way: [] for child in children for way in child.rows}
    for number in range(rounds):
        # Every other round runs backwards, so that nothing always follows the same.
        for child in children if number % 2 == 0 else reversed(children):
            for way in child.rows if number % 2 == 0 else reversed(child.rows):
                turns[way].append(child.turn(way, steps + 1)[1:])
    seconds = {way: [step for turn in of_way for step in turn] for way, of_way in turns.items()}
    return [
        {
            **row,
            "step_seconds": {
                "median": statistics.median(seconds[way]),
                "least": min(seconds[way]),
                "measurements": len(seconds[way]),
                "turns": [statistics.median(turn) for turn in turns[way]],
            },
        }
        for child in children
        for way, row in child.rows.items()
    ]
