"""What a program baked in from Python: modules' modes and parameters, optimizers' settings."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.nn.utils import clip_grad

from xla_dtensor.runtimes.guards import Guards, Recording
from xla_dtensor.runtimes.guards.lent import Lending
from xla_dtensor.runtimes.guards.owners import DATA
from xla_dtensor.runtimes.guards.values import Change
from xla_dtensor.runtimes.host_work import HostTape
from xla_dtensor.runtimes.host_work.noticing import noticing
from xla_dtensor.runtimes.host_work.tape import is_host
from xla_dtensor.runtimes.jax.arrays.trace import Trace
from xla_dtensor.runtimes.jax.compile.layers.rows import row_of
from xla_dtensor.runtimes.jax.compile.moving import Aliases, MovingData, MovingTensor
from xla_dtensor.runtimes.jax.compile.optimizer import NumbersMeetTensors, OptimizerInputs
from xla_dtensor.runtimes.jax.compile.trace_values import inner
from xla_dtensor.runtimes.torch_own import put_back

__all__ = ["Watch", "see_alike", "watching"]

_ASKS_FOR_LISTS = "_has_foreach_support"

_current: Watch | None = None


@dataclass
class Watch:
    """What a program baked in from Python, to notice when it no longer holds."""

    inputs: OptimizerInputs
    recording: Recording | None
    lending: Lending
    answers: list[tuple[Callable[[], Any], Any]] = field(default_factory=list)
    guards: Guards = field(init=False)

    def broken(self) -> Change | None:
        """Return what has changed since the trace, None if nothing has."""
        change = self.guards.broken()
        if change is not None:
            return change
        if self.inputs.parameters_changed():
            return Change("an optimizer was given other parameters")
        if self.inputs.hooks_changed():
            return Change("a hook of an optimizer was added or removed")
        if self.inputs.state_replaced():
            return Change("the state of an optimizer was replaced", for_good=True)
        replaced = self.inputs.data_replaced()
        if replaced:
            why = "the data of an optimizer's parameter, or of its state, were replaced"
            return Change(why, for_good=True, name=DATA.of(replaced[0]))
        changed = self.inputs.changed()
        if changed:
            return Change(f"an optimizer's {', '.join(changed)} changed", for_good=True)
        try:
            self.lending.arithmetic.compute()
            if any(ask() != answer for ask, answer in self.answers):
                return Change("what the step asks of a number changed")
        except Exception as error:  # of Python's own arithmetic, which a trace raises again
            return Change(f"what the step computes of a number changed ({error})")
        return None

    def replaced(self) -> Iterator[Any]:
        """Yield the names of all that another value of its kind has taken the place of."""
        yield from self.guards.replaced()
        yield from map(DATA.of, self.inputs.data_replaced())

    def settle(
        self,
        trace: Trace,
        tape: HostTape,
        moving: Sequence[MovingTensor],
        data: Sequence[MovingData],
        aliases: Aliases,
    ) -> None:
        """Remember what holds at the end of the trace.

        Args:
            trace: The trace.
            tape: Of the host.
            moving: What is read by name.
            data: The tensors whose data are looked up.
            aliases: The arguments that the step also finds by name.
        """

        def reads(tensor: Any) -> bool:
            if isinstance(tensor, np.ndarray):
                return tape.shares(tensor)
            payload = inner(tensor)
            if payload is None:
                return is_host(tensor) and tape.reads(tensor)
            return payload._storage in trace.captured or payload._storage in aliases

        by_name = {id(moving_tensor.found): moving_tensor.moving for moving_tensor in moving}
        left = {id(moving_tensor.left): moving_tensor.moving for moving_tensor in moving}
        self.inputs.let_move(left, reads)
        instead = {**self.inputs.lifted(), **by_name}
        assert self.recording is not None
        self.guards = self.recording.guards()
        fits = {id(entry.tensor): entry.fits for entry in data}
        self.inputs.let_data_move(fits)
        self.guards.settle(reads, instead, fits)
        self.recording = None  # It holds what the step has dropped.
        self.answers = trace.answers
        self.lending.settle()


@contextlib.contextmanager
def watching(watch: Watch, tape: HostTape) -> Iterator[None]:
    """Watch optimizers and the host; keep autograd in this thread, where the trace is."""
    global _current
    put_back()
    _current = watch
    try:
        single_threaded = torch.autograd.set_multithreading_enabled(False)
        on_host = noticing(tape), NumbersMeetTensors(tape)
        with watch.inputs.active(), single_threaded, _clipping_rows(), on_host[0], on_host[1]:
            yield
    finally:
        _current = None


@contextlib.contextmanager
def _clipping_rows() -> Iterator[None]:
    """Let torch clip gradients that are rows by lists, as it does on devices that it knows."""
    names = clip_grad.__dict__
    usual = names[_ASKS_FOR_LISTS]

    def may_take_lists(tensors: list[torch.Tensor], device: torch.device) -> bool:
        return usual(tensors, device) or any(row_of(tensor) is not None for tensor in tensors)

    names[_ASKS_FOR_LISTS] = may_take_lists
    try:
        yield
    finally:
        names[_ASKS_FOR_LISTS] = usual


def see_alike(first: torch.nn.Module, others: Iterable[torch.nn.Module]) -> None:
    """Take what a step's trace reads of a module for read of others, for which it stands.

    Does nothing outside of a trace.
    """
    if _current is not None and _current.recording is not None:
        _current.recording.alike(first, others)
