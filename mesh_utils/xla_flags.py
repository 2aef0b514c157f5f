"""XLA flags: which of them hide communication, for which chip, why, and who says so.

The flags are in tpu_configs/xla_flags.yaml, in sets. None is written in Python. Which versions of
libtpu and jaxlib took each set, xla_flags_tried.py says.

    latency-hiding          taken by every job that does not say which sets it wants
    dcn                     taken by such jobs of several slices
    async-all-reduce, reduce-scatter-layout, pipelining, sparse-core, dense-vmem, moe-vmem
                            taken when a job asks for them

TPU programs read them from LIBTPU_INIT_ARGS, GPU programs from XLA_FLAGS.

    >>> for flag in flags_for("v5e", 2)[-2:]:
    ...     print(flag)
    --megascale_graph_within_launch_hang_threshold=10m
    --megascale_grpc_enable_xor_tracer=false
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any, cast

from mesh_utils.errors import JobError
from mesh_utils.hardware import Chip, chips, find_chip

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
        known = {chip.name for chip in chips()}
        faults: list[str] = []
        for each in self.sets.values():
            pairs = [(flag.name, chip) for flag in each.flags for chip in flag.hardware]
            twice = sorted({pair for pair in pairs if pairs.count(pair) > 1})
            faults += [f"{each.name} has {name} twice for {chip}" for name, chip in twice]
            faults += [f"{name} is for {chip!r}" for name, chip in pairs if chip not in known]
            faults += [f"{flag.name} is no flag" for flag in each.flags if not _is_flag(flag)]
            faults += [f"{each.name} is for when={each.when!r}"] * (each.when not in _WHEN)
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
    data = cast("dict[str, Any]", yaml.safe_load(text))
    sources = {key: " ".join(source.split()) for key, source in data["sources"].items()}
    sets = {name: _read_set(name, each, sources) for name, each in data["sets"].items()}
    table = FlagTable(sets, tuple(_read_unsafe(*item) for item in data["unsafe"].items()))
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
    found = find_chip(chip) if isinstance(chip, str) else chip
    merged: dict[str, XlaFlag] = {}
    for name in default_sets(num_slices) if sets is None else sets:
        chosen = _flags_of(name, found)
        if not chosen and sets is not None:
            raise _unknown_set(name, found)
        for flag in chosen:
            other = merged.setdefault(flag.name, flag)
            if other.value != flag.value:
                raise JobError(
                    f"The sets of XLA flags {other.flag_set!r} and {name!r} were asked for. They "
                    f"give {flag.name} the values {other.value} and {flag.value}. "
                    f"Pass one of the two, or {flag.name} under flags."
                )
    for name, value in (own or {}).items():
        merged[name] = _own_flag(name, value, found, merged)
    for unsafe in flag_table().unsafe:
        _refuse_unsafe(unsafe, found, {name: flag.value for name, flag in merged.items()})
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
    found = find_chip(chip) if isinstance(chip, str) else chip
    text = " ".join(map(str, flags))
    return {_ENVIRONMENT[found.platform]: text} if text else {}


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
    return [name for name, each in flag_table().sets.items() if each.when in fitting]


def _flags_of(name: str, chip: Chip) -> tuple[XlaFlag, ...]:
    found = flag_table().sets.get(name)
    if found is None:
        raise _unknown_set(name, chip)
    return tuple(flag for flag in found.flags if chip.name in flag.hardware)


def _unknown_set(name: str, chip: Chip) -> JobError:
    known = flag_table().sets
    fitting = [each for each in known if _flags_of(each, chip)]
    near = get_close_matches(str(name), fitting, n=1, cutoff=0.3)
    others = [each for each in fitting if each not in near]
    why = f"It has none for {chip.title}" if name in known else "There is no such set"
    return JobError(
        f"The set of XLA flags {name!r} was asked for. {why}. "
        f"Pass {', '.join(map(repr, [*near, *others]))}, or no set."
    )


def _own_flag(name: str, value: object, chip: Chip, merged: Mapping[str, XlaFlag]) -> XlaFlag:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    made = XlaFlag(name, text, (chip.name,), "asked for by the job", "the job")
    plain = isinstance(value, (bool, int, float, str))
    if not plain or not _is_flag(made):
        raise JobError(
            f"The XLA flag {name!r} was asked for with the value {value!r}. A flag is "
            "xla_..., megascale_... or tpu_... without dashes, and its value has no spaces and no "
            "quotes. Pass such as xla_tpu_scoped_vmem_limit_kib: 98304."
        )
    other = {"tpu": "xla_gpu_", "gpu": "xla_tpu_"}[chip.platform]
    if name.startswith((other, "megascale_") if chip.platform == "gpu" else other):
        near = get_close_matches(name, _names_for(chip), n=1, cutoff=0.3)
        instead = f"Pass {near[0]}, or" if near else "Pass"
        raise JobError(
            f"The XLA flag {name!r} was asked for on {chip.title}. It is a flag of other hardware, "
            f"and the program would not start. {instead} a flag of a {chip.platform.upper()}."
        )
    return made


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
    every = [flag for each in flag_table().sets.values() for flag in each.flags]
    return [flag.name for flag in every if chip.name in flag.hardware]


def _is_flag(flag: XlaFlag) -> bool:
    return bool(_NAME.fullmatch(flag.name)) and not re.search(r"[\s'\"\\$`]", flag.value)


def _read_set(name: str, data: Mapping[str, Any], sources: Mapping[str, str]) -> FlagSet:
    rows = cast("list[dict[str, Any]]", data["flags"])
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
    slow = SlowCompile(**data["slow"]) if "slow" in data else None
    return FlagSet(name, data["when"], data["reason"], flags, slow)


def _read_unsafe(name: str, data: Mapping[str, Any]) -> UnsafeFlags:
    hardware = _chip_names(data["hardware"])
    return UnsafeFlags(name, data["flags"], data["unless"], hardware, data["reason"])


def _chip_names(written: Sequence[str]) -> tuple[str, ...]:
    found: list[str] = []
    for name in written:
        of_platform = [chip.name for chip in chips() if chip.platform == name]
        found += of_platform or [name]
    return tuple(found)
