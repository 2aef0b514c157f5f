"""The page about trainers: what it shows runs, and what it says of versions is installed."""

from __future__ import annotations

from importlib.metadata import version

import pytest

from tests.documents import ROOT, blocks, run_session

DOCS = ROOT / "docs"
PAGE = (DOCS / "trainers.md").read_text(encoding="utf-8")


@pytest.mark.usefixtures("runtime")
@pytest.mark.only_on("jax")
@pytest.mark.parametrize("name", ["trainers.md", "generation.md"])
def test_the_session(name: str) -> None:
    run_session("".join(blocks((DOCS / name).read_text(encoding="utf-8"), "pycon")), "jax")


@pytest.mark.parametrize(
    "client", ["transformers", "trl", "peft", "accelerate", "lightning", "torchtitan"]
)
def test_the_versions(client: str) -> None:
    row = next(line for line in PAGE.splitlines() if line.startswith(f"| {client} "))
    named = row.split("|")[1].split()[1]
    assert f"{version(client)}.".startswith(f"{named}.")
