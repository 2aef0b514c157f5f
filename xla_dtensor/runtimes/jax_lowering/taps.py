"""Linear maps along one dim, given as taps: which elements each output takes, and how much of each.

Resizing, adaptive averages and the backward of padding are such maps, one per image dim. A map is
known before any value is, so its transpose is known too, and is again a list of taps: the backward
of a gather is a gather, where a scatter would make XLA's partitioner collect the shards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

__all__ = ["Taps", "apply_taps"]


@dataclass(frozen=True)
class Taps:
    """A linear map from `size` elements to ``len(indices)``.

    Attributes:
        indices: Shape (outputs, taps): the element that a tap takes.
        weights: Same shape: how much of it; 0 for taps that are not used.
        size: How many elements there are to take from.

    Example:
        >>> halves = Taps(np.array([[0, 1], [2, 3]]), np.full((2, 2), 0.5), 4)
        >>> apply_taps(jnp.arange(4.0), 0, halves).tolist()
        [0.5, 2.5]
    """

    indices: Any
    weights: Any
    size: int

    def transposed(self) -> Taps:
        """Return the map whose matrix is the transpose of this one's."""
        outputs = np.broadcast_to(np.arange(len(self.indices))[:, None], self.indices.shape)
        used = self.weights != 0
        sources, outputs, weights = self.indices[used], outputs[used], self.weights[used]
        order = np.argsort(sources, kind="stable")
        sources, outputs, weights = sources[order], outputs[order], weights[order]
        counts = np.bincount(sources, minlength=self.size)
        slot = np.arange(len(sources)) - np.repeat(np.cumsum(counts) - counts, counts)
        shape = (self.size, max(int(counts.max(initial=0)), 1))
        found = Taps(np.zeros(shape, np.int64), np.zeros(shape), len(self.indices))
        found.indices[sources, slot] = outputs
        found.weights[sources, slot] = weights
        return found


def apply_taps(x: Any, dim: int, taps: Taps) -> Any:
    """Return `x` with a dim mapped by `taps`, in the dtype of `x`.

    Args:
        x: Floats, ``taps.size`` of them along `dim`.
        dim: Not negative.
        taps: The map.
    """
    outputs, count = taps.indices.shape
    taken = jnp.take(x, taps.indices.reshape(-1), axis=dim, mode="clip")
    if count == 1 and np.all(taps.weights == 1):
        return taken
    taken = taken.reshape(*x.shape[:dim], outputs, count, *x.shape[dim + 1 :])
    weights = taps.weights.reshape(outputs, count, *(1,) * (x.ndim - dim - 1))
    # A tap that is not used must not let an infinity in as 0 * inf.
    parts = jnp.where(weights != 0, taken * jnp.asarray(weights, x.dtype), 0)
    return jnp.sum(parts, axis=dim + 1)
