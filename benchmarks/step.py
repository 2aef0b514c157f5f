"""A whole training step, five ways: xla_dtensor on JAX and on torch_xla, each beside others.

    python -m benchmarks.step
    python -m benchmarks.step --models vit --devices 8 --topologies none
    python -m benchmarks.step --on-device gpu        or tpu: on the real devices
    python -m benchmarks.step --first-calls          only build; the stored steps stay
    python -m benchmarks.step --plot --document      show what is stored, run nothing

A Llama, a ViT, a Mixtral and a ResNet: forward, backward, clipping and AdamW, with the same
shardings, on 1 and on 8 virtual CPU devices: seconds of tracing and compiling, the steady step,
memory, collectives. The ways take turns. Then the same steps compiled by libtpu for TPU pods that
are not here. The Mixtral and the ResNet are run on JAX only. What the columns mean stands in
docs/benchmarks.md. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.child import ON_CPU, child_rows
from benchmarks.llama_plan import LIBTPU
from benchmarks.step_devices import PLATFORMS, gpus, why_none
from benchmarks.step_plan import BY_HAND, MODELS, ONLY_ON_JAX
from benchmarks.step_plot import panels_of, svg_of
from benchmarks.step_tables import tables, with_tables
from benchmarks.step_turns import Child, timed_in_turns
from benchmarks.timing import RESULTS, store

Row = dict[str, Any]
_PROCESSES = ("jax", "torch_xla", "torchax")
_ROOT = Path(__file__).resolve().parents[1]
# They need another torch than the newest, so each has an environment of its own; see Makefile.
_OWN_PYTHON = {
    process: _ROOT / f".venv-{process.replace('_', '-')}" / "bin" / "python"
    for process in ("torch_xla", "torchax")
}
_TOPOLOGIES = {"v5p:4x4x4": "8,8", "v5e:16x16": "16,16", "v5e:2x4": "2,4"}
_DOCUMENT = _ROOT / "docs" / "benchmarks.md"
_PLOT = _DOCUMENT.parent / "figures" / "step.svg"
# JAX would take most of a GPU's memory for itself, and the ways share it.
_ON_DEVICE = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark, prints its tables and stores its figures."""
    asked = _parser().parse_args(arguments)
    name = "step" if asked.on_device is None else f"step_on_{asked.on_device}"
    file = asked.results / f"{name}.json"
    stored: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    if asked.plot is not None or asked.document is not None:
        _show(stored, asked)
        return 0
    if asked.on_device not in (None, "cpu"):
        reason = why_none(asked.on_device)
        if reason is not None:
            print(f"benchmarks.step: skipped, {reason}")
            return 0
    found = {part: stored.get(part, []) for part in ("rows", "pods")}
    for part, rows in _on_device(asked) if asked.on_device else _virtual(asked):
        # What takes long is stored as it comes; what is not asked for stays as it was measured.
        known = _built_again(found[part], rows) if asked.first_calls else rows
        found[part] = _merged(found[part], known)
        print("\n" + "\n\n".join(tables({part: known})) + "\n", flush=True)
        devices = {"gpus": gpus()} if asked.on_device == "gpu" else {}
        store(name, {**devices, **found}, asked.results)
    print(f"Stored in {file}")
    return 0


def _show(stored: Any, asked: argparse.Namespace) -> None:
    if asked.plot is not None:
        asked.plot.parent.mkdir(parents=True, exist_ok=True)
        asked.plot.write_text(svg_of(panels_of(stored)), encoding="utf-8")
        print(f"Drawn in {asked.plot}")
    if asked.document is not None:
        text = asked.document.read_text(encoding="utf-8")
        asked.document.write_text(with_tables(text, stored), encoding="utf-8")
        print(f"Written into {asked.document}")


