"""docs/torchtitan.md: its session runs, and its messages are in the tests."""

from __future__ import annotations

import importlib.metadata
import re

import pytest

from tests.documents import ROOT, blocks, run_session
from tests.torchtitan.test_titan_refusals import REFUSED

TEXT = (ROOT / "docs" / "torchtitan.md").read_text()


def rows() -> list[list[str]]:
    section = TEXT.partition("## What runs, and what does not\n")[2].partition("\n## ")[0]
    lines = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in lines[2:]]


@pytest.mark.only_on("jax")
@pytest.mark.usefixtures("titan")
def test_the_session_prints_what_the_document_shows() -> None:
    run_session("".join(blocks(TEXT, "pycon")), "jax")


@pytest.mark.usefixtures("titan")
def test_the_tested_version_is_the_one_named() -> None:
    version = importlib.metadata.version("torchtitan")
    assert f"| {version} (September 2026) | **tested here** |" in TEXT
    assert f"torchtitan=={version}" in (ROOT / "Makefile").read_text()


def test_every_refusal_quotes_a_message_that_a_test_raises() -> None:
    tests = (ROOT / "tests" / "torchtitan" / "test_titan_refusals.py").read_text()
    said = {text for _, _, text in REFUSED.values()}
    refused = [row for row in rows() if row[1] == "refused"]
    assert len(refused) >= 8
    for row in refused:
        quotes = re.findall(r'"([^"]{30,})"', row[2])
        assert quotes, row
        for quote in quotes:
            start = quote.partition(". ")[0]
            raised = any(quote.startswith(text) for text in said)
            assert raised or start[:30] in tests, quote


def test_kinds_of_rows() -> None:
    kinds = {"kept", "changed", "refused", "no effect", "not tried"}
    assert {row[1] for row in rows()} == kinds


def test_changes_named_in_the_table_are_shown() -> None:
    section = TEXT.partition("## The changed lines\n")[2]
    shown = re.findall(r"^\((\d)\)", section, re.MULTILINE)
    named = {number for row in rows() for number in re.findall(r"(?:^|Change )\((\d)\)", row[2])}
    assert named == set(shown)
    assert len(re.findall(r"^```diff", section, re.MULTILINE)) == len(shown)
