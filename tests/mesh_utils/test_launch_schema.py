"""JobSets against the published schema: ours pass, and what is changed in them is found."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from mesh_utils import JobError
from mesh_utils.job import job_names
from mesh_utils.launch import render
from tests.mesh_utils.launch_stand_ins import AWKWARD, IMAGE, WORDS, job

SCHEMA = Path(__file__).with_name("jobset_schema.yaml")
OPTIONS = {"namespace": "team", "queue": "multislice-queue", "max_restarts": "3"}
MORE = {"env": {"A": "b"}, "compile_cache": "gs://x/y", "grace_seconds": "300"}
POD = ("spec", "replicatedJobs", 0, "template", "spec", "template", "spec")


def manifest(name: str) -> dict[str, Any]:
    more: dict[str, Any] = dict(MORE)
    if "gb200" in name:
        more["claim_template"] = "rack"
    text = render(job(name), "jobset", command=[*WORDS, *AWKWARD], image=IMAGE, **OPTIONS, **more)
    return yaml.safe_load(text)


def closed(schema: Any) -> Any:
    """The schema, where a key that it does not name is refused: the API server drops it."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    changed = {key: closed(value) for key, value in schema.items()}
    if changed.pop("x-kubernetes-int-or-string", False):
        changed["type"] = ["integer", "string"]
    if isinstance(changed.get("properties"), Mapping):
        changed.setdefault("additionalProperties", False)
    return changed


VALIDATOR = jsonschema.Draft7Validator(closed(yaml.safe_load(SCHEMA.read_text(encoding="utf-8"))))


@pytest.mark.parametrize("name", job_names())
def test_every_job(name: str) -> None:
    assert [error.message for error in VALIDATOR.iter_errors(manifest(name))] == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "failurePolicy", "rules", 0, "action"), "Restart"),
        (("spec", "replicatedJobs", 0, "replicas"), "two"),
        (("spec", "replica"), 2),
        ((*POD, "containers", 0, "command"), "python"),
        ((*POD, "containers", 0, "resources", "limits"), {"google.com/tpu": "four"}),
        ((*POD, "containers", 0), {"image": "x"}),
        ((*POD, "restartsPolicy"), "Never"),
    ],
)
def test_that_it_can_fail(path: tuple[Any, ...], value: object) -> None:
    changed: Any = copy.deepcopy(manifest("llama3_8b_v5e"))
    holder = changed
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    assert not VALIDATOR.is_valid(changed)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"namespace": "Team"}, r"namespace='Team'. Kubernetes takes at most 63 lower-case"),
        ({"namespace": "a" * 64}, r"at most 63 lower-case letters, digits and dashes there"),
        ({"queue": "-a"}, r"queue='-a'. .*dots and underscores there, a letter or digit first"),
    ],
)
def test_what_users_pass_is_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=message):
        render(job("llama3_8b_v5e"), "jobset", command=WORDS, image=IMAGE, **options)
