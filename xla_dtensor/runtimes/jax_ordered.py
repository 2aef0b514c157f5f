"""A function that JAX compiles outside of a step, whose products are looked at first.

``jax.jit`` gives no chance to between lowering and compiling. This one is called like what it
returns: for each kind of arguments, their shardings included, the function is lowered, its products
are told how to lie (:mod:`xla_dtensor.runtimes.jax_product_order`), and the program is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import jax

from xla_dtensor.runtimes.jax_product_order import keep_product_orders

__all__ = ["OrderedProgram"]


class OrderedProgram:
    """A jitted function without products whose tiles lie on the wrong devices.

    Args:
        function: Takes and returns trees of arrays.

    Example:
        >>> program = OrderedProgram(lambda x, y: x @ y)
        >>> program(jax.numpy.ones((2, 3)), jax.numpy.ones((3, 2))).shape
        (2, 2)
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._programs: dict[Hashable, Callable[..., Any]] = {}

    def __call__(self, *args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        key = (tree, tuple((jax.typeof(v), getattr(v, "sharding", None)) for v in leaves))
        program = self._programs.get(key)
        if program is None:
            lowered = jax.jit(self._function).lower(*args)
            keep_product_orders(lowered)
            program = self._programs[key] = lowered.compile()
        return program(*args)
