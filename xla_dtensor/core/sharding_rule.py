"""ShardingRule: a pattern of paths, and how the tensors that it matches lie.

What the patterns and placements mean is said in `rules`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias, cast

from xla_dtensor.core.errors import RulesError

Entry: TypeAlias = str | tuple[str, ...] | None
Placed: TypeAlias = tuple[Entry, ...] | str | None

_COLWISE = ("colwise", "colwise_rep", "colwise_gather_output", "local_colwise")
_ROWWISE = ("rowwise", "rowwise_rep", "rowwise_split_input", "local_rowwise")
_WHOLE = ("replicate", "sequence_parallel")
_NOTHING = ("local", "gather")
STYLES = (*_COLWISE, *_ROWWISE, *_WHOLE, *_NOTHING)


@dataclass(frozen=True)
class ShardingRule:
    """Says how the tensors whose path matches a pattern lie.

    Args:
        pattern: A glob, or "re:" and a regular expression.
        placements: Per tensor dim an axis name, a tuple of them (the outermost cut first) or None.
            None alone: a copy on every device, at any rank. One word: a style, e.g. "colwise".

    Raises:
        RulesError: A pattern or placements that cannot be read.

    Example:
        >>> ShardingRule("layers.*.mlp.up_proj.weight", ["fsdp", None]).matches(
        ...     "layers.3.mlp.up_proj.weight"
        ... )
        True
    """

    pattern: str
    placements: object

    def __post_init__(self) -> None:
        if not isinstance(cast("object", self.pattern), str):
            reason = f"A {type(self.pattern).__name__} is no pattern"
            raise rule_error(self.pattern, self.placements, reason, "a path with '*', or 're:...'")
        object.__setattr__(self, "placements", _read_placements(self.pattern, self.placements))
        _compiled(self._target()[0])
        if self.is_output and self.entries is None:
            reason = "It is a rule for outputs, whose rank no model tells"
            raise rule_error(
                self.pattern, self.placements, reason, "one entry per dim of the output"
            )

    @property
    def style(self) -> str | None:
        """The style, or None where entries per dim are given."""
        return self.placements if isinstance(self.placements, str) else None

    @property
    def is_output(self) -> bool:
        """Whether the pattern's ending says that it is about what a module returns."""
        return self._target() != (self.pattern, None)

    @property
    def output_index(self) -> int | None:
        """Which of a module's outputs is meant; None: the only one."""
        return self._target()[1]

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that the entries name, in their order."""
        return _axes(self.entries or ())

    @property
    def cuts_tp_axis(self) -> bool:
        """Whether the style cuts weights."""
        return self.style in (*_COLWISE, *_ROWWISE)

    @property
    def is_about_movement(self) -> bool:
        """Whether the style only says how inputs and outputs move, which XLA finds out itself."""
        return self.style in _NOTHING

    @property
    def entries(self) -> tuple[Entry, ...] | None:
        """Per tensor dim its axes; None where no entries are given."""
        given = self.placements
        return cast("tuple[Entry, ...]", given) if isinstance(given, tuple) else None

    def matches(self, path: str) -> bool:
        """Whether the pattern matches a tensor's path (with a style: the path of its module)."""
        if self.style is not None:
            module, _, name = path.rpartition(".")
            return name in ("weight", "bias") and self.matches_module(module)
        return not self.is_output and self.matches_module(path)

    def matches_module(self, path: str) -> bool:
        """Whether the pattern, less its ending for outputs, matches a path."""
        regex, dotted = _compiled(self._target()[0])
        return regex.fullmatch(f"{path}." if dotted and path else path) is not None

    def _target(self) -> tuple[str, int | None]:
        """(the pattern less its ending, the output's index)."""
        if self.pattern.startswith("re:"):
            return self.pattern, None
        path, index = self.pattern, None
        found = re.search(r"\[(\d+)\]$", path)
        if found is not None:
            path, index = path[: found.start()], int(found[1])
        return path.removesuffix("()"), index

    def entries_for(self, path: str, ndim: int, tp_axis: str) -> tuple[Entry, ...] | str:
        """The entries of one tensor, or what is wrong with its rank."""
        given = self.entries
        if self.placements is None or self.style in (*_WHOLE, *_NOTHING):
            return (None,) * ndim
        if given is not None:
            count = "1 entry" if len(given) == 1 else f"{len(given)} entries"
            return given if len(given) == ndim else f"has {count}"
        is_bias = path.endswith("bias")
        if ndim != (1 if is_bias else 2):
            return f"of style {self.style!r} is for weights of rank 2 and biases of rank 1"
        if is_bias:
            return (tp_axis,) if self.style in _COLWISE else (None,)
        return (tp_axis, None) if self.style in _COLWISE else (None, tp_axis)


