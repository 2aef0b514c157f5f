"""How often a while loop of an HLO module runs.

XLA for CPU and GPU prints the number (`known_trip_count`). XLA for TPU does not, so that it is
worked out here, for the loops that counting makes (``jax_counted``; JAX's own without x64):

    condition   compare(i, 4), direction=LT        i: an element of the loop's tuple
    body        tuple(..., add(i, 1), ...)         in the same place
    start       tuple(..., 0, ...)

Any other loop has no known count.
"""

import re
from dataclasses import dataclass

from xla_dtensor.report.hlo_module import Computation, HloModule, Instruction
from xla_dtensor.report.hlo_numbers import read_number

_KNOWN = re.compile(r'"known_trip_count":\{"n":"?(\d+)"?\}')
_ELEMENT = re.compile(r"\bindex=(\d+)")


def trip_count(module: HloModule, caller: Computation, loop: Instruction) -> int | None:
    """Counts the runs of a while loop's body.

    Args:
        module: the module.
        caller: the computation in which the loop stands.
        loop: the while instruction.

    Returns:
        The number of runs; None if it is not known.
    """
    known = _KNOWN.search(loop.rest)
    if known:
        return read_number(known[1])
    condition = _called(module, loop, "condition")
    body = _called(module, loop, "body")
    if condition is None or body is None:
        return None
    return _Loop(caller, loop, condition, body).count()


def _called(module: HloModule, loop: Instruction, attribute: str) -> Computation | None:
    return module.computations.get(loop.attributes.get(attribute, "").removeprefix("%"))


@dataclass(frozen=True)
class _Loop:
    caller: Computation
    loop: Instruction
    condition: Computation
    body: Computation

    def count(self) -> int | None:
        test = self.condition.root
        if test is None or test.opcode != "compare" or test.attributes.get("direction") != "LT":
            return None
        if len(test.operand_names) != 2:
            return None
        counter = self._element(self.condition, test.operand_names[0])
        limit = self._value(self.condition, test.operand_names[1])
        if counter is None or limit is None:
            return None
        start = _constant(self.caller, self._start(counter))
        step = self._step(counter)
        if start is None or step is None or step <= 0:
            return None
        return max(0, -(-(limit - start) // step))

    def _step(self, counter: int) -> int | None:
        """What the body adds to the counter."""
        added = self.body.instructions.get(self._next(counter) or "")
        if added is None or added.opcode != "add" or len(added.operand_names) != 2:
            return None
        left, right = added.operand_names
        if self._element(self.body, left) == counter:
            return self._value(self.body, right)
        if self._element(self.body, right) == counter:
            return self._value(self.body, left)
        return None

    def _value(self, computation: Computation, name: str) -> int | None:
        """A constant, or an element of the loop's tuple that starts as one and stays."""
        constant = _constant(computation, name)
        element = self._element(computation, name)
        if constant is not None or element is None:
            return constant
        stays = self._element(self.body, self._next(element)) == element
        return _constant(self.caller, self._start(element)) if stays else None

    def _element(self, computation: Computation, name: str | None) -> int | None:
        """Which element of the loop's tuple it is."""
        source = _source(computation, name)
        if source is None or source.opcode != "get-tuple-element" or not source.operand_names:
            return None
        of = _source(computation, source.operand_names[0])
        match = _ELEMENT.search(source.rest)
        is_element = match is not None and of is not None and of.opcode == "parameter"
        return read_number(match[1]) if match and is_element else None

    def _next(self, element: int) -> str | None:
        return _tuple_element(self.body.root, element)

    def _start(self, element: int) -> str | None:
        started = next(iter(self.loop.operand_names), None)
        return _tuple_element(_source(self.caller, started), element)


def _tuple_element(made: Instruction | None, element: int) -> str | None:
    if made is None or made.opcode != "tuple" or element >= len(made.operand_names):
        return None
    return made.operand_names[element]


def _source(computation: Computation, name: str | None) -> Instruction | None:
    """The instruction of that name, or what it is a copy of."""
    source, seen = computation.instructions.get(name or ""), set[str]()
    while source is not None and source.opcode in ("copy", "bitcast"):
        if source.name in seen or not source.operand_names:
            return None
        seen.add(source.name)
        source = computation.instructions.get(source.operand_names[0])
    return source


def _constant(computation: Computation, name: str | None) -> int | None:
    source = _source(computation, name)
    if source is None or source.opcode != "constant":
        return None
    value = source.operands[0] if source.operands else ""
    return read_number(value) if re.fullmatch(r"-?[0-9]{1,18}", value) else None
