"""The bars of the HTML report: memory, communication by axis, modelled times. SVG, no script.

Colours come from the style sheet of the page, so that they follow light and dark.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mesh_utils.drawing_colours import axis_colour
from xla_dtensor.report.compile_report import CompileReport
from xla_dtensor.report.quantities import bytes_text, seconds_text, share_text
from xla_dtensor.report.report_html_elements import Element, element, join, number
from xla_dtensor.report.report_machine import MeshAxis
from xla_dtensor.report.report_tables import axis_totals, kind_words, roofline_rows

__all__ = ["Segment", "axis_bars", "axis_colour_of", "memory_bar", "roofline_bars"]

WIDTH = 960
"""User units across; the page scales it."""

_ROLE_COLOURS = {
    "parameter": "#0072b2",
    "frozen parameter": "#56b4e9",
    "buffer": "#8c6d31",
    "gradient": "#009e73",
    "optimizer state": "#e69f00",
    "argument": "#7b61c9",
    "result": "#a6761d",
    "temporaries": "#cc79a7",
    "program": "#6b7280",
}
_OTHER_COLOUR = "#9a9a9a"
_PHASE_OPACITY = {"forward": 1.0, "backward": 0.7, "optimizer": 0.45, "other": 0.25}
_MIXED_COLOUR = "#8a8a8a"


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of the memory bar.

    Attributes:
        name: in words.
        bytes: on one device.
        padding: of these, padding of the memory layout.
        colour: "#rrggbb".
    """

    name: str
    bytes: int
    padding: int
    colour: str


def memory_segments(report: CompileReport) -> tuple[Segment, ...]:
    """What one device holds, part by part.

    Args:
        report: the report.

    Returns:
        The parts that are not empty.
    """
    memory = report.memory
    parts = [
        Segment(
            kind_words(part.role, part.count),
            part.memory_bytes,
            part.padding_bytes,
            _ROLE_COLOURS.get(part.role, _OTHER_COLOUR),
        )
        for part in memory.parts
    ]
    parts += [
        Segment("temporaries", memory.temporaries_bytes, 0, _ROLE_COLOURS["temporaries"]),
        Segment("program", memory.code_bytes, 0, _ROLE_COLOURS["program"]),
        Segment("not explained", memory.unexplained_bytes, 0, _OTHER_COLOUR),
    ]
    return tuple(part for part in parts if part.bytes > 0)


def memory_bar(report: CompileReport) -> Element:
    """Draws what one device holds beside what it can.

    Args:
        report: the report.

    Returns:
        The bar and its legend.
    """
    memory, parts = report.memory, memory_segments(report)
    capacity = memory.capacity_bytes
    shown = sum(part.bytes for part in parts)
    scale = WIDTH / max(1, shown, memory.total_bytes, capacity or 0)
    x, drawn = 0.0, list[Element]()
    for part in parts:
        width = part.bytes * scale
        drawn.append(_segment(part, x, width))
        x += width
    free = None
    if capacity is not None and capacity * scale > x:
        room = capacity * scale - x
        label = _label(x + room / 2, 45, "free", "free-text") if room > 40 else None
        free = element("g", element("rect", x=x, y=22, width=room, height=36, class_="free"), label)
    limit = None if capacity is None else _limit(capacity * scale, bytes_text(capacity))
    bar = element(
        "svg",
        element("title", "Memory of one device"),
        *drawn,
        free,
        limit,
        viewBox=f"0 0 {WIDTH} 62",
        role="img",
        class_="chart",
    )
    return join(bar, _memory_legend(parts, memory.total_bytes))


def _segment(part: Segment, x: float, width: float) -> Element:
    text = f"{part.name}: {bytes_text(part.bytes)}"
    label = None
    for words in (f"{part.name} {bytes_text(part.bytes)}", part.name):
        if label is None and len(words) * 7.5 + 8 < width:
            label = _label(x + width / 2, 45, words, "on-colour")
    rect = element("rect", x=x, y=22, width=width, height=36, fill=part.colour, class_="part")
    return element("g", element("title", text), rect, label)


def _limit(x: float, words: str) -> Element:
    line = element("line", x1=x, y1=14, x2=x, y2=62, class_="limit")
    anchor = "end" if x > WIDTH / 2 else "start"
    text = element("text", f"usable: {words}", x=x, y=11, text_anchor=anchor, class_="limit-text")
    return element("g", line, text)


