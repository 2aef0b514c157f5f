"""Metadata of instructions that XLA made without any: that of their neighbours.

Where XLA for TPU splits an all-reduce over several slices into a reduce-scatter, a send and a recv
and an all-gather, none of them says for what. What is reduced does: the product whose result goes
in. So one walks back along the operands to the first instruction that a framework named; what a
program gathers as it came in has none behind it, and is told by what it is for, in front.

Four things must not mislead:

* An op that only moves numbers (a layer's slice of the stacked weights) says little. One walks on,
  and comes back to it if there is nothing else.
* A transfer that XLA spreads over several steps runs beside somebody else's product: the steps in
  between are fusions with that product's name. The way from start to done is that of the
  semaphores, which nobody else has.
* What XLA fetches a turn of a loop ahead is used in the next turn, and what it reduces a turn late
  was made in the last one: the ways go on between the body's result and its parameter.
* A collective in a fusion has its neighbours outside, where the fusion is called.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from xla_dtensor.report.call_graph import Runs
from xla_dtensor.report.hlo_module import Computation, HloModule, Instruction
from xla_dtensor.report.stack_frames import parse_fields

__all__ = ["Neighbours", "told_metadata"]

_REACH = 64
"""Instructions that are looked at: the neighbourhood, not the whole program."""

_RENDEZVOUS = "_xla_host_transfer_rendezvous"
_SEMAPHORE = "S(2)"
"""The memory space of semaphores, in a layout."""
_START, _DONE = "async-collective-start", "async-collective-done"
_NUMBERS = ("s32[]", "u32[]", "s64[]", "u64[]", "pred[]")
_MOVING = frozenset(
    {
        *("dynamic_slice", "dynamic_update_slice", "slice", "squeeze", "reshape", "transpose"),
        *("broadcast_in_dim", "copy", "stack", "while", "body"),
    }
)


def told_metadata(
    module: HloModule, computation: Computation, instruction: Instruction, runs: Runs
) -> dict[str, str]:
    """Finds what there is to say about an instruction.

    Args:
        module: the module.
        computation: where the instruction stands.
        instruction: any.
        runs: how the computation runs.

    Returns:
        The fields of its own metadata; else those of its fusion or its start; else those of a
        neighbour of either; none if nobody says anything.
    """
    own = parse_fields(instruction.attributes.get("metadata", ""))
    # From JAX 0.12 on, what moves an input of the program is named by that input alone.
    fields = own
    if _is_inputs_name(own.get("op_name", "")):
        fields = Neighbours(computation).metadata_of_user(instruction, module)
    caller, calling = runs.caller, module.computations.get(runs.calling)
    is_within = caller is not None and caller.opcode in ("fusion", "async-start")
    if not fields and caller is not None and is_within:
        fields = parse_fields(caller.attributes.get("metadata", ""))
    fields = fields or Neighbours(computation).metadata(instruction)
    if not fields and caller is not None and is_within and calling is not None:
        fields = Neighbours(calling).metadata(caller)
    return fields or own


def _is_inputs_name(name: str) -> bool:
    return name.endswith("]") and "/" not in name


class Neighbours:
    """Who uses whom in a computation.

    Args:
        computation: the computation.
    """

    def __init__(self, computation: Computation) -> None:
        self._computation = computation
        self._sends: dict[str, Instruction] | None = None

    def metadata(self, instruction: Instruction) -> dict[str, str]:
        """Finds the metadata of the nearest instruction that has a name of a framework.

        Args:
            instruction: one of the computation, without metadata of its own.

        Returns:
            The fields, as `parse_fields`; none if there is nobody near.
        """
        for may_move in (False, True):
            for follow in (self._sources, self._followers):
                found = self._nearest(instruction, follow, may_move)
                if found:
                    return found
        return {}

    def metadata_of_user(self, instruction: Instruction, module: HloModule) -> dict[str, str]:
        """Finds the metadata of who uses an instruction; of a fusion the op in it that does.

        Args:
            instruction: one of the computation.
            module: the module.

        Returns:
            The fields, as `parse_fields`; none if no fusion uses it.
        """
        for user in self._users_of(instruction):
            inside = module.computations.get(user.attributes.get("calls", "").lstrip("%"))
            if user.opcode != "fusion" or inside is None:
                continue
            place = str(user.operand_names.index(instruction.name))
            for parameter in inside.instructions.values():
                if parameter.opcode == "parameter" and parameter.operands == (place,):
                    found = Neighbours(inside).metadata(parameter)
                    if found:
                        return found
        return {}

    def _nearest(
        self,
        start: Instruction,
        follow: Callable[[Instruction], Iterator[Instruction]],
        may_move: bool,
    ) -> dict[str, str]:
        waiting, seen = deque([start]), {start.name}
        while waiting and len(seen) <= _REACH:
            for near in follow(waiting.popleft()):
                if near.name in seen:
                    continue
                seen.add(near.name)
                fields = parse_fields(near.attributes.get("metadata", ""))
                name = fields.get("op_name", "")
                # Of a parameter the name is that of an argument, not of an op.
                says = "/" in name and near.opcode != "parameter"
                if says and (may_move or name.rpartition("/")[2] not in _MOVING):
                    return fields
                waiting.append(near)
        return {}

    def _sources(self, instruction: Instruction) -> Iterator[Instruction]:
        table = self._computation.instructions
        for name in instruction.operand_names:
            if name in table and not table[name].shape_text.startswith(_NUMBERS):
                yield table[name]  # a number says where something lies, not what it is
        if instruction.opcode == "get-tuple-element":
            yield from self._last_turn(instruction)
        if instruction.opcode == "recv":
            send = self._send_of(instruction)
            if send is not None:
                yield send

    def _followers(self, instruction: Instruction) -> Iterator[Instruction]:
        if instruction.name.startswith(_START):
            done = self._done_of(instruction)
            if done is not None:
                yield done
                return
        for user in self._users_of(instruction):
            if user.is_root and user.opcode == "tuple":
                yield from self._next_turn(user, instruction)
            else:
                yield user

    def _last_turn(self, element: Instruction) -> Iterator[Instruction]:
        table, root = self._computation.instructions, self._computation.root
        given = table.get(element.operand_names[0]) if element.operand_names else None
        if given is None or given.opcode != "parameter" or root is None or root.opcode != "tuple":
            return
        index, made = element.attributes.get("index", ""), root.operand_names
        if index.isdecimal() and int(index) < len(made) and made[int(index)] in table:
            yield table[made[int(index)]]

    def _next_turn(self, result: Instruction, part: Instruction) -> Iterator[Instruction]:
        places = {str(i) for i, name in enumerate(result.operand_names) if name == part.name}
        for parameter in self._computation.instructions.values():
            if parameter.opcode == "parameter":
                for user in self._users_of(parameter):
                    is_element = user.opcode == "get-tuple-element"
                    if is_element and user.attributes.get("index") in places:
                        yield user

    def _done_of(self, start: Instruction) -> Instruction | None:
        """Where a transfer ends that runs beside other work: the way of its semaphores."""
        waiting, seen = deque([start]), {start.name}
        while waiting:
            for user in self._users_of(waiting.popleft()):
                if user.name.startswith(_DONE):
                    return user
                is_other = user.opcode == "get-tuple-element" and _SEMAPHORE not in user.shape_text
                if user.name not in seen and not is_other:
                    seen.add(user.name)
                    waiting.append(user)
        return None

    def _users_of(self, instruction: Instruction) -> list[Instruction]:
        return self._computation.users.get(instruction.name, [])

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
