"""Job files that cannot be: every refusal says what was read, why not, and what to write."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh_utils import JobConfig, JobError, MeshError
from mesh_utils.job import read_yaml

AXES = {"dp": {"dcn": -1}, "fsdp": {"ici": -1}, "tp": {"ici": 4}}


def job(**changes: object) -> JobConfig:
    data: dict[str, object] = {"name": "x", "accelerator": "v5e:4x4", "axes": AXES}
    return JobConfig.parse({**data, **changes})


def rules(**given: object) -> dict[str, object]:
    return {"sharding": given}


# what is changed in a job that fits, what the message has: the question, the reason, the way out
ROWS: dict[str, tuple[Mapping[str, Any], str]] = {
    "unknown key": ({"axis": {}}, r"Job 'x' .* key 'axis'. There is no such key. Write 'axes', or"),
    "no name": ({"name": None}, r"name=None. It has to be text on one line.*name: llama3-70b"),
    "name that is no text": ({"name": 8}, r"name=8.*has to be text"),
    "name on two lines": ({"name": "a\nb"}, r"name='a\\nb'.*on one line"),
    "no accelerator": ({"accelerator": None}, r"accelerator=None.*accelerator: v5p:4x4x8"),
    "unknown chip": ({"accelerator": "v5q-16"}, r"Chip 'v5q' was asked for.*Pass 'v5p'"),
    "slice that there is not": (
        {"accelerator": "v5p:4x4x6"},
        r"no slice of 4x4x6. Pass 'v5p:4x4x[48]'",
    ),
    "GPUs that fill no nodes": ({"accelerator": "h100-12"}, r"12 GPUs.*Pass h100-8 or h100-16"),
    "ragged slices": (
        {"accelerator": ["v5e:4x4", "v5e:4x8"]},
        r"The slices of a job are all alike. Write accelerator: v5e:4x4 with num_slices: 2",
    ),
    "list of equal slices": (
        {"accelerator": ["v5e:4x4", "v5e:4x4"]},
        r"A job names one slice. Write accelerator: v5e:4x4 with num_slices: 2",
    ),
    "slices against the name": (
        {"accelerator": "4xv5e:4x4", "num_slices": 2},
        r"num_slices=2. The name says 4",
    ),
    "no slices": ({"num_slices": 0}, r"num_slices=0.*Pass num_slices=1 or more"),
    "too many": ({"num_slices": 10**30}, r"num_slices=10*\. There are not so many\. Pass num_sl"),
    "slices in words": ({"num_slices": "two"}, r"num_slices='two'"),
    "wrap in letters": ({"wrap": "xy"}, r"wrap='xy'.*Write such as wrap: \[true, true, false\]"),
    "wrap that the slice has not": (
        {"wrap": [True, True]},
        r"wrap=\(True, True, False\). A slice of 4x4 .* has wrap=\(False, False, False\)",
    ),
    "no axes": ({"axes": None}, r"axes=None.*no mapping.*axes: \{fsdp"),
    "axes as a list": ({"axes": ["dp", "tp"]}, r"no mapping from names of axes"),
    "axis with a number alone": (
        {"axes": {"tp": 16}},
        r"axis tp=16. Nothing says whether.*Write tp: \{ici: 16\}, or dcn",
    ),
    "axis that is no name": ({"axes": {3: {"ici": -1}}}, r"an axis named 3.*Write such as dp"),
    "unknown key of an axis": (
        {"axes": {"tp": {"icl": 16}}},
        r"'icl' for axis 'tp'. An axis has no such key. Write 'ici', or one of dcn, weight",
    ),
    "size of zero": ({"axes": {"tp": {"ici": 0}}}, r"ici=0 for axis 'tp'.*1 or more, or -1"),
    "size of minus two": ({"axes": {"tp": {"dcn": -2}}}, r"dcn=-2 for axis 'tp'"),
    "size that is true": ({"axes": {"tp": {"ici": True}}}, r"ici=True for axis 'tp'"),
    "size of one half": ({"axes": {"tp": {"ici": 0.5}}}, r"ici=0.5.*no number of devices"),
    "two -1 inside": (
        {"axes": {"a": {"ici": -1}, "b": {"ici": -1}}},
        r"ici sizes a=-1, b=-1. 2 of them are -1, and only one.*Write a number for b",
    ),
    "two -1 across": (
        {"axes": {"a": {"dcn": -1, "ici": 16}, "b": {"dcn": -1}}},
        r"dcn sizes a=-1, b=-1. 2 of them",
    ),
    "wrong product": (
        {"axes": {"a": {"ici": 4}, "b": {"ici": 8}}},
        r"ici sizes a=4, b=8. A slice of v5e:4x4 has 16 devices, and the product is 32. "
        r"Write ici sizes a=2, b=8",
    ),
    "no whole number left": (
        {"axes": {"a": {"ici": -1}, "b": {"ici": 3}}},
        r"16 devices, no multiple of 3. Write ici sizes a=8, b=2",
    ),
    "group larger than a granule": (
        {"accelerator": "2xh100:8", "axes": {"tp": {"ici": 16}}},
        r"A slice of 2xh100:8 has 8 devices, and the product is 16. Write ici sizes tp=8",
    ),
    "DCN on one slice": (
        {"axes": {"dp": {"dcn": 2}, "tp": {"ici": 16}}},
        r"dcn sizes dp=2, tp=1. v5e:4x4 has 1 slice, and the product is 2. Write dcn sizes dp=1",
    ),
    "slices that no axis takes": (
        {"num_slices": 2, "axes": {"dp": {"ici": 16}}},
        r"2xv5e:4x4 has 2 slices, and the product is 1. Write dcn sizes dp=2",
    ),
    "slices left over": (
        {"num_slices": 3, "axes": {"dp": {"dcn": 2, "ici": 16}}},
        r"3 slices, and the product is 2. Write dcn sizes dp=3",
    ),
    "a weight on one axis": (
        {"axes": {"a": {"ici": 4, "weight": 1}, "b": {"ici": 4}}},
        r"weight for some axes. Axis 'b' has none.*Write a weight for 'b' too",
    ),
    "weight below zero": (
        {"axes": {"a": {"ici": 16, "weight": -1}}},
        r"weight=-1.*Write 0 or more",
    ),
    "model that is no text": ({"model": ["llama"]}, r"model=\['llama'\].*has to be text"),
    "rules in words": ({"sharding": "fsdp"}, r"sharding='fsdp'.*patterns with placements"),
    "rule for an axis that is not there": (
        rules(parameters={"**.w": ["tpp", None]}),
        r"rule '\*\*.w': \['tpp', None\]. The job has no axis 'tpp'. Write 'tp', or one of dp",
    ),
    "axis twice in a rule": (
        rules(parameters={"**.w": ["tp", ["fsdp", "tp"]]}),
        r"The axis 'tp' is there twice.*once at most",
    ),
    "unknown part of rules": (
        rules(parameters={}, activation={}),
        r"'activation' under sharding.*Write 'activations', or one of parameters",
    ),
    "rule without placements": (
        {"sharding": ["**.w"]},
        r"'\*\*.w' under parameters. A rule is a pattern with placements",
    ),
    "rule with a number": (rules(parameters={"**.w": 3}), r"Placements are a list"),
    "tp_axis that is not there": (rules(tp_axis="model"), r"tp_axis='model'.*Write one of dp"),
    "flags in words": ({"xla_flags": "dcn"}, r"xla_flags='dcn'. Flags are sets by name"),
    "unknown key of flags": (
        {"xla_flags": {"set": []}},
        r"'set' under xla_flags.*Write 'sets', or one of flags",
    ),
    "unknown set": (
        {"xla_flags": {"sets": ["dnc"]}},
        r"set of XLA flags 'dnc'.*There is no such set. Pass 'dcn'",
    ),
    "set for other hardware": (
        {"xla_flags": {"sets": ["sparse-core"]}},
        r"'sparse-core' was asked for. It has none for TPU v5e. Pass",
    ),
    "sets as one word": ({"xla_flags": {"sets": "dcn"}}, r"sets='dcn'. Sets are a list of names"),
    "sets that contradict": (
        {"xla_flags": {"sets": ["dense-vmem", "moe-vmem"]}},
        r"give xla_tpu_scoped_vmem_limit_kib the values 98304 and 81920. Pass one of the two",
    ),
    "flags as a list": ({"xla_flags": {"flags": ["a"]}}, r"flags=\['a'\]. Flags are names with"),
    "flag with dashes": (
        {"xla_flags": {"flags": {"--xla_a": 1}}},
        r"XLA flag '--xla_a'.*without dashes",
    ),
    "flag with a space": (
        {"xla_flags": {"flags": {"xla_a": "1 --xla_b=2"}}},
        r"with the value '1 --xla_b=2'.*no spaces",
    ),
    "flag of a GPU": (
        {"xla_flags": {"flags": {"xla_gpu_enable_latency_hiding_scheduler": True}}},
        r"flag of other hardware.*Pass xla_tpu_enable_latency_hiding_scheduler, or",
    ),
    "Megascale on a GPU": (
        {
            "accelerator": "h100:8",
            "axes": {"dp": {"ici": -1}},
            "xla_flags": {"flags": {"megascale_grpc_premap_memory_bytes": 1}},
        },
        r"asked for on NVIDIA H100.*flag of other hardware",
    ),
}


@pytest.mark.parametrize("row", ROWS)
def test_bad_jobs(row: str) -> None:
    changes, message = ROWS[row]
    with pytest.raises(MeshError, match=message) as caught:
        job(**changes)
    text = str(caught.value)
    assert text.count(". ") >= 2, "what was asked, why it is refused, what to pass instead"
    assert text.endswith(".")


def test_enough_bad_jobs() -> None:
    assert len(ROWS) >= 20


@pytest.mark.parametrize("data", [None, [], "job", 3])
def test_no_mapping(data: Any) -> None:
    with pytest.raises(JobError, match=r"Job was read, of type=.* name, accelerator and axes are"):
        JobConfig.parse(data)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 5000, r"It is no YAML: maximum recursion depth"),
        ("name: [", r"It is no YAML: .*line 1.*Correct that line; docs/jobs.md"),
        ("name: a\nname: b\n", r"It is no YAML: .*the key 'name' is there twice.*line 2"),
        ("axes: {tp: {ici: 4, ici: 8}}", r"the key 'ici' is there twice"),
        ("- name\n", r"Job '.*' was read, of type=list"),
        ("", r"Job '.*' was read, of type=NoneType"),
        ("a: !!python/object:os.system {}", r"It is no YAML: could not determine a constructor"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(JobError, match=message):
        JobConfig.load(path)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"'llama3_70b_v5'.*no such file.*or 'llama3_70b_v5p', or"):
        JobConfig.load("llama3_70b_v5")
    with pytest.raises(JobError, match=r"It is a folder. Pass the path of a YAML file"):
        JobConfig.load(tmp_path)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(JobError, match=r"It cannot be read: .*Pass a readable text file"):
        JobConfig.load(binary)


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Each place in a job's data, as its container and its key."""
    pairs = list(value.items() if isinstance(value, dict) else enumerate(value))
    nested = [inner for _, inner in pairs if isinstance(inner, (dict, list))]
    return [(value, key) for key, _ in pairs] + [
        found for each in nested for found in _places(each)
    ]


@given(
    name=st.sampled_from(["llama3_70b_v5p", "mixtral_8x7b_v6e", "llama3_8b_v5e_4slices"]),
    place=st.integers(0, 10**6),
    other=st.sampled_from(
        [None, -1, 0, 3, 10**30, 1.5, "", "x", "..", [], [1], ["a", None], {}, {1: 2}, True, "2x2"]
    ),
)
def test_a_changed_job_is_parsed_or_refused(name: str, place: int, other: Any) -> None:
    text = (files("tpu_configs") / "jobs" / f"{name}.yaml").read_text(encoding="utf-8")
    data: Any = read_yaml(text, name)
    places = _places(data)
    container, key = places[place % len(places)]
    container[key] = other
    with contextlib.suppress(MeshError):
        JobConfig.parse(data)
