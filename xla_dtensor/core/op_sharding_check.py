"""The invariants of an OpSharding, with errors that say what to pass instead."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from xla_dtensor.core.errors import OpShardingError
from xla_dtensor.core.op_sharding_canonical import SUBGROUP_ORDER

if TYPE_CHECKING:
    from xla_dtensor.core.op_sharding import OpSharding

KINDS = ("tiled", "replicated", "maximal", "manual", "unreduced", "unknown")


def check_fields(op: OpSharding) -> None:
    """Checks what the docstring of `op_sharding` promises.

    Raises:
        OpShardingError: One of the invariants does not hold.
    """
    if op.kind not in KINDS:
        raise OpShardingError(
            f"An OpSharding of kind={op.kind!r} was asked for. XLA has no such kind. "
            f"Pass one of {', '.join(KINDS)}."
        )
    if op.kind == "tiled":
        _check_grid(op)
        return
    if op.tile_dims or op.reshape_dims or op.devices is not None or op.subgroup_types:
        raise OpShardingError(
            f"A {op.kind} OpSharding with tile dims, devices or subgroups was asked for. "
            "Only a tiled one has any. Pass kind='tiled', or leave them out."
        )
    if op.kind == "maximal":
        _check_device(op)


def _check_device(op: OpSharding) -> None:
    if op.device is None or op.device < 0:
        raise OpShardingError(
            f"A maximal OpSharding with device={op.device} was asked for. "
            "It needs the one device that holds the tensor. Pass device=0 or higher."
        )


def _check_grid(op: OpSharding) -> None:
    asked = f"tile_dims={op.tile_dims} with subgroup_types={op.subgroup_types} were asked for"
    if len(op.subgroup_types) > len(op.tile_dims) or min(op.tile_dims, default=1) < 1:
        raise OpShardingError(
            f"{asked}. Each tile dim is 1 or more, and each subgroup type names one of the last. "
            "Pass the tensor's tiles, then the size of each subgroup."
        )
    unknown = [kind for kind in op.subgroup_types if kind not in SUBGROUP_ORDER]
    if unknown:
        raise OpShardingError(
            f"{asked}. {unknown[0]!r} is no subgroup type. Pass {', '.join(SUBGROUP_ORDER)}."
        )
    if op.devices is None:
        _check_iota(op)
    else:
        _check_devices(op, op.devices)


def _check_iota(op: OpSharding) -> None:
    tiles, count = prod(op.tile_dims), prod(op.reshape_dims)
    if tiles != count or min(op.reshape_dims, default=0) < 1:
        raise OpShardingError(
            f"tile_dims={op.tile_dims} over an iota of reshape_dims={op.reshape_dims} were asked "
            "for. "
            f"The tile dims hold {tiles} places, the iota has {count} devices. "
            "Pass dims with one product."
        )
    if sorted(op.transpose_perm) != list(range(len(op.reshape_dims))):
        raise OpShardingError(
            f"transpose_perm={op.transpose_perm} for reshape_dims={op.reshape_dims} was asked for. "
            "It is no permutation of their positions. "
            f"Pass each of 0..{len(op.reshape_dims) - 1} once."
        )


def _check_devices(op: OpSharding, devices: tuple[int, ...]) -> None:
    tiles = prod(op.tile_dims)
    if op.reshape_dims or op.transpose_perm:
        raise OpShardingError(
            f"reshape_dims={op.reshape_dims} and a list of {len(devices)} devices were asked for. "
            "A tile assignment is one or the other. Pass reshape_dims with transpose_perm, or "
            "devices."
        )
    if tiles != len(devices):
        raise OpShardingError(
            f"tile_dims={op.tile_dims} over a list of {len(devices)} devices were asked for. "
            f"The tile dims hold {tiles} places. Pass one device per place."
        )
    if len(set(devices)) != len(devices) or min(devices) < 0:
        seen: set[int] = set()
        wrong = next(d for d in devices if d < 0 or d in seen or seen.add(d))
        raise OpShardingError(
            f"tile_dims={op.tile_dims} over a list of {len(devices)} devices were asked for. "
            f"Device {wrong} is negative or stands there twice. Pass distinct ids, 0 or higher."
        )
