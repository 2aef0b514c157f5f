"""The arrays that a scheduled program makes: when each is born, when it is last read, which share.

The instructions of a scheduled module stand in the order in which they run. This file follows them
once, loop bodies and called computations in place, and gives every array that an instruction makes
a `Value` with its time of birth and of last use:

* a tuple, an element of one, a bitcast: no array, another name for one;
* a while loop: the array before it, the body's parameter, the body's result and the loop's result
  have one place in memory; what the body only passes through is one array all the while;
* start and done of an async operation: the done gives what the start has made, and until then
  what it reads from must stay;
* an update in place (dynamic-update-slice, also as the root of a fusion), and what the compiler
  prints as an alias (output_to_operand_aliasing): the result takes its operand's place;
* what happens inside a fusion takes no memory of its own.

Values that have one place in memory belong to one group.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from xla_dtensor.report.hlo import Computation, HloModule, Instruction, called_computations
from xla_dtensor.report.hlo_text import (
    DEVICE_SPACE,
    ArrayShape,
    HloError,
    LaidArray,
    LaidShape,
    parse_laid_shape,
)

__all__ = ["LivePeak", "live_peak"]


# ------------------------------------------------------- The arrays that a scheduled program makes

# What a name stands for: a value, or a tuple of such.
_Node: TypeAlias = "int | tuple[_Node, ...]"

_NAMES = ("bitcast", "optimization-barrier", "all-reduce-done", "domain")
_UPDATES = ("dynamic-update-slice", "scatter")
_INDEX = re.compile(r"\bindex=([0-9]{1,9})\b")
_NAME = re.compile(r"%([\w.\-]+)")
_ALIASING = re.compile(r"output_to_operand_aliasing=\{(.*?\}\))\}")
_ALIAS = re.compile(r"\{([0-9, ]*)\}: \(([0-9]{1,9}), \{([0-9, ]*)\}\)")
_NUMBER = re.compile(r"[0-9]{1,9}")


@dataclass(slots=True)
class Value:
    """An array that an instruction makes.

    Attributes:
        array: its shape and layout.
        instruction: what makes it.
        birth: when; times count the instructions in the order in which they run.
        death: when it is last read.
        is_input: whether it is a parameter of the program.
    """

    array: LaidArray
    instruction: Instruction
    birth: int
    death: int
    is_input: bool = False


@dataclass
class ValueFlow:
    """The values of a program.

    Attributes:
        values: all of them; their numbers are their places here.
        results: the numbers of those that the program gives back, in order.
        inputs: the number of each parameter's value.
    """

    module: HloModule
    values: list[Value] = field(default_factory=list[Value])
    results: tuple[int, ...] = ()
    inputs: dict[int, int] = field(default_factory=dict[int, int])
    _parents: list[int] = field(default_factory=list[int])
    _time: int = 0
    _open: list[str] = field(default_factory=list[str])

    @classmethod
    def of(cls, module: HloModule) -> ValueFlow:
        """Follows a program.

        Args:
            module: a scheduled module, read whole.

        Returns:
            Its values.

        Raises:
            HloError: computations that call themselves.
        """
        flow = cls(module)
        entry = next(
            (computation for computation in module.computations.values() if computation.is_entry),
            None,
        )
        if entry is not None:
            root = flow._walk(entry, None)
            flow.results = tuple(_leaves(root))
            for number in flow.results:
                flow._touch(number)
        return flow

    def group(self, number: int) -> int:
        """The number that stands for all values with the same place in memory.

        Args:
            number: a value's.

        Returns:
            The group's number: that of one of its values.
        """
        while self._parents[number] != number:
            self._parents[number] = self._parents[self._parents[number]]
            number = self._parents[number]
        return number

    def groups(self) -> dict[int, list[Value]]:
        """The values by group."""
        groups: dict[int, list[Value]] = {}
        for number, value in enumerate(self.values):
            groups.setdefault(self.group(number), []).append(value)
        return groups

    def _join(self, first: _Node, second: _Node) -> None:
        for left, right in zip(_leaves(first), _leaves(second), strict=False):
            self._parents[self.group(right)] = self.group(left)

    def _touch(self, node: _Node) -> None:
        for number in _leaves(node):
            self.values[number].death = max(self.values[number].death, self._time)

    def _new(self, instruction: Instruction, shape: LaidShape | None = None) -> _Node:
        if shape is None:
            shape = parse_laid_shape(instruction.shape_text)
        if isinstance(shape, tuple):
            return tuple(self._new(instruction, part) for part in shape)
        self.values.append(Value(shape, instruction, self._time, self._time))
        self._parents.append(len(self.values) - 1)
        return len(self.values) - 1

    def _walk(self, computation: Computation, arguments: list[_Node] | None) -> _Node:
        """Follows one computation; with `arguments` None, the program itself."""
        if computation.name in self._open:
            raise HloError(
                f"A program was read in which computation={computation.name!r} calls itself. HLO "
                "has no recursion. Pass HLO text as XLA prints it."
            )
        self._open.append(computation.name)
        nodes: dict[str, _Node] = {}
        last: _Node = ()
        for instruction in computation.instructions.values():
            self._time += 1
            if instruction.opcode == "parameter":
                node = self._parameter(instruction, arguments)
            else:
                operands = [nodes.get(name, ()) for name in _operand_names(instruction)]
                node = self._step(instruction, operands)
            nodes[instruction.name] = node
            last = node if instruction.is_root else last
        self._open.pop()
        return last

    def _parameter(self, instruction: Instruction, arguments: list[_Node] | None) -> _Node:
        text = instruction.operands[0] if instruction.operands else ""
        number = int(text) if _NUMBER.fullmatch(text) else 0
        if arguments is not None:
            return arguments[number] if number < len(arguments) else self._new(instruction)
        node = self._new(instruction)
        leaves = list(_leaves(node))
        for place, leaf in enumerate(leaves, start=0 if len(leaves) > 1 else number):
            self.values[leaf].is_input = True
            self.inputs[place] = leaf
        return node

    def _step(self, instruction: Instruction, operands: list[_Node]) -> _Node:
        opcode = instruction.opcode
        first: _Node = operands[0] if operands else ()
        if opcode == "tuple":
            return tuple(operands)
        if opcode == "get-tuple-element":
            index = _INDEX.search(instruction.rest)
            return _element(first, int(index[1]) if index else 0)
        if opcode in _NAMES or opcode.endswith("-update"):
            return first if len(operands) == 1 else tuple(operands)
        if opcode == "while":
            return self._loop(instruction, first)
        if opcode in ("call", "conditional"):
            return self._call(instruction, operands)
        self._touch(tuple(operands))
        if opcode.endswith("-done"):
            return self._done(instruction, first)
        node = self._new(instruction)
        self._alias(instruction, operands, node)
        return node

    def _done(self, instruction: Instruction, started: _Node) -> _Node:
        place = 0 if instruction.opcode in ("copy-done", "recv-done") else 1
        node = _element(started, place)
        if instruction.opcode == "recv-done":
            return (node, ())
        return node if isinstance(started, tuple) and len(started) > place else started

    def _alias(self, instruction: Instruction, operands: list[_Node], node: _Node) -> None:
        opcode = instruction.opcode
        first: _Node = operands[0] if operands else ()
        if opcode == "copy-start":  # (what it makes, what it reads, ...)
            self._join(first, _element(node, 1))
        elif opcode == "send" or (opcode.endswith("-start") and opcode != "all-reduce-start"):
            # ((what it reads), what it makes, ...)
            self._join(tuple(operands), _element(node, 0))
        elif opcode in _UPDATES:
            self._join(first, node)
        elif opcode == "fusion":
            for output, operand in self._fused_updates(instruction):
                if operand < len(operands):
                    self._join(operands[operand], node if output is None else _at(node, [output]))
        listed = _ALIASING.search(instruction.rest)
        for output, number, place in _ALIAS.findall(listed[1]) if listed else ():
            if int(number) < len(operands):
                source = _at(operands[int(number)], _numbers(place))
                self._join(source, _at(node, _numbers(output)))

    def _fused_updates(self, fusion: Instruction) -> Iterator[tuple[int | None, int]]:
        """Which of a fusion's outputs (None: the only one) updates which operand in place."""
        for name in called_computations(fusion):
            fused = self.module.computations.get(name)
            if fused is None or fused.root is None:
                continue
            root = fused.root
            if root.opcode != "tuple":
                parts: list[tuple[int | None, str]] = [(None, root.name)]
            else:
                parts = list(enumerate(root.operand_names))
            for output, part in parts:
                parameter = _updated_parameter(fused, part)
                if parameter is not None:
                    yield output, parameter

    def _loop(self, loop: Instruction, start: _Node) -> _Node:
        body, condition = self.module.called(loop, "body"), self.module.called(loop, "condition")
        if body is None:
            self._touch(start)
            return self._new(loop)
        self._time += 1
        shape = parse_laid_shape(loop.shape_text)
        carried = self._new(loop, shape)
        self._touch(start)
        if condition is not None:
            self._walk(condition, [carried])
        root = self._walk(body, [carried])
        self._time += 1
        self._touch(root)
        node = self._new(loop, shape)
        places = zip(_leaves(start), _leaves(carried), _leaves(root), strict=False)
        same: dict[int, int] = {}
        for (entry, inside, end), outside in zip(places, _leaves(node), strict=False):
            self._join(entry, inside)
            self._join(entry, end)
            self._join(entry, outside)
            if inside == end:  # passed through: one array, from before the loop until after it
                self.values[entry].death = self._time
                same[outside] = entry
        return _replaced(node, same)

    def _call(self, instruction: Instruction, operands: list[_Node]) -> _Node:
        names = called_computations(instruction)
        called = [self.module.computations[n] for n in names if n in self.module.computations]
        if instruction.opcode == "call" and len(called) == 1:
            return self._walk(called[0], operands)
        ends: list[_Node] = []
        for place, branch in enumerate(called):
            arguments = operands[place + 1 : place + 2] or operands[-1:]
            self._touch(tuple(operands[1:]))
            ends.append(self._walk(branch, arguments))
            self._time += 1
            self._touch(ends[-1])
        self._touch(tuple(operands))
        node = self._new(instruction)
        for end in ends:
            self._join(end, node)
        return node


