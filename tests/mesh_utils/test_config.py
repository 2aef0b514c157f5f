"""Job files: what they say, what they are checked against, and what is refused."""

from __future__ import annotations

import copy
import doctest
import math
import pickle
import random
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh_utils import (
    JobConfig,
    JobError,
    MeshError,
    Network,
    Topology,
    assign,
    create_device_mesh,
    create_hybrid_device_mesh,
    synthetic_devices,
)
from mesh_utils.assignment import nearest_sizes
from mesh_utils.job import job_names, read_yaml

AXES = {"dp": {"dcn": -1}, "fsdp": {"ici": -1}, "tp": {"ici": 4}}


def job(**changes: object) -> JobConfig:
    data: dict[str, object] = {"name": "x", "accelerator": "v5e:4x4", "axes": AXES}
    return JobConfig.parse({**data, **changes})


def test_what_is_not_said() -> None:
    found = job()
    assert [(a.name, a.ici, a.dcn) for a in found.axes] == [
        ("dp", 1, 1),
        ("fsdp", 4, 1),
        ("tp", 4, 1),
    ]
    assert (found.num_slices, found.model, found.sharding, found.flag_sets, found.wrap) == (
        1,
        None,
        None,
        None,
        None,
    )
    assert found.topology().name == "v5e:4x4"
    assert found.warnings == ()


def test_everything_said() -> None:
    found = job(
        num_slices=3,
        model="llama3-8b",
        axes={
            "dp": {"dcn": 3, "weight": 1},
            "fsdp": {"ici": 2, "weight": 0},
            "tp": {"ici": -1, "weight": 2.5},
        },
        sharding={"parameters": {"**.w": [["dp", "fsdp"], None]}, "tp_axis": "tp"},
        xla_flags={"sets": [], "flags": {"xla_tpu_dvfs_p_state": 7}},
    )
    assert found.dcn_mesh_shape == (3, 1, 1)
    assert found.ici_mesh_shape == (1, 2, 8)
    assert found.weights == {"dp": 1.0, "fsdp": 0.0, "tp": 2.5}
    assert found.assignment().weights == (1.0, 0.0, 2.5)
    assert found.sharding == {"parameters": [["**.w", [["dp", "fsdp"], None]]], "tp_axis": "tp"}
    assert found.environment() == {"LIBTPU_INIT_ARGS": "--xla_tpu_dvfs_p_state=7"}
    assert found.model == "llama3-8b"
    found.check_valid()


@pytest.mark.parametrize(
    ("accelerator", "num_slices", "name"),
    [
        ("v5litepod-16", None, "v5e:4x4"),
        ("v5litepod-16", 2, "2xv5e:4x4"),
        ("2xv5e:4x4", None, "2xv5e:4x4"),
        ("2xv5e:4x4", 2, "2xv5e:4x4"),
        ("h100-16", None, "2xh100:8"),
        ("h100-16", 2, "2xh100:8"),
        ("gb200-8", None, "gb200:8"),
        ("v5p:4x4x8_twisted", 2, "2xv5p:4x4x8_twisted"),
    ],
)
def test_accelerators(accelerator: str, num_slices: int | None, name: str) -> None:
    axes = {"dp": {"dcn": -1}, "fsdp": {"ici": -1}}
    found = job(accelerator=accelerator, num_slices=num_slices, axes=axes)
    assert found.topology().name == name
    assert found.num_slices == found.topology().num_slices == math.prod(found.dcn_mesh_shape)
    assert math.prod(found.ici_mesh_shape) == found.topology().devices_per_slice
    again = Topology.parse(found.accelerator, num_slices=found.num_slices)
    assert again.name == name


@pytest.mark.parametrize(
    ("accelerator", "slices"), [("v5p:2x2x4", 1), ("v5e:4x4", 2), ("tpu7x:2x2x2", 2), ("h100", 3)]
)
def test_mesh_is_the_searched_one(accelerator: str, slices: int) -> None:
    axes = {"dp": {"dcn": -1}, "fsdp": {"ici": -1}, "tp": {"ici": 2}}
    found = job(accelerator=accelerator, num_slices=slices, axes=axes)
    mesh, topology = found.mesh(), found.topology()
    mesh.check_valid()
    searched = assign(topology, found.ici_mesh_shape, found.dcn_mesh_shape)
    assert np.array_equal(mesh.device_ids, searched.device_ids)
    made = create_hybrid_device_mesh(found.ici_mesh_shape, found.dcn_mesh_shape, topology)
    assert mesh.device_ids.tolist() == np.vectorize(lambda device: device.id)(made).tolist()
    if slices == 1:
        one = create_device_mesh(found.mesh().mesh_shape, topology)
        assert mesh.device_ids.tolist() == np.vectorize(lambda device: device.id)(one).tolist()
    assert mesh.axis_names == ("dp", "fsdp", "tp")
    assert len(mesh.granules) == slices


