"""compile(step) on the JAX runtime: an unmodified PyTorch training step as one XLA program.

The first call runs the Python step once, on tracers instead of arrays. While it runs, every
storage reports what it does (``jax_trace``), so the program's inputs and outputs are known without
anyone listing them:

===========================  ======================================================
arguments of the call        inputs
tensors read                 inputs
tensors read and written     inputs and outputs; the old buffer is donated
tensors made that last       outputs (optimizer state, gradients that were kept)
arguments written in place   outputs as well, written back to the caller's tensor
learning rates, counters     inputs (``optimizer_inputs``)
random keys                  a tensor read and written like any other
===========================  ======================================================

State comes out with the sharding it went in with; without that pin XLA may leave a replicated
weight sharded, and the second call would compile again.

A step that makes its optimizer state on the first call is traced once more on the second, when
that state exists. From then on a call costs only the launch. Python's own side effects happen only
while tracing.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import NamedSharding, PartitionSpec
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from xla_dtensor.errors import CompileError
from xla_dtensor.runtimes.base import CompiledStep
from xla_dtensor.runtimes.jax_convert import numpy_from_torch, x64
from xla_dtensor.runtimes.jax_placing import place
from xla_dtensor.runtimes.jax_rehome import Blueprint
from xla_dtensor.runtimes.jax_scalar import sym_number
from xla_dtensor.runtimes.jax_step_values import (
    bound,
    gradients,
    inner,
    refuse_manual,
    replaced,
    split_outputs,
    written_arguments,
)
from xla_dtensor.runtimes.jax_tensor import JaxTensor, Storage
from xla_dtensor.runtimes.jax_trace import Trace, refuse_nesting
from xla_dtensor.runtimes.jax_watch import Watch, watching
from xla_dtensor.runtimes.optimizer_inputs import OptimizerInputs
from xla_dtensor.runtimes.trace_settings import trace_settings

if TYPE_CHECKING:
    from xla_dtensor.runtimes.jax_runtime import JaxRuntime

__all__ = ["JaxCompiledStep"]

logger = logging.getLogger("xla_dtensor")
_RETRACES_BEFORE_WARNING = 3


@dataclass
class _Program:
    """One compiled trace of the step."""

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
    blueprint: Blueprint
    again: str | None = None

    def stale(self) -> str | None:
        return self.again or self.watch.broken()

    def run(self, arguments: Sequence[Storage]) -> Any:
        for storage, current in self.numbers:
            value = current()
            if value != float(storage.array):
                storage.array = _replicated_like(np.asarray(value), storage.array)
        state = [s.array for s in self.state]
        read = [s.array for s in self.read]
        given = [s.array for s in arguments]
        outputs = self.executable(state, read, self.constants, given)
        results, state, lasting, written = outputs
        for position, array in zip(self.written, written, strict=True):
            arguments[position].array = array
        for storage, array in zip(self.state, state, strict=True):
            storage.array = array
        for reference, array in zip(self.lasting, lasting, strict=True):
            storage = reference()
            if storage is not None:
                storage.array = array
        return self._outputs(iter(results))

    def _outputs(self, arrays: Iterator[jax.Array]) -> Any:
        leaves = [leaf(next(arrays)) if callable(leaf) else leaf.value for leaf in self.out_static]
        return tree_unflatten(leaves, self.out_tree)


class JaxCompiledStep(CompiledStep):
    """See the module docstring. Made by :func:`xla_dtensor.compile`."""

    def __init__(self, step: Callable[..., Any], runtime: JaxRuntime) -> None:
        self._step = step
        self._runtime = runtime
        self._programs: dict[Any, _Program] = {}
        self._last: _Program | None = None
        self._calls = 0
        self._reasons: list[str] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        refuse_nesting()
        self._calls += 1
        leaves, tree = tree_flatten((args, kwargs))
        with x64():
            tensors = [self._argument(leaf) for leaf in leaves]
            key = self._key(leaves, tensors, tree)
            program = self._programs.get(key)
            reason = "first call" if not self._programs else "arguments of a new shape or value"
            if program is not None:
                reason = program.stale() or ""
            if reason:
                self._note(reason)
                program = self._compile(leaves, tensors, tree)
                self._programs[key] = program
            assert program is not None
            self._last = program
            return program.run([t._storage for t in tensors if t is not None])

    def hlo(self) -> str:
        return self._called().executable.as_text()

    def lowered_for(self, devices: Sequence[Any]) -> Any:
        """Lower the program of the last call for other devices, which need not be here.

        Args:
            devices: As many JAX devices as the program runs on, of a topology, say. The first takes
                the place of the root mesh's first device, and so on.

        Returns:
            ``jax.stages.Lowered``, with the donation and the output shardings of the real program.

        Raises:
            CompileError: The step was not called yet, or runs on another number of devices.
        """
        with x64():
            return self._called().blueprint.lowered_for(devices)

    def hlo_for(self, devices: Sequence[Any]) -> str:
        """Return the partitioned program of the last call, compiled for other devices.

        A compiler may end the process over devices that it does not like: ask in a child process.

        Args:
            devices: As in `lowered_for`.

        Raises:
            CompileError: As in `lowered_for`.
        """
        with x64():
            return self.lowered_for(devices).compile().as_text()

    def _called(self) -> _Program:
        if self._last is None:
            raise CompileError(
                "The HLO of a compiled step was asked for before its first call. The program is "
                "made when the arguments' shapes are known. Call the step once first."
            )
        return self._last

    def stats(self) -> Mapping[str, Any]:
        return {"calls": self._calls, "traces": len(self._reasons), "reasons": tuple(self._reasons)}

    # ------------------------------------------------------------------ calling

    def _note(self, reason: str) -> None:
        self._reasons.append(reason)
        if len(self._reasons) > _RETRACES_BEFORE_WARNING:
            logger.warning(
                "Step %s is traced for the %dth time: %s.",
                getattr(self._step, "__name__", self._step),
                len(self._reasons),
                reason,
            )

    def _argument(self, leaf: Any) -> JaxTensor | None:
        refuse_manual(leaf, "called with", "before the call")
        tensor = inner(leaf)
        if tensor is not None:
            if tensor._steps:
                made = Storage(tensor.raw(), manual=tensor._storage.manual)
                return JaxTensor(made, shape=tuple(tensor.shape), stride=tensor.stride())
            return tensor
        if isinstance(leaf, torch.Tensor):
            return JaxTensor(Storage(jnp.array(numpy_from_torch(leaf))))
        return None

    def _key(
        self, leaves: Sequence[Any], tensors: Sequence[JaxTensor | None], tree: TreeSpec
    ) -> Any:
        described = tuple(
            (type(leaf), leaf)
            if tensor is None
            else (
                type(leaf),
                tuple(tensor.shape),
                tensor.dtype,
                tensor._storage.array.sharding,
                getattr(leaf, "_spec", None) and leaf._spec.placements,
                getattr(leaf, "_varying", None),
                getattr(leaf, "_uneven", None),
                leaf.requires_grad,
            )
            for leaf, tensor in zip(leaves, tensors, strict=True)
        )
        modes = (torch.get_float32_matmul_precision(), torch.is_grad_enabled(), trace_settings())
        return described, tree, modes

    # ------------------------------------------------------------------ tracing

    def _compile(
        self, leaves: Sequence[Any], tensors: Sequence[JaxTensor | None], tree: TreeSpec
    ) -> _Program:
        trace = Trace()
        numbers: list[tuple[Storage, Callable[[], float]]] = []
        watch = Watch(OptimizerInputs(self._lift, lambda *a: _lend(numbers, *a)))
        found: dict[str, Any] = {}

        def traced(arrays: Sequence[jax.Array]) -> Any:
            with bound(tensors, arrays, trace), watching(watch):
                args, kwargs = tree_unflatten(list(replaced(leaves, tensors)), tree)
                out_leaves, found["tree"] = tree_flatten(self._step(*args, **kwargs))
                found["static"], results, found["pinned"] = split_outputs(out_leaves)
                del out_leaves, args, kwargs
                found["written"], written = written_arguments(leaves, tensors, arrays)
            watch.inputs.check_rates_unchanged()
            grads = {id(t._storage) for t in gradients(watch.inputs.parameters())}
            found["lasting"] = trace.lasting_beyond(tensors)
            found["new_state"] = [s for s in found["lasting"] if id(s) not in grads]
            state = [place(s.read(), s.sharding) for s in trace.state]
            lasting = [place(s.read(), s.sharding) for s in found["lasting"]]
            return results, state, lasting, written

        arrays = [t._storage.array for t in tensors if t is not None]
        with trace.active():
            closed = jax.make_jaxpr(traced)(arrays)
        trace.undo()
        watch.settings = watch.inputs.settings()
        return self._finish(trace, closed, arrays, numbers, watch, found)

    def _finish(
        self,
        trace: Trace,
        closed: Any,
        arguments: Sequence[jax.Array],
        numbers: list[tuple[Storage, Callable[[], float]]],
        watch: Watch,
        found: dict[str, Any],
    ) -> _Program:
        state = list(trace.state)
        read = [s for s in trace.captured if s not in trace.state]
        owner = {id(array): storage for storage, array in trace.captured.items()}
        owners = [owner.get(id(const)) for const in closed.consts]
        constants = [c for c, s in zip(closed.consts, owners, strict=True) if s is None]
        self._settle([*state, *read], arguments)

        position = {storage: i for i, storage in enumerate([*state, *read])}
        places = [None if s is None else position[s] for s in owners]
        sizes = (len(found["written"]), len(found["lasting"]), len(state))
        kept = [arguments[i].sharding for i in found["written"]]
        pinned = (found["pinned"], [s.array.sharding for s in state], None, kept)
        inputs = ([s.array for s in state], [s.array for s in read], constants, list(arguments))
        program_of = partial(_program_of, places=places, sizes=sizes)
        blueprint = Blueprint.of(closed.jaxpr, program_of, inputs, pinned, donated=(0,))
        return _Program(
            blueprint.lowered(*inputs).compile(),
            state,
            read,
            constants,
            [weakref.ref(s) for s in found["lasting"]],
            found["written"],
            numbers,
            found["tree"],
            found["static"],
            watch,
            blueprint,
            "the first call made new state" if found["new_state"] else None,
        )

    def _settle(self, storages: Sequence[Storage], arguments: Sequence[jax.Array]) -> None:
        """Put on all devices what lies on one only because nothing has placed it yet."""
        shardings = [array.sharding for array in (*(s.array for s in storages), *arguments)]
        widest = max(shardings, key=lambda s: len(s.device_set), default=None)
        for storage in storages:
            if len(storage.array.sharding.device_set) < len(widest.device_set):  # pyright: ignore
                everywhere = NamedSharding(widest.mesh, PartitionSpec())  # pyright: ignore
                storage.array = place(storage.array, everywhere)

    def _lift(self, tensor: torch.Tensor) -> torch.Tensor:
        with jax.ensure_compile_time_eval():
            array = jnp.array(numpy_from_torch(tensor))
        return _outside_trace(array)


def _program_of(
    jaxpr: Any, *, places: Sequence[int | None], sizes: Sequence[int]
) -> Callable[..., Any]:
    """Return the function that XLA compiles.

    Args:
        jaxpr: The trace.
        places: For each of its constants its place among the state and what is read; None for one
            that is no storage's.
        sizes: How many arguments were written, results last, and storages are state: the ends of
            the trace's results, the last first.
    """

    def program(state_in: Any, read_in: Any, constants_in: Any, arguments_in: Any) -> Any:
        held = [*state_in, *read_in]
        rest = iter(constants_in)
        consts = [next(rest) if place is None else held[place] for place in places]
        flat = jax.core.eval_jaxpr(jaxpr, consts, *arguments_in)
        ends = np.cumsum([0, *sizes]).tolist()
        a, b, c = (len(flat) - end for end in ends[1:])
        return flat[:c], flat[c:b], flat[b:a], flat[a:]

    return program


def _outside_trace(array: jax.Array) -> JaxTensor:
    """Wrap a concrete array as a tensor that counts as older than the trace."""
    from xla_dtensor.runtimes import jax_trace

    trace, jax_trace._active = jax_trace._active, None
    try:
        return JaxTensor(Storage(array))
    finally:
        jax_trace._active = trace


def _lend(
    numbers: list[tuple[Storage, Callable[[], float]]], rate: float, current: Callable[[], float]
) -> Any:
    with jax.ensure_compile_time_eval():
        array = jnp.asarray(rate, jnp.float64)
    tensor = _outside_trace(array)
    numbers.append((tensor._storage, current))
    return sym_number(tensor.value())


def _replicated_like(value: np.ndarray[Any, Any], array: jax.Array) -> jax.Array:
    return jax.device_put(jnp.asarray(value, array.dtype), array.sharding)
