"""One block of a model as one JAX program: its forward and torch's backward, traced once.

A *block* is an ``nn.Module`` that is run many times over with other parameters
(``xla_dtensor.scan_layers``). It is traced as PyTorch runs it, on tensors whose storages hold
tracers: the forward, and then ``backward()`` of its outputs. The gradient is therefore torch's own,
whatever the block is made of: whole ops, in-place writes, a custom ``autograd.Function``, a nested
``checkpoint``. JAX differentiates nothing.

    carry, rng state, layer tensors, shared tensors, gradients of the outputs
        -> outputs, rng state, gradients of carry, layer tensors and shared tensors

The trace has its own :class:`~xla_dtensor.runtimes.jax.arrays.trace.Trace`. What the block reads
besides its arguments (a mask in a closure) is reported to the trace around it; a write to anything
older than the block is refused, because in a loop it would happen once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import torch
from jax.sharding import NamedSharding
from torch.utils._python_dispatch import _disable_current_modes

from xla_dtensor.core.errors import ScanError
from xla_dtensor.runtimes.host_work import HostTape
from xla_dtensor.runtimes.host_work.mode import LoopOps
from xla_dtensor.runtimes.jax.arrays import trace as jax_trace
from xla_dtensor.runtimes.jax.arrays.sharding import padded_shape, place
from xla_dtensor.runtimes.jax.arrays.storage import Storage
from xla_dtensor.runtimes.jax.arrays.trace import Trace
from xla_dtensor.runtimes.jax.arrays.values import jax_dtype
from xla_dtensor.runtimes.jax.compile.layers.rows import Rows
from xla_dtensor.runtimes.jax.compile.trace_values import inner
from xla_dtensor.runtimes.jax.eager.tensor import JaxTensor
from xla_dtensor.runtimes.jax.lower import random

__all__ = ["BlockTrace", "Form", "Inputs", "strong", "traced_block"]


@dataclass(frozen=True)
class Form:
    """What a tensor of the block is besides its values.

    Args:
        name: What errors call it.
        shape: Its logical shape.
        dtype: Its torch dtype.
        sharding: How its array lies and is padded; None for a logical value that XLA places.
        requires_grad: Whether a gradient is wanted.
        stride: Torch's stride; None for a contiguous tensor.
        like: A DTensor's class, mesh, placements and known axes; None for a plain tensor.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    sharding: NamedSharding | None = None
    requires_grad: bool = False
    stride: tuple[int, ...] | None = None
    like: tuple[Any, ...] | None = None

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor, *, pinned: bool) -> Form:
        """Describe a tensor; `pinned` ones keep the sharding and the padding of their storage."""
        payload = inner(tensor)
        assert payload is not None
        spec = getattr(tensor, "_spec", None) if payload is not tensor else None
        like = None if spec is None else (type(tensor), spec.mesh, spec.placements, spec.outer_cuts)
        storage = payload._storage
        is_pinned = pinned and not payload._steps
        return cls(
            name,
            tuple(tensor.shape),
            tensor.dtype,
            storage.constraint or storage.sharding if is_pinned else None,
            tensor.requires_grad and (tensor.is_floating_point() or tensor.is_complex()),
            tuple(payload.stride()),
            like,
        )

    def aval(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of its array, which may be padded."""
        return jax.ShapeDtypeStruct(padded_shape(self.shape, self.sharding), jax_dtype(self.dtype))

    def wrap(self, array: jax.Array) -> torch.Tensor:
        """Return a tensor of this form over `array`."""
        return self.over(Storage(array, self.shape, self.sharding))

    def over(self, storage: Storage) -> torch.Tensor:
        """Return a tensor of this form over a storage that was made for it."""
        payload = JaxTensor(storage, shape=self.shape, stride=self.stride, dtype=self.dtype)
        if self.like is None:
            return payload
        kind, mesh, placements, outer_cuts = self.like
        return kind._wrapping(payload, mesh, placements, outer_cuts=outer_cuts)

    def array_of(self, tensor: torch.Tensor) -> jax.Array:
        """Return the array of a tensor of this form, and tell the trace in progress."""
        payload = inner(tensor)
        assert payload is not None
        array = payload.raw()
        if self.sharding is None:
            return array
        storage = payload._storage
        if storage.sharding is self.sharding and storage.constraint is None:
            return storage.array
        return place(array, self.sharding)

    def differs(self, other: Form) -> str | None:
        """Say how `other` cannot take this one's place; None if it can."""
        for what in ("shape", "dtype"):
            if getattr(self, what) != getattr(other, what):
                return f"{what}={getattr(other, what)} where {what}={getattr(self, what)}"
        if (self.like is None) != (other.like is None):
            kinds = {True: "a plain tensor", False: "a DTensor"}
            return f"{kinds[other.like is None]} where {kinds[self.like is None]}"
        return None


@dataclass
class Inputs:
    """Everything that goes into a block, by role, as forms or as arrays."""

    carry: Sequence[Any]
    rng: Any
    layer: Sequence[Any]
    shared: Sequence[Any]

    def flat(self) -> list[Any]:
        """Return them in the order in which the traced program takes them."""
        return [*self.carry, self.rng, *self.layer, *self.shared]

    def like(self, values: Sequence[Any]) -> Inputs:
        """Return `values`, flat, in this one's roles."""
        iterator = iter(values)
        carry = [next(iterator) for _ in self.carry]
        rng = next(iterator)
        layer = [next(iterator) for _ in self.layer]
        return Inputs(carry, rng, layer, [next(iterator) for _ in self.shared])


@dataclass
class BlockTrace:
    """A block as a jaxpr.

    Args:
        jaxpr: Takes `consts`, the flat inputs, and the gradients of the outputs that `grad_of`
            names; returns the outputs, the rng state, and the gradients that `wanted` names.
        consts: What the block read besides its arguments.
        outputs: The forms of the outputs.
        grad_of: Which outputs take a gradient.
        wanted: Which of the flat inputs get one.
        draws: Whether the block takes random numbers.
    """

    jaxpr: Any
    consts: list[Any]
    outputs: list[Form]
    grad_of: list[int]
    wanted: list[int]
    draws: bool


def traced_block(
    call: Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]],
    swapped: Callable[[Sequence[Any]], contextlib.AbstractContextManager[None]],
    forms: Inputs,
    *,
    with_grad: bool,
    around_forward: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> BlockTrace:
    """Trace a block.

    Args:
        call: Runs it on the tensors of the carry and the shared ones; returns a list.
        swapped: A context in which it has the given layer tensors. It holds for the backward pass
            too, in which a checkpoint in the block runs parts of it again.
        forms: The forms of its inputs; that of `rng` is None.
        with_grad: Whether to trace the backward pass as well.
        around_forward: A context in which the forward runs.

    Returns:
        The program.

    Raises:
        ScanError: The block writes to something older than itself, uses a tensor that needs a
            gradient and is no argument, or returns something else than tensors.
    """
    tracing = _Tracing(call, swapped, forms, with_grad, around_forward)
    rng = jax.ShapeDtypeStruct((2,), jnp.uint32)
    avals = [rng if form is None else form.aval() for form in forms.flat()]
    grads = [forms.carry[i].aval() for i in tracing.grad_of]
    with _child_trace() as (trace, parent):
        closed = jax.make_jaxpr(tracing.run)(avals, grads)
    if trace.state:
        _refuse_write(next(iter(trace.state)), trace)
    if parent is not None:
        for storage in trace.captured:
            parent.capture(storage)
    return BlockTrace(
        jaxpr=closed.jaxpr,
        consts=list(closed.consts),
        outputs=tracing.outputs,
        grad_of=tracing.grad_of,
        wanted=tracing.wanted,
        draws=tracing.draws,
    )


