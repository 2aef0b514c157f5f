"""The words of a report: what fits, which axes, which line; the same in every format."""

from __future__ import annotations

import re
from collections.abc import Iterable

from mesh_utils import Axis
from xla_dtensor.report.attribution import Origin
from xla_dtensor.report.compile_report import CompileReport
from xla_dtensor.report.quantities import bytes_text, seconds_text, share_text
from xla_dtensor.report.report_machine import MeshAxis

__all__ = [
    "axes_text",
    "base_axes",
    "mesh_axes_text",
    "module_text",
    "one_line",
    "roofline_sentence",
    "source_text",
    "step_words",
    "verdict",
]

# Control characters, line breaks, signs that turn the direction of text, halves of surrogates.
_UNPRINTABLE = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]+"
)
_PART = re.compile(r"(.+):\((\d+)\)(\d+)")


def verdict(report: CompileReport) -> str:
    """Says whether it fits, and by how much.

    Args:
        report: the report.

    Returns:
        A sentence; it begins with "Fits", "DOES NOT FIT" or "Not known".
    """
    memory = report.memory
    needs = bytes_text(memory.total_bytes)
    if memory.fits is None:
        return f"Not known whether it fits: each device needs {needs}; what it has is not known."
    has = bytes_text(memory.capacity_bytes)
    spare = memory.spare_bytes or 0
    if memory.fits:
        return f"Fits: each device needs {needs} of {has}; {bytes_text(spare)} to spare."
    return f"DOES NOT FIT: each device needs {needs} and has {has}; {bytes_text(-spare)} too much."


def roofline_sentence(report: CompileReport) -> str:
    """Says how long a step takes, as modelled.

    Args:
        report: the report.

    Returns:
        A sentence.
    """
    model = report.roofline
    if model is None:
        return f"How long a step takes was not modelled: {report.no_roofline}."
    return f"A step takes {step_words(report)}. Modelled, not measured."


def step_words(report: CompileReport) -> str:
    """Says how long a step takes, as modelled, in a part of a sentence.

    Args:
        report: the report.

    Returns:
        The seconds if everything overlaps and if nothing does, the MFU of both, and what binds; ""
        where nothing was modelled.
    """
    model = report.roofline
    if model is None:
        return ""
    best, worst = seconds_text(model.step_seconds), seconds_text(model.step_seconds_no_overlap)
    words = f"{best} if everything overlaps, {worst} if nothing does"
    if model.mfu is not None:
        words += f" (MFU {share_text(model.mfu)} and {share_text(model.mfu_no_overlap)})"
    return f"{words}; bound by {model.binding}"


def mesh_axes_text(axes: Iterable[MeshAxis]) -> str:
    """Writes a mesh.

    Args:
        axes: its axes.

    Returns:
        The axes with their sizes.

    Example:
        >>> mesh_axes_text([MeshAxis("dp", 4, 2), MeshAxis("tp", 4, 1)])
        'dp = 4 (2 over DCN x 2 on ICI), tp = 4'
    """
    return ", ".join(axis.words for axis in axes)


def axes_text(axes: tuple[Axis, ...] | None, mesh: Iterable[MeshAxis] = ()) -> str:
    """Writes the axes of a collective.

    Args:
        axes: as of a collective: whole axes, or parts of axes as "dp:(1)2".
        mesh: the axes of the mesh, for the sizes of which they are parts.

    Returns:
        Names; of a part its size, and of how much. "mixed" where the groups follow no axes, "-"
        where nothing is sent.

    Example:
        >>> axes_text(("dp:(1)2", "tp"), [MeshAxis("dp", 8, 2)]), axes_text(None), axes_text(())
        ('dp (2 of 8), tp', 'mixed', '-')
    """
    if axes is None:
        return "mixed"
    sizes = {str(axis.name): axis.size for axis in mesh}
    return ", ".join(_axis_text(str(axis), sizes) for axis in axes) or "-"


def base_axes(axes: tuple[Axis, ...] | None) -> tuple[str, ...] | None:
    """Names the whole axes of which a collective spans all or part.

    Args:
        axes: as of a collective.

    Returns:
        Names of axes of the mesh; None for None.

    Example:
        >>> base_axes(("dp:(1)2", "dp:(2)4", "tp"))
        ('dp', 'tp')
    """
    if axes is None:
        return None
    parts = (_PART.fullmatch(str(axis)) for axis in axes)
    names = (part[1] if part else str(axis) for part, axis in zip(parts, axes, strict=True))
    return tuple(dict.fromkeys(names))


def module_text(origin: Origin | None) -> str:
    """Writes the module of an origin, with the op.

    Args:
        origin: where something comes from.

    Returns:
        "Llama/layers.*/mlp: dot_general", or what of it is known; "-" if nothing.
    """
    if origin is None:
        return "-"
    return ": ".join(word for word in (origin.module, origin.op) if word) or "-"


def source_text(origin: Origin | None, *, whole: bool = False) -> str:
    """Writes the line of source of an origin.

    Args:
        origin: where something comes from.
        whole: with the whole path; else its last two parts.

    Returns:
        "models/llama.py:42", or "-".
    """
    if origin is None or origin.source is None:
        return "-"
    text = str(origin.source)
    return text if whole else "/".join(re.split(r"[/\\]", text)[-2:])


def one_line(text: str) -> str:
    r"""Takes out what a terminal or a browser would obey, or what cannot be written at all.

    Args:
        text: any text.

    Returns:
        The text with a space in place of each run of control characters.

    Example:
        >>> one_line("a\nb\x1b[31m")
        'a b [31m'
    """
    return _UNPRINTABLE.sub(" ", text)


def _axis_text(axis: str, sizes: dict[str, int]) -> str:
    part = _PART.fullmatch(axis)
    if part is None:
        return axis
    name, size = part[1], int(part[3])
    whole = f" of {sizes[name]}" if name in sizes else ""
    return f"{name} ({size}{whole})"
