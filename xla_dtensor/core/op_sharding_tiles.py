"""Which tile of an OpSharding a partition has, and how many tiles a shape is cut into."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from xla_dtensor.core.errors import OpShardingError

if TYPE_CHECKING:
    from xla_dtensor.core.op_sharding import OpSharding


def require_extents(op: OpSharding, asked: str) -> None:
    """Refuses shardings that do not say what each partition holds.

    Raises:
        OpShardingError: The kind is neither tiled nor replicated.
    """
    if op.kind not in ("tiled", "replicated"):
        article = "An" if op.kind.startswith("un") else "A"
        raise OpShardingError(
            f"{asked} of {op} was asked for. "
            f"{article} {op.kind} sharding does not cut a tensor into tiles. "
            "Ask only where the kind is tiled or replicated."
        )


def tiles_of_shape(op: OpSharding, shape: Sequence[int]) -> tuple[int, ...]:
    """Into how many tiles each dim of a tensor of this shape is cut.

    Raises:
        OpShardingError: A shape of another rank, or a sharding without tiles.
    """
    require_extents(op, "The tile shape")
    if op.tensor_ndim is None:
        return (1,) * len(shape)
    if len(shape) != op.tensor_ndim:
        raise OpShardingError(
            f"The tiles of shape={tuple(shape)} under {op} were asked for. "
            f"The shape has {len(shape)} dims, the sharding {op.tensor_ndim}. "
            "Pass a shape of the sharding's rank."
        )
    return op.tile_dims[: op.tensor_ndim]


def tile_of_partition(op: OpSharding, partition_id: int) -> tuple[int, ...]:
    """Coordinate of a partition's tile in the grid of the tensor's dims.

    Raises:
        OpShardingError: The partition is not in the tile assignment.
    """
    place = op.place_of(partition_id)
    if place is None:
        raise OpShardingError(
            f"The tile of partition_id={partition_id} under {op} was asked for. "
            "That partition is not in its tile assignment. "
            f"Pass one of its {op.num_devices} partition ids."
        )
    coordinate: list[int] = []
    for size in reversed(op.tile_dims):
        place, index = divmod(place, size)
        coordinate.append(index)
    return tuple(reversed(coordinate))[: op.tensor_ndim]
