"""docs/coming_from.md names every public name there is, and its code runs as it stands."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest

import xla_dtensor.spmd
from tests.documents import ROOT, blocks, run_session

DOC = ROOT / "docs" / "coming_from.md"
TEXT = DOC.read_text()


def table(title: str) -> list[list[str]]:
    """The rows of the table of a section, without its head."""
    section = TEXT.partition(f"### {title}\n")[2].partition("\n#")[0]
    rows = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def listed() -> set[str]:
    return {
        name
        for row in table("The names of torch_xla.distributed.spmd")
        for name in re.findall(r"`(\w+)`", row[0])
    }


def upstream_names() -> set[str]:
    """The names of the installed torch_xla.distributed.spmd, read, not imported.

    Importing torch_xla would start it in this process. Both what the package imports and what its
    __all__ lists counts: in 2.9 that list lacks a comma, and each has names the other has not.
    """
    found = importlib.util.find_spec("torch_xla")
    if found is None or found.origin is None:
        pytest.skip("torch_xla is not installed")
    path = Path(found.origin).parent / "distributed" / "spmd" / "__init__.py"
    tree = ast.parse(
        path.read_text().replace('"MarkShardingFunction"\n', '"MarkShardingFunction",\n')
    )
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Constant):
            names.add(str(node.value))
    return names


def test_every_name_of_torch_xla_is_in_the_table() -> None:
    names = upstream_names()
    assert {"mark_sharding", "shard_as", "_mark_manual_sharding", "MarkShardingFunction"} <= names
    assert names - listed() == set()


def test_every_name_of_ours_is_in_the_table() -> None:
    assert set(xla_dtensor.spmd.__all__) - listed() == set()


def test_kept_is_what_we_have() -> None:
    for row in table("The names of torch_xla.distributed.spmd"):
        for name in re.findall(r"`(\w+)`", row[0]):
            is_ours = name in xla_dtensor.spmd.__all__
            assert is_ours == (row[1] in ("kept", "refused")), name
            assert set(row[1:3]) <= {
                "kept", "refused", "not needed", "not there", "not there yet"
            }, name  # fmt: skip


def test_what_is_called_here_exists() -> None:
    import xla_dtensor as xd
    from xla_dtensor import collectives

    for owner, prefix in ((xd, "xd"), (xla_dtensor.spmd, "xs"), (collectives, "collectives")):
        called = set(re.findall(rf"`[^`\n]*\b{prefix}\.(\w+)", TEXT))
        assert called
        assert [name for name in called if not hasattr(owner, name)] == []


@pytest.mark.on_runtime
def test_the_sessions_print_what_the_doc_shows(request: pytest.FixtureRequest) -> None:
    session = "".join(blocks(TEXT, "pycon"))
    run_session(session, str(request.config.getoption("--runtime")))


def test_the_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)]+)\)", TEXT)
    titles = re.findall(r"^#+ (.*)$", TEXT, re.MULTILINE)
    anchors = {"#" + re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
    assert links
    assert [
        link
        for link in links
        if not (link in anchors if link.startswith("#") else (DOC.parent / link).exists())
    ] == []
