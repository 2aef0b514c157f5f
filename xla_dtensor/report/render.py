"""A report in words and tables, as a document for the terminal, Markdown or HTML."""

from __future__ import annotations

import io
import math
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from mesh_utils import Axis
from xla_dtensor.report.collective import AXIS_PART, axis_names
from xla_dtensor.report.finding import PHASES, CollectiveLine, Finding, Origin, starred
from xla_dtensor.report.reading import CollectiveSummary
from xla_dtensor.report.report import MeshAxis
from xla_dtensor.report.texts import bytes_text, seconds_text, share_text

if TYPE_CHECKING:
    from xla_dtensor.report.compile_report import CompileReport

__all__ = [
    "NOT_FROM_COMPILER",
    "Table",
    "axes_table",
    "axes_text",
    "axis_totals",
    "buffers_table",
    "collectives_table",
    "differing_table",
    "finding_place",
    "kind_words",
    "made_by_table",
    "markdown_table",
    "markdown_text",
    "memory_table",
    "mesh_axes_text",
    "module_text",
    "one_line",
    "render",
    "roofline_rows",
    "roofline_table",
    "source_text",
    "step_words",
    "table_lines",
    "tensors_table",
    "terminal_width",
    "to_markdown",
    "verdict",
]


# --------------------------------------------------------------------------- Reports as plain text


def render_collectives(summary: Iterable[CollectiveSummary]) -> str:
    """Writes a summary as a table.

    Args:
        summary: as `summarize()` gives it.

    Returns:
        Aligned lines without a line break at the end. "mixed": the groups follow no mesh axes, or
        no mesh was given. "-": each device is alone, nothing is sent. ">=": a loop of unknown trip
        count was counted once. MB are 1e6 bytes.

    Example:
        >>> print(render_collectives([CollectiveSummary("all-reduce", ("tp",), 4, 2_000_000)]))
        collective  mesh axes  count  MB per device
        all-reduce  tp             4          2.000
    """
    rows = tuple(
        (
            row.kind,
            axis_names(row.axes) or "-",
            f"{_bound(row.at_least)}{row.count}",
            f"{_bound(row.at_least)}{row.bytes_per_device / 1e6:,.3f}",
        )
        for row in summary
    )
    header = ("collective", "mesh axes", ">count", ">MB per device")
    return "\n".join(table_lines(Table(header, rows))) if rows else "no collectives"


# --------------------------------------------------------------------------- The words of a report
#
# What fits, which axes, which line; the same in every format.

# Control characters, line breaks, signs that turn the direction of text, halves of surrogates.
_UNPRINTABLE = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]+"
)


def verdict(report: CompileReport) -> str:
    """Says whether it fits, and by how much.

    Args:
        report: the report.

    Returns:
        A sentence; it begins with "Fits", "DOES NOT FIT" or "Not known".
    """
    memory = report.memory
    needs = bytes_text(memory.total_bytes)
    if memory.fits is None:
        return f"Not known whether it fits: each device needs {needs}; what it has is not known."
    has = bytes_text(memory.capacity_bytes)
    spare = memory.spare_bytes or 0
    if memory.fits:
        return f"Fits: each device needs {needs} of {has}; {bytes_text(spare)} to spare."
    return f"DOES NOT FIT: each device needs {needs} and has {has}; {bytes_text(-spare)} too much."


def _roofline_sentence(report: CompileReport) -> str:
    """How long a step takes, as modelled, or why that was not."""
    model = report.roofline
    if model is None:
        return f"How long a step takes was not modelled: {report.no_roofline}."
    return f"A step takes {step_words(report)}. Modelled, not measured."


def step_words(report: CompileReport) -> str:
    """Says how long a step takes, as modelled, in a part of a sentence.

    Args:
        report: the report.

    Returns:
        The seconds if everything overlaps and if nothing does, the MFU of both, and what binds; ""
        where nothing was modelled.
    """
    model = report.roofline
    if model is None:
        return ""
    best, worst = seconds_text(model.step_seconds), seconds_text(model.step_seconds_no_overlap)
    words = f"{best} if everything overlaps, {worst} if nothing does"
    if model.mfu is not None:
        words += f" (MFU {share_text(model.mfu)} and {share_text(model.mfu_no_overlap)})"
    return f"{words}; bound by {model.binding}"


