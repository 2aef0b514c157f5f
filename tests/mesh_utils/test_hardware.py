"""Hardware: every figure has a source, names lead to chips, faults of a file are told."""

from __future__ import annotations

import math
import pickle
from importlib.resources import files

import pytest

from mesh_utils import MeshError, chips, find_chip
from mesh_utils.hardware import Figure, read_box, read_hardware, yaml_names

TEXT = files("tpu_configs").joinpath("hardware", "v5p.yaml").read_text(encoding="utf-8")


def test_the_chips_that_are_known() -> None:
    names = [chip.name for chip in chips()]
    assert names[:7] == ["v2", "v3", "v4", "v5e", "v5p", "v6e", "tpu7x"]
    assert set(names[7:]) == {"h100", "h200", "b200", "gb200"}
    assert set(yaml_names("hardware")) == set(names)


@pytest.mark.parametrize("name", yaml_names("hardware"))
def test_every_figure_has_a_source_or_a_reason(name: str) -> None:
    chip = find_chip(name)
    chip.check_valid()
    for key, figure in [*chip.figures.items(), *chip.peak_flops.items()]:
        for each in (figure, *figure.others):
            known = each.value is not None
            assert bool(each.source if known else each.reason), (name, key)
    assert chip.slices.source
    assert chip.slices.can_twist == bool(chip.slices.twist_reason)


@pytest.mark.parametrize(
    ("name", "hbm", "usable", "bf16", "hbm_rate", "link", "dcn"),
    [
        ("v4", 32 * 2**30, 30.75 * 2**30, 275e12, 1200e9, 45e9, 6.25e9),
        ("v5e", 16 * 2**30, 15.75 * 2**30, 197e12, 819e9, 50e9, 3.125e9),
        ("v5p", 95 * 2**30, 95.73 * 2**30, 459e12, 2765e9, 100e9, 6.25e9),
        ("v6e", 32 * 2**30, 31.24 * 2**30, 918e12, 1638e9, 100e9, 12.5e9),
        ("tpu7x", 192 * 2**30, 94.74 * 2**30, 2307e12, 7380e9, 100e9, 12.5e9),
        ("h100", 80e9, None, 990e12, 3350e9, 450e9, 50e9),
        ("gb200", 192e9, None, 2500e12, 8000e9, 900e9, 50e9),
        ("v2", None, 7.48 * 2**30, 45e12, 700e9, None, None),
    ],
)
def test_figures(
    name: str,
    hbm: float | None,
    usable: float | None,
    bf16: float,
    hbm_rate: float,
    link: float | None,
    dcn: float | None,
) -> None:
    chip = find_chip(name)
    assert chip.hbm_bytes == (None if hbm is None else round(hbm))
    assert chip.usable_hbm_bytes == (None if usable is None else round(usable))
    assert chip.peak("bf16") == pytest.approx(bf16)
    assert chip.peak("fp3") is None
    assert chip.hbm_bytes_per_second == pytest.approx(hbm_rate)
    assert chip.link_bytes_per_second == (None if link is None else pytest.approx(link))
    assert chip.dcn_bytes_per_second == (None if dcn is None else pytest.approx(dcn))


def test_where_sources_disagree_both_are_kept() -> None:
    disputed = {
        f"{chip.name}.{key}"
        for chip in chips()
        for key, figure in chip.figures.items()
        if figure.is_disputed
    }
    assert {"v4.ici_link_bandwidth", "v5p.hbm", "v5p.ici_link_bandwidth"} <= disputed
    link = find_chip("v4").figure("ici_link_bandwidth")
    assert [each.value for each in (link, *link.others)] == [45e9, 50e9, 44.8e9, 46.9e9]
    assert link.source != link.others[0].source


def test_pod_sizes_are_those_of_the_largest_slice() -> None:
    for chip in chips():
        pod = chip.figure("pod_chips").whole
        largest = math.prod(max(chip.slices.shapes, key=math.prod))
        assert pod == largest, chip.name


@pytest.mark.parametrize(
    ("name", "chip"),
    [
        ("v5p", "v5p"),
        ("TPU v5", "v5p"),
        ("v5litepod", "v5e"),
        ("TPU v5 lite", "v5e"),
        ("tpu-v5-lite-podslice", "v5e"),
        ("Trillium", "v6e"),
        ("TPU v6 lite", "v6e"),
        ("ironwood", "tpu7x"),
        ("TPU7x", "tpu7x"),
        ("NVIDIA H200", "h200"),
        ("nvidia-gb200", "gb200"),
        ("nvl72", "gb200"),
    ],
)
def test_names(name: str, chip: str) -> None:
    assert find_chip(name).name == chip


def test_a_chip_is_a_value() -> None:
    chip = find_chip("v5p")
    restored = pickle.loads(pickle.dumps(chip))
    assert restored == chip
    assert hash(restored) == hash(chip)
    with pytest.raises(TypeError):
        chip.figures["hbm"] = Figure(1.0, "me")  # type: ignore[index]


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("v5q", "'v5p'"), ("v6", "'v6e'"), ("tpu8x", "'tpu7x'"), ("h20", "'h200'")],
)
def test_an_unknown_name_is_told_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(MeshError, match=rf"Chip '{name}' was asked for.*Pass {nearest}, or one of"):
        find_chip(name)


def test_a_figure_that_is_not_known_says_why() -> None:
    figure = find_chip("v2").figure("ici_link_bandwidth")
    with pytest.raises(MeshError, match=r"Link of v2 was asked for. It is not known: not found in"):
        figure.needed("Link of v2")
    assert find_chip("v5p").figure("peak_flops.bf16").needed("Peak") == 459e12


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("  ici_links: {value: 6", "  links: {value: 6", r"figures.ici_links .*It is not there"),
        ("title: TPU v5p\n", "", r"title of x.yaml was read. It is not there"),
        (
            "bf16: {value: 459, unit: TFLOP/s, source: cloud}",
            "bf16: {value: 459, unit: TFLOP/s}",
            r"peak_flops.bf16 .*It names no source.*Write it with a value and a listed source",
        ),
        (
            "bf16: {value: 459, unit: TFLOP/s, source: cloud}",
            "bf16: {value: 459, unit: TFLOP/s, source: hearsay}",
            r"Its source 'hearsay' is not listed",
        ),
        (
            "bf16: {value: 459, unit: TFLOP/s, source: cloud}",
            "bf16: {value: null}",
            r"It is null without a reason",
        ),
        ("unit: GiB, source: libtpu", "unit: MB, source: libtpu", r"The unit 'MB' is not known"),
        ("chips: {value: 2x2x1", "chips: {value: 2xtwo", r"'2xtwo' was given.*no box of chips"),
    ],
)
def test_faults_of_a_file(old: str, new: str, message: str) -> None:
    assert old in TEXT
    with pytest.raises(MeshError, match=message):
        read_hardware(TEXT.replace(old, new), "x.yaml")


def test_boxes() -> None:
    assert [read_box(text) for text in ("8", "4x2", "2X2x4")] == [(8, 1, 1), (4, 2, 1), (2, 2, 4)]
