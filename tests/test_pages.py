"""docs/ beside the README: sessions run, every page has a place, links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.documents import ROOT, blocks, run_session
from tools.docs_pages import DOCS, PAGES, REFERENCE

USE = (DOCS / "use.md").read_text(encoding="utf-8")


@pytest.mark.on_runtime
def test_the_sessions_of_use(request: pytest.FixtureRequest) -> None:
    """On each runtime; a block with the title of one runtime on that one only."""
    runtime = str(request.config.getoption("--runtime"))
    titled = {"jax": blocks(USE, 'pycon title="JAX"')}
    run_session("".join([*blocks(USE, "pycon"), *titled.get(runtime, [])]), runtime)


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 250


def test_every_page_has_a_place() -> None:
    """Those in the navigation are there, and all others but decisions and reports are in it."""
    config = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), yaml.BaseLoader)
    places = set(leaves(config["nav"]))
    made = {*PAGES.values(), *(f"reference/{name}.md" for name in REFERENCE)}
    pages = [*DOCS.glob("*.md"), *DOCS.glob("trainers/*.md")]
    written = {str(path.relative_to(DOCS)) for path in pages} | {"reports/README.md"}
    assert places == made | written


def leaves(nav: object) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    values: list[object] = []
    if isinstance(nav, list):
        values = list(nav)
    elif isinstance(nav, dict):
        values = list(nav.values())
    return [leaf for value in values for leaf in leaves(value)]


def test_links_inside_docs_lead_somewhere() -> None:

    missing: list[str] = []
    for page in [*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\(([^)#:\s]+)\)", page.read_text(encoding="utf-8")):
            if not (Path(page).parent / target).exists():
                missing.append(f"{page.name}: {target}")
    assert missing == []
