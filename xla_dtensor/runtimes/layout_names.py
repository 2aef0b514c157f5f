"""Texts that stand for layouts and other values in the arguments of ops.

An op of torch's takes tensors, numbers and texts only. What else our own ops need (a layout, a
region, a function) is named, in graphs of ``torch.compile`` as well::

    %constrain = torch.ops.xla_dtensor.constrain(%payload, "[dp, tp] on (dp=2, tp=4) #3")
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from xla_dtensor.core import Layout
from xla_dtensor.errors import CompileError

__all__ = ["Names", "layout_names", "name_of"]


class Names:
    """Texts that stand for values in graphs, which hold tensors and plain constants only.

    Example:
        >>> names = Names("mesh")
        >>> names.name(("dp", 2), "(dp=2)")
        '(dp=2) #0'
        >>> names.value("(dp=2) #0")
        ('dp', 2)
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._names: dict[Hashable, str] = {}
        self._values: dict[str, Any] = {}

    def name(self, value: Any, text: str, key: Hashable | None = None) -> str:
        """Return the text of a value; equal values (by `key`, if one is given) have one text."""
        key = value if key is None else key
        if key not in self._names:
            self._names[key] = f"{text} #{len(self._names)}"
            self._values[self._names[key]] = value
        return self._names[key]

    def value(self, name: str) -> Any:
        """Return the value that a text stands for.

        Raises:
            CompileError: This process never gave out the text.
        """
        try:
            return self._values[name]
        except KeyError:
            raise CompileError(
                f"A compiled graph names the {self._kind} {name!r}. This process has none of that "
                "name: the graph was made by another one. Compile the function in this process."
            ) from None


layout_names = Names("layout")


def name_of(layout: Layout) -> str:
    """Return the text that stands for a layout."""
    axes = zip(layout.mesh.axis_names, layout.mesh.mesh_shape, strict=True)
    mesh = ", ".join(f"{name}={size}" for name, size in axes)
    return layout_names.name(layout, f"{layout} on ({mesh})")
