"""One collective instruction of an HLO module, read into a Collective."""

import re

from mesh_utils import Axis
from xla_dtensor.report.call_graph import Runs
from xla_dtensor.report.collective import COLLECTIVE_KINDS, Collective, CollectiveKind
from xla_dtensor.report.errors import HloError
from xla_dtensor.report.hlo_module import Computation, HloModule, Instruction, split_commas
from xla_dtensor.report.hlo_numbers import read_number
from xla_dtensor.report.hlo_shape import ArrayShape, Shape, arrays
from xla_dtensor.report.inherited_metadata import told_metadata
from xla_dtensor.report.program_axes import ProgramAxes
from xla_dtensor.report.replica_groups import ReplicaGroups
from xla_dtensor.report.stack_frames import SourceLine, unquoted

OPCODES: dict[str, CollectiveKind] = {
    **{kind: kind for kind in COLLECTIVE_KINDS},
    **{f"{kind}-start": kind for kind in COLLECTIVE_KINDS},
}
"""The opcodes of collectives; a done says nothing that its start does not."""

SPREAD = '"async_collective_fusion_config"'
"""What XLA for TPU prints on each part of a collective spread over fusions."""

DCN_TARGET = "_xla_megascale_target"
"""The frontend attribute that says which slices a send or recv is for."""

_P2P_PAIRS = "_xla_send_recv_source_target_pairs"
_PAIRS = re.compile(r"\{([0-9]+),([0-9]+)\}")
_PAIR = r"\{[0-9]{1,12},[0-9]{1,12}\}"
_ALL_PAIRS = re.compile(rf"\{{(?:{_PAIR}(?:,{_PAIR})*)?\}}")


class CollectiveReader:
    """Reads one collective instruction.

    Args:
        module: the module.
        computation: the computation in which it stands.
        instruction: one whose opcode is in OPCODES.
        runs: how the computation runs.
        namer: names its mesh axes; None leaves them out.
    """

    def __init__(
        self,
        module: HloModule,
        computation: Computation,
        instruction: Instruction,
        runs: Runs,
        namer: ProgramAxes | None,
    ) -> None:
        self.module = module
        self.computation = computation
        self.instruction = instruction
        self.attributes = instruction.attributes
        self.runs = runs
        self.namer = namer
        self.kind: CollectiveKind = OPCODES[instruction.opcode]
        self.is_scatter = _is_all_reduce_scatter(self.kind, computation, runs.caller)
        channel = self.attributes.get("channel_id")
        self.channel_id = None if channel is None else read_number(channel)
        self.global_ids = self.attributes.get("use_global_device_ids") == "true"
        self.frontend = _frontend_attributes(self.attributes.get("frontend_attributes", ""))

    def collective(self) -> Collective:
        """Reads it.

        Returns:
            The instruction as a value.

        Raises:
            HloError: shapes, groups or pairs that cannot be read.
        """
        groups = self.attributes.get("replica_groups")
        replica_groups = None if groups is None else ReplicaGroups.parse(groups)
        pairs = self._pairs()
        op_name, source = self._metadata()
        return Collective(
            kind="reduce-scatter" if self.is_scatter else self.kind,
            name=self.instruction.name,
            computation=self.computation.name,
            operands=self._operands(),
            results=self._results(),
            replica_groups=replica_groups,
            source_target_pairs=pairs,
            channel_id=self.channel_id,
            use_global_device_ids=self.global_ids,
            axes=self._axes(replica_groups, pairs),
            op_name=op_name,
            source=source,
            is_async=self._is_async(),
            in_loop=self.runs.in_loop,
            executions=self.runs.times,
            frontend_attributes=self.frontend,
        )

    def _is_async(self) -> bool:
        caller = self.runs.caller
        wrapped = caller is not None and caller.opcode == "async-start"
        is_start = self.instruction.opcode.endswith("-start")
        return is_start or wrapped or SPREAD in self.instruction.rest

    def _operands(self) -> tuple[ArrayShape, ...]:
        if self.kind == "recv":
            return ()
        shapes = self.computation.operand_shapes(self.instruction)
        return arrays(shapes[:1] if self.kind in ("ragged-all-to-all", "send") else shapes)

    def _results(self) -> tuple[ArrayShape, ...]:
        shape = self.instruction.shape
        root = self.computation.root
        if self.kind == "send":
            return ()
        if self.kind == "recv":
            return arrays(shape[0] if isinstance(shape, tuple) and shape else shape)
        if self.is_scatter and root is not None:
            return arrays(root.shape)
        if self.instruction.opcode.endswith("-start"):
            return arrays(_started_result(self.kind, shape))
        return arrays(shape)

    def _pairs(self) -> tuple[tuple[int, int], ...]:
        text = self.attributes.get("source_target_pairs") or dict(self.frontend).get(_P2P_PAIRS)
        if text is None:
            return ()
        compact = re.sub(r"\s+", "", text)
        if not _ALL_PAIRS.fullmatch(compact):
            raise HloError(
                f"The source-target pairs {text[:80]!r} were given. They are no list of pairs. "
                "Pass them as XLA prints them: {{0,1},{1,0}}."
            )
        return tuple((int(source), int(target)) for source, target in _PAIRS.findall(compact))

    def _axes(
        self, groups: ReplicaGroups | None, pairs: tuple[tuple[int, int], ...]
    ) -> tuple[Axis, ...] | None:
        target = dict(self.frontend).get(DCN_TARGET)
        if self.namer is None:
            return None
        if target is not None:
            return self.namer.of_target(target)
        if pairs or self.kind == "collective-permute":
            return self.namer.of_pairs(pairs)
        if groups is None:
            return None
        return self.namer.of_groups(groups, self.kind, self.channel_id, self.global_ids)

    def _metadata(self) -> tuple[str | None, tuple[SourceLine, ...]]:
        fields = told_metadata(self.module, self.computation, self.instruction, self.runs)
        return fields.get("op_name"), self.module.frames.source(fields)


def _is_all_reduce_scatter(
    kind: CollectiveKind, computation: Computation, caller: Instruction | None
) -> bool:
    fused = caller is not None and caller.opcode == "fusion"
    return kind == "all-reduce" and fused and computation.name.startswith("all-reduce-scatter")


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
    return tuple((name, unquoted(value)) for name, _, value in pairs)
