"""JobConfig: a job file, read and checked: chips, slices, mesh axes, sharding rules, XLA flags.

    name: llama3-70b                what it is called where it runs
    accelerator: v5p:8x8x8          a slice, as Topology.parse reads it; also v5p-1024, h100-64
    num_slices: 2                   1 by default, or as the accelerator says
    model: llama3-70b               a reference model, for tools that want one
    axes:                           from the least to the most network-hungry
      dp:   {dcn: -1}
      fsdp: {ici: -1}
      tp:   {ici: 4}
    sharding:                       rules: xla_dtensor.core.rules says what they mean
      parameters:
        "**.q_proj.weight": [tp, fsdp]
    xla_flags:                      left out: those that fit every job
      sets: [latency-hiding, dcn]
      flags: {xla_tpu_scoped_vmem_limit_kib: 98304}
      libtpu: 0.0.50.1              the version that will run; jaxlib for GPUs
    run:                            what to start: see the section on runs
      command: [python, train.py]

    >>> job = JobConfig.load("llama3_70b_v5p_2slices")
    >>> print(*job.axes)
    dp=2 (2 over DCN) fsdp=128 tp=4
    >>> job.topology(), job.mesh().mesh_shape
    (Topology('2xv5p:8x8x8', 1024 devices, wrap=(True, True, True)), (2, 128, 4))

`wrap` says which dims of a slice wrap, where no table knows: wrap: [true, true]. Whatever else is
written is refused. docs/jobs.md goes through a file line by line.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import warnings as python_warnings
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache, cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np

from mesh_utils.assignment import Assignment, assign, nearest_sizes
from mesh_utils.devices import Device, DeviceArray, device_array
from mesh_utils.errors import JobError
from mesh_utils.hardware import Chip, yaml_names
from mesh_utils.hybrid import HybridMesh
from mesh_utils.mesh import as_integer
from mesh_utils.network import Network
from mesh_utils.topology import Topology
from mesh_utils.xla_flags import COMPILERS, XlaFlag, flag_environment, flags_for

__all__ = []


# ------------------------------------------------------------ Finds job files and reads their YAML
#
# Jobs that come with the package are in tpu_configs/jobs and go by name: "llama3_70b_v5p". YAML is
# read strictly: a key that is written twice is refused, where YAML readers mostly take the last.


def job_names() -> tuple[str, ...]:
    """Lists the jobs that come with the package.

    Returns:
        Their names, in alphabetical order.

    Example:
        >>> "llama3_70b_v5p" in job_names()
        True
    """
    return yaml_names("jobs")


def _read_job_file(path_or_name: str | os.PathLike[str]) -> tuple[object, str]:
    """What a file or a job of the package says, and what to call it in messages."""
    source = os.fspath(path_or_name)
    path = Path(source)
    if path.is_file():
        try:
            return read_yaml(path.read_text(encoding="utf-8"), source), source
        except (OSError, UnicodeDecodeError) as error:
            raise JobError(
                f"Job file {source!r} was asked for. It cannot be read: {error}. "
                "Pass a readable text file."
            ) from None
    name = source.removeprefix("tpu_configs/jobs/").removesuffix(".yaml")
    if name in job_names():
        text = files("tpu_configs").joinpath("jobs", f"{name}.yaml").read_text(encoding="utf-8")
        return read_yaml(text, name), name
    what = "It is a folder" if path.is_dir() else "There is no such file, nor a job of that name"
    raise JobError(
        f"Job {source!r} was asked for. {what}. "
        f"Pass the path of a YAML file, or {nearest(Path(name).name, job_names())}."
    )


def read_yaml(text: str, source: str) -> object:
    """Reads YAML in which each key of a mapping is written once.

    Args:
        text: YAML.
        source: what to call it in messages.

    Returns:
        What it says.

    Raises:
        JobError: it is no YAML, or has a key twice.

    Example:
        >>> read_yaml("axes: {tp: {ici: 4}}", "example")
        {'axes': {'tp': {'ici': 4}}}
    """
    import yaml  # it takes longer to import than all of mesh_utils

    try:
        return yaml.load(text, _strict_loader())
    except (yaml.YAMLError, RecursionError) as error:
        problem = " ".join(str(error).split())
        raise JobError(
            f"Job file {source!r} was read. It is no YAML: {problem}. "
            "Correct that line; docs/jobs.md has an example."
        ) from None


def nearest(name: object, choices: Iterable[str], most: int = 12) -> str:
    """Lists what there is, the most alike first, for the end of a message.

    Args:
        name: what was asked for.
        choices: what there is.
        most: how many to list.

    Returns:
        Such as "'tp', or one of dp, fsdp".

    Example:
        >>> nearest("tpp", ["dp", "tp"])
        "'tp', or one of dp"
    """
    names = list(choices)
    near = get_close_matches(str(name), names, n=1, cutoff=0.5)
    far = [choice for choice in names if choice not in near]
    listed = ", ".join(far[:most]) + (", ..." if len(far) > most else "")
    if not near:
        return f"one of {listed}"
    return f"{near[0]!r}, or one of {listed}" if far else repr(near[0])


@cache
def _strict_loader() -> Any:
    import yaml

    class StrictLoader(yaml.SafeLoader):
        """A SafeLoader that refuses keys that are written twice."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
            keys: set[object] = set()
            for key_node, _ in cast("list[tuple[Any, Any]]", node.value):
                key = key_node.value
                if key_node.tag != "tag:yaml.org,2002:merge" and str(key) in keys:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key!r} is there twice", key_node.start_mark
                    )
                keys.add(str(key))
            return super().construct_mapping(node, deep)

    return StrictLoader


