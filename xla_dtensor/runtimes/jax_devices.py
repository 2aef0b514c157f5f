"""The devices that programs are made for: JAX's own, or those of a machine that is not here.

Whatever asks how many devices there are, or of what kind, in order to decide what a program looks
like, asks here and not JAX: a step that is compiled for a pod has to be the pod's program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

__all__ = [
    "device_count",
    "devices",
    "local_devices",
    "memory_statistics",
    "platform",
    "set_absent_devices",
]

_absent: tuple[Any, ...] = ()


def set_absent_devices(absent: Sequence[Any]) -> None:
    """Let this process make programs for devices that it does not have; none takes that back."""
    global _absent
    _absent = tuple(absent)


def devices() -> Sequence[Any]:
    """Return all devices of the job."""
    return _absent or jax.devices()


def local_devices() -> Sequence[Any]:
    """Return the devices that this process reaches; of absent ones those of the first process."""
    if not _absent:
        return jax.local_devices()
    first = min(device.process_index for device in _absent)
    return tuple(device for device in _absent if device.process_index == first)


def device_count() -> int:
    """Return how many devices the job has."""
    return len(devices())


def memory_statistics() -> Mapping[int, Mapping[str, int]]:
    """Return what each device of this process says of its memory; nothing where they do not."""
    said = {} if _absent else {device.id: device.memory_stats() for device in jax.local_devices()}
    return {device: dict(told) for device, told in said.items() if told}


def platform() -> str:
    """Return what the devices are: "cpu", "gpu" or "tpu"."""
    return _absent[0].platform if _absent else jax.default_backend()
