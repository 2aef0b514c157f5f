"""Equal layers that a runtime is to run as one loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Layers"]


@dataclass(frozen=True)
class Layers:
    """What there is to run.

    Args:
        call: Runs one block on lists of carry and shared tensors; returns a list.
        swapped: A context in which the block has the given tensors for its own.
        tensors: Each layer's parameters and buffers, all in the same order.
        names: What errors call the tensors of a layer.
        modules: All modules of all layers.
    """

    call: Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]
    swapped: Callable[[Sequence[Any]], AbstractContextManager[None]]
    tensors: Sequence[Sequence[torch.Tensor]]
    names: Sequence[str]
    modules: Sequence[torch.nn.Module]
