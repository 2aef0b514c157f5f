"""Placement texts of reports."""

from __future__ import annotations

import pytest

from xla_dtensor.report.report import MeshAxis
from xla_dtensor.report.texts import axis_uses

MESH = (MeshAxis("dp", 2, 1), MeshAxis("tp", 4, 1))


@pytest.mark.parametrize(
    ("text", "dims"),
    [
        ("Shard(0), Replicate()", (0, None)),
        ("Shard(dim=1), Shard(dim=0)", (1, 0)),
        ("(Shard(dim=0), Partial(sum))", (0, None)),
        ("(Shard(dim=0),Shard(-1))", (0, 2)),
        ("S(2), R", (2, None)),
        ("_StridedShard(dim=0, split_factor=4), Shard(dim=0)", (0, 0)),
    ],
)
def test_what_each_axis_does(text: str, dims: tuple[int | None, ...]) -> None:
    uses = axis_uses(text, MESH, 3)
    assert uses is not None
    assert tuple(use.dim for use in uses) == dims
    assert [use.is_partial for use in uses] == [False, "Partial" in text]
    assert [use.is_strided for use in uses] == ["_Strided" in text, False]


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "Shard(0)",
        "Shard(0), Replicate(), Replicate()",
        "Shard(3), R",
        "left, right",
        "((,",
    ],
)
def test_what_says_nothing_of_each_axis(text: str | None) -> None:
    assert axis_uses(text, MESH, 3) is None
