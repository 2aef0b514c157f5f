"""JobSets against the published schema: ours pass, and what is changed in them is found."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from mesh_utils import JobError
from mesh_utils.job import job_names
from mesh_utils.launch import render
from mesh_utils.launch.schema import check_jobset
from tests.mesh_utils.launch_stand_ins import AWKWARD, IMAGE, WORDS, job

OPTIONS = {"namespace": "team", "queue": "multislice-queue", "max_restarts": "3"}
CONTAINER = ("spec", "replicatedJobs", 0, "template", "spec", "template", "spec", "containers", 0)
MORE = {"env": {"A": "b"}, "compile_cache": "gs://x/y", "grace_seconds": "300"}


def manifest(name: str) -> dict[str, Any]:
    more: dict[str, Any] = dict(MORE)
    if "gb200" in name:
        more["claim_template"] = "rack"
    text = render(job(name), "jobset", command=[*WORDS, *AWKWARD], image=IMAGE, **OPTIONS, **more)
    return yaml.safe_load(text)


@pytest.mark.parametrize("name", job_names())
def test_every_job(name: str) -> None:
    check_jobset(yaml.safe_dump(manifest(name)))


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of everything in a manifest that the schema describes."""
    if path[:1] == ("metadata",):
        return  # that of the API server, of which the schema says only that it is an object
    if path:
        yield path
    items: Any = value.items() if isinstance(value, dict) else []
    if isinstance(value, list):
        items = enumerate(value)
    for key, each in items:
        yield from places(each, (*path, key))


def free(path: tuple[Any, ...]) -> bool:
    """Whether keys there are the user's, such as names of labels and resources."""
    return bool({"nodeSelector", "limits"} & set(path[:-1]))


@pytest.mark.parametrize("name", ["llama3_70b_v5p_2slices", "llama3_70b_gb200"])
def test_every_key_and_type_is_checked(name: str) -> None:
    """Each key renamed is refused, and each value replaced by one of another type."""
    whole = manifest(name)
    count = 0
    for path in places(whole):
        for change in ("rename", "retype"):
            changed: Any = copy.deepcopy(whole)
            holder = changed
            for key in path[:-1]:
                holder = holder[key]
            if change == "rename":
                if isinstance(path[-1], int) or free(path):
                    continue
                holder[f"{path[-1]}x"] = holder.pop(path[-1])
            else:
                value = holder[path[-1]]
                # A quantity may be a number or text.
                holder[path[-1]] = [] if isinstance(value, (str, int)) else "text"
            with pytest.raises(JobError, match=r"A JobSet has "):
                check_jobset(yaml.safe_dump(changed))
            count += 1
    assert count > 100


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("spec", "failurePolicy", "rules", 0, "action"), "Restart", r"Write 'RestartJob', or one"),
        (("spec", "ttlSecondsAfterFinished"), -1, r"Finished=-1. .*at least 0. Write 0 or more"),
        (
            ("spec", "replicatedJobs", 0, "dependsOn"),
            [{"name": "a", "status": "Ready"}] * 6,
            r"allows at most 5. Write 5 or fewer",
        ),
        ((*CONTAINER, "resources", "limits"), {"google.com/tpu": "four"}, r"'four'. It does not m"),
        (CONTAINER, {"image": "x"}, r"The schema of JobSet wants 'name' there. Write name"),
        (("spec", "replicatedJobs", 0, "replicas"), True, r"wants int there"),
        (("metadata", "name"), "Upper", r"\.metadata\.name='Upper'.*lower-case letters"),
        (("metadata", "name"), "a" * 64, r"at most 63 lower-case letters"),
        (("metadata", "namespace"), "a b", r"\.metadata\.namespace='a b'"),
        (("metadata", "labels", "kueue.x-k8s.io/queue-name"), "a b", r"at most 63 letters, digits"),
        (("spec", "replicatedJobs", 0, "name"), "Slice", r"replicatedJobs\[0\]\.name='Slice'"),
    ],
)
def test_values(path: tuple[Any, ...], value: object, message: str) -> None:
    changed: Any = manifest("llama3_8b_v5e")
    holder = changed
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    with pytest.raises(JobError, match=message):
        check_jobset(yaml.safe_dump(changed))


def test_pods_that_restart_in_place() -> None:
    changed: Any = manifest("llama3_8b_v5e")
    pod = changed["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    pod["restartPolicy"] = "OnFailure"
    with pytest.raises(JobError, match=r"podFailurePolicy never restarts pods in place. Write Nev"):
        check_jobset(yaml.safe_dump(changed))


def test_what_users_pass_is_checked() -> None:
    with pytest.raises(JobError, match=r"\.metadata\.namespace='Team'"):
        render(job("llama3_8b_v5e"), "jobset", command=WORDS, image=IMAGE, namespace="Team")
