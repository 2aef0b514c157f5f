"""What each module communicates, read from the compiled program.

PyTorch's ``CommDebugMode`` counts the collectives that Python calls, by module. XLA's partitioner
puts them into the program instead, and their names say for which module. So the same questions are
answered from the program, under the same names, and with bytes:

    counts.get_comm_counts()                        {"all-gather": 4, "all-reduce": 3}
    counts.get_total_counts()                       7
    counts.comm_module_counts["layers.0"]           {"forward": {...}, "backward": {...}}
    counts.generate_comm_debug_tracing_table()      a table by depth

As there, a module's counts hold those of the modules in it, and "Global" is everything. A
collective counts as often as it runs in one step. Layers that run as a loop have one name for all
of them, "layers.*". What has no module, the loss say, counts for "Global" alone.

XLA makes one collective of several: the gradients of all layers are often one all-reduce. Each
module that has a part of it counts it, with the bytes of that part; a sum counts it once. So bytes
of modules and phases add up, and counts need not.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

from mesh_utils import Axis
from xla_dtensor.report.collective import Collective, base_axes
from xla_dtensor.report.finding import (
    PHASES,
    CollectiveLine,
    Origin,
    Phase,
    collective_lines,
    origin_of,
)
from xla_dtensor.report.hlo_text import split_outside
from xla_dtensor.report.render import Table, axes_text, one_line, table_lines
from xla_dtensor.report.report import Evidence
from xla_dtensor.report.texts import bytes_text

if TYPE_CHECKING:
    from xla_dtensor.report.compile_report import CompileReport

__all__ = [
    "ANY",
    "GLOBAL",
    "Allowance",
    "AskedFor",
    "CommCounts",
    "changes_in",
    "comm_counts",
    "names_of",
    "parts_of",
    "scope_name",
    "unasked",
]


# -------------------------- Which part of a collective is whose, where XLA has made one of several
#
# XLA combines small collectives: the gradients of all layers become one all-reduce with an operand
# for each. Its name then lists theirs, in the order of the operands:
#
#     jit(step)/(reduce_sum:backward/Net/up/dot_general:backward/Net/down/dot_general)
#
# Where there are as many names as arrays, each array is one name's. (Equal names are not dropped:
# seen in programs of XLA for CPU.) Where the numbers differ, nobody can tell.


def names_of(op_name: str | None) -> tuple[str, ...]:
    """Lists the names in the name of an instruction.

    Args:
        op_name: as the compiler's metadata has it.

    Returns:
        The names, each with what stands before all of them; one where XLA has combined nothing.

    Example:
        >>> names_of("jit(f)/(mul:backward/Net/dot_general)")
        ('jit(f)/mul', 'jit(f)/backward/Net/dot_general')
    """
    if not op_name:
        return ()
    if not op_name.endswith(")"):
        return (op_name,)
    depth = 0
    for place in range(len(op_name) - 1, -1, -1):
        depth += (op_name[place] == ")") - (op_name[place] == "(")
        if depth == 0:
            prefix, inside = op_name[:place], op_name[place + 1 : -1]
            if prefix and not prefix.endswith("/"):
                return (op_name,)  # jit(f), transpose(jvp(f)): a call, not a list
            return tuple(prefix + name for name in split_outside(inside, ":"))
    return (op_name,)


def _named_parts(collective: Collective) -> tuple[tuple[str | None, int], ...]:
    """For what each array of a collective was made: names, and bytes of one device in one run.

    Together they are its payload. The first name for everything where nobody can tell.
    """
    names = names_of(collective.op_name)
    results = collective.result_bytes >= collective.operand_bytes
    arrays = collective.results if results else collective.operands
    if len(names) < 2 or len(names) != len(arrays):
        return ((names[0] if names else None, collective.payload_bytes),)
    return tuple((name, array.bytes) for name, array in zip(names, arrays, strict=True))


def parts_of(collective: Collective) -> tuple[tuple[Origin, int], ...]:
    """Says whose each array of a collective is.

    Args:
        collective: any; a combined one has several arrays.

    Returns:
        Origins, and the bytes as in `_named_parts`.
    """
    # The one line of source that a combined collective has is that of its first part.
    return tuple(
        (origin_of(name, collective.source if place == 0 else ()), size)
        for place, (name, size) in enumerate(_named_parts(collective))
    )


# ------------------------------------------------------------------------------ Asked communication
#
# Which communication of a program somebody has asked for, and which XLA has put in by itself.
#
# A ``redistribute`` is traced under a scope that says what it changes, per axis of the mesh:
#
#     redistribute[dp=S0.R,tp=P.R]      from shards of dim 0 to copies on dp; a sum over tp
#     redistribute[*]                   an annotation: from whatever there was
#
# XLA does not keep the scope. It often moves what is asked for into the op before: a sum that a
# matmul leaves pending becomes an all-reduce with the matmul's name. So of every redistribute the
# trace gives the names that its communication may have: its own, and those of the ops before it,
# back to the first that is not elementwise. A collective is asked for if
#
# * its name is one of these,
# * it follows axes that the redistribute changes, and is of a kind that brings such a change about,
# * and it moves no more elements than the redistributed tensor has on a device.
#
# Collectives that are called by name, inside manual regions, are asked for, too. Everything else is
# not: a matmul that gathers its weight, a norm that sums over shards. Equal names are not told
# apart: if an op needs a gather that nobody asked for, and its result is gathered over the same
# axis by a redistribute of at least the same size, both count as asked for.

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
    axes: tuple[Axis, ...] | None
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
    parts = (f"{quote(str(a), safe='')}={b}.{c}" for a, b, c in changes if b != c)
    return f"redistribute[{','.join(parts)}]"


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
    changes: dict[str, tuple[str, str]] = {}
    for part in filter(None, inside[0].split(",")):
        axis, _, change = part.partition("=")
        before, _, after = change.partition(".")
        changes[unquote(axis)] = before, after
    return changes


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
    allowance = Allowance() if allowed is None else allowed
    rows: list[Unasked] = []
    for collective in collectives:
        if collective.axes == () or collective.kind in ("recv",):
            continue  # nothing is sent; or it is the other end of a send
        times = 1 if collective.executions is None else collective.executions
        for place, (name, size) in enumerate(_named_parts(collective)):
            if _is_asked(collective, name, size, asked, sizes):
                continue
            origin = origin_of(name, collective.source if place == 0 else ())
            communication = Unasked(collective.kind, collective.axes, origin, size * times)
            if not _is_allowed(communication, allowance):
                rows.append(communication)
    return tuple(sorted(rows, key=lambda row: (-row.bytes, row.kind)))


def _is_asked(
    collective: Collective,
    name: str | None,
    size: int,
    requests: Iterable[AskedFor],
    sizes: Mapping[str, int],
) -> bool:
    if name is None:
        return False
    if _CALLED.fullmatch(name.rpartition("/")[2]):
        return True
    axes = base_axes(collective.axes)
    if _SCOPE.search(name):
        own = changes_in(name)
        return own is None or _is_kind_of(collective.kind, axes, own)
    short = _JIT.sub("", name, count=1)
    return any(
        _brings(collective.kind, axes, size, asked_for, sizes)
        for asked_for in requests
        if any(short.startswith(first) and short.endswith(last) for first, last in asked_for.names)
    )


def _brings(
    kind: str,
    axes: tuple[str, ...] | None,
    size: int,
    asked_for: AskedFor,
    sizes: Mapping[str, int],
) -> bool:
    if asked_for.changes is None:
        return True
    if not _is_kind_of(kind, axes, asked_for.changes):
        return False
    newly = (sizes.get(x, 1) for x, (b, a) in asked_for.changes.items() if a[:1] == "S" != b[:1])
    # XLA for CPU sums elements of two bytes as floats of four.
    return size <= asked_for.elements * math.prod(newly) * max(4, asked_for.element_bytes)


def _is_kind_of(
    kind: str, axes: tuple[str, ...] | None, changes: Mapping[str, tuple[str, str]]
) -> bool:
    """Whether a collective over these axes is a way to bring the changes about."""
    if axes is None or not set(axes) <= set(changes):
        return False
    return any(kind in _BRINGS.get((b[:1], a[:1]), ()) for b, a in map(changes.get, axes))  # pyright: ignore


def _is_allowed(collective: Unasked, allowance: Allowance) -> bool:
    if collective.bytes < allowance.below_bytes or collective.kind in allowance.kinds:
        return True
    module = collective.origin.module
    if module is not None and any(
        module == path or module.startswith(f"{path}.") for path in allowance.modules
    ):
        return True
    axes = base_axes(collective.axes)
    return (
        collective.kind in ("all-reduce", "reduce-scatter")
        and collective.origin.phase in ("backward", "optimizer")
        and axes is not None
        and set(axes) <= set(allowance.gradients)
    )


def words_of(found: Sequence[Unasked], limit: int = 5) -> Iterator[str]:
    """Writes what nobody asked for, as `unasked` lists it: so many, and how many more."""
    yield from (str(collective) for collective in found[:limit])
    if len(found) > limit:
        yield f"and {len(found) - limit} more"


# ----------------------------------- What each module communicates, read from the compiled program

GLOBAL = "Global"
"""What PyTorch calls everything together."""


@dataclass(frozen=True, slots=True)
class CommPart:
    """A collective, or the part of one that is a module's.

    Attributes:
        number: of the collective in the program: parts of one have the same.
        kind: what it does, "all-gather".
        axes: the mesh axes, in words; "mixed" where it follows none.
        phase: "forward", "backward", "optimizer" or "other".
        executions: how often it runs in one step.
        bytes: the payload of the part on one device in one step.
        at_least: whether a loop of unknown trip count makes both lower bounds.

    Example:
        >>> CommPart(0, "all-gather", "fsdp", "forward", 32, 1 << 20).executions
        32
    """

    number: int
    kind: str
    axes: str
    phase: Phase
    executions: int
    bytes: int
    at_least: bool = False


@dataclass(frozen=True, slots=True)
class CommEntry:
    """Equal collectives of one module in one phase of the step.

    Attributes:
        kind: what they do.
        axes: the mesh axes, in words.
        phase: of the step.
        count: how often they run in one step.
        bytes: their payload on one device in one step.
        at_least: whether both are lower bounds.
    """

    kind: str
    axes: str
    phase: Phase
    count: int
    bytes: int
    at_least: bool


@dataclass(frozen=True)
class ModuleComm:
    """A module, and what is communicated for it.

    Attributes:
        path: as ``named_modules()`` writes it; "Global" for everything.
        own: what is communicated for the module itself.
        children: the modules in it that communicate, or hold such.

    Example:
        >>> ModuleComm("mlp", (CommPart(0, "all-reduce", "tp", "forward", 2, 64),)).total_bytes
        64
    """

    path: str
    own: tuple[CommPart, ...] = ()
    children: tuple[ModuleComm, ...] = ()

    @property
    def parts(self) -> tuple[CommPart, ...]:
        """What is communicated for it and for the modules in it."""
        return tuple(part for module in self.walk() for part in module.own)

    def entries(self, *, with_axes: bool = True) -> tuple[CommEntry, ...]:
        """Sums what is communicated for it by phase, kind and axes.

        Args:
            with_axes: whether those over different axes are told apart.

        Returns:
            The sums, by phase, the most bytes first.
        """
        groups: dict[tuple[Phase, str, str], list[CommPart]] = {}
        for part in self.parts:
            key = part.phase, part.kind, part.axes if with_axes else ""
            groups.setdefault(key, []).append(part)
        rows = [
            CommEntry(
                *(kind, axes, phase, _count(parts), sum(part.bytes for part in parts)),
                at_least=any(part.at_least for part in parts),
            )
            for (phase, kind, axes), parts in groups.items()
        ]
        order = {phase: place for place, phase in enumerate(PHASES)}
        return tuple(sorted(rows, key=lambda e: (order[e.phase], -e.bytes, e.kind, e.axes)))

    @property
    def total_count(self) -> int:
        """How many collectives run for it in one step."""
        return _count(self.parts)

    @property
    def total_bytes(self) -> int:
        """The payload on one device of what is its."""
        return sum(part.bytes for part in self.parts)

    @property
    def depth(self) -> int:
        """How many modules are around it; 0 for everything."""
        return 0 if self.path == GLOBAL else self.path.count(".") + 1

    def walk(self) -> Iterator[ModuleComm]:
        """Yields it and all modules in it, outer ones first."""
        yield self
        for child in self.children:
            yield from child.walk()


@dataclass(frozen=True)
class CommCounts:
    """See the module docstring.

    Attributes:
        root: everything, as a tree of modules.
        has_modules: whether the program's names tell modules.
        unread: what of the program could not be read.
    """

    root: ModuleComm
    has_modules: bool = True
    unread: tuple[str, ...] = ()
    _by_path: dict[str, ModuleComm] = field(default_factory=dict[str, ModuleComm], repr=False)

    def __post_init__(self) -> None:
        self._by_path.update((module.path, module) for module in self.root.walk())

    def get_total_counts(self) -> int:
        """Returns how many collectives run in one step."""
        return self.root.total_count

    def get_total_bytes(self) -> int:
        """Returns their payload on one device."""
        return self.root.total_bytes

    def get_comm_counts(self) -> dict[str, int]:
        """Returns how many run of each kind; PyTorch's keys are its ops, these are XLA's kinds."""
        return _by_kind(self.root.parts)

    def get_comm_bytes(self) -> dict[str, int]:
        """Returns the payload of each kind on one device."""
        return _bytes_by_kind(self.root.parts)

    @property
    def comm_module_counts(self) -> dict[str, dict[str, dict[str, int]]]:
        """Counts by module, phase and kind, as PyTorch's attribute of this name has them.

        "forward" and "backward" are always there; "optimizer" and "other" where something is.
        """
        return {path: _by_phase(module) for path, module in self._by_path.items()}

    def module(self, path: str) -> ModuleComm | None:
        """Looks a module up.

        Args:
            path: as ``named_modules()`` writes it, "layers.*" for layers that run as a loop.

        Returns:
            The module; None where it communicates nothing.
        """
        return self._by_path.get(path)

    def generate_comm_debug_tracing_table(
        self, noise_level: int = 1, depth: int | None = None
    ) -> str:
        """Writes a table of modules, each indented by its depth.

        Args:
            noise_level: 0 for kinds only; from 1 on with the mesh axes. (PyTorch has levels up to 3
                for the ops of a module, which are not known here.)
            depth: how deep modules are shown; deeper ones are in the sums of those around them.

        Returns:
            Lines, with a line break at the end.
        """
        return _tracing_table(self, with_axes=noise_level > 0, depth=depth)

    def log_comm_debug_tracing_table_to_file(
        self, file_name: str | os.PathLike[str] = "comm_mode_log.txt", noise_level: int = 1
    ) -> None:
        """Writes the table to a file.

        Args:
            file_name: where to.
            noise_level: as above.
        """
        with open(file_name, "w", encoding="utf-8") as file:
            file.write(self.generate_comm_debug_tracing_table(noise_level))

    def generate_json_dump(
        self, file_name: str | os.PathLike[str] = "comm_mode_log.json", noise_level: int = 1
    ) -> None:
        """Writes the tree as JSON, with PyTorch's keys where they mean the same.

        Args:
            file_name: where to.
            noise_level: taken for PyTorch's signature; the file is the same.
        """
        del noise_level
        with open(file_name, "w", encoding="utf-8") as file:
            json.dump(_data(self.root), file, indent=4)

    def __str__(self) -> str:
        return self.generate_comm_debug_tracing_table()


def comm_counts(source: Evidence | CompileReport) -> CommCounts:
    """Counts what each module communicates.

    Args:
        source: evidence of a compiled step; or a report, which has equal layers as one "layers.*".

    Returns:
        The counts. Their sums are those of the report.

    Example:
        >>> from mesh_utils import Mesh
        >>> comm_counts(Evidence("t", "HloModule m", Mesh.arange((8,)))).get_total_counts()
        0
    """
    if not isinstance(source, Evidence):
        moving = enumerate(line for line in source.collectives if line.moves)
        origin_parts = [
            (line.origin, _part(number, line, line.origin.phase, line.bytes_per_device))
            for number, line in moving
        ]
        return _counts(origin_parts, source.unread)
    reading = source.reading
    # Each by itself: the lines of a report put equal layers together. Sends and receives of one
    # rendezvous are one collective, so those stay together.
    paired = [
        collective for collective in reading.collectives if collective.kind in ("send", "recv")
    ]
    single = [
        collective for collective in reading.collectives if collective.kind not in ("send", "recv")
    ]
    lines = [
        (line, parts_of(collective))
        for collective in single
        for line in collective_lines([collective])
    ]
    lines += [(line, ()) for line in collective_lines(paired)]
    origin_parts = [
        (origin, _part(number, line, origin.phase, size * line.executions))
        for number, (line, parts) in enumerate(lines)
        if line.moves
        for origin, size in parts or ((line.origin, line.bytes_each),)
    ]
    return _counts(origin_parts, tuple(map(str, reading.unread)))


def _part(number: int, line: CollectiveLine, phase: Phase, size: int) -> CommPart:
    axes = axes_text(line.axes)
    return CommPart(number, line.kind, axes, phase, line.executions, size, line.at_least)


def _counts(origin_parts: list[tuple[Origin, CommPart]], unread: tuple[str, ...]) -> CommCounts:
    own: dict[str, list[CommPart]] = {GLOBAL: []}
    for origin, part in origin_parts:
        path = origin.module or GLOBAL
        own.setdefault(path, []).append(part)
        while "." in path:
            path = path.rpartition(".")[0]
            own.setdefault(path, [])
    has_modules = not origin_parts or any(origin.module for origin, _ in origin_parts)
    return CommCounts(_node(GLOBAL, own), has_modules, unread)


def _node(path: str, own: dict[str, list[CommPart]]) -> ModuleComm:
    parent = "" if path == GLOBAL else path
    inside = [p for p in own if p != GLOBAL and p.rpartition(".")[0] == parent]
    children = tuple(_node(child, own) for child in sorted(inside, key=_order))
    return ModuleComm(path, tuple(own[path]), children)


def _order(path: str) -> list[tuple[int, int, str]]:
    """Numbers as numbers: layer 10 after layer 9."""
    return [(0, int(p), "") if p.isdecimal() else (1, 0, p) for p in path.split(".")]


def _count(parts: Iterable[CommPart]) -> int:
    """How many collectives run: one of which several parts are given runs as one."""
    return sum({part.number: part.executions for part in parts}.values())


def _by_kind(parts: Iterable[CommPart]) -> dict[str, int]:
    kinds: dict[str, list[CommPart]] = {}
    for part in parts:
        kinds.setdefault(part.kind, []).append(part)
    return {kind: _count(those) for kind, those in kinds.items()}


def _bytes_by_kind(parts: Iterable[CommPart]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for part in parts:
        totals[part.kind] = totals.get(part.kind, 0) + part.bytes
    return totals


def _by_phase(module: ModuleComm) -> dict[str, dict[str, int]]:
    phases: dict[str, dict[str, int]] = {"forward": {}, "backward": {}}
    for phase in PHASES:
        kinds = _by_kind(part for part in module.parts if part.phase == phase)
        if kinds:
            phases[phase] = kinds
    return phases


def _data(module: ModuleComm) -> dict[str, object]:
    node: dict[str, object] = {"fqn": module.path}
    for phase in PHASES:
        chosen = [part for part in module.parts if part.phase == phase]
        if chosen or phase in ("forward", "backward"):
            node[f"collectives_{phase}"] = [list(pair) for pair in _by_kind(chosen).items()]
            node[f"bytes_{phase}"] = [list(pair) for pair in _bytes_by_kind(chosen).items()]
    return node | {"children": [_data(child) for child in module.children]}


# ------------------------------------------------------------------------------------- Module table
#
# What each module communicates, as a table whose rows are indented by depth.

_HEADER = ("module", "phase", "collective", "mesh axes", ">runs", ">bytes")
_NO_MODULES = (
    "The names in this program tell no modules (torch_xla's never do): everything is Global."
)


def _tracing_table(counts: CommCounts, *, with_axes: bool = True, depth: int | None = None) -> str:
    """The table of modules down to a depth, with a line break at the end.

    Bytes are of one device in one step; ">=" where a loop of unknown trip count was counted once.
    """
    if not counts.root.parts:
        return "no collectives\n"
    rows = [_HEADER]
    for module in counts.root.walk():
        if depth is None or module.depth <= depth:
            rows += _rows(module, with_axes)
    if not with_axes:
        place = _HEADER.index("mesh axes")
        rows = [row[:place] + row[place + 1 :] for row in rows]
    lines = table_lines(Table(rows[0], tuple(rows[1:])))
    if not counts.has_modules:
        lines.append(_NO_MODULES)
    lines += [f"not read: {one_line(words)}" for words in counts.unread]
    return "\n".join(lines) + "\n"


def _rows(module: ModuleComm, with_axes: bool) -> list[tuple[str, ...]]:
    name = "  " * module.depth + module.path
    rows: list[tuple[str, ...]] = []
    phase = None
    for entry in module.entries(with_axes=with_axes):
        bound = ">=" if entry.at_least else ""
        rows.append(
            (
                name if not rows else "",
                entry.phase if entry.phase != phase else "",
                entry.kind,
                entry.axes,
                f"{bound}{entry.count:,}",
                bound + bytes_text(entry.bytes),
            )
        )
        phase = entry.phase
    return rows
