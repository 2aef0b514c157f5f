"""How a tensor lies on one mesh axis: the core's own frozen records, and reading PyTorch's.

PyTorch's placement objects are never imported here. They are read by their attributes, because the
core must load without torch and because the classes differ between versions: `_StridedShard` is a
`Shard` in torch 2.9 and is not one (its `is_shard()` is False) in 2.13; in 2.9 it even compares
equal to a `Shard` with another hash. The records below have one meaning each, compare and hash by
value, and answer the same questions (`is_shard`, `is_replicate`, `is_partial`) as PyTorch's
objects.

Example:
    >>> read_placements([StridedShard(-1, split_factor=1)], 2, Mesh.arange((8,)))
    (Shard(dim=1),)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from mesh_utils import Mesh
from mesh_utils.mesh_input import as_integer
from xla_dtensor.core.entries import describe_axes
from xla_dtensor.core.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Shard:
    """The axis cuts tensor dim `dim` into equal chunks, the outermost cut that is still free."""

    dim: int

    def is_shard(self, dim: int | None = None) -> bool:
        """Whether this shards a dim (or exactly `dim`)."""
        return dim is None or dim == self.dim

    def is_replicate(self) -> bool:
        """False."""
        return False

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """False."""
        return False


@dataclass(frozen=True, slots=True)
class StridedShard:
    """As `Shard`, but inside the outermost free `split_factor`-fold cut (for a later axis)."""

    dim: int
    split_factor: int

    def is_shard(self, dim: int | None = None) -> bool:
        """Whether this shards a dim (or exactly `dim`)."""
        return dim is None or dim == self.dim

    def is_replicate(self) -> bool:
        """False."""
        return False

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """False."""
        return False


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every device along the axis holds the same values."""

    def is_shard(self, dim: int | None = None) -> bool:
        """False."""
        return False

    def is_replicate(self) -> bool:
        """True."""
        return True

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """False."""
        return False


@dataclass(frozen=True, slots=True)
class Partial:
    """The devices along the axis hold terms; the tensor is their reduction by `reduce_op`."""

    reduce_op: str = "sum"

    def is_shard(self, dim: int | None = None) -> bool:
        """False."""
        return False

    def is_replicate(self) -> bool:
        """False."""
        return False

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """Whether this is a pending reduction (or exactly one by `reduce_op`)."""
        return reduce_op is None or reduce_op == self.reduce_op


PlacementRecord: TypeAlias = Shard | StridedShard | Replicate | Partial

_REPLICATE = Replicate()
_SHARDS = tuple(map(Shard, range(16)))


def read_placements(
    placements: Sequence[object], tensor_ndim: int, mesh: Mesh
) -> tuple[PlacementRecord, ...]:
    """Reads PyTorch's placement objects, or the records here, into records.

    Args:
        placements: One per mesh axis: torch's `Shard`, `_StridedShard`, `Replicate`, `Partial` (or
            a subclass), or records.
        tensor_ndim: Rank of the tensor; a negative dim counts from its end.
        mesh: The mesh.

    Returns:
        The records, with dims in [0, tensor_ndim); a split factor of 1 gives a plain `Shard`.

    Raises:
        LayoutError: Wrong number of placements, an unknown object, a dim out of range, or a split
            factor below 1.
    """
    if len(placements) != mesh.ndim:
        shown = ", ".join(map(repr, placements))
        raise LayoutError(
            f"placements=[{shown}] were asked for on a mesh with axes {describe_axes(mesh)}. "
            f"That is {len(placements)} placements for {mesh.ndim} axes. "
            "Pass one placement per mesh axis."
        )
    try:
        return tuple([_read(placement, tensor_ndim) for placement in placements])
    except _RefusedError as refused:
        index = next(i for i, placement in enumerate(placements) if placement is refused.placement)
        axis, size = mesh.axis_names[index], mesh.mesh_shape[index]
        raise LayoutError(
            f"placements[{index}] = {refused.placement!r} was asked for on axis {axis!r} "
            f"(size {size}), for a tensor of rank {tensor_ndim}. {refused.reason}. "
            f"Pass {refused.instead}."
        ) from None


class _RefusedError(Exception):
    """A placement that cannot be read; the caller knows where it stands."""

    def __init__(self, placement: object, reason: str, instead: str) -> None:
        super().__init__(reason)
        self.placement = placement
        self.reason = reason
        self.instead = instead


def _read(placement: object, tensor_ndim: int) -> PlacementRecord:
    kind = _kind_of_type.get(type(placement)) or _kind(placement)
    if kind is Replicate:
        return _REPLICATE
    if kind is Shard:
        return _shard(_read_dim(placement, tensor_ndim))
    if kind is StridedShard:
        dim = _read_dim(placement, tensor_ndim)
        split_factor = _read_split_factor(placement)
        return _shard(dim) if split_factor == 1 else StridedShard(dim, split_factor)
    return _read_partial(placement)


_kind_of_type: dict[type, type] = {}
"""Which record a type of placements is read into: asked once per type, for speed."""


def _kind(placement: object) -> type:
    if hasattr(placement, "split_factor") and hasattr(placement, "dim"):
        kind = StridedShard
    elif _answers(placement, "is_replicate"):
        kind = Replicate
    elif _answers(placement, "is_shard"):
        kind = Shard
    elif _answers(placement, "is_partial"):
        kind = Partial
    else:
        raise _RefusedError(
            placement,
            f"An object of type {type(placement).__name__} is none of PyTorch's placements",
            "Shard(dim), Replicate() or Partial(reduce_op)",
        )
    _kind_of_type[type(placement)] = kind
    return kind


def _read_partial(placement: object) -> Partial:
    reduce_op = getattr(placement, "reduce_op", None)
    if isinstance(reduce_op, str) and reduce_op.isidentifier():
        return Partial(reduce_op)
    raise _RefusedError(placement, f"Its reduce_op={reduce_op!r} is no word", "e.g. Partial('sum')")


def _shard(dim: int) -> Shard:
    """A Shard; the usual ones are made once."""
    return _SHARDS[dim] if dim < len(_SHARDS) else Shard(dim)


def _answers(placement: object, question: str) -> bool:
    """Whether the placement has the method `question`, and it says True."""
    method = getattr(placement, question, None)
    return callable(method) and not isinstance(placement, type) and method() is True


def _read_dim(placement: object, tensor_ndim: int) -> int:
    value = getattr(placement, "dim", None)
    if type(value) is int and 0 <= value < tensor_ndim:  # the usual case, at once
        return value
    dim = as_integer(value)
    if dim is None:
        raise _RefusedError(placement, "Its dim is no integer", "the tensor dim as an int")
    if -tensor_ndim <= dim < tensor_ndim:
        return dim % tensor_ndim
    instead = f"a dim from {-tensor_ndim} to {tensor_ndim - 1}" if tensor_ndim else "Replicate()"
    raise _RefusedError(placement, f"Its dim={dim} is out of range", instead)


def _read_split_factor(placement: object) -> int:
    split_factor = as_integer(getattr(placement, "split_factor", None))
    if split_factor is not None and split_factor >= 1:
        return split_factor
    raise _RefusedError(
        placement,
        "Its split_factor is no positive integer",
        "the number of pieces that lie outside this axis, 1 or more",
    )
