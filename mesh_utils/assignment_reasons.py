"""Says in words why a mesh is as it is."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from mesh_utils.span import Span

if TYPE_CHECKING:
    from mesh_utils.assignment import Assignment


STRATEGY_WORDS = {
    "none": "",
    "line": "a line, both ways",
    "path": "a path through a block",
    "snake": "a ring through a block",
    "staggered ring": "a ring around a dim, row by row",
    "ring": "a ring around a dim",
    "whole dims": "whole dims, all at once",
    "switch": "a switch",
}
"""What `Network.strategy` says, in words."""


def describe(found: Assignment) -> tuple[str, ...]:
    """Writes the reasons of an assignment.

    Args:
        found: the assignment.

    Returns:
        A line for the score, one for each axis, for the runner-up, for what was assumed, and the
        warnings.
    """
    return (
        _score_line(found),
        *(_axis_line(found, axis) for axis in range(len(found.axis_names))),
        _runner_up_line(found),
        *(f"assumed: {line}" for line in found.topology.assumptions),
        *found.warnings,
    )


def slow_crossings(found: Assignment) -> tuple[str, ...]:
    """Warns of axes that run over DCN although axes that gather less do not.

    Args:
        found: the assignment.

    Returns:
        A line for each, with what it costs in the model.

    Example:
        >>> from mesh_utils import Topology, assign
        >>> mesh = assign(Topology.parse("2xv5e:4x4"), (4, 4), (1, 2), axis_names=("dp", "tp"))
        >>> print(mesh.warnings[0])
        tp=8 runs over DCN, while dp=4 gathers less and does not: modelled 0.368 links, 2 inside a \
slice. Give the DCN part to dp.
    """
    lines: list[str] = []
    for axis, (size, outer) in enumerate(zip(found.mesh_shape, found.dcn_mesh_shape, strict=True)):
        modest = [
            other
            for other, weight in enumerate(found.weights)
            if weight < found.weights[axis]
            and found.mesh_shape[other] > 1
            and found.dcn_mesh_shape[other] == 1
        ]
        if outer == 1 or not modest:
            continue
        other = modest[0]
        lines.append(
            f"{found.axis_names[axis]}={size} runs over DCN, while {found.axis_names[other]}="
            f"{found.mesh_shape[other]} gathers less and does not{_cost_of_crossing(found, axis)}. "
            f"Give the DCN part to {found.axis_names[other]}."
        )
    return tuple(lines)


def _cost_of_crossing(found: Assignment, axis: int) -> str:
    if found.network.dcn_links is None:
        return " (no figure of DCN is known)"
    span = found.spans[axis]
    inside = found.network.links(Span(span.sizes, span.strides, span.cores))
    fast = "" if math.isinf(inside) else f", {inside:.3g} inside a slice"
    return f": modelled {found.links[axis]:.3g} links{fast}"


def _score_line(found: Assignment) -> str:
    if math.isinf(found.score):
        return "score: nothing moves, no axis of more than one device has a weight"
    share = 100 * found.score / found.bound
    ways = f"{found.choices} choice{'' if found.choices == 1 else 's'} of parts"
    how = f"the best of {ways}" if found.is_exact else f"the best that was found among {ways}"
    return (
        f"score {found.score:.3g} links modelled, {share:.0f} % of the bound of "
        f"{found.bound:.3g}: {how}"
    )


def _axis_line(found: Assignment, axis: int) -> str:
    span, links = found.spans[axis], found.links[axis]
    name = f"{found.axis_names[axis]}={found.mesh_shape[axis]}"
    if span.num_devices == 1:
        return f"{name}: one device, nothing moves"
    strategy = STRATEGY_WORDS[found.network.strategy(span)]
    if span.num_chips == 1:
        strategy = "DCN" if span.slices > 1 else "the cores of a chip"
    elif max(span.strides) > 1:
        strategy += f"; {max(span.strides)} chips apart, so that groups share links"
    count = "link" if links == 1 else "links"
    rate = found.network.link_bytes_per_second
    speed = "" if rate is None else f" ({links * rate / 1e9:.3g} GB/s)"
    return f"{name} on {span}: {links:.3g} {count}{speed}, {strategy}"


def _runner_up_line(found: Assignment) -> str:
    other = found.runner_up
    if other is None:
        return "runner-up: none, every mesh of this shape has the same score"
    changes = [
        f"{name} has {theirs:.3g} instead of {mine:.3g}"
        for name, mine, theirs in zip(found.axis_names, found.links, other.links, strict=True)
        if not math.isclose(mine, theirs, rel_tol=1e-9)
    ]
    return f"runner-up: {other.score:.3g} links; there {', '.join(changes)}"
