"""Indices out of range raise, as in PyTorch, wherever their values are known.

XLA has no error for an index that a tensor does not have: it takes the nearest row, or writes
nothing. So the ops that take indices are listed here with the range of each::

    x[torch.tensor([8])]     of 8 rows: IndexError, from the host tensor's values
    x[indices]               on the mesh, eagerly: one reduction on the devices, then the same
    xd.compile(...)          there are no values yet: what is read is NaN

Invariants:

* What PyTorch takes is taken: negative indices where it does, `ignore_index`, empty indices.
* Backward ops are not looked at: their indices are those of the forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from xla_dtensor.errors import IndexRangeError

__all__ = ["BOUNDS", "Bound", "check_bounds"]

aten = torch.ops.aten


@dataclass(frozen=True)
class Bound:
    """The range of one tensor of indices.

    Attributes:
        index: the tensor.
        low: the smallest index that is allowed.
        high: the first one that is not.
        where: what is indexed, for the message.
        ignored: a value that means no index.
    """

    index: Any
    low: int
    high: int
    where: str
    ignored: int | None = None


def _of_dims(x: Any, indices: Any, *_: Any, **__: Any) -> Iterator[Bound]:
    """x[i, j]: one tensor per dim; a mask stands for as many dims as it has."""
    dim = 0
    for index in indices:
        if index is None:
            dim += 1
        elif index.dtype in (torch.bool, torch.uint8):
            dim += index.ndim
        else:
            size = x.shape[dim]
            yield Bound(index, -size, size, f"dim {dim} of size {size}")
            dim += 1


def _along(from_the_end: bool = False) -> Callable[..., Iterator[Bound]]:
    def bounds(x: Any, dim: int, index: Any, *_: Any, **__: Any) -> Iterator[Bound]:
        size = x.shape[dim] if x.ndim else 1
        yield Bound(index, -size if from_the_end else 0, size, f"dim {dim} of size {size}")

    return bounds


def _flat(x: Any, index: Any, *_: Any, **__: Any) -> Iterator[Bound]:
    yield Bound(index, -x.numel(), x.numel(), f"a tensor of {x.numel()} elements")


def _rows(weight: Any, indices: Any, *_: Any, **__: Any) -> Iterator[Bound]:
    yield Bound(indices, 0, weight.shape[0], f"an embedding of {weight.shape[0]} rows")


def _classes(
    log_probs: Any, target: Any, weight: Any, reduction: int, ignore_index: int
) -> Iterator[Bound]:
    number = log_probs.shape[1 if log_probs.ndim > 1 else 0]
    yield Bound(target, 0, number, f"{number} classes", ignore_index)


def _one_hot(x: Any, num_classes: int = -1) -> Iterator[Bound]:
    if num_classes >= 0:
        yield Bound(x, 0, num_classes, f"num_classes={num_classes}")


BOUNDS: dict[Any, Callable[..., Iterator[Bound]]] = {
    aten.index.Tensor: _of_dims,
    aten.index_put.default: _of_dims,
    aten.embedding.default: _rows,
    aten.take.default: _flat,
    aten.put.default: _flat,
    aten.nll_loss_forward.default: _classes,
    aten.nll_loss2d_forward.default: _classes,
    aten.one_hot.default: _one_hot,
    aten.index_fill.int_Scalar: _along(from_the_end=True),
    aten.index_fill.int_Tensor: _along(from_the_end=True),
    **dict.fromkeys(
        (
            aten.index_select.default,
            aten.gather.default,
            aten.scatter.src,
            aten.scatter.value,
            aten.scatter.reduce,
            aten.scatter.value_reduce,
            aten.scatter_add.default,
            aten.scatter_reduce.two,
            aten.index_add.default,
            aten.index_copy.default,
            aten.index_reduce.default,
        ),
        _along(),
    ),
}


def check_bounds(
    func: Any, args: Any, kwargs: Any, extremes: Callable[[Any, int | None], tuple[int, int] | None]
) -> None:
    """Raise where an op of `BOUNDS` has an index out of range.

    Args:
        func: The op.
        args: Its arguments.
        kwargs: Its keyword arguments.
        extremes: Gives the smallest and the largest number of a tensor, without those that are
            ignored; None where there is none, or where it is not known yet.

    Raises:
        IndexRangeError: An IndexError and a RuntimeError: torch raises either, by op.
    """
    if torch._C._current_graph_task_id() != -1:  # pyright: ignore[reportPrivateImportUsage]
        return
    for bound in BOUNDS[func](*args, **kwargs):
        found = extremes(bound.index, bound.ignored) if bound.index.numel() else None
        if found is None or (bound.low <= found[0] and found[1] < bound.high):
            continue
        wrong = found[0] if found[0] < bound.low else found[1]
        raise IndexRangeError(
            f"{func.name().partition('.')[0]} was called with the index {wrong} for {bound.where}. "
            f"Indices go from {bound.low} to {bound.high - 1} there. Pass an index in this range."
        )
