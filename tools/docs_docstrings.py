"""Docstrings as mkdocstrings takes them: an extension of griffe, which reads them.

Ours are written for people who read them in the source: roles as Sphinx has them, and ``Example:``
where griffe looks for ``Examples:``.
"""

from __future__ import annotations

import re
from typing import Any

import griffe  # pyright: ignore[reportMissingImports]

__all__ = ["Docstrings"]

_ROLE = re.compile(r":(?:class|func|meth|mod|attr):`~?(?:[\w.]*\.)?(\w+)`")
_EXAMPLE = re.compile(r"^Example:$", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Rewrites each docstring once, when its object is read."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Rewrite the docstring of `obj`; see griffe's documentation of extensions."""
        if obj.docstring is not None:
            text = obj.docstring.value.replace("``", "`")
            obj.docstring.value = _EXAMPLE.sub("Examples:", _ROLE.sub(r"`\1`", text))