# ------------------------------- The axes of a job: sizes inside slices (ici) and across them (dcn)
#
#     axes:
#       dp:   {dcn: -1}             as many as there are slices
#       fsdp: {ici: -1}             what is left of a slice
#       tp:   {ici: 4}              the last axis is the hungriest
#
# A size that is not written is 1. One ici may be -1 and one dcn: what is left of the devices of a
# slice, and of the slices. So the ici sizes multiply to a slice, and no group inside ICI is larger.

_AXIS_KEYS = ("ici", "dcn", "weight")


@dataclass(frozen=True)
class JobAxis:
    """One mesh axis of a job.

    Attributes:
        name: its name.
        ici: its size inside a slice.
        dcn: its size across slices.
        weight: bytes that it gathers, in any unit, for the search; None where no axis says.

    Example:
        >>> str(JobAxis("fsdp", 32, 2))
        'fsdp=64 (2 over DCN)'
    """

    name: str
    ici: int = 1
    dcn: int = 1
    weight: float | None = None

    @property
    def size(self) -> int:
        """Its devices."""
        return self.ici * self.dcn

    def __str__(self) -> str:
        return f"{self.name}={self.size}" + (f" ({self.dcn} over DCN)" if self.dcn > 1 else "")


def _read_axes(axes_data: object, title: str, topology: Topology) -> tuple[JobAxis, ...]:
    """The axes of a job, each -1 filled in."""
    axes = read_sizes(axes_data, title)
    if len({axis.weight is None for axis in axes}) > 1:
        unsaid = next(axis.name for axis in axes if axis.weight is None)
        raise JobError(
            f"{title} was read with a weight for some axes. Axis {unsaid!r} has none, and it would "
            f"count for nothing. Write a weight for {unsaid!r} too, or none at all."
        )
    per_slice = topology.devices_per_slice
    count = topology.num_slices
    inside = f"A slice of {topology.name} has {per_slice} devices"
    across = f"{topology.name} has {count} slice{'' if count == 1 else 's'}"
    ici = _filled(axes, "ici", per_slice, inside, title)
    dcn = _filled(axes, "dcn", count, across, title)
    return tuple(
        JobAxis(axis.name, inner, outer, axis.weight)
        for axis, inner, outer in zip(axes, ici, dcn, strict=True)
    )


def read_sizes(axes_data: object, title: str) -> tuple[JobAxis, ...]:
    """Reads axes as they are written, -1 left as it is.

    Args:
        axes_data: what the job file says under `axes`.
        title: the job, to begin messages with.

    Returns:
        The axes, in order.

    Raises:
        JobError: no axes, unknown keys, or sizes that are none.
    """
    if not isinstance(axes_data, Mapping) or not axes_data:
        raise JobError(
            f"{title} was read with axes={axes_data!r}. That is no mapping from names of axes to "
            "sizes. Write such as axes: {fsdp: {ici: -1}, tp: {ici: 4}}."
        )
    entries = cast("Mapping[object, object]", axes_data)
    return tuple(_read_axis(name, entry, title) for name, entry in entries.items())


