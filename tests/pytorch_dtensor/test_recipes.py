"""What code written for one process per rank becomes: recipes run by 4 gloo ranks, and by us.

A recipe gives the same rows, loss and gradients and reduces as many bytes, or raises, or says in a
log line what it takes them for. The table in docs/semantics.md says the same.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pytorch_dtensor.recipes import RECIPES, WORLD
from xla_dtensor.runtimes import Runtime

ROOT = Path(__file__).parents[2]
RAISES = {
    "data parallel, from_local of own rows": ("DistributeError", "one tensor for all of them"),
    "sequence-parallel norm, own rows": ("DistributeError", "one tensor for all of them"),
    "slice by get_local_rank": ("DistributeError", "one tensor for all of them"),
}
ANNOUNCED = {"FSDP, own rows": "fully_shard takes dim 0 of plain inputs for the global batch"}
# What XLA reduces beyond what PyTorch does: bytes of tensors, and at most so many of numbers.
TENSORS_OTHERWISE = {("vocabulary-parallel cross entropy", "jax"): 64}
NUMBERS_OTHERWISE = {"vocabulary-parallel cross entropy": 12, "clip_grad_norm_": 8}
OVER_PROCESSES = "all_reduce of a loss"
_OTHERWISE = {*RAISES, *ANNOUNCED, OVER_PROCESSES}
SAME = [name for name in RECIPES if name not in _OTHERWISE]


def started(*arguments: str) -> subprocess.Popen[str]:
    variables = {key: v for key, v in os.environ.items() if key != "XLA_FLAGS"}
    variables["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-m", "tests.pytorch_dtensor.recipes_child", *arguments]
    return subprocess.Popen(
        command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def outcomes(process: subprocess.Popen[str]) -> dict[str, Any]:
    output, errors = process.communicate(timeout=240)
    lines = [line for line in output.splitlines() if line.startswith("OUTCOMES ")]
    assert process.returncode == 0, errors[-3000:]
    return json.loads(lines[0].removeprefix("OUTCOMES "))


@pytest.fixture(scope="module")
def gloo(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The outcomes of each of the 4 ranks. They meet in a file: a free port may be taken since."""
    file = str(tmp_path_factory.mktemp("gloo") / "store")
    ranks = [started("gloo", str(rank), file) for rank in range(WORLD)]
    return [outcomes(rank) for rank in ranks]


@pytest.fixture(scope="module")
def ours(runtime: Runtime) -> dict[str, Any]:
    return outcomes(started("xla", runtime.name))


class TestRecipes:
    def test_gloo_runs_them_all(self, gloo: list[dict[str, Any]]) -> None:
        assert [(n, o["message"]) for rank in gloo for n, o in rank.items() if "error" in o] == []

    @pytest.mark.parametrize("name", SAME)
    def test_same(self, name: str, gloo: list[dict[str, Any]], ours: dict[str, Any]) -> None:
        assert "error" not in ours[name], ours[name]
        assert ours[name]["rows"] == gloo[0][name]["rows"]
        losses = [ours[name]["loss"], *(rank[name]["loss"] for rank in gloo)]
        assert max(losses) - min(losses) < 1e-5
        expected = gloo[0][name]["gradients"]
        assert set(ours[name]["gradients"]) == set(expected)
        for parameter, gradient in expected.items():
            found = torch.tensor(ours[name]["gradients"][parameter])
            torch.testing.assert_close(found, torch.tensor(gradient), msg=parameter)

    @pytest.mark.parametrize("name", SAME)
    def test_reduces_as_many_bytes(
        self, name: str, gloo: list[dict[str, Any]], ours: dict[str, Any], runtime: Runtime
    ) -> None:
        found, expected = ours[name]["reduced"], gloo[0][name]["reduced"]
        assert found.keys() == expected.keys()  # the same axes
        more = TENSORS_OTHERWISE.get((name, runtime.name), 0)
        for axis, bytes_ in expected.items():
            assert found[axis]["tensors"] == bytes_["tensors"] + more
            assert found[axis]["numbers"] <= bytes_["numbers"] + NUMBERS_OTHERWISE.get(name, 0)

    @pytest.mark.parametrize("name", ["FSDP", "FSDP beside tensor parallelism"])
    def test_microbatches_reduce_their_gradients_once(
        self, name: str, gloo: list[dict[str, Any]], ours: dict[str, Any]
    ) -> None:
        one, four = f"{name}, 1 microbatch", f"{name}, 4 microbatches"
        up, down = 8 * 16 + 16, 16 * 8
        held = 4 * (up + down + 8) if name == "FSDP" else 4 * (up // 2 + down // 2 + 8)
        recipes = [one, four, f"{four} after unshard()"]
        for outcome in (gloo[0], ours):
            for microbatches in [recipe for recipe in recipes if recipe in RECIPES]:
                reduced = outcome[microbatches]["reduced"]
                assert reduced["dp"] == {"tensors": held, "numbers": 0}

    @pytest.mark.parametrize("name", RAISES)
    def test_raises(self, name: str, ours: dict[str, Any]) -> None:
        error, text = RAISES[name]
        assert ours[name].get("error") == error
        assert text in ours[name]["message"]

    @pytest.mark.parametrize("name", ANNOUNCED)
    def test_announced(self, name: str, gloo: list[dict[str, Any]], ours: dict[str, Any]) -> None:
        assert any(ANNOUNCED[name] in line for line in ours[name]["log"])
        # The first rank's rows are the whole batch: its loss is that rank's, its gradients too.
        assert ours[name]["loss"] == pytest.approx(gloo[0][name]["loss"], abs=1e-5)
        losses = [rank[name]["loss"] for rank in gloo]
        assert max(losses) - min(losses) > 1e-2
        ours_gradient = torch.tensor(ours[name]["gradients"]["up.bias"])
        assert not torch.allclose(
            ours_gradient, torch.tensor(gloo[0][name]["gradients"]["up.bias"])
        )

    def test_a_process_group_is_of_processes(
        self, gloo: list[dict[str, Any]], ours: dict[str, Any]
    ) -> None:
        ranks = [rank[OVER_PROCESSES] for rank in gloo]
        whole = sum(rank["loss"] for rank in ranks) / WORLD
        assert [rank["mean"] for rank in ranks] == pytest.approx([whole] * WORLD)
        # One process has all devices: what it would average is its own, of the first rank's rows.
        found = ours[OVER_PROCESSES]
        assert found["mean"] == found["loss"] == pytest.approx(ranks[0]["loss"])
        assert abs(found["mean"] - whole) > 1e-3