def _operand_names(instruction: Instruction) -> tuple[str, ...]:
    # The attributes may be long: they are not read where no bracket stands among the operands.
    text = instruction.rest.partition(")")[0]
    if "(" in text or "{" in text or "%" not in text:
        return instruction.operand_names
    return tuple(_NAME.findall(text))


def _leaves(node: _Node) -> Iterator[int]:
    if isinstance(node, int):
        yield node
    else:
        for part in node:
            yield from _leaves(part)


def _element(node: _Node, place: int) -> _Node:
    if isinstance(node, int):
        return node
    return node[place] if place < len(node) else ()


def _at(node: _Node, places: list[int]) -> _Node:
    for place in places:
        node = _element(node, place)
    return node


def _numbers(text: str) -> list[int]:
    return [int(number) for number in _NUMBER.findall(text)]


def _replaced(node: _Node, numbers: dict[int, int]) -> _Node:
    if isinstance(node, int):
        return numbers.get(node, node)
    return tuple(_replaced(part, numbers) for part in node)


def _updated_parameter(fused: Computation, name: str) -> int | None:
    """The number of the parameter that an instruction of a fusion updates in place."""
    updates = False
    for _ in fused.instructions:  # no path is longer
        source = fused.instructions.get(name)
        if source is None or not source.operands:
            return None
        if source.opcode == "parameter":
            number = _NUMBER.fullmatch(source.operands[0])
            return int(number[0]) if updates and number else None
        if source.opcode not in ("bitcast", *_UPDATES):
            return None
        updates = updates or source.opcode in _UPDATES
        name = source.operand_names[0]
    return None


