"""The tables of `benchmarks.mesh_libtpu`, from the cases that it stores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from benchmarks.mesh_libtpu_child import KINDS, STRATEGIES

WHOLE = "whole dims"


def how(axis: dict[str, Any], kind: str) -> str:
    """What XLA does for a collective on an axis, in one line.

    Args:
        axis: an axis as it is stored.
        kind: "all-gather" or "all-reduce".

    Returns:
        Its instructions in order, or "fails: ...".

    Example:
        >>> how({"all-gather": {"how": ["all-gather: 1DAllGatherNonMajorDim"]}}, "all-gather")
        '1DAllGatherNonMajorDim'
    """
    found = axis[kind]
    if "error" in found:
        return f"fails: {found['error'][:60]}"
    parts = [part.removeprefix(f"{kind}: ") for part in found["how"]]
    return ", ".join(parts) or "one device, or no word of it"


def axes_of(cases: Iterable[dict[str, Any]]) -> Iterator[dict[str, dict[str, Any]]]:
    """For each axis of each case what it is in the meshes that were compiled."""
    for case in cases:
        meshes = case["meshes"]
        for place in range(len(meshes["search"]["axes"])):
            yield {
                strategy: meshes[strategy]["axes"][place]
                for strategy in STRATEGIES
                if place < len(meshes[strategy]["axes"])
            }


def failures(cases: Iterable[dict[str, Any]]) -> list[str]:
    """What did not compile.

    Args:
        cases: as they are stored.

    Returns:
        A line for each; those of JAX's meshes begin with "JAX".
    """
    found: list[str] = []
    for case in cases:
        where = f"{case['topology']} {tuple(case['shape'])}"
        for strategy in STRATEGIES:
            who = "JAX's mesh" if strategy == "jax" else f"the mesh of {strategy!r}"
            mesh = case["meshes"][strategy]
            if mesh["error"]:
                found.append(f"{who}, {where}: {mesh['error']}")
            for axis in mesh["axes"]:
                found += [
                    f"{who}, {where}, axis {axis['axis']}, {kind}: {axis[kind]['error']}"
                    for kind in KINDS
                    if "error" in axis[kind]
                ]
    return found


def group_table(cases: Sequence[dict[str, Any]]) -> list[str]:
    """How many meshes compile, and how often XLA does the same for both.

    Args:
        cases: as they are stored.

    Returns:
        Lines of Markdown.
    """
    lines = [
        "| group | meshes | axes | search: compiled | JAX makes a mesh | JAX: compiled | same "
        "all-gather as JAX's | same all-reduce | in snakes and rings: same all-gather | same "
        "all-reduce | in rows: same all-gather | same all-reduce |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    groups = list(dict.fromkeys(case["group"] for case in cases))
    for name in [*groups, "all"]:
        own = [case for case in cases if name in (case["group"], "all")]
        axes = list(axes_of(own))
        beside = [axis for axis in axes if "jax" in axis]
        compiled = {
            strategy: sum(
                "how" in axis[strategy][kind] for axis in axes if strategy in axis for kind in KINDS
            )
            for strategy in STRATEGIES
        }
        same = [
            f"{sum(how(a[s], kind) == how(a['jax'], kind) for a in beside)} of {len(beside)}"
            for s in ("search", "rings", "rows")
            for kind in KINDS
        ]
        made = sum(bool(case["meshes"]["jax"]["axes"]) for case in own)
        cells = [name, f"{len(own)}", f"{len(axes)}"]
        cells += [f"{compiled['search']} of {2 * len(axes)}", f"{made}"]
        cells += [f"{compiled['jax']} of {2 * len(beside)}", *same]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def strategy_table(cases: Sequence[dict[str, Any]]) -> list[str]:
    """How often XLA chose what.

    Args:
        cases: as they are stored.

    Returns:
        Lines of Markdown.
    """
    lines = [
        "| collective | what XLA does | the search's axes | in snakes and rings | in rows "
        "| JAX's |",
        "|---|---|---|---|---|---|",
    ]
    axes = list(axes_of(cases))
    for kind in KINDS:
        counts = {s: Counter(how(a[s], kind) for a in axes if s in a) for s in STRATEGIES}
        every = sorted(
            set().union(*counts.values()),
            key=lambda each: (-counts["search"][each], -counts["jax"][each], each),
        )
        for each in every:
            numbers = " | ".join(str(counts[s][each]) for s in STRATEGIES)
            lines.append(f"| {kind} | {each} | {numbers} |")
    return lines


def explain(axis: dict[str, dict[str, Any]], kind: str) -> str:
    """Why XLA does something else for the search's axis than for JAX's.

    Args:
        axis: the axis in each of the meshes.
        kind: "all-gather" or "all-reduce".

    Returns:
        The reason in words; "" where XLA does the same.
    """
    ours, rings, rows, other = (axis[strategy] for strategy in STRATEGIES)
    if how(ours, kind) == how(other, kind):
        return ""
    ours_whole, other_whole = ours["strategy"] == WHOLE, other["strategy"] == WHOLE
    whole = " of whole dims" if ours_whole else ""
    if how(ours, kind) != how(rows, kind):
        again = "as for JAX's" if how(rows, kind) == how(other, kind) else "something else again"
        return f"order: the chips{whole} are in a snake or ring; in rows XLA does {again}"
    if ours["on"] == other["on"] and how(rings, kind) == how(other, kind):
        return f"order: the chips{whole} are in rows; in a snake or ring XLA does as for JAX's"
    if other_whole and not ours_whole:
        return "place: JAX gives the axis whole dims, the search part of dims"
    if ours_whole and not other_whole:
        return "place: the search gives the axis whole dims, JAX part of dims"
    if "core" in ours["on"] and "core" not in other["on"]:
        return "place: the search gives the axis the cores of a chip"
    if "core" in other["on"] and "core" not in ours["on"]:
        return "place: JAX gives the axis the cores of a chip"
    if ours["on"] != other["on"]:
        return f"place: {ours['strategy']} instead of {other['strategy']}"
    if ours["in_rows"] != other["in_rows"]:
        return "order: the same chips, in another order"
    return "order: the same chips, in rows of another order of dims"


def difference_table(cases: Sequence[dict[str, Any]]) -> list[str]:
    """Where XLA does something else for the search's axis, with the reason.

    Args:
        cases: as they are stored.

    Returns:
        Lines of Markdown, the most frequent first.
    """
    lines = [
        "| collective | for JAX's axis | for the search's | why | axes |",
        "|---|---|---|---|---|",
    ]
    found: Counter[tuple[str, ...]] = Counter()
    for axis in axes_of(cases):
        for kind in KINDS:
            why = explain(axis, kind) if "jax" in axis else ""
            if why:
                found[kind, how(axis["jax"], kind), how(axis["search"], kind), why] += 1
    for key, count in sorted(found.items(), key=lambda pair: (-pair[1], pair[0])):
        lines.append(f"| {' | '.join(key)} | {count} |")
    return lines
