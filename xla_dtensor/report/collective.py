"""Collective: one communication of a compiled program, as a value."""

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from mesh_utils import Axis
from xla_dtensor.report.hlo_shape import ArrayShape
from xla_dtensor.report.replica_groups import ReplicaGroups
from xla_dtensor.report.stack_frames import SourceLine

CollectiveKind: TypeAlias = Literal[
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "ragged-all-to-all",
    "collective-broadcast",
    "send",
    "recv",
]
COLLECTIVE_KINDS: tuple[CollectiveKind, ...] = get_args(CollectiveKind)


@dataclass(frozen=True)
class Collective:
    """A collective instruction. All shapes and bytes are those of one device, in one run.

    Attributes:
        kind: what it does. An all-reduce of which each device keeps only its part, which XLA for
            TPU prints as a fusion "all-reduce-scatter", is a reduce-scatter.
        name: the name of the instruction.
        computation: the name of the computation it stands in.
        operands: the arrays that go in; of a ragged-all-to-all the data only. None for a recv.
        results: the arrays that come out. None for a send.
        replica_groups: as printed; None for permutes, sends and recvs.
        source_target_pairs: as printed, from and to; () if it has none.
        channel_id: as printed, or None.
        use_global_device_ids: as printed.
        axes: the mesh axes its groups span, in mesh order; parts of an axis as in "tp:(2)4" (of
            size 4, with a size of 2 outside it). Of a permute the axes along which something moves.
            () when no device talks to another. None when no mesh was given, or when the groups
            follow no axes ("mixed").
        op_name: the operation it was made for, as the framework named it, or None.
        source: the line of source it was made for and the lines that led there, innermost first.
        is_async: whether it is split into a start and a done.
        in_loop: whether a while loop is around it.
        executions: how often it runs in one run of the program; None if a loop's trip count is not
            known. Of a conditional every branch is counted.
        frontend_attributes: as printed, name and value.

    Example:
        >>> from xla_dtensor.report import collectives
        >>> text = '''HloModule m, num_partitions=4
        ... ENTRY %main (p: f32[8]) -> f32[8] {
        ...   %p = f32[8]{0} parameter(0)
        ...   ROOT %sum = f32[8]{0} all-reduce(%p), channel_id=1, replica_groups=[2,2]<=[4],
        ... }'''
        >>> found = collectives(text)[0]
        >>> found.kind, found.operand_bytes, found.replica_groups.groups
        ('all-reduce', 32, ((0, 1), (2, 3)))
    """

    kind: CollectiveKind
    name: str
    computation: str
    operands: tuple[ArrayShape, ...]
    results: tuple[ArrayShape, ...]
    replica_groups: ReplicaGroups | None
    source_target_pairs: tuple[tuple[int, int], ...]
    channel_id: int | None
    use_global_device_ids: bool
    axes: tuple[Axis, ...] | None
    op_name: str | None
    source: tuple[SourceLine, ...]
    is_async: bool
    in_loop: bool
    executions: int | None
    frontend_attributes: tuple[tuple[str, str], ...]

    @property
    def operand_bytes(self) -> int:
        """The bytes that go in."""
        return sum(array.bytes for array in self.operands)

    @property
    def result_bytes(self) -> int:
        """The bytes that come out."""
        return sum(array.bytes for array in self.results)

    @property
    def payload_bytes(self) -> int:
        """The larger of the two: the whole of what is gathered, reduced, scattered or moved."""
        return max(self.operand_bytes, self.result_bytes)

    @property
    def source_file(self) -> str | None:
        """The file of the innermost source line, or None."""
        return self.source[0].file if self.source else None

    @property
    def source_line(self) -> int | None:
        """The number of the innermost source line, or None."""
        return self.source[0].line if self.source else None
