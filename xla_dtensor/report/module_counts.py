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
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from xla_dtensor.report.attribution import PHASES, Origin, Phase
from xla_dtensor.report.collective_lines import CollectiveLine, collective_lines
from xla_dtensor.report.compile_report import CompileReport
from xla_dtensor.report.evidence import Evidence
from xla_dtensor.report.hlo_reading import read_hlo
from xla_dtensor.report.module_parts import parts_of
from xla_dtensor.report.report_words import axes_text

__all__ = ["GLOBAL", "CommCounts", "CommEntry", "CommPart", "ModuleComm", "comm_counts"]

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
        found = [
            CommEntry(
                *(kind, axes, phase, _count(parts), sum(part.bytes for part in parts)),
                at_least=any(part.at_least for part in parts),
            )
            for (phase, kind, axes), parts in groups.items()
        ]
        order = {phase: place for place, phase in enumerate(PHASES)}
        return tuple(sorted(found, key=lambda e: (order[e.phase], -e.bytes, e.kind, e.axes)))

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
        from xla_dtensor.report.module_table import tracing_table

        return tracing_table(self, with_axes=noise_level > 0, depth=depth)

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
    if isinstance(source, CompileReport):
        moving = enumerate(line for line in source.collectives if line.moves)
        told = [
            (line.origin, _part(number, line, line.origin.phase, line.bytes_per_device))
            for number, line in moving
        ]
        return _counts(told, source.unread)
    reading = read_hlo(source.hlo_text, source.mesh, source.granules)
    # Each by itself: the lines of a report put equal layers together. Sends and receives of one
    # rendezvous are one collective, so those stay together.
    paired = [one for one in reading.collectives if one.kind in ("send", "recv")]
    single = [one for one in reading.collectives if one.kind not in ("send", "recv")]
    lines = [(line, parts_of(one)) for one in single for line in collective_lines([one])]
    lines += [(line, ()) for line in collective_lines(paired)]
    told = [
        (origin, _part(number, line, origin.phase, size * line.executions))
        for number, (line, parts) in enumerate(lines)
        if line.moves
        for origin, size in parts or ((line.origin, line.bytes_each),)
    ]
    return _counts(told, tuple(f"{part.where}: {part.why}" for part in reading.unread))


def _part(number: int, line: CollectiveLine, phase: Phase, size: int) -> CommPart:
    axes = axes_text(line.axes)
    return CommPart(number, line.kind, axes, phase, line.executions, size, line.at_least)


def _counts(told: list[tuple[Origin, CommPart]], unread: tuple[str, ...]) -> CommCounts:
    own: dict[str, list[CommPart]] = {GLOBAL: []}
    for origin, part in told:
        path = origin.module or GLOBAL
        own.setdefault(path, []).append(part)
        while "." in path:
            path = path.rpartition(".")[0]
            own.setdefault(path, [])
    has_modules = not told or any(origin.module for origin, _ in told)
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
    found: dict[str, int] = {}
    for part in parts:
        found[part.kind] = found.get(part.kind, 0) + part.bytes
    return found


def _by_phase(module: ModuleComm) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {"forward": {}, "backward": {}}
    for phase in PHASES:
        kinds = _by_kind(part for part in module.parts if part.phase == phase)
        if kinds:
            found[phase] = kinds
    return found


def _data(module: ModuleComm) -> dict[str, object]:
    data: dict[str, object] = {"fqn": module.path}
    for phase in PHASES:
        chosen = [part for part in module.parts if part.phase == phase]
        if chosen or phase in ("forward", "backward"):
            data[f"collectives_{phase}"] = [list(pair) for pair in _by_kind(chosen).items()]
            data[f"bytes_{phase}"] = [list(pair) for pair in _bytes_by_kind(chosen).items()]
    return data | {"children": [_data(child) for child in module.children]}
