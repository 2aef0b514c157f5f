"""What no axis can exceed: every link of a chip at work for it alone.

A byte that a device receives comes through a link of its chip, and over DCN if it comes from
another slice. So the links into the chip that has fewest bound every collective.
"""

import math


def chip_degree(shape: tuple[int, int, int], wrap: tuple[bool, bool, bool]) -> float:
    """The links of the chip that has fewest: one at a corner.

    Args:
        shape: the chips of a slice.
        wrap: for each dim whether it wraps.

    Returns:
        2 for each dim that wraps, 1 for each other dim of more than one chip; at least 1.

    Example:
        >>> chip_degree((8, 16, 1), (False, True, False))
        3.0
    """
    ways = [2 if wraps else 1 for wraps, size in zip(wrap, shape, strict=True) if size > 1]
    return float(sum(ways)) or 1.0


def bound_links(
    total: int, slices: int, degree: float, cores: int, core_links: float, dcn_links: float
) -> float:
    """The bound of an axis.

    Args:
        total: devices of the axis, over all slices.
        slices: slices of it.
        degree: links into a chip.
        cores: devices on a chip, which share them.
        core_links: bandwidth between those, in links.
        dcn_links: bandwidth of a device to other slices, in links.

    Returns:
        Bus bandwidth per device in links; inf for one device.

    Example:
        >>> bound_links(8, 1, 3.0, 1, math.inf, math.inf)
        3.0
    """
    if total == 1:
        return math.inf
    inner = total // slices
    seconds = cores * (1 - 1 / inner) / degree  # its cores in other groups: they share the links
    if inner % cores == 0:
        # Its cores in one group: each byte comes once for all of them.
        together = max((1 - cores / inner) / degree, (1 - 1 / cores) / core_links)
        seconds = min(seconds, together)
    seconds += (1 - 1 / slices) / inner / dcn_links
    return (1 - 1 / total) / seconds if seconds else math.inf
