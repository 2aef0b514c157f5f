"""One compiled trace of a step: the executable, and which storages its inputs and outputs are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from torch.utils._pytree import TreeSpec, tree_unflatten

from mesh_utils import MeshError, find_chip
from xla_dtensor.runtimes.jax_gradients import GradientEffects
from xla_dtensor.runtimes.jax_host_inputs import HostPart
from xla_dtensor.runtimes.jax_rehome import Blueprint
from xla_dtensor.runtimes.jax_slots import Slot, Slots
from xla_dtensor.runtimes.jax_stacks import give_stack, stack_of
from xla_dtensor.runtimes.jax_step_values import Delivered
from xla_dtensor.runtimes.jax_tensor import Storage
from xla_dtensor.runtimes.jax_watch import Watch
from xla_dtensor.runtimes.premises import Change

__all__ = ["Program"]


@dataclass(eq=False)
class Program:
    """A compiled trace. See :mod:`xla_dtensor.runtimes.jax_compile`.

    Args:
        executable: What XLA made.
        state: Read and written: inputs and outputs.
        read: Read only.
        constants: Arrays of the trace that are no storage's.
        lasting: References to what the step made and left behind; outputs.
        written: Positions of the arguments that the step wrote to.
        numbers: Python's numbers that are read anew on every call, and where they go.
        out_tree: How the step's results nest.
        out_static: Of each result how to wrap it, or its value where it is no tensor.
        watch: What the trace took for granted.
        slots: Which of the storages travel as one array.
        blueprint: The trace itself, for other devices.
        flops: Floating-point operations of its products, on all devices together.
        gradients: What the trace did to parameters' gradients.
        again: Why the next call has to trace anew; None if it need not.
        digest: Equal for programs that do the same.
        host: What is done on the host for each run.
        rebound: Which of the storages that are only read give way to others after the first run.
    """

    executable: Any
    state: list[Storage]
    read: list[Storage]
    constants: list[Any]
    lasting: list[Any]
    written: list[int]
    numbers: list[tuple[Storage, Callable[[], float]]]
    out_tree: TreeSpec
    out_static: list[Any]
    watch: Watch
    slots: Slots
    blueprint: Blueprint
    flops: int
    gradients: GradientEffects = field(default_factory=lambda: GradientEffects([], []))
    again: str | None = None
    digest: str = ""
    host: HostPart | None = None
    rebound: list[tuple[int, Storage]] = field(default_factory=list)

    def peak_flops(self) -> float | None:
        """Return the peak of all its devices together, in bf16; None where nobody knows it."""
        arrays = jax.tree.leaves(self.executable.input_shardings)
        devices = max((s.device_set for s in arrays), key=len, default=())
        kinds = {device.device_kind for device in devices}
        if len(kinds) != 1:
            return None
        try:
            chip = find_chip(kinds.pop())
        except MeshError:
            return None
        peak = chip.peak("bf16")
        return None if peak is None else peak * len(devices) / chip.devices_per_chip

    def stale(self) -> Change | None:
        """Return why the program does not fit what Python holds now; None if it fits."""
        if self.again is not None:
            return Change(self.again, for_good=True)
        change = self.watch.broken()
        if change is not None:
            return change
        why = self.gradients.broken()
        return None if why is None else Change(why, for_good=True)

    def prepare(self) -> Change | None:
        """Do the host's part of the next run; return why the program does not fit what it reads."""
        why = None if self.host is None else self.host.prepare()
        return None if why is None else Change(why)

    def run(self, arguments: Sequence[Storage]) -> Any:
        for storage, current in self.numbers:
            value = current()
            if value != float(storage.array):
                storage.array = _replicated_like(np.asarray(value), storage.array)
        self.gradients.release()
        state = [_taken(slot, self.state) for slot in self.slots.state]
        read = [_taken(slot, self.read) for slot in self.slots.read]
        given = [s.array for s in arguments]
        outputs = self.executable(state, read, self.constants, given)
        results, state, lasting, written = outputs
        for position, array in zip(self.written, written, strict=True):
            arguments[position].array = array
        for slot, array in zip(self.slots.state, state, strict=True):
            _give(array, [self.state[place] for place in slot])
        for slot, array in zip(self.slots.lasting, lasting, strict=True):
            _give(array, [self.lasting[place]() for place in slot])
        for place, storage in self.rebound:
            self.read[place] = storage
        self.gradients.repeat()
        return self._outputs(iter(results))

    def _outputs(self, arrays: Iterator[jax.Array]) -> Any:
        return tree_unflatten(
            [self._output(leaf, arrays) for leaf in self.out_static], self.out_tree
        )

    def _output(self, leaf: Any, arrays: Iterator[jax.Array]) -> Any:
        if isinstance(leaf, Delivered):
            assert self.host is not None
            return self.host.delivered[leaf.number]
        return leaf(next(arrays)) if callable(leaf) else leaf.value


def _taken(slot: Slot, storages: Sequence[Storage]) -> jax.Array:
    if len(slot) == 1:
        return storages[slot[0]].array
    return stack_of([storages[place] for place in slot]).array


def _give(array: jax.Array, storages: Sequence[Storage | None]) -> None:
    if len(storages) > 1:
        give_stack(array, storages)
    elif storages[0] is not None:
        storages[0].array = array


def _replicated_like(value: np.ndarray[Any, Any], array: jax.Array) -> jax.Array:
    return jax.device_put(jnp.asarray(value, array.dtype), array.sharding)
