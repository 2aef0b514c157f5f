"""The benchmarks run, print their tables and store JSON. No figure is asserted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.timing import Work, interleaved, store
from benchmarks.translate_cases import Case, cases, check_size, ordered_ids
from benchmarks.translate_child import deep_size
from mesh_utils import mixed_radix

ROOT = Path(__file__).resolve().parents[2]


def run(module: str, folder: Path, *options: str) -> tuple[str, dict[str, Any]]:
    """What a benchmark prints, and what it stores."""
    command = [sys.executable, "-m", f"benchmarks.{module}", "--rounds", "1", *options]
    # The test session's own settings would reach a child that starts a runtime differently.
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "PYTHONPATH")}
    done = subprocess.run(
        [*command, "--results", str(folder)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads((folder / f"{module}.json").read_text())


def test_translate(tmp_path: Path) -> None:
    printed, stored = run("translate", tmp_path, "--sizes", "8")
    table = [line.split() for line in printed.splitlines() if line.strip().startswith("8 ")]
    assert {row[1] for row in table} == {"iota", "torus", "arbitrary"}
    assert printed.count("Target ") == 4
    rows = [row for row in stored["rows"] if row["kind"] == "translation"]
    assert len(rows) == 13
    assert all(row["microseconds"]["ours"]["wall_min"] > 0 for row in rows)
    # Where torch_xla is installed, both mean the same.
    assert {row.get("same", True) for row in rows} == {True}
    assert stored["machine"]["versions"]["numpy"]


def test_translate_without_torch_xla(tmp_path: Path) -> None:
    printed, stored = run("translate", tmp_path, "--sizes", "8", "--without-torch-xla")
    assert "not installed or not asked for" in printed
    assert not any("torch_xla" in row["microseconds"] for row in stored["rows"])


def test_dispatch(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    runtime = str(pytestconfig.getoption("--runtime"))
    printed, stored = run("dispatch", tmp_path, "--runtimes", runtime, "--calls", "2")
    ops = ["add", "mul", "linear", "view", "softmax", "add_", "foreach_add"]
    ops += ["index_list", "index", "index_put_", "embedding"]
    assert all(f"{runtime:<10}{op} " in printed for op in ops)
    assert "over the bare tensor: met by" in printed
    assert [row["op"] for row in stored["rows"]] == ops
    assert not any(row["failed"] for row in stored["rows"])
    assert all({"DTensor", "bare"} <= set(row["microseconds"]) for row in stored["rows"])


@pytest.mark.thorough
def test_annotate(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    runtime = str(pytestconfig.getoption("--runtime"))
    options = ("--calls", "2", "--layers", "1", "--sizes", "64")
    printed, stored = run("annotate", tmp_path, "--processes", runtime, *options)
    parts = {row["part"] for row in stored["rows"]}
    assert parts == {"call", "size", "trace"}
    timed = {name for row in stored["rows"] for name in row.get("microseconds", ())}
    assert {"no annotations", "mark_sharding", "with_gradients"} <= timed
    assert all(f"{runtime:<12}{name}" in printed for name in timed)
    sizes = {row["program"]: row["proto_bytes"] for row in stored["rows"] if row["part"] == "size"}
    assert 0 < sizes["not annotated"] < sizes["ours"]


def test_annotate_refuses_an_unknown_process(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="process='tpu' is not known"):
        run("annotate", tmp_path, "--processes", "tpu")


@pytest.mark.parametrize("size", [0, 4, 12])
def test_wrong_size(size: int) -> None:
    with pytest.raises(ValueError, match=f"size={size} was asked for"):
        check_size(size)


def test_every_case_is_a_mesh_of_its_size() -> None:
    for case in cases((8, 256)):
        assert int(np.prod(case.mesh_shape)) == case.num_devices
        assert sorted(case.device_ids) == list(range(case.num_devices))
        assert len(case.placements) == len(case.axis_names)
    assert Case(8, "iota", ("R", "S0"), ("tp",)).axis_names == ("fsdp", "tp")


def test_orders_are_what_they_are_called() -> None:
    counted = {order: mixed_radix(ordered_ids(256, order)) for order in ("iota", "torus")}
    assert counted["iota"] == ((256, 1),)
    assert counted["torus"] is not None
    assert len(counted["torus"]) > 1
    assert mixed_radix(ordered_ids(256, "arbitrary")) is None


def test_interleaved() -> None:
    done: list[str] = []
    works = {
        "a": Work(lambda: done.append("a"), before=lambda: done.append("("), calls=2),
        "b": Work(lambda: done.append("b"), after=lambda: done.append(")"), repeats=2),
    }
    timings = interleaved(works, rounds=2)
    assert "".join(done) == "(a" + "b)" + 2 * ("(aa" + "b)b)")
    assert timings["a"].measurements == 2
    assert timings["b"].measurements == 4
    assert 0 < timings["a"].wall_min <= timings["a"].wall_median


def test_budget() -> None:
    timings = interleaved({"slow": Work(lambda: None)}, rounds=50, budget_seconds=0)
    assert timings["slow"].measurements == 3


def test_store(tmp_path: Path) -> None:
    timings = interleaved({"nothing": Work(lambda: None)}, rounds=1)
    path = store("name", {"rows": [timings["nothing"]]}, tmp_path / "made")
    stored = json.loads(path.read_text())
    assert stored["benchmark"] == "name"
    assert stored["rows"][0]["measurements"] == 1


def test_deep_size() -> None:
    shared = "x" * 1000
    assert deep_size([shared, shared]) - deep_size([shared]) < 100
    assert deep_size(tuple(range(1000, 2000))) > 1000 * 28
