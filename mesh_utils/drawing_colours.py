"""The colours of axes in a drawing.

Each stands out from white and from near black (a contrast of 3 to 1, which WCAG asks of graphics).
The first four differ by 40 and all six by 20 in CIELAB, also for eyes without one of the three
kinds of cones (simulated as Machado, Oliveira and Fernandes do, 2009). A test checks it.
"""

AXIS_COLOURS = ("#0096c3", "#ff4b0f", "#8700ff", "#964b4b", "#c35aff", "#b41e78")
"""For the first axis, the second, ...; a seventh has the colour of the first again."""

UNUSED_COLOUR = "#9a9a9a"
"""Of links that no axis uses."""

LIGHT = {"paper": "#ffffff", "ink": "#1a1a1a", "chip": "#f1f1ee", "edge": "#8a8a8a"}
"""On a light screen, and wherever a program does not tell."""

DARK = {"paper": "#0d1117", "ink": "#e6edf3", "chip": "#21262d", "edge": "#8b949e"}
"""On a dark screen."""


def axis_colour(number: int) -> str:
    """The colour of an axis.

    Args:
        number: its place in the mesh, counted from 0.

    Returns:
        "#rrggbb".

    Example:
        >>> axis_colour(0) == axis_colour(6)
        True
    """
    return AXIS_COLOURS[number % len(AXIS_COLOURS)]
