"""A program read as far as it can be read, with a list of what could not.

`collectives` refuses a program of which it cannot read a part. A report rather says what it has,
and what it lacks: one instruction that a newer compiler prints in a new way should not hide the
other thousand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mesh_utils import Mesh
from xla_dtensor.argument_types import argument_types
from xla_dtensor.report.call_graph import computation_runs
from xla_dtensor.report.collective import Collective
from xla_dtensor.report.collective_reader import CollectiveReader
from xla_dtensor.report.errors import HloError
from xla_dtensor.report.hlo import collective_instructions
from xla_dtensor.report.hlo_module import HloModule
from xla_dtensor.report.program_axes import ProgramAxes

__all__ = ["HloReading", "Unread", "read_hlo"]


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
