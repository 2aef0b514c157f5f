"""Runs the recipes in a process of its own: ``recipes_child gloo RANK FILE`` or ``... xla``.

Prints one line of JSON: the outcome of each recipe, and what was logged meanwhile.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
from typing import Any

WORLD = 4


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def gloo_mesh(rank: int, file: str) -> Any:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=WORLD)
    return init_device_mesh("cpu", (WORLD,), mesh_dim_names=("dp",))


def xla_mesh(runtime: str) -> Any:
    os.environ.setdefault("NPROC", "64")
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={WORLD}"
    import xla_dtensor as xd
    from xla_dtensor.runtimes import get_runtime

    options = {"dump_hlo": tempfile.mkdtemp()} if runtime == "torch_xla" else {}
    get_runtime(runtime, num_cpu_devices=WORLD, **options)
    xd.install()
    return xd.init_device_mesh("xla", (WORLD,), mesh_dim_names=("dp",))


def main() -> None:
    """Run all recipes."""
    kind, *rest = sys.argv[1:]
    import torch

    torch.set_num_threads(1)
    mesh = gloo_mesh(int(rest[0]), rest[1]) if kind == "gloo" else xla_mesh(*rest)
    from tests.pytorch_dtensor.counting import GlooCounting, XlaCounting
    from tests.pytorch_dtensor.recipes import RECIPES, run

    logger, lines = logging.getLogger("xla_dtensor"), Lines()
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    outcomes = {}
    for name in RECIPES:
        lines.lines.clear()
        counting = GlooCounting(mesh) if kind == "gloo" else XlaCounting(mesh)
        outcomes[name] = {**run(name, mesh, counting), "log": list(lines.lines)}
    print("OUTCOMES " + json.dumps(outcomes), flush=True)


if __name__ == "__main__":
    main()
