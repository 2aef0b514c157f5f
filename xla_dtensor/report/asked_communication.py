"""Which communication of a program somebody has asked for, and which XLA has put in by itself.

A ``redistribute`` is traced under a scope that says what it changes, per axis of the mesh:

    redistribute[dp=S0.R,tp=P.R]      from shards of dim 0 to copies on dp; a sum over tp
    redistribute[*]                   an annotation: from whatever there was

XLA does not keep the scope. It often moves what is asked for into the op before: a sum that a
matmul leaves pending becomes an all-reduce with the matmul's name. So of every redistribute the
trace gives the names that its communication may have: its own, and those of the ops before it, back
to the first that is not elementwise. A collective is asked for if

* its name is one of these,
* it follows axes that the redistribute changes, and is of a kind that brings such a change about,
* and it moves no more elements than the redistributed tensor has on a device.

Collectives that are called by name, inside manual regions, are asked for, too. Everything else is
not: a matmul that gathers its weight, a norm that sums over shards. Equal names are not told apart:
if an op needs a gather that nobody asked for, and its result is gathered over the same axis by a
redistribute of at least the same size, both count as asked for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import quote, unquote

from xla_dtensor.report.attribution import Origin, origin_of
from xla_dtensor.report.collective import Collective
from xla_dtensor.report.module_parts import named_parts
from xla_dtensor.report.report_words import base_axes

__all__ = ["ANY", "Allowance", "AskedFor", "Unasked", "changes_in", "scope_name", "unasked"]

ANY = "redistribute[*]"
"""The scope of an annotation that says how a value is to lie, whatever it was before."""

_SCOPE = re.compile(r"redistribute\[([^\]/:()]*)\]")
_JIT = re.compile(r"jit\([^()]*\)/")
_BRINGS = {
    ("P", "R"): {"all-reduce", "reduce-scatter", "all-gather"},
    ("P", "S"): {"all-reduce", "reduce-scatter", "all-to-all"},
    ("S", "R"): {"all-gather", "all-reduce", "collective-broadcast"},
    ("S", "S"): {"all-to-all", "ragged-all-to-all", "all-gather", "collective-permute"},
}
"""The kinds that bring a change about, by the letters of the placements before and after. From
copies to shards nothing is moved. (An all-reduce of zeros and one shard is a gather.)"""

_CALLED = re.compile(
    r"(?:psum|pmax|pmin|psum2|psum_invariant|ppermute|all_gather|all_gather_invariant|all_to_all|"
    r"reduce_scatter|psum_scatter|ragged_all_to_all|pbroadcast|pgather)"
)
"""JAX's names of collectives, which are in a program only if somebody calls them."""


@dataclass(frozen=True, slots=True)
class AskedFor:
    """A redistribute of a traced step.

    Attributes:
        names: under which its communication may be in the program: pairs of what such a name begins
            and ends with, without the name of the program.
        changes: per axis that changes, what it did before and does after: "S0", "R", "P". None for
            an annotation, of which only the result is known.
        elements: what one device has of the result.
        element_bytes: of one element.

    Example:
        >>> gather = AskedFor((("mlp/max", "mlp/max"),), {"tp": ("S1", "R")}, 64, 4)
        >>> gather.elements
        64
    """

    names: tuple[tuple[str, str], ...]
    changes: Mapping[str, tuple[str, str]] | None
    elements: int
    element_bytes: int


@dataclass(frozen=True, slots=True)
class Allowance:
    """What may be in a program although nobody asked for it.

    Attributes:
        kinds: kinds of collectives, "all-reduce".
        modules: paths of modules, with everything in them.
        gradients: axes over which the gradients may be summed: all-reduces and reduce-scatters of
            the backward and the optimizer that follow no other axes.
        below_bytes: what moves less than this on one device in one step.
    """

    kinds: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    gradients: tuple[str, ...] = ()
    below_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Unasked:
    """A collective, or a part of one, that nobody asked for.

    Attributes:
        kind: what it does.
        axes: the mesh axes, as of `Collective`; None where it follows none.
        origin: the module, the phase, the op and the line of source.
        bytes: its payload on one device in one step.
    """

    kind: str
    axes: tuple[object, ...] | None
    origin: Origin
    bytes: int

    def __str__(self) -> str:
        axes = "unknown axes" if self.axes is None else ", ".join(map(str, self.axes))
        return f"{self.kind} over {axes}, {self.bytes:,} bytes: {self.origin}"


def scope_name(changes: Iterable[tuple[object, str, str]]) -> str:
    """Writes the scope of a redistribute.

    Args:
        changes: of each axis its name, and what it did before and does after.

    Returns:
        The scope; axes that do not change are left out.

    Example:
        >>> scope_name([("dp", "S0", "S0"), ("tp", "P", "R")])
        'redistribute[tp=P.R]'
    """
    told = (f"{quote(str(a), safe='')}={b}.{c}" for a, b, c in changes if b != c)
    return f"redistribute[{','.join(told)}]"