# ------------------------------ Which temporaries are in a device's memory when they take the most
#
# An estimate.
#
# The arrays that live at each moment are known from the schedule (see above); where the
# compiler puts them is not. The estimate is the sum of those that live at the worst moment. The
# compiler's figure is larger where gaps between arrays cannot be used, and smaller where it puts
# temporaries into memory that results take later.


@dataclass(frozen=True, slots=True)
class LiveBuffer:
    """A temporary array.

    Attributes:
        bytes: what it takes in memory, tiles filled up.
        shape: dtype and dims.
        instruction: what makes it: of several values in one place, the largest's; of equal ones
            the first that says what it is for, which a loop and an empty buffer do not.
    """

    bytes: int
    shape: ArrayShape
    instruction: Instruction


@dataclass(frozen=True, slots=True)
class LivePeak:
    """The moment when the temporaries take the most.

    Attributes:
        bytes: what they take then.
        buffers: those that live then, the largest first.
        all_bytes: what all temporaries would take without sharing any memory.
    """

    bytes: int = 0
    buffers: tuple[LiveBuffer, ...] = ()
    all_bytes: int = 0


def live_peak(module: HloModule) -> LivePeak:
    """Finds the moment when a program's temporaries take the most.

    Args:
        module: a scheduled module (`is_scheduled=true`), read whole.

    Returns:
        The peak; 0 bytes of a module without temporaries.

    Example:
        >>> text = '''HloModule m, is_scheduled=true
        ... ENTRY %main (p: f32[8]) -> f32[8] {
        ...   %p = f32[8]{0} parameter(0)
        ...   %a = f32[8]{0} negate(%p)
        ...   ROOT %b = f32[8]{0} add(%a, %p)
        ... }'''
        >>> live_peak(HloModule.parse(text)).bytes
        32
    """
    flow = ValueFlow.of(module)
    outside = {flow.group(number) for number in flow.results}
    outside |= {flow.group(number) for number, value in enumerate(flow.values) if value.is_input}
    steps: list[tuple[int, int, int]] = []
    sizes: dict[int, int] = {}
    groups = {group: values for group, values in flow.groups().items() if group not in outside}
    for group, values in groups.items():
        sizes[group] = max(_bytes(value) for value in values)
        if sizes[group]:
            for birth, death in _spans(values):
                steps += [(birth, 1, group), (death + 1, 0, group)]
    alive: set[int] = set()
    best: set[int] = set()
    most = live = 0
    for _, begins, group in sorted(steps):
        if begins:
            alive.add(group)
            live += sizes[group]
            if live > most:
                most, best = live, set(alive)
        else:
            alive.discard(group)
            live -= sizes[group]
    buffers = [_buffer(groups[group]) for group in best]
    buffers.sort(key=lambda buffer: (-buffer.bytes, buffer.instruction.name))
    return LivePeak(most, tuple(buffers), sum(sizes.values()))


def _bytes(value: Value) -> int:
    made_by = value.instruction.opcode
    if value.array.space != DEVICE_SPACE or made_by == "constant":
        return 0
    return value.array.padded_bytes


def _spans(values: list[Value]) -> list[tuple[int, int]]:
    """When one of them lives: spans that do not overlap."""
    spans: list[tuple[int, int]] = []
    for birth, death in sorted((value.birth, value.death) for value in values):
        if spans and birth <= spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], max(death, spans[-1][1]))
        else:
            spans.append((birth, death))
    return spans


def _buffer(values: list[Value]) -> LiveBuffer:
    largest = max(values, key=lambda value: (_bytes(value), _is_named(value)))
    return LiveBuffer(_bytes(largest), largest.array.shape, largest.instruction)


def _is_named(value: Value) -> bool:
    text = value.instruction.rest
    return (
        value.instruction.opcode != "while" and "AllocateBuffer" not in text and "op_name=" in text
    )
