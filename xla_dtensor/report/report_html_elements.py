"""Elements of HTML and SVG whose text and attributes are escaped, always.

An element is made by `element`; what is inside is text, which is escaped, or other elements, which
are not, because they have been. So nothing that comes from a model, a path or a flag can become
markup, and no other file of the report writes an angle bracket.
"""

from __future__ import annotations

from html import escape
from typing import NewType

from xla_dtensor.report.report_tables import Table
from xla_dtensor.report.report_words import one_line

__all__ = ["Element", "element", "join", "number", "table_element"]

Element = NewType("Element", tuple[str])
"""Markup that is safe to write: a tuple, so that it cannot be taken for text."""

_VOID = frozenset({"br", "meta", "rect", "line", "circle", "path", "use"})


def element(
    name: str, /, *children: Element | str | None, **attributes: str | float | None
) -> Element:
    """Makes an element.

    Args:
        name: of the tag.
        children: text or elements; None is left out.
        attributes: their values; a trailing underscore of a name is dropped, other underscores
            become hyphens. None is left out.

    Returns:
        The element.

    Example:
        >>> element("b", "1 < 2", element("i", "x"), class_="a")[0]
        '<b class="a">1 &lt; 2<i>x</i></b>'
    """
    words = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_attribute(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    inside = "".join(_markup(child) for child in children if child is not None)
    if name in _VOID and not inside:
        return Element((f"<{name}{words}>" if name in ("br", "meta") else f"<{name}{words}/>",))
    return Element((f"<{name}{words}>{inside}</{name}>",))


def join(*elements: Element | None) -> Element:
    r"""Puts elements after each other, each on a line of its own.

    Args:
        elements: the elements; None is left out.

    Returns:
        All of them.

    Example:
        >>> join(element("br"), None, element("br"))[0]
        '<br>\n<br>'
    """
    return Element(("\n".join(each[0] for each in elements if each is not None),))


def number(value: float) -> str:
    """Writes a coordinate.

    Args:
        value: in user units.

    Returns:
        At most one decimal.

    Example:
        >>> number(1.25), number(3.0)
        ('1.2', '3')
    """
    return f"{value:.1f}".removesuffix(".0")


def table_element(table: Table) -> Element:
    """Makes a table.

    Args:
        table: the words.

    Returns:
        The element, scrollable if it is wider than the page.
    """
    sides = tuple("number" if is_number else None for is_number in table.right)
    head = (element("th", name, class_=side) for name, side in zip(table.names, sides, strict=True))
    body = (
        element("tr", *(element("td", cell, class_=s) for cell, s in zip(row, sides, strict=True)))
        for row in table.rows
    )
    rows = element("table", element("thead", element("tr", *head)), element("tbody", *body))
    more = element("p", f"and {table.more:,} more", class_="quiet") if table.more else None
    return element("div", rows, more, class_="scroll")


def _markup(child: Element | str) -> str:
    return escape(one_line(child), quote=False) if isinstance(child, str) else child[0]


def _attribute(value: str | float) -> str:
    return escape(one_line(value if isinstance(value, str) else number(value)), quote=True)
