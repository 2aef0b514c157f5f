"""One way to start, in a process of its own: python process_starts.py WAY. Prints one JSON line."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

import xla_dtensor as xd
from xla_dtensor.errors import RuntimeSetupError


def outcome(*args: Any, **options: Any) -> Any:
    """What init_distributed returns, or its refusal."""
    try:
        return asdict(xd.init_distributed(*args, **options))
    except RuntimeSetupError as error:
        return str(error)


def alone() -> Any:
    first = outcome(num_cpu_devices=2)
    return [first, outcome() == first, outcome("127.0.0.1:1", 2, 0), started_service()]


def started_service() -> bool:
    import jax

    return jax.distributed.is_initialized()


def late() -> Any:
    xd.get_runtime()
    return outcome("127.0.0.1:1", 2, 0, timeout_seconds=1)


def missing() -> Any:
    return outcome(num_cpu_devices=1, timeout_seconds=1.5)


def by_environment() -> Any:
    info: Any = outcome(num_cpu_devices=2, timeout_seconds=60)
    mesh = xd.init_device_mesh("xla", (len(xd.get_runtime().device_ids()),))
    return [info, mesh.get_rank(), mesh.size()]


def jax_itself() -> Any:
    import jax

    jax.distributed.initialize("127.0.0.1:" + sys.argv[2], 1, 0)
    return [outcome(num_processes=2), outcome(num_cpu_devices=2)]


def torch_xla() -> Any:
    refusal = outcome("127.0.0.1:1", 2, 1)
    return [refusal, outcome()]


if __name__ == "__main__":
    # In one write: two processes share the pipe.
    sys.stdout.write(f"{json.dumps(globals()[sys.argv[1]]())}\n")
    sys.stdout.flush()
