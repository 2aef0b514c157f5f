"""Placements to OpSharding: how long it takes, beside torch_xla's own translation.

    python -m benchmarks.translate
    python -m benchmarks.translate --sizes 8,4096 --rounds 3

The timing is done by a child process, `benchmarks.translate_child`, which imports torch_xla but
never jax. Figures are microseconds of CPU time of the calling thread: the least, then the median.
Nothing is asserted. The targets, 100 microseconds uncached and 10 cached, are said to be met or
missed.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.child import child_rows
from benchmarks.timing import RESULTS, store
from benchmarks.translate_cases import check_size

_SIZES = "8,256,4096,65536,262144"
_TARGET_UNCACHED_MICROSECONDS = 100
_TARGET_CACHED_MICROSECONDS = 10
_COLUMNS = (
    ("devices", 8),
    ("order", 10),
    ("mesh", 13),
    ("placements", 15),
    ("ours least", 11),
    ("median", 9),
    ("torch_xla least", 16),
    ("median", 9),
    ("ratio", 7),
    ("cached: ours", 13),
    ("torch_xla", 10),
    ("bytes", 9),
    ("same tiles", 11),
)
_MESH_COLUMNS = (
    ("devices", 8),
    ("order", 10),
    ("mesh", 13),
    ("ours least", 11),
    ("median", 9),
    ("torch_xla least", 16),
    ("median", 10),
    ("ratio", 7),
    ("first translation", 18),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark, prints its tables and stores its figures."""
    asked = _parser().parse_args(arguments)
    with_peer = not asked.without_torch_xla and importlib.util.find_spec("torch_xla") is not None
    print(f"Placements to OpSharding, microseconds of CPU time{_beside(with_peer)}\n")
    print(_line([name for name, _ in _COLUMNS], _COLUMNS))
    rows = list(_timed(asked.sizes, asked.rounds, with_peer))
    print("\nMaking a mesh, and the first translation on it (wall time; done once per mesh)\n")
    print(_line([name for name, _ in _MESH_COLUMNS], _MESH_COLUMNS))
    for row in rows:
        if row["kind"] == "mesh":
            print(_line(_mesh_cells(row), _MESH_COLUMNS))
    print()
    targets = list(_targets(rows))
    print("\n".join(targets))
    path = store("translate", {"targets": targets, "rows": rows}, asked.results)
    print(f"Stored in {path}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.translate", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--sizes", type=_sizes, default=_sizes(_SIZES), help=f"default: {_SIZES}")
    parser.add_argument("--rounds", type=int, default=10, help="turns per figure (default: 10)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the JSON file")
    parser.add_argument("--without-torch-xla", action="store_true", help="time only ours")
    return parser


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(check_size(int(size)) for size in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _beside(with_peer: bool) -> str:
    return ", beside torch_xla's" if with_peer else " (torch_xla is not installed or not asked for)"


def _timed(sizes: Sequence[int], rounds: int, with_peer: bool) -> Iterator[dict[str, Any]]:
    """Yields the child's rows as they come, printing each translation."""
    options = ["--sizes", ",".join(map(str, sizes)), "--rounds", str(rounds)]
    options += [] if with_peer else ["--without-torch-xla"]
    advice = "Pass --without-torch-xla if torch_xla is what failed."
    for row in child_rows("translate_child", *options, advice=advice, environment={}):
        if row["kind"] == "translation":
            print(_line(_translation_cells(row), _COLUMNS), flush=True)
        yield row


def _translation_cells(row: dict[str, Any]) -> list[str]:
    times = row["microseconds"]
    cells = [*_head(row), " ".join(row["placements"]), *_compared(times, "cpu")]
    cells += [f"{times['ours cached']['cpu_min']:.2f}"]
    cells += [f"{times['torch_xla cached']['cpu_min']:.2f}" if "torch_xla" in times else "-"]
    same = {True: "yes", False: "NO", None: "-"}[row.get("same")]
    return [*cells, f"{row['bytes']:,}", same]


def _mesh_cells(row: dict[str, Any]) -> list[str]:
    first = _number(row["first_translation"])
    return [*_head(row), *_compared(row["microseconds"], "wall"), first]


def _head(row: dict[str, Any]) -> list[str]:
    return [f"{row['num_devices']}", row["order"], "x".join(map(str, row["mesh_shape"]))]


def _compared(times: dict[str, dict[str, float]], clock: str) -> list[str]:
    ours, theirs = times["ours"], times.get("torch_xla")
    cells = [_number(ours[f"{clock}_min"]), _number(ours[f"{clock}_median"])]
    if theirs is None:
        return [*cells, "-", "-", "-"]
    ratio = theirs[f"{clock}_min"] / ours[f"{clock}_min"]
    cells += [_number(theirs[f"{clock}_min"]), _number(theirs[f"{clock}_median"])]
    return [*cells, f"{ratio:,.1f}x"]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _line(cells: Iterable[str], columns: Sequence[tuple[str, int]]) -> str:
    # Words to the left, figures to the right.
    placed = [
        cell.ljust(width) if name in ("order", "mesh", "placements") else cell.rjust(width)
        for cell, (name, width) in zip(cells, columns, strict=True)
    ]
    return "  ".join(placed).rstrip()


def _targets(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    translations = [row for row in rows if row["kind"] == "translation"]
    compact = [row for row in translations if row["order"] != "arbitrary"]
    listed = [row for row in translations if row["order"] == "arbitrary"]
    every = "orders that XLA can count"
    yield _target("uncached", "ours", compact, _TARGET_UNCACHED_MICROSECONDS, every)
    yield _target("cached", "ours cached", compact, _TARGET_CACHED_MICROSECONDS, every)
    other = "the arbitrary order, a list of all devices"
    yield _target("uncached", "ours", listed, _TARGET_UNCACHED_MICROSECONDS, other)
    yield _target("cached", "ours cached", listed, _TARGET_CACHED_MICROSECONDS, other)


def _target(
    what: str, name: str, rows: Sequence[dict[str, Any]], microseconds: int, where: str
) -> str:
    times = [(row["microseconds"][name], row) for row in rows]
    slowest, row = max(times, key=lambda pair: pair[0]["cpu_min"])
    median = max(pair[0]["cpu_median"] for pair in times)
    verdict = "met" if slowest["cpu_min"] <= microseconds else "MISSED"
    what_is_slowest = f"{row['num_devices']} devices, {' '.join(row['placements'])}"
    return (
        f"Target {what}, {where}: {microseconds} us {verdict} by the least (slowest: "
        f"{slowest['cpu_min']:,.1f} us, {what_is_slowest}); largest median {median:,.1f} us"
    )


if __name__ == "__main__":
    sys.exit(main())