def _read_axis(name: object, entry: object, title: str) -> JobAxis:
    if not isinstance(name, str) or not name.isidentifier():
        raise JobError(
            f"{title} was read with an axis named {name!r}. A name is of letters, digits and '_'. "
            "Write such as dp, fsdp, tp, cp or ep."
        )
    if not isinstance(entry, Mapping):
        size = -1 if as_integer(entry) is None else entry
        raise JobError(
            f"{title} was read with axis {name}={entry!r}. Nothing says whether that is inside "
            f"slices or across them. Write {name}: {{ici: {size}}}, or dcn."
        )
    sizes_data = cast("Mapping[object, object]", entry)
    for key in sizes_data:
        if key not in _AXIS_KEYS:
            raise JobError(
                f"{title} was read with {key!r} for axis {name!r}. An axis has no such key. "
                f"Write {nearest(key, _AXIS_KEYS)}."
            )
    sizes = [_read_size(sizes_data.get(key, 1), key, name, title) for key in ("ici", "dcn")]
    weight = sizes_data.get("weight")
    if weight is None:
        return JobAxis(name, sizes[0], sizes[1])
    number = weight if isinstance(weight, (int, float)) and not isinstance(weight, bool) else -1.0
    if not math.isfinite(number) or number < 0:
        raise JobError(
            f"{title} was read with weight={weight!r} for axis {name!r}. A weight is the bytes "
            "that the axis gathers, in any unit. Write 0 or more."
        )
    return JobAxis(name, sizes[0], sizes[1], float(number))


def _read_size(size_data: object, key: str, name: str, title: str) -> int:
    size = as_integer(size_data)
    if size is None or (size < 1 and size != -1):
        raise JobError(
            f"{title} was read with {key}={size_data!r} for axis {name!r}. That is no number of "
            "devices. Write 1 or more, or -1 on one axis for what is left."
        )
    return size


