"""XLA flags: which of them hide communication, for which chip, why, and who says so.

The flags are in tpu_configs/xla_flags.yaml, in sets. None is written in Python. Which versions of
libtpu and jaxlib took each set is said below.

    latency-hiding          taken by every job that does not say which sets it wants
    dcn                     taken by such jobs of several slices
    async-all-reduce, reduce-scatter-layout, pipelining, sparse-core, dense-vmem, moe-vmem
                            taken when a job asks for them

TPU programs read them from LIBTPU_INIT_ARGS, GPU programs from XLA_FLAGS.

    >>> for flag in flags_for("v5e", 2)[-2:]:
    ...     print(flag)
    --megascale_graph_within_launch_hang_threshold=10m
    --megascale_grpc_enable_xor_tracer=false

Which versions of libtpu and jaxlib took which XLA flags: asked of them, and written down.

tpu_configs/xla_flags_tried.yaml is made by `python -m tools.try_xla_flags`. For each set and each
chip that it is for, for what jobs take, and for the flags that no job may have together, it says
what came of a small program with all five kinds of collectives, on one slice and on two: took,
refused, or unknown flag. The flags of GPUs were given to jaxlib alone, which knows them or not.

JAX pins libtpu to three numbers (libtpu==0.0.50.*), so versions are the same here where these are.

    >>> from mesh_utils.xla_flags import flags_for
    >>> print(tried_text(flags_for("v6e", 1), "v6e"))
    latency-hiding: taken by libtpu 0.0.42.1, 0.0.44.1, 0.0.46.3, 0.0.48.1, 0.0.50.1
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any, cast

from mesh_utils.errors import JobError
from mesh_utils.hardware import Chip, chips, find_chip

__all__ = []


# --------------------------------------------------------------------------------------- XLA flags

_WHEN = ("always", "several_slices", "asked")
_NAME = re.compile(r"(xla|megascale|tpu)_[a-z0-9_]+")
_ENVIRONMENT = {"tpu": "LIBTPU_INIT_ARGS", "gpu": "XLA_FLAGS"}

COMPILERS = {"tpu": "libtpu", "gpu": "jaxlib"}
"""The package that reads the flags, by platform."""


@dataclass(frozen=True)
class XlaFlag:
    """One flag with its value.

    Attributes:
        name: without dashes.
        value: as it is written behind "=".
        hardware: the names of the chips that it is for.
        reason: why.
        source: who says so.
        default: what XLA does without it; None where no source says.
        flag_set: the set that it is in; "" for a flag of a job's own.

    Example:
        >>> str(XlaFlag("xla_a", "true", ("v5e",), "an example", "this page"))
        '--xla_a=true'
    """

    name: str
    value: str
    hardware: tuple[str, ...]
    reason: str
    source: str
    default: str | None = None
    flag_set: str = ""

    def __str__(self) -> str:
        return f"--{self.name}={self.value}"


@dataclass(frozen=True)
class SlowCompile:
    """What a set costs where a program is compiled; nothing of it where the program runs.

    Attributes:
        seconds: CPU seconds of compiling with the set.
        without: CPU seconds of compiling the same without it.
        program: what was compiled, with which libtpu, and on what.
    """

    seconds: float
    without: float
    program: str


@dataclass(frozen=True)
class FlagSet:
    """Flags that go together.

    Attributes:
        name: the name that jobs use.
        when: "always", "several_slices" or "asked": whether jobs that ask for nothing take it.
        reason: what it is for.
        flags: its flags, for all chips.
        slow: what it costs the compiler, where that is much; else None.
    """

    name: str
    when: str
    reason: str
    flags: tuple[XlaFlag, ...]
    slow: SlowCompile | None = None


@dataclass(frozen=True)
class UnsafeFlags:
    """Flags that no job may have together.

    Attributes:
        name: what it is called.
        flags: the values by name that are unsafe together.
        unless: the values by name, any of which makes them safe again.
        hardware: the names of the chips on which they are.
        reason: why.
    """

    name: str
    flags: Mapping[str, str]
    unless: Mapping[str, str]
    hardware: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class FlagTable:
    """What tpu_configs/xla_flags.yaml says.

    Attributes:
        sets: the sets by name.
        unsafe: the flags that no job may have together.

    Example:
        >>> flag_table().unsafe[0].name
        'async-all-gather'
    """

    sets: Mapping[str, FlagSet]
    unsafe: tuple[UnsafeFlags, ...] = ()

    def check_valid(self) -> None:
        """States the invariants of the table.

        Raises:
            JobError: one of them does not hold: a fault of the file.
        """
        chip_names = {chip.name for chip in chips()}
        faults: list[str] = []
        for flag_set in self.sets.values():
            pairs = [(flag.name, chip) for flag in flag_set.flags for chip in flag.hardware]
            twice = sorted({pair for pair in pairs if pairs.count(pair) > 1})
            faults += [f"{flag_set.name} has {name} twice for {chip}" for name, chip in twice]
            faults += [f"{name} is for {chip!r}" for name, chip in pairs if chip not in chip_names]
            faults += [f"{flag.name} is no flag" for flag in flag_set.flags if not _is_flag(flag)]
            faults += [f"{flag_set.name} is for when={flag_set.when!r}"] * (
                flag_set.when not in _WHEN
            )
        if faults:
            raise JobError(
                f"The table of XLA flags was checked. It cannot be: {'; '.join(faults)}. "
                "Correct tpu_configs/xla_flags.yaml."
            )


@cache
def flag_table() -> FlagTable:
    """Reads the table of flags.

    Returns:
        The table.

    Raises:
        JobError: a fault of the file.

    Example:
        >>> list(flag_table().sets)[:2]
        ['latency-hiding', 'dcn']
    """
    import yaml  # it takes longer to import than all of mesh_utils

    text = files("tpu_configs").joinpath("xla_flags.yaml").read_text(encoding="utf-8")
    document = cast("dict[str, Any]", yaml.safe_load(text))
    sources = {key: " ".join(source.split()) for key, source in document["sources"].items()}
    sets = {name: _read_set(name, entry, sources) for name, entry in document["sets"].items()}
    table = FlagTable(sets, tuple(_read_unsafe(*entry) for entry in document["unsafe"].items()))
    table.check_valid()
    return table


def flags_for(
    chip: str | Chip,
    num_slices: int,
    sets: Sequence[str] | None = None,
    own: Mapping[str, object] | None = None,
) -> tuple[XlaFlag, ...]:
    """The flags of a job.

    Args:
        chip: its chip.
        num_slices: its slices.
        sets: the sets that it asks for; None for those that fit every job, and those that fit jobs
            of several slices if it has several.
        own: flags of its own by name, which win over those of sets.

    Returns:
        Flags for that chip, in the order of the sets, then its own.

    Raises:
        JobError: a set that there is not or that has nothing for this chip, two sets that
            contradict each other, what is no flag, or is one of other hardware, or flags that are
            unsafe together.

    Example:
        >>> [str(flag) for flag in flags_for("v5p", 1, [], {"xla_tpu_dvfs_p_state": 7})]
        ['--xla_tpu_dvfs_p_state=7']
        >>> flags_for("v5p", 1, ["dnc"])
        Traceback (most recent call last):
        ...
        mesh_utils.errors.JobError: The set of XLA flags 'dnc' was asked for. ... Pass 'dcn', ...
    """
    target = find_chip(chip) if isinstance(chip, str) else chip
    merged: dict[str, XlaFlag] = {}
    for name in default_sets(num_slices) if sets is None else sets:
        fitting = _flags_of(name, target)
        if not fitting and sets is not None:
            raise _unknown_set(name, target)
        for flag in fitting:
            earlier = merged.setdefault(flag.name, flag)
            if earlier.value != flag.value:
                raise JobError(
                    f"The sets of XLA flags {earlier.flag_set!r} and {name!r} were asked for. They "
                    f"give {flag.name} the values {earlier.value} and {flag.value}. "
                    f"Pass one of the two, or {flag.name} under flags."
                )
    for name, value in (own or {}).items():
        merged[name] = _own_flag(name, value, target, merged)
    for unsafe in flag_table().unsafe:
        _refuse_unsafe(unsafe, target, {name: flag.value for name, flag in merged.items()})
    return tuple(merged.values())


def flag_environment(chip: str | Chip, flags: Iterable[XlaFlag]) -> dict[str, str]:
    """The environment variable that carries flags.

    Args:
        chip: the chip of the job.
        flags: its flags.

    Returns:
        LIBTPU_INIT_ARGS or XLA_FLAGS with all of them; nothing where there are none.

    Example:
        >>> flag_environment("h100", flags_for("h100", 1, [], {"xla_gpu_graph_level": 0}))
        {'XLA_FLAGS': '--xla_gpu_graph_level=0'}
    """
    target = find_chip(chip) if isinstance(chip, str) else chip
    text = " ".join(map(str, flags))
    return {_ENVIRONMENT[target.platform]: text} if text else {}


def default_sets(num_slices: int) -> list[str]:
    """The sets of a job that asks for none.

    Args:
        num_slices: its slices.

    Returns:
        Their names; some may have nothing for its chip.

    Example:
        >>> default_sets(2)
        ['latency-hiding', 'dcn']
    """
    fitting = ("always", "several_slices") if num_slices > 1 else ("always",)
    return [name for name, flag_set in flag_table().sets.items() if flag_set.when in fitting]


def _flags_of(name: str, chip: Chip) -> tuple[XlaFlag, ...]:
    flag_set = flag_table().sets.get(name)
    if flag_set is None:
        raise _unknown_set(name, chip)
    return tuple(flag for flag in flag_set.flags if chip.name in flag.hardware)


def _unknown_set(name: str, chip: Chip) -> JobError:
    sets = flag_table().sets
    fitting = [set_name for set_name in sets if _flags_of(set_name, chip)]
    near = get_close_matches(str(name), fitting, n=1, cutoff=0.3)
    far = [set_name for set_name in fitting if set_name not in near]
    why = f"It has none for {chip.title}" if name in sets else "There is no such set"
    return JobError(
        f"The set of XLA flags {name!r} was asked for. {why}. "
        f"Pass {', '.join(map(repr, [*near, *far]))}, or no set."
    )


def _own_flag(name: str, value: object, chip: Chip, merged: Mapping[str, XlaFlag]) -> XlaFlag:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    flag = XlaFlag(name, text, (chip.name,), "asked for by the job", "the job")
    plain = isinstance(value, (bool, int, float, str))
    if not plain or not _is_flag(flag):
        raise JobError(
            f"The XLA flag {name!r} was asked for with the value {value!r}. A flag is "
            "xla_..., megascale_... or tpu_... without dashes, and its value has no spaces and no "
            "quotes. Pass such as xla_tpu_scoped_vmem_limit_kib: 98304."
        )
    foreign_prefix = {"tpu": "xla_gpu_", "gpu": "xla_tpu_"}[chip.platform]
    if name.startswith(
        (foreign_prefix, "megascale_") if chip.platform == "gpu" else foreign_prefix
    ):
        near = get_close_matches(name, _names_for(chip), n=1, cutoff=0.3)
        instead = f"Pass {near[0]}, or" if near else "Pass"
        raise JobError(
            f"The XLA flag {name!r} was asked for on {chip.title}. It is a flag of other hardware, "
            f"and the program would not start. {instead} a flag of a {chip.platform.upper()}."
        )
    return flag


def _refuse_unsafe(unsafe: UnsafeFlags, chip: Chip, values: Mapping[str, str]) -> None:
    if chip.name not in unsafe.hardware or not unsafe.flags.items() <= values.items():
        return
    if unsafe.unless.items() & values.items():
        return
    written = " and ".join(f"{name}={value}" for name, value in unsafe.flags.items())
    cure = " or ".join(f"{name}: {value}" for name, value in unsafe.unless.items())
    raise JobError(
        f"The XLA flags {written} were asked for on {chip.title}. Together {unsafe.reason}. "
        f"Leave out one of them, or add {cure}."
    )


def _names_for(chip: Chip) -> list[str]:
    every = [flag for flag_set in flag_table().sets.values() for flag in flag_set.flags]
    return [flag.name for flag in every if chip.name in flag.hardware]


def _is_flag(flag: XlaFlag) -> bool:
    return bool(_NAME.fullmatch(flag.name)) and not re.search(r"[\s'\"\\$`]", flag.value)


def _read_set(name: str, entry: Mapping[str, Any], sources: Mapping[str, str]) -> FlagSet:
    rows = cast("list[dict[str, Any]]", entry["flags"])
    flags = tuple(
        XlaFlag(
            name=row["name"],
            value=str(row["value"]),
            hardware=_chip_names(row["hardware"]),
            reason=" ".join(row["reason"].split()),
            source=sources[row["source"]],
            default=row.get("default"),
            flag_set=name,
        )
        for row in rows
    )
    slow = SlowCompile(**entry["slow"]) if "slow" in entry else None
    return FlagSet(name, entry["when"], entry["reason"], flags, slow)


def _read_unsafe(name: str, entry: Mapping[str, Any]) -> UnsafeFlags:
    hardware = _chip_names(entry["hardware"])
    return UnsafeFlags(name, entry["flags"], entry["unless"], hardware, entry["reason"])


def _chip_names(written: Sequence[str]) -> tuple[str, ...]:
    names: list[str] = []
    for name in written:
        of_platform = [chip.name for chip in chips() if chip.platform == name]
        names += of_platform or [name]
    return tuple(names)


# ---------------------------------------- Which versions of libtpu and jaxlib took which XLA flags

TOOK = "took"


@dataclass(frozen=True)
class Trial:
    """What came of some flags on one chip.

    Attributes:
        sets: the sets that were given; none for flags that are unsafe together.
        unsafe: the name of such flags; "" for sets.
        chip: the chip.
        digest: `digest` of the flags that were given.
        outcomes: "took", "refused" or "unknown flag", by version.
        cpu_seconds: of the process that tried, by version.
        said: the beginning of the error, by version; nothing where there was none.
    """

    sets: tuple[str, ...]
    unsafe: str
    chip: str
    digest: str
    outcomes: dict[str, str]
    cpu_seconds: dict[str, float]
    said: dict[str, str]


@cache
def trials() -> tuple[Trial, ...]:
    """Reads what was tried.

    Returns:
        The trials, on all chips.

    Example:
        >>> {trial.chip for trial in trials() if trial.sets == ("sparse-core",)}
        {'tpu7x'}
    """
    import yaml  # it takes longer to import than all of mesh_utils

    text = files("tpu_configs").joinpath("xla_flags_tried.yaml").read_text(encoding="utf-8")
    return read_trials(cast("dict[str, Any]", yaml.safe_load(text)))


def read_trials(document: dict[str, Any]) -> tuple[Trial, ...]:
    """Reads trials from the data of the file.

    Args:
        document: what YAML made of it.

    Returns:
        The trials.
    """
    rows: list[Trial] = []
    for compiler in COMPILERS.values():
        versions = list(document[compiler]["versions"])
        for row in document[compiler]["trials"]:
            rows.append(
                Trial(
                    sets=tuple(row.get("sets", ())),
                    unsafe=row.get("unsafe", ""),
                    chip=row["chip"],
                    digest=row["flags"],
                    outcomes=dict(zip(versions, row["outcomes"], strict=True)),
                    cpu_seconds=dict(zip(versions, row["cpu_seconds"], strict=True)),
                    said=row.get("said", {}),
                )
            )
    return tuple(rows)


def digest(flags: Iterable[object]) -> str:
    """Tells flags from others: eight digits, so that a changed set is seen to be untried.

    Args:
        flags: flags, as they are written.

    Returns:
        The digits.

    Example:
        >>> digest(["--xla_a=true"]) == digest(["--xla_a=false"])
        False
    """
    return hashlib.sha256(" ".join(map(str, flags)).encode()).hexdigest()[:8]


def same_version(version: str, other_version: str) -> bool:
    """Whether two versions of a compiler have their first three numbers in common.

    Args:
        version: a version.
        other_version: another one.

    Returns:
        Whether they are the same to JAX.

    Example:
        >>> same_version("0.0.50", "0.0.50.1"), same_version("0.0.50.1", "0.0.52")
        (True, False)
    """
    return _three(version) == _three(other_version)


def check_taken(
    flags: Sequence[XlaFlag], chip: str | Chip, version: str, subject: str
) -> list[str]:
    """Refuses flags that a version of the compiler was seen to refuse.

    Args:
        flags: the flags of a job.
        chip: its chip.
        version: of libtpu for a TPU, of jaxlib for a GPU.
        subject: the job and where the version is from, to begin the message with.

    Returns:
        Notes: the sets that were not tried with that version.

    Raises:
        JobError: that version refused a set, or sets of the job together.

    Example:
        >>> from mesh_utils.xla_flags import flags_for
        >>> check_taken(flags_for("v5e", 1), "v5e", "0.0.50.1", "A job")
        []
    """
    target = find_chip(chip) if isinstance(chip, str) else chip
    compiler = COMPILERS[target.platform]
    names = _sets_of(flags)
    tried: set[str] = set()
    for trial in _trials_of(names, target):
        for tried_version, outcome in trial.outcomes.items():
            if not same_version(version, tried_version):
                continue
            tried.update(trial.sets)
            if outcome != TOOK:
                raise _refused(trial, tried_version, compiler, subject)
    untried = [name for name in names if name not in tried]
    if not untried:
        return []
    many, be = ("set", "was") if len(untried) == 1 else ("sets", "were")
    versions = ", ".join(versions_of(compiler))
    return [
        f"the {many} of XLA flags {', '.join(untried)} {be} not tried with {compiler} {version}, "
        f"only with {versions}"
    ]


def tried_text(flags: Sequence[XlaFlag], chip: str | Chip) -> str:
    """Says which versions took each set of a job.

    Args:
        flags: the flags of the job.
        chip: its chip.

    Returns:
        A line for each set.

    Example:
        >>> from mesh_utils.xla_flags import flags_for
        >>> print(tried_text(flags_for("h100", 1), "h100").partition(",")[0])
        latency-hiding: taken by jaxlib 0.10.2
    """
    target = find_chip(chip) if isinstance(chip, str) else chip
    compiler = COMPILERS[target.platform]
    lines: list[str] = []
    for name in _sets_of(flags):
        took = [
            version
            for trial in _trials_of([name], target)
            for version, outcome in trial.outcomes.items()
            if outcome == TOOK
        ]
        by = f"taken by {compiler} {', '.join(took)}" if took else "not tried"
        lines.append(f"{name}: {by}")
    return "\n".join(lines)


def versions_of(compiler: str) -> list[str]:
    """The versions with which flags were tried.

    Args:
        compiler: "libtpu" or "jaxlib".

    Returns:
        The versions, the oldest first.
    """
    platform = next(key for key, reader in COMPILERS.items() if reader == compiler)
    versions = {
        version: None
        for trial in trials()
        if find_chip(trial.chip).platform == platform
        for version in trial.outcomes
    }
    return list(versions)


def _three(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def _sets_of(flags: Sequence[XlaFlag]) -> list[str]:
    return list(dict.fromkeys(flag.flag_set for flag in flags if flag.flag_set))


def _trials_of(names: Sequence[str], chip: Chip) -> list[Trial]:
    return [
        trial
        for trial in trials()
        if trial.chip == chip.name and trial.sets and set(trial.sets) <= set(names)
    ]


def _refused(trial: Trial, version: str, compiler: str, subject: str) -> JobError:
    takers = [taker for taker, outcome in trial.outcomes.items() if outcome == TOOK]
    many = "set" if len(trial.sets) == 1 else "sets"
    alternative = f", or use {compiler} {' or '.join(takers)}" if takers else ""
    out = trial.sets[-1]
    return JobError(
        f"{subject}. {compiler} {version} does not take its {many} of XLA flags "
        f"{' and '.join(trial.sets)}: {trial.said[version]}. "
        f"Leave {out} out of xla_flags: sets (plan: --without-flags {out}){alternative}."
    )
