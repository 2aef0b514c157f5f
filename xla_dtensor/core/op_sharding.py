"""OpSharding: what XLA's partitioner is told about one tensor, in O(rank) space.

The idea
--------
XLA cuts a tensor into a grid of tiles and hands the tiles to partitions. An OpSharding names the
grid (`tile_dims`) and who gets which tile (the tile assignment): an array of partition ids, of the
shape of the grid. A partition id is a position in the flat order of the root mesh. Where several
partitions hold the same tile, the grid gets extra dims behind the tensor's own, and
`subgroup_types` says what they mean: "replicated" copies, "manual" ones that the partitioner leaves
alone, "unreduced" terms of a sum.

Whatever the number of devices, an assignment that a mesh makes is nearly always "count 0, 1, 2,
..., reshape, transpose, reshape". XLA writes that as `<=[reshape_dims]T(transpose_perm)`, and so do
we. Only an order which is no mixed-radix permutation needs the explicit list.

Worked example
--------------
Mesh (dp=2, tp=4) over partitions 0..7. A matrix with rows over tp and columns over nothing, copied
along dp:

    tile_dims       (4, 1, 2)        4 row tiles, 1 column tile, 2 copies of each
    reshape_dims    (2, 4)           0..7 as [[0 1 2 3], [4 5 6 7]], that is [dp, tp]
    transpose_perm  (1, 0)           [tp, dp]: row tile 0 is on partitions 0 and 4
    subgroup_types  ("replicated",)
    text            {devices=[4,1,2]<=[2,4]T(1,0) last_tile_dim_replicate}

    >>> rows = OpSharding.parse("{devices=[4,1,2]<=[2,4]T(1,0) last_tile_dim_replicate}")
    >>> rows.tile_assignment.tolist()
    [[[0, 4]], [[1, 5]], [[2, 6]], [[3, 7]]]
    >>> rows.shard_index(5, (10, 3))
    (slice(3, 6, None), slice(0, 3, None))

The same thing as digits (see `digits`): tp takes 4 steps of 1, dp 2 steps of 4. `from_digits` is
given only the digits of the tensor's dims; the copies are whatever digits of the root are left.

    >>> OpSharding.from_digits((((4, 1),), ()), num_devices=8) == rows
    True

Uneven dims follow XLA's rule: a tile has ceil(extent / tiles) elements, the last tiles are shorter
or empty. 10 rows over 4 are 3, 3, 3, 1.

Invariants
----------
* `tile_dims` = the tensor's dims, then one dim per subgroup type; its product is the number of
  devices.
* Exactly one of `reshape_dims` (with `transpose_perm`) and `devices` is set when `kind` is "tiled";
  neither else.
* `devices` holds distinct non-negative ids.
* Equality and hash are those of meaning: the tile of each partition, and the order within manual
  and unreduced subgroups. The order of copies, extra dims of size 1, the spelling of an iota, and
  the choice between an iota and a list do not matter. `canonical()` is the one spelling of each
  meaning, the same as XLA's own.
* A fully replicated grid is `{replicated}`: rank and device count are then gone, as they are in
  XLA.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mesh_utils import Digit
from mesh_utils.argument_types import argument_types
from mesh_utils.mesh import mixed_radix
from xla_dtensor.core.errors import OpShardingError

__all__ = []


# ---------------------------------------------------------------------------- Arithmetic on digits
#
# How an index walks through the devices of the root, in O(rank).
#
# A digit is `(size, stride)`. A walk is a sequence of digits, outer to inner; index i of the walk
# is written in the mixed radix of the sizes and the place reached is the sum of digit value times
# stride. `((2, 4), (4, 1))` walks 0..7 in order, and so does its merged form `((8, 1),)`; `((4, 1),
# (2, 4))` walks 0, 4, 1, 5, 2, 6, 3, 7.
#
# The merged form of a walk is unique: the innermost digit is the longest run of constant stride.

Walk: TypeAlias = tuple[Digit, ...]


def walk_size(walk: Iterable[Digit]) -> int:
    """Number of places a walk visits."""
    return prod([size for size, _ in walk])


def merged(walk: Iterable[Digit]) -> Walk:
    """The same walk with the fewest digits.

    Example:
        >>> merged(((2, 4), (1, 7), (4, 1)))
        ((8, 1),)
    """
    digits: list[Digit] = []
    for size, stride in walk:
        if size == 1:
            continue
        if digits and digits[-1][1] == size * stride:
            digits[-1] = (digits[-1][0] * size, stride)
        else:
            digits.append((size, stride))
    return tuple(digits)


def split_walk(walk: Sequence[Digit], inner_size: int) -> tuple[Walk, Walk] | None:
    """Cuts a walk into an outer and an inner one, the inner of `inner_size` places.

    Returns:
        (outer, inner), or None where the cut falls inside a digit that it does not divide.

    Example:
        >>> split_walk(((8, 1),), 4)
        (((2, 4),), ((4, 1),))
    """
    inner: list[Digit] = []
    missing_size = inner_size
    position = len(walk)
    while missing_size > 1 and position:
        position -= 1
        size, stride = walk[position]
        if missing_size % size == 0:
            inner.insert(0, (size, stride))
            missing_size //= size
        elif size % missing_size == 0:
            inner.insert(0, (missing_size, stride))
            outer = (*walk[:position], (size // missing_size, stride * missing_size))
            return outer, tuple(inner)
        else:
            return None
    return None if missing_size > 1 else (tuple(walk[:position]), tuple(inner))


def walk_part(walk: Sequence[Digit], size: int, inner: int) -> Walk | None:
    """The digits of `(index // inner) % size`, or None where they are no whole digits.

    Example:
        >>> walk_part(((4, 2),), size=2, inner=2)
        ((2, 4),)
    """
    parts = split_walk(walk, inner)
    parts = parts and split_walk(parts[0], size)
    return parts and parts[1]


def remaining_walk(walk: Iterable[Digit], total: int) -> Walk | None:
    """The digits of range(total) that a walk does not use, largest stride first.

    Returns:
        The rest, so that both together walk range(total) once, or None if there is no such rest.

    Example:
        >>> remaining_walk(((2, 2),), total=8)
        ((2, 4), (2, 1))
    """
    digits: list[Digit] = []
    free = total
    cutting = [digit for digit in walk if digit[0] > 1]
    for size, stride in sorted(cutting, key=_stride, reverse=True):
        count, remainder = divmod(free, size * stride)
        if remainder or not count:
            return None
        if count > 1:
            digits.append((count, size * stride))
        free = stride
    if free > 1:
        digits.append((free, 1))
    return tuple(digits)


def iota_form(walk: Iterable[Digit]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """XLA's (reshape_dims, transpose_perm) of a walk over all of range(n), in the shortest form.

    Example:
        >>> iota_form(((4, 1), (2, 4)))
        ((2, 4), (1, 0))
    """
    digits = merged(walk) or ((1, 1),)
    order = sorted(range(len(digits)), key=lambda index: digits[index][1], reverse=True)
    perm = [0] * len(digits)
    for rank, index in enumerate(order):
        perm[index] = rank
    return tuple([digits[index][0] for index in order]), tuple(perm)


def iota_walk(reshape_dims: Sequence[int], transpose_perm: Sequence[int]) -> Walk:
    """The walk of XLA's iota form; the inverse of `iota_form`, up to merging.

    Example:
        >>> iota_walk((2, 4), (1, 0))
        ((4, 1), (2, 4))
    """
    strides = [1] * len(reshape_dims)
    for index in range(len(reshape_dims) - 2, -1, -1):
        strides[index] = strides[index + 1] * reshape_dims[index + 1]
    return tuple((reshape_dims[index], strides[index]) for index in transpose_perm)


def place_in_walk(position: int, reshape_dims: Sequence[int], transpose_perm: Sequence[int]) -> int:
    """When the walk of an iota form comes to a position in range(n).

    Example:
        >>> place_in_walk(5, (2, 4), (1, 0))
        3
    """
    coordinates: list[int] = []
    for size in reversed(reshape_dims):
        position, coordinate = divmod(position, size)
        coordinates.append(coordinate)
    coordinates.reverse()
    place = 0
    for index in transpose_perm:
        place = place * reshape_dims[index] + coordinates[index]
    return place


def _stride(digit: Digit) -> int:
    return digit[1]


# ------------------------------------------------------------- The one spelling of each OpSharding
#
# O(rank) for an iota, O(devices) for a list.
#
# The order of copies inside a replicated subgroup has no meaning, so they are sorted. Subgroups of
# one type are one subgroup. The order of types is XLA's own: manual, unreduced, replicated.

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
    fields: Fields = {
        "kind": "tiled",
        "tile_dims": (*tiles, *(size for _, size in groups)),
        "subgroup_types": tuple(kind for kind, _ in groups),
    }
    walk = _ordered_walk(op)
    if walk is None:
        assignment = _ordered_assignment(op)
        walk = _walk_of(assignment)
        if walk is None:
            return {**fields, "devices": tuple(assignment.tolist())}
    fields["reshape_dims"], fields["transpose_perm"] = iota_form(walk)
    return fields


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
    outer: Walk = merged(iota_walk(op.reshape_dims, op.transpose_perm))
    by_type: dict[str, Walk] = dict.fromkeys(SUBGROUP_ORDER, ())
    sizes = op.tile_dims[op.tensor_ndim :]
    for kind, size in zip(reversed(op.subgroup_types), reversed(sizes), strict=True):
        parts = split_walk(outer, size)
        if parts is None:
            return None
        outer, inner = parts
        by_type[kind] = inner + by_type[kind]
    copies = sorted(by_type["replicated"], key=lambda digit: digit[1], reverse=True)
    return (*outer, *by_type["manual"], *by_type["unreduced"], *copies)


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


# -------------------------------------------------------------------------------- Op sharding check
#
# The invariants of an OpSharding, with errors that say what to pass instead.

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
    if op.kind == "maximal" and (op.device is None or op.device < 0):
        raise OpShardingError(
            f"A maximal OpSharding with device={op.device} was asked for. "
            "It needs the one device that holds the tensor. Pass device=0 or higher."
        )


def _check_grid(op: OpSharding) -> None:
    request = f"tile_dims={op.tile_dims} with subgroup_types={op.subgroup_types} were asked for"
    if len(op.subgroup_types) > len(op.tile_dims) or min(op.tile_dims, default=1) < 1:
        raise OpShardingError(
            f"{request}. Each tile dim is 1 or more, and each subgroup type names one of the last. "
            "Pass the tensor's tiles, then the size of each subgroup."
        )
    unknown = [kind for kind in op.subgroup_types if kind not in SUBGROUP_ORDER]
    if unknown:
        raise OpShardingError(
            f"{request}. {unknown[0]!r} is no subgroup type. Pass {', '.join(SUBGROUP_ORDER)}."
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
        ids: set[int] = set()
        wrong = next(d for d in devices if d < 0 or d in ids or ids.add(d))
        raise OpShardingError(
            f"tile_dims={op.tile_dims} over a list of {len(devices)} devices were asked for. "
            f"Device {wrong} is negative or stands there twice. Pass distinct ids, 0 or higher."
        )


# --------------------------------------------------------- XLA's text for an OpSharding, both ways
#
#     {devices=[4,1,2]<=[2,4]T(1,0) last_tile_dim_replicate}
#
# Grammar, white space free between the words:
#
#   sharding := "{" word* "}"
#   word     := kind | "device=" int | "devices=" ints ( "<=" ints ["T(" int,... ")"] | int,... )
#             | "last_tile_dim_replicate" | "last_tile_dims={" type,... "}" | "metadata={" anything
#             "}"

_INTS = r"\d+(?:\s*,\s*\d+)*"
_KIND = re.compile(r"(replicated|maximal|manual|unreduced|unknown)\b")
_DEVICE = re.compile(r"device\s*=\s*(\d+)")
_IOTA = re.compile(
    rf"devices\s*=\s*\[\s*({_INTS})\s*\]\s*<=\s*\[\s*({_INTS})\s*\](?:\s*T\s*\(\s*({_INTS})\s*\))?"
)
_LIST = re.compile(rf"devices\s*=\s*\[\s*({_INTS})\s*\]\s*({_INTS})")
_REPLICATE_LAST = re.compile(r"last_tile_dim_replicate\b")
_LAST_DIMS = re.compile(r"last_tile_dims\s*=\s*\{([^{}]*)\}")
_METADATA = re.compile(r"metadata\s*=\s*\{")
_BLANK = re.compile(r"[\s,]*")


def to_text(op: OpSharding) -> str:
    """XLA's text of an OpSharding, in its own spelling."""
    if op.kind == "maximal":
        return f"{{maximal device={op.device}}}"
    if op.kind != "tiled":
        return f"{{{op.kind}}}"
    text = f"{{devices=[{_join(op.tile_dims)}]"
    if op.devices is not None:
        text += _join(op.devices)
    else:
        text += f"<=[{_join(op.reshape_dims)}]"
        if len(op.transpose_perm) > 1:  # XLA reads no shorter form
            text += f"T({_join(op.transpose_perm)})"
    if op.subgroup_types == ("replicated",):
        text += " last_tile_dim_replicate"
    elif op.subgroup_types:
        text += f" last_tile_dims={{{', '.join(op.subgroup_types)}}}"
    return text + "}"