def _filled(
    axes: Sequence[JobAxis], key: str, count: int, there: str, title: str
) -> tuple[int, ...]:
    """The sizes of all axes inside or across slices, -1 replaced."""
    sizes = [axis.ici if key == "ici" else axis.dcn for axis in axes]
    written = ", ".join(f"{axis.name}={size}" for axis, size in zip(axes, sizes, strict=True))
    open_axes = [axis.name for axis, size in zip(axes, sizes, strict=True) if size == -1]
    fixed = math.prod(size for size in sizes if size != -1)
    if len(open_axes) > 1:
        raise JobError(
            f"{title} was read with {key} sizes {written}. {len(open_axes)} of them are -1, and "
            f"only one can be what is left. Write a number for {', '.join(open_axes[1:])}, such "
            f"as {key}: 1."
        )
    if open_axes and count % fixed == 0:
        return tuple(count // fixed if size == -1 else size for size in sizes)
    if fixed == count and not open_axes:
        return tuple(sizes)
    fitting = nearest_sizes(sizes, count)
    instead = ", ".join(f"{axis.name}={size}" for axis, size in zip(axes, fitting, strict=True))
    product = f"no multiple of {fixed}" if open_axes else f"and the product is {fixed}"
    raise JobError(
        f"{title} was read with {key} sizes {written}. {there}, {product}. "
        f"Write {key} sizes {instead}, or others with that product."
    )


def over_dcn(title: str, axis: JobAxis, axis_names: Sequence[str], topology: Topology) -> str:
    """The warning for an axis of tensor parallelism that runs over DCN.

    Args:
        title: the job, to begin with.
        axis: the axis.
        axis_names: all axes.
        topology: the chips.

    Returns:
        What it costs in the model, and what to do instead.

    Example:
        >>> topology = Topology.parse("2xv5p:4x4x4")
        >>> print(over_dcn("Job 'x'", JobAxis("tp", 4, 2), ["dp", "tp"], topology))
        Job 'x' puts tp=8 across 2 slices. Modelled, it gets at most 41.2 GB/s per device for \
all-gathers, inside a slice at most 600. Give its dcn part to 'dp'.
    """
    other_names = [name for name in axis_names if name != axis.name]
    instead = (
        f"Give its dcn part to {other_names[0]!r}" if other_names else "Add an axis for the slices"
    )
    where = f"{title} puts {axis.name}={axis.size} across {axis.dcn} slices"
    network = None if topology.wrap is None else Network.of(topology)
    if network is None or network.dcn_links is None or network.link_bytes_per_second is None:
        return f"{where}. It waits for DCN in every layer; the model has no figure. {instead}."
    link = network.link_bytes_per_second / 1e9
    most = max(2, min(axis.size, topology.devices_per_slice))
    over, inside = network.bound(axis.size, axis.dcn) * link, network.bound(most) * link
    return (
        f"{where}. Modelled, it gets at most {over:.3g} GB/s per device for all-gathers, inside a "
        f"slice at most {inside:.3g}. {instead}."
    )


# ---------------------------------- Reads the keys of a job file other than its axes and its rules

_EXAMPLES = {"libtpu": "0.0.50.1", "jaxlib": "0.12.0"}


def _read_text(text: object, key: str, title: str, example: str) -> str:
    """Text on one line."""
    if not isinstance(text, str) or not text.strip() or not text.isprintable():
        raise JobError(
            f"{title} was read with {key}={text!r}. It has to be text on one line. "
            f"Write such as {key}: {example}."
        )
    return text


def _read_accelerator(accelerator: object, title: str) -> str:
    """The name of one slice; Topology.parse says whether there is such a slice."""
    slices = cast("list[object]", accelerator) if isinstance(accelerator, list) else []
    if slices:
        alike = len(set(map(str, slices))) == 1
        why = "A job names one slice" if alike else "The slices of a job are all alike"
        raise JobError(
            f"{title} was read with accelerator={slices!r}. {why}. "
            f"Write accelerator: {slices[0]} with num_slices: {len(slices)}."
        )
    return _read_text(cast("object", accelerator), "accelerator", title, "v5p:4x4x8")


def _read_wrap(wrap: object, title: str) -> tuple[bool, ...] | None:
    """A flag per dim; None where nothing is said."""
    if wrap is None:
        return None
    flags = cast("list[object]", wrap) if isinstance(wrap, list) else []
    if not flags or not all(isinstance(flag, bool) for flag in flags):
        raise JobError(
            f"{title} was read with wrap={wrap!r}. It says for each dim of a slice whether it "
            "wraps. Write such as wrap: [true, true, false]."
        )
    return cast("tuple[bool, ...]", tuple(flags))


def _read_section(
    section: object, name: str, keys: Sequence[str], title: str, form: str
) -> Mapping[object, object]:
    """A part of a job that has no other keys than these; `form` says what to write instead."""
    if not isinstance(section, Mapping):
        raise JobError(f"{title} was read with {name}={section!r}. {form}")
    mapping = cast("Mapping[object, object]", section)
    for key in mapping:
        if key not in keys:
            raise JobError(
                f"{title} was read with {key!r} under {name}. There is no such key. "
                f"Write {nearest(key, keys)}."
            )
    return mapping


def _read_flags(
    section: object, title: str, compiler: str
) -> tuple[tuple[str, ...] | None, dict[str, object], str | None]:
    """The sets, the own flags, and the version of the compiler; None where nothing is said."""
    if section is None:
        return None, {}, None
    mapping = _read_section(
        section,
        "xla_flags",
        ("sets", "flags", compiler),
        title,
        "Flags are sets by name, and flags with values. "
        "Write such as xla_flags: {sets: [latency-hiding], flags: {xla_...: 1}}.",
    )
    sets, flags = mapping.get("sets"), mapping.get("flags", {})
    if sets is not None and not _are_names(sets):
        raise JobError(
            f"{title} was read with xla_flags: sets={sets!r}. Sets are a list of names. "
            "Write such as sets: [latency-hiding], or [] for none."
        )
    if not isinstance(flags, Mapping) or not _are_names(list(cast("Mapping[str, object]", flags))):
        raise JobError(
            f"{title} was read with xla_flags: flags={flags!r}. Flags are names with values. "
            "Write such as flags: {xla_tpu_scoped_vmem_limit_kib: 98304}."
        )
    version = mapping.get(compiler)
    if version is not None and not re.fullmatch(r"\d+(\.\d+){2,}", str(version)):
        raise JobError(
            f"{title} was read with xla_flags: {compiler}={version!r}. It is the version of "
            f"{compiler} that the job will run with, of three numbers or more. "
            f"Write such as {compiler}: {_EXAMPLES[compiler]}."
        )
    names = None if sets is None else tuple(cast("Sequence[str]", sets))
    own_flags = dict(cast("Mapping[str, object]", flags))
    return names, own_flags, None if version is None else str(version)


def _are_names(words: object) -> bool:
    names = cast("list[object]", words) if isinstance(words, list) else [None]
    return all(isinstance(name, str) for name in names)


# --------------------------------------------------------- What a job runs, beside what it runs on
#
# The key `run` of a job file.
#
#     run:
#       command: [python, -m, examples.train_job]   or one line of shell words
#       image: us-docker.pkg.dev/project/repository/train:1
#       env: {HF_HOME: /data}
#       compile_cache: gs://bucket/compiled         where XLA keeps compiled programs
#       grace_seconds: 120                          from the signal to end until a process is killed
#
# All of it can be said, or said otherwise, when the job is launched.

GRACE_SECONDS = 120
"""How long a process may take to save and end, where a job does not say."""

_RUN_KEYS = ("command", "image", "env", "compile_cache", "grace_seconds")


@dataclass(frozen=True)
class Run:
    """What a job runs.

    Attributes:
        command: the words of the command; () where the file does not say.
        image: the container image; None for none.
        env: environment variables.
        compile_cache: a folder or a URL for compiled programs; None for none.
        grace_seconds: from the signal to end until a process is killed.

    Example:
        >>> Run(command=("python", "train.py")).grace_seconds
        120
    """

    command: tuple[str, ...] = ()
    image: str | None = None
    env: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)
    compile_cache: str | None = None
    grace_seconds: int = GRACE_SECONDS


