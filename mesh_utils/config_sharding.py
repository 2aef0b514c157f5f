"""The sharding rules of a job, as plain data.

What they mean is the business of those who read them (xla_dtensor.core.rules). Here they are only
checked against the axes of the job, so that a wrong name is found before any model is made:

    sharding:
      parameters:
        "**.q_proj.weight": [tp, fsdp]          an axis, several, or null per tensor dim
        "**.norm.weight": [null]
      activations:
        "model.layers.*": [[dp, fsdp], null, null]
      tp_axis: tp
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias, cast

from mesh_utils.errors import JobError
from mesh_utils.job_file import nearest

Sharding: TypeAlias = Mapping[str, object]
"""The parts "parameters", "activations" and "tp_plan", each a list of [pattern, placements], and
"tp_axis"."""

_LISTS = ("parameters", "activations", "tp_plan")
_PARTS = (*_LISTS, "tp_axis")


def read_sharding(data: object, asked: str, axis_names: Sequence[str]) -> Sharding | None:
    """Reads the rules of a job.

    Args:
        data: what the job file says under `sharding`: the parts, or patterns alone.
        asked: the job, to begin messages with.
        axis_names: its axes.

    Returns:
        The rules with their parts, each a list of pairs; None where there are none.

    Raises:
        JobError: data of another form, an unknown part, an axis that the job does not have, or one
            that cuts a tensor twice.

    Example:
        >>> read_sharding({"**.weight": ["tp", None]}, "Job 'x'", ["tp"])
        {'parameters': [['**.weight', ['tp', None]]]}
    """
    if data is None:
        return None
    given = _parts(data, asked)
    rules: dict[str, object] = {}
    for part in _LISTS:
        if part in given:
            pairs = list(_pairs(given[part], part, asked))
            for pattern, placements in pairs:
                _check(pattern, placements, asked, axis_names)
            rules[part] = [[pattern, placements] for pattern, placements in pairs]
    if "tp_axis" in given:
        axis = given["tp_axis"]
        if not isinstance(axis, str) or axis not in axis_names:
            raise JobError(
                f"{asked} was read with tp_axis={axis!r}. It has no such axis. "
                f"Write {nearest(axis, axis_names)}."
            )
        rules["tp_axis"] = axis
    return rules


def _parts(data: object, asked: str) -> Mapping[object, object]:
    if isinstance(data, list):
        return {"parameters": cast("list[object]", data)}
    if not isinstance(data, Mapping):
        raise JobError(
            f"{asked} was read with sharding={data!r}. Rules are patterns with placements. "
            'Write such as sharding: {"**.weight": [tp, null]}.'
        )
    given = cast("Mapping[object, object]", data)
    if not any(part in given for part in _PARTS):
        return {"parameters": given}
    for part in given:
        if part not in _PARTS:
            raise JobError(
                f"{asked} was read with {part!r} under sharding, beside parts of rules. There is "
                f"no such part. Write {nearest(part, _PARTS)}, or put the pattern under parameters."
            )
    return given


def _pairs(data: object, part: str, asked: str) -> Iterator[tuple[str, object]]:
    if isinstance(data, Mapping):
        entries: list[object] = list(cast("Mapping[object, object]", data).items())
    else:
        entries = cast("list[object]", data) if isinstance(data, list) else [data]
    for entry in entries:
        pair = cast("Sequence[object]", entry) if isinstance(entry, (list, tuple)) else ()
        if len(pair) != 2 or not isinstance(pair[0], str):
            raise JobError(
                f"{asked} was read with {entry!r} under {part}. A rule is a pattern with "
                'placements. Write such as "**.weight": [tp, null].'
            )
        yield pair[0], pair[1]


def _check(pattern: str, placements: object, asked: str, axis_names: Sequence[str]) -> None:
    if placements is None or isinstance(placements, str):
        return  # the same on every device, or a style
    rule = f"{asked} was read with the rule {pattern!r}: {placements!r}"
    if not isinstance(placements, list):
        raise JobError(
            f"{rule}. Placements are a list with an entry per tensor dim. "
            "Write such as [tp, null], or a style such as colwise."
        )
    seen: list[str] = []
    for entry in cast("list[object]", placements):
        several = cast("list[object]", entry) if isinstance(entry, list) else [entry]
        for axis in several:
            if axis is None or axis == "None":
                continue
            if axis not in axis_names:
                raise JobError(
                    f"{rule}. The job has no axis {axis!r}. "
                    f"Write {nearest(axis, axis_names)}, or null."
                )
            if axis in seen:
                raise JobError(
                    f"{rule}. The axis {axis!r} is there twice, and cuts one dim once. "
                    "Write each axis once at most."
                )
            seen.append(cast("str", axis))
