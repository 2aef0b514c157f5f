"""Layouts, as reports hold them: as layout text, "[fsdp.tp, -]", or as placements.

Placements are one for each axis of the mesh, "Shard(0), Replicate()".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from xla_dtensor.report.layout_texts import layout_uses
from xla_dtensor.report.report_machine import MeshAxis

__all__ = ["AxisUse", "axis_uses"]

_SHARD = re.compile(r"(_StridedShard|Shard|S)\((?:dim=)?(-?\d+)(?:,.*)?\)")
_COPY = re.compile(r"(?:Replicate\(\)|R)")
_PARTIAL = re.compile(r"(?:_?Partial\(.*\)|P(?:\(.*\))?)")


@dataclass(frozen=True, slots=True)
class AxisUse:
    """What an axis of the mesh does with a tensor.

    Attributes:
        axis: its name.
        size: its size.
        place: its place in the mesh, counted from 0.
        dim: the dim that it splits; None if each of its devices has a copy or a summand.
        is_strided: whether it splits what other axes have split, in another order.
        is_partial: whether each of its devices has a summand.

    Example:
        >>> axis_uses("Shard(0), Replicate()", [MeshAxis("dp", 2, 1), MeshAxis("tp", 4, 1)], 2)[0]
        AxisUse(axis='dp', size=2, place=0, dim=0, is_strided=False, is_partial=False)
    """

    axis: str
    size: int
    place: int
    dim: int | None
    is_strided: bool = False
    is_partial: bool = False


def axis_uses(text: str | None, mesh: Sequence[MeshAxis], ndim: int) -> tuple[AxisUse, ...] | None:
    """Reads a layout.

    Args:
        text: placements for each axis in order, or what `layout_uses` reads; None if there is none.
        mesh: the axes.
        ndim: the number of dims of the tensor.

    Returns:
        What each axis does; None for text that says something else.

    Example:
        >>> axis_uses("Shard(7)", [MeshAxis("dp", 2, 1)], 2) is None
        True
    """
    laid = None if text is None else layout_uses(text, mesh, ndim)
    if laid is not None:
        axes = enumerate(zip(mesh, laid, strict=True))
        return tuple(AxisUse(str(a.name), a.size, place, *use) for place, (a, use) in axes)
    words = [] if text is None else _split(text)
    if len(words) != len(mesh):
        return None
    uses: list[AxisUse] = []
    for place, (word, axis) in enumerate(zip(words, mesh, strict=True)):
        shard = _SHARD.fullmatch(word)
        name, size = str(axis.name), axis.size
        if shard is not None:
            dim = int(shard[2])
            if not -ndim <= dim < ndim:
                return None
            uses.append(AxisUse(name, size, place, dim % ndim, shard[1].startswith("_")))
        elif _COPY.fullmatch(word) or _PARTIAL.fullmatch(word):
            is_partial = _COPY.fullmatch(word) is None
            uses.append(AxisUse(name, size, place, None, is_partial=is_partial))
        else:
            return None
    return tuple(uses)


def _split(text: str) -> list[str]:
    """The parts between commas that stand in no parentheses."""
    words, depth = [""], 0
    for letter in text.strip().removeprefix("(").removesuffix(")") if _wrapped(text) else text:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            words.append("")
        else:
            words[-1] += letter
    return [word.strip() for word in words if word.strip()]


def _wrapped(text: str) -> bool:
    """Whether the whole text stands in one pair of parentheses."""
    return text.strip().startswith("(") and text.strip().endswith(")")
