"""Plain tensors that go into a step's program, as inputs that each call reads anew.

What a step computes on the host is on its tape (``host_work``). Where a plain tensor meets the mesh
while the step is traced, and can have other values on the next call, a storage stands for it that
counts as older than the trace; before each run it gets what the tape then comes to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from xla_dtensor.core.errors import CompileError
from xla_dtensor.runtimes.host_work import HostTape, HostWork, OtherwiseError
from xla_dtensor.runtimes.host_work.tape import is_host
from xla_dtensor.runtimes.jax.arrays import trace as jax_trace
from xla_dtensor.runtimes.jax.arrays.sharding import put_host_array
from xla_dtensor.runtimes.jax.arrays.storage import Storage
from xla_dtensor.runtimes.jax.arrays.values import numpy_from_torch, x64
from xla_dtensor.runtimes.jax.compile.optimizer import lifted
from xla_dtensor.runtimes.jax.eager.tensor import JaxTensor
from xla_dtensor.runtimes.nested import leaves, map_nested

__all__ = [
    "HostInputs",
    "HostPart",
    "refuse_host_input",
    "refuse_writes_to_host",
]


class HostInputs:
    """The plain tensors that go into a program.

    Args:
        tape: What the step computes on the host.
    """

    def __init__(self, tape: HostTape) -> None:
        self.tape = tape
        self.storages: list[Storage] = []

    def input_of(self, tensor: torch.Tensor) -> JaxTensor | None:
        """Return what stands for a plain tensor in the program; None for a constant."""
        number = self.tape.take(tensor) if is_host(tensor) else None
        if number is None:
            return None
        if number == len(self.storages):
            self.storages.append(lifted(tensor)._storage)
        return JaxTensor(self.storages[number])

    def admitted(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Any, Any]:
        """Return an op's arguments, with what stands for the plain tensors among them.

        A manual tensor, which has a value for each device, takes plain ones as they are; see
        ``manual``. What the op writes to stays what it is.
        """
        operands = list(leaves((args, kwargs)))
        plain = [
            operand
            for operand in operands
            if isinstance(operand, torch.Tensor) and is_host(operand)
        ]
        tensors = [operand for operand in operands if isinstance(operand, JaxTensor)]
        if not plain or any(tensor._storage.manual is not None for tensor in tensors):
            return args, kwargs
        written = _written(func, args, kwargs) if func._schema.is_mutable else ()
        chosen = [t for t in plain if not any(t is target for target in written)]
        stand_ins = {id(tensor): self.input_of(tensor) for tensor in chosen}

        def admit(operand: Any) -> Any:
            stand_in = stand_ins.get(id(operand))
            return operand if stand_in is None else stand_in

        return map_nested(admit, args), map_nested(admit, kwargs)

    def with_values(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Any, Any] | None:
        """Return an op's arguments with the plain tensors among them as constants, noted as read.

        Returns:
            Arguments and keyword arguments; None where there are no plain tensors, or the op writes
            to one.
        """
        written = _written(func, args, kwargs) if func._schema.is_mutable else ()
        if any(isinstance(target, torch.Tensor) and is_host(target) for target in written):
            return None
        plain = [v for v in leaves((args, kwargs)) if isinstance(v, torch.Tensor) and is_host(v)]
        if not plain:
            return None
        for tensor in plain:
            self.tape.note_read(tensor)

        def constant(operand: Any) -> Any:
            if not isinstance(operand, torch.Tensor) or not is_host(operand):
                return operand
            with jax.ensure_compile_time_eval():
                return JaxTensor(Storage(jnp.asarray(np.array(numpy_from_torch(operand)))))

        with x64():
            return map_nested(constant, args), map_nested(constant, kwargs)


class HostPart:
    """What is done on the host for each run of a program.

    Args:
        work: What the step computes on the host.
        storages: Of the plain tensors that go into the program.
        delivered: Plain tensors that the step returned when it was traced.

    Attributes:
        work: As given.
        storages: As given.
        delivered: Those of the present run.
    """

    def __init__(
        self, work: HostWork, storages: Sequence[Storage], delivered: Sequence[torch.Tensor]
    ) -> None:
        self.work = work
        self.storages = storages
        self.delivered: Mapping[int, torch.Tensor] = dict(enumerate(delivered))

    def prepare(self) -> str | None:
        """Do it for the next run; for the first one the trace has done it.

        Returns:
            Why the program does not fit what comes of it; None if it fits.
        """
        try:
            run = self.work.redo()
        except OtherwiseError as otherwise:
            return str(otherwise)
        if run is not None:
            self.delivered = run.delivered
            for number, tensor in run.taken.items():
                storage = self.storages[number]
                storage.array = put_host_array(numpy_from_torch(tensor), storage.array.sharding)
        return None


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    targets: list[Any] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            operand = args[position] if position < len(args) else kwargs.get(argument.name)
            targets += leaves(operand)
    return targets


def refuse_writes_to_host(trace: jax_trace.Trace) -> None:
    """Raise where an op has written to what stands for a plain tensor, a running mean say."""
    for storage in () if trace.host is None else trace.host.storages:
        if storage in trace.state:
            jax_trace.refuse_write_to_host(storage)


def refuse_host_input(tensor: torch.Tensor, what: str) -> None:
    """Raise for a plain tensor that can be another one on the next call, where none can be."""
    trace = jax_trace.active_trace()
    if trace is None or trace.host is None or not trace.host.tape.varies(tensor):
        return
    raise CompileError(
        f"A compiled step was about to {what} a host tensor of shape={tuple(tensor.shape)} that "
        "can be another one on the next call. It would be part of the program, the same for ever. "
        "Do this before the call, and pass the result as an argument."
    )
