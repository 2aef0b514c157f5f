"""Every way of `benchmarks.step` trains the same; turns, and the checks for devices."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import xla_dtensor as xd
from benchmarks import step, step_child, step_devices
from benchmarks.child import ON_CPU, ChildFailedError
from benchmarks.step_plan import (
    BY_HAND,
    MARKED,
    MODELS,
    ONLY_ON_JAX,
    OURS,
    OURS_ON_TORCH_XLA,
    axes_of,
)
from benchmarks.step_sizes import sizes_of
from benchmarks.step_tables import paired_ratio, step_table
from benchmarks.step_turns import Child, timed_in_turns
from benchmarks.step_ways import LOSSES, Way, expected_losses, recorded
from xla_dtensor.runtimes import Runtime

ROOT = Path(__file__).resolve().parents[2]
TOLERANCE = 1e-4
COLUMNS = {"builds", "losses", "loss_difference", "traces"}
COLUMNS |= {"flops", "temporary_bytes", "peak_bytes", "collectives"}
# Of each model: a matrix cut by columns and one by rows, in a layer, and one that is whole.
CUT = {
    "llama": ("attention.wq", "feed_forward.w2", "norm"),
    "vit": ("attention.wq", "feed_forward.w2", "norm"),
    "mixtral": (
        "feed_forward.experts.3.w1",
        "feed_forward.experts.3.w2",
        "layers.0.feed_forward.gate",
    ),
    "resnet": ("conv1", "conv2", "stem.norm"),
}


def ways_on(runtime: Runtime, model: str, mesh: xd.DeviceMesh) -> list[Way]:
    sizes = sizes_of(model, "small")
    if runtime.name == "jax":
        from benchmarks.step_ways_jax import ways_on_jax

        return ways_on_jax(sizes, mesh)
    from benchmarks.step_ways_torch_xla import ways_on_torch_xla

    return ways_on_torch_xla(sizes, mesh, None)


# The other models' programs compile for long where two sessions share a processor.
@pytest.mark.parametrize(
    "model",
    [
        "llama",
        pytest.param("vit", marks=pytest.mark.thorough),
        *(
            pytest.param(model, marks=[pytest.mark.thorough, pytest.mark.only_on("jax")])
            for model in ONLY_ON_JAX
        ),
    ],
)
def test_every_way_trains_as_plain_torch(runtime: Runtime, mesh: xd.DeviceMesh, model: str) -> None:
    expected = expected_losses(sizes_of(model, "small"))
    assert expected[-1] < expected[0]
    rows = [recorded(way, expected) for way in ways_on(runtime, model, mesh)]
    names = [OURS, BY_HAND] if runtime.name == "jax" else [OURS_ON_TORCH_XLA, MARKED]
    assert [row["way"] for row in rows] == names
    for row in rows:
        assert set(row) >= COLUMNS
        assert len(row["losses"]) == LOSSES
        assert row["loss_difference"] < TOLERANCE
        assert row["builds"][0][1] > 0
    if runtime.name == "jax":
        assert all(row["flops"] > 0 and row["peak_bytes"] > row["temporary_bytes"] for row in rows)
        kinds = [{one["kind"] for one in row["collectives"]} for row in rows]
        assert all({"all-reduce", "all-gather"} <= each for each in kinds)
        # XLA moves the gradients of the embedding by all-to-all or all-reduce, by its version.
        ours, by_hand = (sum(one["bytes"] for one in row["collectives"]) for row in rows)
        assert ours <= by_hand


def test_a_wrong_loss_is_seen() -> None:
    expected = expected_losses(sizes_of("llama", "small"), steps=4)
    off = iter([expected[0], expected[1], expected[2] + 0.01, expected[3]])
    way = Way("w", lambda: next(off), lambda _: None, float, lambda: 0.0, dict)
    assert recorded(way, expected)["loss_difference"] == pytest.approx(0.01)


@pytest.mark.parametrize("model", MODELS)
def test_parameters_lie_by_the_plan(model: str) -> None:
    from benchmarks.step_torch import made

    network, _ = made(sizes_of(model, "small"))
    lies = {name: axes_of(name) for name, _ in network.named_parameters()}
    for name, parameter in network.named_parameters():
        assert len(lies[name]) in (0, parameter.ndim)
    assert lies["output.weight"] == ("tp", "dp")
    columns, rows, whole = CUT[model]
    assert lies[f"layers.0.{columns}.weight"][:2] == ("tp", "dp")
    assert lies[f"layers.0.{rows}.weight"][:2] == ("dp", "tp")
    assert lies[f"{whole}.weight"] == ()


@pytest.mark.only_on("jax")
def test_running_statistics_by_hand_are_those_of_torch(runtime: Runtime) -> None:
    from benchmarks.step_jax import JaxTraining
    from benchmarks.step_torch import made, training_step
    from benchmarks.step_ways_jax import host_batch, host_weights

    sizes = sizes_of("resnet", "small")
    model, batch = made(sizes)
    # Copies: the arrays would be the tensors' own memory, which the step below writes.
    weights = {name: w.copy() for name, w in host_weights(model, torch.float32).items()}
    inputs, targets = host_batch(batch, torch.float32)
    training = JaxTraining.of(weights, (inputs, targets), sizes, None)
    step = training_step(model)
    for _ in range(2):
        step(*batch)
        training(inputs, targets)
    for name, buffer in model.named_buffers():
        assert np.allclose(training.params[name], buffer.numpy(), atol=1e-5), name


# ---------------------------------------------------------------------- turns


def test_a_child_trains_when_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained: list[str] = []
    ways = {
        name: Way(name, lambda n=name: trained.append(n), lambda _: None, float, lambda: 0.0, dict)
        for name in ("a way", "b")
    }
    monkeypatch.setattr(sys, "stdin", io.StringIO("go 2 a way\ngo 1 b\n"))
    step_child.answer(ways)
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert trained == ["a way", "a way", "b"]
    assert [(row["way"], len(row["seconds"])) for row in said] == [("a way", 2), ("b", 1)]
    monkeypatch.setattr(sys, "stdin", io.StringIO("stop 1 b\n"))
    with pytest.raises(SystemExit, match="Pass turns: go 3 a way"):
        step_child.answer(ways)


class FakeChild:
    def __init__(self, log: list[str], *ways: str) -> None:
        self.rows = {way: {"way": way} for way in ways}
        self.log = log

    def turn(self, way: str, steps: int) -> list[float]:
        self.log.append(way)
        return [9.0, *[float(len(self.log))] * (steps - 1)]


def test_all_ways_alternate() -> None:
    log: list[str] = []
    children: Any = [FakeChild(log, "a", "b"), FakeChild(log, "c")]
    rows = timed_in_turns(children, rounds=3, steps=2)
    assert "".join(log) == "abc" + "cba" + "abc"
    # The first step of a turn, 9 s here, does not count.
    assert [row["step_seconds"]["measurements"] for row in rows] == [6, 6, 6]
    assert rows[0]["step_seconds"] == {
        "median": 6.0,
        "least": 1.0,
        "measurements": 6,
        "turns": [1.0, 6.0, 7.0],
    }
    assert rows[2]["step_seconds"]["median"] == 4.0


def test_ratios_are_taken_round_by_round() -> None:
    # Twice as slow in each round, on a machine that slows down by the round.
    hand = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert paired_ratio([2 * s for s in hand], hand) == (2.0, 2.0, 2.0)
    # Of twelve, 3 to 10 in their order: 96 %. Of four, all: 87 %.
    twelve = [float(n) for n in range(1, 13)]
    assert paired_ratio(twelve, [1.0] * 12) == (6.5, 3.0, 10.0)
    assert paired_ratio(twelve[:4], [1.0] * 4) == (2.5, 1.0, 4.0)


def test_first_calls_are_compared_build_by_build() -> None:
    # The machine slows down from build to build; by hand it takes a half, a half, a third.
    ours = row_of("ours", [(1, 1), (2, 2), (4, 5)])
    by_hand = row_of(BY_HAND, [(0, 1), (1, 1), (1, 2)])
    line, hand_line = step_table([ours, by_hand]).splitlines()[2:]
    assert line.startswith("| ours | 2.00 | 2.00 | 2.00 (2.00 to 3.00) |")
    assert hand_line.startswith(f"| {BY_HAND} | 1.00 | 1.00 | 1.00 |")
    # Built once, on another day: there is nothing to compare it with.
    alone = step_table([row_of("alone", [(1, 1)]), by_hand]).splitlines()[2]
    assert alone.startswith("| alone | 1.00 | 1.00 | - |")


def test_what_is_not_built_again_stays() -> None:
    old = [row_of("ours", [(9, 9)]), row_of("other", [(8, 8)]), row_of("ours", [(7, 7)], devices=8)]
    again = step._built_again(old, [row_of("ours", [(1, 1), (2, 2)], losses=[0.0])])
    assert again == [row_of("ours", [(1, 1), (2, 2)]), row_of("other", [(8, 8)])]
    assert step._merged(old, again) == [*again, old[2]]


def row_of(way: str, builds: list[tuple[int, int]], **more: Any) -> dict[str, Any]:
    return {
        "model": "vit",
        "devices": 1,
        "way": way,
        "builds": builds,
        "step_seconds": {"median": 2.0, "least": 1.0, "turns": [2.0]},
        "losses": [4.0, 3.0],
        "loss_difference": 2e-7,
        "temporary_bytes": 1_000_000,
        "peak_bytes": 2_000_000,
        **more,
    }


def test_a_process_has_its_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(step, "_OWN_PYTHON", {"torchax": tmp_path / "python"})
    monkeypatch.delenv("TORCHAX_PYTHON", raising=False)
    assert step._python_of("torchax") == sys.executable
    (tmp_path / "python").touch()
    assert step._python_of("torchax") == str(tmp_path / "python")
    monkeypatch.setenv("TORCHAX_PYTHON", "/other/python")
    assert step._python_of("torchax") == "/other/python"


def test_a_child_that_ends_early_is_an_error() -> None:
    with pytest.raises(ChildFailedError, match="ended with status=2"):
        Child(["no-such-process"], ON_CPU)


@pytest.mark.parametrize("option", ["models", "processes", "topologies"])
def test_an_unknown_name_is_refused(option: str, tmp_path: Path) -> None:
    rest = [] if option == "topologies" else ["--topologies", "none"]
    with pytest.raises(SystemExit, match=rf"{option}='moon' is not known\. Pass some of: "):
        step.main([f"--{option}=moon", "--devices=none", f"--results={tmp_path}", *rest])


# ---------------------------------------------------------------------- is there a device


def test_a_machine_without_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert step_devices.why_none("gpu") == "this machine has no NVIDIA GPU"
    assert step_devices.why_none("tpu", tmp_path, {}) == "this machine has no TPU"
    # The variable alone is none: containers inherit it.
    assert step_devices.why_none("tpu", tmp_path, {"TPU_WORKER_ID": "0"}) is not None


def test_a_machine_with_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = tmp_path / "nvidia-smi"
    asked.write_text("#!/bin/sh\necho 'GPU 0: one'\necho 'GPU 1: other'\n")
    asked.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert step_devices.why_none("gpu") is None
    assert step_devices.gpus() == ["one", "other"]


def test_a_machine_with_a_tpu(tmp_path: Path) -> None:
    (tmp_path / "vfio").mkdir()
    (tmp_path / "vfio" / "vfio").touch()  # Every Linux machine may have this one.
    assert step_devices.why_none("tpu", tmp_path, {"TPU_WORKER_ID": "0"}) == (
        "this machine has no TPU"
    )
    (tmp_path / "vfio" / "0").touch()
    reason = step_devices.why_none("tpu", tmp_path, {})
    assert reason is not None
    assert "may be any card's" in reason
    assert step_devices.why_none("tpu", tmp_path, {"TPU_WORKER_ID": "0"}) is None
    (tmp_path / "accel0").touch()
    assert step_devices.why_none("tpu", tmp_path, {}) is None


@pytest.mark.parametrize("platform", step_devices.PLATFORMS)
def test_without_the_device_the_benchmark_says_so(
    platform: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(step, "why_none", lambda asked: f"no {asked} here")
    assert step.main(["--on-device", platform, "--results", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"benchmarks.step: skipped, no {platform} here\n"
    assert not any(tmp_path.iterdir())


def test_the_check_loads_nothing() -> None:
    program = "import sys, benchmarks.step; print(sorted({'torch', 'jax'} & {*sys.modules}))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize("check", ["gpu-check", "tpu-check"])
def test_make_says_that_there_is_no_device(check: str, tmp_path: Path) -> None:
    if step_devices.why_none(check[:3]) is None:
        pytest.skip("there is one")
    # Inside a `make test` a make says which folder it enters.
    command = ["make", "--no-print-directory", check, f"PYTHON={sys.executable}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(rf"{check}: skipped, this machine .*\n", done.stdout)


# ---------------------------------------------------------------------- whole runs


def run(folder: Path, *options: str) -> tuple[str, Any]:
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "PYTHONPATH")}
    command = [sys.executable, "-m", "benchmarks.step", "--rounds=1", "--steps=1", "--builds=2"]
    done = subprocess.run(
        [*command, "--small", f"--results={folder}", *options],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    file = next(folder.glob("*.json"))
    return done.stdout, json.loads(file.read_text())


@pytest.mark.thorough
def test_a_run(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    process = str(pytestconfig.getoption("--runtime"))
    options = (f"--processes={process}", "--models=llama", "--topologies=none")
    printed, stored = run(tmp_path, *options)
    assert [row["devices"] for row in stored["rows"]] == [1, 1, 8, 8]
    for row in stored["rows"]:
        assert set(row) >= COLUMNS
        assert len(row["builds"]) == 2
        assert row["loss_difference"] < TOLERANCE
        assert 0 < row["step_seconds"]["least"] <= row["step_seconds"]["median"]
        assert bool(row["collectives"]) == (row["devices"] > 1)
    assert "**Llama, 8 devices: collectives of one step**" in printed
    _, again = run(tmp_path, *options, "--devices=8", "--first-calls")
    assert again["rows"][:2] == stored["rows"][:2]
    for row, before in zip(again["rows"][2:], stored["rows"][2:], strict=True):
        assert row["builds"] != before["builds"]
        assert row == {**before, "builds": row["builds"]}


@pytest.mark.thorough
@pytest.mark.only_on("jax")
def test_a_run_on_real_devices(runtime: Runtime, tmp_path: Path) -> None:
    printed, stored = run(tmp_path, "--on-device=cpu", "--models=vit")
    assert [row["way"] for row in stored["rows"]] == [OURS, BY_HAND]
    assert {row["devices"] for row in stored["rows"]} == {1}
    assert all(row["loss_difference"] < TOLERANCE for row in stored["rows"])
    assert "step_on_cpu.json" in printed
