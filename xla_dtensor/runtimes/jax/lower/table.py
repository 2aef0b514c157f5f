"""The table of our own lowerings, and the decorator that fills it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import torch

from xla_dtensor.runtimes.jax.arrays.values import jax_dtype

__all__ = ["TABLE", "Lowering", "elementwise", "lower"]


# --------------------------------- The table of our own lowerings, and the decorator that fills it


@dataclass(frozen=True)
class Lowering:
    """A function on arrays.

    Args:
        function: The function.
        wants_meta: Whether it is also given torch's answer as ``meta=``.
        is_factory: Whether it reads nothing of its first tensor, which is None then: the answer
            says the shape and the dtype.
    """

    function: Callable[..., Any]
    wants_meta: bool = False
    is_factory: bool = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


TABLE: dict[Any, Lowering] = {}


def lower(
    *ops: Any, wants_meta: bool = False, is_factory: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as the lowering of each of `ops`."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        TABLE.update(dict.fromkeys(ops, Lowering(function, wants_meta, is_factory)))
        return function

    return register


# -------------------------------------------------------------------------------------- Elementwise
#
# Register a function of numbers as the lowering of an element by element op.
#
# Inputs arrive in the dtype that torch gives the result; half-precision ones in float32, as torch's
# own kernels compute them.

_HALF = (torch.bfloat16, torch.float16)


def elementwise(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as the lowering of each aten op named.

    Args:
        names: Such as "special_zeta" or "special_zeta.self_scalar".
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        compiled = jax.jit(function)  # dozens of operations, and one program outside of a step

        def rule(*args: Any, meta: Any) -> Any:
            dtype = jnp.dtype(jnp.float32) if meta.dtype in _HALF else jax_dtype(meta.dtype)
            return compiled(*(jnp.asarray(argument).astype(dtype) for argument in args))

        for name in names:
            packet, _, overload = name.partition(".")
            operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
            lower(operator, wants_meta=True)(rule)
        return function

    return register