def _read_run(section: object, title: str) -> Run:
    """What a job runs; a Run without a command where nothing is said."""
    if section is None:
        return Run()
    form = "What a job runs is a mapping of keys. Write such as run: {command: [python, train.py]}."
    mapping = _read_section(section, "run", _RUN_KEYS, title, form)
    image, cache = mapping.get("image"), mapping.get("compile_cache")
    grace = mapping.get("grace_seconds", GRACE_SECONDS)
    seconds = as_integer(grace)
    if seconds is None or seconds < 1:
        raise JobError(
            f"{title} was read with run: grace_seconds={grace!r}. That is no number of seconds. "
            f"Write 1 or more, such as grace_seconds: {GRACE_SECONDS}."
        )
    return Run(
        command=_read_words(mapping.get("command"), title),
        image=None if image is None else _read_text(image, "run: image", title, "us/train:1"),
        env=_read_env(mapping.get("env"), title),
        compile_cache=None
        if cache is None
        else _read_text(cache, "run: compile_cache", title, "gs://bucket/compiled"),
        grace_seconds=seconds,
    )


def _read_words(command: object, title: str) -> tuple[str, ...]:
    if command is None:
        return ()
    words: object = command
    if isinstance(command, str):
        try:
            words = shlex.split(command)
        except ValueError:
            words = None
    listed = cast("list[object]", words) if isinstance(words, list) else []
    if not listed or not all(isinstance(word, (str, int, float)) for word in listed):
        raise JobError(
            f"{title} was read with run: command={command!r}. A command is a list of words, or one "
            "line of them as a shell reads it. Write such as command: [python, train.py]."
        )
    return tuple(map(str, listed))


def _read_env(env: object, title: str) -> dict[str, str]:
    pairs = cast("Mapping[object, object]", env) if isinstance(env, Mapping) else None
    if env is None:
        return {}
    if pairs is None or not all(
        re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", str(name))
        and isinstance(value, (str, int, float))
        and not isinstance(value, bool)
        for name, value in pairs.items()
    ):
        raise JobError(
            f"{title} was read with run: env={env!r}. Variables are names with text or numbers. "
            "Write such as env: {HF_HOME: /data}, and 'true' in quotes."
        )
    return {str(name): str(value) for name, value in pairs.items()}


# ------------------------------------------------------ The sharding rules of a job, as plain data
#
# What they mean is the business of those who read them (xla_dtensor.core.rules). Here they are only
# checked against the axes of the job, so that a wrong name is found before any model is made:
#
#     sharding:
#       parameters:
#         "**.q_proj.weight": [tp, fsdp]          an axis, several, or null per tensor dim
#         "**.norm.weight": [null]
#       activations:
#         "model.layers.*": [[dp, fsdp], null, null]
#       tp_axis: tp

