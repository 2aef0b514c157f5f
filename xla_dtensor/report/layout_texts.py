"""Layout texts, as evidence of a compiled step has them: "[fsdp.tp, -] sum(ep)", a word per dim.

A word names the mesh axes that cut the dim, the outermost first, "-" none; a part of an axis is
written as "tp:(1)2". What is summed over comes behind the brackets.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xla_dtensor.report.report_machine import MeshAxis

__all__ = ["LayoutUse", "layout_uses"]

LayoutUse = tuple[int | None, bool, bool]
"""Of an axis: the dim that it cuts; whether it cuts what a later axis of the mesh has cut; whether
its devices have summands."""

_TEXT = re.compile(r"\[([^\[\]]*)\]((?: [\w?]+\([^()]*\))*)")
_SUM = re.compile(r"[\w?]+\(([^()]*)\)")
_PART = re.compile(r":\(\d+\)\d+$")


def layout_uses(text: str, mesh: Sequence[MeshAxis], ndim: int) -> tuple[LayoutUse, ...] | None:
    """Reads a layout.

    Args:
        text: the layout.
        mesh: the axes.
        ndim: the number of dims of the tensor.

    Returns:
        What each axis does; None for text that says nothing of these axes.

    Example:
        >>> from xla_dtensor.report.report_machine import MeshAxis
        >>> layout_uses("[-, tp]", [MeshAxis("dp", 2, 1), MeshAxis("tp", 4, 1)], 2)
        ((None, False, False), (1, False, False))
    """
    found = _TEXT.fullmatch(text.strip())
    if found is None:
        return None
    words = [word.strip().removesuffix("?") for word in found[1].split(",")] if found[1] else []
    names = [str(axis.name) for axis in mesh]
    if len(words) != ndim:
        return None
    dims: dict[str, int] = {}
    strided: set[str] = set()
    for dim, word in enumerate(words):
        axes = [_PART.sub("", axis) for axis in word.split(".")] if word not in ("-", "") else []
        if not set(axes) <= set(names):
            return None
        dims |= dict.fromkeys(axes, dim)
        places = [names.index(axis) for axis in axes]
        strided |= {
            axis for at, axis in enumerate(axes) if any(place > places[at] for place in places[:at])
        }
    summed = {name.strip() for part in _SUM.finditer(found[2]) for name in part[1].split(",")}
    return tuple((dims.get(name), name in strided, name in summed) for name in names)
