"""Layout texts, as evidence of a compiled step has them: "[fsdp.tp, -] sum(ep)", a word per dim.

A word names the mesh axes that cut the dim, the outermost first, "-" none; a part of an axis is
written as "tp:(1)2". What is summed over comes behind the brackets.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from xla_dtensor.report.collective import base_axes
from xla_dtensor.report.hlo_text import split_outside

if TYPE_CHECKING:
    from xla_dtensor.report.report import MeshAxis

__all__ = ["AxisUse", "axis_uses", "bytes_text", "seconds_text", "share_text"]


# ------------------------------------------- Layout texts, as evidence of a compiled step has them

_TEXT = re.compile(r"\[([^\[\]]*)\]((?: [\w?]+\([^()]*\))*)")
_SUM = re.compile(r"[\w?]+\(([^()]*)\)")


def _layout_uses(text: str, mesh: Sequence[MeshAxis], ndim: int) -> tuple[AxisUse, ...] | None:
    """What each axis does, by the text of a layout; None for text that says nothing of them."""
    match = _TEXT.fullmatch(text.strip())
    if match is None:
        return None
    words = [word.strip().removesuffix("?") for word in match[1].split(",")] if match[1] else []
    names = [str(axis.name) for axis in mesh]
    if len(words) != ndim:
        return None
    dims: dict[str, int] = {}
    strided: set[str] = set()
    for dim, word in enumerate(words):
        axes = (base_axes(tuple(word.split("."))) or ()) if word not in ("-", "") else ()
        if not set(axes) <= set(names):
            return None
        dims |= dict.fromkeys(axes, dim)
        places = [names.index(axis) for axis in axes]
        strided |= {
            axis for at, axis in enumerate(axes) if any(place > places[at] for place in places[:at])
        }
    summed = {name.strip() for part in _SUM.finditer(match[2]) for name in part[1].split(",")}
    return tuple(
        AxisUse(name, axis.size, place, dims.get(name), name in strided, name in summed)
        for place, (name, axis) in enumerate(zip(names, mesh, strict=True))
    )


# ------------------------------------------------------------------- Layouts, as reports hold them
#
# As layout text, "[fsdp.tp, -]", or as placements.
#
# Placements are one for each axis of the mesh, "Shard(0), Replicate()".

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
        >>> from xla_dtensor.report.report import MeshAxis
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
        text: placements for each axis in order, or a layout; None if there is none.
        mesh: the axes.
        ndim: the number of dims of the tensor.

    Returns:
        What each axis does; None for text that says something else.

    Example:
        >>> from xla_dtensor.report.report import MeshAxis
        >>> axis_uses("Shard(7)", [MeshAxis("dp", 2, 1)], 2) is None
        True
    """
    laid = None if text is None else _layout_uses(text, mesh, ndim)
    if laid is not None:
        return laid
    text = (text or "").strip()
    if text.startswith("(") and text.endswith(")"):
        text = text[1:-1]
    words = [word.strip() for word in split_outside(text, ",") if word.strip()]
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


# --------------------------------------------------- Bytes, seconds and shares as people read them

_BYTES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))


def bytes_text(value: float | None) -> str:
    """Writes a number of bytes.

    Args:
        value: bytes, of either sign; None if not known.

    Returns:
        Three digits and a unit of powers of 1024.

    Example:
        >>> bytes_text(1 << 20), bytes_text(95.7 * 2**30), bytes_text(0), bytes_text(None)
        ('1.00 MiB', '95.7 GiB', '0 B', '-')
    """
    if value is None:
        return "-"
    size, unit = abs(float(value)), 0
    # 999.5 would be written with four digits: the next unit is easier to read.
    while size >= 999.5 and unit < len(_BYTES) - 1:
        size, unit = size / 1024, unit + 1
    sign = "-" if value < 0 else ""
    return f"{sign}{f'{size:.0f}' if unit == 0 else _digits(size)} {_BYTES[unit]}"


def seconds_text(value: float | None) -> str:
    """Writes a time.

    Args:
        value: seconds, of either sign; None if not known.

    Returns:
        Three digits and a unit; minutes and hours from 120 s on.

    Example:
        >>> seconds_text(0.0123), seconds_text(300), seconds_text(0), seconds_text(None)
        ('12.3 ms', '5 min 0 s', '0 s', '-')
    """
    if value is None or not math.isfinite(value):
        return "-" if value is None or math.isnan(value) else f"{value:+.0f}"
    if value == 0:
        return "0 s"
    size, sign = abs(value), "-" if value < 0 else ""
    if size >= 7200:
        return f"{sign}{size // 3600:.0f} h {size % 3600 // 60:.0f} min"
    if size >= 120:
        return f"{sign}{size // 60:.0f} min {math.floor(size % 60):.0f} s"
    for scale, unit in _SECONDS:
        if size >= 0.9995 * scale:
            return f"{sign}{_digits(size / scale)} {unit}"
    return f"{sign}{size:.2g} s"


def share_text(value: float | None) -> str:
    """Writes a share.

    Args:
        value: 1 is all; None if not known.

    Returns:
        Percent.

    Example:
        >>> share_text(0.4567), share_text(1), share_text(None)
        ('45.7 %', '100 %', '-')
    """
    if value is None:
        return "-"
    # What is not all must not read as all.
    percent = 100 * value
    return f"{percent:.0f} %" if percent in (0, 100) else f"{min(percent, 99.9):.1f} %"


def _digits(size: float) -> str:
    if size < 9.995:
        return f"{size:.2f}"
    return f"{size:.1f}" if size < 99.95 else f"{size:,.0f}"
