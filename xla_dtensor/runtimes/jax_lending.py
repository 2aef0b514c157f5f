"""Python's numbers, and an optimizer's CPU tensors, as inputs of a step's program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch

from xla_dtensor.runtimes import jax_trace
from xla_dtensor.runtimes.jax_convert import numpy_from_torch
from xla_dtensor.runtimes.jax_scalar import sym_number
from xla_dtensor.runtimes.jax_tensor import JaxTensor, Storage

__all__ = ["lent", "lent_tensor", "lifted"]


def lifted(tensor: torch.Tensor) -> JaxTensor:
    """Return a plain CPU tensor as one of the runtime's, which counts as older than the trace."""
    with jax.ensure_compile_time_eval():
        array = jnp.array(numpy_from_torch(tensor))
    return _outside_trace(array)


def lent(
    numbers: list[tuple[Storage, Callable[[], float]]],
    number: float,
    current: Callable[[], float],
) -> Any:
    """Return a number that stands for an input of the program, which each call reads anew.

    Args:
        numbers: The inputs of this kind; this one is added, with where to read it.
        number: What it is now.
        current: Returns what it is at the time.
    """
    with jax.ensure_compile_time_eval():
        array = jnp.asarray(number, jnp.float64)
    tensor = _outside_trace(array)
    numbers.append((tensor._storage, current))
    return sym_number(tensor.value(), current)


def lent_tensor(
    numbers: list[tuple[Storage, Callable[[], float]]],
    tensor: torch.Tensor,
    current: Callable[[], float],
) -> JaxTensor:
    """Return a tensor of one number that stands for an input of the program, as `lent` does.

    Args:
        numbers: As in `lent`.
        tensor: What it is now, on the host.
        current: Returns the number that it is at the time.
    """
    made = lifted(tensor)
    numbers.append((made._storage, current))
    return made


def _outside_trace(array: jax.Array) -> JaxTensor:
    trace, jax_trace._active = jax_trace._active, None
    try:
        return JaxTensor(Storage(array))
    finally:
        jax_trace._active = trace
