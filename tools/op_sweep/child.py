"""A process that judges ops and notes each in a file. Started by `parent`, which survives it.

Each op has two lines in the file: ``{"started": name}`` before, its row after. An op with only the
first has ended the process.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["main"]

_NUM_DEVICES = 8


def main(arguments: Sequence[str] | None = None) -> None:
    """Judges the ops named, in order."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runtime", required=True)
    parser.add_argument("--ops", required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--notes", type=Path, required=True)
    asked = parser.parse_args(arguments)
    distribute = start(asked.runtime)
    from tools.op_sweep.judge import judge_op
    from tools.op_sweep.samples import find_ops

    with asked.notes.open("a", encoding="utf-8") as notes:
        for op in find_ops(asked.ops.split(",")):
            _note(notes, {"started": op.full_name})
            _note(notes, judge_op(op, distribute, asked.samples, asked.seed).as_json())


def start(runtime: str) -> Any:
    """Start a runtime with a (dp=2, tp=4) mesh; return what puts a tensor on it."""
    os.environ |= {"JAX_PLATFORMS": "cpu", "PJRT_DEVICE": "CPU"}
    import xla_dtensor

    xla_dtensor.get_runtime(runtime, num_cpu_devices=_NUM_DEVICES)
    mesh = xla_dtensor.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
    return lambda tensor, placements: xla_dtensor.distribute_tensor(tensor, mesh, placements)


def _note(notes: Any, what: dict[str, Any]) -> None:
    notes.write(json.dumps(what) + "\n")
    notes.flush()


if __name__ == "__main__":
    main()
