"""Measures the bandwidth of each mesh axis on the devices that JAX has, beside what is modelled.

    python -m benchmarks.bandwidth                            all devices, a few meshes
    python -m benchmarks.bandwidth --mesh 16x16 --mesh 64x4   on 256 chips
    python -m benchmarks.bandwidth --virtual-cpus 8           on a machine without accelerators

For each mesh, axis and size an all-gather, a reduce-scatter, an all-reduce, an all-to-all and a
permute are timed (bandwidth_measure.py says how bandwidth is counted). Where the links of the
devices are known, the mesh is the search's and the modelled bandwidth stands beside the measured
one; docs/topology.md has a table with empty cells for them. On several hosts run it in every
process, with --distributed; the first prints.

Virtual CPU devices share one memory. Their figures show that this program works, nothing else.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bandwidth_measure import KINDS, is_as_asked, measure
from benchmarks.bandwidth_model import Machine, machine_of, mesh_ids, modelled
from benchmarks.timing import RESULTS, store

_COLUMNS = (
    ("mesh", 12),
    ("axis", 6),
    ("size", 5),
    ("lies on", 16),
    ("collective", 15),
    ("MiB", 9),
    ("measured GB/s", 14),
    ("most", 9),
    ("modelled", 9),
    ("measured/modelled", 18),
)
_WORDS = ("mesh", "lies on", "collective")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints a table and stores the figures."""
    asked = _parser().parse_args(arguments)
    if asked.virtual_cpus:
        _make_virtual(asked.virtual_cpus)
    import jax

    if asked.distributed:
        jax.distributed.initialize()
    wrap = None if asked.wrap is None else tuple(dim in asked.wrap for dim in "xyz")
    machine = machine_of(jax.devices(), wrap)
    shapes = asked.mesh or default_shapes(len(machine.devices))
    if not shapes:
        raise SystemExit("One device was found. An axis needs two. Pass --virtual-cpus 8 to try.")
    if jax.process_index() > 0:  # of several hosts one prints
        list(measured_rows(machine, shapes, asked))
        return 0
    print(f"{machine.kind}\n{_known(machine)}\n")
    print(_line([name for name, _ in _COLUMNS]))
    rows: list[dict[str, Any]] = []
    for row in measured_rows(machine, shapes, asked):
        print(_line(_cells(row)), flush=True)
        rows.append(row)
    if not all(row["as_asked"] for row in rows):
        print("* the compiler made another collective of it: see `compiled` in the JSON file")
    stored = {
        "devices": machine.kind,
        "topology": None if machine.topology is None else machine.topology.name,
        "is_virtual": machine.devices[0].platform == "cpu",
        "rows": rows,
    }
    print(f"Stored in {store('bandwidth', stored, asked.results)}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bandwidth", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--mesh", type=_shape, action="append", help="such as 16x16; several times")
    parser.add_argument("--mebibytes", default="1,64", type=_numbers, help="sizes (default: 1,64)")
    parser.add_argument("--rounds", type=int, default=10, help="times each is timed (default: 10)")
    parser.add_argument("--calls", type=int, default=10, help="calls in a round (default: 10)")
    parser.add_argument("--wrap", help="dims that wrap, such as xy, where no table knows")
    parser.add_argument("--virtual-cpus", type=int, help="measure so many virtual CPU devices")
    parser.add_argument("--distributed", action="store_true", help="one process of several")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the JSON file")
    return parser


def _shape(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(size) for size in text.split("x"))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no mesh. Pass sizes, as in 16x16.")
    return sizes


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(number) for number in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers, as in 1,64.") from None


def _make_virtual(count: int) -> None:
    """Makes CPU devices; before anything asks JAX for its devices."""
    os.environ.setdefault("NPROC", "64")
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)


def default_shapes(num_devices: int) -> list[tuple[int, ...]]:
    """One axis of all devices, and two of which the second has 2, 4 or 8.

    Args:
        num_devices: how many there are.

    Returns:
        Shapes; none for one device.

    Example:
        >>> default_shapes(8)
        [(8,), (4, 2), (2, 4)]
    """
    if num_devices < 2:
        return []
    pairs = [(num_devices // last, last) for last in (2, 4, 8) if num_devices % last == 0]
    return [(num_devices,), *(pair for pair in pairs if pair[0] > 1)]


def _known(machine: Machine) -> str:
    if machine.topology is None:
        return f"Nothing is modelled: {machine.reason}"
    assumed = "".join(f"\nassumed: {line}" for line in machine.topology.assumptions)
    return f"{machine.topology!r}{assumed}"


def measured_rows(
    machine: Machine, shapes: Sequence[Sequence[int]], asked: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Measures every axis of every mesh.

    Args:
        machine: the devices.
        shapes: the meshes.
        asked: `mebibytes`, `rounds` and `calls`.

    Yields:
        A row per mesh, axis, size and collective.
    """
    from jax.sharding import Mesh

    by_id = {device.id: device for device in machine.devices}
    for shape in shapes:
        if int(np.prod(shape)) != len(machine.devices):
            raise SystemExit(
                f"--mesh {'x'.join(map(str, shape))} was asked for. There are "
                f"{len(machine.devices)} devices. Pass sizes that multiply to that."
            )
        ids = mesh_ids(machine, shape)
        names = tuple("abcdefgh"[: ids.ndim])
        mesh = Mesh(np.vectorize(by_id.__getitem__, otypes=[object])(ids), names)
        for name, model in zip(names, modelled(machine, ids), strict=True):
            if mesh.shape[name] == 1:
                continue
            for size in asked.mebibytes:
                for kind in KINDS:
                    found = measure(
                        mesh,
                        name,
                        kind,
                        int(size * 2**20),
                        rounds=asked.rounds,
                        calls=asked.calls,
                    )
                    rate = model["bytes_per_second"][kind] if model else None
                    yield {
                        "mesh": "x".join(map(str, shape)),
                        "axis": name,
                        "size": mesh.shape[name],
                        "on": model.get("on", ""),
                        "strategy": model.get("strategy", ""),
                        **asdict(found),
                        "as_asked": is_as_asked(found),
                        "modelled": rate,
                    }


def _cells(row: dict[str, Any]) -> list[str]:
    rate = row["modelled"]
    kind = row["kind"] + ("" if row["as_asked"] else " *")
    cells = [row["mesh"], row["axis"], str(row["size"]), row["on"] or "-", kind]
    cells += [f"{row['num_bytes'] / 2**20:.3g}"]
    cells += [f"{row[key] / 1e9:.3g}" for key in ("bandwidth", "bandwidth_most")]
    return [*cells, *(["-", "-"] if rate is None else _beside(row["bandwidth"], rate))]


def _beside(bandwidth: float, rate: float) -> list[str]:
    return [f"{rate / 1e9:.4g}", f"{bandwidth / rate:.2f}"]


def _line(cells: Sequence[str]) -> str:
    placed = [
        cell.ljust(width) if name in _WORDS else cell.rjust(width)
        for cell, (name, width) in zip(cells, _COLUMNS, strict=True)
    ]
    return "  ".join(placed).rstrip()


if __name__ == "__main__":
    sys.exit(main())
