"""The plot of `benchmarks.step`: bars, as SVG written by hand, for light and for dark screens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

from benchmarks.step_plan import (
    BY_HAND,
    MARKED,
    OURS,
    OURS_ON_TORCH_XLA,
    TORCH_COMPILE,
    TORCHAX,
)

__all__ = ["Bar", "Panel", "panels_of", "svg_of"]

_COLOURS = {
    OURS: "#2f6fdb",
    BY_HAND: "#8a8f98",
    OURS_ON_TORCH_XLA: "#e0712c",
    MARKED: "#c9a227",
    TORCHAX: "#8e5bb5",
    TORCH_COMPILE: "#4a9c5d",
}
_TITLES = {"llama": "Llama", "vit": "ViT", "mixtral": "Mixtral", "resnet": "ResNet"}
_WIDTH, _LEFT, _RIGHT = 760, 220, 150
_BAR, _GAP, _TITLE = 18, 6, 34
_FONT = "system-ui, sans-serif"


@dataclass(frozen=True)
class Bar:
    """One bar.

    Args:
        way: What it stands for; chooses its colour.
        value: Its length.
        label: What is written behind it.
    """

    way: str
    value: float
    label: str


@dataclass(frozen=True)
class Panel:
    """Bars of one scale, under a title."""

    title: str
    bars: tuple[Bar, ...]


def panels_of(stored: Any) -> list[Panel]:
    """Returns a panel for every model and number of devices, and one for every TPU topology.

    Args:
        stored: What `benchmarks.step` has stored.
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in stored.get("rows", ()):
        many = f"{row['devices']} device{'s' if row['devices'] > 1 else ''}"
        title = f"{_TITLES[row['model']]}, {many}: median step, ms (ratio to JAX by hand)"
        groups.setdefault(title, []).append(row)
    panels = [Panel(title, tuple(_step_bars(rows))) for title, rows in groups.items()]
    groups.clear()
    for row in stored.get("pods", ()):
        title = f"{_TITLES[row['model']]} compiled for {row['topology']}: collectives, MB per chip"
        groups.setdefault(title, []).append(row)
    return panels + [Panel(title, tuple(_pod_bars(rows))) for title, rows in groups.items()]


def _step_bars(rows: Sequence[dict[str, Any]]) -> Iterator[Bar]:
    hand = next((row for row in rows if row["way"] == BY_HAND), None)
    for row in rows:
        seconds = row["step_seconds"]["median"]
        ratio = f" ({seconds / hand['step_seconds']['median']:.2f})" if hand else ""
        yield Bar(row["way"], seconds, f"{seconds * 1e3:.0f}{ratio}")


def _pod_bars(rows: Sequence[dict[str, Any]]) -> Iterator[Bar]:
    for row in rows:
        moved = sum(one["bytes"] for one in row["collectives"])
        yield Bar(row["way"], moved, f"{moved / 1e6:.2f}")


def svg_of(panels: Sequence[Panel]) -> str:
    """Writes the panels below one another.

    Args:
        panels: Each with at least one bar.

    Returns:
        The file: nothing in it comes from elsewhere.
    """
    return "\n".join(_lines(panels)) + "\n"


def _lines(panels: Sequence[Panel]) -> Iterator[str]:
    height = sum(_TITLE + len(p.bars) * (_BAR + _GAP) for p in panels) + _GAP * 2
    size = f'width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}"'
    yield f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    yield "<title>The steps of benchmarks.step</title>"
    dark = ".paper{fill:#14161a}.ink{fill:#e6e8eb}"
    yield f"<style>@media (prefers-color-scheme: dark){{{dark}}}</style>"
    yield '<rect class="paper" width="100%" height="100%" fill="#ffffff"/>'
    yield f'<g class="ink" fill="#1c1f24" font-family="{_FONT}" font-size="12">'
    top = _GAP
    for panel in panels:
        yield f'<text x="12" y="{top + 22}" font-weight="bold">{escape(panel.title)}</text>'
        top += _TITLE
        longest = max(bar.value for bar in panel.bars) or 1.0
        for bar in panel.bars:
            yield from _bar(bar, top, (_WIDTH - _LEFT - _RIGHT) * bar.value / longest)
            top += _BAR + _GAP
    yield "</g>"
    yield "</svg>"


def _bar(bar: Bar, top: int, length: float) -> Iterator[str]:
    words = top + _BAR - 5
    yield f'<text x="{_LEFT - 8}" y="{words}" text-anchor="end">{escape(bar.way)}</text>'
    colour = _COLOURS.get(bar.way, "#8a8f98")
    yield (
        f'<rect x="{_LEFT}" y="{top}" width="{length:.1f}" height="{_BAR}" rx="2" fill="{colour}"/>'
    )
    yield f'<text x="{_LEFT + length + 8:.1f}" y="{words}">{escape(bar.label)}</text>'
