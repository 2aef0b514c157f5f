"""Text for launchers: templates, and quoting for shells, YAML and Kubernetes.

Templates are files of tpu_configs/launch, written for jinja2. What stands in braces there is quoted
by a filter: ``sh`` for a shell, ``yaml`` and ``yaml_word`` for YAML, ``pod`` for a word of a pod's
command or the value of a variable there.
"""

import re
import shlex
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any, cast

from mesh_utils.errors import JobError
from mesh_utils.hardware import Chip
from mesh_utils.job import nearest
from mesh_utils.launch.work import PREEMPTED, Work

__all__ = [
    "dns_name",
    "fill",
    "kubernetes_text",
    "launcher_name",
    "node_arch",
    "settings",
    "yaml_text",
    "yaml_word",
]

_FOLDER = files("tpu_configs").joinpath("launch")
_MOST_LETTERS = 40


def fill(file: str, work: Work, **values: object) -> str:
    """Fills a template.

    Args:
        file: its name in tpu_configs/launch.
        work: the job and its command.
        **values: what else the template asks for.

    Returns:
        The text.
    """
    return _templates().get_template(file).render(work=work, **values)


@cache
def _templates() -> Any:
    import jinja2

    templates: Any = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: _FOLDER.joinpath(name).read_text("utf-8")),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    quotes = {"sh": shlex.quote, "yaml": yaml_text, "yaml_word": yaml_word, "pod": kubernetes_text}
    templates.filters.update(quotes)
    templates.globals.update(settings=settings, PREEMPTED=PREEMPTED)
    return templates


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


def yaml_word(text: str) -> str:
    """Writes a word as a YAML scalar, quoted where YAML would take it for something else.

    Args:
        text: letters, digits and dashes.

    Example:
        >>> yaml_word("llama"), yaml_word("no")
        ('llama', '"no"')
    """
    import yaml

    return text if yaml.safe_load(text) == text else yaml_text(text)


def yaml_text(text: str) -> str:
    """Quotes text as a YAML scalar on one line.

    Args:
        text: any text.

    Returns:
        It in double quotes.

    Example:
        >>> print(yaml_text("it's 4x4"))
        "it's 4x4"
    """
    import yaml

    return yaml.safe_dump(text, default_style='"', width=float("inf")).rstrip("\n")


def kubernetes_text(text: str) -> str:
    """Quotes a word of `command` or a value of `env` in a pod.

    Kubernetes replaces $(NAME) there, and takes $$ for a dollar.

    Args:
        text: any text.

    Returns:
        A YAML scalar that reaches the program as `text`.

    Example:
        >>> print(kubernetes_text("$(date)"))
        "$$(date)"
    """
    return yaml_text(text.replace("$", "$$"))


def settings(options: Mapping[str, str], descriptions: Mapping[str, str]) -> str:
    """Shell lines for what belongs to a user and not to a job, such as the project.

    Args:
        options: options by name, in lower case.
        descriptions: what each variable is, for the shell's message where it is not set.

    Returns:
        A line for each variable: the option, or a demand that it be set.

    Example:
        >>> print(settings({"zone": "us-east5-a"}, {"PROJECT": "your project", "ZONE": "a zone"}))
        PROJECT="${PROJECT:?Set PROJECT to your project}"
        ZONE=us-east5-a
    """
    return "\n".join(
        f"{name}={shlex.quote(options[name.lower()])}"
        if name.lower() in options
        else f'{name}="${{{name}:?Set {name} to {what}}}"'
        for name, what in descriptions.items()
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
    names = _names()[kind]
    if chip.name not in names:
        raise JobError(
            f"A {kind.replace('_', ' ')} of {chip.title} was asked for. "
            f"tpu_configs/launch/names.yaml has {nearest(chip.name, names)}. {instead}."
        )
    return str(names[chip.name]["value"])


def node_arch(chip: Chip) -> str | None:
    """The architecture of a chip's nodes where it is not x86-64.

    Args:
        chip: the chip.

    Returns:
        Such as "arm64", or None.
    """
    arch = _names()["arch"].get(chip.name)
    return None if arch is None else str(arch["value"])


@cache
def _names() -> dict[str, dict[str, dict[str, object]]]:
    import yaml

    text = _FOLDER.joinpath("names.yaml").read_text("utf-8")
    return cast("dict[str, Any]", yaml.safe_load(text))
