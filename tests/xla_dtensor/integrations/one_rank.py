"""Run a program as the only rank of torch's own gloo, with the CPU for its accelerator.

python -m tests.xla_dtensor.integrations.one_rank program.py result.pt
"""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.multiprocessing

dist: Any = torch.distributed
mp: Any = torch.multiprocessing


def main() -> None:
    """Run the program that the first argument names, with the others as its own."""
    accelerator: Any = torch.accelerator
    accelerator.is_available = lambda: True
    accelerator.device_count = lambda: 1
    accelerator.set_device_index = lambda device: None
    # torch itself asks for one that is available.
    accelerator.current_accelerator = lambda check_available=False: (
        None if check_available else torch.device("cpu")
    )
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(str(Path(folder, "store")), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        dist.init_process_group = lambda *args, **options: None
        mp.spawn = lambda run, args, nprocs, join: run(0, *args)
        sys.argv = sys.argv[1:]
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