Sharding: TypeAlias = Mapping[str, object]
"""The parts "parameters", "activations" and "tp_plan", each a list of [pattern, placements], and
"tp_axis"."""

_LISTS = ("parameters", "activations", "tp_plan")
_PARTS = (*_LISTS, "tp_axis")


def _read_sharding(section: object, title: str, axis_names: Sequence[str]) -> Sharding | None:
    """Each part of the rules as a list of [pattern, placements]; None for no rules."""
    if section is None:
        return None
    parts = _parts(section, title)
    rules: dict[str, object] = {}
    for part in _LISTS:
        if part in parts:
            pairs = list(_pairs(parts[part], part, title))
            for pattern, placements in pairs:
                _check(pattern, placements, title, axis_names)
            rules[part] = list(map(list, pairs))
    if "tp_axis" in parts:
        axis = parts["tp_axis"]
        if not isinstance(axis, str) or axis not in axis_names:
            raise JobError(
                f"{title} was read with tp_axis={axis!r}. It has no such axis. "
                f"Write {nearest(axis, axis_names)}."
            )
        rules["tp_axis"] = axis
    return rules


def _parts(section: object, title: str) -> Mapping[object, object]:
    if isinstance(section, list):
        return {"parameters": cast("list[object]", section)}
    if not isinstance(section, Mapping):
        raise JobError(
            f"{title} was read with sharding={section!r}. Rules are patterns with placements. "
            'Write such as sharding: {"**.weight": [tp, null]}.'
        )
    mapping = cast("Mapping[object, object]", section)
    if not any(part in mapping for part in _PARTS):
        return {"parameters": mapping}
    for part in mapping:
        if part not in _PARTS:
            raise JobError(
                f"{title} was read with {part!r} under sharding, beside parts of rules. There is "
                f"no such part. Write {nearest(part, _PARTS)}, or put the pattern under parameters."
            )
    return mapping


def _pairs(section: object, part: str, title: str) -> Iterator[tuple[str, object]]:
    if isinstance(section, Mapping):
        entries: list[object] = list(cast("Mapping[object, object]", section).items())
    else:
        entries = cast("list[object]", section) if isinstance(section, list) else [section]
    for entry in entries:
        pair = cast("Sequence[object]", entry) if isinstance(entry, (list, tuple)) else ()
        if len(pair) != 2 or not isinstance(pair[0], str):
            raise JobError(
                f"{title} was read with {entry!r} under {part}. A rule is a pattern with "
                'placements. Write such as "**.weight": [tp, null].'
            )
        yield pair[0], pair[1]


def _check(pattern: str, placements: object, title: str, axis_names: Sequence[str]) -> None:
    if placements is None or isinstance(placements, str):
        return  # the same on every device, or a style
    rule = f"{title} was read with the rule {pattern!r}: {placements!r}"
    if not isinstance(placements, list):
        raise JobError(
            f"{rule}. Placements are a list with an entry per tensor dim. "
            "Write such as [tp, null], or a style such as colwise."
        )
    cutting: list[str] = []
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
            if axis in cutting:
                raise JobError(
                    f"{rule}. The axis {axis!r} is there twice, and cuts one dim once. "
                    "Write each axis once at most."
                )
            cutting.append(cast("str", axis))


# --------------------------------------------------------------------------------------- JobConfig

_KEYS = (
    "name",
    "accelerator",
    "num_slices",
    "wrap",
    "model",
    "axes",
    "sharding",
    "xla_flags",
    "run",
)