def _merged(old: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """Replace the rows of the same case: model, and devices or topology."""

    def case(row: Row) -> tuple[int, Any]:
        return MODELS.index(row["model"]), row.get("topology") or row["devices"]

    replaced = {case(row) for row in new}
    return sorted([*(row for row in old if case(row) not in replaced), *new], key=case)


def _built_again(old: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """Return the rows of the same cases; those of the ways built again with their new builds."""

    def way(row: Row) -> tuple[str, int, str]:
        return row["model"], row["devices"], row["way"]

    builds = {way(row): row["builds"] for row in new}
    cases = {each[:2] for each in builds}
    return [
        {**row, "builds": builds.get(way(row), row["builds"])}
        for row in old
        if way(row)[:2] in cases
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--models", default=",".join(MODELS), help="default: %(default)s")
    parser.add_argument("--processes", default=",".join(_PROCESSES), help="default: %(default)s")
    parser.add_argument("--devices", default="1,8", help="virtual ones, or none (default: 1,8)")
    parser.add_argument("--rounds", type=int, default=12, help="turns per way (default: 12)")
    parser.add_argument("--steps", type=int, default=2, help="steps per turn (default: 2)")
    parser.add_argument("--builds", type=int, default=3, help="how often each builds (default: 3)")
    parser.add_argument(
        "--first-calls", action="store_true", help="only build; the stored steady steps stay"
    )
    parser.add_argument("--small", action="store_true", help="tiny models, for tests")
    parser.add_argument(
        "--topologies", default="v5p:4x4x4,v5e:16x16", help="or none (default: %(default)s)"
    )
    parser.add_argument("--on-device", choices=(*PLATFORMS, "cpu"), help="run on real devices")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the JSON file")
    parser.add_argument(
        "--plot", type=Path, nargs="?", const=_PLOT, help="draw the stored figures into this file"
    )
    parser.add_argument(
        "--document", type=Path, nargs="?", const=_DOCUMENT, help="write the tables into this file"
    )
    return parser


def _virtual(asked: argparse.Namespace) -> Iterator[tuple[str, list[Row]]]:
    """Time on virtual CPU devices, and compile for TPUs; yields what is stored where."""
    models = _known(asked.models, MODELS, "models")
    processes = [p for p in _known(asked.processes, _PROCESSES, "processes") if _is_installed(p)]
    topologies = _known(asked.topologies, (*_TOPOLOGIES, "none"), "topologies")
    devices = [] if asked.devices == "none" else [int(n) for n in asked.devices.split(",")]
    sizes = "small" if asked.small else "cpu"
    for model in models:
        for number in devices:
            options = ["--model", model, "--sizes", sizes, f"--devices={number}"]
            running = [p for p in processes if _is_known_to(p, model)]
            if running:
                yield "rows", _in_turns([(p, options) for p in running], asked, ON_CPU)
    for topology in topologies if "none" not in topologies else []:
        for model in (each for each in models if _is_known_to("libtpu", each)):
            yield "pods", [_dated(row) for row in _compiled(model, topology, asked.small)]


def _dated(row: Row) -> Row:
    """Add when a row was measured, and how loaded the machine was."""
    loads = [round(load, 1) for load in os.getloadavg()]
    return {**row, "measured": datetime.date.today().isoformat(), "load_average": loads}


def _known(given: str, known: Sequence[str], option: str) -> list[str]:
    names = given.split(",")
    for name in names:
        if name not in known:
            raise SystemExit(f"{option}={name!r} is not known. Pass some of: {','.join(known)}.")
    return names


def _python_of(process: str) -> str:
    """Returns the Python that runs a process: the variable's, its environment's, else this one."""
    named = os.environ.get(f"{process.upper()}_PYTHON")
    own = _OWN_PYTHON.get(process)
    return named or (str(own) if own is not None and own.exists() else sys.executable)


def _is_installed(process: str) -> bool:
    if _python_of(process) != sys.executable or importlib.util.find_spec(process) is not None:
        return True
    how = "`make bench` makes its environment" if process in _OWN_PYTHON else "it is not installed"
    print(f"{process} is left out: {how}")
    return False


def _in_turns(
    children: Sequence[tuple[str, Sequence[str]]], asked: argparse.Namespace, environment: Any
) -> list[Row]:
    """Build every way several times, one after the other; then give the last ones turns."""
    builds: list[list[Row]] = []
    for number in range(asked.builds):
        with ExitStack() as stack:
            ready: list[Child] = []
            for process, options in children:
                print(f"step_child {process} {' '.join(options)}, {number + 1} ...", flush=True)
                ready.append(Child([process, *options], environment, _python_of(process)))
                stack.callback(ready[-1].kill)
            builds.append([row for child in ready for row in child.rows.values()])
            if number + 1 == asked.builds and not asked.first_calls:
                builds[-1] = timed_in_turns(ready, asked.rounds, asked.steps)
                for child in ready:
                    child.end()
    return [
        {**_dated(way[-1]), "builds": [row["builds"][0] for row in way]}
        for way in zip(*builds, strict=True)
    ]


def _compiled(model: str, topology: str, small: bool) -> Iterator[Row]:
    if importlib.util.find_spec("libtpu") is None:
        print("libtpu is not installed: nothing is compiled for TPUs")
        return iter(())
    options = ["--model", model, "--topology", topology, "--mesh", _TOPOLOGIES[topology]]
    print(f"step_tpu_child {' '.join(options)} ...", flush=True)
    return child_rows(
        "step_tpu_child",
        *options,
        *(["--sizes", "small"] if small else []),
        advice="Pass --topologies none, or others.",
        environment=LIBTPU,
    )


def _on_device(asked: argparse.Namespace) -> Iterator[tuple[str, list[Row]]]:
    """On the devices that are there: xla_dtensor beside JAX, on a GPU beside torch.compile too."""
    platform = asked.on_device
    kind = "small" if asked.small or platform == "cpu" else platform
    processes = ["jax"]
    if platform == "gpu" and len(gpus()) == 1:
        processes.append("torch_compile")
    elif platform == "gpu":
        print("torch.compile is left out: it runs on one GPU, and this machine has more")
    for model in _known(asked.models, MODELS, "models"):
        options = ["--model", model, "--sizes", kind, *([] if platform == "cpu" else ["--half"])]
        environment = ON_CPU if platform == "cpu" else _ON_DEVICE
        running = [p for p in processes if _is_known_to(p, model)]
        rows = _in_turns([(process, options) for process in running], asked, environment)
        yield "rows", [_beside(row, rows) for row in rows]


def _is_known_to(process: str, model: str) -> bool:
    """Tells whether a process runs a model, and says so where it does not."""
    known = process == "jax" or model not in ONLY_ON_JAX
    if not known:
        print(f"{process} does not run the {model} of this benchmark: it is left out")
    return known


def _beside(row: Row, rows: Sequence[Row]) -> Row:
    """Add how far a row's losses are from those of JAX by hand."""
    hand = next(each for each in rows if each["way"] == BY_HAND)
    pairs = zip(row["losses"], hand["losses"], strict=True)
    return {**row, "loss_difference": max(abs(a - b) for a, b in pairs)}


if __name__ == "__main__":
    sys.exit(main())
