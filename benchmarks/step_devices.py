"""Tells whether this machine has a TPU or a GPU, without loading anything that would ask it.

    python -m benchmarks.step_devices tpu       status 0 where there is one, else why not, status 1

libtpu waits for minutes where it looks for a TPU in vain, so it is not asked.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["PLATFORMS", "gpus", "why_none"]

PLATFORMS = ("gpu", "tpu")
# Device files that drivers make.
_TPU_FILES, _VFIO_FILES = "accel[0-9]*", "vfio/[0-9]*"
# Set on the machines of a Cloud TPU, or by whoever runs a container there.
_TPU_VARIABLES = ("TPU_WORKER_ID", "TPU_ACCELERATOR_TYPE")


def why_none(
    platform: str, devices: Path = Path("/dev"), environment: Mapping[str, str] | None = None
) -> str | None:
    """Returns why there is no such device, or None where there seems to be one.

    Args:
        platform: "gpu" or "tpu".
        devices: The folder of device files.
        environment: Variables; this process's by default.

    Example:
        >>> why_none("tpu", Path("/nowhere"), {})
        'this machine has no TPU'
    """
    if platform == "gpu":
        return None if gpus() else "this machine has no NVIDIA GPU"
    environment = os.environ if environment is None else environment
    if any(devices.glob(_TPU_FILES)):
        return None
    if not any(devices.glob(_VFIO_FILES)):
        return "this machine has no TPU"
    # Any card can be handed out by vfio: the machine has to say that it is a TPU.
    if any(environment.get(name) for name in _TPU_VARIABLES):
        return None
    return (
        "this machine has /dev/vfio, which may be any card's, and does not say that it has a TPU: "
        f"set {' or '.join(_TPU_VARIABLES)} if it has"
    )


def gpus() -> list[str]:
    """Returns the names of the NVIDIA GPUs that the driver lists."""
    asking = shutil.which("nvidia-smi")
    if asking is None:
        return []
    listed = subprocess.run([asking, "-L"], capture_output=True, text=True, check=False)
    # GPU 0: NVIDIA H200 (UUID: GPU-1a2b...)
    lines = [line for line in listed.stdout.splitlines() if line.startswith("GPU")]
    return [line.partition(": ")[2].partition(" (")[0] for line in lines]


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints why there is none; the exit status is 1 then."""
    asked = list(sys.argv[1:] if arguments is None else arguments)
    if len(asked) != 1 or asked[0] not in PLATFORMS:
        raise SystemExit(f"platform={' '.join(asked)!r} is not known. Pass one of: gpu, tpu.")
    reason = why_none(asked[0])
    if reason is not None:
        print(reason)
    return 0 if reason is None else 1


if __name__ == "__main__":
    sys.exit(main())
