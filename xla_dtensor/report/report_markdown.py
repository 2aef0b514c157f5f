"""A report as Markdown, made to be read as it is, too.

Columns are aligned, and nothing is escaped that would not be taken for markup.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from xla_dtensor.report.compile_report import CompileReport
from xla_dtensor.report.finding import Finding
from xla_dtensor.report.report_document import Block, Command, finding_place, opening, sections
from xla_dtensor.report.report_tables import Table
from xla_dtensor.report.report_words import one_line

__all__ = ["markdown_table", "markdown_text", "to_markdown"]

_MARKUP = re.compile(r"[*`<>&\\\[\]~]|https?:|(?<!\w)_|_(?!\w)")


def to_markdown(report: CompileReport) -> str:
    """Writes a report.

    Args:
        report: the report.

    Returns:
        GitHub's Markdown, with a line break at the end.
    """
    lines = [f"# {markdown_text(report.title)}", ""]
    first, *others = (markdown_text(sentence) for sentence in opening(report))
    lines += [f"**{first}**", "", *(f"- {sentence}" for sentence in others), ""]
    for section in sections(report):
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
    held: list[str] = []
    for word in text.split(" "):
        held.append(word)
        joined = " ".join(held)
        if joined.count("[") <= joined.count("]"):
            yield joined
            held.clear()
    yield from held


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
