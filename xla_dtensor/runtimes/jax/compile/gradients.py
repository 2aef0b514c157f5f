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
hang on nothing. Where somebody else has kept one, which PyTorch would make anew, the program makes
another one, too::

    kept.append(p.grad); p.grad = None                    the next run makes another p.grad

Where others make the gradients that a step reads, an optimizer's alone, say, each call finds other
ones. When that was seen once, the program reads them by name (``moving``).

Where the first thing that a step does to a gradient is to drop it (``zero_grad()`` at its start),
it does not matter whether one is there, and one program serves both kinds of calls. A parameter
that is frozen may have a gradient too, of the time before.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import weakref
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, cast

import torch

from xla_dtensor.runtimes.guards.values import Moving
from xla_dtensor.runtimes.jax.arrays.storage import Storage
from xla_dtensor.runtimes.jax.compile.trace_values import inner, maker_of

__all__ = ["GRADIENTS", "DroppedGradients", "GradientEffects", "KnownLeaves", "LeftGradient"]

GRADIENTS = "gradients"  # what tells these names from others

_Given = Sequence[tuple[torch.Tensor, torch.Tensor | None]]
# Leaves are held as long as the programs, which hold their memory; not by weak references:
# `torch.utils.swap_tensors`, by which Module.to gives a DTensor another dtype, refuses those.


@dataclass
class LeftGradient:
    """A gradient that a trace has changed.

    Args:
        leaf: Of what.
        grad: What it became.
        number: Of its storage among those that the step makes; None for another one's.
        is_stored: Whether the step stores it elsewhere, too.
        payload: Its payload.
        holders: How many have it when nobody but the program and the leaf does, by kind; None
            before the first run.
    """

    leaf: torch.Tensor
    grad: torch.Tensor | None
    number: int | None = None
    is_stored: bool = False
    payload: Any = None
    holders: tuple[int, int, int] | None = None

    def hangs(self) -> bool:
        """Tell whether it is the leaf's gradient at present."""
        return self.leaf.grad is self.grad

    def watch(self) -> None:
        """Note who has it, at the end of a run."""
        self.payload = payload = inner(self.grad)
        if payload is not None:
            self.holders = self._holders()
            payload._storage.aliases = []

    def is_held(self, hangs: bool) -> bool:
        """Tell whether somebody has it, or a view of it, beside the program and the leaf."""
        if self.is_stored or self.holders is None:
            return self.holders is not None
        of_python, of_torch, of_payload = self.holders
        if not hangs:
            of_python, of_torch = of_python - _OF_A_LEAF[0], of_torch - _OF_A_LEAF[1]
        now = self._holders()
        if now[0] > of_python or now[1] > of_torch or now[2] > of_payload:
            return True
        aliases = self.payload._storage.aliases
        return bool(aliases) and any(alias() is not None for alias in aliases)

    def _holders(self) -> tuple[int, int, int]:
        grad: Any = self.grad
        return sys.getrefcount(grad), grad._use_count(), sys.getrefcount(self.payload)

    def renew(self, storages: dict[Storage, Storage]) -> Storage:
        """Be another gradient like this one; return its storage.

        Args:
            storages: Those of others that were renewed, by the old ones.
        """
        payload: Any = inner(self.grad)
        old = payload._storage
        if old not in storages:
            array: Any = None
            storages[old] = Storage(array, old.shape, old.sharding, old.manual)
        self.grad = maker_of(self.grad, payload, payload._steps)(storages[old], ())
        self.holders = None
        return storages[old]


def _holders_of_a_leaf() -> tuple[int, int]:
    """Return how many more have a gradient where it hangs on a leaf; versions of torch differ."""
    leaf, grad = torch.zeros(1, requires_grad=True), torch.zeros(1)
    before = sys.getrefcount(grad), cast(Any, grad)._use_count()
    leaf.grad = grad
    return sys.getrefcount(grad) - before[0], cast(Any, grad)._use_count() - before[1]


_OF_A_LEAF = _holders_of_a_leaf()