def parse_text(text: str) -> dict[str, Any]:
    """Reads a text into the fields of an OpSharding (which then checks them).

    Raises:
        OpShardingError: The text does not follow the grammar.
    """
    body = text.strip()
    in_braces = body.startswith("{") and body.endswith("}")
    if not in_braces or _closing_brace(body, 0) != len(body) - 1:
        raise _refusal(text, "Its braces are missing or not balanced")
    body = body[1:-1]
    fields: dict[str, Any] = {}
    position = _skip_blank(body, 0)
    while position < len(body):
        position = _skip_blank(body, _read_word(text, body, position, fields))
    if "kind" not in fields:
        raise _refusal(text, "It names no kind of sharding and no devices")
    return fields


def _read_word(text: str, body: str, position: int, fields: dict[str, Any]) -> int:
    """Reads the word at a position into the fields; returns the position behind it."""
    metadata = _METADATA.match(body, position)
    if metadata:
        return _closing_brace(body, metadata.end() - 1) + 1
    for pattern, reader in _WORDS:
        match = pattern.match(body, position)
        if match:
            word_fields = reader(match)
            for name in word_fields.keys() & fields.keys():
                raise _refusal(text, f"It says twice what its {name} is")
            fields.update(word_fields)
            return match.end()
    word = re.match(r"\S+", body[position:])
    raise _refusal(text, f"{word.group() if word else ''!r} is unknown there")


