"""What a collective moves, as far as findings ask: weights or activations, over which axes.

Weights are told by their shapes: each dim of an array divides one of the weight's, in any order,
and in a loop one layer of those that are stacked.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from mesh_utils import Axis
from xla_dtensor.report.attribution import Origin, origin_of
from xla_dtensor.report.collective import Collective
from xla_dtensor.report.evidence import Held
from xla_dtensor.report.held_shards import is_vocabulary
from xla_dtensor.report.hlo_shape import ArrayShape

__all__ = ["Move", "are_weights", "largest_weight", "moves_of", "weight_of"]

_WEIGHTS = ("parameter", "frozen parameter")
_PART = re.compile(r":\(\d+\)\d+$")


@dataclass(frozen=True)
class Move:
    """A collective and what it moves.

    Attributes:
        collective: the instruction.
        origin: whose it is.
        axes: the axes that it spans, of parts the whole; None if it follows none.
        activations: what comes out and is no weight.
    """

    collective: Collective
    origin: Origin
    axes: tuple[Axis, ...] | None
    activations: tuple[ArrayShape, ...]

    @property
    def times(self) -> int:
        """How often it runs in a step, at least."""
        return 1 if self.collective.executions is None else self.collective.executions

    @property
    def is_gather(self) -> bool:
        """Whether it is an all-gather."""
        return self.collective.kind == "all-gather"

    @property
    def gathers_weights(self) -> bool:
        """Whether it gathers weights and nothing else."""
        return self.is_gather and not self.activations


def moves_of(collectives: Iterable[Collective], held: Iterable[Held]) -> tuple[Move, ...]:
    """Says of each collective what it moves.

    Args:
        collectives: those of a program.
        held: what lives outside the program.

    Returns:
        One move for each collective, in their order.
    """
    weights = [one for one in held if one.role in _WEIGHTS]
    return tuple(
        Move(
            item,
            origin_of(item.op_name, item.source),
            _whole(item.axes),
            tuple(array for array in item.results if weight_of(array, weights, item) is None),
        )
        for item in collectives
    )


def are_weights(arrays: Iterable[ArrayShape], weights: list[Held], item: Collective) -> bool:
    """Whether all arrays can be weights. Where nobody says what the weights are, they can.

    Args:
        arrays: operands or results.
        weights: the weights.
        item: the collective whose they are.
    """
    return not weights or all(weight_of(array, weights, item) is not None for array in arrays)


def weight_of(array: ArrayShape, weights: Iterable[Held], item: Collective) -> Held | None:
    """Finds a weight that an array can be, whole or in shards, transposed or not.

    Args:
        array: operand or result.
        weights: the weights.
        item: the collective whose it is.

    Returns:
        The first that it can be; None if it can be none.
    """
    dims = sorted(dim for dim in array.dims if dim > 1)
    for one in weights:
        shapes = [one.shape, *([one.shape[1:]] if _is_stacked(one, item) else [])]
        for shape in shapes:
            whole = sorted(dim for dim in shape if dim > 1)
            if len(whole) == len(dims) and all(
                large % small == 0 for small, large in zip(dims, whole, strict=True)
            ):
                return one
    return None


def largest_weight(item: Collective, weights: list[Held]) -> int:
    """Returns the bytes of the largest weight, vocabulary matrices aside where there are others.

    Args:
        item: a collective; in a loop, of weights that are stacked layer by layer one layer's count.
        weights: the weights.
    """
    layers = [one for one in weights if not is_vocabulary(one)] or weights
    return max(
        one.global_bytes // one.layers // (one.shape[0] if _is_stacked(one, item) else 1)
        for one in layers
    )


def _is_stacked(held: Held, item: Collective) -> bool:
    layers = held.shape[0] if len(held.shape) > 1 else 0
    return item.in_loop and bool(layers) and layers == item.executions


def _whole(axes: tuple[Axis, ...] | None) -> tuple[Axis, ...] | None:
    """The axes of which some are parts."""
    if axes is None:
        return None
    return tuple(dict.fromkeys(_PART.sub("", x) if isinstance(x, str) else x for x in axes))
