"""Tensors that a step replaces on every call, a hidden state or an average that is assigned anew.

    self.hidden = (hidden @ w).detach()        where hidden = self.hidden

    call 1    finds h0, leaves h1              traced: h0 is an input, h1 a result         program A
    call 2    finds h1, leaves h2              traced anew: nobody but the step has h1     program B
    call 3    finds h2, leaves h3              program B, whose input is h2 from now on

After its first run a program reads what it has left in the tensor's place. That is allowed where
the tensor that it found was made by an earlier call: one of the user's may be known elsewhere,
under a name that nobody has seen, and is to stay the input there.

Invariant: the values that a run reads are those that PyTorch would find in the same places.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass

import torch

from xla_dtensor.runtimes.jax_step_values import inner
from xla_dtensor.runtimes.jax_tensor import Storage
from xla_dtensor.runtimes.jax_trace import Trace

__all__ = ["Rebound", "rebound_tensors"]


@dataclass(frozen=True)
class Rebound:
    """A tensor that a step replaces.

    Args:
        found: The one that the trace found.
        left: The one that it left in all its places.
    """

    found: torch.Tensor
    left: torch.Tensor

    @property
    def storages(self) -> tuple[Storage, Storage]:
        """The storages of both."""
        found, left = (inner(tensor) for tensor in (self.found, self.left))
        assert found is not None
        assert left is not None
        return found._storage, left._storage


def rebound_tensors(
    replaced: Iterable[tuple[torch.Tensor, torch.Tensor]],
    trace: Trace,
    lasting: Container[Storage],
    made: Container[Storage],
) -> list[Rebound]:
    """Return the tensors whose places a program may go on reading.

    Args:
        replaced: Tensors that the trace found, and those that it left there.
        trace: The trace; its tensors have their values of before again.
        lasting: The storages that it made.
        made: Those that earlier programs of the step made.
    """
    found = [Rebound(*pair) for pair in replaced if _are_alike(*pair)]
    storages = [each.storages for each in found]
    once = [[s for pair in storages for s in pair].count(each.storages[0]) == 1 for each in found]
    return [
        each
        for each, (old, new), alone in zip(found, storages, once, strict=True)
        if alone
        and old in made
        and new in lasting
        and old in trace.captured
        and old not in trace.state
    ]


def _are_alike(found: torch.Tensor, left: torch.Tensor) -> bool:
    pair = inner(found), inner(left)
    if type(found) is not type(left) or any(t is None or t._steps for t in pair):
        return False
    if any(t is None or t._storage.manual is not None or t._storage.row is not None for t in pair):
        return False
    return (
        all(
            getattr(found, name) == getattr(left, name)
            for name in ("shape", "dtype", "requires_grad", "is_leaf")
        )
        and not found.requires_grad
        and _labels(found) == _labels(left)
    )


def _labels(tensor: torch.Tensor) -> object:
    spec = getattr(tensor, "_spec", None)
    return None if spec is None else (spec.mesh, spec.placements, spec.known)