@dataclass(frozen=True)
class GradientEffects:
    """What one trace did to gradients.

    Args:
        found: The leaves whose gradients the program reads, with those gradients' storages.
        left: The gradients that the trace changed.
        dropped: The ids of the leaves of which it does not matter whether they have gradients.
        absent: The leaves that the step has seen to have none.
        by_name: The leaves whose gradients the program reads, whichever they are.
    """

    found: list[tuple[torch.Tensor, Any]]
    left: list[LeftGradient]
    dropped: Container[int] = ()
    absent: Sequence[torch.Tensor] = ()
    by_name: Sequence[tuple[torch.Tensor, Moving]] = ()

    @classmethod
    def of(
        cls,
        before: _Given,
        captured: Container[Any],
        notes: DroppedGradients,
        lasting: Sequence[Storage] = (),
        moving: Mapping[int, Moving] | None = None,
    ) -> GradientEffects:
        """Compare with what was before the trace.

        Args:
            before: Every leaf with the gradient that it had.
            captured: The storages that the trace read or wrote.
            notes: What the step did with them.
            lasting: The storages that the trace made and left behind.
            moving: What is read by name, by the ids of what was found there.
        """
        dropped = notes.leaves
        absent = [leaf for leaf, _ in before if id(leaf) in notes.absent]
        names = moving or {}
        by_name = [(leaf, names[id(g)]) for leaf, g in before if id(g) in names]
        effects = cls([], [], dropped, absent, by_name)
        numbers = {storage: number for number, storage in enumerate(lasting)}
        for leaf, grad in before:
            payload = None if grad is None else inner(grad)
            if payload is not None and payload._storage in captured and id(grad) not in names:
                effects.found.append((leaf, payload._storage))
            if leaf.grad is not grad or id(leaf) in dropped:
                new = inner(leaf.grad)
                number = None if new is None else numbers.get(new._storage)
                effects.left.append(LeftGradient(leaf, leaf.grad, number))
        return effects

    def leaves(self) -> list[torch.Tensor]:
        """Return the leaves whose gradients matter to the program."""
        found, left = (leaf for leaf, _ in self.found), (entry.leaf for entry in self.left)
        changed = [*found, *left, *self.absent, *(leaf for leaf, _ in self.by_name)]
        return [leaf for leaf in changed if id(leaf) not in self.dropped]

    def storages(self) -> set[int]:
        """Return the ids of the storages of the gradients that the trace left."""
        payloads = [inner(entry.grad) for entry in self.left]
        return {id(payload._storage) for payload in payloads if payload is not None}

    def broken(self) -> str | None:
        """Return why the program does not fit the gradients that hang there; None if it does."""
        for leaf, storage in self.found:
            payload = None if leaf.grad is None else inner(leaf.grad)
            if payload is None or payload._storage is not storage:
                return "a gradient was replaced"
        if not all(moving.takes(leaf.grad) for leaf, moving in self.by_name):
            return "a gradient was replaced"
        return None

    def release(self, lasting: list[weakref.ref[Storage]]) -> None:
        """Before a run: give back the memory of gradients that hang on nothing.

        Args:
            lasting: The storages that the run fills. Where somebody has kept a gradient, that of
                another one takes its place.
        """
        storages: dict[Storage, Storage] = {}
        for entry in self.left:
            if entry.grad is None:
                continue
            hangs = entry.hangs()
            if entry.number is not None and entry.is_held(hangs):
                lasting[entry.number] = weakref.ref(entry.renew(storages))
            elif not hangs:
                payload = inner(entry.grad)
                if payload is not None:
                    payload._storage.array = None  # pyright: ignore[reportAttributeAccessIssue]

    def repeat(self) -> None:
        """After a run: do to the leaves what the trace did."""
        for entry in self.left:
            if entry.leaf.grad is not entry.grad:
                entry.leaf.grad = entry.grad
            if entry.holders is None and entry.number is not None:
                entry.watch()


class KnownLeaves:
    """The leaves whose gradients matter to some program of a step."""

    def __init__(self) -> None:
        self._leaves: dict[int, torch.Tensor] = {}

    def add(self, effects: GradientEffects) -> None:
        """Take up the leaves of a new program."""
        self._leaves |= {id(leaf): leaf for leaf in effects.leaves()}

    def keep(self, programs: Iterable[GradientEffects]) -> Set[int]:
        """Forget the leaves that matter to no program any more; return the ids of the others."""
        self._leaves = {}
        for effects in programs:
            self.add(effects)
        return self._leaves.keys()

    def having(self) -> frozenset[int]:
        """Return which of them have a gradient at present, as part of what finds a program."""
        return frozenset(key for key, leaf in self._leaves.items() if leaf.grad is not None)

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

    And those of which it asks, or which its backward pass finds, without one (``absent``): what it
    does then is for such only.

    Args:
        before: Every leaf with the gradient that it had before the trace.
        captured: The storages that the trace reads or writes; it grows.
    """

    def __init__(self, before: _Given, captured: Container[Any]) -> None:
        self._before = {id(leaf): grad for leaf, grad in before}
        self._captured = captured
        self._asked: set[int] = set()
        self._written: set[int] = set()
        self.leaves: set[int] = set()
        self.absent: set[int] = set()

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
                self._ask(leaf)
            with torch._C.DisableTorchFunctionSubclass():  # which would ask for this property
                return _grad.__get__(leaf)

        def write(leaf: torch.Tensor, grad: torch.Tensor | None) -> None:
            if grad is None:
                self._drop(leaf)
            self._asked.add(id(leaf))
            self._written.add(id(leaf))
            with torch._C.DisableTorchFunctionSubclass():
                _grad.__set__(leaf, grad)

        torch.Tensor.grad = property(read, write, _grad.__delete__)  # pyright: ignore
        try:
            yield
        finally:
            del torch.Tensor.grad

    def _ask(self, leaf: torch.Tensor) -> None:
        self._asked.add(id(leaf))
        self._see_absent(leaf)

    def _see_absent(self, leaf: torch.Tensor) -> None:
        """Note that a leaf has no gradient, or that autograd made one where there was none."""
        key = id(leaf)
        if self._before.get(key) is None and key not in self._written and key not in self.leaves:
            self.absent.add(key)

    def _drop(self, leaf: torch.Tensor) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            grad = _grad.__get__(leaf)
        if id(leaf) in self._asked or grad is not self._before.get(id(leaf)):
            self._see_absent(leaf)
            return
        payload = None if grad is None else inner(grad)
        if payload is None or payload._storage not in self._captured:
            self.leaves.add(id(leaf))
