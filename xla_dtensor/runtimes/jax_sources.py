"""Which line of the user's source an op of a traced step was made for.

JAX notes for every equation the Python frames that led to it, and XLA carries them into the
compiled program. Two things stand in the way of their use for a PyTorch step:

* The innermost frames are torch's and ours. They are left out, as JAX leaves out its own.
* In the backward there are no frames of the model: autograd calls each node from C++, under the one
  line ``loss.backward()``. So every op of the forward leaves its frames, and the names of the
  modules around it, under the number of the autograd node that was made for it, and an op that runs
  for a node is given that node's; its modules' names then come after ``backward``.

An op that runs in the backward with autograd on is the forward computed again (checkpointing): it
runs under the model's own frames, and keeps them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from xla_dtensor.runtimes.jax_private import frames_here, frames_of

__all__ = ["Sources"]

# The number that the next autograd node will have.
_next_node: Any = torch._C._autograd._get_sequence_nr  # pyright: ignore[reportAttributeAccessIssue]


class Sources:
    """Frames and names of a trace's ops, by the number of their autograd node."""

    def __init__(self) -> None:
        self._known: dict[int, Any] = {}

    @contextlib.contextmanager
    def of_op(self) -> Iterator[None]:
        """Note where the op that runs inside comes from, or give it the frames of its node."""
        node: Any = None if torch.is_grad_enabled() else torch._C._current_autograd_node()
        if node is None:
            # A node takes its number just before its op runs; later ops without a node keep off.
            number = _next_node() - 1
            if number not in self._known:
                self._known[number] = frames_here()
            yield
            return
        origin = self._known.get(node._sequence_nr())
        with contextlib.nullcontext() if origin is None else frames_of(origin, "backward"):
            yield
