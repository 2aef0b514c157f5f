"""Text for launchers: templates, and quoting for shells, YAML and Kubernetes.

Templates are files of tpu_configs/launch. A place to fill is `@@name`, because `$` means something
to shells. A line that holds nothing but a place which is filled with nothing is left out.
"""

import re
import shlex
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from string import Template
from typing import Any, cast

from mesh_utils.errors import JobError
from mesh_utils.hardware import Chip
from mesh_utils.job import nearest

_FOLDER = ("tpu_configs", "launch")
_MOST_LETTERS = 40


class _Places(Template):
    delimiter = "@@"


def fill(file: str, values: Mapping[str, object]) -> str:
    """Fills a template.

    Args:
        file: its name in tpu_configs/launch.
        values: what to put at each place.

    Returns:
        The text.

    Raises:
        KeyError: a place for which there is no value.
    """
    text = files(_FOLDER[0]).joinpath(_FOLDER[1], file).read_text(encoding="utf-8")
    lines: list[str] = []
    for line in text.splitlines():
        filled = _Places(line).substitute(values)
        if filled.strip() not in ("", "\\") or not line.strip():
            lines.append(filled.rstrip(" "))
    return "\n".join(lines) + "\n"


def dns_name(name: str) -> str:
    """The name of a job as Kubernetes, Cloud and Slurm take it.

    Args:
        name: any text.

    Returns:
        At most 40 lower-case letters, digits and dashes, a letter first.

    Raises:
        JobError: it has no letter and no digit of ASCII.

    Example:
        >>> dns_name("Llama 3 (70B)_v5p"), dns_name("8b")
        ('llama-3-70b-v5p', 'job-8b')
    """
    words = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if not words:
        raise JobError(
            f"Job {name!r} was to be launched. Its name has no letter and no digit, and what runs "
            "it needs one. Pass a job with a name such as llama3-70b."
        )
    named = words if words[0].isalpha() else f"job-{words}"
    return named[:_MOST_LETTERS].rstrip("-")


def yaml_word(value: str) -> str:
    """Writes a word as a YAML scalar, quoted where YAML would take it for something else.

    Args:
        value: letters, digits and dashes.

    Example:
        >>> yaml_word("llama"), yaml_word("no")
        ('llama', '"no"')
    """
    import yaml

    return value if yaml.safe_load(value) == value else yaml_text(value)


def yaml_text(value: str) -> str:
    """Quotes text as a YAML scalar on one line.

    Args:
        value: any text.

    Returns:
        It in double quotes.

    Example:
        >>> print(yaml_text("it's 4x4"))
        "it's 4x4"
    """
    import yaml

    return yaml.safe_dump(value, default_style='"', width=float("inf")).rstrip("\n")


def kubernetes_text(value: str) -> str:
    """Quotes a word of `command` or a value of `env` in a pod.

    Kubernetes replaces $(NAME) there, and takes $$ for a dollar.

    Args:
        value: any text.

    Returns:
        A YAML scalar that reaches the program as `value`.

    Example:
        >>> print(kubernetes_text("$(date)"))
        "$$(date)"
    """
    return yaml_text(value.replace("$", "$$"))


def yaml_list(items: Iterable[str], spaces: int) -> str:
    """Lists items behind a key.

    Args:
        items: YAML, one item each.
        spaces: how far in.

    Returns:
        A line for each item, beginning with a line break; " []" for none.

    Example:
        >>> print("env:" + yaml_list(["{name: A}"], 2))
        env:
          - {name: A}
    """
    lines = [f"\n{' ' * spaces}- {item}" for item in items]
    return "".join(lines) or " []"


def shell_lines(words: Iterable[str], spaces: int) -> str:
    """Quotes words for a shell, one on a line.

    Args:
        words: any text.
        spaces: how far in the lines after the first are.

    Returns:
        Them, quoted.
    """
    return f"\n{' ' * spaces}".join(map(shlex.quote, words))


def exports(env: Mapping[str, str]) -> str:
    """Shell lines that set variables.

    Args:
        env: values by name.

    Returns:
        A line for each.

    Example:
        >>> exports({"A": "b c"})
        "export A='b c'"
    """
    return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in env.items())


def settings(given: Mapping[str, str], wanted: Mapping[str, str]) -> str:
    """Shell lines for what belongs to a user and not to a job, such as the project.

    Args:
        given: options by name, in lower case.
        wanted: what each variable is, for the shell's message where it is not set.

    Returns:
        A line for each variable: the option, or a demand that it be set.

    Example:
        >>> print(settings({"zone": "us-east5-a"}, {"PROJECT": "your project", "ZONE": "a zone"}))
        PROJECT="${PROJECT:?Set PROJECT to your project}"
        ZONE=us-east5-a
    """
    return "\n".join(
        f"{name}={shlex.quote(given[name.lower()])}"
        if name.lower() in given
        else f'{name}="${{{name}:?Set {name} to {what}}}"'
        for name, what in wanted.items()
    )


def launcher_name(kind: str, chip: Chip, instead: str) -> str:
    """What a launcher calls a chip.

    Args:
        kind: "runtime_version", "xpk_node" or "xpk_slice".
        chip: the chip.
        instead: what to do where it has no such name.

    Returns:
        The name.

    Raises:
        JobError: none is known.

    Example:
        >>> from mesh_utils import find_chip
        >>> launcher_name("runtime_version", find_chip("v6e"), "")
        'v2-alpha-tpuv6e'
    """
    known = _names()[kind]
    if chip.name not in known:
        raise JobError(
            f"A {kind.replace('_', ' ')} of {chip.title} was asked for. "
            f"tpu_configs/launch/names.yaml has {nearest(chip.name, known)}. {instead}."
        )
    return str(known[chip.name]["value"])


def node_arch(chip: Chip) -> str | None:
    """The architecture of a chip's nodes where it is not x86-64.

    Args:
        chip: the chip.

    Returns:
        Such as "arm64", or None.
    """
    found = _names()["arch"].get(chip.name)
    return None if found is None else str(found["value"])


@cache
def _names() -> dict[str, dict[str, dict[str, object]]]:
    import yaml

    text = files(_FOLDER[0]).joinpath(_FOLDER[1], "names.yaml").read_text(encoding="utf-8")
    return cast("dict[str, Any]", yaml.safe_load(text))
