"""Pictures of shardings: which device has which block, at any rank and number of devices."""

from __future__ import annotations

import io
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from mesh_utils import Mesh
from tests.xla_dtensor.report.sample_evidence import evidence
from xla_dtensor.core import Layout, OpSharding, local_shape
from xla_dtensor.report import CompileReport, ReportError
from xla_dtensor.report.page import layout_of_text, picture_of_tensor, tensor_line
from xla_dtensor.report.sharding_picture import DimCut, ShardingPicture, picture_of, shown

MESH = Mesh.arange((2, 4), ("dp", "tp"))
CUBE = Mesh.arange((4, 8, 16), ("pp", "dp", "tp"))


def picture(text: str, shape: tuple[int, ...] | None, mesh: Mesh = MESH) -> ShardingPicture:
    layout = Layout.parse(text, mesh)
    return picture_of(layout.op_sharding(), shape, mesh, layout=layout, element_bytes=4)


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("[dp, tp]", (10, 6)),
        ("[tp, dp]", (9, 5)),
        ("[tp.dp, -]", (10, 3)),
        ("[-, -, tp]", (2, 3, 7)),
        ("[-]", (4,)),
        ("[]", ()),
    ],
)
def test_each_device_is_in_the_block_that_it_holds(text: str, shape: tuple[int, ...]) -> None:
    found = picture(text, shape)
    layout = Layout.parse(text, MESH)
    assert sorted(found.devices.reshape(-1).tolist()) == list(range(8))
    for place in np.ndindex(*found.devices.shape):
        device = int(found.devices[place])
        coordinate = tuple(int(i) for i in np.argwhere(MESH.device_ids == device)[0])
        held = local_shape(layout, shape, coordinate)
        for cut, block in zip(found.dims, place, strict=False):
            span = cut.span(block)
            assert span is not None
            assert span[1] - span[0] == held.shape[cut.dim]
            assert held.shape[cut.dim] == 0 or span[0] == held.offset[cut.dim]


def test_text_of_an_uneven_matrix() -> None:
    assert picture("[dp, tp]", (10, 6)).text().splitlines() == [
        "[dp, tp] on dp=2, tp=4",
        "  dim 0: 10 in 2 blocks of 5 by dp",
        "  dim 1: 6 in 4 blocks of 2 by tp, 1 empty (2 of padding)",
        "  a device holds 5 x 2, 40 of 240 bytes",
        "",
        "devices        tp 0  tp 1  tp 2  tp 3",
        "               0:2   2:4   4:6   empty",
        "dp 0     0:5   0     1     2     3",
        "dp 1     5:10  4     5     6     7",
    ]


def test_copies_are_said_and_shown() -> None:
    found = picture("[tp, -]", (8, 6))
    assert found.num_copies == 2
    assert "each block on 2 devices, copied along dp" in found.summary
    assert found.text().splitlines()[-1].split() == ["tp", "3", "6:8", "3,", "7"]


def test_four_dims_on_512_devices_are_elided() -> None:
    found = picture("[pp, dp, -, tp]", (8, 32, 7, 64), CUBE)
    assert found.sides == (1, 3)
    faces = list(found.faces())
    assert [face.title for face in faces] == [
        f"dim 0: pp {i}, {2 * i}:{2 * i + 2}" for i in range(4)
    ]
    assert faces[0].columns == (0, 1, 2, 3, 4, 5, 6, None, 15)
    assert faces[1].cells[0][0] == (128,)
    fewer = list(found.faces(rows=3, columns=3, faces=2))
    assert [face.hidden for face in fewer] == [0, 2, 0]
    assert len(found.text().splitlines()) < 60
    assert max(map(len, found.text(60).splitlines())) <= 80


def test_many_devices_are_drawn_at_once() -> None:
    big = Mesh.arange((64, 512), ("dp", "tp"))
    text = picture("[dp, tp]", (8192, 8192), big).text()
    assert "32767" in text
    assert len(text.splitlines()) < 20
    whole = picture("[-, -]", (8, 8), big).text()
    assert "0-32767" in whole


