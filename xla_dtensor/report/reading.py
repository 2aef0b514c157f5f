"""A program read as far as it can be read, with a list of what could not.

`collectives` refuses a program of which it cannot read a part. A report rather says what it has,
and what it lacks: one instruction that a newer compiler prints in a new way should not hide the
other thousand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mesh_utils import Mesh
from xla_dtensor.core.argument_types import argument_types
from xla_dtensor.report.collective import (
    DCN_TARGET,
    OPCODES,
    SPREAD,
    Collective,
    CollectiveReader,
    ProgramAxes,
)
from xla_dtensor.report.errors import HloError
from xla_dtensor.report.hlo import Computation, HloModule, Instruction, computation_runs

__all__ = ["HloReading", "read_hlo"]


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
    runs = computation_runs(module)
    return tuple(
        CollectiveReader(
            module, computation, instruction, runs[computation.name], namer
        ).collective()
        for computation, instruction in collective_instructions(module)
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


def collective_instructions(module: HloModule) -> Iterator[tuple[Computation, Instruction]]:
    """Finds the instructions that are collectives, each once.

    Args:
        module: the module.

    Yields:
        The computation in which it stands, and the instruction.
    """
    found = [
        (computation, instruction)
        for computation in module.computations.values()
        for instruction in computation.instructions.values()
        if instruction.opcode in OPCODES and not _is_host_callback(instruction)
    ]
    spread = [(c, i) for c, i in found if SPREAD in i.rest]
    started = {_chain(i) for c, i in spread if _starts(c)}
    seen: set[tuple[str | None, ...]] = set()
    for computation, instruction in found:
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
        module = HloModule.parse(hlo_text)
    except HloError as error:
        return HloReading((), (Unread("the whole program", _reason(error)),))
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
    runs = computation_runs(module)
    found: list[Collective] = []
    for computation, instruction in collective_instructions(module):
        try:
            reader = CollectiveReader(
                module, computation, instruction, runs[computation.name], namer
            )
            found.append(reader.collective())
        except HloError as error:
            unread.append(Unread(f"{computation.name}, %{instruction.name}", _reason(error)))
    return HloReading(tuple(found), tuple(unread))


def _reason(error: HloError) -> str:
    return str(error).partition(" Pass ")[0]
