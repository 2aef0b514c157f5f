"""Equal layers as one loop on the JAX runtime: one loop forward, one backward.

The block is traced once (``block``) and cut in two (``split``). The parameters of all
layers are stacked along a new dim 0, which is never sharded; each device stacks its own tiles::

    forward     carry, layer i of the stacks  ->  carry, what the policy saves    for i = 0, 1, ...
    backward    gradient, layer i, saved i    ->  gradient, gradients of layer i  for i = ..., 1, 0

To autograd it is one Function with every layer's parameters as inputs, so each of them gets its
gradient, with its own sharding, as if the layers had been called one by one. Random numbers as
well: the generator's state goes from layer to layer, and the backward pass gets the one its layer
began with.

Inside a compiled step both loops become part of the step. Outside, each is compiled on first use
and found again by the text of its program.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from torch.distributed.tensor import Replicate

from xla_dtensor.core.errors import ScanError
from xla_dtensor.runtimes.base import Layers
from xla_dtensor.runtimes.jax.arrays.private import frames_here, frames_of
from xla_dtensor.runtimes.jax.arrays.products import OrderedProgram
from xla_dtensor.runtimes.jax.arrays.storage import Storage
from xla_dtensor.runtimes.jax.arrays.trace import active_trace
from xla_dtensor.runtimes.jax.arrays.values import jax_dtype, x64
from xla_dtensor.runtimes.jax.compile.layers.block import (
    BlockTrace,
    Form,
    Inputs,
    strong,
    traced_block,
)
from xla_dtensor.runtimes.jax.compile.layers.layer_stacks import unstack_layers
from xla_dtensor.runtimes.jax.compile.layers.loops import (
    Plan,
    backward_loop,
    backward_loop_of_rows,
    forward_loop,
)
from xla_dtensor.runtimes.jax.compile.layers.policies import Policy, policy_of
from xla_dtensor.runtimes.jax.compile.layers.rows import TracedStack, traced_stack
from xla_dtensor.runtimes.jax.compile.layers.split import split
from xla_dtensor.runtimes.jax.compile.layers.watch import see_alike
from xla_dtensor.runtimes.jax.compile.trace_values import inner
from xla_dtensor.runtimes.jax.eager.tensor import JaxTensor
from xla_dtensor.runtimes.jax.lower import random
from xla_dtensor.runtimes.whole_ops import refuse_second, save, saved

__all__ = ["run"]

_PROGRAMS_KEPT = 128
_TRIES = 4
_programs: OrderedDict[Any, Any] = OrderedDict()


def run(
    layers: Layers, carry: Sequence[torch.Tensor], shared: Sequence[torch.Tensor], remat: Any
) -> list[torch.Tensor]:
    """Run the layers one after the other.

    Args:
        layers: The layers, at least one.
        carry: What the first of them is given and each returns.
        shared: What every one of them is given.
        remat: What the backward pass keeps, a ``xla_dtensor.runtimes.whole_ops.Remat``.

    Returns:
        What the last one returns.

    Raises:
        ScanError: A layer cannot be run in a loop.
    """
    see_alike(layers.modules[0], layers.modules[1:])
    with x64():
        plan = _planned(layers, carry, shared, policy_of(remat))
        flat = [tensor for layer in layers.tensors for tensor in layer]
        outputs: Any = _Scan.apply(plan, *carry, *shared, *flat)
    return list(outputs)


def _planned(layers: Layers, carry: Any, shared: Any, policy: Policy) -> Plan:
    forms = Inputs(
        [Form.of("the first argument", t, pinned=False) for t in carry],
        None,
        [
            Form.of(name, t, pinned=True)
            for name, t in zip(layers.names, layers.tensors[0], strict=True)
        ],
        [Form.of("a shared argument", t, pinned=False) for t in shared],
    )
    flat = [form for form in forms.flat() if form is not None]
    with_grad = torch.is_grad_enabled() and any(form.requires_grad for form in flat)
    first_carry = forms.carry
    # A layer's output needs a gradient as soon as any parameter does.
    carry_forms = [replace(form, requires_grad=_inexact(form)) for form in forms.carry]
    trace = None
    for _ in range(_TRIES):
        forms.carry = carry_forms
        trace = _traced(layers, forms, policy, with_grad=with_grad)
        carry_forms = _carry_of(trace, forms.carry)
        if carry_forms == list(forms.carry):
            break
    else:  # Labels that change from layer to layer: in a loop they say nothing.
        forms.carry = [_unlabelled(form) for form in carry_forms]
        trace = _traced(layers, forms, policy, with_grad=with_grad)
        trace.outputs = [_unlabelled(form) for form in trace.outputs]
    policy.check(trace)
    n_inputs = len(forms.flat())
    grad_mask = forms.like([i in trace.wanted for i in range(n_inputs)])
    block = split(trace, n_inputs, policy.saveable)
    return Plan(forms, first_carry, len(layers.tensors), trace, block, grad_mask)


def _traced(layers: Layers, forms: Inputs, policy: Policy, *, with_grad: bool) -> BlockTrace:
    return traced_block(
        layers.call,
        layers.swapped,
        forms,
        with_grad=with_grad,
        around_forward=policy.around_forward,
    )


def _unlabelled(form: Form) -> Form:
    if form.like is None:
        return form
    kind, mesh, placements, _ = form.like
    return replace(form, like=(kind, mesh, (Replicate(),) * len(placements), ()))


def _inexact(form: Form) -> bool:
    return form.dtype.is_floating_point or form.dtype.is_complex


def _carry_of(trace: BlockTrace, carry: Sequence[Form]) -> list[Form]:
    """Return the forms of a carry that is labelled as the block's output is."""
    outputs = trace.outputs
    if len(outputs) != len(carry):
        _refuse_output(f"{len(outputs)} tensors where it was given {len(carry)}")
    for carry_form, output_form in zip(carry, outputs, strict=True):
        difference = carry_form.differs(output_form)
        if difference is not None:
            _refuse_output(f"{difference} was given")
    return [
        replace(form, like=output.like, stride=output.stride)
        for form, output in zip(carry, outputs, strict=True)
    ]


