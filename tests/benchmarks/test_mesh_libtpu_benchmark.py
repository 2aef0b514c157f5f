"""What libtpu makes of meshes: reading its programs, children that end early, the stored run."""

from __future__ import annotations

import doctest
import importlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import mesh_document, mesh_libtpu
from benchmarks.child import ChildFailedError
from benchmarks.mesh_libtpu_cases import LibtpuCase, libtpu_cases
from benchmarks.mesh_libtpu_child import KINDS, STRATEGIES, algorithms
from benchmarks.mesh_libtpu_summary import (
    axes_of,
    difference_table,
    explain,
    failures,
    group_table,
    strategy_table,
)
from benchmarks.mesh_libtpu_where import digest, mesh_ids, where_axes_lie
from tests.libtpu import needs_libtpu

MODULES = (
    *("bandwidth", "bandwidth_measure", "mesh_cases", "mesh_compare", "mesh_document"),
    *("mesh_libtpu_cases", "mesh_libtpu_child", "mesh_libtpu_summary", "mesh_libtpu_where"),
    *("mesh_optimum", "mesh_plot", "mesh_rings", "mesh_summary"),
)


@pytest.mark.parametrize("module", MODULES)
def test_examples_in_the_docstrings(module: str) -> None:
    pytest.importorskip("jax")
    result = doctest.testmod(importlib.import_module(f"benchmarks.{module}"))
    assert result.failed == 0
    assert result.attempted > 0


# --- the sample ----------------------------------------------------------------------------------


def test_the_sample_is_fixed_and_reaches_over_all_generations() -> None:
    cases = libtpu_cases()
    assert cases == libtpu_cases()
    assert len(cases) >= 300
    assert len(set(map(str, cases))) == len(cases)
    groups = Counter(case.group for case in cases)
    assert set(groups) == {"v2", "v3", "v4", "v5e", "v5p", "v6e", "tpu7x", "several slices"}
    assert min(groups.values()) >= 20
    assert {len(case.shape) for case in cases} == {1, 2, 3, 4}
    assert any("_twisted" in case.topology for case in cases)
    for case in cases:
        topology = case.parsed()
        assert (case.dcn is None) == (topology.num_slices == 1)


def test_where_axes_lie() -> None:
    options: dict[str, Any] = {"wrap": (True, True, True)}
    case = LibtpuCase("v5p", "v5p:4x4x8", "v5p:4x4x8", options, None, (16, 8), None)
    pytest.importorskip("jax")
    found = where_axes_lie(case)
    assert [axis["on"] for axis in found["search"]] == ["x4 y4", "z8"]
    assert [axis["strategy"] for axis in found["jax"]] == ["whole dims", "ring"]
    assert [axis["in_rows"] for axis in found["rows"]] == [True, True]
    assert [axis["in_rows"] for axis in found["search"]] == [True, True]
    assert [axis["in_rows"] for axis in found["rings"]] == [False, True]


# --- reading compiled programs -------------------------------------------------------------------


def line(opcode: str, config: dict[str, Any], attributes: str = "") -> str:
    text = json.dumps({"flag_configs": [], **config}, separators=(",", ":"))
    return (
        f"  %it.1 = f32[8,128]{{1,0}} {opcode}(%x), channel_id=1{attributes}, backend_config={text}"
    )


def test_algorithms_are_read() -> None:
    ring = {
        "emitter": "RotatedPincerEmitter",
        "strategy": "StrategyRing",
        "debug": "\nStrategyRing{colors:1 phases:2 cores:{16} nophase0:0}",
    }
    offload = {
        "all_gather_offload_config": {
            "ici_strategy_config": {
                "color_strategies": [
                    {"phase_rings": [{"ring_dim": "ICI_RING_DIM_X_TORUS"}, {"ring_type": "CW"}]}
                ]
                * 2
            }
        }
    }
    transfer = ', frontend_attributes={_xla_megascale_transfer_type="ALL_REDUCE"}'
    text = "\n".join(
        [
            "HloModule it, entry_computation_layout={...}",
            line("all-gather", {"collective_algorithm_config": {"emitter": "2DAllGather"}}),
            line("all-reduce-start", {"collective_algorithm_config": ring}),
            line("fusion", {"collective_algorithm_config": {"emitter": "ReduceScatterFusion"}}),
            line("all-gather", {"collective_offload_config": offload}),
            line("send", {}, transfer),
            line("copy", {}),
            "  %p = f32[8]{0} parameter(0)",
        ]
    )
    assert list(algorithms(text)) == [
        "all-gather: 2DAllGather",
        "all-reduce: RotatedPincerEmitter StrategyRing colors=1 phases=2",
        "fusion: ReduceScatterFusion",
        "all-gather: SparseCore colors=2 phases=2 X_TORUS,EXPLICIT",
        "send: DCN ALL_REDUCE",
    ]


