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

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from xla_dtensor.report.hlo_text import (
    HloError,
    Shape,
    checked_devices,
    closing_bracket,
    parse_shape,
    read_number,
    split_commas,
    whole_lines,
)

__all__ = ["told_metadata"]


# --------------------------------- Where in the source an instruction comes from, as HLO prints it
#
# Either in the metadata of the instruction, or as a number into tables at the top of the module:
#
#     metadata={op_name="jit(f)/dot_general" source_file="a.py" source_line=7}
#     metadata={op_name="jit(f)/dot_general" stack_frame_id=3}
#
#     FileNames
#     1 "a.py"
#
#     FileLocations
#     1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=0 end_column=0}
#
#     StackFrames
#     3 {file_location_id=1 parent_frame_id=2}

_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_FIELD = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|[^\s}]+)')
_ENTRY = re.compile(r"\s*([0-9]{1,12}) (.*)")


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of the user's source.

    Attributes:
        file: the path as the compiler saw it.
        line: the line, from 1.
    """

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class StackFrames:
    """The tables of a module: each stack frame's line, and the frame that called it.

    Example:
        >>> table = ["FileNames", '1 "a.py"', "", "FileLocations", "1 {file_name_id=1 line=7}"]
        >>> table += ["", "StackFrames", "1 {file_location_id=1 parent_frame_id=1}"]
        >>> str(StackFrames.parse(table).stack(1)[0])
        'a.py:7'
    """

    lines: dict[int, SourceLine] = field(default_factory=dict[int, SourceLine])
    parents: dict[int, int] = field(default_factory=dict[int, int])

    @classmethod
    def parse(cls, text_lines: list[str]) -> StackFrames:
        """Reads the tables from the lines of a module; no frames if it has none."""
        tables = _tables(text_lines)
        files = {key: unquoted(words) for key, words in tables["FileNames"].items()}
        places = {key: parse_fields(words) for key, words in tables["FileLocations"].items()}
        frames = {key: parse_fields(words) for key, words in tables["StackFrames"].items()}
        lines: dict[int, SourceLine] = {}
        parents: dict[int, int] = {}
        # XLA prints a parent as its number plus one (1: none), so that a frame may name itself;
        # a table where 0 is printed for none has the numbers themselves.
        printed = {key: read_number(frame.get("parent_frame_id")) for key, frame in frames.items()}
        shift = 0 if 0 in printed.values() else 1
        for key, frame in frames.items():
            place = places.get(read_number(frame.get("file_location_id")), {})
            file = files.get(read_number(place.get("file_name_id")))
            if file is not None:
                lines[key] = SourceLine(file, read_number(place.get("line")))
            parents[key] = printed[key] - shift
        return cls(lines, parents)

    def source(self, metadata: Mapping[str, str]) -> tuple[SourceLine, ...]:
        """Reads the lines of source that led to an instruction.

        Args:
            metadata: its fields, as `parse_fields`. Older versions of XLA print the innermost file
                and line, newer ones a frame of the tables.

        Returns:
            The lines, innermost first; none if nothing says.

        Example:
            >>> StackFrames().source({"source_file": "a.py", "source_line": "7"})
            (SourceLine(file='a.py', line=7),)
        """
        if "source_file" in metadata:
            line = read_number(metadata.get("source_line"))
            return (SourceLine(metadata["source_file"], line),)
        return self.stack(read_number(metadata.get("stack_frame_id")))

    def stack(self, frame_id: int) -> tuple[SourceLine, ...]:
        """Walks out from a frame.

        Args:
            frame_id: the frame.

        Returns:
            Its line and those that called it, innermost first; frames that follow each other on
            one line (JAX makes them inside a scan) are one.
        """
        lines: list[SourceLine] = []
        seen: set[int] = set()
        while frame_id in self.parents and frame_id not in seen:
            seen.add(frame_id)
            line = self.lines.get(frame_id)
            if line is not None and line not in lines[-1:]:
                lines.append(line)
            frame_id = self.parents[frame_id]
        return tuple(lines)


def parse_fields(text: str) -> dict[str, str]:
    """Reads `{name=value name="value" ...}`.

    Args:
        text: as HLO prints metadata.

    Returns:
        The values by name, without their quotes.

    Example:
        >>> parse_fields('{op_name="jit(f)/dot" source_line=7}')
        {'op_name': 'jit(f)/dot', 'source_line': '7'}
    """
    return {name: unquoted(words) for name, words in _FIELD.findall(text)}


def unquoted(text: str) -> str:
    """Takes the quotes and escapes off a quoted string.

    Args:
        text: quoted or not.

    Returns:
        The string itself.

    Example:
        >>> unquoted('"a.py"')
        'a.py'
    """
    text = text.strip()
    quoted = len(text) > 1 and text.startswith('"') and text.endswith('"')
    return re.sub(r"\\(.)", r"\1", text[1:-1]) if quoted else text


def _tables(text_lines: list[str]) -> dict[str, dict[int, str]]:
    tables: dict[str, dict[int, str]] = {name: {} for name in _TABLES}
    current: dict[int, str] | None = None
    for line in text_lines:
        if line in tables:
            current = tables[line]
        elif current is not None and (match := _ENTRY.fullmatch(line)):
            current[int(match[1])] = match[2]
        else:
            current = None
    return tables


# --------------------------------------------------------------------------------------- Hlo module

# The name, the shape (which may have spaces, but no "word(" after one) and the opcode.
_INSTRUCTION = re.compile(r"\s*(ROOT )?%?([\w.\-]+) = (\S.*?) ([a-z][\w\-]*)\(")
_COMPUTATION = re.compile(r"\s*(ENTRY )?\s*%?([\w.\-]+)\s*(?:\(.*\)\s*->\s*.*)?\{\s*$")
_HEADER_NUMBER = re.compile(r"\b(num_partitions|replica_count)=(\d+)")
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
        attributes: dict[str, str] = {}
        for attribute in self._parts[1]:
            name, equals, words = attribute.partition("=")
            if name.strip() == "device_ids":  # the second half of groups printed as mesh axes
                attributes["replica_groups"] = (
                    f"{attributes.get('replica_groups', '')}, {attribute.strip()}"
                )
            elif equals:
                attributes[name.strip()] = words
        return attributes

    @cached_property
    def _parts(self) -> tuple[list[str], list[str]]:
        end = closing_bracket(self.rest)
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
        users_of: dict[str, list[Instruction]] = {}
        for user in self.instructions.values():
            for name in user.operand_names:
                users_of.setdefault(name, []).append(user)
        return users_of

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

    @cached_property
    def runs(self) -> dict[str, Runs]:
        """How each computation runs, by its name; one that nothing calls runs once."""
        return _computation_runs(self)

    def called(self, instruction: Instruction, attribute: str) -> Computation | None:
        """The computation that an attribute names, such as "body" or "calls"; None for none."""
        return self.computations.get(instruction.attributes.get(attribute, "").removeprefix("%"))

    @classmethod
    def parse(cls, text: str) -> HloModule:
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
        computations = {
            computation.name: computation
            for computation in _computations(list(whole_lines(lines)), unread)
        }
        frames = StackFrames.parse(lines)
        return replace(header, computations=computations, frames=frames, unread=tuple(unread))

    @classmethod
    def parse_header(cls, text: str) -> HloModule:
        """Reads the first line alone.

        Args:
            text: as for `parse`.

        Returns:
            The module, without computations and frames.

        Raises:
            HloError: text that is no HLO module.
        """
        head = _header(text)
        numbers = {name: read_number(digits) for name, digits in _HEADER_NUMBER.findall(head)}
        partitions = numbers.get("num_partitions", 1) or 1
        replicas = numbers.get("replica_count", 1) or 1
        checked_devices(partitions * replicas, head)
        return cls(partitions, replicas)


def _header(text: str) -> str:
    start = text.lstrip()
    if not start.startswith("HloModule"):
        raise HloError(
            f"Text that starts with {start[:40]!r} was given. It is no HLO module, which starts "
            "with 'HloModule'. Pass compiled.as_text(), or the text of an XLA dump."
        )
    return start.partition("\n")[0]


def _computations(lines: list[str], unread: list[tuple[str, str]]) -> Iterator[Computation]:
    computation: Computation | None = None
    instructions: dict[str, Instruction] = {}
    for line in lines:
        if computation is None:
            match = _COMPUTATION.match(line) if line.rstrip().endswith("{") else None
            if match:
                instructions = {}
                computation = Computation(match[2], bool(match[1]), instructions)
        elif _END.fullmatch(line):
            yield computation
            computation = None
        elif match := _INSTRUCTION.match(line):
            is_root, name, shape, opcode = match.groups()
            instructions[name] = Instruction(
                name, shape, opcode, bool(is_root), line[match.end() :]
            )
        elif not _LITERAL.fullmatch(line):
            unread.append((computation.name, line.strip()))
    if computation is not None:
        unread.append((computation.name, "its closing bracket is not there"))


# ---------------------------------------------------- How often a while loop of an HLO module runs
#
# XLA for CPU and GPU prints the number (`known_trip_count`). XLA for TPU does not, so that it is
# worked out here, for the loops that counting makes (``values``; JAX's own without x64):
#
#     condition   compare(i, 4), direction=LT        i: an element of the loop's tuple
#     body        tuple(..., add(i, 1), ...)         in the same place
#     start       tuple(..., 0, ...)
#
# Any other loop has no known count.

_KNOWN = re.compile(r'"known_trip_count":\{"n":"?(\d+)"?\}')
_ELEMENT = re.compile(r"\bindex=(\d+)")


def _trip_count(module: HloModule, caller: Computation, loop: Instruction) -> int | None:
    """How often a while loop of a computation runs; None if that is not known."""
    match = _KNOWN.search(loop.rest)
    if match:
        return read_number(match[1])
    condition, body = module.called(loop, "condition"), module.called(loop, "body")
    if condition is None or body is None:
        return None
    return _Loop(caller, loop, condition, body).count()


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


def _tuple_element(instruction: Instruction | None, element: int) -> str | None:
    if (
        instruction is None
        or instruction.opcode != "tuple"
        or element >= len(instruction.operand_names)
    ):
        return None
    return instruction.operand_names[element]


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
    digits = source.operands[0] if source.operands else ""
    return read_number(digits) if re.fullmatch(r"-?[0-9]{1,18}", digits) else None


# ------------------------ How often each computation of an HLO module runs, and which run in loops
#
# Each call multiplies: a computation called from a loop of 4 inside a loop of 3 runs 12 times. Of a
# conditional every branch is counted, as if taken.

_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)"
)
_CALLED_LIST = re.compile(r"\b(?:branch_computations|called_computations|calls)=\{([^{}]*)\}")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_CALLERS = ("fusion", "call", "while", "conditional", "custom-call", "async-start", "call-start")


@dataclass(frozen=True, slots=True)
class Runs:
    """How a computation runs.

    Attributes:
        times: how often in one run of the program; None if a loop around it has no known count.
        in_loop: whether a while loop is around it.
        caller: the instruction that calls it; None for the entry. The last one, if several do.
        calling: the name of the computation in which that stands; "" for the entry.
    """

    times: int | None
    in_loop: bool
    caller: Instruction | None
    calling: str = ""


def _computation_runs(module: HloModule) -> dict[str, Runs]:
    calls: dict[str, list[tuple[str, Instruction, int | None]]] = {}
    for computation in module.computations.values():
        for instruction in computation.instructions.values():
            if instruction.opcode in _CALLERS:
                is_loop = instruction.opcode == "while"
                trips = _trip_count(module, computation, instruction) if is_loop else 1
                for called in called_computations(instruction):
                    calls.setdefault(called, []).append((computation.name, instruction, trips))
    runs: dict[str, Runs] = {}
    for name in module.computations:
        _count(name, calls, runs)
    return runs


def called_computations(instruction: Instruction) -> tuple[str, ...]:
    """Lists the computations that an instruction calls.

    Args:
        instruction: any instruction.

    Returns:
        Their names, without %.
    """
    text = _QUOTED.sub('""', instruction.rest)
    names = _CALLED.findall(text)
    for listed in _CALLED_LIST.findall(text):
        names += [name.strip().removeprefix("%") for name in listed.split(",") if name.strip()]
    return tuple(names)


def _count(
    name: str,
    calls: dict[str, list[tuple[str, Instruction, int | None]]],
    runs: dict[str, Runs],
) -> Runs:
    if name in runs:
        return runs[name]
    # What calls itself, which no program does, is taken to run an unknown number of times.
    runs[name] = Runs(None, False, None)
    run = Runs(0, False, None) if name in calls else Runs(1, False, None)
    for calling, instruction, trips in calls.get(name, ()):
        outer = _count(calling, calls, runs)
        times = None
        if run.times is not None and outer.times is not None and trips is not None:
            times = run.times + outer.times * trips
        in_loop = run.in_loop or outer.in_loop or instruction.opcode == "while"
        run = Runs(times, in_loop, instruction, calling)
    runs[name] = run
    return run


# ---------------------------------------------- Metadata of instructions that XLA made without any
#
# That of their neighbours.
#
# Where XLA for TPU splits an all-reduce over several slices into a reduce-scatter, a send and a
# recv and an all-gather, none of them says for what. What is reduced does: the product whose result
# goes in. So one walks back along the operands to the first instruction that a framework named;
# what a program gathers as it came in has none behind it, and is told by what it is for, in front.
#
# Four things must not mislead:
#
# * An op that only moves numbers (a layer's slice of the stacked weights) says little. One walks
#   on, and comes back to it if there is nothing else.
# * A transfer that XLA spreads over several steps runs beside somebody else's product: the steps in
#   between are fusions with that product's name. The way from start to done is that of the
#   semaphores, which nobody else has.
# * What XLA fetches a turn of a loop ahead is used in the next turn, and what it reduces a turn
#   late was made in the last one: the ways go on between the body's result and its parameter.
# * A collective in a fusion has its neighbours outside, where the fusion is called.

_REACH = 64
"""Instructions that are looked at: the neighbourhood, not the whole program."""

RENDEZVOUS = "_xla_host_transfer_rendezvous"
"""The frontend attribute that a send and its recv have in common."""
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
    module: HloModule, computation: Computation, instruction: Instruction
) -> dict[str, str]:
    """Finds what there is to say about an instruction.

    Args:
        module: the module.
        computation: where the instruction stands.
        instruction: any.

    Returns:
        The fields of its own metadata; else those of its fusion or its start; else those of a
        neighbour of either; none if nobody says anything.
    """
    runs = module.runs[computation.name]
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

    def metadata(self, instruction: Instruction) -> dict[str, str]:
        """The fields of the nearest instruction that has a framework's name; none if nobody has."""
        for may_move in (False, True):
            for follow in (self._sources, self._followers):
                fields = self._nearest(instruction, follow, may_move)
                if fields:
                    return fields
        return {}

    def metadata_of_user(self, instruction: Instruction, module: HloModule) -> dict[str, str]:
        """The fields of the op in a fusion that uses an instruction; none if no fusion does."""
        for user in self._users_of(instruction):
            inside = module.called(user, "calls")
            if user.opcode != "fusion" or inside is None:
                continue
            place = str(user.operand_names.index(instruction.name))
            for parameter in inside.instructions.values():
                if parameter.opcode == "parameter" and parameter.operands == (place,):
                    metadata = Neighbours(inside).metadata(parameter)
                    if metadata:
                        return metadata
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
            send = self._sends.get(_meeting(instruction))
            if send is not None:
                yield send

    def _followers(self, instruction: Instruction) -> Iterator[Instruction]:
        if instruction.name.startswith(_START):
            end = self._done_of(instruction)
            if end is not None:
                yield end
                return
        for user in self._users_of(instruction):
            if user.is_root and user.opcode == "tuple":
                yield from self._next_turn(user, instruction)
            else:
                yield user

    def _last_turn(self, element: Instruction) -> Iterator[Instruction]:
        table, root = self._computation.instructions, self._computation.root
        parameter = table.get(element.operand_names[0]) if element.operand_names else None
        if (
            parameter is None
            or parameter.opcode != "parameter"
            or root is None
            or root.opcode != "tuple"
        ):
            return
        index, names = element.attributes.get("index", ""), root.operand_names
        if index.isdecimal() and int(index) < len(names) and names[int(index)] in table:
            yield table[names[int(index)]]

    def _next_turn(self, root: Instruction, part: Instruction) -> Iterator[Instruction]:
        places = {str(i) for i, name in enumerate(root.operand_names) if name == part.name}
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

    @cached_property
    def _sends(self) -> dict[str, Instruction]:
        """By meeting: what is received was sent by the others, as this device sends to them."""
        table = self._computation.instructions.values()
        return {
            _meeting(instruction): instruction
            for instruction in table
            if instruction.opcode == "send"
        }


def _meeting(instruction: Instruction) -> str:
    attributes = instruction.attributes.get("frontend_attributes", "")
    return parse_fields(attributes).get(RENDEZVOUS, instruction.name)
