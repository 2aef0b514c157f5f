"""Writes a picture as PNG, with matplotlib, which is asked for only here.

Matplotlib is no dependency: SVG needs none. No window opens and pyplot is not used.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

from mesh_utils.drawing_colours import LIGHT, UNUSED_COLOUR, axis_colour
from mesh_utils.drawing_scene import UNUSED, Scene
from mesh_utils.errors import MeshError

_PIXELS_PER_INCH = 100
_SCALE = 2
"""Pixels of the file for one of the picture, so that labels of 10 can be read."""
_POINTS = 72 / _PIXELS_PER_INCH
"""Points of a font or a line for a pixel of the picture."""


def png_of_scene(scene: Scene, path: Path) -> None:
    """Writes a picture on a light background.

    Args:
        scene: the picture.
        path: the file.

    Raises:
        MeshError: matplotlib cannot be imported.
    """
    figure_class, rectangle_class = _matplotlib(path)
    inches = scene.width / _PIXELS_PER_INCH, scene.height / _PIXELS_PER_INCH
    figure = figure_class(figsize=inches, facecolor=LIGHT["paper"])
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, scene.width)
    axes.set_ylim(scene.height, 0)  # y downwards, as in the picture
    axes.axis("off")
    for axis in dict.fromkeys(stroke.axis for stroke in scene.strokes):
        _draw_axis(axes, scene, axis)
    for cell in scene.cells:
        square = rectangle_class(
            (cell.x, cell.y), cell.side, cell.side, facecolor=LIGHT["chip"], edgecolor=LIGHT["edge"]
        )
        axes.add_patch(square)
        place = cell.x + cell.side / 2, cell.y + cell.side / 2
        style = {"ha": "center", "va": "center", "family": "monospace", "color": LIGHT["ink"]}
        axes.text(*place, cell.label, fontsize=scene.font_size * _POINTS, **style)
    for words in scene.words:
        axes.text(
            words.x,
            words.y,
            words.text,
            fontsize=words.size * _POINTS,
            ha={"start": "left", "middle": "center", "end": "right"}[words.anchor],
            va="baseline",
            weight="bold" if words.bold else "normal",
            family="monospace",
            color=LIGHT["ink"],
        )
    figure.savefig(path, format="png", dpi=_SCALE * _PIXELS_PER_INCH)


def _draw_axis(axes: Any, scene: Scene, axis: int) -> None:
    colour, width = (UNUSED_COLOUR, 1.0) if axis == UNUSED else (axis_colour(axis), 3.0)
    strokes = [stroke for stroke in scene.strokes if stroke.axis == axis]
    gap = float("nan")  # ends one line and begins the next
    xs = [place for each in strokes for place in (each.x, each.to_x, gap)]
    ys = [place for each in strokes for place in (each.y, each.to_y, gap)]
    axes.plot(xs, ys, color=colour, linewidth=width * _POINTS, solid_capstyle="butt", zorder=0)
    dots = [(each.to_x, each.to_y) for each in strokes if each.dot]
    if dots:
        style = {"marker": "o", "linestyle": "none", "markersize": width * _POINTS + 1}
        axes.plot(*zip(*dots, strict=True), color=colour, zorder=0, **style)


def _matplotlib(path: Path) -> tuple[Any, Any]:
    """Matplotlib's Figure and Rectangle."""
    try:
        figures: Any = import_module("matplotlib.figure")
        patches: Any = import_module("matplotlib.patches")
    except ImportError as error:
        raise MeshError(
            f"A drawing was asked for as {str(path)!r}. PNG needs the package matplotlib, which "
            f"cannot be imported: {error}. Install matplotlib, or pass a file that ends in .svg."
        ) from error
    return figures.Figure, patches.Rectangle
