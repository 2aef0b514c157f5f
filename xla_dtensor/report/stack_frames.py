"""Where in the source an instruction comes from, as HLO prints it.

Either in the metadata of the instruction, or as a number into tables at the top of the module:

    metadata={op_name="jit(f)/dot_general" source_file="a.py" source_line=7}
    metadata={op_name="jit(f)/dot_general" stack_frame_id=3}

    FileNames
    1 "a.py"

    FileLocations
    1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=0 end_column=0}

    StackFrames
    3 {file_location_id=1 parent_frame_id=2}
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from xla_dtensor.report.hlo_numbers import read_number

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
    def parse(cls, text_lines: list[str]) -> "StackFrames":
        """Reads the tables.

        Args:
            text_lines: the lines of the module.

        Returns:
            The frames; none if the module has no tables.
        """
        tables = _tables(text_lines)
        files = {key: unquoted(value) for key, value in tables["FileNames"].items()}
        places = {key: parse_fields(value) for key, value in tables["FileLocations"].items()}
        frames = {key: parse_fields(value) for key, value in tables["StackFrames"].items()}
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
        found: list[SourceLine] = []
        seen: set[int] = set()
        while frame_id in self.parents and frame_id not in seen:
            seen.add(frame_id)
            line = self.lines.get(frame_id)
            if line is not None and line not in found[-1:]:
                found.append(line)
            frame_id = self.parents[frame_id]
        return tuple(found)


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
    return {name: unquoted(value) for name, value in _FIELD.findall(text)}


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