def _read_placements(pattern: str, given: object) -> Placed:
    if given is None:
        return None
    if isinstance(given, str):
        if given in STYLES:
            return given
        reason = f"{given!r} is no style, and placements are a list"
        raise rule_error(pattern, given, reason, f"[{given}], or one of {', '.join(STYLES)}")
    if not isinstance(given, (tuple, list)):
        reason = f"A {type(given).__name__} is not read"
        raise rule_error(pattern, given, reason, "a list with one entry per tensor dim")
    entries = cast("Sequence[object]", given)
    read = tuple(_read_entry(pattern, entries, entry) for entry in entries)
    axes = _axes(read)
    twice = next((axis for axis in axes if axes.count(axis) > 1), None)
    if twice is not None:
        reason = f"The axis {twice!r} occurs twice, and cuts one dim once"
        raise rule_error(pattern, entries, reason, "each axis once at most")
    return read


def _read_entry(pattern: str, given: Sequence[object], entry: object) -> Entry:
    if entry is None or entry == "None":
        return None
    several = cast("Sequence[object]", entry) if isinstance(entry, (tuple, list)) else (entry,)
    names = tuple(name for name in several if isinstance(name, str))
    if len(names) != len(several):
        reason = f"The entry {entry!r} is no name of an axis"
        raise rule_error(pattern, given, reason, "names, lists of names, and None (null in YAML)")
    return (names[0] if len(names) == 1 else names) if names else None


def _axes(entries: Sequence[Entry]) -> tuple[str, ...]:
    return tuple(
        axis
        for entry in entries
        if entry is not None
        for axis in (entry if isinstance(entry, tuple) else (entry,))
    )


def rule_error(pattern: object, placements: object, reason: str, instead: str) -> RulesError:
    """The error for a rule that cannot be read."""
    return RulesError(
        f"A sharding rule with pattern={pattern!r}, placements={placements!r} was asked for. "
        f"{reason}. Pass {instead}."
    )


@lru_cache(4096)
def _compiled(pattern: str) -> tuple[re.Pattern[str], bool]:
    """(regular expression, whether it wants a dot behind every component)."""
    if pattern.startswith("re:"):
        try:
            return re.compile(pattern[3:]), False
        except re.error as error:
            raise RulesError(
                f"A sharding rule with pattern={pattern!r} was asked for. It is no regular "
                f"expression: {error}. Pass one that Python's re compiles, or a glob without 're:'."
            ) from None
    components = pattern.split(".") if pattern else []
    wrong = any(not c or ("**" in c and c != "**") for c in components)
    if wrong or re.search(r"[^\w.*\-]", pattern):
        raise RulesError(
            f"A sharding rule with pattern={pattern!r} was asked for. A glob has components "
            "between single dots, of letters, digits, '_', '-' and '*', or '**' alone. Pass such a "
            "path, or 're:' and a regular expression."
        )
    return re.compile(_regular_expression(components)), True


# In both, what stands between two stars is looked for once, at its first place, which leaves most
# for the rest: `(?>...)` does not come back to it. Without that `*a*a*a*a` takes minutes on a name.


def _regular_expression(components: Sequence[str]) -> str:
    runs: list[str] = [""]
    for component in components:
        if component == "**":
            runs.append("")
        else:
            runs[-1] += _component(component)
    first, *rest = runs
    if not rest:
        return first
    any_component = r"(?:[^.]+\.)"
    between = "".join(f"(?>{any_component}*?{run})" for run in rest[:-1] if run)
    return f"{first}{between}{any_component}*{rest[-1]}"


def _component(component: str) -> str:
    if component == "*":
        return r"[^.]+\."
    first, *rest = map(re.escape, component.split("*"))
    if not rest:
        return first + r"\."
    between = "".join(f"(?>[^.]*?{part})" for part in rest[:-1])
    return rf"{first}{between}[^.]*{rest[-1]}\."