def test_weights_turn_the_mesh() -> None:
    def laid(**weights: float) -> list[int]:
        axes = {name: {"ici": size} for name, size in (("a", 2), ("b", 8))}
        weighted = {name: {**axes[name], "weight": weight} for name, weight in weights.items()}
        return job(accelerator="v5e:4x4", axes=weighted).mesh().device_ids.tolist()

    assert laid(a=1, b=100) != laid(a=100, b=1)


def test_twist_is_kept() -> None:
    axes = {"fsdp": {"ici": -1}, "tp": {"ici": 8}}
    plain = job(accelerator="v5p:4x4x8", axes=axes)
    twisted = job(accelerator="v5p:4x4x8_twisted", axes=axes)
    assert twisted.topology().twist
    searched = assign(Topology.parse("v5p:4x4x8_twisted"), (16, 8))
    assert np.array_equal(twisted.mesh().device_ids, searched.device_ids)
    assert plain.assignment().links != twisted.assignment().links


def test_wrap_where_no_table_knows() -> None:
    axes = {"dp": {"ici": -1}}
    with pytest.raises(MeshError, match="Its wrap is not known"):
        job(accelerator="v3-32", axes=axes).mesh()
    assert job(accelerator="v3-32", axes=axes, wrap=[True, True]).mesh().mesh_shape == (32,)


@pytest.mark.parametrize(
    ("shape", "cores", "kind", "accelerator"),
    [
        ((4, 4), 1, "TPU v5 lite", "2xv5e:4x4"),
        ((2, 2, 2), 2, "TPU7x", "2xtpu7x:2x2x2"),
    ],
)
def test_mesh_of_given_devices(
    shape: tuple[int, ...], cores: int, kind: str, accelerator: str
) -> None:
    devices = list(synthetic_devices(shape, cores_per_chip=cores, num_slices=2, kind=kind))
    random.Random(0).shuffle(devices)
    found = job(accelerator=accelerator)
    mesh = found.mesh(devices)
    assert mesh == found.mesh(reversed(devices))
    places = {device.id: (device.coords, device.core_on_chip) for device in devices}
    synthetic = found.mesh()
    for made, wanted in zip(mesh.devices, synthetic.devices, strict=True):
        assert places[made.id] == (wanted.coords, wanted.core_on_chip)


def test_mesh_of_other_devices() -> None:
    found = job(accelerator="v5e:4x8")
    with pytest.raises(MeshError, match=r"ici=.* ask for|ask for 1 of 32"):
        found.mesh(synthetic_devices((4, 4), kind="TPU v5 lite"))
    with pytest.raises(JobError, match=r"core 0 of the chip at \(.*Pass devices of whole slices"):
        found.mesh(synthetic_devices((2, 16), kind="TPU v5 lite"))


def test_tp_over_dcn_warns_with_its_cost() -> None:
    axes = {"dp": {"ici": 2}, "tp": {"ici": 8, "dcn": 2}}
    message = (
        r"Job 'x' puts tp=16 across 2 slices. Modelled, .* at most 32.6 GB/s .* at most 100\. "
        "Give its dcn part to 'dp'."
    )
    with pytest.warns(UserWarning, match=message):
        found = job(accelerator="2xv5e:4x4", axes=axes)
    network = Network.of(found.topology())
    link = 50.0
    shown = [float(number) for number in re.findall(r"at most ([\d.]+)", found.warnings[0])]
    assert shown == [
        pytest.approx(network.bound(16, 2) * link, rel=0.01),
        pytest.approx(network.bound(16) * link, rel=0.01),
    ]
    # What the search finds is no faster than that bound.
    assert found.assignment().links[1] * link <= shown[0] * 1.01