def _refuse_output(what: str) -> None:
    raise ScanError(
        f"A block of scan_layers returned {what}. What one layer returns is the next one's first "
        "argument, and a loop's input and output are of one kind. Return tensors like the first "
        "argument's, and cast or place that before the layers."
    )


# ---------------------------------------------------------------------- autograd


def _program(kind: str, plan: Plan, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` compiled, unless it becomes part of a step."""
    if active_trace() is not None:
        return function
    forms = tuple((f.sharding, f.requires_grad) for f in plan.forms.flat() if f is not None)
    forms = (forms, tuple(plan.places()))
    key = (kind, plan.block.text, plan.n_layers, forms, len(plan.trace.consts))
    if key not in _programs:
        _programs[key] = OrderedProgram(function)
        if len(_programs) > _PROGRAMS_KEPT:
            _programs.popitem(last=False)
    return _programs[key]


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: Plan, *tensors: torch.Tensor) -> Any:
        carry, shared, layers = _arrays(plan, tensors)
        consts = plan.trace.consts
        state, finish = random.span() if plan.trace.draws else (_NO_RNG, None)
        program = _program("forward", plan, forward_loop(plan))
        outputs, rng, residuals = program(carry, state, layers, shared, consts)
        if finish is not None:
            finish(rng if active_trace() is not None else _local(rng))
        results = tuple(
            form.wrap(array) for form, array in zip(plan.trace.outputs, outputs, strict=True)
        )
        if plan.trace.wanted:
            ctx.set_materialize_grads(False)
            ctx.plan, ctx.n_inputs, ctx.origin = plan, len(tensors), frames_here()
            # Saved as tensors, so that autograd frees them, and a checkpoint around keeps none.
            save(ctx, *tensors, *(JaxTensor(Storage(a)) for a in residuals))
        ctx.mark_non_differentiable(*(r for r in results if not _inexact_tensor(r)))
        return results

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        plan: Plan = ctx.plan
        kept_tensors = saved(ctx)
        with x64():
            _, shared, layers = _arrays(plan, kept_tensors[: ctx.n_inputs])
            residuals = [tensor.raw() for tensor in kept_tensors[ctx.n_inputs :]]
            grad_arrays = [_incoming(grads[i], plan.forms.carry[i]) for i in plan.trace.grad_of]
            in_step = active_trace() is not None
            loop = backward_loop(plan) if in_step else backward_loop_of_rows(plan)
            program = _program("backward", plan, loop)
            with frames_of(ctx.origin, "backward"):
                gradients = program(grad_arrays, residuals, layers, shared, plan.trace.consts)
            return (
                None,
                *refuse_second(
                    "scan_layers", kept_tensors[: ctx.n_inputs], *_wrapped_inputs(plan, *gradients)
                ),
            )


_NO_RNG = np.zeros(2, np.uint32)


def _inexact_tensor(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _local(rng: Any) -> Any:
    """Return the generator's state on one device, where eager draws expect it."""
    return jnp.asarray(np.asarray(rng.addressable_data(0)))


def _arrays(plan: Plan, tensors: Sequence[torch.Tensor]) -> tuple[Any, Any, Any]:
    forms = plan.forms
    n_carry, n_shared = len(forms.carry), len(forms.shared)
    pairs = zip((*forms.carry, *forms.shared), tensors, strict=False)
    arrays = [form.array_of(tensor) for form, tensor in pairs]
    of_layers = tensors[n_carry + n_shared :]
    columns = [
        _column(form, of_layers[i :: len(forms.layer)]) for i, form in enumerate(forms.layer)
    ]
    return arrays[:n_carry], arrays[n_carry:], columns


def _column(form: Form, tensors: Sequence[torch.Tensor]) -> Any:
    """Return the layers' tensors of one form: a stack if there can be one, else a list."""
    payloads = [inner(tensor) for tensor in tensors]
    storages = [p._storage for p in payloads if p is not None and not p._steps]
    if len(storages) == len(payloads) and all(s.sharding == form.sharding for s in storages):
        stack = traced_stack(storages)
        if stack is not None:
            return stack.array
    return [form.array_of(tensor) for tensor in tensors]


def _incoming(grad: torch.Tensor | None, form: Form) -> Any:
    payload = None if grad is None else inner(grad)
    if payload is None:
        shape, dtype = form.shape, jax_dtype(form.dtype)
        return jnp.zeros(shape, dtype) if grad is None else jnp.asarray(grad.numpy(), dtype)
    return strong(payload.value().astype(jax_dtype(form.dtype)))


def _wrapped_inputs(plan: Plan, carry: Any, shared: Any, layers: Any) -> list[Any]:
    """Return a gradient or None for each input of the Function, in their order."""
    forms, grad_mask = plan.forms, plan.wanted

    def of(forms: Sequence[Form], flags: Sequence[bool], arrays: Sequence[Any]) -> list[Any]:
        iterator = iter(arrays)
        return [f.wrap(next(iterator)) if w else None for f, w in zip(forms, flags, strict=True)]

    stacks = iter(layers)
    columns = [
        _rows(next(stacks), form, plan.n_layers) if w else [None] * plan.n_layers
        for form, w in zip(forms.layer, grad_mask.layer, strict=True)
    ]
    return [
        *of(forms.carry, grad_mask.carry, carry),
        *of(forms.shared, grad_mask.shared, shared),
        *(column[i] for i in range(plan.n_layers) for column in columns),
    ]


def _rows(gradients: Any, form: Form, count: int) -> list[torch.Tensor]:
    """Return what each layer gets: arrays by themselves, or the rows of one value."""
    if isinstance(gradients, list):
        return [form.wrap(array) for array in gradients]
    if count == 1:
        return [form.wrap(unstack_layers(gradients)[0])]
    stack = TracedStack(gradients, form.sharding)
    storages = [Storage(gradients, form.shape, form.sharding) for _ in range(count)]
    for lane, storage in enumerate(storages):
        storage.become_row(stack, lane)
    return [form.over(storage) for storage in storages]
