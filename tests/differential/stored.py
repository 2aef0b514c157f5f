"""The oracle's file: what PyTorch gave for each seed, in one npz.

``text`` is JSON: a list per seed of ``[number, tokens, shapes]`` per tensor, errors by name.
``values`` are the checksums in the same order, float32, one per device.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["FOLDER", "StoredRun", "StoredTensor", "load", "load_labels", "save", "save_labels"]

FOLDER = Path(__file__).parent / "oracle"
VALUES = FOLDER / "values.npz"


@dataclass
class StoredTensor:
    """One tensor: placements, each device's shape and checksum (Partial ones after reduction)."""

    tokens: tuple[str, ...]
    shapes: list[tuple[int, ...]]
    sums: list[float]


@dataclass
class StoredRun:
    """One program; numbers are those of the program's tensors."""

    seed: int
    tensors: dict[int, StoredTensor] = field(default_factory=dict)
    gradients: dict[int, StoredTensor] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)
    backward_error: str = ""


def save(runs: list[StoredRun], torch_version: str) -> None:
    """Write the oracle."""
    rows, values = [], []
    for run in runs:
        kept = []
        for group in (run.tensors, run.gradients):
            texts = []
            for number, tensor in group.items():
                same = all(shape == tensor.shapes[0] for shape in tensor.shapes)
                shapes = [tensor.shapes[0]] if same else tensor.shapes
                texts.append([number, " ".join(tensor.tokens), shapes])
                values += tensor.sums
            kept.append(texts)
        rows.append([run.seed, *kept, run.errors, run.lost, run.backward_error])
    text = json.dumps({"torch": torch_version, "runs": rows}, separators=(",", ":"))
    FOLDER.mkdir(exist_ok=True)
    np.savez_compressed(
        VALUES,
        text=np.frombuffer(text.encode(), dtype=np.uint8),
        values=np.array(values, dtype=np.float32),
    )


@lru_cache(maxsize=1)
def load() -> tuple[str, dict[int, StoredRun]]:
    """Read the oracle: the torch version that made it, and its runs by seed."""
    with np.load(VALUES) as file:
        content, values = json.loads(file["text"].tobytes()), iter(file["values"].tolist())
    runs = {}
    for seed, tensors, gradients, errors, lost, backward_error in content["runs"]:
        run = StoredRun(seed, backward_error=backward_error)
        run.errors = {int(number): name for number, name in errors.items()}
        run.lost = {int(number): name for number, name in lost.items()}
        for group, texts in ((run.tensors, tensors), (run.gradients, gradients)):
            for number, tokens, shapes in texts:
                shapes = [tuple(shape) for shape in (shapes * 8 if len(shapes) == 1 else shapes)]
                sums = [next(values) for _ in range(8)]
                group[number] = StoredTensor(tuple(tokens.split()), shapes, sums)
        runs[seed] = run
    return content["torch"], runs


def save_labels(labels: dict[int, Any], version: str) -> None:
    """Write the placements alone, as another version of torch gives them."""
    text = json.dumps(labels, separators=(",", ":"))
    with gzip.GzipFile(_labels_path(version), "wb", mtime=0) as file:
        file.write(text.encode())


@lru_cache(maxsize=4)
def load_labels(version: str) -> dict[int, Any] | None:
    """Read the placements of a version ("2.9"), by seed; None where they were not made."""
    path = _labels_path(version)
    if not path.exists():
        return None
    content = json.loads(gzip.decompress(path.read_bytes()))
    return {int(seed): labels for seed, labels in content.items()}


def _labels_path(version: str) -> Path:
    return FOLDER / f"labels_torch_{version.replace('.', '_')}.json.gz"
