"""Reads the keys of a job file other than its axes and its rules."""

import re
from collections.abc import Mapping, Sequence
from typing import cast

from mesh_utils.errors import JobError
from mesh_utils.job_file import nearest

_EXAMPLES = {"libtpu": "0.0.50.1", "jaxlib": "0.12.0"}


def read_keys(data: object, keys: Sequence[str], asked: str) -> Mapping[object, object]:
    """Refuses what is no mapping, or has other keys.

    Args:
        data: what was read.
        keys: the keys that there are.
        asked: the job, to begin messages with.

    Returns:
        The mapping.

    Raises:
        JobError: it is none, or has an unknown key.
    """
    if not isinstance(data, Mapping):
        raise JobError(
            f"{asked} was read, of type={type(data).__name__}. A job is a mapping of keys. "
            f"Write {', '.join(keys)}; name, accelerator and axes are needed."
        )
    given = cast("Mapping[object, object]", data)
    for key in given:
        if key not in keys:
            raise JobError(
                f"{asked} was read with the key {key!r}. There is no such key. "
                f"Write {nearest(key, keys)}."
            )
    return given


def read_text(text: object, key: str, asked: str, example: str) -> str:
    """Reads text on one line.

    Args:
        text: what was read.
        key: its key.
        asked: the job, to begin messages with.
        example: what could stand there.

    Returns:
        The text.

    Raises:
        JobError: it is none, or empty, or has characters that cannot be printed.
    """
    if not isinstance(text, str) or not text.strip() or not text.isprintable():
        raise JobError(
            f"{asked} was read with {key}={text!r}. It has to be text on one line. "
            f"Write such as {key}: {example}."
        )
    return text


def read_accelerator(accelerator: object, asked: str) -> str:
    """Reads the name of one slice.

    Args:
        accelerator: what was read.
        asked: the job, to begin messages with.

    Returns:
        The name; Topology.parse says whether there is such a slice.

    Raises:
        JobError: it is no text; several slices.
    """
    slices = cast("list[object]", accelerator) if isinstance(accelerator, list) else []
    if slices:
        alike = len(set(map(str, slices))) == 1
        why = "A job names one slice" if alike else "The slices of a job are all alike"
        raise JobError(
            f"{asked} was read with accelerator={slices!r}. {why}. "
            f"Write accelerator: {slices[0]} with num_slices: {len(slices)}."
        )
    return read_text(cast("object", accelerator), "accelerator", asked, "v5p:4x4x8")


def read_wrap(wrap: object, asked: str) -> tuple[bool, ...] | None:
    """Reads which dims of a slice wrap.

    Args:
        wrap: what was read.
        asked: the job, to begin messages with.

    Returns:
        A flag per dim; None where nothing is said.

    Raises:
        JobError: it is no list of flags.
    """
    if wrap is None:
        return None
    flags = cast("list[object]", wrap) if isinstance(wrap, list) else []
    if not flags or not all(isinstance(flag, bool) for flag in flags):
        raise JobError(
            f"{asked} was read with wrap={wrap!r}. It says for each dim of a slice whether it "
            "wraps. Write such as wrap: [true, true, false]."
        )
    return cast("tuple[bool, ...]", tuple(flags))


def read_flags(
    data: object, asked: str, compiler: str
) -> tuple[tuple[str, ...] | None, dict[str, object], str | None]:
    """Reads which XLA flags a job asks for.

    Args:
        data: what was read under `xla_flags`.
        asked: the job, to begin messages with.
        compiler: the package that reads the flags, "libtpu" or "jaxlib".

    Returns:
        Its sets, None where it does not say; its own flags; the version of the compiler that will
        run, None where it does not say.

    Raises:
        JobError: data of another form. Whether there are such sets and flags, xla_flags.py says.
    """
    if data is None:
        return None, {}, None
    keys = ("sets", "flags", compiler)
    if not isinstance(data, Mapping):
        raise JobError(
            f"{asked} was read with xla_flags={data!r}. Flags are sets by name, and flags with "
            "values. Write such as xla_flags: {sets: [latency-hiding], flags: {xla_...: 1}}."
        )
    given = cast("Mapping[object, object]", data)
    for key in given:
        if key not in keys:
            raise JobError(
                f"{asked} was read with {key!r} under xla_flags. There is no such key. "
                f"Write {nearest(key, keys)}."
            )
    sets, flags = given.get("sets"), given.get("flags", {})
    if sets is not None and not _are_names(sets):
        raise JobError(
            f"{asked} was read with xla_flags: sets={sets!r}. Sets are a list of names. "
            "Write such as sets: [latency-hiding], or [] for none."
        )
    if not isinstance(flags, Mapping) or not _are_names(list(cast("Mapping[str, object]", flags))):
        raise JobError(
            f"{asked} was read with xla_flags: flags={flags!r}. Flags are names with values. "
            "Write such as flags: {xla_tpu_scoped_vmem_limit_kib: 98304}."
        )
    version = given.get(compiler)
    if version is not None and not re.fullmatch(r"\d+(\.\d+){2,}", str(version)):
        raise JobError(
            f"{asked} was read with xla_flags: {compiler}={version!r}. It is the version of "
            f"{compiler} that the job will run with, of three numbers or more. "
            f"Write such as {compiler}: {_EXAMPLES[compiler]}."
        )
    names = None if sets is None else tuple(cast("Sequence[str]", sets))
    own = dict(cast("Mapping[str, object]", flags))
    return names, own, None if version is None else str(version)


def _are_names(given: object) -> bool:
    names = cast("list[object]", given) if isinstance(given, list) else [None]
    return all(isinstance(name, str) for name in names)
