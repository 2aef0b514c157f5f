"""The gradients that a compiled step finds on parameters, adds to, leaves behind or drops.

``p.grad`` is an attribute of Python, which a program cannot set. What a trace did to it is done
again after every run, and a program serves only calls that find gradients where its trace did::

    step: loss = ...; loss.backward()                     the optimizer is called outside

    call 1   no gradients there    traced: makes them                                  program A
    call 2   gradients there       traced: adds to them                                program B
             optimizer.zero_grad()
    call 3   no gradients there                                                        program A
    call 4   gradients there       the ones A hung there again, which B adds to        program B

So a program keeps the tensors that it made as gradients. Their memory is given back while they
hang on nothing.

Where the first thing that a step does to a gradient is to drop it (``zero_grad()`` at its start),
it does not matter whether one is there, and one program serves both kinds of calls.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import weakref
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from xla_dtensor.runtimes.jax.compile.trace_values import inner

__all__ = ["DroppedGradients", "GradientEffects", "KnownLeaves"]

_Given = Sequence[tuple[torch.Tensor, torch.Tensor | None]]


@dataclass(frozen=True)
class GradientEffects:
    """What one trace did to gradients.

    Args:
        found: The leaves whose gradients the program reads, with those gradients' storages.
        left: The leaves whose ``grad`` the trace changed, with what it became.
        dropped: The ids of the leaves of which it does not matter whether they have gradients.
    """

    found: list[tuple[weakref.ref[torch.Tensor], Any]]
    left: list[tuple[weakref.ref[torch.Tensor], torch.Tensor | None]]
    dropped: Container[int] = ()

    @classmethod
    def of(
        cls, before: _Given, captured: Container[Any], dropped: Container[int] = ()
    ) -> GradientEffects:
        """Compare with what was before the trace.

        Args:
            before: Every leaf with the gradient that it had.
            captured: The storages that the trace read or wrote.
            dropped: See the class.
        """
        effects = cls([], [], dropped)
        for leaf, grad in before:
            payload = None if grad is None else inner(grad)
            if payload is not None and payload._storage in captured:
                effects.found.append((weakref.ref(leaf), payload._storage))
            if leaf.grad is not grad:
                effects.left.append((weakref.ref(leaf), leaf.grad))
        return effects

    def leaves(self) -> list[weakref.ref[torch.Tensor]]:
        """Return the leaves whose gradients matter to the program."""
        changed = [leaf for leaf, _ in (*self.found, *self.left)]
        return [leaf for leaf in changed if id(leaf()) not in self.dropped]

    def storages(self) -> set[int]:
        """Return the ids of the storages of the gradients that the trace left."""
        payloads = [None if grad is None else inner(grad) for _, grad in self.left]
        return {id(payload._storage) for payload in payloads if payload is not None}

    def broken(self) -> str | None:
        """Return why the program does not fit the gradients that hang there; None if it does."""
        for reference, storage in self.found:
            leaf = reference()
            grad = None if leaf is None else leaf.grad
            payload = None if grad is None else inner(grad)
            if payload is None or payload._storage is not storage:
                return "a gradient was replaced"
        return None

    def release(self) -> None:
        """Before a run: give back the memory of gradients that hang on nothing."""
        for reference, grad in self.left:
            leaf = reference()
            if grad is not None and (leaf is None or leaf.grad is not grad):
                payload = inner(grad)
                if payload is not None:
                    payload._storage.array = None  # pyright: ignore[reportAttributeAccessIssue]

    def repeat(self) -> None:
        """After a run: do to the leaves what the trace did."""
        for reference, grad in self.left:
            leaf = reference()
            if leaf is not None and leaf.grad is not grad:
                leaf.grad = grad


class KnownLeaves:
    """The leaves whose gradients matter to some program of a step."""

    def __init__(self) -> None:
        self._leaves: dict[int, weakref.ref[torch.Tensor]] = {}

    def add(self, effects: GradientEffects) -> None:
        """Take up the leaves of a new program."""
        for reference in effects.leaves():
            leaf = reference()
            if leaf is not None:
                self._leaves.setdefault(id(leaf), reference)

    def having(self) -> frozenset[int]:
        """Return which of them have a gradient at present, as part of what finds a program."""
        leaves = ((key, reference()) for key, reference in self._leaves.items())
        return frozenset(key for key, leaf in leaves if leaf is not None and leaf.grad is not None)

    def had(self, before: _Given) -> frozenset[int]:
        """Return which of them had one, going by what was before a trace."""
        return frozenset(id(t) for t, grad in before if id(t) in self._leaves and grad is not None)


# ------------------------------------------------------------------ Gradients that nobody asks for

_ZERO_GRAD = tuple(
    inspect.unwrap(kind.zero_grad).__code__ for kind in (torch.optim.Optimizer, torch.nn.Module)
)
_grad: Any = torch._C.TensorBase.grad  # pyright: ignore[reportAttributeAccessIssue]


class DroppedGradients:
    """The leaves whose gradients a step drops before it asks whether there are any.

    Args:
        before: Every leaf with the gradient that it had before the trace.
        captured: The storages that the trace reads or writes; it grows.
    """

    def __init__(self, before: _Given, captured: Container[Any]) -> None:
        self._before = {id(leaf): grad for leaf, grad in before}
        self._captured = captured
        self._asked: set[int] = set()
        self.leaves: set[int] = set()

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Note what Python does with the attribute ``grad`` inside of the block."""
        # torch imports it when some ops run first, and it looks then at the attributes of Tensor.
        import torch._dynamo

        def read(leaf: torch.Tensor) -> torch.Tensor | None:
            frame = sys._getframe(1)
            if frame.f_code in _ZERO_GRAD and frame.f_locals.get("set_to_none"):
                self._drop(leaf)
            else:
                self._asked.add(id(leaf))
            return _grad.__get__(leaf)

        def write(leaf: torch.Tensor, grad: torch.Tensor | None) -> None:
            if grad is None:
                self._drop(leaf)
            self._asked.add(id(leaf))
            _grad.__set__(leaf, grad)

        torch.Tensor.grad = property(read, write, _grad.__delete__)  # pyright: ignore
        try:
            yield
        finally:
            del torch.Tensor.grad

    def _drop(self, leaf: torch.Tensor) -> None:
        grad = _grad.__get__(leaf)
        if id(leaf) in self._asked or grad is not self._before.get(id(leaf)):
            return
        payload = None if grad is None else inner(grad)
        if payload is None or payload._storage not in self._captured:
            self.leaves.add(id(leaf))
