"""Pages of the documentation that are made of other files, as a hook of mkdocs.

README.md is the first page, CHANGELOG.md and CONTRIBUTING.md are pages. Where a page links to
source it names the file. The reference has a page for each public module, which lists what its
``__all__`` has; mkdocstrings fills in the docstrings.
"""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path
from typing import Any

__all__ = ["on_files", "on_page_markdown"]

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
REFERENCE = {
    "xla_dtensor": "xla_dtensor/__init__.py",
    "spmd": "xla_dtensor/spmd/__init__.py",
    "collectives": "xla_dtensor/collectives.py",
    "checkpoint": "xla_dtensor/checkpoint.py",
    "orbax": "xla_dtensor/hosts/checkpoint/orbax.py",
    "data": "xla_dtensor/data.py",
    "report": "xla_dtensor/report/__init__.py",
    "core": "xla_dtensor/core/__init__.py",
    "errors": "xla_dtensor/errors.py",
    "mesh_utils": "mesh_utils/__init__.py",
}
_LINK = re.compile(r"\[([^\]]*)\]\(([^)#:\s]+)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages; see mkdocs' own documentation of hooks."""
    from mkdocs.structure.files import File  # pyright: ignore[reportMissingImports]

    for source, page in PAGES.items():
        text = (ROOT / source).read_text("utf-8")
        files.append(File.generated(config, page, content=_linked(text, ROOT, DOCS / page)))
    for name, source in REFERENCE.items():
        text = _reference(ROOT / source)
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links of a page in docs/ to files outside of it name those files."""
    file = DOCS / page.file.src_uri
    return markdown if page.file.generated_by else _linked(markdown, file.parent, file)


def _linked(text: str, folder: Path, page: Path) -> str:
    """Rewrite links that are relative to `folder` for a page of the site."""

    def link(found: re.Match[str]) -> str:
        label, anchor = found[1], found[3] or ""
        target = (folder / found[2]).resolve()
        if not target.is_relative_to(ROOT):
            return found[0]
        name = str(target.relative_to(ROOT))
        if name not in PAGES and (DOCS not in target.parents or target.is_dir()):
            return f"`{name}`" if label == name else f"{label} (`{name}`)"  # source, no page
        target = DOCS / PAGES[name] if name in PAGES else target
        return f"[{label}]({os.path.relpath(target, page.parent)}{anchor})"

    return _LINK.sub(link, text)


def _reference(file: Path) -> str:
    code = ast.parse(file.read_text("utf-8"))
    module = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    (names,) = (
        ast.literal_eval(node.value)
        for node in code.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    title = (ast.get_docstring(code) or "").splitlines()[0]
    return "\n\n".join([f"# {module}", title, *(f"::: {module}.{name}" for name in names)])
