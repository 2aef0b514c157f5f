"""Checkpoints of a job; see :mod:`xla_dtensor.hosts.checkpoint`.

``xla_dtensor.checkpoint.orbax`` is :mod:`xla_dtensor.hosts.checkpoint.orbax`, loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from xla_dtensor.hosts.checkpoint import orbax as orbax

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


def __getattr__(name: str) -> Any:
    if name != "orbax":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return importlib.import_module("xla_dtensor.hosts.checkpoint.orbax")
    except ModuleNotFoundError as error:
        raise ImportError(
            "xla_dtensor.checkpoint.orbax was asked for. It needs orbax, which is not installed. "
            "Run pip install 'xla-dtensor[orbax]'."
        ) from error
