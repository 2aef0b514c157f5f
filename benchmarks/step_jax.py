"""The training step of `benchmarks.step` written by hand in JAX, for each of its models.

`jax.grad`, clipping and AdamW as three maps, shardings on the inputs and on the activations at the
same places as in `benchmarks.step_torch`. It is what the project's own step is measured against.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.step_jax_models import logits_of
from benchmarks.step_plan import ACTIVATIONS, BETAS, CLIP, DECAY, EPS, RATE, axes_of
from benchmarks.step_sizes import AnySizes

__all__ = ["JaxTraining", "lowered_for", "step_of"]

Params = dict[str, Any]
Arrays = Mapping[str, np.ndarray[Any, Any]]
_HIGHEST = jax.lax.Precision.HIGHEST
# Among the parameters, and not trained.
_BUFFERS = ("rotary", "running_mean", "running_var", "num_batches_tracked")


@dataclass
class JaxTraining:
    """Parameters, optimizer state and the compiled step.

    Args:
        params: By the names that PyTorch gives them.
        state: First and second moments, and the number of steps done.
        compiled: ``jax.stages.Compiled``.
        trace_seconds: What tracing and lowering took.
        compile_seconds: What XLA took.
    """

    params: Params
    state: tuple[Params, Params, Any]
    compiled: Any
    trace_seconds: float
    compile_seconds: float

    def __call__(self, inputs: Any, targets: Any) -> Any:
        """Trains one step; returns the loss."""
        self.params, self.state, loss = self.compiled(self.params, self.state, inputs, targets)
        return loss

    @classmethod
    def of(
        cls, weights: Arrays, batch: tuple[Any, Any], sizes: AnySizes, mesh: Mesh | None
    ) -> JaxTraining:
        """Places the weights and compiles the step.

        Args:
            weights: Arrays by name, as in the PyTorch model's state_dict, and its buffers.
            batch: Placed inputs and targets, for their types.
            sizes: The model's.
            mesh: Axes dp and tp, or None for one device.
        """
        params = {name: jax.device_put(w, _sharding(mesh, name)) for name, w in weights.items()}

        def zeros() -> Params:
            return {n: jax.device_put(jnp.zeros_like(p), p.sharding) for n, p in _trained(params)}

        count = jax.device_put(jnp.zeros((), jnp.float32), _sharding(mesh, ""))
        state = (zeros(), zeros(), count)
        jax.block_until_ready((params, state))
        start = time.perf_counter()
        lowered = _lowered(sizes, mesh, params, state, batch)
        traced = time.perf_counter()
        compiled = lowered.compile()
        return cls(params, state, compiled, traced - start, time.perf_counter() - traced)


def lowered_for(weights: Arrays, batch: tuple[Any, Any], sizes: AnySizes, mesh: Mesh) -> Any:
    """Lowers the step for devices that need not be here.

    Args:
        weights: As `JaxTraining.of` takes them.
        batch: Host arrays.
        sizes: The model's.
        mesh: Of any devices, axes dp and tp.

    Returns:
        ``jax.stages.Lowered``.
    """

    def typed(array: Any, name: str) -> Any:
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=_sharding(mesh, name))

    params = {name: typed(w, name) for name, w in weights.items()}
    moments = dict(_trained(params))
    state = (moments, moments, typed(np.zeros((), np.float32), ""))
    lies = NamedSharding(mesh, PartitionSpec("dp"))
    given = tuple(jax.ShapeDtypeStruct(b.shape, b.dtype, sharding=lies) for b in batch)
    return _lowered(sizes, mesh, params, state, given)


def _lowered(sizes: AnySizes, mesh: Mesh | None, params: Params, state: Any, batch: Any) -> Any:
    kept = jax.tree.map(lambda a: a.sharding, (params, state))
    pinned = None if mesh is None else (*kept, NamedSharding(mesh, PartitionSpec()))
    step = jax.jit(step_of(sizes, mesh), donate_argnums=(0, 1), out_shardings=pinned)
    return step.lower(params, state, *batch)


def _sharding(mesh: Mesh | None, name: str) -> Any:
    if mesh is None:
        return jax.devices()[0]
    return NamedSharding(mesh, PartitionSpec(*axes_of(name)))


def _trained(params: Params) -> list[tuple[str, Any]]:
    return [(name, p) for name, p in params.items() if name.rpartition(".")[2] not in _BUFFERS]


def step_of(sizes: AnySizes, mesh: Mesh | None) -> Callable[..., Any]:
    """Returns the training step as a function of parameters, state, inputs and targets."""

    def step(params: Params, state: Any, inputs: Any, targets: Any) -> Any:
        def loss_of(trained: Params) -> tuple[Any, Params]:
            everything = {**params, **trained}
            logits, changed = logits_of(everything, inputs, sizes, partial(_kept, mesh))
            scores = jax.nn.log_softmax(logits.astype(jnp.float32))
            return -jnp.take_along_axis(scores, targets[..., None], axis=-1).mean(), changed

        graded = jax.value_and_grad(loss_of, has_aux=True)
        (loss, changed), grads = graded(dict(_trained(params)))
        norm = jnp.sqrt(sum(jnp.vdot(g, g, precision=_HIGHEST) for g in grads.values()))
        factor = jnp.minimum(CLIP / (norm + 1e-6), 1.0)
        new, state = _adamw(params, {n: g * factor for n, g in grads.items()}, state)
        return {**params, **changed, **new}, state, loss

    return step


def _kept(mesh: Mesh | None, x: Any, place: str) -> Any:
    if mesh is None:
        return x
    return jax.lax.with_sharding_constraint(
        x, NamedSharding(mesh, PartitionSpec(*ACTIVATIONS[place]))
    )


def _adamw(params: Params, grads: Params, state: Any) -> Any:
    first, second, count = state
    count = count + 1
    new: Params = {}
    means: Params = {}
    squares: Params = {}
    for name, grad in grads.items():
        means[name] = BETAS[0] * first[name] + (1 - BETAS[0]) * grad
        squares[name] = BETAS[1] * second[name] + (1 - BETAS[1]) * grad * grad
        mean = means[name] / (1 - BETAS[0] ** count)
        square = squares[name] / (1 - BETAS[1] ** count)
        changed = params[name] * (1 - RATE * DECAY) - RATE * mean / (jnp.sqrt(square) + EPS)
        new[name] = changed.astype(params[name].dtype)
    return new, (means, squares, count)
