"""One way to save and load a checkpoint, timed in a process of its own; see `checkpoint`."""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import json
import os
import shutil
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_TENSORS = 16
_COLUMNS = 1024


@dataclass(frozen=True)
class Way:
    """One way to save and load.

    Args:
        save: Begins to save to a folder; returns what waits until it is done.
        load: Loads from a folder.
    """

    save: Callable[[str], Callable[[], object]]
    load: Callable[[str], object]


def main() -> None:
    """Times one way and prints its row."""
    parser = argparse.ArgumentParser()
    parser.add_argument("way")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--folder")
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    rows = asked.megabytes * 1_000_000 // (_TENSORS * _COLUMNS * 4) // 8 * 8
    num_bytes = rows * _COLUMNS * 4 * _TENSORS
    way = globals()[f"_{asked.way}"](rows)
    root = Path(tempfile.mkdtemp(prefix="checkpoint_benchmark_", dir=asked.folder))
    try:
        row = _measured(way, root, asked.rounds, num_bytes)
    finally:
        shutil.rmtree(root)
    print(json.dumps({"way": asked.way, "state_bytes": num_bytes, **row}), flush=True)


def _measured(way: Way, root: Path, rounds: int, num_bytes: int) -> dict[str, float]:
    saves: list[float] = []
    blocked: list[float] = []
    loads: list[float] = []
    peaks: dict[str, int] = {"save": 0, "load": 0}
    for number in range(rounds + 1):  # the first is not counted: files are made, programs compiled
        folder = str(root / str(number))
        with _Peak() as peak:
            start = time.perf_counter()
            wait = way.save(folder)
            blocked.append(time.perf_counter() - start)
            wait()
            saves.append(time.perf_counter() - start)
        peaks["save"] = max(peaks["save"], peak.num_bytes)
        with _Peak() as peak:
            start = time.perf_counter()
            way.load(folder)
            loads.append(time.perf_counter() - start)
        peaks["load"] = max(peaks["load"], peak.num_bytes)
        shutil.rmtree(folder)
    return {
        "save_mb_per_second": num_bytes / 1e6 / min(saves[1:]),
        "blocked_seconds": min(blocked[1:]),
        "load_mb_per_second": num_bytes / 1e6 / min(loads[1:]),
        "save_peak_bytes": peaks["save"],
        "load_peak_bytes": peaks["load"],
    }


class _Peak:
    """The most that this process holds within, over what it held before: sampled."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._stop = threading.Event()

    def __enter__(self) -> _Peak:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        self._before = _resident_bytes()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self.num_bytes = max(self.num_bytes, _resident_bytes() - self._before)

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def _resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text().split()
    # Of anonymous memory: pages of files that are mapped belong to nobody.
    return (int(pages[1]) - int(pages[2])) * os.sysconf("SC_PAGE_SIZE")


# ---------------------------------------------------------------------- the ways


def _dtensors(rows: int, fill: float) -> dict[str, Any]:
    import xla_dtensor as xd

    xd.get_runtime("jax", num_cpu_devices=8)
    from torch.distributed.tensor import Replicate, Shard

    mesh = xd.init_device_mesh("xla", (2, 4))
    layouts = ([Shard(0), Shard(1)], [Replicate(), Shard(0)])
    return {
        f"t{i}": xd.full((rows, _COLUMNS), fill, device_mesh=mesh, placements=layouts[i % 2])
        for i in range(_TENSORS)
    }


def _xla_dtensor(rows: int) -> Way:
    from xla_dtensor import checkpoint

    state = _dtensors(rows, 1.5)

    def save(folder: str) -> Callable[[], object]:
        checkpoint.save(folder, state, step=1)
        return lambda: None

    def load(folder: str) -> None:
        checkpoint.load(folder, state)
        importlib.import_module("jax").block_until_ready(_arrays(state))

    return Way(save, load)


def _background(rows: int) -> Way:
    from xla_dtensor import checkpoint

    state = _dtensors(rows, 1.5)

    def save(folder: str) -> Callable[[], object]:
        return checkpoint.async_save(folder, state, step=1).wait

    return Way(save, lambda folder: checkpoint.load(folder, state))


def _dcp(rows: int) -> Way:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

    state = {f"t{i}": torch.full((rows, _COLUMNS), 1.5) for i in range(_TENSORS)}

    def save(folder: str) -> Callable[[], object]:
        # torchax registers a device module that dcp cannot copy ahead from.
        writer = FileSystemWriter(folder, per_thread_copy_ahead=0)
        dcp_save(state, storage_writer=writer, no_dist=True)
        return lambda: None

    return Way(save, lambda folder: load(state, checkpoint_id=folder, no_dist=True))


def _dcp_dtensors(rows: int) -> Way:
    dcp: Any = importlib.import_module("torch.distributed.checkpoint")

    state = _dtensors(rows, 1.5)

    def save(folder: str) -> Callable[[], object]:
        writer = dcp.FileSystemWriter(folder, per_thread_copy_ahead=0)
        dcp.save(state, storage_writer=writer, no_dist=True)
        return lambda: None

    def load(folder: str) -> None:
        dcp.load(state, checkpoint_id=folder, no_dist=True)
        importlib.import_module("jax").block_until_ready(_arrays(state))

    return Way(save, load)


def _module(rows: int) -> tuple[Any, dict[str, Any]]:
    module: Any = torch.nn.Module()
    for name, tensor in _dtensors(rows, 1.5).items():
        module.register_parameter(name, torch.nn.Parameter(tensor))
    return module, dict(module.named_parameters())


def _hugging_face(rows: int) -> Way:
    from xla_dtensor import checkpoint

    module, state = _module(rows)

    def save(folder: str) -> Callable[[], object]:
        checkpoint.save_hf(folder, module, progress=False)
        return lambda: None

    def load(folder: str) -> None:
        checkpoint.load_hf(folder, module, progress=False)
        importlib.import_module("jax").block_until_ready(_arrays(state))

    return Way(save, load)


def _hugging_face_dcp(rows: int) -> Way:
    dcp: Any = importlib.import_module("torch.distributed.checkpoint")

    from xla_dtensor import checkpoint

    module, state = _module(rows)

    def save(folder: str) -> Callable[[], object]:
        checkpoint.save_hf(folder, module, progress=False)  # dcp's writer loses blocks
        return lambda: None

    def load(folder: str) -> None:
        reader = dcp.HuggingFaceStorageReader(folder)
        dcp.load(dict(state), storage_reader=reader, no_dist=True)
        importlib.import_module("jax").block_until_ready(_arrays(state))

    return Way(save, load)


def _orbax(rows: int) -> Way:
    orbax: Any = importlib.import_module("orbax.checkpoint")
    state = _arrays(_dtensors(rows, 1.5))
    checkpointer = orbax.StandardCheckpointer()

    def save(folder: str) -> Callable[[], object]:
        checkpointer.save(folder, state)
        return checkpointer.wait_until_finished

    def load(folder: str) -> None:
        importlib.import_module("jax").block_until_ready(checkpointer.restore(folder, state))

    return Way(save, load)


def _arrays(state: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor._local_tensor.value() for name, tensor in state.items()}


if __name__ == "__main__":
    main()