def _read_kind(match: re.Match[str]) -> dict[str, Any]:
    return {"kind": match[1]}


def _read_device(match: re.Match[str]) -> dict[str, Any]:
    return {"device": int(match[1])}


def _read_iota(match: re.Match[str]) -> dict[str, Any]:
    reshape_dims = _ints(match[2])
    perm = _ints(match[3]) if match[3] else tuple(range(len(reshape_dims)))
    return {
        "kind": "tiled",
        "tile_dims": _ints(match[1]),
        "reshape_dims": reshape_dims,
        "transpose_perm": perm,
    }


def _read_list(match: re.Match[str]) -> dict[str, Any]:
    return {"kind": "tiled", "tile_dims": _ints(match[1]), "devices": _ints(match[2])}


def _read_replicate_last(match: re.Match[str]) -> dict[str, Any]:
    del match
    return {"subgroup_types": ("replicated",)}


def _read_last_dims(match: re.Match[str]) -> dict[str, Any]:
    types = (kind.strip() for kind in match[1].split(","))
    return {"subgroup_types": tuple(kind for kind in types if kind)}


_WORDS: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], dict[str, Any]]], ...] = (
    (_IOTA, _read_iota),
    (_LIST, _read_list),
    (_REPLICATE_LAST, _read_replicate_last),
    (_LAST_DIMS, _read_last_dims),
    (_KIND, _read_kind),
    (_DEVICE, _read_device),
)


