"""HLO text as computations of instructions, read only as far as a report needs.

    HloModule jit_f, is_scheduled=true, num_partitions=8

    %add (x: f32[], y: f32[]) -> f32[] {
      ...
    }

    ENTRY %main (param: f32[8,16]) -> f32[8,16] {
      %param = f32[8,16]{1,0} parameter(0)
      ROOT %all-reduce = f32[8,16]{1,0} all-reduce(%param), replica_groups={}, to_apply=%add
    }

Each instruction is found by one regular expression; its operands and attributes are taken apart
only when asked for, since of the 100,000 instructions of a large program few are collectives.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from xla_dtensor.report.errors import HloError
from xla_dtensor.report.hlo_lines import whole_lines
from xla_dtensor.report.hlo_numbers import checked_devices, read_number
from xla_dtensor.report.hlo_shape import Shape, parse_shape
from xla_dtensor.report.stack_frames import StackFrames

# The name, the shape (which may have spaces, but no "word(" after one) and the opcode.
_INSTRUCTION = re.compile(r"\s*(ROOT )?%?([\w.\-]+) = (\S.*?) ([a-z][\w\-]*)\(")
_COMPUTATION = re.compile(r"\s*(ENTRY )?\s*%?([\w.\-]+)\s*(?:\(.*\)\s*->\s*.*)?\{\s*$")
_HEADER_NUMBER = re.compile(r"\b(num_partitions|replica_count)=(\d+)")
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[(){}\[\],]|[^"(){}\[\],]+|"')
_COMMENT = re.compile(r"/\*.*?\*/")
_END = re.compile(r"\s*\}(?:\s*,.*)?\s*")
# A line of a constant that is printed over several: numbers and brackets.
_LITERAL = re.compile(r"[\s\d{}(),.+\-]*(?:(?:true|false|inf|nan|[eE])[\s\d{}(),.+\-]*)*")


@dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
        name: its name, without %.
        shape_text: the shape of its result, as printed.
        opcode: what it does, "all-reduce", "fusion", ...
        is_root: whether it is the result of its computation.
        rest: what stands after the opening parenthesis of its operands.
    """

    name: str
    shape_text: str
    opcode: str
    is_root: bool
    rest: str

    @property
    def shape(self) -> Shape:
        """The shape of the result."""
        return parse_shape(self.shape_text)

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """The operands as printed, comments left out."""
        return tuple(_COMMENT.sub("", operand).strip() for operand in self._parts[0])

    @property
    def operand_names(self) -> tuple[str, ...]:
        """The names of the operands, without % and shapes."""
        return tuple(operand.split(" ")[-1].removeprefix("%") for operand in self.operands)

    @cached_property
    def attributes(self) -> dict[str, str]:
        """The attributes by name, their values as printed."""
        found: dict[str, str] = {}
        for attribute in self._parts[1]:
            name, equals, value = attribute.partition("=")
            if name.strip() == "device_ids":  # the second half of groups printed as mesh axes
                found["replica_groups"] = f"{found.get('replica_groups', '')}, {attribute.strip()}"
            elif equals:
                found[name.strip()] = value
        return found

    @cached_property
    def _parts(self) -> tuple[list[str], list[str]]:
        end = _closing(self.rest)
        return split_commas(self.rest[:end]), split_commas(self.rest[end + 1 :])


@dataclass(frozen=True)
class Computation:
    """A computation.

    Attributes:
        name: its name, without %.
        is_entry: whether the program starts here.
        instructions: its instructions by name, in the order printed.
    """

    name: str
    is_entry: bool
    instructions: dict[str, Instruction]

    @property
    def root(self) -> Instruction | None:
        """The instruction whose result is the computation's."""
        return next((line for line in self.instructions.values() if line.is_root), None)

    @cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """By the name of each instruction, those of the computation that it is an operand of."""
        found: dict[str, list[Instruction]] = {}
        for user in self.instructions.values():
            for name in user.operand_names:
                found.setdefault(name, []).append(user)
        return found

    def operand_shapes(self, instruction: Instruction) -> tuple[Shape, ...]:
        """Finds the shapes of an instruction's operands.

        Args:
            instruction: one of this computation.

        Returns:
            The shape of each operand: as printed before its name, or of the instruction it names.

        Raises:
            HloError: an operand that is nowhere defined.
        """
        shapes: list[Shape] = []
        for operand, name in zip(instruction.operands, instruction.operand_names, strict=True):
            text, space, _ = operand.rpartition(" ")
            source = self.instructions.get(name)
            if not space and source is None:
                raise HloError(
                    f"Instruction {instruction.name!r} has the operand {operand!r}. Computation "
                    f"{self.name!r} does not define it. Pass the whole text of the module."
                )
            shapes.append(source.shape if source else parse_shape(text))
        return tuple(shapes)


