"""The short text of a layout, both ways: `[dp.tp, -, -?] sum(ep)`.

    dp.tp       cut by dp, and inside that by tp
    -           not cut
    ?           open: the compiler may cut it further
    tp/2%2      part of an axis: the digit coordinate // 2 % 2
    ~4          a gap: a 4-fold cut that no axis has made
    sum(ep)     pending reduction over ep

Names that are no words stand in double quotes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from mesh_utils import Axis, Mesh
from xla_dtensor.core.entries import AxisPart, Dim, Entry, Gap, describe_axes
from xla_dtensor.core.errors import LayoutError

_TEXT = re.compile(
    r"\s*\[(?P<dims>(?:[^\]\"]|\"(?:[^\"\\]|\\.)*\")*)\]\s*(?P<partial>.*)", re.DOTALL
)
_NAME = r"(?P<name>\w+|\"(?:[^\"\\]|\\.)*\")"
_ENTRY = re.compile(rf"~(?P<gap>\d+)|{_NAME}(?:(?:/(?P<inner>\d+))?%(?P<size>\d+))?")
_PARTIAL = re.compile(rf"\s*(?P<op>\w+)\({_NAME}\)\s*")


def to_text(
    dims: Sequence[Dim], partial: Sequence[tuple[Axis, str]], open_dims: frozenset[int]
) -> str:
    """The text of a layout's parts."""
    shown = ", ".join(
        (".".join(map(_entry_text, entries)) or "-") + ("?" if dim in open_dims else "")
        for dim, entries in enumerate(dims)
    )
    return " ".join([f"[{shown}]", *(f"{op}({_name_text(axis)})" for axis, op in partial)])


def _name_text(axis: Axis) -> str:
    name = str(axis)
    return name if re.fullmatch(r"\w+", name) else json.dumps(name, ensure_ascii=False)


def _entry_text(entry: Entry) -> str:
    if isinstance(entry, Gap):
        return f"~{entry.size}"
    if isinstance(entry, AxisPart):
        inner = f"/{entry.inner}" if entry.inner > 1 else ""
        return f"{_name_text(entry.axis)}{inner}%{entry.size}"
    return _name_text(entry)


def parse_text(
    text: str, mesh: Mesh
) -> tuple[tuple[Dim, ...], tuple[tuple[Axis, str], ...], frozenset[int]]:
    """Reads the text of a layout on a mesh.

    Returns:
        (entries per dim, (axis, reduce op) pairs, open dims).

    Raises:
        LayoutError: The text has another form, or names an axis that the mesh lacks.
    """
    match = _TEXT.fullmatch(text)
    if match is None:
        raise _refusal(text, "It has no [...] with one entry per tensor dim", mesh)
    dims: list[Dim] = []
    open_dims: set[int] = set()
    for dim, piece in enumerate(_split(match["dims"], ",")):
        entries = piece.strip()
        if entries.endswith("?"):
            open_dims.add(dim)
            entries = entries[:-1].rstrip()
        dims.append(() if entries == "-" else _read_entries(entries, text, mesh))
    return tuple(dims), _read_partial(match["partial"], text, mesh), frozenset(open_dims)


def _read_entries(entries: str, text: str, mesh: Mesh) -> Dim:
    return tuple(_read_entry(entry.strip(), text, mesh) for entry in _split(entries, ".") or [""])


def _read_entry(entry: str, text: str, mesh: Mesh) -> Entry:
    match = _ENTRY.fullmatch(entry)
    if match is None:
        raise _refusal(text, f"{entry!r} is no axis, part of an axis, gap or '-'", mesh)
    if match["gap"]:
        return Gap(int(match["gap"]))
    axis = _read_name(match["name"], text, mesh)
    if match["size"] is None:
        return axis
    return AxisPart(axis, int(match["size"]), int(match["inner"] or 1))


def _read_partial(rest: str, text: str, mesh: Mesh) -> tuple[tuple[Axis, str], ...]:
    partial: list[tuple[Axis, str]] = []
    position = 0
    while position < len(rest):
        match = _PARTIAL.match(rest, position)
        if match is None:
            raise _refusal(text, f"{rest[position:]!r} is no reduction such as sum(axis)", mesh)
        partial.append((_read_name(match["name"], text, mesh), match["op"]))
        position = match.end()
    return tuple(partial)


def _read_name(name: str, text: str, mesh: Mesh) -> Axis:
    wanted = json.loads(name) if name.startswith('"') else name
    for axis in mesh.axis_names:
        if str(axis) == wanted:
            return axis
    raise _refusal(text, f"{wanted!r} is no axis of the mesh with {describe_axes(mesh)}", mesh)


def _split(text: str, separator: str) -> list[str]:
    """Splits at a separator outside of double quotes; an empty text has no pieces."""
    if not text.strip():
        return []
    pieces = re.split(rf"({re.escape(separator)}|\"(?:[^\"\\]|\\.)*\")", text)
    result = [""]
    for piece in pieces:
        if piece == separator:
            result.append("")
        else:
            result[-1] += piece
    return result


def _refusal(text: str, reason: str, mesh: Mesh) -> LayoutError:
    example = ", ".join(_name_text(axis) for axis in mesh.axis_names[:2])
    return LayoutError(
        f"The layout text {text!r} was to be read. {reason}. "
        f"Pass one entry per tensor dim, e.g. '[{example}, -]'."
    )
