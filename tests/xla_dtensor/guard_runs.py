"""Judges guards on drawn and fixed cases: what is right, refused, wrong or traced needlessly.

    python -m tests.xla_dtensor.guard_runs --seeds 0:500
    python -m tests.xla_dtensor.guard_runs --seeds 0:500 --devices 2 --notes build/guards.jsonl
    python -m tests.xla_dtensor.guard_runs --fixed --texts

Every call after a change has one verdict: "right", "refused" (an error of ours), "error" (any
other), "wrong" (not what plain PyTorch gives) or "needless" (right, traced anew for what nobody
reads). Refusals, errors and wrong ones end a case. ``guard_cases.drawn(seed)`` draws a case again.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import gc
import importlib
import json
import logging
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tests.xla_dtensor.fixed_guard_cases import FIXED, FixedCase, fixed
from tests.xla_dtensor.guard_cases import Case, Change, drawn

__all__ = [
    "VERDICTS",
    "Verdict",
    "judge",
    "judge_on_mesh",
    "main",
    "of_name",
    "of_seed",
    "only_new_objects_searched",
    "worst",
]

VERDICTS = ("right", "refused", "error", "wrong", "needless")
_FROM_THE_WORST = ("wrong", "error", "refused", "needless", "right")
ENDS = ("refused", "error", "wrong")
MOST_SEEDS_SHOWN = 5

Put = Callable[[torch.Tensor], torch.Tensor]
Maker = Callable[[Put], Case | FixedCase]


@dataclass(frozen=True)
class Verdict:
    """What came of a call.

    Attributes:
        kind: One of `VERDICTS`.
        case: The case's name.
        number: Of the change before the call; -1 for the first call.
        owner: The kind of owner that changed.
        read: The form in which the step reads it.
        form: The form of the change.
        is_read: Whether the change alters what is read.
        traces: How often this call traced.
        size: How long the case's text is.
        note: The error's text, or the numbers.
    """

    kind: str
    case: str
    number: int
    owner: str
    read: str
    form: str
    is_read: bool | None
    traces: int
    size: int
    note: str = ""


def judge(make: Maker, put: Put, compiled: Callable[[Any], Any]) -> list[Verdict]:
    """Judge one case, whose judge is the same step on plain tensors.

    Args:
        make: Makes the case, with state of its own, for what places its tensors.
        put: Places a tensor where the compiled step wants it.
        compiled: Compiles a step; it must have `stats()`, with "traces".
    """
    batch = torch.tensor([1.0, 2.0, -1.0, 0.5])
    plain = make(lambda tensor: tensor)
    expected = [plain.step(batch).detach().clone()]
    for number in range(len(plain.changes)):
        plain.change(number)
        expected.append(plain.step(batch).detach().clone())
    case, verdicts, traces = make(put), list[Verdict](), 0
    step, mesh_batch = compiled(case.step), put(batch)
    first = Change("first call", case.owners[-1], "-", True, "")
    for number, change in enumerate((first, *case.changes), -1):
        if number >= 0:
            case.change(number)
        kind, note = _called(step, mesh_batch, expected[number + 1])
        new_traces = step.stats()["traces"] - traces
        traces += new_traces
        if kind == "right" and new_traces and change.is_read is False:
            kind = "needless"
            note = str(step.stats()["reasons"][-1:])
        about = (change.owner, change.read, change.form, change.is_read)
        size = len(case.source)
        verdicts.append(Verdict(kind, case.name, number, *about, new_traces, size, note))
        if kind in ENDS:
            break
    plain.close()
    case.close()
    return verdicts


def _called(step: Any, batch: torch.Tensor, expected: torch.Tensor) -> tuple[str, str]:
    """Call a step; return the kind of verdict and a note."""
    from xla_dtensor.errors import CompileError

    try:
        found = step(batch).detach().cpu()
    except CompileError as error:
        return "refused", str(error)
    except Exception as error:
        return "error", f"{type(error).__name__}: {error}"
    is_right = torch.allclose(found, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    return ("right", "") if is_right else ("wrong", f"{found.tolist()} for {expected.tolist()}")


def judge_on_mesh(make: Maker, mesh: Any) -> list[Verdict]:
    """Judge xla_dtensor's own guards.

    Args:
        make: Makes the case.
        mesh: A mesh; tensors are replicated on it.
    """
    import xla_dtensor as xd

    return judge(make, lambda tensor: xd.distribute_tensor(tensor, mesh), xd.compile)


@contextlib.contextmanager
def only_new_objects_searched() -> Iterator[None]:
    """Let a trace search only what is made later: to search all is most of a small step's time."""
    live_objects: Any = importlib.import_module("xla_dtensor.runtimes.live_objects")
    new_garbage: Any = importlib.import_module("xla_dtensor.runtimes.new_garbage")
    before = live_objects._all_objects
    gc.collect()
    gc.freeze()
    new_garbage._set_aside = True  # what is old stays aside, whoever asks
    live_objects._all_objects = gc.get_objects
    try:
        yield
    finally:
        live_objects._all_objects = before
        new_garbage.show_all_objects()


