"""A report for a terminal: with rich if it is installed, else as Markdown."""

from __future__ import annotations

import io
import shutil
import sys
from typing import Any

from xla_dtensor.report.compile_report import CompileReport
from xla_dtensor.report.finding import Finding
from xla_dtensor.report.report_document import Block, Command, finding_place, opening, sections
from xla_dtensor.report.report_markdown import to_markdown
from xla_dtensor.report.report_tables import Table
from xla_dtensor.report.report_words import one_line

__all__ = ["render"]

NARROWEST = 100
"""Tables of nine columns cannot be read in less."""

_TONES = {True: "bold green", False: "bold red", None: "bold yellow"}
_COLOURS = {"error": "bold red", "warning": "bold yellow", "note": "bold cyan"}


def render(report: CompileReport, width: int | None = None, *, colour: bool | None = None) -> str:
    """Writes a report for a terminal.

    Args:
        report: the report.
        width: characters of a line; those of the terminal by default, but at least 100. Without
            rich, lines are as long as they are.
        colour: whether to use colours; by default where the output is a terminal.

    Returns:
        Lines, with a line break at the end.
    """
    try:
        from rich.console import Console
        from rich.text import Text
    except ImportError:
        return to_markdown(report)
    columns = max(NARROWEST, shutil.get_terminal_size().columns) if width is None else width
    in_colour = sys.stdout.isatty() if colour is None else colour
    file = io.StringIO()
    console = Console(
        file=file,
        width=columns,
        force_terminal=in_colour,
        no_color=not in_colour,
        highlight=False,
    )
    first, *others = opening(report)
    console.print(Text(one_line(report.title), style="bold"))
    console.print(Text(one_line(first), style=_TONES[report.fits]))
    for sentence in others:
        console.print(Text(one_line(sentence)))
    for section in sections(report):
        console.print()
        console.print(Text(section.title, style="bold underline"))
        for block in section.blocks:
            _print(console, block)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


def _print(console: Any, block: Block) -> None:
    from rich.text import Text

    if isinstance(block, Table):
        _print_table(console, block)
    elif isinstance(block, Finding):
        tone = _COLOURS.get(block.severity, "bold")
        title = (f"{block.severity}: ", tone), (one_line(block.title), "bold")
        console.print(Text.assemble(*title))
        fix = f"To try: {block.fix}" if block.fix else ""
        for words in (block.detail, fix, finding_place(block)):
            if words:
                console.print(Text(f"  {one_line(words)}"))
    elif isinstance(block, Command):
        console.print(Text(one_line(block.text), style="bold"), soft_wrap=True)
    else:
        console.print(Text(one_line(block)))


def _print_table(console: Any, table: Table) -> None:
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn = RichTable(box=None, pad_edge=False, header_style="dim")
    for name, is_number in zip(table.names, table.right, strict=True):
        side = "right" if is_number else "left"
        drawn.add_column(Text(name), justify=side, no_wrap=is_number, overflow="fold")
    for row in table.rows:
        drawn.add_row(*(Text(one_line(cell)) for cell in row))
    console.print(drawn)
    if table.more:
        console.print(Text(f"and {table.more:,} more", style="dim"))
