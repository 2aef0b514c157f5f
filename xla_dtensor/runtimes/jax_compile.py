"""compile(step) on the JAX runtime: an unmodified PyTorch training step as one XLA program.

The first call runs the Python step once, on tracers instead of arrays. While it runs, every
storage reports what it does (``jax_trace``), so the program's inputs and outputs are known without
anyone listing them:

===========================  ======================================================
arguments of the call        inputs
tensors read                 inputs
tensors read and written     inputs and outputs; the old buffer is donated
tensors made that last       outputs (optimizer state, gradients that were kept)
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

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import NamedSharding, PartitionSpec
from torch.nn.modules import module as torch_module
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from xla_dtensor.errors import CompileError
from xla_dtensor.runtimes.base import CompiledStep
from xla_dtensor.runtimes.jax_convert import numpy_from_torch, x64
from xla_dtensor.runtimes.jax_placing import place
from xla_dtensor.runtimes.jax_scalar import sym_number
from xla_dtensor.runtimes.jax_tensor import JaxTensor, Storage
from xla_dtensor.runtimes.jax_trace import Trace, refuse_nesting
from xla_dtensor.runtimes.optimizer_inputs import OptimizerInputs

if TYPE_CHECKING:
    from xla_dtensor.runtimes.jax_runtime import JaxRuntime

__all__ = ["JaxCompiledStep"]

logger = logging.getLogger("xla_dtensor")
_RETRACES_BEFORE_WARNING = 3


def inner(value: Any) -> JaxTensor | None:
    """Return the JaxTensor in a DTensor or in itself; None for anything else."""
    value = getattr(value, "_local_tensor", value)
    return value if isinstance(value, JaxTensor) else None


@dataclass
class _Watch:
    """What a program baked in from Python, to notice when it no longer holds."""

    inputs: OptimizerInputs
    settings: tuple[Any, ...] = ()
    modules: dict[int, tuple[Any, bool, list[Any]]] = field(default_factory=dict)

    def see_module(self, module: torch.nn.Module, args: Any) -> None:
        if id(module) not in self.modules:
            seen = (weakref.ref(module), module.training, _payloads(module))
            self.modules[id(module)] = seen

    def broken(self) -> str | None:
        for reference, training, payloads in self.modules.values():
            module = reference()
            if module is None:
                continue
            if module.training != training:
                return f"{type(module).__name__}.training changed to {module.training}"
            if not _same_objects(_payloads(module), payloads):
                return f"a parameter of {type(module).__name__} was replaced"
        if self.inputs.settings() != self.settings:
            return "an optimizer's hyperparameters or parameters changed"
        return None


def _payloads(module: torch.nn.Module) -> list[Any]:
    return [inner(parameter) for parameter in module._parameters.values()]


def _same_objects(now: list[Any], then: list[Any]) -> bool:
    return len(now) == len(then) and all(a is b for a, b in zip(now, then, strict=True))


@dataclass
class _Program:
    """One compiled trace of the step."""

    executable: Any
    state: list[Storage]
    read: list[Storage]
    constants: list[Any]
    lasting: list[Any]
    numbers: list[tuple[Storage, Callable[[], float]]]
    out_tree: TreeSpec
    out_static: list[Any]
    watch: _Watch
    again: str | None = None

    def stale(self) -> str | None:
        return self.again or self.watch.broken()

    def run(self, arguments: Sequence[jax.Array]) -> Any:
        for storage, current in self.numbers:
            value = current()
            if value != float(storage.array):
                storage.array = _replicated_like(np.asarray(value), storage.array)
        state = [s.array for s in self.state]
        read = [s.array for s in self.read]
        results, state, lasting = self.executable(state, read, self.constants, list(arguments))
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


@dataclass(frozen=True)
class _Static:
    value: Any


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
            return program.run([t._storage.array for t in tensors if t is not None])

    def hlo(self) -> str:
        if self._last is None:
            raise CompileError(
                "The HLO of a compiled step was asked for before its first call. The program is "
                "made when the arguments' shapes are known. Call the step once first."
            )
        return self._last.executable.as_text()

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
        tensor = inner(leaf)
        if tensor is not None:
            if tensor._steps:
                return JaxTensor(Storage(tensor.value()), stride=tensor.stride())
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
                leaf.requires_grad,
            )
            for leaf, tensor in zip(leaves, tensors, strict=True)
        )
        return described, tree, torch.get_float32_matmul_precision(), torch.is_grad_enabled()

    # ------------------------------------------------------------------ tracing

    def _compile(
        self, leaves: Sequence[Any], tensors: Sequence[JaxTensor | None], tree: TreeSpec
    ) -> _Program:
        trace = Trace()
        numbers: list[tuple[Storage, Callable[[], float]]] = []
        watch = _Watch(OptimizerInputs(self._lift, lambda *a: _lend(numbers, *a)))
        found: dict[str, Any] = {}

        def traced(arrays: Sequence[jax.Array]) -> Any:
            with _bound(tensors, arrays, trace), _watching(watch):
                args, kwargs = tree_unflatten(list(_replaced(leaves, tensors)), tree)
                out_leaves, found["tree"] = tree_flatten(self._step(*args, **kwargs))
                found["static"], results, found["pinned"] = _split_outputs(out_leaves)
                del out_leaves, args, kwargs
            watch.inputs.check_rates_unchanged()
            grads = {id(t._storage) for t in _gradients(watch.inputs.parameters())}
            found["lasting"] = trace.lasting_beyond(tensors)
            found["new_state"] = [s for s in found["lasting"] if id(s) not in grads]
            state = [place(s.read(), s.sharding) for s in trace.state]
            lasting = [place(s.read(), s.sharding) for s in found["lasting"]]
            return results, state, lasting

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
        watch: _Watch,
        found: dict[str, Any],
    ) -> _Program:
        state = list(trace.state)
        read = [s for s in trace.captured if s not in trace.state]
        owner = {id(array): storage for storage, array in trace.captured.items()}
        owners = [owner.get(id(const)) for const in closed.consts]
        constants = [c for c, s in zip(closed.consts, owners, strict=True) if s is None]
        self._settle([*state, *read])

        def program(state_in: Any, read_in: Any, constants_in: Any, arguments_in: Any) -> Any:
            value = dict(zip([*state, *read], [*state_in, *read_in], strict=True))
            rest = iter(constants_in)
            consts = [next(rest) if s is None else value[s] for s in owners]
            flat = jax.core.eval_jaxpr(closed.jaxpr, consts, *arguments_in)
            last = len(flat) - len(found["lasting"])
            first = last - len(state)
            return flat[:first], flat[first:last], flat[last:]

        pinned = (found["pinned"], [s.array.sharding for s in state], None)
        jitted = jax.jit(program, donate_argnums=(0,), out_shardings=pinned)
        inputs = ([s.array for s in state], [s.array for s in read], constants, list(arguments))
        return _Program(
            jitted.lower(*inputs).compile(),
            state,
            read,
            constants,
            [weakref.ref(s) for s in found["lasting"]],
            numbers,
            found["tree"],
            found["static"],
            watch,
            "the first call made new state" if found["new_state"] else None,
        )

    def _settle(self, storages: Sequence[Storage]) -> None:
        """Put on all devices what lies on one only because nothing has placed it yet."""
        for storage in storages:
            if len(storage.array.sharding.device_set) < len(self._devices_of(storages)):
                storage.array = place(storage.array, self._everywhere(storages))

    def _devices_of(self, storages: Sequence[Storage]) -> set[Any]:
        return max((s.array.sharding.device_set for s in storages), key=len, default=set())

    def _everywhere(self, storages: Sequence[Storage]) -> NamedSharding:
        widest = max(storages, key=lambda s: len(s.array.sharding.device_set)).array.sharding
        return NamedSharding(widest.mesh, PartitionSpec())  # pyright: ignore

    def _lift(self, tensor: torch.Tensor) -> torch.Tensor:
        with jax.ensure_compile_time_eval():
            array = jnp.array(numpy_from_torch(tensor))
        return _outside_trace(array)


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


@contextlib.contextmanager
def _bound(
    tensors: Sequence[JaxTensor | None], arrays: Sequence[jax.Array], trace: Trace
) -> Iterator[None]:
    """Let the arguments' storages hold tracers for the time of the trace."""
    storages = [t._storage for t in tensors if t is not None]
    before = [s.array for s in storages]
    for storage, array in zip(storages, arrays, strict=True):
        trace.adopt(storage)
        storage.array = array
    try:
        yield
    finally:
        for storage, array in zip(storages, before, strict=True):
            storage.array = array