def changes_in(name: str) -> Mapping[str, tuple[str, str]] | None:
    """Reads the innermost scope in a name; the inverse of `scope_name`.

    Args:
        name: scopes, outermost first, as `a/b/c`.

    Returns:
        What each axis did before and does after; None for an annotation.

    Raises:
        ValueError: no such scope in the name.

    Example:
        >>> changes_in("mlp/redistribute[tp=P.R]")
        {'tp': ('P', 'R')}
    """
    inside = _SCOPE.findall(name)[-1:]
    if not inside:
        raise ValueError(f"no redistribute in {name!r}")
    if inside[0] == "*":
        return None
    found: dict[str, tuple[str, str]] = {}
    for part in filter(None, inside[0].split(",")):
        axis, _, change = part.partition("=")
        before, _, after = change.partition(".")
        found[unquote(axis)] = before, after
    return found


def unasked(
    collectives: Iterable[Collective],
    asked: Sequence[AskedFor],
    sizes: Mapping[str, int],
    allowed: Allowance | None = None,
) -> tuple[Unasked, ...]:
    """Lists the communication that nobody asked for, the most bytes first.

    Args:
        collectives: of the compiled program.
        asked: the redistributes of its trace.
        sizes: of the axes of the mesh.
        allowed: what is let through.

    Returns:
        What is left.

    Example:
        >>> unasked([], [], {})
        ()
    """
    given = Allowance() if allowed is None else allowed
    found: list[Unasked] = []
    for item in collectives:
        if item.axes == () or item.kind in ("recv",):
            continue  # nothing is sent; or it is the other end of a send
        times = 1 if item.executions is None else item.executions
        for place, (name, size) in enumerate(named_parts(item)):
            if _is_asked(item, name, size, asked, sizes):
                continue
            origin = origin_of(name, item.source if place == 0 else ())
            one = Unasked(item.kind, item.axes, origin, size * times)
            if not _is_allowed(one, given):
                found.append(one)
    return tuple(sorted(found, key=lambda one: (-one.bytes, one.kind)))


def _is_asked(
    item: Collective,
    name: str | None,
    size: int,
    asked: Iterable[AskedFor],
    sizes: Mapping[str, int],
) -> bool:
    if name is None:
        return False
    if _CALLED.fullmatch(name.rpartition("/")[2]):
        return True
    axes = base_axes(item.axes)
    if _SCOPE.search(name):
        own = changes_in(name)
        return own is None or _is_kind_of(item.kind, axes, own)
    short = _JIT.sub("", name, count=1)
    return any(
        _brings(item.kind, axes, size, one, sizes)
        for one in asked
        if any(short.startswith(first) and short.endswith(last) for first, last in one.names)
    )


def _brings(
    kind: str,
    axes: tuple[str, ...] | None,
    size: int,
    one: AskedFor,
    sizes: Mapping[str, int],
) -> bool:
    if one.changes is None:
        return True
    if not _is_kind_of(kind, axes, one.changes):
        return False
    newly = (sizes.get(x, 1) for x, (b, a) in one.changes.items() if a[:1] == "S" != b[:1])
    # XLA for CPU sums elements of two bytes as floats of four.
    return size <= one.elements * math.prod(newly) * max(4, one.element_bytes)


def _is_kind_of(
    kind: str, axes: tuple[str, ...] | None, changes: Mapping[str, tuple[str, str]]
) -> bool:
    """Whether a collective over these axes is a way to bring the changes about."""
    if axes is None or not set(axes) <= set(changes):
        return False
    return any(kind in _BRINGS.get((b[:1], a[:1]), ()) for b, a in map(changes.get, axes))  # pyright: ignore


def _is_allowed(one: Unasked, given: Allowance) -> bool:
    if one.bytes < given.below_bytes or one.kind in given.kinds:
        return True
    module = one.origin.module
    if module is not None and any(
        module == path or module.startswith(f"{path}.") for path in given.modules
    ):
        return True
    axes = base_axes(one.axes)  # pyright: ignore[reportArgumentType]
    return (
        one.kind in ("all-reduce", "reduce-scatter")
        and one.origin.phase in ("backward", "optimizer")
        and axes is not None
        and set(axes) <= set(given.gradients)
    )


def words_of(found: Sequence[Unasked], limit: int = 5) -> Iterator[str]:
    """Writes what nobody asked for, the largest first.

    Args:
        found: as `unasked` lists it.
        limit: how many are written out.

    Yields:
        Lines.
    """
    yield from (str(one) for one in found[:limit])
    if len(found) > limit:
        yield f"and {len(found) - limit} more"