@dataclass(frozen=True)
class JobConfig:
    """A job. Made by `load` or `parse`.

    Attributes:
        name: what it is called.
        accelerator: one slice of it, or all slices, as Topology.parse reads it.
        num_slices: how many slices.
        axes: the mesh axes in order, their sizes filled in.
        model: the reference model; None for any.
        sharding: its rules as plain data; None for none.
        flag_sets: the sets of XLA flags that it asks for; None for those that fit every job.
        flags: XLA flags of its own.
        compiler: the version of what reads them where it runs, libtpu on TPUs and jaxlib on GPUs;
            None where the file does not say.
        wrap: for each dim of a slice whether it wraps; None where a table knows.
        run: what it starts; without a command where the file does not say.

    Example:
        >>> axes = {"dp": {"ici": -1}}
        >>> JobConfig.parse({"name": "x", "accelerator": "v5e:4x4", "axes": axes}).axes
        (JobAxis(name='dp', ici=16, dcn=1, weight=None),)
    """

    name: str
    accelerator: str
    num_slices: int
    axes: tuple[JobAxis, ...]
    model: str | None = None
    sharding: Sharding | None = field(default=None, hash=False)
    flag_sets: tuple[str, ...] | None = None
    flags: Mapping[str, object] = field(default_factory=dict[str, object], hash=False)
    compiler: str | None = None
    wrap: tuple[bool, ...] | None = None
    run: Run = field(default_factory=Run)

    @classmethod
    def load(cls, path_or_name: str | os.PathLike[str]) -> JobConfig:
        """Reads a job file.

        Args:
            path_or_name: a path, or the name of a job in tpu_configs/jobs.

        Returns:
            The job.

        Raises:
            MeshError: there is no such file, or what `parse` refuses.

        Warns:
            UserWarning: tensor parallelism over DCN.

        Example:
            >>> JobConfig.load("llama3_70b_h100").num_slices
            8
        """
        document, source = _read_job_file(path_or_name)
        return _read_job(document, f"Job {source!r}")

    @classmethod
    def parse(cls, mapping: Mapping[str, object]) -> JobConfig:
        """Reads a job from plain data.

        Args:
            mapping: what a job file says.

        Returns:
            The job.

        Raises:
            MeshError: unknown keys, an accelerator that there is not, axes that do not fit it,
                rules or flags that cannot be. The message names the nearest valid choice.

        Warns:
            UserWarning: tensor parallelism over DCN.
        """
        name: object = mapping.get("name") if isinstance(cast("object", mapping), Mapping) else None
        return _read_job(mapping, "Job" if name is None else f"Job {name!r}")

    @cached_property
    def _topology(self) -> Topology:
        return Topology.parse(self.accelerator, num_slices=self.num_slices, wrap=self.wrap)

    def topology(self) -> Topology:
        """The chips of the job.

        Returns:
            Its topology, with synthetic devices.
        """
        return self._topology

    @property
    def chip(self) -> Chip:
        """What is known of its chip."""
        return cast("Chip", self._topology.chip)

    @property
    def axis_names(self) -> tuple[str, ...]:
        """The names of the axes, in order."""
        return tuple(axis.name for axis in self.axes)

    @property
    def ici_mesh_shape(self) -> tuple[int, ...]:
        """The size of each axis inside a slice."""
        return tuple(axis.ici for axis in self.axes)

    @property
    def dcn_mesh_shape(self) -> tuple[int, ...]:
        """The size of each axis across slices."""
        return tuple(axis.dcn for axis in self.axes)

    @property
    def weights(self) -> dict[str, float] | None:
        """Bytes that each axis gathers; None doubles them from axis to axis."""
        by_axis = {axis.name: axis.weight for axis in self.axes if axis.weight is not None}
        return by_axis or None

    def assignment(self) -> Assignment:
        """Searches the mesh whose axes have the best links.

        Returns:
            The mesh, what each axis gets in the model, and why.

        Raises:
            MeshError: the wrap of the slice is not known.

        Example:
            >>> JobConfig.load("llama3_8b_v5e").assignment().links
            (4.0,)
        """
        return assign(
            self._topology,
            self.ici_mesh_shape,
            self.dcn_mesh_shape,
            axis_names=self.axis_names,
            weights=self.weights,
        )

    def mesh(self, devices: Iterable[object] | None = None) -> HybridMesh:
        """Makes the mesh of the job, in the order that the search finds.

        Args:
            devices: those to make it of, in any order, such as jax.devices(); None for synthetic
                ones.

        Returns:
            The mesh; it knows which axes run over DCN.

        Raises:
            MeshError: devices that are not those of the job, or a wrap that is not known.

        Example:
            >>> JobConfig.load("llama3_405b_v6e_2slices").mesh().dcn_axes
            ('fsdp',)
        """
        return HybridMesh(
            self._topology.devices if devices is None else devices,
            ici_mesh_shape=self.ici_mesh_shape,
            dcn_mesh_shape=self.dcn_mesh_shape,
            axis_names=self.axis_names,
            order=self._order if self._topology.torus_rank else "row-major",
        )

    def xla_flags(self) -> tuple[XlaFlag, ...]:
        """The XLA flags of the job, each with its reason.

        Returns:
            The flags of its sets, then its own.

        Example:
            >>> str(JobConfig.load("llama3_70b_h100").xla_flags()[0])
            '--xla_gpu_enable_latency_hiding_scheduler=true'
        """
        return flags_for(self.chip, self.num_slices, self.flag_sets, self.flags)

    def environment(self) -> dict[str, str]:
        """The environment variables that carry its XLA flags.

        Returns:
            LIBTPU_INIT_ARGS on TPUs, XLA_FLAGS on GPUs; nothing where there are no flags.
        """
        return flag_environment(self.chip, self.xla_flags())

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """What is allowed and costs much: tensor parallelism over DCN, with the modelled cost."""
        tp_axis = (self.sharding or {}).get("tp_axis", "tp")
        return tuple(
            over_dcn(f"Job {self.name!r}", axis, self.axis_names, self._topology)
            for axis in self.axes
            if axis.name == tp_axis and axis.dcn > 1
        )

    def check_valid(self) -> None:
        """States the invariants of a job.

        Raises:
            MeshError: the axes do not fit the chips, or there are no such flags.
        """
        sizes = {axis.name: {"ici": axis.ici, "dcn": axis.dcn} for axis in self.axes}
        _read_axes(sizes, f"Job {self.name!r}", self._topology)
        self.xla_flags()

    def _order(self, devices: tuple[Device, ...], shape: tuple[int, ...]) -> DeviceArray:
        """The searched mesh of one slice, of given devices: they are found by their places."""
        one_slice = replace(self._topology, num_slices=1, origin=((0, 0, 0),))
        dcn_shape = (1,) * len(shape)
        assignment = assign(
            one_slice, shape, dcn_shape, axis_names=self.axis_names, weights=self.weights
        )
        low = np.min([device.coords or (0, 0, 0) for device in devices], axis=0)
        core = min(device.core_on_chip for device in devices)
        there: dict[tuple[int, ...], Device] = {}
        for device in devices:
            x, y, z = np.subtract(device.coords or (0, 0, 0), low).tolist()
            there[x, y, z, device.core_on_chip - core] = device
        ordered: list[Device] = []
        for device in cast("list[Device]", assignment.devices.reshape(-1).tolist()):
            at = (*(device.coords or (0, 0, 0)), device.core_on_chip)
            if at not in there:
                raise JobError(
                    f"The mesh of job {self.name!r} was asked for on given devices. No device of "
                    f"a slice is core {at[3]} of the chip at {at[:3]} from its first one, and "
                    f"{one_slice.name} has such a device. "
                    f"Pass devices of whole slices of {one_slice.name}."
                )
            ordered.append(there[at])
        return device_array(ordered, shape)