@contextlib.contextmanager
def _watching(watch: _Watch) -> Iterator[None]:
    """Watch modules and optimizers; keep autograd in this thread, where the trace is."""
    hook = torch_module.register_module_forward_pre_hook(watch.see_module)
    try:
        with watch.inputs.active(), torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        hook.remove()


def _replaced(leaves: Sequence[Any], tensors: Sequence[JaxTensor | None]) -> Iterator[Any]:
    for leaf, tensor in zip(leaves, tensors, strict=True):
        yield leaf if tensor is None or hasattr(leaf, "_local_tensor") else tensor


def _split_outputs(
    leaves: Sequence[Any],
) -> tuple[list[Any], list[jax.Array], list[NamedSharding | None]]:
    """Separate the tensors among the outputs from the rest, with how to wrap each one again.

    A tensor that was told how to lie leaves the program so, padded if it is uneven: as a logical
    value it could only leave replicated. The last list pins these.
    """
    static: list[Any] = []
    arrays: list[jax.Array] = []
    pinned: list[NamedSharding | None] = []
    for leaf in leaves:
        tensor = inner(leaf)
        if tensor is None:
            static.append(_Static(leaf))
            continue
        sharding = None if tensor._steps else tensor._storage.sharding
        arrays.append(tensor.value() if sharding is None else place(tensor.value(), sharding))
        static.append(_wrapper(leaf, tensor, sharding))
        is_open = sharding is None or PartitionSpec.UNCONSTRAINED in tuple(sharding.spec)
        pinned.append(None if is_open else sharding)
    return static, arrays, pinned


def _wrapper(
    leaf: Any, tensor: JaxTensor, sharding: NamedSharding | None
) -> Callable[[jax.Array], Any]:
    shape, stride, dtype = tuple(tensor.shape), tensor.stride(), tensor.dtype
    # Not a method of the leaf: that would keep the traced output alive, as if it were state.
    rewrapper = getattr(leaf, "rewrapper", None)
    rewrap = None if rewrapper is None else rewrapper()

    def wrap(array: jax.Array) -> Any:
        made = JaxTensor(Storage(array, shape, sharding), stride=stride, dtype=dtype)
        return rewrap(made) if rewrap is not None else made

    return wrap


def _gradients(parameters: Sequence[torch.Tensor]) -> list[JaxTensor]:
    grads = (inner(p.grad) for p in parameters if p.grad is not None)
    return [g for g in grads if g is not None]