# --- children that end early ---------------------------------------------------------------------


def test_a_mesh_that_ends_the_process_counts_as_failed_and_the_rest_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[list[int]] = []

    def child(module: str, *options: str, **_: object) -> Iterator[dict[str, Any]]:
        numbers = list(map(int, options[2:]))
        asked.append(numbers)
        for number in numbers:
            yield {"begun": number}
            if number == 4:
                raise ChildFailedError("status=134")
            case, which = divmod(number, 4)
            row = {"case": case, "strategy": STRATEGIES[which], "error": "", "axes": []}
            yield {"number": number, "devices": "", **row}
        if numbers[-1] == 11:
            raise ChildFailedError("status=1, after its last mesh")

    monkeypatch.setattr(mesh_libtpu, "child_rows", child)
    cases, kept = libtpu_cases()[:3], tmp_path / "rows"
    rows = list(mesh_libtpu.compiled(cases, kept))
    assert [row["number"] for row in rows] == list(range(12))
    assert asked == [list(range(12)), list(range(5, 12))]
    assert [row["number"] for row in rows if row["error"]] == [4]
    assert rows[4]["error"] == "the process ended: status=134"
    assert (rows[4]["case"], rows[4]["strategy"]) == (1, STRATEGIES[0])
    # A run that was stopped goes on after what is kept.
    kept.write_text("\n".join(kept.read_text().splitlines()[:7]) + "\n")
    assert [row["number"] for row in mesh_libtpu.compiled(cases, kept)] == list(range(12))
    assert asked[-1] == [7, 8, 9, 10, 11]


def test_meshes_of_an_earlier_run_are_not_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jax")
    case = LibtpuCase("v5e", "v5e:2x2", "v5e:2x2", {}, None, (4,), None)
    ids = mesh_ids(case)
    ring = {"error": "", "devices": digest(ids["rings"]), "axes": [{"axis": "a", "size": 4}]}
    failed = {"error": "no", "devices": digest(ids["rows"]), "axes": []}
    meshes = {"search": ring, "jax": failed}  # what is what counts, not what it was called
    earlier = {"cases": [{**case.as_json(), "shape": [4], "meshes": meshes}]}
    rows = list(mesh_libtpu.known_rows([case], earlier))
    # On 2 x 2 chips JAX's mesh is the ring; the search's is in rows, and did not compile.
    assert [row["strategy"] for row in rows] == ["rings", "jax"]
    assert all(row["axes"] == ring["axes"] and row["known"] for row in rows)
    asked: list[int] = []

    def child(module: str, *options: str, **_: object) -> Iterator[dict[str, Any]]:
        asked.extend(map(int, options[2:]))
        yield from ({"number": number, "case": 0} for number in asked)

    monkeypatch.setattr(mesh_libtpu, "child_rows", child)
    found = list(mesh_libtpu.compiled([case], None, earlier))
    assert asked == [0, 2]
    assert sorted(row["number"] for row in found) == [0, 1, 2, 3]
    assert not list(mesh_libtpu.known_rows([case], {}))


@needs_libtpu
def test_an_earlier_run_of_another_libtpu_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "earlier.json"
    file.write_text('{"libtpu": "0.0.1", "cases": []}')
    assert mesh_libtpu.main(["--known", str(file), "--results", str(tmp_path)]) == 2
    assert "It is of libtpu 0.0.1, and this is libtpu" in capsys.readouterr().out


# --- tables --------------------------------------------------------------------------------------


def axis(on: str, strategy: str, gather: str, in_rows: bool = True) -> dict[str, Any]:
    found = {"axis": "a", "size": 16, "on": on, "strategy": strategy, "in_rows": in_rows}
    return {**found, "all-gather": {"how": [f"all-gather: {gather}"]}, "all-reduce": {"how": []}}


SNAKE = axis("x4 y4", "whole dims", "1D", in_rows=False)
ROWS = axis("x4 y4", "whole dims", "2D")
BLOCK = axis("x2 y8", "staggered ring", "1D")