def mesh_axes_text(axes: Iterable[MeshAxis]) -> str:
    """Writes a mesh.

    Args:
        axes: its axes.

    Returns:
        The axes with their sizes.

    Example:
        >>> mesh_axes_text([MeshAxis("dp", 4, 2), MeshAxis("tp", 4, 1)])
        'dp = 4 (2 over DCN x 2 on ICI), tp = 4'
    """
    return ", ".join(axis.words for axis in axes)


def axes_text(axes: tuple[Axis, ...] | None, mesh: Iterable[MeshAxis] = ()) -> str:
    """Writes the axes of a collective.

    Args:
        axes: as of a collective: whole axes, or parts of axes as "dp:(1)2".
        mesh: the axes of the mesh, for the sizes of which they are parts.

    Returns:
        Names; of a part its size, and of how much. "mixed" where the groups follow no axes, "-"
        where nothing is sent.

    Example:
        >>> axes_text(("dp:(1)2", "tp"), [MeshAxis("dp", 8, 2)]), axes_text(None), axes_text(())
        ('dp (2 of 8), tp', 'mixed', '-')
    """
    if axes is None:
        return axis_names(axes)
    sizes = {str(axis.name): axis.size for axis in mesh}
    return ", ".join(_axis_text(str(axis), sizes) for axis in axes) or "-"


def module_text(origin: Origin | None) -> str:
    """Writes the module of an origin, with the op.

    Args:
        origin: where something comes from.

    Returns:
        "Llama/layers.*/mlp: dot_general", or what of it is known; "-" if nothing.
    """
    if origin is None:
        return "-"
    return ": ".join(word for word in (origin.module, origin.op) if word) or "-"


def source_text(origin: Origin | None, *, whole: bool = False) -> str:
    """Writes the line of source of an origin.

    Args:
        origin: where something comes from.
        whole: with the whole path; else its last two parts.

    Returns:
        "models/llama.py:42", or "-".
    """
    if origin is None or origin.source is None:
        return "-"
    text = str(origin.source)
    return text if whole else "/".join(re.split(r"[/\\]", text)[-2:])


def one_line(text: str) -> str:
    r"""Takes out what a terminal or a browser would obey, or what cannot be written at all.

    Args:
        text: any text.

    Returns:
        The text with a space in place of each run of control characters.

    Example:
        >>> one_line("a\nb\x1b[31m")
        'a b [31m'
    """
    return _UNPRINTABLE.sub(" ", text)


def _axis_text(axis: str, sizes: dict[str, int]) -> str:
    part = AXIS_PART.fullmatch(axis)
    if part is None:
        return axis
    name, size = part[1], int(part[3])
    of = f" of {sizes[name]}" if name in sizes else ""
    return f"{name} ({size}{of})"


# ------------------------------------------------------- Tables, and those of a report, as words
#
# The terminal, Markdown and HTML write the same ones.

MANY = 15
"""Rows of a table that shows the largest only."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of words under a header.

    Attributes:
        header: a word for each column; columns of numbers have ">" before it. A table whose words
            are all empty has no line for them.
        rows: the cells.
        more: how many rows were left out.
    """

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    more: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """The header without the marks."""
        return tuple(name.removeprefix(">") for name in self.header)

    @property
    def right(self) -> tuple[bool, ...]:
        """For each column whether it holds numbers."""
        return tuple(name.startswith(">") for name in self.header)


