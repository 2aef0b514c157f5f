"""One compiled trace of a step: the executable, and which storages its inputs and outputs are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.utils._pytree import TreeSpec, tree_unflatten

from mesh_utils import MeshError, find_chip
from xla_dtensor.runtimes.argument_containers import Writes
from xla_dtensor.runtimes.jax_aliases import Aliases
from xla_dtensor.runtimes.jax_effects import RunEffects
from xla_dtensor.runtimes.jax_gradients import GradientEffects
from xla_dtensor.runtimes.jax_host_inputs import HostPart
from xla_dtensor.runtimes.jax_moving import MovingTensor
from xla_dtensor.runtimes.jax_rehome import Blueprint
from xla_dtensor.runtimes.jax_slots import Slot, Slots
from xla_dtensor.runtimes.jax_stacks import give_stack, stack_of
from xla_dtensor.runtimes.jax_step_values import Delivered
from xla_dtensor.runtimes.jax_tensor import Storage
from xla_dtensor.runtimes.jax_value_checks import raise_flagged
from xla_dtensor.runtimes.jax_watch import Watch
from xla_dtensor.runtimes.opened import close_all
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
        moving: Tensors that are read by name.
        effects: What is assigned in Python after each run.
        aliases: The arguments that the step also finds by name.
        writes: The containers among the arguments that it writes to.
        flags: What the first results say of the step's checks; None without checks.
        last_call: The number of the last call that it has served.
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
    moving: list[MovingTensor] = field(default_factory=list)
    effects: RunEffects = field(default_factory=lambda: RunEffects([], {}))
    aliases: Aliases = field(default_factory=Aliases)
    writes: Writes = field(default_factory=Writes)
    flags: Any = None
    last_call: int = 0
    _has_run: bool = False
    _found: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._known = {*self.state, *self.read}

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

    @property
    def num_flags(self) -> int:
        """How many of the program's results are none of the step's."""
        return 0 if self.flags is None else self.flags.num_leaves

    def stale(self) -> Change | None:
        """Return why the program does not fit what Python holds now; None if it fits."""
        if self.again is not None:
            return Change(self.again, for_good=True)
        change = self.watch.broken()
        if change is not None:
            return change
        why = self.gradients.broken()
        return None if why is None else Change(why, for_good=True)

    def prepare(self, arguments: Sequence[Storage]) -> Change | None:
        """Do the host's part of the next run; return why the program does not fit what it reads."""
        for each in self.moving:
            each.bind(self.read, None if self.host is None else self.host.work)
        self._found = [each.moving.tensor for each in self.moving]
        if self.moving:
            self._known = {*self.state, *self.read}
            if len(self._known) < len(self.state) + len(self.read):
                return Change("two names have one tensor, and had one each")
        if not self.aliases.hold(self._known, arguments):
            return Change("an argument is a tensor that the step also finds by name, or was one")
        why = None if self.host is None else self.host.prepare()
        return None if why is None else Change(why)

    def run(self, arguments: Sequence[Storage], leaves: Sequence[Any] = ()) -> Any:
        """Run it.

        Args:
            arguments: The storages of the call's tensors.
            leaves: All leaves of its arguments.

        Returns:
            What the step returns.
        """
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
        self._leave(lasting, leaves)
        self.gradients.repeat()
        if self.flags is not None:
            raise_flagged(self.flags, results)
        return self._outputs(iter(results[self.num_flags :]))

    def _leave(self, arrays: Sequence[jax.Array], leaves: Sequence[Any]) -> None:
        """Leave behind what the step makes: in the trace's tensors, later in new ones."""
        pairs = list(zip(self.slots.lasting, arrays, strict=True))
        own = {s[0]: a for s, a in pairs if len(s) == 1 and s[0] in self.effects.wraps}
        for slot, array in pairs:
            if not self._has_run or slot[0] not in own:
                _give(array, [self.lasting[place]() for place in slot])
        assigned: Mapping[int, torch.Tensor] = {}
        if self._has_run:
            delivered = {} if self.host is None else self.host.delivered
            assigned = self.effects.do(own, leaves, delivered, self._found)
        for each in self.moving:
            if each.number is not None:
                each.moving.tensor = assigned.get(each.number, each.moving.tensor)
        self._found = []
        self._has_run = True

    def _outputs(self, arrays: Iterator[jax.Array]) -> Any:
        leaves = [self._output(leaf, arrays) for leaf in self.out_static]
        return close_all(tree_unflatten(leaves, self.out_tree))

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
