"""Pictures of shardings."""

from __future__ import annotations

import pytest
import torch

import xla_dtensor as xd
import xla_dtensor.spmd as xs
from xla_dtensor.core import OpShardingError
from xla_dtensor.runtimes import Runtime

EVERYWHERE = [["CPU [0, 1, 2, 3, 4, 5, 6, 7]"]]
PARTIAL = "{devices=[2,1,4]<=[8] last_tile_dim_replicate}"


def cells(text: str) -> list[list[str]]:
    """The cells of what was printed, row by row."""
    rows = [line.split("│")[1:-1] for line in text.splitlines() if "CPU" in line]
    return [[cell.strip() for cell in row] for row in rows]


@pytest.mark.parametrize(
    ("sharding", "picture"),
    [
        (PARTIAL, [["CPU [0, 1, 2, 3]"], ["CPU [4, 5, 6, 7]"]]),
        (
            "{devices=[2,4]<=[4,2]T(1,0)}",
            [["CPU 0", "CPU 2", "CPU 4", "CPU 6"], ["CPU 1", "CPU 3", "CPU 5", "CPU 7"]],
        ),
        (
            "{devices=[4,2]0,4,1,5,2,6,3,7 last_tile_dim_replicate}",
            [["CPU [0, 4]"], ["CPU [1, 5]"], ["CPU [2, 6]"], ["CPU [3, 7]"]],
        ),
        ("", EVERYWHERE),
        ("{replicated}", EVERYWHERE),
        ("{maximal device=3}", [["CPU 3"]]),
    ],
)
def test_pictures(
    runtime: Runtime, capsys: pytest.CaptureFixture[str], sharding: str, picture: list[list[str]]
) -> None:
    xs.visualize_sharding(sharding)
    assert cells(capsys.readouterr().out) == picture


def test_a_picture_per_tile_of_the_dims_before(
    runtime: Runtime, capsys: pytest.CaptureFixture[str]
) -> None:
    last = xs.visualize_sharding("{devices=[2,2,2]<=[8]}", min_width=5)
    printed = capsys.readouterr().out.split("dim 0:")[1:]
    assert [cells(text) for text in printed] == [
        [["CPU 0", "CPU 1"], ["CPU 2", "CPU 3"]],
        [["CPU 4", "CPU 5"], ["CPU 6", "CPU 7"]],
    ]
    assert last.title == "dim 0: tile 1 of 2"


def test_sizes(runtime: Runtime, capsys: pytest.CaptureFixture[str]) -> None:
    table = xs.visualize_sharding(PARTIAL, use_color=False, scale=1.0)
    assert (table.row_count, len(table.columns)) == (2, 1)
    lines = capsys.readouterr().out.splitlines()
    flat = xs.visualize_sharding("{devices=[2,4]<=[8]}", use_color=False, scale=0.1, min_width=12)
    assert [column.min_width for column in flat.columns] == [12] * 4
    assert len(capsys.readouterr().out.splitlines()) < len(lines)


def test_wide_pictures(runtime: Runtime, capsys: pytest.CaptureFixture[str]) -> None:
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
    monkeypatch.setenv("FORCE_COLOR", "1")
    xs.visualize_sharding("{devices=[2,4]<=[8]}", use_color=True)
    coloured = capsys.readouterr().out
    assert "\x1b[" in coloured
    assert all(f"CPU {i}" in coloured for i in range(8))


def test_a_tensor(mesh: xd.DeviceMesh, dp_tp: xs.Mesh, capsys: pytest.CaptureFixture[str]) -> None:
    plain = torch.ones(8, 4)
    marked = xs.mark_sharding(plain, dp_tp, ("dp", None))
    for tensor in (marked, plain):
        xs.visualize_tensor_sharding(tensor, use_color=False)
        assert cells(capsys.readouterr().out) == [["CPU [0, 1, 2, 3]"], ["CPU [4, 5, 6, 7]"]]
    xs.visualize_tensor_sharding(xd.distribute_tensor(torch.ones(8), mesh, None))
    assert cells(capsys.readouterr().out) == EVERYWHERE


def test_what_is_no_sharding(runtime: Runtime) -> None:
    with pytest.raises(OpShardingError):
        xs.visualize_sharding("rows over all devices")
