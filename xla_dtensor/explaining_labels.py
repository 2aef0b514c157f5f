"""Which op made a DTensor, and by what rule its label came: kept with the label, in words later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.tensor import Replicate

from xla_dtensor import propagation
from xla_dtensor.core import Layout
from xla_dtensor.device_mesh import DeviceMesh
from xla_dtensor.global_state import GlobalState
from xla_dtensor.nested import leaves
from xla_dtensor.whole_op_labels import WHOLE_OP_LABELS

__all__ = ["MadeBy", "note_op", "rule_words"]


@dataclass(frozen=True, slots=True)
class MadeBy:
    """The op that a state was made for. It holds no tensors, and no other states.

    Attributes:
        func: The ``OpOverload``; a text for what is no op of torch's.
        arguments: The mesh, the placements and the shape of each DTensor among its arguments.
    """

    func: Any
    arguments: tuple[tuple[DeviceMesh, tuple[Any, ...], tuple[int, ...]], ...]

    @property
    def words(self) -> str:
        """The op with its arguments."""
        told = [
            f"{shape} {Layout.from_placements(placements, len(shape), mesh.value)}"
            for mesh, placements, shape in self.arguments
        ]
        return f"{self.func} of {' and '.join(told)}" if told else str(self.func)

    @property
    def takes_copies(self) -> bool:
        """Whether all its arguments are labelled as copies."""
        return all(p == Replicate() for _, placements, _ in self.arguments for p in placements)


def note_op(states: Any, func: Any, found: Sequence[Any]) -> Any:
    """Keep with the states of an op's outputs which op they are of; return the states.

    Called once for each new answer, not for each op.

    Args:
        states: A state, or nested lists of states and None.
        func: The op.
        found: The DTensors among its arguments.
    """
    arguments = ((t._spec.mesh, tuple(t._spec.placements), tuple(t.shape)) for t in found)
    made_by = MadeBy(func, tuple(arguments))
    for state in leaves([states]):
        if isinstance(state, GlobalState):
            state.made_by = made_by
    return states


def rule_words(made_by: MadeBy) -> str:
    """Say by what rule an op's output got its label.

    Args:
        made_by: The op.
    """
    func = made_by.func
    if isinstance(func, str):
        return "its caller said how the result is to lie, and XLA is told so"
    if func in propagation._SAME_AS_FIRST:
        return "its result is labelled as its argument"
    if made_by.takes_copies:
        return "all its arguments are labelled as copies, so its result is"
    if func in WHOLE_OP_LABELS:
        return "the label is by a rule of xla_dtensor's, as PyTorch has none for this op"
    if func in propagation._logged:
        return "PyTorch has no rule that fits, so its result is labelled as copies"
    return "the label is what PyTorch's rule for this op says of these arguments"
