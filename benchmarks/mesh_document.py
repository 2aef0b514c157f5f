"""Writes the stored figures of `benchmarks.mesh` and `benchmarks.mesh_libtpu` into the document.

    python -m benchmarks.mesh_document

docs/mesh_search.md has a pair of comments around each table; what stands between them is replaced.
The plot is drawn anew, too. A test compares the document with what is stored. Tables of a benchmark
of which no run is stored stay as they are.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.mesh_libtpu_summary import difference_table, group_table, strategy_table
from benchmarks.mesh_plot import svg_of_gains
from benchmarks.mesh_summary import families, ring_table, slice_table, summary_table
from benchmarks.timing import RESULTS

DOCS = Path(__file__).resolve().parents[1] / "docs"
DOCUMENT = DOCS / "mesh_search.md"
FIGURE = DOCS / "figures" / "mesh.svg"

SHOWN_SLICES = (
    *("v5e:2x4", "v5e:4x4", "v5e:8x8", "v5e:8x16", "v5e:16x16"),
    *("v5p:4x4x4", "v5p:4x4x8", "v5p:8x8x8", "v5p:8x16x16", "v5p:16x16x16"),
    *("v5p:4x4x12", "v5p:4x8x12", "v5p:12x16x16", "tpu7x:4x4x4", "tpu7x:8x8x8", "tpu7x:16x16x16"),
)
"""The slices that have a row of their own in the document."""


def main() -> int:
    """Writes the document and the plot."""
    mesh, libtpu = stored("mesh"), stored("mesh_libtpu")
    text = DOCUMENT.read_text(encoding="utf-8")
    DOCUMENT.write_text(filled(text, tables(mesh, libtpu)), encoding="utf-8")
    FIGURE.write_text(svg_of_gains(mesh["slices"]), encoding="utf-8")
    print(f"Written: {DOCUMENT} and {FIGURE}")
    return 0


def stored(name: str) -> dict[str, Any]:
    """What a benchmark stored.

    Args:
        name: such as "mesh".

    Returns:
        The content of its JSON file; nothing where there is none.
    """
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def tables(mesh: Mapping[str, Any], libtpu: Mapping[str, Any]) -> dict[str, list[str]]:
    """All tables of the document.

    Args:
        mesh: what `benchmarks.mesh` stored.
        libtpu: what `benchmarks.mesh_libtpu` stored; empty where nothing is.

    Returns:
        For each name the lines of a table.
    """
    shown = [row for row in mesh["slices"] if row["slice"] in SHOWN_SLICES and not row["jax_kind"]]
    found = {
        "families": summary_table(families(mesh["slices"])),
        "slices": slice_table(shown),
        "rings": ring_table(mesh["rings"]),
    }
    if not libtpu:
        return found
    return {
        **found,
        "libtpu groups": group_table(libtpu["cases"]),
        "libtpu strategies": strategy_table(libtpu["cases"]),
        "libtpu differences": difference_table(libtpu["cases"]),
    }


def filled(text: str, found: Mapping[str, Sequence[str]]) -> str:
    r"""A document with its tables.

    Args:
        text: the document.
        found: for each name the lines of a table.

    Returns:
        The document, with what stood between the comments replaced.

    Raises:
        ValueError: it has no place for a table.

    Example:
        >>> filled("<!-- begin a -->\nold\n<!-- end a -->", {"a": ["new"]})
        '<!-- begin a -->\nnew\n<!-- end a -->'
    """
    for name, lines in found.items():
        first, last = f"<!-- begin {name} -->\n", f"\n<!-- end {name} -->"
        pattern = re.compile(re.escape(first) + ".*?" + re.escape(last), re.DOTALL)
        if not pattern.search(text):
            raise ValueError(
                f"The table {name!r} was to be written. The document has no place for it. "
                f"Put {first.strip()} and {last.strip()} around a line."
            )
        table = first + "\n".join(lines) + last
        text = pattern.sub(lambda _, table=table: table, text)
    return text


if __name__ == "__main__":
    sys.exit(main())
