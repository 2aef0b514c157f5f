"""Replica groups as groups of devices, by XLA's four rules of what their numbers mean.

A program runs as replica_count x num_partitions devices; device r * num_partitions + p is partition
p of replica r. SPMD programs have one replica.

    channel_id   use_global_device_ids    the numbers are      who talks
    no           -                        replicas             the same partition of each replica
    yes          true                     devices              those devices
    yes          false                    replicas             all partitions of those replicas
    yes          (the opcode has none)    partitions           those partitions of each replica
"""

import numpy as np
from numpy.typing import NDArray

from xla_dtensor.report.replica_groups import ReplicaGroups

# These take use_global_device_ids; all others mean partitions when they have a channel.
_TAKES_GLOBAL_IDS = frozenset({"all-reduce", "all-gather", "reduce-scatter"})


def device_groups(
    groups: ReplicaGroups,
    kind: str,
    has_channel: bool,
    use_global_device_ids: bool,
    replica_count: int,
    num_partitions: int,
) -> NDArray[np.int64] | None:
    """Writes groups with device numbers.

    Args:
        groups: as printed.
        kind: the kind of the collective.
        has_channel: whether it has a channel_id.
        use_global_device_ids: as printed.
        replica_count: of the module.
        num_partitions: of the module.

    Returns:
        Devices [number of groups, group size]; None for groups of different sizes, or with numbers
        that the program does not have.

    Example:
        >>> pairs = ReplicaGroups.parse("{{0,1},{2,3}}")
        >>> device_groups(pairs, "all-gather", True, True, 1, 4).tolist()
        [[0, 1], [2, 3]]
        >>> device_groups(ReplicaGroups.parse("{}"), "all-reduce", False, False, 1, 2).tolist()
        [[0], [1]]
    """
    devices = np.arange(replica_count * num_partitions).reshape(replica_count, num_partitions)
    if has_channel and use_global_device_ids:
        return _take(devices.reshape(-1, 1), groups)
    if has_channel and kind not in _TAKES_GLOBAL_IDS:
        return _take(devices.T, groups)
    if not has_channel:
        return _take(devices, groups)
    found = _take(np.arange(replica_count)[:, None], groups)
    return None if found is None else devices[found].reshape(found.shape[0], -1)


def _take(table: NDArray[np.int64], groups: ReplicaGroups) -> NDArray[np.int64] | None:
    """Replaces each number by a row of the table; each column makes groups of its own."""
    members = groups.array(table.shape[0])
    if members is None or members.max(initial=0) >= table.shape[0]:
        return None
    return np.moveaxis(table[members], -1, 0).reshape(-1, members.shape[1])
