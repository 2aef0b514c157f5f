"""Checkpoints of a job; see :mod:`xla_dtensor.hosts.checkpoint`."""

from __future__ import annotations

from xla_dtensor.hosts.checkpoint import (
    CheckpointError,
    Pending,
    async_save,
    latest,
    load,
    load_hf,
    save,
    save_hf,
    steps,
    verify,
)

__all__ = [
    "CheckpointError",
    "Pending",
    "async_save",
    "latest",
    "load",
    "load_hf",
    "save",
    "save_hf",
    "steps",
    "verify",
]
