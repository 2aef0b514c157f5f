"""Finds job files and reads their YAML.

Jobs that come with the package are in tpu_configs/jobs and go by name: "llama3_70b_v5p". YAML is
read strictly: a key that is written twice is refused, where YAML readers mostly take the last.
"""

import os
from collections.abc import Hashable, Iterable
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

from mesh_utils.errors import JobError

_FOLDER = ("tpu_configs", "jobs")


def job_names() -> tuple[str, ...]:
    """Lists the jobs that come with the package.

    Returns:
        Their names, in alphabetical order.

    Example:
        >>> "llama3_70b_v5p" in job_names()
        True
    """
    folder = files(_FOLDER[0]).joinpath(_FOLDER[1])
    found = [entry.name for entry in folder.iterdir() if entry.name.endswith(".yaml")]
    return tuple(sorted(name.removesuffix(".yaml") for name in found))


def read_job_file(path_or_name: str | os.PathLike[str]) -> tuple[object, str]:
    """Reads a job file.

    Args:
        path_or_name: a path, or the name of a job that comes with the package, with or without
            "tpu_configs/jobs/" and ".yaml".

    Returns:
        What it says, and what to call it in messages.

    Raises:
        JobError: there is no such file or job, or it is no YAML.

    Example:
        >>> read_job_file("llama3_70b_v5p")[1]
        'llama3_70b_v5p'
    """
    given = os.fspath(path_or_name)
    path = Path(given)
    if path.is_file():
        try:
            return read_yaml(path.read_text(encoding="utf-8"), given), given
        except (OSError, UnicodeDecodeError) as error:
            raise JobError(
                f"Job file {given!r} was asked for. It cannot be read: {error}. "
                "Pass a readable text file."
            ) from None
    name = given.removeprefix("tpu_configs/jobs/").removesuffix(".yaml")
    if name in job_names():
        text = files(_FOLDER[0]).joinpath(_FOLDER[1], f"{name}.yaml").read_text(encoding="utf-8")
        return read_yaml(text, name), name
    what = "It is a folder" if path.is_dir() else "There is no such file, nor a job of that name"
    raise JobError(
        f"Job {given!r} was asked for. {what}. "
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


def nearest(name: object, known: Iterable[str], most: int = 12) -> str:
    """Lists what there is, the most alike first, for the end of a message.

    Args:
        name: what was asked for.
        known: what there is.
        most: how many to list.

    Returns:
        Such as "'tp', or one of dp, fsdp".

    Example:
        >>> nearest("tpp", ["dp", "tp"])
        "'tp', or one of dp"
    """
    names = list(known)
    near = get_close_matches(str(name), names, n=1, cutoff=0.5)
    others = [each for each in names if each not in near]
    listed = ", ".join(others[:most]) + (", ..." if len(others) > most else "")
    if not near:
        return f"one of {listed}"
    return f"{near[0]!r}, or one of {listed}" if others else repr(near[0])


@cache
def _strict_loader() -> Any:
    import yaml

    class StrictLoader(yaml.SafeLoader):
        """A SafeLoader that refuses keys that are written twice."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
            seen: set[object] = set()
            for key_node, _ in cast("list[tuple[Any, Any]]", node.value):
                key = key_node.value
                if key_node.tag != "tag:yaml.org,2002:merge" and str(key) in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key!r} is there twice", key_node.start_mark
                    )
                seen.add(str(key))
            return super().construct_mapping(node, deep)

    return StrictLoader
