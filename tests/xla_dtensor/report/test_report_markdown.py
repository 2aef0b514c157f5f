"""Reports as Markdown and in a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.xla_dtensor.report.sample_evidence import GIB, evidence
from xla_dtensor.report.compile_report import CompileReport
from xla_dtensor.report.render import Table, markdown_table, markdown_text, table_lines


@pytest.fixture(scope="module")
def report() -> CompileReport:
    return CompileReport.of(evidence())


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split(" | ")]


def section(text: str, title: str) -> list[str]:
    return text.partition(f"## {title}\n")[2].partition("\n## ")[0].splitlines()


def test_the_verdict_and_the_findings_come_first(report: CompileReport) -> None:
    text = report.to_markdown()
    titles = [line[3:] for line in text.splitlines() if line.startswith("## ")]
    assert text.startswith("# two layers\n\n**Fits: each device needs ")
    assert titles[:3] == ["Findings", "Memory of one device", "Largest buffers"]
    assert titles[-1] == "How this was made"
    assert "Mesh: dp = 4, tp = 4." in text
    assert "- **warning: " in "\n".join(section(text, "Findings"))


def test_what_does_not_fit_is_said_loudly() -> None:
    text = CompileReport.of(evidence(temporaries=20 * GIB)).to_markdown()
    assert "**DOES NOT FIT: each device needs 20.0 GiB and has 15.8 GiB; 4.2" in text
    assert "- **error: " in text


def test_communication_by_axis_and_phase(report: CompileReport) -> None:
    lines = section(report.to_markdown(), "Communication of one step, per device")
    rows = [cells(line) for line in lines if line.startswith("| ")]
    assert rows[0] == ["mesh axes", "network", "forward", "backward", "bytes", "kinds"]
    assert rows[2][:2] == ["dp", "ICI"]
    assert rows[2][4:] == ["48.0 MiB", "all-gather, reduce-scatter"]
    assert rows[3] == ["tp", "ICI", "2.00 MiB", "2.00 MiB", "4.00 MiB", "all-reduce"]
    assert any(row[-1] == "train.py:19" for row in rows)


def test_all_rows_of_a_table_are_as_wide(report: CompileReport) -> None:
    widths: set[int] = set()
    for line in report.to_markdown().splitlines():
        if line.startswith("|"):
            widths.add(len(line))
        else:
            assert len(widths) <= 1, line
            widths.clear()


def test_bars_and_line_breaks_do_not_break_a_table() -> None:
    table = Table(("a|b", ">n"), (("x\ny", "1"), ("`|*", "2")), more=3)
    assert list(markdown_table(table)) == [
        "| a\\|b   |   n |",
        "| ------ | --: |",
        "| x y    |   1 |",
        "| `'\\|*` |   2 |",
        "",
        "and 3 more.",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain words", "plain words"),
        ("snake_case_name", "snake_case_name"),
        ("_private", "`_private`"),
        ("<b>", "`<b>`"),
        ("a\x1b[31mb", "`a [31mb`".replace("`a ", "a `")),
    ],
)
def test_what_could_be_markup_is_code(text: str, expected: str) -> None:
    assert markdown_text(text) == expected


def test_a_command_with_backticks_stays_in_its_block(report: CompileReport) -> None:
    text = replace(report, command="echo ```x```").to_markdown()
    assert "````\necho ```x```\n````" in text


def test_in_a_terminal(report: CompileReport) -> None:
    plain = report.render(120, colour=False)
    assert "\x1b" not in plain
    assert "Fits: each device needs" in plain
    assert "train.py:19" in plain
    assert max(map(len, plain.splitlines())) <= 120
    assert "\x1b[" in report.render(120, colour=True)


def test_escapes_of_names_do_not_reach_the_terminal(report: CompileReport) -> None:
    hostile = replace(report, title="\x1b[2J", versions={"\x1b]0;x\x07": "1"})
    assert "\x1b" not in hostile.render(120, colour=False)
    assert "\x1b" not in hostile.to_markdown()


def test_a_table_folds_words_but_not_numbers() -> None:
    table = Table(("name", ">bytes"), (("a word and more", "1,000,000"), ("[b]", "2")))
    assert table_lines(table) == [
        "name                 bytes",
        "a word and more  1,000,000",
        "[b]                      2",
    ]
    assert table_lines(table, indent="  ", width=21) == [
        "  name          bytes",
        "  a word    1,000,000",
        "  and more",
        "  [b]               2",
    ]
    assert table_lines(Table(("", ""), ())) == []


def test_lists_are_found(report: CompileReport) -> None:
    lines: Sequence[str] = report.to_markdown().splitlines()
    assert sum(line.startswith("## ") for line in lines) >= 7