def _refusal(text: str, reason: str) -> OpShardingError:
    return OpShardingError(
        f"The sharding text {text!r} was to be read. {reason}. "
        "Pass XLA's text of one tensor, e.g. '{devices=[2,1,4]<=[8] last_tile_dim_replicate}'."
    )


def _closing_brace(text: str, opening: int) -> int:
    """Position of the brace that closes the one at `opening`, or -1; those in strings do not."""
    depth, quoted, position = 0, False, opening
    while position < len(text):
        character = text[position]
        if character == "\\" and quoted:
            position += 1
        elif character == '"':
            quoted = not quoted
        elif not quoted and character in "{}":
            depth += 1 if character == "{" else -1
            if depth == 0:
                return position
        position += 1
    return -1


def _skip_blank(text: str, position: int) -> int:
    match = _BLANK.match(text, position)
    return match.end() if match else position


def _join(values: tuple[int, ...]) -> str:
    return ",".join(map(str, values))


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


# -------------------------------------------------------------------------------- Op sharding tiles
#
# Which tile of an OpSharding a partition has, and how many tiles a shape is cut into.


def require_extents(op: OpSharding, what: str) -> None:
    """Refuses shardings that do not say what each partition holds.

    Raises:
        OpShardingError: The kind is neither tiled nor replicated.
    """
    if op.kind not in ("tiled", "replicated"):
        article = "An" if op.kind.startswith("un") else "A"
        raise OpShardingError(
            f"{what} of {op} was asked for. "
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


# -------------------------------------------------------------------------------------- OpSharding


@argument_types
@dataclass(frozen=True, eq=False, repr=False, slots=True)
class OpSharding:
    """How XLA lays one tensor out over the partitions. Frozen; equal when the meaning is equal.

    Args:
        kind: "tiled", "replicated", "maximal" (one device), "manual", "unreduced" or "unknown".
        tile_dims: Tiles along each tensor dim, then the size of each subgroup.
        reshape_dims: Iota form: 0..n-1 is reshaped to this,
        transpose_perm: then transposed by this, then reshaped to tile_dims.
        devices: Explicit form: the tile assignment, flat. None in iota form.
        subgroup_types: Meaning of the last tile dims: "replicated", "manual" or "unreduced".
        device: The device of a "maximal" sharding.

    Raises:
        OpShardingError: The parts do not fit together.

    Example:
        >>> str(OpSharding("tiled", (4, 2), (2, 4), (1, 0)))
        '{devices=[4,2]<=[2,4]T(1,0)}'
    """

    kind: str
    tile_dims: tuple[int, ...] = ()
    reshape_dims: tuple[int, ...] = ()
    transpose_perm: tuple[int, ...] = ()
    devices: tuple[int, ...] | None = None
    subgroup_types: tuple[str, ...] = ()
    device: int | None = None
    _canonical: OpSharding | None = field(default=None, init=False)
    _hash: int | None = field(default=None, init=False)
    _places: dict[int, int] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.check_valid()

    @classmethod
    def replicated(cls) -> OpSharding:
        """Every partition holds the whole tensor: `{replicated}`."""
        return cls("replicated")

    @classmethod
    def maximal(cls, device: int) -> OpSharding:
        """One partition holds the whole tensor, the others nothing: `{maximal device=3}`."""
        return cls("maximal", device=device)

    @classmethod
    def from_digits(
        cls,
        dims: Sequence[Sequence[Digit]],
        num_devices: int,
        manual: Sequence[Digit] = (),
    ) -> OpSharding:
        """Builds the canonical OpSharding from the root's digits that each tensor dim takes.

        Args:
            dims: Per tensor dim its digits (size, stride), outer to inner.
            num_devices: Size of the root mesh; strides are in its flat order.
            manual: Digits of the manual subgroup, outer to inner.

        Returns:
            Tiled by `dims`; copied along all digits of the root that neither `dims` nor `manual`
            takes.

        Raises:
            OpShardingError: The digits are no distinct digits of range(num_devices).

        Example:
            >>> str(OpSharding.from_digits((((2, 4),), ((4, 1),)), num_devices=8))
            '{devices=[2,4]<=[8]}'
        """
        walk = [digit for dim in dims for digit in dim]
        walk += manual
        copies = remaining_walk(walk, num_devices)
        if copies is None:
            raise OpShardingError(
                f"Digits {tuple(map(tuple, dims))} with manual={tuple(manual)} were asked for on "
                f"{num_devices} "
                "devices. They are no distinct mixed-radix digits of that range. "
                "Pass digits (size, stride) from Mesh.digits(root)."
            )
        return cls._from_walks(tuple(map(walk_size, dims)), walk, walk_size(manual), copies)

    @classmethod
    def _from_walks(
        cls, tiles: tuple[int, ...], walk: Sequence[Digit], num_manual: int, copies: Walk
    ) -> OpSharding:
        num_copies = walk_size(copies)
        if prod(tiles) == 1 and 1 in (num_manual, num_copies):
            return cls("replicated" if num_manual == 1 else "manual")
        subgroups = [(num_manual, "manual"), (num_copies, "replicated")]
        subgroups = [subgroup for subgroup in subgroups if subgroup[0] > 1]
        reshape_dims, transpose_perm = iota_form((*walk, *copies))
        op_sharding = cls(
            "tiled",
            (*tiles, *(size for size, _ in subgroups)),
            reshape_dims,
            transpose_perm,
            subgroup_types=tuple(kind for _, kind in subgroups),
        )
        object.__setattr__(op_sharding, "_canonical", op_sharding)
        return op_sharding

    @classmethod
    def from_assignment(
        cls, tile_assignment: NDArray[np.integer], subgroup_types: Sequence[str] = ()
    ) -> OpSharding:
        """Builds the canonical OpSharding of a tile assignment; O(devices).

        Args:
            tile_assignment: Partition ids, int array of shape (tensor dims..., subgroup dims...).
            subgroup_types: Meaning of the last dims.

        Returns:
            In iota form where there is one.

        Example:
            >>> str(OpSharding.from_assignment(np.arange(8).reshape(2, 4).T))
            '{devices=[4,2]<=[2,4]T(1,0)}'
        """
        devices = tuple(tile_assignment.reshape(-1).tolist())
        shape = tuple(tile_assignment.shape)
        return cls(
            "tiled", shape, devices=devices, subgroup_types=tuple(subgroup_types)
        ).canonical()

    @classmethod
    def parse(cls, text: str) -> OpSharding:
        """Reads XLA's text, in any of its spellings.

        Args:
            text: e.g. "{devices=[2,1,4]<=[8] last_tile_dim_replicate}", with a device list instead
                of an iota, with last_tile_dims={manual, replicated}, "{replicated}", "{maximal
                device=3}". White space is free; metadata={...} is skipped.

        Returns:
            The OpSharding as spelled (not canonical).

        Raises:
            OpShardingError: The text is not of that form.

        Example:
            >>> listed = OpSharding.parse("{devices=[2,2]0,1,2,3}")
            >>> listed == OpSharding.parse("{devices=[2,2]<=[4]}")
            True
        """
        return cls(**parse_text(text))

    def check_valid(self) -> None:
        """Checks the invariants of the module docstring.

        Raises:
            OpShardingError: One does not hold.
        """
        check_fields(self)

    @property
    def is_tiled(self) -> bool:
        """Whether there is a grid of tiles."""
        return self.kind == "tiled"

    @property
    def tensor_ndim(self) -> int | None:
        """Rank of the tensors this fits; None where it fits any."""
        return len(self.tile_dims) - len(self.subgroup_types) if self.is_tiled else None

    @property
    def num_devices(self) -> int | None:
        """Number of partitions in the grid; None where there is no grid."""
        return prod(self.tile_dims) if self.is_tiled else None

    @property
    def tile_assignment(self) -> NDArray[np.int64]:
        """Partition ids, int64 array of shape `tile_dims`; O(devices).

        Raises:
            OpShardingError: There is no grid.
        """
        if not self.is_tiled:
            raise OpShardingError(
                f"The tile assignment of {self} was asked for. It has no tiles. "
                "Ask only where is_tiled is True."
            )
        if self.devices is not None:
            return np.array(self.devices, np.int64).reshape(self.tile_dims)
        count = np.arange(prod(self.reshape_dims), dtype=np.int64)
        transposed = count.reshape(self.reshape_dims).transpose(self.transpose_perm)
        return transposed.reshape(self.tile_dims)

    def num_tiles(self, dim: int) -> int:
        """Tiles along tensor dim `dim`."""
        if self.tensor_ndim is None:
            require_extents(self, "The number of tiles")
            return 1
        if not -self.tensor_ndim <= dim < self.tensor_ndim:
            raise OpShardingError(
                f"The tiles along dim={dim} of {self} were asked for. It has {self.tensor_ndim} "
                "tensor dims. "
                f"Pass a dim from {-self.tensor_ndim} to {self.tensor_ndim - 1}."
            )
        return self.tile_dims[dim % self.tensor_ndim]

    def shape_per_tile(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of a full tile of a tensor: each extent divided by its tiles, rounded up.

        Example:
            >>> OpSharding.parse("{devices=[4,1]<=[4]}").shape_per_tile((10, 3))
            (3, 3)
        """
        tiles = tiles_of_shape(self, shape)
        return tuple(-(-extent // count) for extent, count in zip(shape, tiles, strict=True))

    def shard_index(self, partition_id: int, shape: Sequence[int]) -> tuple[slice, ...]:
        """The part of a tensor that one partition holds, by XLA's rule; O(rank) in iota form.

        Args:
            partition_id: Position in the root's flat order.
            shape: The global tensor's shape.

        Returns:
            One slice per dim, clipped to the tensor: shorter or empty at the end of an uneven dim.

        Raises:
            OpShardingError: No such partition, a shape of another rank, or a manual or unknown
                sharding.

        Example:
            >>> OpSharding.parse("{devices=[4]<=[4]}").shard_index(3, (10,))
            (slice(9, 10, None),)
        """
        if self.kind == "maximal":
            return tuple(slice(0, n if partition_id == self.device else 0) for n in shape)
        tile = self.shape_per_tile(shape)
        place = tile_of_partition(self, partition_id) if self.is_tiled else (0,) * len(tile)
        return tuple(
            slice(min(index * size, extent), min((index + 1) * size, extent))
            for index, size, extent in zip(place, tile, shape, strict=True)
        )

    def canonical(self) -> OpSharding:
        """The one spelling of this meaning: iota where possible, as XLA prints it. Cached.

        Example:
            >>> str(OpSharding.parse("{devices=[1,4]0,1,2,3 last_tile_dim_replicate}").canonical())
            '{replicated}'
        """
        if self._canonical is None:
            fields = canonical_fields(self)
            canonical = self if fields is None else OpSharding(**fields)
            object.__setattr__(canonical, "_canonical", canonical)
            object.__setattr__(self, "_canonical", canonical)
            return canonical
        return self._canonical

    def place_of(self, partition_id: int) -> int | None:
        """Flat position of a partition in the tile assignment; None if it is not in it."""
        if self.devices is None:
            inside = 0 <= partition_id < prod(self.reshape_dims)
            return (
                place_in_walk(partition_id, self.reshape_dims, self.transpose_perm)
                if inside
                else None
            )
        if self._places is None:
            places = {device: place for place, device in enumerate(self.devices)}
            object.__setattr__(self, "_places", places)
        return (self._places or {}).get(partition_id)

    def _key(self) -> tuple[object, ...]:
        return (
            self.kind,
            self.tile_dims,
            self.reshape_dims,
            self.transpose_perm,
            self.devices,
            self.subgroup_types,
            self.device,
        )

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, OpSharding):
            return NotImplemented
        return self.canonical()._key() == other.canonical()._key()

    def __hash__(self) -> int:
        if self._hash is None:
            object.__setattr__(self, "_hash", hash(self.canonical()._key()))
        return self._hash or 0

    def __str__(self) -> str:
        return to_text(self)

    def __repr__(self) -> str:
        return f"OpSharding({str(self)!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return OpSharding, self._key()
