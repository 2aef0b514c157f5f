"""Which versions of libtpu and jaxlib took which XLA flags: asked of them, and written down.

tpu_configs/xla_flags_tried.yaml is made by `python -m tools.try_xla_flags`. For each set and each
chip that it is for, for what jobs take, and for the flags that no job may have together, it says
what came of a small program with all five kinds of collectives, on one slice and on two: took,
refused, or unknown flag. The flags of GPUs were given to jaxlib alone, which knows them or not.

JAX pins libtpu to three numbers (libtpu==0.0.50.*), so versions are the same here where these are.

    >>> from mesh_utils.xla_flags import flags_for
    >>> print(tried_text(flags_for("v6e", 1), "v6e"))
    latency-hiding: taken by libtpu 0.0.42.1, 0.0.44.1, 0.0.46.3, 0.0.48.1, 0.0.50.1
"""

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, cast

from mesh_utils.errors import JobError
from mesh_utils.hardware import Chip, find_chip
from mesh_utils.xla_flags import COMPILERS, XlaFlag

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


def read_trials(data: dict[str, Any]) -> tuple[Trial, ...]:
    """Reads trials from the data of the file.

    Args:
        data: what YAML made of it.

    Returns:
        The trials.
    """
    found: list[Trial] = []
    for compiler in COMPILERS.values():
        versions = list(data[compiler]["versions"])
        for row in data[compiler]["trials"]:
            found.append(
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
    return tuple(found)


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


def same_version(one: str, other: str) -> bool:
    """Whether two versions of a compiler have their first three numbers in common.

    Args:
        one: a version.
        other: another one.

    Returns:
        Whether they are the same to JAX.

    Example:
        >>> same_version("0.0.50", "0.0.50.1"), same_version("0.0.50.1", "0.0.52")
        (True, False)
    """
    return _three(one) == _three(other)


def check_taken(flags: Sequence[XlaFlag], chip: str | Chip, version: str, asked: str) -> list[str]:
    """Refuses flags that a version of the compiler was seen to refuse.

    Args:
        flags: the flags of a job.
        chip: its chip.
        version: of libtpu for a TPU, of jaxlib for a GPU.
        asked: the job and where the version is from, to begin the message with.

    Returns:
        Notes: the sets that were not tried with that version.

    Raises:
        JobError: that version refused a set, or sets of the job together.

    Example:
        >>> from mesh_utils.xla_flags import flags_for
        >>> check_taken(flags_for("v5e", 1), "v5e", "0.0.50.1", "A job")
        []
    """
    found = find_chip(chip) if isinstance(chip, str) else chip
    compiler = COMPILERS[found.platform]
    names = _sets_of(flags)
    tried: set[str] = set()
    for trial in _trials_of(names, found):
        for other, outcome in trial.outcomes.items():
            if not same_version(version, other):
                continue
            tried.update(trial.sets)
            if outcome != TOOK:
                raise _refused(trial, other, compiler, asked)
    untried = [name for name in names if name not in tried]
    if not untried:
        return []
    many, be = ("set", "was") if len(untried) == 1 else ("sets", "were")
    known = ", ".join(versions_of(compiler))
    return [
        f"the {many} of XLA flags {', '.join(untried)} {be} not tried with {compiler} {version}, "
        f"only with {known}"
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
    found = find_chip(chip) if isinstance(chip, str) else chip
    compiler = COMPILERS[found.platform]
    lines: list[str] = []
    for name in _sets_of(flags):
        took = [
            version
            for trial in _trials_of([name], found)
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
    platform = next(key for key, value in COMPILERS.items() if value == compiler)
    found = {
        version: None
        for trial in trials()
        if find_chip(trial.chip).platform == platform
        for version in trial.outcomes
    }
    return list(found)


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


def _refused(trial: Trial, version: str, compiler: str, asked: str) -> JobError:
    takers = [other for other, outcome in trial.outcomes.items() if outcome == TOOK]
    many = "set" if len(trial.sets) == 1 else "sets"
    others = f", or use {compiler} {' or '.join(takers)}" if takers else ""
    out = trial.sets[-1]
    return JobError(
        f"{asked}. {compiler} {version} does not take its {many} of XLA flags "
        f"{' and '.join(trial.sets)}: {trial.said[version]}. "
        f"Leave {out} out of xla_flags: sets (plan: --without-flags {out}){others}."
    )