class _Tracing:
    """The function that JAX traces, and what is learnt on the way."""

    def __init__(
        self, call: Any, swapped: Any, forms: Inputs, with_grad: bool, around_forward: Any
    ) -> None:
        self._call, self._swapped, self._forms = call, swapped, forms
        self._around = around_forward
        self._with_grad = with_grad
        flat = forms.flat()
        self.wanted = [i for i, f in enumerate(flat) if with_grad and f and f.requires_grad]
        self.grad_of = [i for i, f in enumerate(forms.carry) if with_grad and f.requires_grad]
        self.outputs: list[Form] = []
        self.draws = False

    def run(self, arrays: Sequence[Any], grads: Sequence[Any]) -> Any:
        forms = self._forms
        inputs = forms.like(arrays)
        rng = Storage(inputs.rng)
        tensors = Inputs(
            [f.wrap(a) for f, a in zip(forms.carry, inputs.carry, strict=True)],
            None,
            [f.wrap(a) for f, a in zip(forms.layer, inputs.layer, strict=True)],
            [f.wrap(a) for f, a in zip(forms.shared, inputs.shared, strict=True)],
        )
        flat = tensors.flat()
        trace = jax_trace.active_trace()
        if trace is not None:
            trace.keep_single(p._storage for p in map(inner, flat) if p is not None)
        shielded = _plain_torch(self._with_grad)
        with shielded, random.using(rng), self._swapped(tensors.layer):
            for i in self.wanted:
                flat[i].requires_grad_(True)
            # A copy, which costs nothing in the end: a block may write to its input.
            carry = [t.clone() for t in tensors.carry]
            with self._around():
                outputs = list(self._call(carry, tensors.shared))
            self._check_inputs(flat, arrays)
            self.outputs = [_output_form(i, out) for i, out in enumerate(outputs)]
            values = [strong(inner(out).value()) for out in outputs]  # pyright: ignore
            gradients = self._gradients(outputs, flat, grads) if self._with_grad else []
        self.draws = rng.array is not inputs.rng
        return values, rng.array, gradients

    def _gradients(self, outputs: Sequence[Any], flat: Sequence[Any], grads: Any) -> list[Any]:
        leaves = [flat[i] for i in self.wanted]
        _refuse_other_leaves(outputs, leaves)
        pairs = [
            (outputs[i], replace(self.outputs[i], sharding=None).wrap(grad))
            for i, grad in zip(self.grad_of, grads, strict=True)
            if i < len(outputs) and outputs[i].requires_grad
        ]
        if pairs:
            with _autocast_off():
                torch.autograd.backward([out for out, _ in pairs], [grad for _, grad in pairs])
        forms = self._forms.flat()
        return [_gradient(flat[i], forms[i]) for i in self.wanted]

    def _check_inputs(self, flat: Sequence[Any], arrays: Sequence[Any]) -> None:
        for form, tensor, array in zip(self._forms.flat(), flat, arrays, strict=True):
            payload = None if tensor is None else inner(tensor)
            if payload is not None and payload._storage.array is not array:
                raise ScanError(
                    f"A block of scan_layers wrote in place to {form.name} of shape={form.shape}. "
                    "Its layers run as one loop, in which parameters, buffers and shared arguments "
                    "are only read. Return the new value, use a module without running statistics "
                    "(.eval(), LayerNorm), or call the layers one by one."
                )