def test_the_rules_name_the_tp_axis() -> None:
    axes = {"dp": {"ici": -1}, "model": {"dcn": 2}}
    assert job(accelerator="2xv5e:4x4", axes=axes).warnings == ()
    with pytest.warns(UserWarning, match="puts model=2 across 2 slices"):
        job(accelerator="2xv5e:4x4", axes=axes, sharding={"tp_axis": "model"})


def test_tp_over_dcn_without_figures() -> None:
    with pytest.warns(UserWarning, match="waits for DCN in every layer; the model has no figure"):
        job(accelerator="2xv3-32", axes={"dp": {"ici": -1}, "tp": {"dcn": 2}})


def test_value() -> None:
    one, other = job(), job()
    assert one == other
    assert hash(one) == hash(other)
    assert job(name="y") != one
    one.mesh()
    assert pickle.loads(pickle.dumps(one)) == copy.deepcopy(one) == one
    with pytest.raises(AttributeError):
        one.name = "z"  # type: ignore[misc]


def test_load_by_name_and_path(tmp_path: Path) -> None:
    by_name = JobConfig.load("llama3_8b_v5e")
    assert by_name == JobConfig.load("tpu_configs/jobs/llama3_8b_v5e.yaml")
    assert by_name == JobConfig.load("llama3_8b_v5e.yaml")
    path = tmp_path / "llama3_8b_v5e.yaml"
    path.write_text("name: mine\naccelerator: v5e:2x2\naxes: {dp: {ici: -1}}\n")
    assert JobConfig.load(path).name == JobConfig.load(str(path)).name == "mine"
    assert "llama3_8b_v5e" in job_names()


@given(
    st.lists(st.sampled_from([-1, 1, 2, 3, 4, 5, 7, 8, 16]), min_size=1, max_size=5),
    st.integers(1, 300),
)
def test_sizes_that_are_proposed_fit(sizes: list[int], count: int) -> None:
    proposed = nearest_sizes(sizes, count)
    assert math.prod(proposed) == count
    assert len(proposed) == len(sizes)
    assert min(proposed) >= 1


@given(
    st.lists(st.sampled_from([-1, 1, 2, 3, 4, 6, 8]), min_size=1, max_size=4),
    st.sampled_from(["v5e:4x4", "v5e:8x8", "v5p:2x2x4", "tpu7x:2x2x2", "gb200-8"]),
)
def test_a_refusal_proposes_what_is_accepted(sizes: list[int], accelerator: str) -> None:
    axes = {f"a{number}": {"ici": size} for number, size in enumerate(sizes)}
    text, found = refusal(accelerator, axes)
    if sizes.count(-1) > 1:
        assert "only one can be what is left" in text
        return
    if found is None:
        proposed = dict(re.findall(r"(a\d)=(\d+)", text.rpartition("Write")[2]))
        assert proposed.keys() == axes.keys()
        changed = {name: {"ici": int(size)} for name, size in proposed.items()}
        found = job(accelerator=accelerator, axes=changed)
    assert math.prod(found.ici_mesh_shape) == found.topology().devices_per_slice


def refusal(accelerator: str, axes: object) -> tuple[str, JobConfig | None]:
    try:
        return "", job(accelerator=accelerator, axes=axes)
    except JobError as error:
        return str(error), None


def test_strict_yaml_keeps_merges() -> None:
    text = "base: &base {ici: 2}\ntp:\n  <<: *base\n  dcn: 3\n"
    assert read_yaml(text, "text") == {"base": {"ici": 2}, "tp": {"ici": 2, "dcn": 3}}


DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "jobs.md"


def test_document_session() -> None:
    flags = doctest.ELLIPSIS
    result = doctest.testfile(str(DOCUMENT), module_relative=False, optionflags=flags)
    assert result.failed == 0
    assert result.attempted > 10


def test_document_example(tmp_path: Path) -> None:
    """The file that the page goes through is one, and the table has each of its keys."""
    text = DOCUMENT.read_text(encoding="utf-8")
    (shown,) = re.findall(r"^```yaml\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    path = tmp_path / "job.yaml"
    path.write_text(shown)
    found = JobConfig.load(path)
    assert [axis.size for axis in found.axes] == [2, 128, 4]
    explained = set(re.findall(r"^\| `(\w+)[:`]", text.partition("## What comes")[0], re.MULTILINE))
    assert explained == {*found.__dataclass_fields__, "xla_flags"} - {
        "flags",
        "flag_sets",
        "compiler",
    }
