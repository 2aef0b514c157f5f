"""The rings that people lay by hand on 16 x 16 chips, beside the search's mesh.

MaxText has two custom meshes for v5e and v6e pods, and torchprime has them from there:
hybrid_ring_64x4 and hybrid_ring_32x8 (`reshape_mesh_to_rings` in MaxText's max_utils.py). The last
axis goes around blocks of 2 x 2 or of 2 x 4 chips; the first takes the blocks row by row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mesh_utils import AxisReport, Topology, assign, axis_reports

BLOCKS = {"hybrid_ring_64x4": (2, 2), "hybrid_ring_32x8": (2, 4)}
"""Rows and columns of the blocks."""

NEAR = 1e-9


def ring_mesh(name: str) -> NDArray[np.int64]:
    """The ids of the mesh, on 16 x 16 chips numbered row by row.

    Args:
        name: a key of BLOCKS.

    Returns:
        Ids in the shape (64, 4) or (32, 8).

    Example:
        >>> ring_mesh("hybrid_ring_64x4")[:2].tolist()
        [[0, 1, 17, 16], [2, 3, 19, 18]]
    """
    rows, columns = BLOCKS[name]
    grid = np.arange(256).reshape(16 // rows, rows, 16 // columns, columns)
    blocks = grid.swapaxes(1, 2).copy()
    blocks[:, :, 1] = blocks[:, :, 1, ::-1]  # there along the first row, back along the second
    return blocks.reshape(-1, rows * columns)


def ring_rows(topology_name: str = "v5e:16x16") -> list[dict[str, Any]]:
    """Compares each hand-made mesh with the search's, axis by axis.

    Args:
        topology_name: 16 x 16 chips.

    Returns:
        A row per axis: links of an all-gather and an all-to-all, bandwidth and hops of a permute,
        by hand and by the search, and whether the search is nowhere behind.

    Example:
        >>> [row["matched"] for row in ring_rows()]
        [True, True, True, True]
    """
    topology = Topology.parse(topology_name)
    found: list[dict[str, Any]] = []
    for name in BLOCKS:
        by_hand = ring_mesh(name)
        searched = assign(topology, by_hand.shape).device_ids
        pairs = zip(axis_reports(topology, by_hand), axis_reports(topology, searched), strict=True)
        for hand, ours in pairs:
            found.append(
                {
                    "mesh": name,
                    "axis": hand.axis,
                    "size": hand.size,
                    "by_hand": _figures(hand),
                    "search": _figures(ours),
                    "matched": is_not_behind(ours, hand),
                }
            )
    return found


def is_not_behind(ours: AxisReport, other: AxisReport) -> bool:
    """Whether an axis has no less bandwidth in any collective, and no longer steps."""
    rates = [(ours.links[kind], other.links[kind]) for kind in other.links]
    rates.append((ours.shift_links, other.shift_links))
    return ours.max_hops <= other.max_hops and all(mine >= its * (1 - NEAR) for mine, its in rates)


def _figures(report: AxisReport) -> dict[str, float]:
    return {
        "all-gather": report.links["all-gather"],
        "all-to-all": report.links["all-to-all"],
        "permute": report.shift_links,
        "max_hops": report.max_hops,
    }