@pytest.mark.parametrize(
    ("ours", "rows", "other", "why"),
    [
        (ROWS, ROWS, ROWS, ""),
        (ROWS, ROWS, SNAKE, "order: the chips of whole dims are in rows; in a snake or ring XLA"),
        (SNAKE, ROWS, ROWS, "order: the chips of whole dims are in a snake or ring; in rows XLA"),
        (BLOCK, BLOCK, ROWS, "place: JAX gives the axis whole dims, the search part of dims"),
        (ROWS, ROWS, BLOCK, "place: the search gives the axis whole dims, JAX part of dims"),
        (BLOCK, BLOCK, axis("x16", "ring", "3D"), "place: staggered ring instead of ring"),
        (axis("x8 core", "ring", "3D"), axis("x8 core", "ring", "3D"), BLOCK, "place: the search"),
        (BLOCK, BLOCK, axis("x8 core", "ring", "3D"), "place: JAX gives the axis the cores"),
        (axis("x4", "line", "1D", False), axis("x4", "line", "1D"), axis("x4", "line", "2D"), "or"),
        (axis("x4", "line", "1D"), axis("x4", "line", "1D"), axis("x4", "line", "2D"), "order: "),
    ],
)
def test_differences_are_explained(
    ours: dict[str, Any], rows: dict[str, Any], other: dict[str, Any], why: str
) -> None:
    meshes = {"search": ours, "rings": SNAKE, "rows": rows, "jax": other}
    found = explain(meshes, "all-gather")
    assert found.startswith(why)
    assert bool(found) == bool(why)


def case(ours: dict[str, Any], other: dict[str, Any] | None) -> dict[str, Any]:
    meshes = {
        "search": {"error": "", "axes": [ours]},
        "rings": {"error": "", "axes": [SNAKE]},
        "rows": {"error": "", "axes": [ROWS]},
        "jax": {"error": "" if other else "TypeError: no", "axes": [other] if other else []},
    }
    return {"group": "v5p", "topology": "v5p:4x4x4", "shape": [16], "dcn": None, "meshes": meshes}


def test_tables() -> None:
    cases = [case(SNAKE, ROWS), case(ROWS, ROWS), case(ROWS, None)]
    counts = "1 of 2 | 2 of 2 | 0 of 2 | 2 of 2 | 2 of 2 | 2 of 2"
    assert group_table(cases)[-1] == f"| all | 3 | 3 | 6 of 6 | 2 | 4 of 4 | {counts} |"
    assert "| all-gather | 2D | 2 | 0 | 3 | 2 |" in strategy_table(cases)
    assert "| all-gather | 1D | 1 | 3 | 0 | 0 |" in strategy_table(cases)
    assert len(difference_table(cases)) == 3
    assert difference_table(cases)[2].endswith("| 1 |")
    assert failures(cases) == ["JAX's mesh, v5p:4x4x4 (16,): TypeError: no"]
    broken = {**SNAKE, "all-gather": {"error": "INTERNAL: no"}}
    assert failures([case(broken, ROWS)]) == [
        "the mesh of 'search', v5p:4x4x4 (16,), axis a, all-gather: INTERNAL: no"
    ]


# --- what is stored, and libtpu itself -----------------------------------------------------------


@pytest.mark.skipif(
    not (mesh_document.RESULTS / "mesh_libtpu.json").exists(),
    reason="no run of benchmarks.mesh_libtpu is stored",
)
def test_the_stored_run_is_whole_and_every_mesh_of_the_search_compiled() -> None:
    found = mesh_document.stored("mesh_libtpu")
    asked = [(case.topology, list(case.shape)) for case in libtpu_cases()]
    assert [(case["topology"], case["shape"]) for case in found["cases"]] == asked
    assert [line for line in found["failures"] if not line.startswith("JAX")] == []
    assert failures(found["cases"]) == found["failures"]
    axes = list(axes_of(found["cases"]))
    assert len(axes) == sum(
        sum(n * (1 if c["dcn"] is None else c["dcn"][i]) > 1 for i, n in enumerate(c["shape"]))
        for c in found["cases"]
    )
    assert all("how" in axis["search"][kind] for axis in axes for kind in KINDS)
    assert all(explain(axis, kind) is not None for axis in axes if "jax" in axis for kind in KINDS)


@needs_libtpu
@pytest.mark.thorough
def test_libtpu_takes_the_searchs_meshes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert mesh_libtpu.main(["--sample", "10", "--results", str(tmp_path)]) == 0
    assert "Every mesh of the search compiled, on each axis." in capsys.readouterr().out
    found = json.loads((tmp_path / "mesh_libtpu.json").read_text())
    assert len(found["cases"]) == 10
    for axis in axes_of(found["cases"]):
        for kind in KINDS:
            assert axis["search"][kind]["how"], (axis, kind)
