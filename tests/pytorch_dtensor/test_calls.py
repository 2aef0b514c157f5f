"""The placements of results are PyTorch's own, of the torch at hand, but for what is explained.

PyTorch's DTensor runs beside this one, in a process of its own: nothing is stored.
"""

from __future__ import annotations

import collections
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

import xla_dtensor as xd
from tests.pytorch_dtensor.calls import MESHES, MISTAKES, Call, Side, calls, tokens_of
from xla_dtensor.runtimes import Runtime

ROOT = Path(__file__).parents[2]
SEMANTICS = ROOT / "docs" / "semantics.md"
IS_TODAYS_TORCH = Version(torch.__version__) >= Version("2.13")
PENDING = ("Pavg", "Pmax") if IS_TODAYS_TORCH else ("Psum", "Pavg", "Pmax")
MATMULS = ("mm", "linear", "linear bias", "linear 3d", "bmm")

# By its row in docs/semantics.md: the call, and the words of PyTorch's placements.
EXPLAINED: dict[str, Callable[[Call, Sequence[str]], bool]] = {
    "placements that PyTorch refuses": lambda call, words: words[0] == "!",
    "a label with a mask or a norm pending": lambda call, words: any(
        word in ("_NormPartial", "_MaskPartial", "MaskPartial") for word in words
    ),
    "a strided label that no tiling has": lambda call, words: any(
        word.startswith("_S") for placed in (words, *call.placements) for word in placed
    ),
    "the label of a matmul": lambda call, words: call.name in MATMULS,
    "the label of what had a max or mean pending": lambda call, words: any(
        word in PENDING for placements in call.placements for word in placements
    ),
}


@cache
def pytorchs() -> dict[str, Any]:
    """What PyTorch gives."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "TORCH_LOGS": "-all"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.pytorch_dtensor.calls"],
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def side(runtime: Runtime) -> Side:
    meshes = {shape: xd.init_device_mesh("xla", shape) for shape in MESHES}
    return Side(meshes.__getitem__, xd.distribute_tensor, xd.DTensor.from_local)


def differences(side: Side) -> tuple[list[str], collections.Counter[str]]:
    """The calls that differ without a reason, and how many have which."""
    unexplained: list[str] = []
    reasons: collections.Counter[str] = collections.Counter()
    for call, words in zip(calls(), pytorchs()["placements"], strict=True):
        if words == ["?"]:
            continue
        found = side.run(call)
        expected = call.run(call.values())
        value = found.full_tensor().cpu()
        if not torch.allclose(value, expected, equal_nan=True):
            unexplained.append(f"{call}: {value}, not {expected}")
        if list(tokens_of(found.placements)) == words:
            continue
        reason = next((name for name, applies in EXPLAINED.items() if applies(call, words)), None)
        if reason is None:
            ours = ",".join(tokens_of(found.placements))
            unexplained.append(f"{call}: {ours}, PyTorch's {','.join(words)}")
        else:
            reasons[reason] += 1
    return unexplained, reasons


@pytest.mark.filterwarnings("ignore")
def test_placements(side: Side) -> None:
    unexplained, reasons = differences(side)
    assert not unexplained, "\n".join(unexplained)
    assert not IS_TODAYS_TORCH or set(reasons) == set(EXPLAINED), reasons


@pytest.mark.parametrize("name", MISTAKES)
def test_where_pytorch_is_wrong(name: str, side: Side) -> None:
    run, expected = MISTAKES[name]
    torch.testing.assert_close(run(side).full_tensor().cpu(), expected)
    wrong = pytorchs()["wrong"]
    assert wrong.get(name, True), f"PyTorch has mended it: its row in {SEMANTICS} can go"


def test_each_difference_is_documented() -> None:
    text = SEMANTICS.read_text(encoding="utf-8")
    assert [name for name in (*EXPLAINED, *MISTAKES) if f"| {name} |" not in text] == []
