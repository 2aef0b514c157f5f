"""The collectives of a program, summed by kind and mesh axes."""

from collections.abc import Iterable
from dataclasses import dataclass

from mesh_utils import Axis
from xla_dtensor.argument_types import argument_types
from xla_dtensor.report.collective import Collective, CollectiveKind


@dataclass(frozen=True, slots=True)
class CollectiveSummary:
    """All collectives of one kind over the same axes.

    Attributes:
        kind: the kind.
        axes: the mesh axes; () for no communication, None for mixed or unknown.
        count: how often they run in one run of the program.
        bytes_per_device: their payload (`Collective.payload_bytes`) in all those runs. Not the
            bytes on the wire, which depend on the algorithm.
        at_least: whether a loop of unknown trip count makes both a lower bound: it counts once.
    """

    kind: CollectiveKind
    axes: tuple[Axis, ...] | None
    count: int
    bytes_per_device: int
    at_least: bool = False


@argument_types
def summarize(collectives: Iterable[Collective]) -> tuple[CollectiveSummary, ...]:
    """Sums collectives by kind and axes.

    Args:
        collectives: as `collectives()` lists them.

    Returns:
        The sums, the most bytes first.

    Example:
        >>> summarize([])
        ()
    """
    rows: dict[tuple[CollectiveKind, tuple[Axis, ...] | None], CollectiveSummary] = {}
    for item in collectives:
        key = item.kind, item.axes
        row = rows.get(key, CollectiveSummary(*key, 0, 0))
        times = 1 if item.executions is None else item.executions
        rows[key] = CollectiveSummary(
            *key,
            row.count + times,
            row.bytes_per_device + times * item.payload_bytes,
            row.at_least or item.executions is None,
        )
    return tuple(sorted(rows.values(), key=_order))


def _order(row: CollectiveSummary) -> tuple[int, str, bool, list[str]]:
    return -row.bytes_per_device, row.kind, row.axes is None, [str(axis) for axis in row.axes or ()]
