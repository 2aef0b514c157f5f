"""Pictures of shardings, with rich and without."""

from __future__ import annotations

import builtins
from typing import Any

import pytest
import torch

import xla_dtensor as xd
import xla_dtensor.spmd as xs
from xla_dtensor.core import OpShardingError
from xla_dtensor.runtimes import Runtime

EVERYWHERE = """\
+------------------------------+
| CPU [0, 1, 2, 3, 4, 5, 6, 7] |
+------------------------------+"""
PARTIAL = "{devices=[2,1,4]<=[8] last_tile_dim_replicate}"


@pytest.fixture
def no_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "rich":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)


@pytest.mark.parametrize(
    ("sharding", "picture"),
    [
        (
            PARTIAL,
            """\
+------------------+
| CPU [0, 1, 2, 3] |
+------------------+
| CPU [4, 5, 6, 7] |
+------------------+""",
        ),
        (
            "{devices=[2,4]<=[4,2]T(1,0)}",
            """\
+---------+---------+---------+---------+
|  CPU 0  |  CPU 2  |  CPU 4  |  CPU 6  |
+---------+---------+---------+---------+
|  CPU 1  |  CPU 3  |  CPU 5  |  CPU 7  |
+---------+---------+---------+---------+""",
        ),
        (
            "{devices=[4,2]0,4,1,5,2,6,3,7 last_tile_dim_replicate}",
            """\
+------------+
| CPU [0, 4] |
+------------+
| CPU [1, 5] |
+------------+
| CPU [2, 6] |
+------------+
| CPU [3, 7] |
+------------+""",
        ),
        ("", EVERYWHERE),
        ("{replicated}", EVERYWHERE),
        ("{maximal device=3}", "+---------+\n|  CPU 3  |\n+---------+"),
    ],
)
@pytest.mark.usefixtures("no_rich")
def test_pictures(
    runtime: Runtime, capsys: pytest.CaptureFixture[str], sharding: str, picture: str
) -> None:
    assert xs.visualize_sharding(sharding) == picture
    assert capsys.readouterr().out == f"{picture}\n\n"


@pytest.mark.usefixtures("no_rich")
def test_a_picture_per_tile_of_the_dims_before(
    runtime: Runtime, capsys: pytest.CaptureFixture[str]
) -> None:
    last = xs.visualize_sharding("{devices=[2,2,2]<=[8]}", min_width=5)
    printed = capsys.readouterr().out.split("\n\n")
    assert [text.splitlines()[0] for text in printed if text] == [
        "dim 0: tile 0 of 2",
        "dim 0: tile 1 of 2",
    ]
    assert printed[1] == last
    assert [line for line in last.splitlines() if "CPU" in line] == [
        "| CPU 4 | CPU 5 |",
        "| CPU 6 | CPU 7 |",
    ]


def test_with_rich(runtime: Runtime, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    table = xs.visualize_sharding(PARTIAL, use_color=False, scale=1.0)
    assert (table.row_count, len(table.columns)) == (2, 1)
    lines = capsys.readouterr().out.splitlines()
    assert [line.strip("│| ") for line in lines if "CPU" in line] == [
        "CPU [0, 1, 2, 3]",
        "CPU [4, 5, 6, 7]",
    ]
    flat = xs.visualize_sharding("{devices=[2,4]<=[8]}", use_color=False, scale=0.1, min_width=12)
    assert [column.min_width for column in flat.columns] == [12] * 4
    assert len(capsys.readouterr().out.splitlines()) < len(lines)


def test_wide_pictures(runtime: Runtime, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    xs.visualize_sharding("{devices=[1,8]<=[8]}", use_color=False)
    xs.visualize_sharding("{devices=[1,8]<=[8]}", use_color=False, max_width=90)
    lines = [line for line in capsys.readouterr().out.splitlines() if "CPU" in line]
    assert [(line.strip()[0], line.strip()[-1], line.count("CPU")) for line in lines] == [
        ("│", "│", 8)
    ] * 2
    xs.visualize_sharding(
        f"{{devices=[1,2,9]{','.join(map(str, range(18)))} last_tile_dim_replicate}}"
    )
    assert "CPU [0-8]" in capsys.readouterr().out


def test_with_colours(
    runtime: Runtime, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("FORCE_COLOR", "1")
    xs.visualize_sharding("{devices=[2,4]<=[8]}", use_color=True)
    coloured = capsys.readouterr().out
    assert "\x1b[" in coloured
    assert all(f"CPU {i}" in coloured for i in range(8))


@pytest.mark.usefixtures("no_rich")
def test_a_tensor(mesh: xd.DeviceMesh, dp_tp: xs.Mesh) -> None:
    plain = torch.ones(8, 4)
    marked = xs.mark_sharding(plain, dp_tp, ("dp", None))
    expected = xs.visualize_sharding(PARTIAL)
    assert xs.visualize_tensor_sharding(marked) == expected
    assert xs.visualize_tensor_sharding(plain, use_color=False) == expected
    whole = xd.distribute_tensor(torch.ones(8), mesh, None)
    assert xs.visualize_tensor_sharding(whole) == EVERYWHERE


def test_what_is_no_sharding(runtime: Runtime) -> None:
    with pytest.raises(OpShardingError):
        xs.visualize_sharding("rows over all devices")
