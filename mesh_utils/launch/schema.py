"""Checks manifests for Kubernetes against the published schema, without a cluster.

The schema is tpu_configs/launch/jobset_schema.yaml: that of JobSet's API, which holds those of
Kubernetes' jobs and pods. It is of the kind that custom resources have: types, properties,
required, enum, bounds, patterns. Where the API server drops what a schema does not name, this
refuses it: a key that is dropped was a mistake.

What schemas do not say is checked beside it: names are DNS labels, label values are short, and a
pod of a policy for failures is never restarted in place.
"""

import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any, cast

from mesh_utils.errors import JobError
from mesh_utils.job import nearest

_LABEL_VALUE = r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?"
_DNS_LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_TYPES: dict[str, tuple[type, ...]] = {
    "object": (Mapping,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
}


def check_jobset(text: str) -> None:
    """Checks a JobSet.

    Args:
        text: YAML, as for kubectl apply.

    Raises:
        JobError: what the API server would refuse or drop, with the path of it.

    Example:
        >>> check_jobset("{apiVersion: jobset.x-k8s.io/v1alpha2, kind: JobSet, spec: {replica: 1}}")
        Traceback (most recent call last):
        ...
        mesh_utils.errors.JobError: A JobSet has .spec.replica=1. The schema of JobSet has no such \
key there. Write 'replicatedJobs', or one of coordinator, failurePolicy, managedBy, network, \
startupPolicy, successPolicy, suspend, ttlSecondsAfterFinished.
    """
    import yaml

    manifest = yaml.safe_load(text)
    _check(manifest, _schema(), "")
    _check_names(cast("dict[str, Any]", manifest))


@cache
def _schema() -> dict[str, Any]:
    import yaml

    path = files("tpu_configs").joinpath("launch", "jobset_schema.yaml")
    return cast("dict[str, Any]", yaml.safe_load(path.read_text(encoding="utf-8")))


def _refuse(path: str, value: object, why: str, instead: str) -> JobError:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    return JobError(f"A JobSet has {path or 'itself'}={shown}. {why}. {instead}.")


def _check(value: object, schema: Mapping[str, Any], path: str) -> None:
    if schema.get("x-kubernetes-int-or-string"):
        kinds: tuple[type, ...] = (int, str)
    else:
        kinds = _TYPES[schema["type"]]
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise _refuse(
            path, value, f"The schema of JobSet wants {wanted} there", "Write one of that type"
        )
    _check_bounds(value, schema, path)
    if isinstance(value, Mapping):
        _check_keys(cast("Mapping[str, object]", value), schema, path)
    elif isinstance(value, list):
        for place, each in enumerate(cast("list[object]", value)):
            _check(each, schema["items"], f"{path}[{place}]")


def _check_bounds(value: Any, schema: Mapping[str, Any], path: str) -> None:
    if "enum" in schema and value not in schema["enum"]:
        known = nearest(value, map(str, schema["enum"]))
        raise _refuse(path, value, "The schema of JobSet lists other values", f"Write {known}")
    size = value if isinstance(value, (int, float)) else len(value)
    least = schema.get("minimum", schema.get("minLength", schema.get("minItems")))
    most = schema.get("maximum", schema.get("maxLength", schema.get("maxItems")))
    if least is not None and size < least:
        why = f"The schema of JobSet allows at least {least}"
        raise _refuse(path, value, why, f"Write {least} or more")
    if most is not None and size > most:
        why = f"The schema of JobSet allows at most {most}"
        raise _refuse(path, value, why, f"Write {most} or fewer")
    if "pattern" in schema and not re.search(schema["pattern"], str(value)):
        raise _refuse(
            path, value, f"It does not match {schema['pattern']}", "Write what the schema allows"
        )


def _check_keys(value: Mapping[str, object], schema: Mapping[str, Any], path: str) -> None:
    known = schema.get("properties")
    others = schema.get("additionalProperties")
    for key, each in value.items():
        at = f"{path}.{key}"
        if known is not None and key in known:
            _check(each, known[key], at)
        elif isinstance(others, Mapping):
            _check(each, cast("Mapping[str, Any]", others), at)
        elif known is not None:
            raise _refuse(
                at,
                each,
                "The schema of JobSet has no such key there",
                f"Write {nearest(key, known)}",
            )
    for key in schema.get("required", ()):
        if key not in value:
            raise _refuse(
                path, dict(value), f"The schema of JobSet wants {key!r} there", f"Write {key}"
            )


def _check_names(manifest: dict[str, Any]) -> None:
    metadata = manifest.get("metadata", {})
    names = {".metadata.name": metadata.get("name", "")}
    if "namespace" in metadata:
        names[".metadata.namespace"] = metadata["namespace"]
    jobs = manifest.get("spec", {}).get("replicatedJobs", [])
    for place, job in enumerate(jobs):
        path = f".spec.replicatedJobs[{place}]"
        names[f"{path}.name"] = job["name"]
        spec = job["template"]["spec"]
        pod = spec["template"]["spec"]
        for number, container in enumerate(pod["containers"]):
            names[f"{path}.template.spec.template.spec.containers[{number}].name"] = container[
                "name"
            ]
        if "podFailurePolicy" in spec and pod.get("restartPolicy") != "Never":
            raise _refuse(
                f"{path}.template.spec.template.spec.restartPolicy",
                pod.get("restartPolicy"),
                "A job with a podFailurePolicy never restarts pods in place",
                "Write Never",
            )
    for path, name in names.items():
        if not isinstance(name, str) or not re.fullmatch(_DNS_LABEL, name):
            raise _refuse(
                path,
                name,
                "A name there has at most 63 lower-case letters, digits and dashes",
                "Write such a name",
            )
    for label, value in metadata.get("labels", {}).items():
        if not isinstance(value, str) or not re.fullmatch(_LABEL_VALUE, value):
            raise _refuse(
                f".metadata.labels.{label}",
                value,
                "A label has at most 63 letters, digits, dashes, dots and underscores",
                "Write such a value",
            )
