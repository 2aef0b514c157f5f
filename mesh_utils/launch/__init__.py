"""Starts a job file somewhere else: JobSet on GKE, xpk, queued resources, torchrun, Slurm.

`render` fills a template of tpu_configs/launch from a job and returns it as text. It starts
nothing, and needs no cloud tools.

    jobset      a JobSet for kubectl apply, TPU or GPU: a replica per slice, a pod per host
    xpk         the `xpk workload create` that makes such a JobSet in a cluster of xpk
    queued      a script: queued resources of Cloud TPU, then ssh --worker=all
    torchrun    a script for each GPU node: a process per GPU
    slurm       a batch script: a process per GPU

    >>> from mesh_utils.job import JobConfig
    >>> job = JobConfig.load("llama3_70b_v5p_2slices")
    >>> text = render(job, "jobset", command=["python", "train.py"], image="us/train:1")
    >>> [line.strip() for line in text.splitlines() if "replicas:" in line or "completions" in line]
    ['replicas: 2', 'completions: 128']

A command is a list of words: each reaches the program as it is, whatever is in it, and nothing is
expanded. For variables and pipes pass ["bash", "-c", "..."].

A program that was told to end, and has saved, exits with the status 75. JobSet, xpk and Slurm start
such a job again, and do not count it as a failure (xpk does).
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, cast

from mesh_utils.errors import JobError
from mesh_utils.job import JobConfig, nearest
from mesh_utils.launch.launchers import jobset, queued, slurm, torchrun, xpk
from mesh_utils.launch.text import dns_name
from mesh_utils.launch.variables import COMPILE_CACHE, JOB, LOCAL_AXES, job_text
from mesh_utils.launch.work import Work
from mesh_utils.xla_flags import COMPILERS, check_taken, tried_text

Renderer: TypeAlias = Callable[[Work], str]

_RENDERERS: dict[str, Renderer] = {
    "jobset": jobset,
    "xpk": xpk,
    "queued": queued,
    "torchrun": torchrun,
    "slurm": slurm,
}
_PLATFORMS = {
    "jobset": ("tpu", "gpu"),
    "xpk": ("tpu", "gpu"),
    "queued": ("tpu",),
    "torchrun": ("gpu",),
    "slurm": ("gpu",),
}
_OPTIONS: dict[str, tuple[str, ...]] = {
    "jobset": ("namespace", "queue", "max_restarts", "claim_template", "grace_seconds"),
    "xpk": ("project", "zone", "cluster", "priority", "max_restarts", "grace_seconds"),
    "queued": ("project", "zone", "runtime_version", "capacity"),
    "torchrun": ("max_restarts",),
    "slurm": ("partition", "account", "time", "grace_seconds"),
}
_FOR_ALL = ("compile_cache",)

LAUNCHERS = tuple(_RENDERERS)
"""The launchers."""


def launchers_for(job: JobConfig) -> tuple[str, ...]:
    """The launchers that can start a job.

    Args:
        job: the job.

    Returns:
        Their names.

    Example:
        >>> launchers_for(JobConfig.load("llama3_70b_h100"))
        ('jobset', 'xpk', 'torchrun', 'slurm')
    """
    return tuple(name for name in LAUNCHERS if job.chip.platform in _PLATFORMS[name])


def render(
    job: JobConfig,
    launcher: str,
    *,
    command: Sequence[str] | None = None,
    image: str | None = None,
    env: Mapping[str, str] | None = None,
    **options: str,
) -> str:
    """Fills the template of a launcher.

    Args:
        job: the job.
        launcher: "jobset", "xpk", "queued", "torchrun" or "slurm".
        command: the words of what each host (GPU: each process) runs; the job's by default.
        image: the container image; the job's by default. JobSet needs one; queued resources run
            the command in Docker if there is one, Slurm with pyxis; torchrun has none.
        env: further environment variables. Those for XLA flags come from the job.
        **options: compile_cache: a folder or a URL where XLA keeps compiled programs, so that a
            restart finds them. And what the launcher knows besides: namespace, queue,
            max_restarts, claim_template, grace_seconds (jobset); project, zone, cluster, priority,
            max_restarts, grace_seconds (xpk); project, zone, runtime_version, capacity: "spot" or
            "reserved" (queued); partition, account, time, grace_seconds (slurm); max_restarts
            (torchrun).

    Returns:
        YAML or a shell script.

    Raises:
        JobError: no such launcher, option or variable, a launcher that the chip does not have,
            words that cannot be passed on, or XLA flags that the job's libtpu or jaxlib refuses.

    Example:
        >>> job = JobConfig.load("llama3_8b_v5e")
        >>> print(render(job, "queued", command=["true"]).splitlines()[1])
        # Job 'llama3-8b-v5e': v5e:16x16, 64 hosts, fsdp=256
    """
    if launcher not in _RENDERERS:
        raise JobError(
            f"Job {job.name!r} was to be launched with {launcher!r}. There is no such launcher. "
            f"Pass {nearest(launcher, launchers_for(job))}."
        )
    if launcher not in launchers_for(job):
        raise JobError(
            f"Job {job.name!r} was to be launched with {launcher!r}. It does not start jobs on "
            f"{job.chip.title}. Pass one of {', '.join(launchers_for(job))}."
        )
    flag_notes(job)
    option_names = (*_OPTIONS[launcher], *_FOR_ALL)
    for option, value in options.items():
        if option not in option_names:
            raise JobError(
                f"Job {job.name!r} was to be launched with {launcher} and {option}={value!r}. It "
                f"has no such option. Pass {nearest(option, option_names)}."
            )
        _check_word(option, value, job)
    image = job.run.image if image is None else image
    work = Work(
        job=job,
        name=dns_name(job.name),
        command=_read_command(job.run.command if command is None else command, job),
        image=None if image is None else _check_word("image", image, job),
        env=work_environment(job, env or {}, options.pop("compile_cache", None)),
        options=options,
    )
    return _RENDERERS[launcher](work)


def flag_notes(job: JobConfig) -> list[str]:
    """What is known of a job's XLA flags and the libtpu or jaxlib that will read them.

    Args:
        job: the job.

    Returns:
        Notes for people; none where the job states a version that took all its sets.

    Raises:
        JobError: the job states a version that refused one.

    Example:
        >>> print(flag_notes(JobConfig.load("llama3_70b_v5p"))[1].partition(",")[0])
        latency-hiding: taken by libtpu 0.0.42.1
    """
    flags, compiler = job.xla_flags(), COMPILERS[job.chip.platform]
    if job.compiler is not None:
        subject = f"Job {job.name!r} was to be launched with {compiler} {job.compiler}"
        return check_taken(flags, job.chip, job.compiler, subject)
    tried = tried_text(flags, job.chip).splitlines()
    say = (
        f"the job does not say which {compiler} will run (xla_flags: {compiler}); its sets of XLA "
        "flags were tried on these"
    )
    return [say, *tried] if tried else []


def work_environment(
    job: JobConfig, env: Mapping[str, str], compile_cache: str | None = None
) -> dict[str, str]:
    """The environment variables that a launcher sets, whatever it is.

    Args:
        job: the job.
        env: further variables; they win over those of the job file.
        compile_cache: where XLA keeps compiled programs; the job's by default.

    Returns:
        XLA flags, the job itself, the job file's variables, the further ones, and the folder for
        compiled programs.

    Raises:
        JobError: no such variable, or one that says what the job file says.

    Example:
        >>> list(work_environment(JobConfig.load("llama3_8b_v5e"), {"A": "b"}, "gs://x/y"))
        ['LIBTPU_INIT_ARGS', 'XLA_DTENSOR_JOB', 'A', 'JAX_COMPILATION_CACHE_DIR']
    """
    user_env = {**job.run.env, **env}
    cache = job.run.compile_cache if compile_cache is None else compile_cache
    launcher_env = {JOB: job_text(job)} | ({} if cache is None else {COMPILE_CACHE: cache})
    flags = job.environment()
    _check_env(user_env, job)
    for name, value in user_env.items():
        if name in flags:
            raise JobError(
                f"Job {job.name!r} was to be launched with {name}={value!r}. The job's XLA flags "
                "are in that variable. Write them under xla_flags: flags in the job file."
            )
        if name in launcher_env or name in (JOB, LOCAL_AXES):
            where = "run: compile_cache" if name == COMPILE_CACHE else "its own keys"
            raise JobError(
                f"Job {job.name!r} was to be launched with {name}={value!r}. The launcher sets "
                f"that variable itself. Write it under {where} in the job file."
            )
    return flags | {JOB: launcher_env.pop(JOB)} | user_env | launcher_env


def _read_command(command: object, job: JobConfig) -> tuple[str, ...]:
    words = cast("Sequence[object]", command) if isinstance(command, (list, tuple)) else ()
    if not words or not all(isinstance(word, str) and _fits(word) for word in words):
        raise JobError(
            f"Job {job.name!r} was to be launched with command={command!r}. A command is a list of "
            "words, one or more, without the character 0. Pass such as ['python', 'train.py'], or "
            "['bash', '-c', ...] for a line of shell."
        )
    return cast("tuple[str, ...]", tuple(words))


def _check_env(env: Mapping[str, str], job: JobConfig) -> None:
    for name, value in cast("Mapping[object, object]", env).items():
        is_name = isinstance(name, str) and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name)
        if not is_name or not isinstance(value, str) or not _fits(value):
            raise JobError(
                f"Job {job.name!r} was to be launched with the variable {name!r}={value!r}. Names "
                "are of letters, digits and '_', values are text without the character 0. "
                "Pass such as env={'HF_HOME': '/data'}."
            )


def _check_word(name: str, word: str, job: JobConfig) -> str:
    text = cast("object", word)
    if not isinstance(text, str) or not text or not re.fullmatch(r"[\x21-\x7e]+", text):
        raise JobError(
            f"Job {job.name!r} was to be launched with {name}={word!r}. It has to be one word of "
            f"printable ASCII. Pass such as {name}='a-name'."
        )
    return word


def _fits(text: str) -> bool:
    """Whether text can be an argument of a program."""
    try:
        return "\0" not in text and math.isfinite(len(text.encode()))
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
