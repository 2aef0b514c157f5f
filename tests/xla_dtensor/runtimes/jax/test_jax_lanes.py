"""Packs of a trace: what is found, and that a packed trace computes what the trace does."""

from __future__ import annotations

import functools
import operator
import random
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xla_dtensor.runtimes.jax.arrays.private import constants_of, inputs_only
from xla_dtensor.runtimes.jax.compile.layers.lanes import Packs, packs_of
from xla_dtensor.runtimes.jax.compile.layers.layer_stacks import stack_layers, unstack_layers
from xla_dtensor.runtimes.jax.compile.layers.packed import PackedTrace

pytestmark = [pytest.mark.only_on("jax"), pytest.mark.usefixtures("runtime")]

LAYERS = 3
Arrays = Sequence[Any]


def rows(seed: int = 0, count: int = LAYERS) -> list[Any]:
    chance = np.random.default_rng(seed)
    return [jnp.asarray(chance.standard_normal((4, 2)), jnp.float32) for _ in range(count)]


def traced(function: Callable[[Arrays], Any], constants: Arrays) -> Any:
    """A trace whose inputs are its constants: JAX's own, then these."""
    closed = jax.make_jaxpr(lambda *given: function(given))(*constants)
    return inputs_only(closed), constants_of(closed)


def packed(function: Callable[[Arrays], Any], constants: Arrays) -> tuple[Any, Packs, list[Any]]:
    jaxpr, consts = traced(function, constants)
    known = dict(zip(jaxpr.invars, [*consts, *constants], strict=True))
    kinds = {v: str(v.aval) for v in jaxpr.invars[len(consts) :]}
    packs = packs_of(jaxpr, kinds)
    trace = PackedTrace(jaxpr, packs, known, [], {})
    return jaxpr, packs, [trace.value(v) for v in jaxpr.outvars]


def loop(weights: Arrays) -> list[Any]:
    """What a loop over layers looks like from outside: a stack goes in, a stack comes out."""
    return unstack_layers(jnp.sin(stack_layers(weights)))


def momentum(constants: Arrays) -> Any:
    weights, means, rate = constants[:LAYERS], constants[LAYERS:-1], constants[-1]
    new = [0.9 * m + 0.1 * g for m, g in zip(means, loop(weights), strict=True)]
    return [w - rate * m for w, m in zip(weights, new, strict=True)], new


def test_an_optimizer_after_a_loop_is_packs() -> None:
    constants = [*rows(0), *rows(1), jnp.float32(0.1)]
    jaxpr, packs, found = packed(momentum, constants)
    weights, means = jaxpr.outvars[:LAYERS], jaxpr.outvars[LAYERS:]
    for outputs in (weights, means, jaxpr.invars[:LAYERS], jaxpr.invars[LAYERS:-1]):
        assert packs.whole(outputs) is not None
    assert jaxpr.invars[-1] not in packs.of, "the rate is shared"
    single = [e for i, e in enumerate(jaxpr.eqns) if i not in packs.of_equation]
    assert {e.primitive.name for e in single} == {"stack_layers", "sin", "unstack_layers"}
    expected = jax.tree.leaves(momentum(constants))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_rows_in_another_order_are_no_pack() -> None:
    jaxpr, packs, _ = packed(momentum, [*rows(0), *rows(1), jnp.float32(0.1)])
    outputs = jaxpr.outvars[:LAYERS]
    assert packs.whole(outputs[::-1]) is None
    assert packs.whole(outputs[:-1]) is None
    assert packs.whole([outputs[0], outputs[0], outputs[2]]) is None


