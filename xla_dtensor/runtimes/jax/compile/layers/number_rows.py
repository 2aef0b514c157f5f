"""Traced numbers that are rows: the step count of layer 0, 1, 2, ... and what comes of it.

Optimizers compute in Python floats, for each parameter by itself: ``beta1 ** step.item()``. Where
the counters are the rows of a stack (``rows``), the first layer's number is computed for all
layers, as a vector, and the other layers' are found::

    steps = [c.item() for c in counters]        rows of the vector c
    bias = [1 - 0.9**step for step in steps]    0.9 ** c and 1 - (0.9 ** c), each traced once

Invariant: a number's value is its row of the vector, whoever else asks for other rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import set_current_trace

from xla_dtensor.runtimes.jax.arrays.private import trace_of
from xla_dtensor.runtimes.jax.arrays.values import x64
from xla_dtensor.runtimes.jax.compile.layers.layer_stacks import unstack_layers
from xla_dtensor.runtimes.jax.eager.scalar import ScalarNode

__all__ = ["NumberRows", "RowNode"]


class NumberRows:
    """A vector of numbers, and the vectors that were computed of it.

    Args:
        vector: The numbers, in the order of the layers.
    """

    def __init__(self, vector: Any) -> None:
        self.vector = vector
        # With what each was computed of: while that lives, nothing else has its id.
        self._known: dict[Hashable, tuple[NumberRows, Sequence[Any]]] = {}

    @classmethod
    def of(cls, array: Any) -> NumberRows:
        """Return the elements of a vector as numbers of Python's precision."""
        kind = jnp.float64 if jnp.issubdtype(array.dtype, jnp.floating) else jnp.int64
        with x64(), set_current_trace(trace_of(array)):
            return cls(array.astype(kind))

    @functools.cached_property
    def numbers(self) -> list[Any]:
        """The numbers by themselves."""
        with x64(), set_current_trace(trace_of(self.vector)):
            return unstack_layers(self.vector)

    def computed(
        self, function: Callable[..., Any], nodes: Sequence[ScalarNode], key: Hashable
    ) -> NumberRows | None:
        """Return the vector of what `function` makes of these nodes' rows.

        None where one of them is a value of another trace, such as a block's inside of the step's.
        """
        if key not in self._known:
            own = trace_of(self.vector)
            with x64(), set_current_trace(own):
                arguments = [n.rows.vector if isinstance(n, RowNode) else n.value for n in nodes]
                if any(trace_of(argument) not in (None, own) for argument in arguments):
                    return None
                self._known[key] = NumberRows(function(*arguments)), nodes
        return self._known[key][0]


class RowNode(ScalarNode):
    """One number of a vector, under torch's SymNode protocol.

    Args:
        rows: The vector.
        lane: Which of it.
    """

    def __init__(self, rows: NumberRows, lane: int) -> None:
        self.rows, self.lane = rows, lane
        self.current = None

    @property
    def value(self) -> Any:
        """The number, taken out of the vector."""
        return self.rows.numbers[self.lane]

    def _kind(self) -> str:
        return self.rows.vector.dtype.kind

    def applied(self, function: Callable[..., Any], nodes: Sequence[ScalarNode]) -> ScalarNode:
        lanes = {(n.lane, n.rows.vector.shape) for n in nodes if isinstance(n, RowNode)}
        # A number that only the program knows may be this layer's own.
        others_known = all(n.current is not None for n in nodes if not isinstance(n, RowNode))
        rows = None
        if len(lanes) == 1 and others_known:
            keys = (id(n.rows) if isinstance(n, RowNode) else n.key() for n in nodes)
            rows = self.rows.computed(function, nodes, (function, *keys))
        if rows is None:
            with x64():
                return ScalarNode(function(*(node.value for node in nodes)))
        return RowNode(rows, self.lane)
