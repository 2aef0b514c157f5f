"""The plot of `benchmarks.mesh`: by how much the search is better, over the share of shapes.

One line per family: at 30 % it is as high as the gain that 30 % of its shapes reach. The scale is
logarithmic, because a few shapes gain much more than the others. Written by hand as SVG, for light
and dark screens, in the colours that drawings of meshes have.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from benchmarks.mesh_summary import gain
from mesh_utils.draw import DARK, LIGHT, UNUSED_COLOUR, axis_colour

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 56, 56
_FONT = "ui-monospace, Menlo, Consolas, monospace"
_DASHES = ("", "8 4", "2 4", "12 4 2 4", "1 3", "16 6")
_MAX_POINTS = 200
_TICKS = (1, 1.25, 1.5, 2, 3, 5, 10, 20, 50, 100, 1000)


def svg_of_gains(rows: Iterable[dict[str, Any]]) -> str:
    """Draws the gains.

    Args:
        rows: a row per slice, as `benchmarks.mesh` stores them.

    Returns:
        The file.

    Example:
        >>> row = {"family": "v5e, v6e", "cases": [["4x4", 1.5, 1.0, 1.5, 2.0, ""]]}
        >>> svg_of_gains([row]).count("<polyline")
        1
    """
    gains: dict[str, list[float]] = {}
    for row in rows:
        if " as " in row["family"]:
            continue
        found = [each for case in row["cases"] if (each := gain(case)) is not None]
        gains.setdefault(row["family"], []).extend(found)
    top = max((each for family in gains.values() for each in family), default=1.0)
    return "\n".join(_lines({name: sorted(each)[::-1] for name, each in gains.items()}, top)) + "\n"


def _lines(gains: dict[str, list[float]], top: float) -> Iterator[str]:
    highest = next(tick for tick in _TICKS if tick >= max(top, 1.5))
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    yield f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    yield "<title>Score of the search's mesh over that of JAX's, by share of shapes</title>"
    rules = "".join(
        f".{name}{{{'stroke' if name == 'edge' else 'fill'}:{DARK[name]}}}"
        for name in ("paper", "ink", "edge")
    )
    yield f"<style>@media (prefers-color-scheme: dark){{{rules}}}</style>"
    yield f'<rect class="paper" width="100%" height="100%" fill="{LIGHT["paper"]}"/>'
    yield from _axes(highest)
    for number, (name, descending) in enumerate(gains.items()):
        yield _curve(name, descending, number, highest)
    yield f'<g class="ink" fill="{LIGHT["ink"]}" font-family="{_FONT}" font-size="12">'
    yield f'<text x="{LEFT}" y="22" font-size="14" font-weight="bold">Modelled score of the search'
    yield "over that of JAX&#8217;s mesh</text>"
    yield f'<text x="{LEFT}" y="40">read: so many % of the shapes gain at least so much</text>'
    yield "</g>"
    yield from _legend(list(gains))
    yield "</svg>"


def _x(share: float) -> float:
    return LEFT + share * (WIDTH - LEFT - RIGHT)


def _y(value: float, highest: float) -> float:
    return HEIGHT - BOTTOM - math.log(value) / math.log(highest) * (HEIGHT - TOP - BOTTOM)


def _axes(highest: float) -> Iterator[str]:
    yield f'<g class="edge" stroke="{LIGHT["edge"]}" stroke-width="0.5">'
    ticks = [tick for tick in _TICKS if tick <= highest]
    for value in ticks:
        y = _y(value, highest)
        yield f'<line x1="{_x(0):.1f}" y1="{y:.1f}" x2="{_x(1):.1f}" y2="{y:.1f}"/>'
    yield "</g>"
    yield f'<g class="ink" fill="{LIGHT["ink"]}" font-family="{_FONT}" font-size="12">'
    for value in ticks:
        y = _y(value, highest) + 4
        yield f'<text x="{LEFT - 8}" y="{y:.1f}" text-anchor="end">{value:g}x</text>'
    for share in (0, 0.25, 0.5, 0.75, 1):
        x, y = _x(share), HEIGHT - BOTTOM + 18
        yield f'<text x="{x:.1f}" y="{y}" text-anchor="middle">{100 * share:g} %</text>'
    x, y = _x(0.5), HEIGHT - BOTTOM + 38
    yield f'<text x="{x:.1f}" y="{y}" text-anchor="middle">share of the mesh shapes</text>'
    yield "</g>"


def _curve(name: str, descending: Sequence[float], number: int, highest: float) -> str:
    count = len(descending)
    step = max(1, count // _MAX_POINTS)
    places = sorted({*range(0, count, step), count - 1})
    points = " ".join(
        f"{_x((place + 1) / count):.1f},{_y(descending[place], highest):.1f}" for place in places
    )
    return (
        f'<polyline data-family="{name}" fill="none" stroke="{_colour(number)}" stroke-width="2" '
        f'stroke-dasharray="{_DASHES[number % len(_DASHES)]}" points="{points}"/>'
    )


def _colour(number: int) -> str:
    return UNUSED_COLOUR if number >= 6 else axis_colour(number)


def _legend(names: Sequence[str]) -> Iterator[str]:
    yield f'<g font-family="{_FONT}" font-size="12">'
    for number, name in enumerate(names):
        y = TOP + 16 + 18 * number
        x = WIDTH - RIGHT - 240
        dash = f'stroke-dasharray="{_DASHES[number % len(_DASHES)]}"'
        yield (
            f'<line x1="{x}" y1="{y - 4}" x2="{x + 34}" y2="{y - 4}" stroke="{_colour(number)}" '
            f'stroke-width="2" {dash}/>'
        )
        yield f'<text class="ink" fill="{LIGHT["ink"]}" x="{x + 42}" y="{y}">{name}</text>'
    yield "</g>"
