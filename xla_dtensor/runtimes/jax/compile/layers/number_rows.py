"""Traced numbers that are rows: the step count of layer 0, 1, 2, ... and what comes of it.

Optimizers compute in Python floats, for each parameter by itself: ``beta1 ** step.item()``. Where
the counters are the rows of a stack (``traced_stacks``), the first layer's number is computed
for all layers, as a vector, and the other layers' are found::

    steps = [c.item() for c in counters]        rows of the vector c
    bias = [1 - 0.9**step for step in steps]    0.9 ** c and 1 - (0.9 ** c), each traced once

Invariant: a number's value is its row of the vector, whoever else asks for other rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from jax.extend.core import set_current_trace

from xla_dtensor.runtimes.jax.arrays.private import trace_of
from xla_dtensor.runtimes.jax.arrays.values import x64
from xla_dtensor.runtimes.jax.compile.layers.layer_stacks import stack_layers, unstack_layers
from xla_dtensor.runtimes.jax.compile.layers.traced_stacks import TracedStack
from xla_dtensor.runtimes.jax.eager.scalar import ScalarNode, sym_of_node, unwrap_number

__all__ = ["NumberRows", "RowNode", "number_of_row", "vector_of"]


class NumberRows:
    """A vector of numbers, and the vectors that were computed of it.

    Args:
        vector: The numbers, in the order of the layers.
    """

    def __init__(self, vector: Any) -> None:
        self.vector = vector
        # With what each was computed of: while that lives, nothing else has its id.
        self._known: dict[Hashable, tuple[NumberRows, Sequence[Any]]] = {}

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
                given = [n.rows.vector if isinstance(n, RowNode) else n.value for n in nodes]
                if any(trace_of(value) not in (None, own) for value in given):
                    return None
                self._known[key] = NumberRows(function(*given)), nodes
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


def number_of_row(stack: TracedStack, lane: int) -> Any:
    """Return the SymFloat or SymInt of a row of a stack of 0-dim tensors."""
    if stack.numbers is None or stack.numbers[0] is not stack.array:
        kind = jnp.float64 if jnp.issubdtype(stack.array.dtype, jnp.floating) else jnp.int64
        with x64(), set_current_trace(trace_of(stack.array)):
            stack.numbers = stack.array, NumberRows(stack.array.astype(kind))
    return sym_of_node(RowNode(stack.numbers[1], lane))


def vector_of(numbers: Sequence[Any]) -> Any:
    """Return numbers as a vector, Python's and traced ones; None if they are of several kinds."""
    kinds = {torch.SymFloat: float, torch.SymInt: int}
    found = {kinds.get(type(number), type(number)) for number in numbers}
    if len(found) > 1 or not found <= {float, int}:
        return None
    nodes = [getattr(number, "node", None) for number in numbers]
    if isinstance(nodes[0], RowNode) and len(nodes[0].rows.vector) == len(nodes):
        rows = nodes[0].rows
        at = [(n.rows, n.lane) for n in nodes if isinstance(n, RowNode)]
        if at == [(rows, lane) for lane in range(len(nodes))]:
            return rows.vector
    dtype = jnp.float64 if found == {float} else jnp.int64
    if not any(node is not None for node in nodes):
        return jnp.asarray(np.asarray(numbers, dtype))
    return stack_layers([jnp.asarray(unwrap_number(number), dtype) for number in numbers])
