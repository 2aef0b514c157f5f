"""The collectives of a program, read from its text, and where XLA gathered an array whole.

`collectives` refuses a program of which it cannot read a part. A report rather says what it has,
and what it lacks: one instruction that a newer compiler prints in a new way should not hide the
other thousand.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mesh_utils import Axis, Mesh
from xla_dtensor.core.argument_types import argument_types
from xla_dtensor.report.collective import (
    COLLECTIVE_KINDS,
    DCN_TARGET,
    Collective,
    CollectiveKind,
    ProgramAxes,
    ReplicaGroups,
)
from xla_dtensor.report.finding import SMALL_GATHER_BYTES, Finding, origin_of
from xla_dtensor.report.hlo import (
    Computation,
    HloModule,
    Instruction,
    StackFrames,
    parse_fields,
    told_metadata,
    unquoted,
)
from xla_dtensor.report.hlo_text import (
    ArrayShape,
    HloError,
    Shape,
    arrays,
    read_number,
    split_commas,
)
from xla_dtensor.report.texts import bytes_text

if TYPE_CHECKING:
    from xla_dtensor.report.report import Evidence

__all__ = [
    "CollectiveSummary",
    "HloReading",
    "collectives",
    "num_partitions",
    "read_hlo",
    "read_module",
    "rematerialization_findings",
    "summarize",
]


# ----------------------------- One collective instruction of an HLO module, read into a Collective

OPCODES: dict[str, CollectiveKind] = {
    **{kind: kind for kind in COLLECTIVE_KINDS},
    **{f"{kind}-start": kind for kind in COLLECTIVE_KINDS},
}
"""The opcodes of collectives; a done says nothing that its start does not."""

SPREAD = '"async_collective_fusion_config"'
"""What XLA for TPU prints on each part of a collective spread over fusions."""

_P2P_PAIRS = "_xla_send_recv_source_target_pairs"
_PAIRS = re.compile(r"\{([0-9]+),([0-9]+)\}")
_PAIR = r"\{[0-9]{1,12},[0-9]{1,12}\}"
_ALL_PAIRS = re.compile(rf"\{{(?:{_PAIR}(?:,{_PAIR})*)?\}}")


def _collective(
    module: HloModule,
    computation: Computation,
    instruction: Instruction,
    namer: ProgramAxes | None,
) -> Collective:
    """Reads an instruction whose opcode is in OPCODES; without a namer no axes are named.

    Raises:
        HloError: shapes, groups or pairs that cannot be read.
    """
    attributes, runs = instruction.attributes, module.runs[computation.name]
    caller = runs.caller
    kind, called_by = OPCODES[instruction.opcode], "" if caller is None else caller.opcode
    is_start = instruction.opcode.endswith("-start")
    is_scatter = (
        kind == "all-reduce"
        and called_by == "fusion"
        and computation.name.startswith("all-reduce-scatter")
    )
    groups, channel = attributes.get("replica_groups"), attributes.get("channel_id")
    replica_groups = None if groups is None else ReplicaGroups.parse(groups)
    frontend = _frontend_attributes(attributes.get("frontend_attributes", ""))
    pairs = _pairs(attributes.get("source_target_pairs") or dict(frontend).get(_P2P_PAIRS))
    fields = told_metadata(module, computation, instruction)
    collective = Collective(
        kind="reduce-scatter" if is_scatter else kind,
        name=instruction.name,
        computation=computation.name,
        operands=_operands(computation, instruction, kind),
        results=_results(computation.root if is_scatter else None, instruction, kind),
        replica_groups=replica_groups,
        source_target_pairs=pairs,
        channel_id=None if channel is None else read_number(channel),
        use_global_device_ids=attributes.get("use_global_device_ids") == "true",
        axes=None,
        op_name=fields.get("op_name"),
        source=module.frames.source(fields),
        is_async=is_start or called_by == "async-start" or SPREAD in instruction.rest,
        in_loop=runs.in_loop,
        executions=runs.times,
        frontend_attributes=frontend,
    )
    return collective if namer is None else replace(collective, axes=namer.axes_of(collective))


def _operands(
    computation: Computation, instruction: Instruction, kind: CollectiveKind
) -> tuple[ArrayShape, ...]:
    if kind == "recv":
        return ()
    shapes = computation.operand_shapes(instruction)
    return arrays(shapes[:1] if kind in ("ragged-all-to-all", "send") else shapes)


def _results(
    scattered: Instruction | None, instruction: Instruction, kind: CollectiveKind
) -> tuple[ArrayShape, ...]:
    shape = instruction.shape
    if kind == "send":
        return ()
    if kind == "recv":
        return arrays(shape[0] if isinstance(shape, tuple) and shape else shape)
    if scattered is not None:
        return arrays(scattered.shape)
    if instruction.opcode.endswith("-start"):
        return arrays(_started_result(kind, shape))
    return arrays(shape)


def _pairs(text: str | None) -> tuple[tuple[int, int], ...]:
    if text is None:
        return ()
    compact = re.sub(r"\s+", "", text)
    if not _ALL_PAIRS.fullmatch(compact):
        raise HloError(
            f"The source-target pairs {text[:80]!r} were given. They are no list of pairs. "
            "Pass them as XLA prints them: {{0,1},{1,0}}."
        )
    return tuple((int(source), int(target)) for source, target in _PAIRS.findall(compact))


def _started_result(kind: CollectiveKind, shape: Shape) -> Shape:
    """The result within what a start gives: (operands, results, contexts...).

    An all-reduce-start gives its results alone, unless it is a wrapped computation.
    """
    if not isinstance(shape, tuple) or len(shape) < 2:
        return shape
    if kind == "all-reduce" and not isinstance(shape[0], tuple):
        return shape
    return shape[1]


def _frontend_attributes(text: str) -> tuple[tuple[str, str], ...]:
    pairs = (part.partition("=") for part in split_commas(text.strip()[1:-1]))
    return tuple((name, unquoted(words)) for name, _, words in pairs)


# -------------------------------------- The collectives of a program, summed by kind and mesh axes


@dataclass(frozen=True, slots=True)
class CollectiveSummary:
    """All collectives of one kind over the same axes.

    Attributes:
        kind: the kind.
        axes: the mesh axes; () for no communication, None for mixed or unknown.
        count: how often they run in one run of the program.
        bytes_per_device: their payload (`Collective.payload_bytes`) in all those runs. Not the
            bytes on the wire, which depend on the algorithm.
        at_least: whether a loop of unknown trip count makes both a lower bound: it counts once.
    """

    kind: CollectiveKind
    axes: tuple[Axis, ...] | None
    count: int
    bytes_per_device: int
    at_least: bool = False


@argument_types
def summarize(collectives: Iterable[Collective]) -> tuple[CollectiveSummary, ...]:
    """Sums collectives by kind and axes.

    Args:
        collectives: as `collectives()` lists them.

    Returns:
        The sums, the most bytes first.

    Example:
        >>> summarize([])
        ()
    """
    rows: dict[tuple[CollectiveKind, tuple[Axis, ...] | None], CollectiveSummary] = {}
    for collective in collectives:
        key = collective.kind, collective.axes
        row = rows.get(key, CollectiveSummary(*key, 0, 0))
        times = 1 if collective.executions is None else collective.executions
        rows[key] = CollectiveSummary(
            *key,
            row.count + times,
            row.bytes_per_device + times * collective.payload_bytes,
            row.at_least or collective.executions is None,
        )
    return tuple(sorted(rows.values(), key=_order))


def _order(row: CollectiveSummary) -> tuple[int, str, bool, list[str]]:
    return -row.bytes_per_device, row.kind, row.axes is None, [str(axis) for axis in row.axes or ()]


# ----------------------------------- The collectives of a compiled program, read from its HLO text
#
#   text = jax.jit(step).lower(...).compile().as_text()      JAX, on every platform
#   text = Path("...after_optimizations.txt").read_text()    torch_xla with XLA_FLAGS=--xla_dump_to
#
#     for collective in collectives(text, mesh):
#         collective.kind, collective.axes, collective.payload_bytes, collective.executions
#
# What is one communication is one Collective, however it is printed:
#
# - a start and its done (all-gather-start, reduce-scatter-start, async-start around a computation);
# - on TPU a collective that is spread over fusions to overlap with compute: it is printed once in
#   each of them, with one chain_id, and counted where it starts;
# - on TPU an all-reduce in a fusion "all-reduce-scatter": a reduce-scatter.
#
# Host callbacks, which are sends and recvs too, are left out: no device talks to another.

_START = 'custom_call_target="AsyncCollectiveStart"'


@argument_types
def collectives(
    hlo_text: str,
    mesh: Mesh | None = None,
    granules: Sequence[int] | NDArray[np.integer] | None = None,
) -> tuple[Collective, ...]:
    """Lists the collectives of a compiled program.

    Args:
        hlo_text: the text of a partitioned, optimised HLO module.
        mesh: the mesh to name axes of. The numbers in the program are places in the
            `device_ids.flat` of its root.
        granules: for a program over several slices, the slice of each device of the root.

    Returns:
        The collectives in the order printed, which is computation by computation.

    Raises:
        HloError: text that is no HLO module, replica groups that cannot be read, or a mesh of
            another size than the program.

    Example:
        >>> from mesh_utils import Mesh
        >>> text = '''HloModule m, num_partitions=8
        ... ENTRY %main (p: f32[8,16]) -> f32[8,16] {
        ...   %p = f32[8,16]{1,0} parameter(0)
        ...   ROOT %sent = f32[8,16]{1,0} all-to-all(%p), channel_id=1, replica_groups=[2,4]<=[8]
        ... }'''
        >>> found = collectives(text, Mesh.arange((2, 4), ("dp", "tp")))[0]
        >>> found.kind, found.axes, found.result_bytes
        ('all-to-all', ('tp',), 512)
    """
    module = HloModule.parse(hlo_text)
    namer = None if mesh is None else ProgramAxes.of(module, mesh, granules)
    return tuple(
        _collective(module, computation, instruction, namer)
        for computation, instruction in _collective_instructions(module)
    )


@argument_types
def num_partitions(hlo_text: str) -> int:
    """Reads how many devices run the program together.

    Args:
        hlo_text: the text of an HLO module.

    Returns:
        The number; 1 if the module names none. Of a program over several slices, those of one.

    Raises:
        HloError: text that is no HLO module.

    Example:
        >>> num_partitions("HloModule jit_f, is_scheduled=true, num_partitions=8")
        8
    """
    return HloModule.parse_header(hlo_text).num_partitions


def _collective_instructions(module: HloModule) -> Iterator[tuple[Computation, Instruction]]:
    """The instructions that are collectives, each once, with the computation it stands in."""
    instructions = [
        (computation, instruction)
        for computation in module.computations.values()
        for instruction in computation.instructions.values()
        if instruction.opcode in OPCODES and not _is_host_callback(instruction)
    ]
    spread = [(c, i) for c, i in instructions if SPREAD in i.rest]
    started = {_chain(i) for c, i in spread if _starts(c)}
    seen: set[tuple[str | None, ...]] = set()
    for computation, instruction in instructions:
        if SPREAD in instruction.rest and not _starts(computation):
            chain = _chain(instruction)
            if chain in started or chain in seen:
                continue
            seen.add(chain)
        yield computation, instruction


def _starts(computation: Computation) -> bool:
    return any(_START in instruction.rest for instruction in computation.instructions.values())


def _chain(instruction: Instruction) -> tuple[str | None, ...]:
    """What the parts of one spread collective have in common."""
    attributes = instruction.attributes
    names = ("channel_id", "frontend_attributes", "replica_groups", "dimensions")
    return (instruction.opcode, *(attributes.get(name) for name in names))


def _is_host_callback(instruction: Instruction) -> bool:
    attributes = instruction.attributes
    is_host = attributes.get("is_host_transfer") == "true"
    return is_host and DCN_TARGET not in attributes.get("frontend_attributes", "")


# -------------------------- A program read as far as it can be read, with a list of what could not


@dataclass(frozen=True, slots=True)
class Unread:
    """A part of a program that could not be read.

    Attributes:
        where: the computation and the instruction, or the line.
        why: what is wrong with it.
    """

    where: str
    why: str

    def __str__(self) -> str:
        return f"{self.where}: {self.why}"


@dataclass(frozen=True)
class HloReading:
    """What was read of a program.

    Attributes:
        collectives: those that could be read, in the order printed.
        unread: what could not.
    """

    collectives: tuple[Collective, ...]
    unread: tuple[Unread, ...]


@argument_types
def read_hlo(
    hlo_text: str,
    mesh: Mesh | None = None,
    granules: Sequence[int] | NDArray[np.integer] | None = None,
) -> HloReading:
    """Reads the collectives of a program, and leaves out those that it cannot read.

    Args:
        hlo_text: as for `collectives`.
        mesh: likewise; where it cannot be the program's, axes are left out and `unread` says so.
        granules: likewise.

    Returns:
        The collectives, and what could not be read. It raises nothing.

    Example:
        >>> text = '''HloModule m, num_partitions=4
        ... ENTRY %main (p: f32[8]) -> f32[8] {
        ...   %p = f32[8]{0} parameter(0)
        ...   ROOT %sum = f32[8]{0} all-reduce(%p), channel_id=1, replica_groups=<new syntax>
        ... }'''
        >>> found = read_hlo(text)
        >>> found.collectives, found.unread[0].where
        ((), 'main, %sum')
    """
    try:
        return read_module(HloModule.parse(hlo_text), mesh, granules)
    except HloError as error:
        return HloReading((), (Unread("the whole program", _reason(error)),))


def read_module(
    module: HloModule,
    mesh: Mesh | None = None,
    granules: Sequence[int] | NDArray[np.integer] | None = None,
) -> HloReading:
    """Reads the collectives of a module: see :func:`read_hlo`."""
    unread: list[Unread] = [
        Unread(f"{computation}, {line[:60]!r}", "it looks like no instruction")
        for computation, line in module.unread
    ]
    namer = None
    if mesh is not None:
        try:
            namer = ProgramAxes.of(module, mesh, granules)
        except HloError as error:
            unread.append(Unread("the mesh axes of all collectives", _reason(error)))
    readable: list[Collective] = []
    for computation, instruction in _collective_instructions(module):
        try:
            readable.append(_collective(module, computation, instruction, namer))
        except HloError as error:
            unread.append(Unread(f"{computation.name}, %{instruction.name}", _reason(error)))
    return HloReading(tuple(readable), tuple(unread))


def _reason(error: HloError) -> str:
    return str(error).partition(" Pass ")[0]


# -------------------------------------------------- Findings of involuntary full rematerialization
#
# An array gathered whole to shard it otherwise.
#
# XLA's partitioner knows ways from many shardings to many others. Where it knows none it gathers
# the whole array on every device, and each takes its part. It says so in its log:
#
#     [spmd] Involuntary full rematerialization. The compiler cannot go from sharding {...} to {...}
#     efficiently for HLO operation %add = bf16[...] add(...), metadata={op_name="..."}
#
# and it shows in the program, log or no log: an all-gather whose result goes into a dynamic-slice
# at a place that depends on the device (partition-id), and nowhere else.

_MOST = 5  # One reason often makes many.
_LOG = re.compile(
    r"Involuntary full rematerialization\.[^\n]*?from sharding (\{.*?\}) to (\{.*?\}) "
    r"(?:efficiently )?for HLO operation:? %?([\w.\-]+)([^\n]*)"
)
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_GATHERS = ("all-gather", "all-gather-done")
_COPIES = ("bitcast", "copy", "reshape", "convert", "transpose")
_REACH = 32
"""Instructions that a place is followed back through: indices are short sums and products."""

_FIX = (
    "Give the array one layout on both sides: shard what produces it as what uses it needs it, or "
    "put a redistribute through a layout between the two (first one dim, then the other)."
)


def rematerialization_findings(evidence: Evidence) -> Iterator[Finding]:
    """Finds arrays that are gathered whole to be sharded otherwise.

    Args:
        evidence: what the compiled step left behind; the compiler's log, if any, in
            `attributes["compiler_log"]`.

    Yields:
        The findings: those of the log if it has some, else those of the program.
    """
    logged = list(_logged(evidence.attributes.get("compiler_log", "")))
    if logged:
        yield from logged[:_MOST]
        return
    try:
        module = evidence.program
    except HloError:
        return
    shown = (_shown(computation, module.frames) for computation in module.computations.values())
    yield from islice(chain.from_iterable(shown), _MOST)


def _logged(log: str) -> Iterator[Finding]:
    seen: set[tuple[str, ...]] = set()
    for match in _LOG.finditer(log):
        name = _OP_NAME.search(match[4])
        key = match[1], match[2], name[1] if name else match[3]
        if key in seen:
            continue
        seen.add(key)
        yield Finding(
            "warning",
            "full-rematerialization",
            f"XLA gathers {match[3]} whole on every device to shard it otherwise",
            f"From {match[1]} to {match[2]}, as its log says.",
            _FIX,
            origin_of(name[1]) if name else None,
        )


def _shown(computation: Computation, frames: StackFrames) -> Iterator[Finding]:
    table = computation.instructions
    for gather in (instruction for instruction in table.values() if instruction.opcode in _GATHERS):
        try:
            size = max((array.bytes for array in arrays(gather.shape)), default=0)
        except HloError:
            continue
        if size >= SMALL_GATHER_BYTES and _is_cut(gather, computation):
            fields = parse_fields(gather.attributes.get("metadata", ""))
            yield Finding(
                "warning",
                "full-rematerialization",
                f"An array is gathered whole on every device, and each keeps a part: {gather.name}",
                f"{bytes_text(size)}: {gather.shape_text.split('{')[0]}.",
                _FIX,
                origin_of(fields.get("op_name"), frames.source(fields)),
            )


def _is_cut(gather: Instruction, computation: Computation) -> bool:
    """Whether all that uses it cuts the device's part out of it."""
    followed, seen = [gather], {gather.name}
    cuts = 0
    while followed:
        current = followed.pop()
        for user in computation.users.get(current.name, ()):
            if user.name in seen:
                continue
            seen.add(user.name)
            if user.opcode in _COPIES:
                followed.append(user)
            elif _cuts(user, current, computation):
                cuts += 1
            else:
                return False
    return cuts > 0


def _cuts(user: Instruction, array: Instruction, computation: Computation) -> bool:
    """Whether an instruction is a dynamic-slice of the array, at a place of the device's own."""
    is_slice = user.opcode == "dynamic-slice"
    is_fused = user.opcode == "fusion" and "dynamic-slice" in user.name
    if not (is_slice or is_fused):
        return False
    places = [name for name in user.operand_names if name != array.name]
    seen: set[str] = set()
    while places and len(seen) < _REACH:
        name = places.pop()
        source = computation.instructions.get(name)
        if source is None or name in seen:
            continue
        seen.add(name)
        if source.opcode == "partition-id" or "partition-id" in source.rest:
            return True
        places += source.operand_names
    return False