def table_lines(table: Table, indent: str = "", width: int | None = None) -> list[str]:
    r"""Aligns the columns of a table.

    Args:
        table: the table; how many rows were left out is not written.
        indent: what each line begins with.
        width: characters of a line, beyond which words are folded; as many as are needed by
            default.

    Returns:
        The lines; columns are two spaces apart, and nothing follows the last word.

    Example:
        >>> print("\n".join(table_lines(Table(("", ""), (("a", "1"), ("bcd", "2"))), indent="  ")))
          a    1
          bcd  2
    """
    from rich.console import Console

    if not table.rows and not any(table.names):
        return []
    text = io.StringIO()
    columns = (width or _ANY_WIDTH) - len(indent)
    Console(file=text, width=columns, color_system=None).print(_rich_table(table))
    return [(indent + line).rstrip() for line in text.getvalue().splitlines()]


def _rich_table(table: Table) -> Any:
    """Makes a table for a console of rich: words fold where there is no room, numbers do not."""
    from rich.table import Table as RichTable
    from rich.text import Text

    show_header = any(table.names)
    drawn = RichTable(box=None, pad_edge=False, header_style="dim", show_header=show_header)
    for name, is_number in zip(table.names, table.right, strict=True):
        side = "right" if is_number else "left"
        drawn.add_column(Text(name), justify=side, no_wrap=is_number, overflow="fold")
    for row in table.rows:
        drawn.add_row(*(Text(one_line(cell)) for cell in row))
    return drawn


def terminal_width() -> int:
    """The characters of a line of the terminal, but at least 100."""
    return max(NARROWEST, shutil.get_terminal_size().columns)


@dataclass(frozen=True, slots=True)
class AxisTotal:
    """What all collectives over the same axes and network move.

    Attributes:
        axes: in words.
        network: "ICI", "DCN" or "-".
        phases: bytes on one device in one step, by phase.
        kinds: the kinds, the most bytes first.
        at_least: whether it is a lower bound.
    """

    axes: str
    network: str
    phases: dict[str, int]
    kinds: tuple[str, ...]
    at_least: bool

    @property
    def bytes(self) -> int:
        """The bytes of all phases."""
        return sum(self.phases.values())


def axis_totals(report: CompileReport) -> tuple[AxisTotal, ...]:
    """Sums the collectives by axes and network.

    Args:
        report: the report.

    Returns:
        The sums, the most bytes first; what moves nothing is left out.
    """
    groups: dict[tuple[str, str], list[CollectiveLine]] = {}
    for line in report.collectives:
        if line.moves:
            key = axes_text(line.axes, report.mesh), line.network
            groups.setdefault(key, []).append(line)
    totals = [
        AxisTotal(
            axes,
            network,
            _summed(lines, lambda line: str(line.origin.phase)),
            tuple(_summed(lines, lambda line: line.kind)),
            any(line.at_least for line in lines),
        )
        for (axes, network), lines in groups.items()
    ]
    return tuple(sorted(totals, key=lambda total: (-total.bytes, total.axes, total.network)))


def axes_table(report: CompileReport) -> Table:
    """Collectives by axes, network and phase."""
    totals = axis_totals(report)
    phases = [phase for phase in PHASES if any(phase in total.phases for total in totals)]
    rows = [
        (
            total.axes,
            total.network,
            *(bytes_text(total.phases.get(phase)) for phase in phases),
            _bound(total.at_least) + bytes_text(total.bytes),
            ", ".join(total.kinds),
        )
        for total in totals
    ]
    header = ("mesh axes", "network", *(f">{phase}" for phase in phases), ">bytes", "kinds")
    return Table(header, tuple(rows))


def collectives_table(lines: Iterable[CollectiveLine], report: CompileReport) -> Table:
    """The collectives that move the most, with the lines that they were made for."""
    all_lines = list(lines)
    rows = [
        (
            line.kind,
            axes_text(line.axes, report.mesh),
            line.network,
            _bound(line.at_least) + bytes_text(line.bytes_per_device),
            bytes_text(line.bytes_each),
            f"{_bound(line.at_least)}{line.executions:,}",
            line.origin.phase,
            module_text(line.origin),
            source_text(line.origin),
        )
        for line in all_lines[:MANY]
    ]
    header = (
        "kind",
        "mesh axes",
        "network",
        ">bytes",
        ">each",
        ">times",
        "phase",
        "made for",
        "line",
    )
    return Table(header, tuple(rows), len(all_lines) - len(rows))


