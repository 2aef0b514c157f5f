"""What tools.house finds in small packages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tools.house import LAZY, LOAD, ROOT, House

FILES = {
    "a": "SIZE = 1\n\n\ndef same():\n    return 1\n",
    "b": "from xla_dtensor.a import SIZE\n\n\ndef same():\n    return 1\n",
    "c": "SIZE = 2\n\n\ndef later():\n    from xla_dtensor import d\n\n    return d\n",
    "d": "import xla_dtensor.c\n",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        file = tmp_path / "xla_dtensor" / f"{name}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return tmp_path


def house(root: Path, **rows: list[str]) -> House:
    """A tree of one file in each of the folders low and high."""
    named = {
        folder: {"file.py": [f"xla_dtensor/{stem}.py" for stem in stems]}
        for folder, stems in rows.items()
    }
    tree: dict[str, Any] = {"folders": named}
    return House(tree, root)


def test_places(root: Path) -> None:
    assert house(root, low=["a", "gone"], high=["b", "c"]).misplaced() == [
        "xla_dtensor/d.py: no row",
        "xla_dtensor/gone.py: in the tree, and not there",
    ]


def test_imports_that_point_down(root: Path) -> None:
    assert house(root, low=["a", "c"], high=["b", "d"]).down()[0].kind == LAZY
    (down,) = house(root, low=["b"], high=["a", "c", "d"]).down()
    assert (down.kind, down.target) == (LOAD, "xla_dtensor/a.py")


def test_circles(root: Path) -> None:
    tree = house(root, low=["a", "c"], high=["b", "d"])
    assert tree.circles(LOAD) == []
    assert tree.circles(LOAD, LAZY) == [["high/file.py", "low/file.py"]]


def test_names(root: Path) -> None:
    assert house(root, low=["a", "b"], high=["c", "d"]).clashes() == {}
    assert house(root, low=["a", "c"], high=["b", "d"]).clashes() == {"low/file.py": ["SIZE"]}


def test_the_tree_places_every_file_and_has_no_circle() -> None:
    tree = yaml.safe_load((ROOT / "tools" / "house_tree.yaml").read_text("utf-8"))
    found = House(tree, ROOT)
    assert found.misplaced() == []
    assert found.circles(LOAD) == []
