"""The tables and the plot of `benchmarks.step`, and the document that shows both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks import step
from benchmarks.step_plan import BY_HAND, OURS
from benchmarks.step_plot import panels_of, svg_of
from benchmarks.step_tables import tables, with_tables
from benchmarks.timing import RESULTS

ROOT = Path(__file__).resolve().parents[2]
SVG = "{http://www.w3.org/2000/svg}"


def row_of(way: str, seconds: float, **more: Any) -> dict[str, Any]:
    gathered = {"kind": "all-gather", "axes": ["dp"], "count": 3, "bytes": 4000}
    return {
        "model": "vit",
        "devices": 8,
        "way": way,
        "builds": [[0.5, 1.25]],
        "step_seconds": {
            "median": seconds,
            "least": seconds / 2,
            "measurements": 9,
            "turns": [seconds, seconds / 2, seconds * 2],
        },
        "losses": [4.0, 3.0],
        "loss_difference": 2e-7,
        "flops": 2e9,
        "temporary_bytes": 1_000_000,
        "peak_bytes": None,
        "collectives": [gathered],
        **more,
    }


ROWS = [row_of(OURS, 0.3), row_of(BY_HAND, 0.2, collectives=[])]
PODS = [{**row_of(OURS, 1.0), "topology": "v5e:2x4", "mesh": [2, 4]}]
STORED = {"rows": ROWS, "pods": PODS}


def test_tables() -> None:
    steps, moved, pods = tables(STORED)
    assert steps.startswith("**ViT, 8 devices**\n\n| way | ")
    ours = steps.splitlines()[-2].split(" | ")
    assert ours[3:7] == ["1.00", "300.0", "150.0", "1.500 (1.500 to 1.500)"]
    assert ours[-1] == "2e-07 |"
    assert "| all-gather | dp | 4.0 (3) | - |" in moved
    assert "| all |  | 4.0 (3) | 0.0 (0) |" in moved
    assert "| ViT | v5e:2x4, 2 x 4 | xla_dtensor on JAX | 2.000 | 1.0 | 3 | 0.004 | 0.004 |" in pods


def test_a_table_without_jax_by_hand_has_no_ratios() -> None:
    steps, _ = tables({"rows": ROWS[:1]})
    cells = steps.splitlines()[-1].split(" | ")
    assert (cells[3], cells[6]) == ("-", "-")


def test_plot(tmp_path: Path) -> None:
    (tmp_path / "step.json").write_text(json.dumps(STORED))
    drawn = tmp_path / "figures" / "step.svg"
    assert step.main([f"--results={tmp_path}", f"--plot={drawn}"]) == 0
    picture = ElementTree.parse(drawn).getroot()
    bars = [bar for bar in picture.iter(f"{SVG}rect") if "rx" in bar.attrib]
    lengths = [float(bar.attrib["width"]) for bar in bars]
    assert lengths[0] == pytest.approx(1.5 * lengths[1], abs=0.1)
    words = [text.text for text in picture.iter(f"{SVG}text")]
    assert "300 (1.50)" in words
    assert "ViT, 8 devices: median step, ms (ratio to JAX by hand)" in words
    bottom = max(float(bar.attrib["y"]) + float(bar.attrib["height"]) for bar in bars)
    assert bottom <= float(picture.attrib["height"])


def test_text_is_escaped() -> None:
    rows = [row_of("a < b & c", 0.1)]
    assert "a &lt; b &amp; c" in svg_of(panels_of({"rows": rows}))


def test_tables_go_between_the_marks() -> None:
    document = "before\n\n<!-- figures -->\n\nold\n\n<!-- end of figures -->\n\nafter\n"
    written = with_tables(document, STORED)
    assert written == with_tables(written, STORED)
    assert written.startswith("before\n\n<!-- figures -->\n\n**ViT, 8 devices**\n\n| way |")
    assert written.endswith("|\n\n<!-- end of figures -->\n\nafter\n")
    assert "old" not in written


def test_cases_that_were_not_measured_again_stay() -> None:
    other = [{**row, "devices": 1} for row in ROWS]
    newer = [row_of(OURS, 0.1)]
    assert step._merged([*ROWS, *other], newer) == [*other, *newer]
    pod = {**PODS[0], "topology": "v5p:2x2x2"}
    assert step._merged(PODS, [pod]) == [*PODS, pod]


def test_the_document_shows_what_is_stored() -> None:
    stored = json.loads((RESULTS / "step.json").read_text())
    document = (ROOT / "docs" / "benchmarks.md").read_text()
    assert with_tables(document, stored) == document
    assert (ROOT / "docs" / "figures" / "step.svg").read_text() == svg_of(panels_of(stored))
