"""What tools.house finds in small packages."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.house import LAZY, LOAD, TYPE, House

FILES = {
    "low/a": "SIZE = 1\n",
    "low/c": "def later():\n    from xla_dtensor.high import d\n\n    return d\n",
    "high/b": "from xla_dtensor.low.a import SIZE\n",
    "high/inner/d": "import xla_dtensor.low.c\n",
}
FOLDERS = ["xla_dtensor/low", "xla_dtensor/high"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        file = tmp_path / "xla_dtensor" / f"{name}.py"
        file.parent.mkdir(exist_ok=True, parents=True)
        file.write_text(text, encoding="utf-8")
    return tmp_path


def test_a_folder_in_no_row_is_of_the_one_around_it(root: Path) -> None:
    house = House(FOLDERS, [], root)
    assert house.floor("xla_dtensor/high/inner/d.py") == 1
    with pytest.raises(KeyError):
        house.floor("xla_dtensor/x.py")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("from xla_dtensor.high.b import SIZE", LOAD),
        ("def later():\n    import xla_dtensor.high.b", LAZY),
        ("def later():\n    return importlib.import_module('xla_dtensor.high.b')", LAZY),
        ("if TYPE_CHECKING:\n    from xla_dtensor.high.b import SIZE", TYPE),
    ],
)
def test_imports_that_point_down(root: Path, text: str, kind: str) -> None:
    assert House(FOLDERS, [], root).down() == []
    (root / "xla_dtensor/low/a.py").write_text(text, encoding="utf-8")
    (down,) = House(FOLDERS, [], root).down()
    assert (down.kind, str(down)) == (kind, "xla_dtensor/low/a.py -> xla_dtensor/high/b.py")
    assert House(FOLDERS, [str(down)], root).down() == []


def test_exceptions_shrink(root: Path) -> None:
    exception = "xla_dtensor/low/a.py -> xla_dtensor/high/b.py"
    assert House(FOLDERS, [exception], root).needless() == [exception]


def test_circles(root: Path) -> None:
    later = "def later():\n    from xla_dtensor.high.inner import d\n\n    return d\n"
    (root / "xla_dtensor/low/c.py").write_text(later, encoding="utf-8")
    house = House(FOLDERS, [], root)
    assert house.circles(LOAD) == []
    assert house.circles(LOAD, LAZY) == [["xla_dtensor/high/inner/d.py", "xla_dtensor/low/c.py"]]
