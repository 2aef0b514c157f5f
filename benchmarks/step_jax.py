"""The Llama of `benchmarks.llama_model` and its training step, written by hand in JAX.

What a JAX user would write: parameters in a dict, einsums that keep heads apart, `jax.grad`, AdamW
as three maps, shardings on the inputs and on the activations at the same places as in
`benchmarks.step_torch`. It is what the project's own step is measured against.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.llama_model import Sizes
from benchmarks.step_plan import ACTIVATIONS, BETAS, CLIP, DECAY, EPS, RATE, axes_of

__all__ = ["JaxTraining", "step_of"]

Params = dict[str, Any]
_HIGHEST = jax.lax.Precision.HIGHEST


@dataclass
class JaxTraining:
    """Parameters, optimizer state and the compiled step.

    Args:
        params: By the names that PyTorch gives them.
        state: First and second moments, and the number of steps done.
        step: Compiled for the shapes at hand.
        mesh: None on one device.
    """

    params: Params
    state: tuple[Params, Params, Any]
    step: Any
    mesh: Mesh | None

    def __call__(self, tokens: Any, targets: Any) -> Any:
        """Trains one step; returns the loss."""
        self.params, self.state, loss = self.step(self.params, self.state, tokens, targets)
        return loss

    @classmethod
    def of(
        cls,
        weights: Mapping[str, np.ndarray[Any, Any]],
        batch: tuple[Any, Any],
        sizes: Sizes,
        mesh: Mesh | None,
    ) -> JaxTraining:
        """Places the weights and compiles the step.

        Args:
            weights: Host arrays by name, as in the PyTorch model's state_dict.
            batch: Placed tokens and targets, for their types.
            sizes: The model's.
            mesh: Axes dp and tp, or None for one device.
        """
        params = {name: jax.device_put(w, _sharding(mesh, name)) for name, w in weights.items()}

        def zeros() -> Params:
            return {n: jax.device_put(jnp.zeros_like(p), p.sharding) for n, p in params.items()}

        count = jax.device_put(jnp.zeros((), jnp.float32), _sharding(mesh, ""))
        state = (zeros(), zeros(), count)
        kept = jax.tree.map(lambda a: a.sharding, (params, state))
        pinned = None if mesh is None else (*kept, NamedSharding(mesh, PartitionSpec()))
        step = jax.jit(step_of(sizes, mesh), donate_argnums=(0, 1), out_shardings=pinned)
        return cls(params, state, step.lower(params, state, *batch).compile(), mesh)


def _sharding(mesh: Mesh | None, name: str) -> Any:
    if mesh is None:
        return jax.devices()[0]
    return NamedSharding(mesh, PartitionSpec(*axes_of(name)))


def step_of(sizes: Sizes, mesh: Mesh | None) -> Callable[..., Any]:
    """Returns the training step as a function of parameters, state, tokens and targets."""

    def step(params: Params, state: Any, tokens: Any, targets: Any) -> Any:
        def loss_of(params: Params) -> Any:
            logits = _logits(params, tokens, sizes, partial(_kept, mesh))
            chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)
            return -chosen.mean()

        loss, grads = jax.value_and_grad(loss_of)(params)
        norm = jnp.sqrt(sum(jnp.vdot(g, g, precision=_HIGHEST) for g in grads.values()))
        factor = jnp.minimum(CLIP / (norm + 1e-6), 1.0)
        return (*_adamw(params, {n: g * factor for n, g in grads.items()}, state), loss)

    return step


def _kept(mesh: Mesh | None, x: Any, place: str) -> Any:
    if mesh is None:
        return x
    return jax.lax.with_sharding_constraint(
        x, NamedSharding(mesh, PartitionSpec(*ACTIVATIONS[place]))
    )


def _logits(params: Params, tokens: Any, sizes: Sizes, kept: Callable[[Any, str], Any]) -> Any:
    x = kept(params["tok_embeddings.weight"][tokens], "residual")
    for layer in range(sizes.num_layers):
        at = partial(_named, params, f"layers.{layer}")
        x = x + kept(
            _attention(at, _norm(x, at("attention_norm")), params["rotary"], sizes), "residual"
        )
        x = x + kept(_feed_forward(at, _norm(x, at("ffn_norm"))), "residual")
    x = _norm(x, params["norm.weight"])
    return kept(_linear(x, params["output.weight"]), "logits")


def _named(params: Params, layer: str, name: str) -> Any:
    return params[f"{layer}.{name}.weight"]


def _norm(x: Any, weight: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * weight


def _linear(x: Any, weight: Any) -> Any:
    return jnp.einsum("bld,hd->blh", x, weight, precision=_HIGHEST)


def _attention(at: Callable[[str], Any], x: Any, rotary: Any, sizes: Sizes) -> Any:
    batch, length, _ = x.shape

    def heads(name: str) -> Any:
        shape = (batch, length, -1, sizes.dim // sizes.num_heads)
        return _linear(x, at(f"attention.{name}")).reshape(shape)

    q, k, v = _rotated(heads("wq"), rotary), _rotated(heads("wk"), rotary), heads("wv")
    k, v = (jnp.repeat(t, sizes.num_heads // sizes.num_kv_heads, axis=2) for t in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, precision=_HIGHEST) * q.shape[-1] ** -0.5
    causal = jnp.tril(jnp.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf))
    out = jnp.einsum("bhqk,bkhd->bqhd", weights, v, precision=_HIGHEST)
    return _linear(out.reshape(batch, length, -1), at("attention.wo"))


def _rotated(x: Any, table: Any) -> Any:
    cos, sin = table[:, : x.shape[1], None, :]
    front, back = jnp.split(x, 2, axis=-1)
    return x * cos + jnp.concatenate((-back, front), axis=-1) * sin


def _feed_forward(at: Callable[[str], Any], x: Any) -> Any:
    gated = jax.nn.silu(_linear(x, at("feed_forward.w1"))) * _linear(x, at("feed_forward.w3"))
    return _linear(gated, at("feed_forward.w2"))


def _adamw(params: Params, grads: Params, state: Any) -> Any:
    first, second, count = state
    count = count + 1
    new: Params = {}
    means, squares = dict(first), dict(second)
    for name, grad in grads.items():
        if name == "rotary":
            new[name] = params[name]
            continue
        means[name] = BETAS[0] * first[name] + (1 - BETAS[0]) * grad
        squares[name] = BETAS[1] * second[name] + (1 - BETAS[1]) * grad * grad
        mean = means[name] / (1 - BETAS[0] ** count)
        square = squares[name] / (1 - BETAS[1] ** count)
        new[name] = params[name] * (1 - RATE * DECAY) - RATE * mean / (jnp.sqrt(square) + EPS)
    return new, (means, squares, count)