def memory_table(report: CompileReport) -> Table:
    """What one device holds, part by part, and what it can."""
    memory = report.memory
    rows = [
        (
            kind_words(part.role, part.count),
            f"{part.count:,}",
            bytes_text(part.memory_bytes),
            bytes_text(part.padding_bytes) if part.padding_bytes else "-",
            _of(part.memory_bytes, memory.total_bytes),
        )
        for part in memory.parts
    ]
    single = (("temporaries", memory.temporaries_bytes), ("program", memory.code_bytes))
    rows += [
        (name, "", bytes_text(size), "-", _of(size, memory.total_bytes)) for name, size in single
    ]
    if memory.unexplained_bytes:
        rows.append(("not explained", "", bytes_text(memory.unexplained_bytes), "", ""))
    rows.append(("in all", "", bytes_text(memory.total_bytes), "", ""))
    if memory.capacity_bytes is not None:
        rows.append(("usable", "", bytes_text(memory.capacity_bytes), "", ""))
        rows.append(("to spare", "", bytes_text(memory.spare_bytes), "", ""))
    return Table(("per device", ">arrays", ">bytes", ">of it padding", ">share"), tuple(rows))


def buffers_table(report: CompileReport) -> Table:
    """The largest buffers, with what made them."""
    counts: dict[tuple[str, ...], int] = {}
    for buffer in report.memory.largest:
        name = buffer.name if buffer.origin is not None else starred(buffer.name)
        place = module_text(buffer.origin), source_text(buffer.origin)
        key = bytes_text(buffer.bytes), buffer.shape, buffer.kind, name, *place
        counts[key] = counts.get(key, 0) + 1
    rows = [(key[0], f"{count:,}", *key[1:]) for key, count in counts.items()]
    header = (">bytes each", ">arrays", "shape", "kind", "name", "made for", "line")
    return Table(header, tuple(rows[:MANY]), len(rows) - len(rows[:MANY]))


def roofline_rows(report: CompileReport) -> tuple[tuple[str, str, float], ...]:
    """The modelled times of a step: key (as `Roofline.binding`), name and seconds."""
    model = report.roofline
    if model is None:
        return ()
    axes = [
        (names, axes_text(tuple(names.split(", ")), report.mesh)) for names in model.ici_seconds
    ]
    each_axis = [
        (f"ici {axis}", f"ICI, {words}", model.ici_seconds[axis])
        for axis, words in axes
        if len(axes) > 1
    ]
    name = "ICI, all axes" if len(axes) > 1 else f"ICI, {axes[0][1]}" if axes else "ICI"
    rows = [
        ("compute", "compute", model.compute_seconds),
        ("HBM", "memory (HBM)", model.hbm_seconds),
        ("ICI", name, model.total_ici_seconds),
        *each_axis,
        ("DCN", "DCN", model.dcn_seconds),
    ]
    return tuple(row for row in rows if row[2] > 0 or row[0] in ("compute", "HBM"))


def roofline_table(report: CompileReport) -> Table:
    """The modelled times of a step."""
    model = report.roofline
    step = 0.0 if model is None else model.step_seconds
    rows = [
        (name, seconds_text(seconds), share_text(seconds / step) if step else "-")
        for _, name, seconds in roofline_rows(report)
    ]
    return Table(("modelled", ">seconds", ">of the step"), tuple(rows))


def tensors_table(report: CompileReport) -> Table:
    """The largest arrays, with their layouts."""
    rows = [
        (
            line.name,
            line.role,
            f"{line.count:,}",
            _dims(line.shape),
            line.dtype,
            line.layout_words,
            _dims(line.device_shape),
            bytes_text(line.total_device_bytes),
        )
        for line in report.tensors[:MANY]
    ]
    header = (
        *("name", "role", ">arrays", "shape", "dtype", "layout", "part of one device"),
        ">bytes per device",
    )
    return Table(header, tuple(rows), len(report.tensors) - len(rows))


