"""visualize_sharding of everything that says how a tensor lies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

import xla_dtensor as xd
from xla_dtensor.core import Layout, OpSharding
from xla_dtensor.debug.visualize import sharding_picture, visualize_sharding
from xla_dtensor.errors import ArgumentTypeError
from xla_dtensor.report.report import ReportError

pytestmark = pytest.mark.usefixtures("runtime")


def test_a_live_tensor_shows_the_devices_of_its_shards(mesh: xd.DeviceMesh) -> None:
    x = xd.distribute_tensor(torch.arange(60.0).reshape(10, 6), mesh, [Shard(1), Shard(0)])
    found = sharding_picture(x)
    for shard in x.addressable_shards():
        place = [int(i[0]) for i in (found.devices == shard.device_id).nonzero()]
        for cut, block, held in zip(found.dims, place, shard.index, strict=False):
            span = cut.span(block)
            assert span is not None
            assert span[1] - span[0] == held.stop - held.start
            assert span[0] == held.start or span[0] == span[1]
    assert found.text().startswith("float32 [tp, dp] on dp=2, tp=4")


def test_it_is_printed_and_written(
    mesh: xd.DeviceMesh, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    x = xd.distribute_tensor(torch.ones(8, 4, 4), mesh, [Shard(0), Shard(2)])
    picture = visualize_sharding(x, header="a cube", svg=tmp_path / "x.svg")
    assert capsys.readouterr().out == f"a cube\n{picture.text()}\n"
    assert "dim 1: 4 whole" in picture.text()
    assert (tmp_path / "x.svg").read_text() == picture.svg()
    visualize_sharding(x, use_rich=True)
    assert "copied" not in capsys.readouterr().out


def test_a_label_that_is_not_how_it_lies_is_said(mesh: xd.DeviceMesh) -> None:
    x = xd.distribute_tensor(torch.ones(8, 8), mesh, [Replicate(), Shard(1)])
    product: Any = x @ x.t()
    assert any(isinstance(p, Partial) for p in product.placements)
    assert "labelled [-, -] sum(tp)" in sharding_picture(product).text()


@pytest.mark.parametrize(
    ("what", "shape"),
    [
        ([Replicate(), Shard(0)], (8, 4)),
        (("tp", None), (8, 4)),
        (("tp", None), None),
        ("[tp, -]", (8, 4)),
        ("{devices=[4,1,2]<=[2,4]T(1,0) last_tile_dim_replicate}", (8, 4)),
        (OpSharding.parse("{devices=[4,1,2]<=[2,4]T(1,0) last_tile_dim_replicate}"), None),
    ],
)
def test_what_is_asked_for_in_other_words(
    mesh: xd.DeviceMesh, what: object, shape: tuple[int, ...] | None
) -> None:
    found = sharding_picture(what, mesh=mesh, shape=shape)
    assert found.devices[:, 0].tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert found.dims[0].axes == ("tp",)
    same = Layout.parse("[tp, -]", mesh.value)
    assert sharding_picture(same).devices.tolist() == found.devices.tolist()


def test_xlas_text_needs_no_mesh() -> None:
    text = sharding_picture("{devices=[2,4]<=[8]}").text()
    assert text.splitlines()[-1].split() == ["4", "5", "6", "7"]


def test_refusals(mesh: xd.DeviceMesh) -> None:
    with pytest.raises(ArgumentTypeError, match="of type=tuple, without a mesh"):
        sharding_picture(("dp", None))
    with pytest.raises(ArgumentTypeError, match="in the host's memory"):
        sharding_picture(torch.ones(3))
    with pytest.raises(ReportError, match="does not say which device"):
        sharding_picture("{devices=[2,4]<=[8]}", shape=(8,))
