"""What `benchmarks.translate` translates: meshes of many sizes and orders, and shardings on them.

Three orders of devices over the same mesh:

* iota: device i at position i.
* torus: the devices of a 3D torus, its dims permuted, so that an axis walks through the torus in
  strides; what planning a mesh on real hardware gives. XLA can write it as a transposed count.
* arbitrary: shuffled. Only a list of all devices says that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

ORDERS = ("iota", "torus", "arbitrary")
AXES = ("pp", "dp", "fsdp", "tp")

# (placements as in PyTorch, the same as torch_xla's partition spec). S0 shards dim 0; "S0/tp" is
# PyTorch's strided shard, which leaves tp's cut of that dim outside.
_SHARDINGS: tuple[tuple[tuple[str, ...], tuple[object, ...]], ...] = (
    (("R", "S1"), (None, "tp")),
    (("S0", "S1"), ("fsdp", "tp")),
    (("S0", "S0"), (("fsdp", "tp"), None)),
    (("S0/tp", "S0"), (("tp", "fsdp"), None)),
    (("S0", "S0", "S2"), (("dp", "fsdp"), None, "tp")),
    (("R", "S0", "S0", "S2"), (("dp", "fsdp"), None, "tp", None)),
)
_ARBITRARY = _SHARDINGS[2]


@dataclass(frozen=True)
class Case:
    """One translation.

    Args:
        num_devices: Size of the mesh.
        order: One of `ORDERS`.
        placements: One per axis, e.g. ("S0", "R"); see `_SHARDINGS`.
        partition_spec: The same sharding in torch_xla's words.
    """

    num_devices: int
    order: str
    placements: tuple[str, ...]
    partition_spec: tuple[object, ...]

    @property
    def axis_names(self) -> tuple[str, ...]:
        """The last of `AXES`."""
        return AXES[-len(self.placements) :]

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """`num_devices` over the axes, as even as powers of two allow, the last ones larger."""
        return split_evenly(self.num_devices, len(self.placements))

    @property
    def device_ids(self) -> NDArray[np.int64]:
        """The devices in the mesh's flat order, int64 [num_devices]."""
        return ordered_ids(self.num_devices, self.order)

    @property
    def tensor_ndim(self) -> int:
        """Rank of the tensor."""
        return len(self.partition_spec)


def split_evenly(size: int, parts: int) -> tuple[int, ...]:
    """Splits a power of two into factors, the last ones larger.

    Example:
        >>> split_evenly(4096, 3), split_evenly(8, 4)
        ((16, 16, 16), (1, 2, 2, 2))
    """
    exponent = size.bit_length() - 1
    return tuple(2 ** ((exponent + part) // parts) for part in range(parts))


def ordered_ids(size: int, order: str) -> NDArray[np.int64]:
    """Device ids 0..size-1 in one of `ORDERS`, int64 [size]."""
    if order == "arbitrary":
        return np.random.default_rng(0).permutation(size)
    ids = np.arange(size, dtype=np.int64)
    return (
        ids.reshape(split_evenly(size, 3)).transpose(1, 2, 0).ravel() if order == "torus" else ids
    )


def cases(sizes: tuple[int, ...]) -> Iterator[Case]:
    """All cases, by size: every sharding in the iota and the torus order, one in the arbitrary."""
    for size in sizes:
        for order in ORDERS:
            for placements, spec in (_ARBITRARY,) if order == "arbitrary" else _SHARDINGS:
                yield Case(size, order, placements, spec)


def check_size(size: int) -> int:
    """Returns the size of a mesh that can be timed.

    Raises:
        ValueError: Not a power of two from 8 on.
    """
    if size < 8 or prod(split_evenly(size, 1)) != size:
        raise ValueError(
            f"A mesh of size={size} was asked for. Only powers of two from 8 on split into every "
            "mesh that is timed. Pass some of 8, 256, 4096, 65536, 262144."
        )
    return size
