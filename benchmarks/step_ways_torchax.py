"""The benchmarked step by torchax: the same PyTorch model, differentiated and compiled by JAX.

torchax runs a module's forward on JAX arrays; the gradient is ``jax.value_and_grad``'s, the
optimizer optax's, and the user threads weights and state through the step by hand
(``torchax.train.make_train_step``, ``torchax.interop.jax_jit``). Shardings are JAX's: weights are
put, activations are constrained by hooks at the places of ``benchmarks.step_plan``.

torchax 0.0.13 needs flax and optax, asks for neither, and does not import on torch 2.13 or newer.
So it has an environment of its own, which ``make bench`` makes.
"""

from __future__ import annotations

import importlib
import time
from typing import Any

import jax
import numpy as np
import torch
import torch.nn.functional as F
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from torch import nn

from benchmarks.step_plan import (
    ACTIVATIONS,
    AXES,
    BETAS,
    CLIP,
    DECAY,
    EPS,
    RATE,
    TORCHAX,
    axes_of,
)
from benchmarks.step_sizes import AnySizes
from benchmarks.step_torch import kept_outputs, made
from benchmarks.step_ways import Built, Way
from benchmarks.step_ways_jax import compile_clock, host_batch, program_facts

__all__ = ["ways_on_torchax"]


def ways_on_torchax(sizes: AnySizes, shape: tuple[int, int]) -> list[Way]:
    """Returns the one way.

    Args:
        sizes: The model's.
        shape: Of the mesh, axes dp and tp.
    """
    torchax: Any = importlib.import_module("torchax")
    interop: Any = importlib.import_module("torchax.interop")
    # As in the other ways: products in full precision.
    jax.config.update("jax_default_matmul_precision", "highest")
    model, batch = made(sizes)
    where = _Where(shape)
    _keep_outputs(model, where, interop)
    weights = {n: where.put(p, axes_of(n)) for n, p in model.named_parameters()}
    buffers = {n: where.put(b, ()) for n, b in model.named_buffers()}
    given = [jax.device_put(each, where.lies(("dp",))) for each in host_batch(batch, torch.float32)]
    step, init = _step(model)
    state = where.beside(weights, init(weights))
    with torchax.default_env():
        started = time.perf_counter()
        function = interop.jax_view(step)
        kept = jax.tree.map(lambda a: a.sharding, (weights, state))
        jitted = jax.jit(function, donate_argnums=(0, 2), out_shardings=(where.lies(()), *kept))
        lowered = jitted.lower(weights, buffers, state, *given)
        traced = time.perf_counter()
        compiled = lowered.compile()
        done = time.perf_counter()
    held = [weights, state]

    def train() -> Any:
        loss, held[0], held[1] = compiled(held[0], buffers, held[1], *given)
        return loss

    return [
        Way(
            TORCHAX,
            train=train,
            wait=jax.block_until_ready,
            read=float,
            compiling=compile_clock(),
            facts=lambda: {**program_facts(compiled, where.mesh_value()), "traces": 1},
            built=Built(traced - started, done - traced),
        )
    ]


class _Where:
    """Where tensors lie: on a mesh, or on the only device."""

    def __init__(self, shape: tuple[int, int]) -> None:
        devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
        self._shape = shape
        self._mesh = None if devices.size == 1 else Mesh(devices, AXES)

    def lies(self, axes: tuple[str | None, ...]) -> Any:
        if self._mesh is None:
            return SingleDeviceSharding(jax.devices()[0])
        return NamedSharding(self._mesh, PartitionSpec(*axes))

    def put(self, tensor: torch.Tensor, axes: tuple[str | None, ...]) -> jax.Array:
        return jax.device_put(tensor.detach().numpy(), self.lies(axes))

    def beside(self, weights: Any, state: Any) -> Any:
        """Puts an optimizer's state: a weight's moments as the weight, all else everywhere."""

        def place(path: Any, leaf: Any) -> Any:
            name = getattr(path[-1], "key", None)
            lies = weights[name].sharding if name in weights else self.lies(())
            return jax.device_put(leaf, lies)

        return jax.tree_util.tree_map_with_path(place, state)

    def constrained(self, value: Any, axes: tuple[str | None, ...]) -> Any:
        if self._mesh is None:
            return value
        return jax.lax.with_sharding_constraint(value, self.lies(axes))

    def mesh_value(self) -> Any:
        from mesh_utils import Mesh as Named

        return Named.arange(self._shape, AXES)


def _keep_outputs(model: nn.Module, where: _Where, interop: Any) -> None:
    for module, place in kept_outputs(model):
        axes = ACTIVATIONS[place]

        def keep(_module: Any, _given: Any, result: Any, axes: Any = axes) -> Any:
            return interop.call_jax(lambda value: where.constrained(value, axes), result)

        module.register_forward_hook(keep)


def _step(model: nn.Module) -> tuple[Any, Any]:
    """Returns torchax's training step, a function of torch tensors, and what makes its state."""
    optax: Any = importlib.import_module("optax")
    train: Any = importlib.import_module("torchax.train")
    adamw = optax.adamw(RATE, b1=BETAS[0], b2=BETAS[1], eps=EPS, weight_decay=DECAY)
    optimizer = optax.chain(optax.clip_by_global_norm(CLIP), adamw)

    def forward(weights: Any, buffers: Any, inputs: Any) -> Any:
        return torch.func.functional_call(model, {**weights, **buffers}, inputs)

    def loss_of(logits: Any, targets: Any) -> Any:
        return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten().long())

    return train.make_train_step(forward, loss_of, optimizer), optimizer.init
