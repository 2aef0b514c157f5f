"""The child of `benchmarks.loader`: reads epochs in several ways, prints JSON lines.

Run as ``python -m benchmarks.loader_child tokens --batches 12 --rounds 3``. With
``--memory-of WAY`` it reads one epoch in that way, and prints the most memory it held meanwhile.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["CASES", "WAYS"]

# Rows of a batch, and the shape and dtype of one.
CASES: dict[str, tuple[int, tuple[int, ...], str]] = {
    "tokens": (256, (8192,), "int32"),
    "images": (64, (3, 224, 224), "float32"),
}
WAYS = ("plain", "distribute", "in the loop", "ahead")
_MB = 1e6
_SCALE = 1 if sys.platform == "darwin" else 1024  # what ru_maxrss counts in, bytes


class FileOfRows:
    """A data set whose rows are read from a file.

    Args:
        file: Where they are.
        shape: The shape of all.
        dtype: Their dtype.
    """

    def __init__(self, file: Path, shape: tuple[int, ...], dtype: str) -> None:
        self._rows = np.memmap(file, dtype=dtype, mode="r", shape=shape)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        import torch

        return {"x": torch.from_numpy(np.array(self._rows[index])), "number": index}


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a row per way, or what one way held."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=tuple(CASES))
    parser.add_argument("--batches", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--step-milliseconds", type=float, required=True)
    parser.add_argument("--memory-of", choices=WAYS)
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows"
        data = _data(file, asked.case, asked.batches)
        ways = _ways(data, CASES[asked.case][0])
        if asked.memory_of:
            print(json.dumps({"peak_mb": _peak_mb(ways[asked.memory_of], asked.memory_of)}))
        else:
            _time(asked, ways)


def _data(file: Path, case: str, batches: int) -> FileOfRows:
    rows, shape, dtype = CASES[case]
    whole = (rows * batches, *shape)
    written = np.memmap(file, dtype=dtype, mode="w+", shape=whole)
    for start in range(0, len(written), rows):
        written[start : start + rows] = start
    written.flush()
    del written
    return FileOfRows(file, whole, dtype)


def _ways(data: FileOfRows, rows: int) -> dict[str, Callable[[], Iterable[Any]]]:
    from torch.distributed.tensor import Shard
    from torch.utils.data import DataLoader

    import xla_dtensor as xd

    xd.get_runtime(num_cpu_devices=8)
    mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("dp",))
    untyped: Any = data

    def plain() -> Iterable[Any]:
        return DataLoader(untyped, batch_sampler=xd.ShardedSampler(data, rows, mesh, [Shard(0)]))

    def distribute() -> Iterable[Any]:
        for batch in plain():
            yield {k: xd.distribute_tensor(v, mesh, [Shard(0)]) for k, v in batch.items()}

    return {
        "plain": plain,
        "distribute": distribute,
        "in the loop": lambda: xd.ShardedLoader(plain(), mesh, [Shard(0)], prefetch=0),
        "ahead": lambda: xd.ShardedLoader(plain(), mesh, [Shard(0)], prefetch=2),
    }


def _read(batches: Iterable[Any], step_seconds: float = 0) -> int:
    """Take all batches, on the devices where they are put there; return their number."""
    import torch

    import xla_dtensor as xd

    count = 0
    for batch in batches:
        count += 1
        if not all(type(each) is torch.Tensor for each in batch.values()):
            xd.get_runtime().synchronize()
        if step_seconds:
            time.sleep(step_seconds)
    return count


def _time(asked: argparse.Namespace, ways: dict[str, Callable[[], Iterable[Any]]]) -> None:
    from benchmarks.timing import Work, interleaved

    rows, shape, dtype = CASES[asked.case]
    batch_mb = rows * (int(np.prod(shape)) * np.dtype(dtype).itemsize + 8) / _MB
    step = asked.step_milliseconds / 1000
    works: dict[str, Work] = {}
    for name, way in ways.items():
        works[name] = Work(lambda way=way: _read(way()))
        works[f"{name}, step"] = Work(lambda way=way: _read(way(), step))
    timings = interleaved(works, asked.rounds, budget_seconds=60)
    for name in ways:
        seconds = [timings[name].wall_min / 1e6, timings[name].wall_median / 1e6]
        with_step = timings[f"{name}, step"].wall_min / 1e6
        row = {
            "case": asked.case,
            "way": name,
            "batches": asked.batches,
            "batch_mb": batch_mb,
            "best_mb_per_second": batch_mb * asked.batches / seconds[0],
            "median_mb_per_second": batch_mb * asked.batches / seconds[1],
            "step_milliseconds": asked.step_milliseconds,
            "added_milliseconds": (with_step / asked.batches - step) * 1000,
        }
        print(json.dumps(row), flush=True)


def _peak_mb(way: Callable[[], Iterable[Any]], name: str) -> float:
    """The most memory held while reading, over that held before, without the file's own pages."""
    before, ended, held = _held_bytes(), threading.Event(), [0]

    def watch() -> None:
        while not ended.wait(0.002):
            held.append(_held_bytes())

    watching = threading.Thread(target=watch, name=name)
    watching.start()
    _read(way())
    ended.set()
    watching.join()
    return (max(held) - before) / _MB


def _held_bytes() -> int:
    """Memory of this process that is no file's; on other systems than Linux the most ever held."""
    try:
        text = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _SCALE
    fields = dict(line.split(":", 1) for line in text.splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


if __name__ == "__main__":
    main()