def _read_job(document: object, title: str) -> JobConfig:
    if not isinstance(document, Mapping):
        raise JobError(
            f"{title} was read, of type={type(document).__name__}. A job is a mapping of keys. "
            f"Write {', '.join(_KEYS)}; name, accelerator and axes are needed."
        )
    keys = cast("Mapping[object, object]", document)
    for key in keys:
        if key not in _KEYS:
            raise JobError(
                f"{title} was read with the key {key!r}. There is no such key. "
                f"Write {nearest(key, _KEYS)}."
            )
    accelerator = _read_accelerator(keys.get("accelerator"), title)
    wrap = _read_wrap(keys.get("wrap"), title)
    slices = cast("int | None", keys.get("num_slices"))  # Topology says what is no number
    topology = Topology.parse(accelerator, num_slices=slices, wrap=wrap)
    axes = _read_axes(keys.get("axes"), title, topology)
    reader = COMPILERS[cast("Chip", topology.chip).platform]
    sets, flags, compiler = _read_flags(keys.get("xla_flags"), title, reader)
    model = keys.get("model")
    job = JobConfig(
        name=_read_text(keys.get("name"), "name", title, "llama3-70b"),
        accelerator=accelerator,
        num_slices=topology.num_slices,
        axes=axes,
        model=None if model is None else _read_text(model, "model", title, "llama3-70b"),
        sharding=_read_sharding(keys.get("sharding"), title, [axis.name for axis in axes]),
        flag_sets=sets,
        flags=flags,
        compiler=compiler,
        wrap=wrap,
        run=_read_run(keys.get("run"), title),
    )
    job.xla_flags()
    for line in job.warnings:
        python_warnings.warn(line, UserWarning, stacklevel=3)
    return job
