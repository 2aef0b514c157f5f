"""The tables of `benchmarks.mesh`, from the rows that it stores."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

ROUNDED = 2e-5
"""Stored scores have five digits: smaller differences are none."""

ALL = "all"


def gain(case: Sequence[Any]) -> float | None:
    """The search's score over JAX's; None where JAX makes no mesh.

    Args:
        case: a case as it is stored: shape, score, JAX's score, optimum, dominating, error.

    Returns:
        1 where both are the same.

    Example:
        >>> gain(["4x4", 1.5, 1.0, 1.5, 2.0, "default"])
        1.5
    """
    return None if case[2] is None else case[1] / case[2]


def families(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sums up the slices of each family, and all of them.

    Args:
        rows: a row per slice, as `benchmarks.mesh` stores them.

    Returns:
        A row per family, in the order in which they come, and one of all that are not twisted and
        not asked by another name.

    Example:
        >>> case = ["4x4", 1.5, 1.0, 1.5, 2.0, "default"]
        >>> row = {"family": "v5e", "slice": "v5e:4x4", "meshes": 9, "cases": [case]}
        >>> row |= {"faults": [], "search_seconds": 0.1, "slowest_search_seconds": 0.1}
        >>> families([row])[0]["better"]
        1
    """
    by_family: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_family.setdefault(row["family"], []).append(row)
    plain = [row for row in rows if "twisted" not in row["family"] and " as " not in row["family"]]
    return [_summed(name, group) for name, group in [*by_family.items(), (ALL, plain)]]


def _summed(name: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    cases = [case for row in rows for case in row["cases"]]
    gains = sorted(found for case in cases if (found := gain(case)) is not None)
    better = [each for each in gains if each > 1 + ROUNDED]
    dominating = [case[4] for case in cases if case[2] is not None and case[4] > 1 + ROUNDED]
    optimal = [case for case in cases if case[3] is not None]
    return {
        "family": name,
        "slices": len(rows),
        "cases": len(cases),
        "beside_jax": len(gains),
        "below": sum(each < 1 - ROUNDED for each in gains),
        "better": len(better),
        "gains": {str(q): _quantile(gains, q) for q in (50, 75, 90, 99, 100)},
        "median_of_better": statistics.median(better) if better else None,
        "dominated": len(dominating),
        "most_dominating": max(dominating, default=1.0),
        "enumerated": len(optimal),
        "optimal": sum(case[1] >= case[3] * (1 - ROUNDED) for case in optimal),
        "meshes": sum(row["meshes"] for row in rows),
        "jax_fails": sum(case[2] is None for case in cases),
        "jax_fails_by_default": sum(case[5] != "" for case in cases),
        "faults": sum(len(row["faults"]) for row in rows),
        "search_milliseconds": 1e3 * sum(row["search_seconds"] for row in rows) / len(cases)
        if cases
        else 0.0,
        "slowest_search_milliseconds": 1e3
        * max((row["slowest_search_seconds"] for row in rows), default=0.0),
    }


def _quantile(ascending: Sequence[float], percent: int) -> float | None:
    if not ascending:
        return None
    return ascending[min(len(ascending) - 1, len(ascending) * percent // 100)]


def summary_table(found: Iterable[dict[str, Any]]) -> list[str]:
    """A table of families, in Markdown.

    Args:
        found: what `families` gives.

    Returns:
        Its lines.
    """
    lines = [
        "| slices of | slices | shapes | JAX raises | also when it may split dims | below JAX | "
        "better | by, median of those | 90 % of all by up to | most | at the optimum | JAX slower "
        "on an axis for nothing | by, most |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in found:
        cells = [
            row["family"],
            f"{row['slices']:,}",
            f"{row['cases']:,}",
            _share(row["jax_fails_by_default"], row["cases"]),
            _share(row["jax_fails"], row["cases"]),
            f"{row['below']}",
            _share(row["better"], row["beside_jax"]),
            _times(row["median_of_better"]),
            _times(row["gains"]["90"]),
            _times(row["gains"]["100"]),
            f"{row['optimal']:,} of {row['enumerated']:,}",
            _share(row["dominated"], row["beside_jax"]),
            _times(row["most_dominating"]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def slice_table(rows: Iterable[dict[str, Any]]) -> list[str]:
    """A table of slices, in Markdown.

    Args:
        rows: a row per slice, as they are stored.

    Returns:
        Its lines.
    """
    lines = [
        "| slice | shapes | JAX raises | also when it may split dims | better | by, median of "
        "all | 90 % by up to | most | ms per search |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        one = _summed(row["family"], [row])
        cells = [
            f"`{row['slice']}`" + (f" as {row['jax_kind']}" if row["jax_kind"] else ""),
            f"{one['cases']}",
            _share(one["jax_fails_by_default"], one["cases"]),
            _share(one["jax_fails"], one["cases"]),
            _share(one["better"], one["beside_jax"]),
            _times(one["gains"]["50"]),
            _times(one["gains"]["90"]),
            _times(one["gains"]["100"]),
            f"{one['search_milliseconds']:.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def ring_table(rings: Iterable[dict[str, Any]]) -> list[str]:
    """A table of the rings made by hand, in Markdown.

    Args:
        rings: what `ring_rows` gives.

    Returns:
        Its lines.
    """
    lines = [
        "| made by hand | axis | all-gather, links | search's | all-to-all | search's | permute | "
        "search's | longest step, hops | search's |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rings:
        cells = [f"`{row['mesh']}`", f"{row['axis']}: {row['size']}"]
        for what in ("all-gather", "all-to-all", "permute", "max_hops"):
            cells += [f"{row[who][what]:.3g}" for who in ("by_hand", "search")]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def faults(rows: Iterable[dict[str, Any]], rings: Iterable[dict[str, Any]]) -> list[str]:
    """Everything that should not be.

    Args:
        rows: a row per slice.
        rings: what `ring_rows` gives.

    Returns:
        A line for each.
    """
    found = [f"{row['slice']} {fault}" for row in rows for fault in row["faults"]]
    found += [
        f"{row['mesh']}: axis {row['axis']} by hand is ahead of the search's"
        for row in rings
        if not row["matched"]
    ]
    return found


def _share(part: int, whole: int) -> str:
    if not whole or not part:
        return "0" if whole else ""
    return f"{100 * part / whole:.1f} %"


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