def _memory_legend(parts: Sequence[Segment], total: int) -> Element:
    items = [
        element(
            "li",
            _swatch(part.colour),
            element("span", part.name, class_="name"),
            " ",
            element("b", bytes_text(part.bytes)),
            f" {share_text(part.bytes / total)}" if total else None,
            f", of it {bytes_text(part.padding)} padding" if part.padding else None,
        )
        for part in parts
    ]
    return element("ul", *items, class_="legend")


def axis_colour_of(name: str, mesh: Sequence[MeshAxis]) -> str:
    """The colour of a mesh axis on the page.

    Args:
        name: of the axis, or words that begin with it.
        mesh: the axes.

    Returns:
        "#rrggbb"; grey for what is no axis.

    Example:
        >>> axis_colour_of("mixed", [MeshAxis("dp", 2, 1)])
        '#8a8a8a'
    """
    first = name.split(",")[0].split(" (")[0]
    names = [str(axis.name) for axis in mesh]
    return axis_colour(names.index(first)) if first in names else _MIXED_COLOUR


def axis_bars(report: CompileReport) -> Element | None:
    """Draws the bytes that go over each axis of the mesh.

    Args:
        report: the report.

    Returns:
        A bar for each, and a legend of the phases; None if nothing is sent.
    """
    totals = axis_totals(report)
    if not totals:
        return None
    most = max(total.bytes for total in totals) or 1
    rows: list[Element] = []
    for total in totals:
        colour = axis_colour_of(total.axes, report.mesh)
        pieces: list[tuple[float, str, float, str]] = []
        for phase in _PHASE_OPACITY:
            size = total.phases.get(phase, 0)
            if size:
                words = f"{phase}: {bytes_text(size)}"
                pieces.append((size / most, colour, _PHASE_OPACITY[phase], words))
        badge = {"ICI": "inside a slice (ICI)", "DCN": "between slices (DCN)"}
        where = badge.get(total.network, "network not known")
        bound = "at least " if total.at_least else ""
        rows.append(
            _bar_row(
                total.axes,
                f"{where}: {', '.join(total.kinds)}",
                pieces,
                f"{bound}{bytes_text(total.bytes)}",
                "dcn" if total.network == "DCN" else None,
            )
        )
    used = [p for p in _PHASE_OPACITY if any(total.phases.get(p) for total in totals)]
    legend = element(
        "ul",
        *(element("li", _swatch(_MIXED_COLOUR, _PHASE_OPACITY[phase]), phase) for phase in used),
        class_="legend",
    )
    return join(element("div", *rows, class_="bars"), legend)


def roofline_bars(report: CompileReport) -> Element | None:
    """Draws the modelled times of one step.

    Args:
        report: the report.

    Returns:
        A bar for each; the longest is the one that binds. None if nothing was modelled.
    """
    rows = roofline_rows(report)
    if not rows:
        return None
    longest = max(seconds for _, _, seconds in rows) or 1
    binding = "" if report.roofline is None else report.roofline.binding
    bars: list[Element] = []
    for key, name, seconds in rows:
        binds = key == binding
        colour = "var(--binding)" if binds else "var(--muted-bar)"
        if key.startswith("ici "):
            colour = axis_colour_of(key.removeprefix("ici "), report.mesh)
        piece = (seconds / longest, colour, 1.0 if binds else 0.55, seconds_text(seconds))
        note = "binds: the step cannot be faster" if binds else ""
        bars.append(_bar_row(name, note, [piece], seconds_text(seconds), "modelled"))
    return element("div", *bars, class_="bars")


def _bar_row(
    name: str,
    note: str,
    pieces: Sequence[tuple[float, str, float, str]],
    value: str,
    class_: str | None,
) -> Element:
    x, drawn = 0.0, list[Element]()
    for share, colour, opacity, words in pieces:
        width = max(0.5, share * 600)
        style = f"fill:{colour};fill-opacity:{opacity}"
        place = {"x": x, "y": 0, "width": width, "height": 20}
        drawn.append(element("rect", element("title", words), style=style, **place))
        x += width
    bar = element(
        "svg", *drawn, viewBox="0 0 600 20", preserveAspectRatio="none", class_="bar", role="img"
    )
    label = element("div", element("b", name), element("span", note, class_="quiet"), class_="what")
    words = " ".join(word for word in ("row", class_) if word)
    return element("div", label, bar, element("div", value, class_="value"), class_=words)


def _swatch(colour: str, opacity: float = 1.0) -> Element:
    style = f"background:{colour};opacity:{opacity}"
    return element("span", class_="swatch", style=style)


def _label(x: float, y: float, words: str, class_: str) -> Element:
    return element("text", words, x=number(x), y=y, text_anchor="middle", class_=class_)
