"""Keep a strided shard strided in the labels of torch 2.9.

There a ``_StridedShard`` is a kind of ``Shard``, and most of torch's rules answer with a plain
``Shard`` where they mean "as the argument". On a (dp=2, tp=4) mesh, ``x + 1`` of a tensor that lies
as ``[_StridedShard(0, 4), Shard(0)]``, rows cut by tp and then by dp, would be labelled
``[Shard(0), Shard(0)]``, cut by dp and then by tp.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

__all__ = ["same_placements", "with_strides"]

_CONFUSED = issubclass(_StridedShard, Shard)


def same_placements(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Tell whether placements are equal; in torch 2.9 a strided shard equals the plain one.

    Example:
        >>> same_placements([_StridedShard(0, split_factor=4)], [Shard(0)])
        False
    """
    return list(map(type, one)) == list(map(type, other)) and tuple(one) == tuple(other)


def with_strides(answer: Any, arguments: Iterable[Sequence[Any]]) -> Any:
    """Return torch's answer with the strides of the arguments.

    Args:
        answer: The placements of an output, or a list with one (or None) per output.
        arguments: The placements of each tensor argument.

    Returns:
        The same structure. A placement whose stride cannot be told is Replicate.
    """
    strided = [a for a in arguments if any(isinstance(p, _StridedShard) for p in a)]
    if not _CONFUSED or not strided or answer is None:
        return answer
    if isinstance(answer, list):
        return [with_strides(each, strided) for each in answer]
    return tuple(_placement(answer, axis, strided) for axis in range(len(answer)))


def _placement(output: Sequence[Any], axis: int, strided: Sequence[Sequence[Any]]) -> Any:
    placement = output[axis]
    sources = [a for a in strided if axis < len(a) and isinstance(a[axis], _StridedShard)]
    if type(placement) is not Shard or not sources:
        return placement
    for source in sources:
        # The stride counts the cuts that later axes make outside: they have to be there again.
        if _later_cuts(source, axis) == _later_cuts(output, axis):
            return _StridedShard(placement.dim, split_factor=source[axis].split_factor)
    return Replicate()


def _later_cuts(placements: Sequence[Any], axis: int) -> list[int]:
    dim = placements[axis].dim
    later = range(axis + 1, len(placements))
    return [other for other in later if getattr(placements[other], "dim", None) == dim]
