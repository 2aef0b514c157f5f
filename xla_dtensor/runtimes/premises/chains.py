"""Chains: a name and what is looked up from it, and what a piece of code reads in their terms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

__all__ = [
    "ALL",
    "ARGUMENT",
    "ATTRIBUTE",
    "CELL",
    "EACH",
    "GLOBAL",
    "IMPORT",
    "ITEM",
    "MADE",
    "OVERRIDDEN",
    "STAR",
    "CallRead",
    "Chain",
    "Reads",
    "Values",
]

# Where a chain begins.
GLOBAL, CELL, ARGUMENT, IMPORT = "global", "cell", "argument", "import"
# Its steps: an attribute, an item by a constant key, any element, ``super().name`` of an argument,
# and a container that the code has just made of what the chain leads to.
ATTRIBUTE, ITEM, EACH, OVERRIDDEN, MADE = "attribute", "item", "each", "overridden", "made"
STAR = "star"  # the key of a container that Python has made: of ``*args`` or ``**kwargs``
ALL = "[...]"  # behind the name of one: what it holds besides what is known by position or name

_FORMS = {ATTRIBUTE: ".{}", ITEM: "[{!r}]", EACH: "[...]", OVERRIDDEN: ".super().{}", MADE: "(...)"}


class Chain(NamedTuple):
    """A name and the steps from it.

    Attributes:
        root: ``GLOBAL``, ``CELL``, ``ARGUMENT`` or ``IMPORT``.
        name: Of the global, the variable of the function around, the argument, or the module.
        steps: Kind and key of each.

    Example:
        >>> str(Chain(GLOBAL, "table").then(ITEM, "a").then(ATTRIBUTE, "b").then(EACH))
        "table['a'].b[...]"
    """

    root: str
    name: str
    steps: tuple[tuple[str, Any], ...] = ()

    def then(self, kind: str, key: Any = None) -> Chain:
        """Return the chain with one more step; what was made of a thing has it as its element."""
        if kind in (EACH, ITEM) and self.is_made:
            steps, is_star = self.steps[:-1], self.is_star
            is_one = is_star and kind == ITEM and (isinstance(key, str) or type(key) is int)
            if is_one and not (isinstance(key, int) and key < 0):
                return Chain(self.root, f"{self.name}[{key!r}]", steps)
            return self._replace(steps=steps)
        return self._replace(steps=(*self.steps, (kind, key)))

    @property
    def is_made(self) -> bool:
        """Whether it leads to a container that the code has made."""
        return bool(self.steps) and self.steps[-1][0] == MADE

    @property
    def is_star(self) -> bool:
        """Whether it is ``args`` or ``kwargs`` of a function that takes ``*args, **kwargs``."""
        return self.steps == ((MADE, STAR),)

    def bare(self) -> Chain:
        """Return what the containers that the code has made of it hold."""
        steps = self.steps
        while steps and steps[-1][0] == MADE:
            steps = steps[:-1]
        return self._replace(steps=steps)

    def __str__(self) -> str:
        return self.name + "".join(_FORMS[kind].format(key) for kind, key in self.steps)


Values = frozenset[Chain]  # what an expression may be


@dataclass(frozen=True)
class CallRead:
    """A call: what may be called, with what.

    Args:
        function: The chains of what is called.
        args: The chains of each positional argument; of ``*x`` those of `x`.
        kwargs: The chains of each keyword argument.
        stars: Which of `args` have a star.
        doubles: Of each ``**x``, the chains of `x`.
    """

    function: Values
    args: tuple[Values, ...]
    kwargs: Mapping[str, Values]
    stars: frozenset[int]
    doubles: tuple[Values, ...]


@dataclass
class Reads:
    """What a piece of code reads.

    Args:
        looked_up: Chains that are looked up: what lies on the way has to stay.
        used: Chains whose value is used as a whole, or handed to somebody.
        searched: Chains of which any attribute may be read: ``vars(x)``, ``getattr(x, name)``.
        written: Chains whose last step is assigned to.
        calls: Calls.
        attributes: Names of attributes of whatever, texts that could be such names among them.
    """

    looked_up: dict[Chain, None] = field(default_factory=dict)
    used: dict[Chain, None] = field(default_factory=dict)
    searched: dict[Chain, None] = field(default_factory=dict)
    written: dict[Chain, None] = field(default_factory=dict)
    calls: list[CallRead] = field(default_factory=list)
    attributes: set[str] = field(default_factory=set)
