"""One run of a step, recorded."""

from __future__ import annotations

from typing import Any

import torch

from xla_dtensor.runtimes.guards import Guards, Recording


def is_tensor(value: Any) -> bool:
    """Say that a program reads all tensors, and no array anew."""
    return isinstance(value, torch.Tensor)


def guards_of(step: Any, *args: Any, reads: Any = is_tensor) -> Guards:
    """Return what one run of a step reads."""
    with Recording(step, args) as recording:
        step(*args)
    guards = recording.guards()
    guards.settle(reads)
    return guards


def why(guards: Guards) -> str | None:
    """Return why guards are broken."""
    change = guards.broken()
    return None if change is None else change.why
