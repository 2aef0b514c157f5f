"""Judges many programs, in child processes that may end as they like; what came of each is stored.

    make fuzz SECONDS=600
    python -m tests.drawn.run --runtime jax --programs 0:1000 --seconds 600
    python -m tests.drawn.run --runtime torch_xla --calls all
    python -m tests.drawn.run --runtime jax --calls all --table docs/op_table_jax.md
    python -m tests.drawn.run --runtime jax --calls all --dtypes float32 int64     not in pairs
    python -m tests.drawn.run --selected all --seed 3     in compiled steps, on x[mask]
    python -m tests.drawn.run --source ../old --programs 0:100     another tree's library
    python -m tests.drawn.run --platform cuda --calls all --dtypes float32     on the GPUs here

A job is the name of a program: ``program/17``, ``training/17``, ``call/add/float32/int64/0``, or
``refused/add/3``, one of the calls that op_db says PyTorch refuses, or ``selected/add/float32/0``,
one on ``x[mask]``. Each is noted in build/drawn/, in a file named after the commit of the library
that is judged, the runtime, and what draws and judges. A run takes up where the last one ended. A
job that ends its process, or does not come back, is noted by the parent: "abort", "hang".
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["main", "program_of"]

ROOT = Path(__file__).resolve().parents[2]
CHUNK = 150
HANG_SECONDS = 90
MOST_NEW = 100_000
MOST_BYTES = 5_000_000_000


# ------------------------------------------------------------------ jobs


def program_of(job: str) -> Any:
    """The program that a job names; None where op_db has no such call."""
    import torch

    from tests.drawn.generate import generate, generate_call, generate_refused, generate_selected
    from tests.drawn.training import generate_training

    kind, *rest = job.split("/")
    if kind == "program":
        return generate(int(rest[0]))
    if kind == "training":
        return generate_training(int(rest[0]))
    if kind == "refused":
        return generate_refused(rest[0], int(rest[1]))
    if kind == "selected":
        return generate_selected(rest[0], getattr(torch, rest[1]), int(rest[2]))
    name, first, second, seed = rest
    other = getattr(torch, second) if second != "-" else None
    return generate_call(name, getattr(torch, first), int(seed), other)


def call_jobs(seed: int) -> Iterator[str]:
    """Each op in each dtype, and each op of two tensors in each pair of dtypes."""
    from tests.drawn import ops

    for name in ops.drawn_ops():
        for dtype in ops.DTYPES:
            calls = ops.calls_of(name, dtype, seed)
            if not calls:
                continue
            yield f"call/{name}/{_short(dtype)}/-/{seed}"
            mixed = name not in ops.listed()["one_dtype"]
            if mixed and any(
                len(call.tensors) == 2 and call.tensors[1].dtype == dtype for call in calls
            ):
                for second in ops.DTYPES:
                    if second != dtype:
                        yield f"call/{name}/{_short(dtype)}/{_short(second)}/{seed}"


def refused_jobs() -> Iterator[str]:
    """Each call that op_db says is refused."""
    from tests.drawn import ops

    for name in ops.drawn_ops():
        yield from (f"refused/{name}/{i}" for i in range(len(ops.refused_calls_of(name))))


def selected_jobs(seed: int, dtypes: Sequence[str]) -> Iterator[str]:
    """Each op in some dtypes, with rows that a mask selects."""
    from tests.drawn import ops

    for name in ops.drawn_ops():
        yield from (f"selected/{name}/{dtype}/{seed}" for dtype in dtypes)


def _short(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


# ------------------------------------------------------------------ the child


def child(runtime: str, platform: str, notes: Path) -> None:
    """Judge the jobs that standard input names, one a line, and note each."""
    import logging
    import warnings

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    import torch

    torch.set_num_threads(1)
    from tests.drawn.judge import expected_of
    from tests.drawn.ours import start, verdict_of

    start(runtime, platform)
    with notes.open("a", encoding="utf-8") as file:

        def note(row: dict[str, Any]) -> None:
            file.write(json.dumps(row) + "\n")
            file.flush()

        for line in sys.stdin:
            job = line.strip()
            began = time.process_time()
            note({"started": job})  # plain torch, too, ends the process now and then
            program = program_of(job)
            if program is None:
                note({"job": job, "kind": "none"})
                continue
            expected = expected_of(program)
            note({"started": job, "program": str(program)})
            verdict = verdict_of(program, expected)
            row = {
                "job": job,
                "kind": verdict.kind,
                "seconds": round(time.process_time() - began, 2),
            }
            if verdict.kind != "right":
                text = (
                    "" if verdict.line is None else program.lines[verdict.line : verdict.line + 1]
                )
                row |= {"note": verdict.note, "at": "".join(text), "program": str(program)}
            note(row)
            if runtime == "torch_xla" and verdict.kind == "unclear":
                return  # what XLA raised while it ran leaves this process unable to go on
            if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 > MOST_BYTES:
                return


# ------------------------------------------------------------------ the parent


def read(notes: Path) -> tuple[dict[str, dict[str, Any]], dict[str, Any] | None]:
    """Return the rows noted so far, by job, and what is noted of a job that has no row yet."""
    rows: dict[str, dict[str, Any]] = {}
    begun: dict[str, Any] | None = None
    for line in notes.read_text(encoding="utf-8").splitlines() if notes.exists() else ():
        row = json.loads(line)
        if "started" in row:
            begun = row if row["started"] else None
        else:
            rows[row["job"]] = row
            begun = None
    return rows, begun


def judge_all(
    jobs: Sequence[str], runtime: str, platform: str, notes: Path, source: Path, until: float
) -> dict[str, dict[str, Any]]:
    """Judge jobs in child processes until all are noted or it is `until` (time.monotonic())."""
    notes.parent.mkdir(parents=True, exist_ok=True)
    while True:
        rows, _ = read(notes)
        left = [job for job in jobs if job not in rows][:CHUNK]
        if not left or time.monotonic() > until:
            return {job: rows[job] for job in jobs if job in rows}
        ended = _run_child(left, runtime, platform, notes, source, until)
        after, begun = read(notes)
        if begun is not None and ended != "stopped":
            # Without a program it was plain torch that ended.
            kind = ended if "program" in begun else "none"
            row = {"job": begun["started"], "kind": kind, "note": ended}
            _append(notes, row | {"program": begun.get("program", "")})
        elif begun is not None:
            _append(notes, {"started": None})
        elif len(after) == len(rows) and ended != "stopped":
            raise SystemExit(
                f"A child of tests.drawn.run ended before its first job; see {notes}.log"
            )


def _append(notes: Path, row: dict[str, Any]) -> None:
    with notes.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def _run_child(
    jobs: Sequence[str], runtime: str, platform: str, notes: Path, source: Path, until: float
) -> str:
    flags = os.environ.get("XLA_FLAGS", "")
    if platform == "cuda":
        flags += " --xla_gpu_autotune_level=0"
    elif runtime == "jax":
        flags += " --xla_backend_optimization_level=0 --xla_force_host_platform_device_count=8"
    variables = {
        **os.environ,
        "XLA_FLAGS": flags,
        "PYTHONPATH": f"{source}:{ROOT}",
        "NPROC": "64",
        "JAX_PLATFORMS": platform,
        "PJRT_DEVICE": "CPU",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # several runs may share a GPU
        "XLA_DTENSOR_RUNTIME": runtime,
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    # -P: or the working folder would come before `source`.
    command = [sys.executable, "-P", "-m", "tests.drawn.run", "--child", "--runtime", runtime]
    command += ["--platform", platform, "--notes", str(notes)]
    with Path(f"{notes}.log").open("a") as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=variables,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            text=True,
        )
        assert process.stdin is not None
        process.stdin.write("\n".join(jobs) + "\n")
        process.stdin.close()
        seen, since = -1, time.monotonic()
        while process.poll() is None:
            time.sleep(0.2)
            size = notes.stat().st_size if notes.exists() else 0
            if size != seen:
                seen, since = size, time.monotonic()
            if time.monotonic() > until or time.monotonic() - since > HANG_SECONDS:
                ended = "stopped" if time.monotonic() > until else "hang"
                process.kill()
                process.wait()
                return ended
    return "abort"


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """How many of each kind, and the share of those that plain torch runs or refuses."""
    counts = collections.Counter(row["kind"] for row in rows if row["kind"] != "none")
    total = sum(counts.values())
    return f"{total} judged: " + ", ".join(
        f"{number} {kind} ({100 * number / total:.2f} %)" for kind, number in counts.most_common()
    )


def main() -> int:
    """Judge what is asked for; return 1 where something is wrong."""
    asked = _arguments()
    if asked.child:
        child(asked.runtime, asked.platform, asked.notes)
        return 0
    source = asked.source.resolve()
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=10"],
        cwd=source,
        capture_output=True,
        text=True,
    ).stdout.strip()
    jobs: list[str] = []
    jobs += [f"program/{seed}" for seed in _seeds(asked.programs)]
    jobs += [f"training/{seed}" for seed in _seeds(asked.trainings)]
    if asked.calls:
        jobs += [
            job for job in call_jobs(asked.seed) if asked.calls in ("all", *job.split("/")[1:4])
        ]
        if asked.dtypes:
            alone = {(dtype, "-") for dtype in asked.dtypes}
            jobs = [job for job in jobs if (*job.split("/")[2:4],) in alone]
    if asked.refused:
        jobs += [job for job in refused_jobs() if asked.refused in ("all", job.split("/")[1])]
    if asked.selected:
        every = selected_jobs(asked.seed, asked.dtypes or ("float32", "int64", "bfloat16"))
        jobs += [job for job in every if asked.selected in ("all", job.split("/")[1])]
    if asked.part:
        part, parts = map(int, asked.part.split("/"))
        jobs = jobs[part - 1 :: parts]
    name = f"{commit}-{asked.runtime}-{_own_state()}"
    name += f"-{asked.platform}" if asked.platform != "cpu" else ""
    name += f"-{asked.part.replace('/', 'of')}" if asked.part else ""
    notes = asked.notes or ROOT / "build" / "drawn" / f"{name}.jsonl"
    until = time.monotonic() + asked.seconds
    rows = judge_all(jobs, asked.runtime, asked.platform, notes, source, until)
    order = ("unjudged", "refused", "unclear", "silent", "wrong", "hang", "abort")
    for row in sorted(
        rows.values(), key=lambda r: (r["kind"] in order and order.index(r["kind"]), r["job"])
    ):
        if row["kind"] in order[1:] and (asked.show or row["kind"] != "refused"):
            print(f"{row['kind']} {row['job']}: {row.get('at', '')}\n    {row['note']}")
            if asked.show:
                print("    " + row["program"].replace("\n", "\n    "))
    print(summary(list(rows.values())))
    if len(rows) < len(jobs) and "new" not in (asked.programs, asked.trainings):
        print(f"{len(jobs) - len(rows)} are left. Call again to go on.")
    if asked.table is not None:
        asked.table.write_text(_page(asked, rows), encoding="utf-8")
    return int(any(row["kind"] in ("wrong", "silent", "abort", "hang") for row in rows.values()))


def _page(asked: argparse.Namespace, rows: Mapping[str, dict[str, Any]]) -> str:
    import torch

    from tests.drawn import ops
    from tests.drawn.tables import page

    calls = [row for job, row in rows.items() if job.startswith("call/")]
    which = f" --dtypes {' '.join(asked.dtypes)}" if asked.dtypes else ""
    return page(asked.runtime, calls, ops.listed()["excluded"], torch.__version__, which)


def _seeds(asked: str | None) -> range:
    if asked is None:
        return range(0)
    now = int(time.time())
    first, _, last = (f"{now}:{now + MOST_NEW}" if asked == "new" else asked).partition(":")
    return range(int(first), int(last or int(first) + 1))


def _own_state() -> str:
    """A word that changes with what draws and judges: a seed means another program then."""
    files = sorted(f for f in Path(__file__).parent.iterdir() if f.suffix in (".py", ".yaml"))
    text = b"".join(
        f.read_bytes() for f in files if not f.name.startswith(("test_", "run", "tables"))
    )
    return hashlib.sha256(text).hexdigest()[:6]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m tests.drawn.run", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--runtime", default="jax", choices=("jax", "torch_xla"))
    parser.add_argument("--platform", default="cpu", choices=("cpu", "cuda"), help="of JAX")
    parser.add_argument("--programs", help="seeds, such as 0:1000; one seed; new")
    parser.add_argument("--trainings", help="seeds of whole trainings")
    parser.add_argument("--calls", help="all, the name of an op of op_db, or a dtype")
    parser.add_argument("--dtypes", nargs="+", help="of calls: each alone; else all, and in pairs")
    parser.add_argument("--refused", help="all, or the name of an op of op_db")
    parser.add_argument("--selected", help="all, or an op of op_db: its calls on x[mask]")
    parser.add_argument("--seed", type=int, default=0, help="of calls")
    parser.add_argument("--part", help="3/8: every eighth job, beginning with the third")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after these")
    parser.add_argument(
        "--source", type=Path, default=ROOT, help="the tree whose library is judged"
    )
    parser.add_argument("--notes", type=Path, help="the file of rows")
    parser.add_argument("--table", type=Path, help="write the page of the calls, as docs/ has it")
    parser.add_argument("--show", action="store_true", help="print programs, and what is refused")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
