"""Metadata of instructions that XLA made without any: that of their neighbours.

Where XLA for TPU splits an all-reduce over several slices into a reduce-scatter, a send and a recv
and an all-gather, none of them says for what. What is reduced does: the product whose result goes
in. So one walks back along the operands to the first instruction that a framework named; what a
program gathers as it came in has none behind it, and is told by what it is for, in front.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from xla_dtensor.report.hlo_module import Computation, Instruction
from xla_dtensor.report.stack_frames import parse_fields

__all__ = ["Neighbours"]

_REACH = 64
"""Instructions that are looked at: the neighbourhood, not the whole program."""

_RENDEZVOUS = "_xla_host_transfer_rendezvous"


class Neighbours:
    """Who uses whom in a computation.

    Args:
        computation: the computation.
    """

    def __init__(self, computation: Computation) -> None:
        self._computation = computation
        self._users: dict[str, list[Instruction]] | None = None
        self._sends: dict[str, Instruction] | None = None

    def metadata(self, instruction: Instruction) -> dict[str, str]:
        """Finds the metadata of the nearest instruction that has a name of a framework.

        Args:
            instruction: one of the computation, without metadata of its own.

        Returns:
            The fields, as `parse_fields`; none if there is nobody near.
        """
        for follow in (self._sources, self._followers):
            found = self._nearest(instruction, follow)
            if found:
                return found
        return {}

    def _nearest(
        self, start: Instruction, follow: Callable[[Instruction], Iterator[Instruction]]
    ) -> dict[str, str]:
        waiting, seen = deque([start]), {start.name}
        while waiting and len(seen) <= _REACH:
            for near in follow(waiting.popleft()):
                if near.name in seen:
                    continue
                seen.add(near.name)
                fields = parse_fields(near.attributes.get("metadata", ""))
                # Of a parameter the name is that of an argument, not of an op.
                if "/" in fields.get("op_name", "") and near.opcode != "parameter":
                    return fields
                waiting.append(near)
        return {}

    def _sources(self, instruction: Instruction) -> Iterator[Instruction]:
        table = self._computation.instructions
        for name in instruction.operand_names:
            if name in table:
                yield table[name]
        if instruction.opcode == "recv":
            send = self._send_of(instruction)
            if send is not None:
                yield send

    def _followers(self, instruction: Instruction) -> Iterator[Instruction]:
        if self._users is None:
            self._users = {}
            for user in self._computation.instructions.values():
                for name in user.operand_names:
                    self._users.setdefault(name, []).append(user)
        yield from self._users.get(instruction.name, ())

    def _send_of(self, recv: Instruction) -> Instruction | None:
        """What is received was sent by the others, as this device sends to them."""
        if self._sends is None:
            self._sends = {}
            for each in self._computation.instructions.values():
                if each.opcode == "send":
                    self._sends[_meeting(each)] = each
        return self._sends.get(_meeting(recv))


def _meeting(instruction: Instruction) -> str:
    attributes = instruction.attributes.get("frontend_attributes", "")
    return parse_fields(attributes).get(_RENDEZVOUS, instruction.name)
