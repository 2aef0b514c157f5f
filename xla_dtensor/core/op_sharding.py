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

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
from numpy.typing import NDArray

from mesh_utils import Digit
from mesh_utils.argument_types import argument_types
from xla_dtensor.core.digits import Walk, iota_form, place_in_walk, remaining_walk, walk_size
from xla_dtensor.core.errors import OpShardingError
from xla_dtensor.core.op_sharding_canonical import canonical_fields
from xla_dtensor.core.op_sharding_check import check_fields
from xla_dtensor.core.op_sharding_text import parse_text, to_text
from xla_dtensor.core.op_sharding_tiles import require_extents, tile_of_partition, tiles_of_shape


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
        made = cls(
            "tiled",
            (*tiles, *(size for size, _ in subgroups)),
            reshape_dims,
            transpose_perm,
            subgroup_types=tuple(kind for _, kind in subgroups),
        )
        object.__setattr__(made, "_canonical", made)
        return made

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
            made = self if fields is None else OpSharding(**fields)
            object.__setattr__(made, "_canonical", made)
            object.__setattr__(self, "_canonical", made)
            return made
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