def differing_table(report: CompileReport) -> Table:
    """The arrays whose layout is another than was asked for."""
    differing = [line for line in report.tensors if line.differs]
    rows = [
        (
            line.name,
            line.role,
            line.requested or "-",
            line.chosen or "-",
            bytes_text(line.total_device_bytes),
        )
        for line in differing[:MANY]
    ]
    header = ("name", "role", "asked for", "compiled", ">bytes per device")
    return Table(header, tuple(rows), len(differing) - len(rows))


def made_by_table(report: CompileReport) -> Table:
    """Versions, options, times and further facts: how the report came to be."""
    rows = [(f"{name}", version) for name, version in report.versions.items()]
    rows += [(f"{name} took", seconds_text(seconds)) for name, seconds in report.seconds.items()]
    if report.peak_host_bytes is not None:
        rows.append(("memory of the compiling process", bytes_text(report.peak_host_bytes)))
    rows += [(f"option {name}", option) for name, option in report.options.items()]
    rows += list(report.attributes.items())
    return Table(("what", "value"), tuple(rows))


def kind_words(role: str, count: int) -> str:
    """Writes a role for so many arrays.

    Args:
        role: as of the evidence.
        count: how many.

    Returns:
        The role, in the plural if there are several.

    Example:
        >>> kind_words("parameter", 2), kind_words("optimizer state", 2)
        ('parameters', 'optimizer state')
    """
    return f"{role}s" if count != 1 and role in _COUNTED else role


_COUNTED = frozenset(
    {
        *("parameter", "frozen parameter", "buffer", "gradient", "argument", "result", "number"),
        *("constant", "temporary"),
    }
)


