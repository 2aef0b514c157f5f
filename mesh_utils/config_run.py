"""What a job runs, beside what it runs on: the key `run` of a job file.

    run:
      command: [python, -m, examples.train_job]   or one line of shell words
      image: us-docker.pkg.dev/project/repository/train:1
      env: {HF_HOME: /data}
      compile_cache: gs://bucket/compiled         where XLA keeps compiled programs
      grace_seconds: 120                          from the signal to end until a process is killed

All of it can be said, or said otherwise, when the job is launched.
"""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

from mesh_utils.config_fields import read_text
from mesh_utils.errors import JobError
from mesh_utils.job_file import nearest
from mesh_utils.mesh_input import as_integer

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


def read_run(data: object, asked: str) -> Run:
    """Reads what a job runs.

    Args:
        data: what the job file says under `run`.
        asked: the job, to begin messages with.

    Returns:
        It; one without a command where nothing is said.

    Raises:
        JobError: unknown keys, or values of another kind.

    Example:
        >>> read_run({"command": "python train.py", "env": {"STEPS": 10}}, "Job 'x'").env
        {'STEPS': '10'}
    """
    if data is None:
        return Run()
    if not isinstance(data, Mapping):
        raise JobError(
            f"{asked} was read with run={data!r}. What a job runs is a mapping of keys. "
            "Write such as run: {command: [python, train.py]}."
        )
    given = cast("Mapping[object, object]", data)
    for key in given:
        if key not in _RUN_KEYS:
            raise JobError(
                f"{asked} was read with {key!r} under run. There is no such key. "
                f"Write {nearest(key, _RUN_KEYS)}."
            )
    image, cache = given.get("image"), given.get("compile_cache")
    return Run(
        command=_read_words(given.get("command"), asked),
        image=None if image is None else read_text(image, "run: image", asked, "us/train:1"),
        env=_read_env(given.get("env"), asked),
        compile_cache=None
        if cache is None
        else read_text(cache, "run: compile_cache", asked, "gs://bucket/compiled"),
        grace_seconds=_read_grace(given.get("grace_seconds", GRACE_SECONDS), asked),
    )


def _read_words(command: object, asked: str) -> tuple[str, ...]:
    if command is None:
        return ()
    words: object = command
    if isinstance(command, str):
        try:
            words = shlex.split(command)
        except ValueError:
            words = None
    found = cast("list[object]", words) if isinstance(words, list) else []
    if not found or not all(isinstance(word, (str, int, float)) for word in found):
        raise JobError(
            f"{asked} was read with run: command={command!r}. A command is a list of words, or one "
            "line of them as a shell reads it. Write such as command: [python, train.py]."
        )
    return tuple(map(str, found))


def _read_env(env: object, asked: str) -> dict[str, str]:
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
            f"{asked} was read with run: env={env!r}. Variables are names with text or numbers. "
            "Write such as env: {HF_HOME: /data}, and 'true' in quotes."
        )
    return {str(name): str(value) for name, value in pairs.items()}


def _read_grace(given: object, asked: str) -> int:
    seconds = as_integer(given)
    if seconds is None or seconds < 1:
        raise JobError(
            f"{asked} was read with run: grace_seconds={given!r}. That is no number of seconds. "
            f"Write 1 or more, such as grace_seconds: {GRACE_SECONDS}."
        )
    return seconds
