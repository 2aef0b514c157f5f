"""Writes a picture as SVG: one file, with nothing outside of it, for light and for dark screens.

Every colour is an attribute of its element, so that simple programs show it as well. Paper, ink and
chips change with the screen, by a style sheet; the colours of the axes stand out from both.
"""

from collections.abc import Iterator
from xml.sax.saxutils import escape, quoteattr

from mesh_utils.drawing_colours import DARK, LIGHT, UNUSED_COLOUR, axis_colour
from mesh_utils.drawing_scene import UNUSED, Scene, Stroke, Words

_FONT = "ui-monospace, Menlo, Consolas, monospace"


def svg_of_scene(scene: Scene) -> str:
    """Writes a picture.

    Args:
        scene: the picture.

    Returns:
        The file. The links of an axis are one path in a group that names the axis (data-axis); of
        "none" are those that nobody uses.
    """
    return "\n".join(_lines(scene)) + "\n"


def _lines(scene: Scene) -> Iterator[str]:
    size = f'width="{scene.width:g}" height="{scene.height:g}"'
    box = f'viewBox="0 0 {scene.width:g} {scene.height:g}"'
    yield f'<svg xmlns="http://www.w3.org/2000/svg" {size} {box} role="img">'
    yield f"<title>{escape(scene.title)}</title>"
    rules = "".join(
        f".{name}{{{'stroke' if name == 'edge' else 'fill'}:{DARK[name]}}}" for name in DARK
    )
    yield f"<style>@media (prefers-color-scheme: dark){{{rules}}}</style>"
    yield f'<rect class="paper" width="100%" height="100%" fill="{LIGHT["paper"]}"/>'
    for axis in dict.fromkeys(stroke.axis for stroke in scene.strokes):
        yield from _axis(scene, axis, [each for each in scene.strokes if each.axis == axis])
    yield from _chips(scene)
    yield f'<g class="ink" fill="{LIGHT["ink"]}" font-family="{_FONT}">'
    yield from map(_words, scene.words)
    yield "</g>"
    yield "</svg>"


def _axis(scene: Scene, axis: int, strokes: list[Stroke]) -> Iterator[str]:
    name = "none" if axis == UNUSED else scene.axis_names[axis]
    colour, width = (UNUSED_COLOUR, 1) if axis == UNUSED else (axis_colour(axis), 3)
    yield f'<g data-axis={quoteattr(name)} stroke="{colour}" fill="{colour}">'
    path = "".join(
        f"M{_number(each.x)} {_number(each.y)}L{_number(each.to_x)} {_number(each.to_y)}"
        for each in strokes
    )
    yield f'<path stroke-width="{width}" d="{path}"/>'
    for each in strokes:
        if each.dot:
            radius = 1.2 if axis == UNUSED else 1.6
            yield f'<circle cx="{_number(each.to_x)}" cy="{_number(each.to_y)}" r="{radius}"/>'
    yield "</g>"


def _chips(scene: Scene) -> Iterator[str]:
    yield f'<g class="chip edge" fill="{LIGHT["chip"]}" stroke="{LIGHT["edge"]}">'
    for cell in scene.cells:
        side = _number(cell.side)
        place = f'x="{_number(cell.x)}" y="{_number(cell.y)}" width="{side}" height="{side}"'
        yield f'<rect {place} rx="3" data-chip="{",".join(map(str, cell.chip))}"/>'
    yield "</g>"
    font = f'font-family="{_FONT}" font-size="{_number(scene.font_size)}" text-anchor="middle"'
    yield f'<g class="ink" fill="{LIGHT["ink"]}" {font}>'
    for cell in scene.cells:
        x, y = cell.x + cell.side / 2, cell.y + cell.side / 2 + 0.35 * scene.font_size
        yield f'<text x="{_number(x)}" y="{_number(y)}">{escape(cell.label)}</text>'
    yield "</g>"


def _words(words: Words) -> str:
    weight = ' font-weight="bold"' if words.bold else ""
    place = f'x="{_number(words.x)}" y="{_number(words.y)}" font-size="{_number(words.size)}"'
    anchor = "" if words.anchor == "start" else f' text-anchor="{words.anchor}"'
    return f"<text {place}{weight}{anchor}>{escape(words.text)}</text>"


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