def _summed(lines: list[CollectiveLine], key_of: Callable[[CollectiveLine], str]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for line in lines:
        sums[key_of(line)] = sums.get(key_of(line), 0) + line.bytes_per_device
    return dict(sorted(sums.items(), key=lambda pair: -pair[1]))


def _dims(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _of(size: int, total: int) -> str:
    return share_text(size / total) if total else "-"


def _bound(at_least: bool) -> str:
    return ">=" if at_least else ""


# ----------------------------------------------------------------------------------------- Document
#
# A report as sections of sentences, findings and tables, in the order in which they are read.

NOT_FROM_COMPILER = "Added up from the arrays of the program: the compiler did not say."
"""Beside a total of the memory that is no figure of the compiler's."""


@dataclass(frozen=True, slots=True)
class Command:
    """Words for a shell.

    Attributes:
        text: the words.
    """

    text: str


Block: TypeAlias = str | Table | Finding | Command


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a report.

    Attributes:
        title: its title.
        blocks: what it says: sentences, tables, findings and commands.
    """

    title: str
    blocks: tuple[Block, ...]


def _opening(report: CompileReport) -> tuple[str, ...]:
    """The sentences with which every format begins: the verdict first, then time, machine, mesh."""
    return (
        verdict(report),
        _roofline_sentence(report),
        f"Machine: {_machine(report)}.",
        f"Mesh: {mesh_axes_text(report.mesh)}.",
    )


def finding_place(finding: Finding) -> str:
    """Where in the model a finding is.

    Args:
        finding: the finding.

    Returns:
        Its module and line, or "".
    """
    if finding.origin is None:
        return ""
    words = (module_text(finding.origin), source_text(finding.origin))
    return ", ".join(word for word in words if word != "-")


def _sections(report: CompileReport) -> Iterator[Section]:
    """The _sections of a report that have something to say."""
    lines = report.findings or ("Nothing to look at was found.",)
    yield Section("Findings", tuple(lines))
    source = () if report.memory.from_compiler else (NOT_FROM_COMPILER,)
    causes = tuple(cause.text for cause in report.memory.causes)
    yield Section("Memory of one device", (memory_table(report), *source, *causes))
    if report.memory.largest:
        yield Section("Largest buffers", (buffers_table(report),))
    yield Section("Communication of one step, per device", tuple(_communication(report)))
    if report.roofline is not None:
        blocks = (
            _roofline_sentence(report),
            roofline_table(report),
            *(f"Assumed: {assumption}." for assumption in report.roofline.assumptions),
        )
        yield Section("Time of one step (modelled)", blocks)
    if report.tensors:
        yield Section("Largest arrays", (tensors_table(report),))
    if any(line.differs for line in report.tensors):
        yield Section("Compiled otherwise than asked for", (differing_table(report),))
    if report.unread:
        yield Section("Not read", report.unread)
    yield Section("How this was made", tuple(_made(report)))


def _machine(report: CompileReport) -> str:
    machine = report.machine
    return f"{machine.name} ({machine.words})" if machine.name else machine.words


def _communication(report: CompileReport) -> Iterator[Block]:
    if not any(line.moves for line in report.collectives):
        yield "No device talks to another."
        return
    share = share_text(report.attribution.share)
    yield (
        f"{bytes_text(report.collective_bytes)} in all: of each collective the larger of what goes "
        f"in and out, as often as it runs. {share} of it has a mesh axis and a line of source."
    )
    yield axes_table(report)
    moving = [line for line in report.collectives if line.moves]
    yield "The largest, with what they were made for:"
    yield collectives_table(moving, report)
    if 0 < len(report.attribution.rest) < len(moving):
        yield "Without an axis or a line:"
        yield collectives_table(report.attribution.rest, report)


def _made(report: CompileReport) -> Iterator[Block]:
    if report.command:
        yield Command(report.command)
    if report.flops is not None and math.isfinite(report.flops):
        yield (
            f"{report.flops:.4g} floating-point operations a step on all devices, recomputation "
            f"not counted; matrix products in {report.compute_dtype}."
        )
    table = made_by_table(report)
    if table.rows:
        yield table


# --------------------------------------------- A report as Markdown, made to be read as it is, too
#
# Columns are aligned, and nothing is escaped that would not be taken for markup.

_MARKUP = re.compile(r"[*`<>&\\\[\]~]|https?:|(?<!\w)_|_(?!\w)")


def to_markdown(report: CompileReport) -> str:
    """Writes a report.

    Args:
        report: the report.

    Returns:
        GitHub's Markdown, with a line break at the end.
    """
    lines = [f"# {markdown_text(report.title)}", ""]
    first, *sentences = (markdown_text(sentence) for sentence in _opening(report))
    lines += [f"**{first}**", "", *(f"- {sentence}" for sentence in sentences), ""]
    for section in _sections(report):
        lines += [f"## {section.title}", ""]
        for block in section.blocks:
            lines += [*_markdown_block(block), ""]
    return "\n".join(lines).rstrip() + "\n"


def markdown_table(table: Table) -> Iterator[str]:
    r"""Writes a table with aligned columns.

    Args:
        table: the table.

    Yields:
        Lines.

    Example:
        >>> print("\n".join(markdown_table(Table(("name", ">bytes"), (("w", "1.00 MiB"),)))))
        | name |    bytes |
        | ---- | -------: |
        | w    | 1.00 MiB |
    """
    rows = [table.names, *table.rows]
    cells = [[markdown_text(cell).replace("|", "\\|") for cell in row] for row in rows]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    for number, row in enumerate(cells):
        yield f"| {' | '.join(_padded(row, widths, table.right))} |"
        if number == 0:
            rule = (
                "-" * (width - is_number) + ":" * is_number
                for width, is_number in zip(widths, table.right, strict=True)
            )
            yield f"| {' | '.join(rule)} |"
    if table.more:
        yield ""
        yield f"and {table.more:,} more."


def markdown_text(text: str) -> str:
    """Writes text so that Markdown shows it as it is.

    Args:
        text: any text.

    Returns:
        One line: the text itself where nothing in it could be taken for markup, else words of it
        as code.

    Example:
        >>> markdown_text("layers.*.wq.weight: exp_avg"), markdown_text("[ep, -, fsdp] 5 < 6")
        ('`layers.*.wq.weight`: exp_avg', '`[ep, -, fsdp]` 5 `<` 6')
    """
    return " ".join(map(_word, _words(one_line(text))))


def _words(text: str) -> Iterator[str]:
    """Words, and what stands in square brackets as one of them."""
    pending: list[str] = []
    for word in text.split(" "):
        pending.append(word)
        joined = " ".join(pending)
        if joined.count("[") <= joined.count("]"):
            yield joined
            pending.clear()
    yield from pending


def _word(word: str) -> str:
    if not _MARKUP.search(word):
        return word
    bare = word.rstrip(":,.") or word
    inside = bare.replace("`", "'")
    return f"`{inside}`{word[len(bare) :]}"


def _padded(row: list[str], widths: list[int], right: tuple[bool, ...]) -> Iterator[str]:
    for cell, width, is_number in zip(row, widths, right, strict=True):
        yield cell.rjust(width) if is_number else cell.ljust(width)


def _markdown_block(block: Block) -> Iterator[str]:
    if isinstance(block, Table):
        yield from markdown_table(block)
    elif isinstance(block, Finding):
        place = finding_place(block)
        yield f"- **{block.severity}: {markdown_text(block.title)}** ({block.code})"
        details = (block.detail, f"To try: {block.fix}" if block.fix else "", place)
        yield from (f"  {markdown_text(text)}" for text in details if text)
    elif isinstance(block, Command):
        fence = "`" * max(3, 1 + max(map(len, re.findall("`+", block.text)), default=0))
        yield from (fence, one_line(block.text), fence)
    else:
        yield markdown_text(block)


# ------------------------------------------------------------------------- A report for a terminal

NARROWEST = 100
"""Tables of nine columns cannot be read in less."""

_ANY_WIDTH = 1 << 20
_TONES = {True: "bold green", False: "bold red", None: "bold yellow"}
_COLOURS = {"error": "bold red", "warning": "bold yellow", "note": "bold cyan"}


def render(report: CompileReport, width: int | None = None, *, colour: bool | None = None) -> str:
    """Writes a report for a terminal.

    Args:
        report: the report.
        width: characters of a line; those of the terminal by default, but at least 100.
        colour: whether to use colours; by default where the output is a terminal.

    Returns:
        Lines, with a line break at the end.
    """
    from rich.console import Console

    in_colour = sys.stdout.isatty() if colour is None else colour
    text = io.StringIO()
    console = Console(
        file=text,
        width=terminal_width() if width is None else width,
        force_terminal=in_colour,
        no_color=not in_colour,
        highlight=False,
        markup=False,
        emoji=False,
    )
    first, *sentences = _opening(report)
    console.print(one_line(report.title), style="bold")
    console.print(one_line(first), style=_TONES[report.fits])
    for sentence in sentences:
        console.print(one_line(sentence))
    for section in _sections(report):
        console.print()
        console.print(section.title, style="bold underline")
        for block in section.blocks:
            _print(console, block)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def _print(console: Any, block: Block) -> None:
    from rich.text import Text

    if isinstance(block, Table):
        console.print(_rich_table(block))
        if block.more:
            console.print(f"and {block.more:,} more", style="dim")
    elif isinstance(block, Finding):
        tone = _COLOURS.get(block.severity, "bold")
        severity = f"{block.severity}: ", tone
        console.print(Text.assemble(severity, (one_line(block.title), "bold")))
        fix = f"To try: {block.fix}" if block.fix else ""
        for words in (block.detail, fix, finding_place(block)):
            if words:
                console.print(f"  {one_line(words)}")
    elif isinstance(block, Command):
        console.print(one_line(block.text), style="bold", soft_wrap=True)
    else:
        console.print(one_line(block))
