"""What saving and loading a checkpoint costs, beside torch.distributed.checkpoint and orbax.

    python -m benchmarks.checkpoint
    python -m benchmarks.checkpoint --megabytes 1024 --folder /mnt/shared

| way | what it saves |
|---|---|
| xla_dtensor | DTensors on a 2 x 4 mesh, half of them sharded over both axes, half over one |
| in the background | the same; the time until the training loop goes on, and that of all of it |
| dcp, plain tensors | torch.distributed.checkpoint on ordinary CPU tensors of the same bytes |
| dcp, DTensors | torch.distributed.checkpoint on the DTensors |
| orbax | the same jax.Arrays with orbax; left out where it is not installed |
| hugging face | save_hf and load_hf of a module with these parameters |
| hugging face, dcp | its files, loaded by torch.distributed.checkpoint |

MB/s of the state's own bytes, the best of the rounds, with all files synced to the disk and read
back from the page cache. Peak memory is what the process needed over what it held before. Each way
runs in a child process of its own, `benchmarks.checkpoint_child`. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.child import child_rows
from benchmarks.timing import RESULTS, store

_WAYS = (
    *("xla_dtensor", "background", "dcp", "dcp_dtensors", "orbax"),
    *("hugging_face", "hugging_face_dcp"),
)
_TITLES = {
    "background": "in the background",
    "dcp": "dcp, plain tensors",
    "dcp_dtensors": "dcp, DTensors",
    "hugging_face": "hugging face",
    "hugging_face_dcp": "hugging face, dcp",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark, prints its table and stores its figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--ways", default=",".join(_WAYS), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="turns per figure (default: 3)")
    parser.add_argument("--megabytes", type=int, default=256, help="of state (default: 256)")
    parser.add_argument("--folder", type=Path, help="where to save (default: a temporary folder)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the JSON file")
    asked = parser.parse_args(arguments)
    options = ["--rounds", str(asked.rounds), "--megabytes", str(asked.megabytes)]
    options += ["--folder", str(asked.folder)] if asked.folder else []
    print(f"A state of {asked.megabytes} MB in 16 tensors, 8 virtual CPU devices\n")
    print(_head())
    rows: list[dict[str, Any]] = []
    absent: list[str] = []
    for way in asked.ways.split(","):
        if not _is_installed(way):
            absent.append(way)
            continue
        for row in _child(way, options):
            print(_line(row), flush=True)
            rows.append(row)
    for way in absent:
        print(f"{way} is not installed: left out")
    print(f"Stored in {store('checkpoint', {'rows': rows, 'absent': absent}, asked.results)}")
    return 0


def _is_installed(way: str) -> bool:
    if way not in _WAYS:
        raise SystemExit(f"way={way!r} is not timed here. Pass some of: {','.join(_WAYS)}.")
    # orbax-checkpoint is a part of the name space package orbax.
    return way != "orbax" or importlib.util.find_spec("orbax") is not None


def _child(way: str, options: Sequence[str]) -> Iterator[dict[str, Any]]:
    return child_rows("checkpoint_child", way, *options, advice="Pass --ways with the others.")


def _head() -> str:
    names = ("save", "blocked", "load", "save peak", "load peak")
    units = ("MB/s", "s", "MB/s", "MB", "MB")
    columns = "".join(f"{f'{name} {unit}':>16}" for name, unit in zip(names, units, strict=True))
    return f"{'way':<22}{columns}"


def _line(row: dict[str, Any]) -> str:
    keys = ("save_mb_per_second", "blocked_seconds", "load_mb_per_second")
    cells = [f"{row[keys[0]]:16.0f}", f"{row[keys[1]]:16.2f}", f"{row[keys[2]]:16.0f}"]
    cells += [f"{row[key] / 1e6:16.0f}" for key in ("save_peak_bytes", "load_peak_bytes")]
    return f"{_TITLES.get(row['way'], row['way']):<22}{''.join(cells)}"


if __name__ == "__main__":
    sys.exit(main())
