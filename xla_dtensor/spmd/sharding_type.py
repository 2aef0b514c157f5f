"""ShardingType: XLA's kinds of sharding, with torch_xla's numbers."""

from __future__ import annotations

from enum import IntEnum

from xla_dtensor.core import OpSharding

__all__ = ["ShardingType", "sharding_type_of"]


class ShardingType(IntEnum):
    """The kinds of sharding that torch_xla tells apart."""

    REPLICATED = 0
    MAXIMAL = 1
    TUPLE = 2
    TILED = 3
    MANUAL = 4
    PARTIAL = 5
    UNKNOWN = 6


def sharding_type_of(op_sharding: OpSharding, num_devices: int) -> ShardingType:
    """Return the kind of a sharding as torch_xla names it.

    Args:
        op_sharding: The sharding.
        num_devices: Devices of the program: on a single one everything is MAXIMAL.

    Example:
        >>> sharding_type_of(OpSharding.parse("{devices=[2,1,4]<=[8] last_tile_dim_replicate}"), 8)
        <ShardingType.PARTIAL: 5>
    """
    if num_devices == 1 or op_sharding.kind == "maximal":
        return ShardingType.MAXIMAL
    op_sharding = op_sharding.canonical()
    if op_sharding.kind == "manual":
        return ShardingType.MANUAL
    if op_sharding.kind == "replicated":
        return ShardingType.REPLICATED
    if not op_sharding.is_tiled:
        return ShardingType.UNKNOWN
    return ShardingType.PARTIAL if op_sharding.subgroup_types else ShardingType.TILED
