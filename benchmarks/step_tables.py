"""The tables of `benchmarks.step`, as Markdown: docs/benchmarks.md has them as they are printed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.step_plan import BY_HAND

__all__ = ["collectives_table", "paired_ratio", "pod_table", "step_table", "tables", "with_tables"]

Row = dict[str, Any]
_TITLES = {"llama": "Llama", "vit": "ViT", "mixtral": "Mixtral", "resnet": "ResNet"}
_FROM, _TO = "<!-- figures -->", "<!-- end of figures -->"


def tables(stored: Any) -> Iterator[str]:
    """Yields every table of the stored figures, with its title.

    Args:
        stored: What `benchmarks.step` has stored; "rows" and "pods" may be missing.
    """
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in stored.get("rows", ()):
        groups.setdefault((row["model"], row["devices"]), []).append(row)
    for (model, devices), rows in groups.items():
        title = f"{_TITLES[model]}, {devices} device{'s' if devices > 1 else ''}"
        yield f"**{title}**\n\n{step_table(rows)}"
        if devices > 1:
            yield f"**{title}: collectives of one step**\n\n{collectives_table(rows)}"
    if stored.get("pods"):
        yield f"**Compiled by libtpu, per chip and step**\n\n{pod_table(stored['pods'])}"


def with_tables(document: str, stored: Any) -> str:
    """Returns a document with the tables between its two marks.

    Args:
        document: Markdown with a line ``<!-- figures -->`` and, below, ``<!-- end of figures -->``.
        stored: As `tables` takes it.
    """
    before, rest = document.split(_FROM, 1)
    _, after = rest.split(_TO, 1)
    return "\n\n".join([before + _FROM, *tables(stored), _TO + after])


def step_table(rows: Sequence[Row]) -> str:
    """One line per way: seconds of building it, the step, both beside JAX by hand, memory."""
    head = ["way", "trace s", "compile s", "beside by hand", "step ms: median", "least"]
    head += ["beside by hand (95 %)", "temporary MB", "peak MB", "loss 1", "loss 10", "off by"]
    hand = next((row for row in rows if row["way"] == BY_HAND), None)
    return _markdown(head, [_step_line(row, hand) for row in rows])


def _step_line(row: Row, hand: Row | None) -> list[str]:
    steps = row["step_seconds"]
    traces, compiles = zip(*row["builds"], strict=True)
    cells = [row["way"], *[f"{statistics.median(each):.2f}" for each in (traces, compiles)]]
    cells.append("-" if hand is None else _first_calls_beside(row, hand))
    cells += [f"{steps[kind] * 1e3:.1f}" for kind in ("median", "least")]
    if hand is None:
        cells.append("-")
    else:
        middle, low, high = paired_ratio(steps["turns"], hand["step_seconds"]["turns"])
        cells.append(f"{middle:.3f} ({low:.3f} to {high:.3f})")
    cells += [_megabytes(row[name]) for name in ("temporary_bytes", "peak_bytes")]
    off = row["loss_difference"]
    losses = [f"{row['losses'][place]:.5f}" for place in (0, -1)]
    return [*cells, *losses, "-" if off is None else f"{off:.0e}"]


def _first_calls_beside(row: Row, hand: Row) -> str:
    """The median ratio of builds that followed each other, and the least and the greatest."""
    if len(row["builds"]) != len(hand["builds"]):  # one was built again without the other
        return "-"
    pairs = zip(row["builds"], hand["builds"], strict=True)
    ratios = [sum(build) / sum(by_hand) for build, by_hand in pairs]
    median, least, greatest = (f"{f(ratios):.2f}" for f in (statistics.median, min, max))
    return median if least == greatest else f"{median} ({least} to {greatest})"


def paired_ratio(
    seconds: Sequence[float], others: Sequence[float], level: float = 0.95
) -> tuple[float, float, float]:
    """Returns the median ratio of two ways that took turns, and an interval around it.

    Two turns of one round saw the same machine, so each round has a ratio. The interval is made of
    two of them in their order: of n independent ratios, the k-th and the (n+1-k)-th least have the
    true median between them unless fewer than k fall on one side of it, the tails of a binomial
    distribution (W. J. Conover, Practical Nonparametric Statistics, section 3.2).

    Args:
        seconds: One number per round.
        others: The same of the way to compare with.
        level: The least probability that the median lies in the interval.

    Returns:
        The median, the lower and the upper end. With too few rounds for the level, all of them.

    Example:
        >>> paired_ratio([2.0, 2.1, 1.9, 2.0, 2.0, 9.0], [1.0] * 6)
        (2.0, 1.9, 9.0)
    """
    ratios = sorted(a / b for a, b in zip(seconds, others, strict=True))
    number, outside, tail = len(ratios), 0, 0.0
    while (tail := tail + math.comb(number, outside) / 2**number) <= (1 - level) / 2:
        outside += 1
    first = max(outside - 1, 0)
    return statistics.median(ratios), ratios[first], ratios[number - 1 - first]


def collectives_table(rows: Sequence[Row]) -> str:
    """One line per kind and axes, one column per way: kB on one device, and how often."""
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        for one in row["collectives"] or ():
            place = (one["kind"], _axes(one))
            text = f"{one['bytes'] / 1e3:,.1f} ({one['count']})"
            cells.setdefault(place, {})[row["way"]] = text
    ways = [row["way"] for row in rows]
    lines = [
        [kind, axes, *[given.get(way, "-") for way in ways]]
        for (kind, axes), given in sorted(cells.items())
    ]
    sums = [f"{_moved(row) / 1e3:,.1f} ({_count(row)})" for row in rows]
    return _markdown(["kind", "axes", *ways], [*lines, ["all", "", *sums]])


def pod_table(pods: Sequence[Row]) -> str:
    """One line per model, topology and way: flops, bytes, and bytes of collectives per axis."""
    axes = sorted({_axes(one) for row in pods for one in row["collectives"]})
    head = ["model", "topology, mesh", "way", "Gflop", "temporary MB", "collectives"]
    head += [f"MB over {one}" for one in axes] + ["MB in all"]
    return _markdown(head, [_pod_line(row, axes) for row in pods])


def _pod_line(row: Row, axes: Sequence[str]) -> list[str]:
    mesh = " x ".join(map(str, row["mesh"]))
    cells = [_TITLES[row["model"]], f"{row['topology']}, {mesh}", row["way"]]
    cells += [f"{row['flops'] / 1e9:.3f}", _megabytes(row["temporary_bytes"]), str(_count(row))]
    for axis in axes:
        found = sum(one["bytes"] for one in row["collectives"] if _axes(one) == axis)
        cells.append(f"{found / 1e6:.3f}")
    return [*cells, f"{_moved(row) / 1e6:.3f}"]


def _axes(one: Row) -> str:
    return "mixed" if one["axes"] is None else ", ".join(one["axes"]) or "none"


def _moved(row: Row) -> int:
    return sum(one["bytes"] for one in row["collectives"] or ())


def _count(row: Row) -> int:
    return sum(one["count"] for one in row["collectives"] or ())


def _megabytes(number: float | None) -> str:
    return "-" if number is None else f"{number / 1e6:.1f}"


def _markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    ruler = "|".join(["---"] * len(head))
    return "\n".join([_line(head), f"|{ruler}|", *map(_line, lines)])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
