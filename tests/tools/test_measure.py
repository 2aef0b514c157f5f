"""What tools.measure counts, in a package of two files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import measure

ONE = '''"""A docstring,
of two lines."""

import json  # why

# ------------------------------------------ a heading
found = {"a": 1}
'''
TWO = "from xla_dtensor.one import found\n\n\ndef double(size):\n    return 2 * size\n"


def test_sizes(tmp_path: Path) -> None:
    package = tmp_path / "xla_dtensor"
    package.mkdir()
    (package / "one.py").write_text(ONE, encoding="utf-8")
    (package / "two.py").write_text(TWO, encoding="utf-8")
    counted = measure.sizes(tmp_path)
    assert counted["files"] == 2
    assert counted["lines"] == 12
    assert counted["code lines"] == 5  # neither docstrings nor comments nor empty lines
    assert counted["comments per 100 lines of code"] == 20  # a heading says nothing of why
    assert counted["files with one importer"] == 1
    # import json found; from xla_dtensor one import found, def double size return size
    assert counted["names that say nothing, per 1,000"] == pytest.approx(1000 * 3 / 13, abs=0.1)
    assert counted["files in the largest circle"] == 0


def test_measured() -> None:
    from mesh_utils import Mesh

    _, (files, functions, calls) = measure._measured(lambda: Mesh.arange((2, 4), ("dp", "tp")))
    assert 1 <= files <= functions <= calls
    assert measure._measured(lambda: 1 + 1)[1] == (0, 0, 0)
