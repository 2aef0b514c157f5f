"""Finds the place of device ids in a device order."""

import numpy as np
from numpy.typing import NDArray

from mesh_utils.device_ids import describe_device_ids
from mesh_utils.errors import MeshError

_DENSE = 16
"""A table may be this many times longer than the ids in it."""


class PositionTable:
    """The position of each device id in one order. Built when it is first asked.

    Ids are looked up in a table indexed by id where they are dense (every runtime's are), and by
    bisection of the sorted ids otherwise.

    Args:
        ordered_ids: unique non-negative ids, [n], in their order.

    Example:
        >>> PositionTable(np.array([30, 10, 20])).find(np.array([10, 30, 99])).tolist()
        [1, 0, -1]
    """

    __slots__ = ("_keys", "_ordered_ids", "_positions")

    def __init__(self, ordered_ids: NDArray[np.int64]) -> None:
        self._ordered_ids = ordered_ids
        self._keys: NDArray[np.int64] | None = None  # the sorted ids, when they are not dense
        self._positions: NDArray[np.int64] | None = None

    def _build(self) -> NDArray[np.int64]:
        ids = self._ordered_ids
        top = int(ids.max())
        if top < _DENSE * ids.size:
            # One place more than the top id: it stays -1 and answers for all ids beyond.
            positions = np.full(top + 2, -1, np.int64)
            positions[ids] = np.arange(ids.size)
        else:
            positions = np.argsort(ids)
            self._keys = ids[positions]
        self._positions = positions  # last: another thread may be asking at the same time
        return positions

    def find(self, device_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Looks ids up.

        Args:
            device_ids: integers of any shape.

        Returns:
            Their positions, int64 of the same shape; -1 where an id is not in the order.
        """
        positions = self._build() if self._positions is None else self._positions
        if self._keys is None:
            beyond = positions.size - 1
            outside = (device_ids < 0) | (device_ids > beyond)
            return positions[np.where(outside, beyond, device_ids)]
        places = np.minimum(np.searchsorted(self._keys, device_ids), self._keys.size - 1)
        return np.where(self._keys[places] == device_ids, positions[places], -1)

    def has_all(self, device_ids: NDArray[np.int64]) -> bool:
        """Whether all ids are in the order.

        Args:
            device_ids: integers of any shape.

        Returns:
            True if none is missing.
        """
        return bool((self.find(device_ids) >= 0).all())

    def find_all(self, device_ids: NDArray[np.int64], mesh: object) -> NDArray[np.int64]:
        """Looks ids up that must be there.

        Args:
            device_ids: integers of any shape.
            mesh: whose order this is; for the message.

        Returns:
            Their positions, int64 of the same shape.

        Raises:
            MeshError: some are not in the order.
        """
        found = self.find(device_ids)
        missing = device_ids[found < 0]
        if missing.size:
            raise MeshError(
                f"Device ids {describe_device_ids(device_ids)} were looked up in {mesh!r}. "
                f"The first that it does not have is {missing[0]}. "
                "Pass ids of its devices, or ask a mesh that has them."
            )
        return found
