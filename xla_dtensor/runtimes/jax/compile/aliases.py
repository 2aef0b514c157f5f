"""Arguments that are tensors which the step also finds by name.

A program knows a tensor by its name, or by its place among the arguments. Where a call is given a
tensor under both, they are one input, as they are one tensor to PyTorch::

    step = xd.compile(lambda x: state.add_(1) * x)

    step(other)        x and state are two tensors         program A
    step(state)        x is state, and sees the write      program B

Invariant: the buffers that a program donates are none of its other inputs.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

import torch

from xla_dtensor.runtimes.jax.compile.trace_values import inner
from xla_dtensor.runtimes.jax.eager.tensor import Storage

__all__ = ["Aliases"]


@dataclass(frozen=True)
class Aliases:
    """What a trace found of this.

    Args:
        found: Of each argument the storage, if the step finds it by name as well; else None.
    """

    found: tuple[Storage | None, ...] = ()

    @classmethod
    def of(cls, named: Iterable[torch.Tensor], arguments: Sequence[Storage]) -> Aliases:
        """Compare the tensors that were found by name with the arguments."""
        payloads = (inner(tensor) for tensor in named)
        known = {payload._storage for payload in payloads if payload is not None}
        return cls(tuple(each if each in known else None for each in arguments))

    def __contains__(self, storage: Storage) -> bool:
        """Tell whether a storage is that of such an argument."""
        return any(each is storage for each in self.found)

    def hold(self, known: Container[Storage], arguments: Sequence[Storage]) -> bool:
        """Tell whether a call's arguments are told apart from what the step finds by name.

        Args:
            known: The storages that the program reads or writes.
            arguments: Those of the call's arguments.
        """
        pairs = zip(self.found, arguments, strict=True)
        return all(now is was if was is not None else now not in known for was, now in pairs)