def of_seed(seed: int) -> Maker:
    """What makes a drawn case; its tensors are on the host."""
    return lambda put: drawn(seed)


def of_name(name: str) -> Maker:
    """What makes a fixed case."""
    return lambda put: fixed(name, put)


def worst(verdicts: Iterable[Verdict]) -> str:
    """The verdict on a case: what is worst of its calls."""
    kinds = {verdict.kind for verdict in verdicts}
    return next(kind for kind in _FROM_THE_WORST if kind in kinds)


# ----------------------------------------------------------------------- tables


def table(verdicts: Iterable[Verdict], by: str) -> str:
    """Count verdicts by one of their attributes."""
    rows: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for verdict in verdicts:
        rows[getattr(verdict, by)][verdict.kind] += 1
    lines = [f"{by:44}" + "".join(f"{kind:>10}" for kind in VERDICTS)]
    worst = sorted(rows, key=lambda row: [-rows[row][kind] for kind in reversed(VERDICTS)])
    for row in worst:
        lines.append(
            f"{row[:43]:44}" + "".join(f"{rows[row][kind] or '.':>10}" for kind in VERDICTS)
        )
    return "\n".join(lines)


def found_kinds(verdicts: Iterable[Verdict], kind: str) -> str:
    """List the distinct kinds of one verdict, each with its smallest seeds."""
    rows: dict[tuple[str, ...], list[Verdict]] = collections.defaultdict(list)
    for verdict in verdicts:
        if verdict.kind == kind:
            text = short(verdict.note) if kind in ("refused", "error") else verdict.form
            rows[verdict.owner, verdict.read, text].append(verdict)
    lines: list[str] = []
    for key, group in sorted(rows.items(), key=lambda row: -len(row[1])):
        group.sort(key=lambda verdict: verdict.size)
        seeds = ", ".join(f"{v.case}.{v.number}" for v in group[:MOST_SEEDS_SHOWN])
        lines.append(f"{len(group):5} {' | '.join(key)}: {seeds}")
    return "\n".join(lines)


def short(text: str) -> str:
    """A message without what differs from case to case."""
    return re.sub(r"guard_case_\w+|0x[0-9a-f]+|\d+", "N", text.partition(". ")[0])[:150]


def report(verdicts: Sequence[Verdict], num_cases: int, seconds: float) -> str:
    """All tables, and the smallest seeds of what is not right."""
    counts = collections.Counter(verdict.kind for verdict in verdicts)
    needed = sum(v.traces for v in verdicts if v.is_read)
    spared = sum(1 for v in verdicts if v.is_read is None and v.traces and v.number >= 0)
    parts = [
        f"{num_cases} cases, {len(verdicts)} calls in {seconds:.0f} s: "
        + ", ".join(f"{counts[kind]} {kind}" for kind in VERDICTS),
        f"traces after a change that is read: {needed}; where either will do: {spared}",
    ]
    parts += [table(verdicts, by) for by in ("owner", "read", "form")]
    parts += [
        f"{kind}, as owner | read | change: seed.change\n{found_kinds(verdicts, kind)}"
        for kind in VERDICTS[1:]
        if counts[kind]
    ]
    return "\n\n".join(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge, print the tables, and return 1 where a case is wrong.

    Args:
        arguments: Of the command line.
    """
    parser = argparse.ArgumentParser("python -m tests.xla_dtensor.guard_runs")
    parser.add_argument("--seeds", default="0:0", help="0:500, as a range")
    parser.add_argument("--fixed", action="store_true", help="the cases with names as well")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop then, and report")
    parser.add_argument("--devices", type=int, default=1, help="of CPU")
    parser.add_argument("--notes", type=Path, help="a file for one line of JSON a verdict")
    parser.add_argument("--texts", action="store_true", help="print errors whole")
    chosen = parser.parse_args(arguments)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("XLA_DTENSOR_CPU_DEVICES", str(chosen.devices))
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    import xla_dtensor as xd

    mesh = xd.init_device_mesh("xla", (chosen.devices,))
    logging.disable(logging.WARNING)  # each case that is traced often says so
    judge_on_mesh(of_seed(0), mesh)  # what is imported late
    first, last = map(int, chosen.seeds.split(":"))
    makers = [of_name(name) for name in FIXED] if chosen.fixed else []
    makers += [of_seed(seed) for seed in range(first, last)]
    began, judged = time.monotonic(), list[list[Verdict]]()
    with only_new_objects_searched():
        for make in makers:
            if time.monotonic() - began < chosen.seconds:
                judged.append(judge_on_mesh(make, mesh))
    verdicts = [verdict for case in judged for verdict in case]
    if chosen.notes:
        chosen.notes.parent.mkdir(parents=True, exist_ok=True)
        chosen.notes.write_text("".join(json.dumps(asdict(v)) + "\n" for v in verdicts))
    print(report(verdicts, len(judged), time.monotonic() - began))
    if chosen.texts:
        print(*(f"\n{v.case}.{v.number}: {v.note}" for v in verdicts if v.note), sep="\n")
    return int(any(verdict.kind == "wrong" for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