@pytest.mark.parametrize("odd", ["constant", "op", "missing", "shared", "crossed"])
def test_what_one_layer_does_otherwise_stays_alone(odd: str) -> None:
    def step(constants: Arrays) -> Any:
        new = []
        grads = loop(constants[:LAYERS])
        for i, (w, g) in enumerate(zip(constants, grads, strict=False)):
            last = i == LAYERS - 1
            if last and odd == "missing":
                new.append(w)
            elif last and odd == "op":
                new.append(jnp.maximum(w, 0.1 * g))
            elif last and odd == "shared":
                new.append(w - 0.1 * g * constants[-1])
            elif last and odd == "crossed":
                new.append(w - 0.1 * grads[0])
            else:
                new.append(w - (0.2 if last and odd == "constant" else 0.1) * g)
        return new

    constants = [*rows(0), jnp.float32(3.0)]
    jaxpr, packs, found = packed(step, constants)
    assert packs.whole(jaxpr.outvars) is None
    for one, other in zip(found, step(constants), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


@pytest.mark.parametrize("num_layers", [2, 3, 12])
def test_a_norm_over_all_layers_is_between_two_packs(num_layers: int) -> None:
    def step(constants: Arrays) -> Any:
        grads = loop(constants)
        norm = jnp.sqrt(functools.reduce(operator.add, [jnp.sum(g * g) for g in grads]))
        return [w - g / norm for w, g in zip(constants, grads, strict=True)]

    constants = rows(0, num_layers)
    jaxpr, packs, found = packed(step, constants)
    assert packs.whole(jaxpr.outvars) is not None
    for one, other in zip(found, step(constants), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_without_a_loop_there_are_no_packs() -> None:
    _, packs, _ = packed(lambda c: [2 * one for one in c], rows(0))
    assert not packs.of
    assert not packs.of_equation


def test_equal_literals_that_compare_unequal_and_the_reverse() -> None:
    def step(constants: Arrays) -> Any:
        grads = loop(constants)
        return [
            jnp.copysign(1.0, jnp.where(g > 9, g, z)) for g, z in zip(grads, zeros, strict=True)
        ]

    zeros = (0.0, 0.0, -0.0)
    _, _, found = packed(step, rows(0))
    assert [float(one[0, 0]) for one in found] == [1.0, 1.0, -1.0]


# ---------------------------------------------------------------------- drawn programs

OPS: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "max": jnp.maximum,
    "where": lambda a, b: jnp.where(a > b, a, b * 0.5),
    "mean": lambda a, b: a - b.mean(),
    "rows": lambda a, b: a + b.sum(0, keepdims=True),
    "turned": lambda a, b: a + jnp.tanh(b.reshape(2, 4).T),
    "joined": lambda a, b: jnp.concatenate([a, b])[2:6],
    "product": lambda a, b: a + 0.1 * (a @ b.T) @ b,
}


def drawn(seed: int) -> Callable[[Arrays], Any]:
    """A program of ops on rows; now and then one layer, or an order, is another."""

    def step(constants: Arrays) -> Any:
        chance = random.Random(seed)
        layers = [[w, g] for w, g in zip(constants[:LAYERS], loop(constants[:LAYERS]), strict=True)]
        for layer, state in zip(layers, constants[LAYERS : 2 * LAYERS], strict=True):
            layer.append(state)
        shared = [constants[-1]]
        for _ in range(chance.randint(2, 8)):
            op, a, b = chance.choice(list(OPS)), chance.randrange(9), chance.randrange(9)
            kind = chance.choice(["alike"] * 6 + ["shared", "mixed", "one layer", "turn"])
            for i, layer in enumerate(layers):
                left, right = layer[a % len(layer)], layer[b % len(layer)]
                if kind == "shared":
                    right = shared[b % len(shared)]
                if kind == "turn":
                    right = layers[(i + 1) % LAYERS][b % min(map(len, layers))]
                if kind == "one layer" and i == chance.randrange(LAYERS):
                    left = left * 1.5
                layer.append(OPS[op](left, right))
            if kind == "mixed":
                shared.append(functools.reduce(operator.add, [layer[-1] for layer in layers]))
        return [layer[-1] for layer in layers], [layer[-2] for layer in layers], shared[-1]

    return step


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_a_packed_trace_computes_what_the_trace_does(seed: int) -> None:
    constants = [*rows(seed), *rows(seed + 1), *rows(seed + 2, 1)]
    jaxpr, packs, found = packed(drawn(seed), constants)
    consts = [*traced(drawn(seed), constants)[1], *constants]
    expected = jax.core.eval_jaxpr(jaxpr, consts)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=1e-5)
    for pack in packs.of_equation.values():
        assert sorted(pack.rows) == list(range(pack.num_lanes))


def test_drawn_programs_are_packed_as_a_rule() -> None:
    """Else the property above would say little."""
    counts = [
        len(packed(drawn(seed), [*rows(0), *rows(1), *rows(2, 1)])[1].of_equation)
        for seed in range(12)
    ]
    assert sum(count > 0 for count in counts) > 8