def test_what_is_shown_and_what_is_hidden_is_everything() -> None:
    for count in range(1, 40):
        for limit in (2, 3, 8):
            rows = shown(count, limit)
            assert rows[-1] == count - 1
            assert rows[0] == 0
            assert len(rows) <= limit + 1
    found = picture("[pp, dp, tp, -]", (16, 16, 16, 3), CUBE)
    faces = list(found.faces(faces=2))
    assert sum(face.hidden or 1 for face in faces) == 4


def test_an_sharding_of_xlas_without_a_mesh() -> None:
    found = picture_of(OpSharding.parse("{devices=[2,1,4]<=[8] last_tile_dim_replicate}"))
    assert found.text().splitlines()[-2:] == ["0-3", "4-7"]
    listed = picture_of(OpSharding.parse("{devices=[4]3,1,2,0}"), (8,))
    assert [int(i) for i in listed.devices[:, 0]] == [3, 1, 2, 0]
    alone = picture_of(OpSharding.parse("{maximal device=3}"), (8,), MESH)
    assert alone.devices.tolist() == [[3]]


def test_device_ids_are_those_of_the_mesh() -> None:
    mesh = Mesh([7, 6, 5, 4, 3, 2, 1, 0], (2, 4), ("dp", "tp"))
    assert picture("[dp, -]", (2, 2), mesh).devices[0, 0].tolist() == [7, 6, 5, 4]


def test_svg_is_well_formed_and_escaped() -> None:
    found = replace(picture("[dp, tp]", (10, 6)), title="<w> & co")
    root = ElementTree.fromstring(found.svg())
    texts = ["".join(node.itertext()) for node in root.iter() if node.tag.endswith("text")]
    assert texts[0].startswith("<w> & co [dp, tp]")
    assert {"dp 0", "tp 3", "empty", "7"} <= set(texts)
    boxes = [node for node in root.iter() if node.tag.endswith("rect")]
    assert len(boxes) == 1 + 8


def test_rich_has_the_same_words() -> None:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(picture("[dp, tp]", (10, 6)).rich())
    text = console.export_text()
    for word in ("dp 1", "5:10", "tp 3", "empty", "1 empty (2 of padding)"):
        assert word in text


@pytest.mark.parametrize(
    ("cut", "words"),
    [
        (DimCut(1, 8, 1), "dim 1: 8 whole"),
        (DimCut(0, None, 2, ("dp",)), "dim 0: in 2 blocks by dp"),
        (DimCut(0, 9, 8), "dim 0: 9 in 8 blocks of 2, then one of 1, 3 empty (7 of padding)"),
    ],
)
def test_words_of_a_cut(cut: DimCut, words: str) -> None:
    assert cut.words == words


def test_pictures_of_a_report() -> None:
    report = CompileReport.of(evidence())
    line = tensor_line(report, "layers.1.w1.weight")
    assert line.name == "layers.*.w1.weight"
    text = picture_of_tensor(report, line).text()
    assert "dim 0: 1,024 in 4 blocks of 256 by dp" in text
    assert "2 tensors lie like this" in text
    embed = picture_of_tensor(report, tensor_line(report, "embed.weight"))
    assert "asked for was Shard(0), Replicate()" in embed.notes
    assert str(layout_of_text("[tp, -]", report.mesh, 2)) == "[tp, -]"
    assert layout_of_text("[-]", report.mesh, 2) is None


def test_refusals() -> None:
    report = CompileReport.of(evidence())
    with pytest.raises(ReportError, match="name='w9'"):
        tensor_line(report, "w9")
    with pytest.raises(ReportError, match="of the tensor 'args"):
        picture_of_tensor(report, tensor_line(report, "args[0]"))
    with pytest.raises(ReportError, match="does not say which device"):
        picture_of(OpSharding.parse("{manual}"), (4,))
    with pytest.raises(ReportError, match=r"shape=\(4, 4\)"):
        picture_of(OpSharding.parse("{devices=[4]<=[4]}"), (4, 4))