@dataclass(frozen=True)
class HloModule:
    """A module.

    Attributes:
        num_partitions: devices that run it together, as parts of one program.
        replica_count: copies of that program.
        computations: its computations by name, in the order printed.
        frames: where in the source its instructions come from.
        unread: lines of computations that could not be read: the computation and the line.
    """

    num_partitions: int
    replica_count: int
    computations: dict[str, Computation] = field(default_factory=dict[str, Computation])
    frames: StackFrames = field(default_factory=StackFrames)
    unread: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, text: str) -> "HloModule":
        """Reads the text of a module.

        Args:
            text: as XLA prints it: `compiled.as_text()`, or a dump `*after_optimizations.txt`.

        Returns:
            The module.

        Raises:
            HloError: text that is no HLO module.

        Example:
            >>> HloModule.parse("HloModule m, num_partitions=4").num_partitions
            4
        """
        header = cls.parse_header(text)
        lines = text.splitlines()
        unread: list[tuple[str, str]] = []
        found = {each.name: each for each in _computations(list(whole_lines(lines)), unread)}
        frames = StackFrames.parse(lines)
        return replace(header, computations=found, frames=frames, unread=tuple(unread))

    @classmethod
    def parse_header(cls, text: str) -> "HloModule":
        """Reads the first line alone.

        Args:
            text: as for `parse`.

        Returns:
            The module, without computations and frames.

        Raises:
            HloError: text that is no HLO module.
        """
        head = _header(text)
        numbers = {name: read_number(value) for name, value in _HEADER_NUMBER.findall(head)}
        partitions = numbers.get("num_partitions", 1) or 1
        replicas = numbers.get("replica_count", 1) or 1
        checked_devices(partitions * replicas, head)
        return cls(partitions, replicas)


def split_commas(text: str) -> list[str]:
    """Splits at the commas that are in no brackets and no quotes.

    Args:
        text: a list as HLO prints it.

    Returns:
        Its parts, stripped, without the empty ones.

    Example:
        >>> split_commas('a={1,2}, b="x,y"')
        ['a={1,2}', 'b="x,y"']
    """
    parts, depth = [""], 0
    for token in _TOKEN.findall(text):
        depth += (token in "({[") - (token in ")}]")
        if token == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += token
    return [part.strip() for part in parts if part.strip()]


def _closing(text: str) -> int:
    """The place of the bracket that closes one opened before the text."""
    depth = 1
    for match in _TOKEN.finditer(text):
        depth += (match[0] in "({[") - (match[0] in ")}]")
        if depth == 0:
            return match.start()
    return len(text)


def _header(text: str) -> str:
    start = text.lstrip()
    if not start.startswith("HloModule"):
        raise HloError(
            f"Text that starts with {start[:40]!r} was given. It is no HLO module, which starts "
            "with 'HloModule'. Pass compiled.as_text(), or the text of an XLA dump."
        )
    return start.partition("\n")[0]


def _computations(lines: list[str], unread: list[tuple[str, str]]) -> Iterator[Computation]:
    opened: Computation | None = None
    found: dict[str, Instruction] = {}
    for line in lines:
        if opened is None:
            match = _COMPUTATION.match(line) if line.rstrip().endswith("{") else None
            if match:
                found = {}
                opened = Computation(match[2], bool(match[1]), found)
        elif _END.fullmatch(line):
            yield opened
            opened = None
        elif match := _INSTRUCTION.match(line):
            is_root, name, shape, opcode = match.groups()
            found[name] = Instruction(name, shape, opcode, bool(is_root), line[match.end() :])
        elif not _LITERAL.fullmatch(line):
            unread.append((opened.name, line.strip()))
    if opened is not None:
        unread.append((opened.name, "its closing bracket is not there"))