def _gradient(leaf: torch.Tensor, form: Form) -> Any:
    grad = None if leaf.grad is None else inner(leaf.grad)
    leaf.grad = None
    if grad is None:
        return jnp.zeros(form.aval().shape, form.aval().dtype)
    return strong(place(grad.value().astype(jax_dtype(form.dtype)), form.sharding))


def _output_form(index: int, output: Any) -> Form:
    if not isinstance(output, torch.Tensor) or inner(output) is None:
        raise ScanError(
            f"A block of scan_layers returned a value of type={type(output).__name__}. What a "
            "layer returns is what the next one is given, so it is tensors on the mesh, as many as "
            "the first argument has. Return those only."
        )
    return replace(Form.of(f"output {index}", output, pinned=False), requires_grad=False)


def strong(value: Any) -> Any:
    """Return `value` with a dtype of its own, which a loop asks of its carry."""
    return jax.lax.convert_element_type(value, value.dtype)


# ---------------------------------------------------------------------- contexts


@contextlib.contextmanager
def _child_trace() -> Iterator[tuple[Trace, Trace | None]]:
    parent, child = jax_trace._active, Trace(Rows())
    if parent is not None:
        parent.given_to(child)
    try:
        with child.active():
            yield child, parent
            child.undo()
    finally:
        jax_trace._active = parent


@contextlib.contextmanager
def _plain_torch(with_grad: bool) -> Iterator[None]:
    """Shield the trace from what is around it, and that from the trace."""
    state = torch.default_generator.get_state()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        stack.enter_context(LoopOps(_tape()))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(torch.set_grad_enabled(with_grad))
        if torch.is_autocast_enabled("cpu"):
            # Casts of weights are cached for as long as the outermost block lasts.
            dtype = torch.get_autocast_dtype("cpu")
            stack.enter_context(torch.autocast("cpu", dtype=dtype, cache_enabled=False))
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:  # pyright: ignore
            # A checkpoint around the layers would pack what is only of the trace.
            hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), lambda t: t)
            stack.enter_context(hooks)
        try:
            yield
        finally:
            torch.default_generator.set_state(state)


def _tape() -> HostTape:
    """Return the tape of the step around; outside of one, a tape to which all memory is older."""
    trace = jax_trace.active_trace()
    host = None if trace is None else trace.host
    return HostTape(_Everything()) if host is None else host.tape


class _Everything:
    def __contains__(self, _: object) -> bool:
        return True


@contextlib.contextmanager
def _autocast_off() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for device_type in ("cpu", "xla"):
            if torch.is_autocast_enabled(device_type):
                stack.enter_context(torch.autocast(device_type, enabled=False))
        yield


# ---------------------------------------------------------------------- refusals


def _refuse_other_leaves(outputs: Sequence[Any], leaves: Sequence[Any]) -> None:
    leaf_ids = {id(tensor) for tensor in leaves}
    waiting = [out.grad_fn for out in outputs if out.grad_fn is not None]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in leaf_ids:
            raise ScanError(
                f"A block of scan_layers uses a tensor of shape={tuple(leaf.shape)} that requires "
                "grad and is neither a parameter of it nor an argument. Its gradient would be "
                "lost. Pass it to the layers: layers(x, tensor)."
            )
        waiting.extend(next_node for next_node, _ in node.next_functions if next_node is not None)


def _refuse_write(storage: Storage, trace: Trace) -> NoReturn:
    raise ScanError(
        f"A block of scan_layers wrote in place to a tensor of shape={storage.shape} that is "
        "older than its call. Its layers run as one loop, and the write would happen once. Return "
        "the new value from the block, or call the layers one by one."
    )
