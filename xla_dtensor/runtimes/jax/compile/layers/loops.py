"""The two loops over equal layers: one forward, one backward (``values``).

Both are functions of lists of arrays. What layers have in common, a parameter of each, is a column:
a stack, or a list which the loop's program stacks. Gradients of layers are stacks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from xla_dtensor.core import Layout
from xla_dtensor.core.spanning import layout_on_span
from xla_dtensor.runtimes.jax.arrays.sharding import named_sharding, padded_shape
from xla_dtensor.runtimes.jax.arrays.values import counted_scan
from xla_dtensor.runtimes.jax.compile.layers.block import BlockTrace, Form, Inputs, strong
from xla_dtensor.runtimes.jax.compile.layers.layer_stacks import (
    pinned_rows,
    pinned_stack,
    stack_layers,
)
from xla_dtensor.runtimes.jax.compile.layers.split import SplitBlock
from xla_dtensor.runtimes.registry import get_runtime

__all__ = ["Plan", "backward_loop", "backward_loop_of_rows", "forward_loop"]


@dataclass
class Plan:
    """One call of the layers, traced.

    Args:
        forms: What goes into a layer.
        given: The carry that the first layer is given.
        n_layers: How many there are.
        trace: The block.
        block: The block cut in two.
        wanted: For what of its inputs there is a gradient.
    """

    forms: Inputs
    given: Sequence[Form]
    n_layers: int
    trace: BlockTrace
    block: SplitBlock
    wanted: Inputs

    @property
    def n_inputs(self) -> int:
        """Number of tensors that go into a layer, the generator's state counted."""
        return len(self.forms.flat())

    def places(self) -> list[NamedSharding | None]:
        """Return how each value of the carry is to lie."""
        return [_place_of(form) for form in self.given]


def _stacks_of_columns(plan: Plan, columns: Sequence[Any]) -> list[Any]:
    return [
        pinned_stack(stack_layers(column), form.sharding) if isinstance(column, list) else column
        for column, form in zip(columns, plan.forms.layer, strict=True)
    ]


def forward_loop(plan: Plan) -> Callable[..., Any]:
    """Return the forward loop: outputs, rng state, and what the backward loop needs of each."""
    block, keep, places = plan.block, _kept(plan), plan.places()

    def forward(carry: Any, rng: Any, columns: Any, shared: Any, consts: Any) -> Any:
        def body(state: Any, layer: Any) -> Any:
            inputs = Inputs(state[0], state[1], layer, shared)
            results, saved = block.forward(consts, inputs.flat())
            kept_carry = [c for c, k in zip(inputs.carry, keep.carry, strict=True) if k]
            kept_rng = [inputs.rng] if keep.rng else []
            return (_placed(results[:-1], places), results[-1]), (saved, kept_carry, kept_rng)

        start = (_placed([strong(c) for c in carry], places), rng)
        (outputs, rng), residuals = counted_scan(body, start, _stacks_of_columns(plan, columns))
        return outputs, rng, jax.tree.leaves(residuals)

    return forward


def _kept(plan: Plan) -> Inputs:
    """Return which inputs of a layer its backward pass uses."""
    n_consts = len(plan.trace.consts)
    used = plan.block.used[n_consts : n_consts + plan.n_inputs]
    return plan.forms.like(used or [False] * plan.n_inputs)


def backward_loop(plan: Plan) -> Callable[..., Any]:
    """Return the backward loop: gradients of carry, of shared tensors and of layers, stacked."""
    block, keep, grad_mask = plan.block, _kept(plan), plan.wanted
    n_saved = len(block.forward_jaxpr.outvars) - block.n_results
    shared_forms = [f for f, w in zip(plan.forms.shared, grad_mask.shared, strict=True) if w]
    n_carry, n_layer = sum(grad_mask.carry), sum(grad_mask.layer)
    places = [place for place, w in zip(plan.places(), grad_mask.carry, strict=True) if w]

    def backward(grads: Any, residuals: Any, columns: Any, shared: Any, consts: Any) -> Any:
        def body(state: Any, layer_inputs: Any) -> Any:
            grads, sums = state
            layer, of_layer = layer_inputs
            iterator = iter(of_layer)
            saved = [next(iterator) for _ in range(n_saved)]
            carry = [next(iterator) if k else None for k in keep.carry]
            rng = next(iterator) if keep.rng else None
            inputs = Inputs(carry, rng, layer, shared).flat()
            gradients = block.backward(saved, consts, inputs, grads)
            ends = (n_carry, n_carry + n_layer)
            sums = [a + b for a, b in zip(sums, gradients[ends[1] :], strict=True)]
            return (_placed(gradients[: ends[0]], places), sums), gradients[ends[0] : ends[1]]

        sums = [jnp.zeros(f.aval().shape, f.aval().dtype) for f in shared_forms]
        stacks, grads = _stacks_of_columns(plan, columns), _placed(grads, places)
        (grads, sums), by_layer = counted_scan(
            body, (grads, sums), (stacks, residuals), reverse=True
        )
        forms = [f for f, w in zip(plan.forms.layer, grad_mask.layer, strict=True) if w]
        return (
            grads,
            sums,
            [pinned_stack(g, f.sharding) for g, f in zip(by_layer, forms, strict=True)],
        )

    return backward


def backward_loop_of_rows(plan: Plan) -> Callable[..., Any]:
    """Return the backward loop whose program takes the layers' gradients apart."""
    backward = backward_loop(plan)
    forms = [f for f, w in zip(plan.forms.layer, plan.wanted.layer, strict=True) if w]

    def called(*arguments: Any) -> Any:
        grads, sums, stacks = backward(*arguments)
        return (
            grads,
            sums,
            [pinned_rows(stack, form.sharding) for stack, form in zip(stacks, forms, strict=True)],
        )

    return called


def _place_of(form: Form) -> NamedSharding | None:
    """Return how a value lies between two layers: as the first one is given it, where that is cut.

    What goes into a loop and what comes out lies alike, in each turn, and left alone XLA would as
    soon take the parameters' side as the data's. A dim that its axes do not divide is left to XLA.
    """
    if form.like is None:
        return None
    _, mesh, placements, outer_cuts = form.like
    layout = layout_on_span(
        Layout.from_placements(placements, len(form.shape), mesh.value), outer_cuts
    )
    root = get_runtime().root(layout.mesh)
    sharding = named_sharding(layout.op_sharding(root), root, layout.ndim, layout.open_dims)
    entries = [*sharding.spec, *(None,) * (len(form.shape) - len(sharding.spec))]
    padded = padded_shape(form.shape, sharding)
    is_partial = any(placement.is_partial() for placement in placements)
    places = [
        PartitionSpec.UNCONSTRAINED if n != m or (is_partial and entry is None) else entry
        for entry, n, m in zip(entries, form.shape, padded, strict=True)
    ]
    if all(place in (None, PartitionSpec.UNCONSTRAINED) for place in places):
        return None
    return NamedSharding(sharding.mesh, PartitionSpec(*places))


def _placed(values: Sequence[Any], places: Sequence[NamedSharding | None]) -> list[Any]:
    return [
        value if place is None else lax.with_sharding_constraint(value, place)
        for value, place in zip(values, places, strict=True)
    ]
