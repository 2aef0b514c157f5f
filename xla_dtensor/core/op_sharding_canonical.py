"""The one spelling of each OpSharding: O(rank) for an iota, O(devices) for a list.

The order of copies inside a replicated subgroup has no meaning, so they are sorted. Subgroups of
one type are one subgroup. The order of types is XLA's own: manual, unreduced, replicated.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mesh_utils.order import mixed_radix
from xla_dtensor.core.digits import (
    Walk,
    iota_form,
    iota_walk,
    merged,
    remaining_walk,
    split_walk,
)

if TYPE_CHECKING:
    from xla_dtensor.core.op_sharding import OpSharding

SUBGROUP_ORDER = ("manual", "unreduced", "replicated")

Fields: TypeAlias = dict[str, Any]


def canonical_fields(op: OpSharding) -> Fields | None:
    """The fields of the canonical form, or None where `op` is canonical by its kind."""
    if not op.is_tiled:
        return None
    tiles = op.tile_dims[: op.tensor_ndim]
    subgroups = tuple(zip(op.subgroup_types, op.tile_dims[len(tiles) :], strict=True))
    groups = [
        (kind, size)
        for kind in SUBGROUP_ORDER
        if (size := prod(extent for name, extent in subgroups if name == kind)) > 1
    ]
    if prod(tiles) == 1 and len(groups) <= 1:
        return _whole_tensor_fields(op, groups)
    made: Fields = {
        "kind": "tiled",
        "tile_dims": (*tiles, *(size for _, size in groups)),
        "subgroup_types": tuple(kind for kind, _ in groups),
    }
    walk = _ordered_walk(op)
    if walk is None:
        assignment = _ordered_assignment(op)
        walk = _walk_of(assignment)
        if walk is None:
            return {**made, "devices": tuple(assignment.tolist())}
    made["reshape_dims"], made["transpose_perm"] = iota_form(walk)
    return made


def _whole_tensor_fields(op: OpSharding, groups: list[tuple[str, int]]) -> Fields:
    """Every partition holds the whole tensor, or one does."""
    if groups:
        return {"kind": groups[0][0]}
    device = 0 if op.devices is None else op.devices[0]
    return {"kind": "maximal", "device": device} if device else {"kind": "replicated"}


def _ordered_walk(op: OpSharding) -> Walk | None:
    """The walk with its subgroups in order; None where it has no digits for that."""
    if op.devices is not None:
        return None
    rest: Walk = merged(iota_walk(op.reshape_dims, op.transpose_perm))
    by_type: dict[str, Walk] = dict.fromkeys(SUBGROUP_ORDER, ())
    sizes = op.tile_dims[op.tensor_ndim :]
    for kind, size in zip(reversed(op.subgroup_types), reversed(sizes), strict=True):
        cut = split_walk(rest, size)
        if cut is None:
            return None
        rest, inner = cut
        by_type[kind] = inner + by_type[kind]
    copies = sorted(by_type["replicated"], key=lambda digit: digit[1], reverse=True)
    return (*rest, *by_type["manual"], *by_type["unreduced"], *copies)


def _ordered_assignment(op: OpSharding) -> NDArray[np.int64]:
    """The flat tile assignment with its subgroups in order and copies sorted."""
    assignment = op.tile_assignment
    ndim = assignment.ndim - len(op.subgroup_types)
    order = sorted(
        range(len(op.subgroup_types)),
        key=lambda index: SUBGROUP_ORDER.index(op.subgroup_types[index]),
    )
    assignment = assignment.transpose(*range(ndim), *(ndim + index for index in order))
    copies = prod(
        size
        for kind, size in zip(op.subgroup_types, op.tile_dims[ndim:], strict=True)
        if kind == "replicated"
    )
    return np.sort(assignment.reshape(-1, copies), axis=1).reshape(-1)


def _walk_of(assignment: NDArray[np.int64]) -> Walk | None:
    """The digits of an assignment that is a permutation of 0..n-1, if it has any."""
    if assignment[0] != 0 or assignment.max() != assignment.size - 1:
        return None
    walk = mixed_radix(assignment)
    return walk if walk is not None and remaining_walk(walk, assignment.size) == () else None
