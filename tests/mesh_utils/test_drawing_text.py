"""Meshes as text: planes beside each other, cores, large slices, GPUs."""

from __future__ import annotations

import numpy as np

from mesh_utils import Mesh, Topology, assign, draw_mesh


def test_text_of_planes() -> None:
    topology = Topology.parse("v5p:2x2x4")
    drawing = draw_mesh(topology, Mesh.arange((4, 4)))
    expected = """\
z=0            z=1            z=2            z=3
    x   0   1      x   0   1      x   0   1      x   0   1
y 0   0,0 0,1  y 0   1,0 1,1  y 0   2,0 2,1  y 0   3,0 3,1
y 1   0,2 0,3  y 1   1,2 1,3  y 1   2,2 2,3  y 1   3,2 3,3"""
    assert drawing.text() == expected
    narrow = drawing.text(width=20).splitlines()
    assert [line for line in narrow if line.startswith("z")] == ["z=0", "z=1", "z=2", "z=3"]


def test_text_of_two_cores() -> None:
    topology = Topology.parse("tpu7x:2x2x1")
    mesh = Mesh(np.arange(8).reshape(4, 2).T, (2, 4))
    assert draw_mesh(topology, mesh).text().splitlines()[2] == "y 0   0-1,0 0-1,1"
    apart = Mesh([0, 2, 4, 1, 3, 5, 6, 7], (8,))
    assert draw_mesh(topology, apart).labels[0, 0, 0] == "0 3"


def test_text_of_a_large_slice_is_short() -> None:
    topology = Topology.parse("v5p:16x16x16")
    text = draw_mesh(topology, assign(topology, (512, 8)).mesh).text()
    assert len(text.splitlines()) < 50
    assert "..." in text
    assert "z=15" in text
    assert max(map(len, text.splitlines())) <= 100


def test_text_of_gpus() -> None:
    topology = Topology.parse("gb200:72")
    lines = draw_mesh(topology, Mesh.arange((72,))).text().splitlines()
    assert len(lines) == 9
    assert lines[8] == "gpu 64  64 65 66 67 68 69 70 71"
