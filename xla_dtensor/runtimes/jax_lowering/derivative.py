"""Backward ops as JAX's derivative of the forward lowering.

torch's backward ops take the cotangent first, then what the forward took, under the same names, and
sometimes what the forward returned. So the two schemas say how a backward op follows from a forward
lowering, and one line registers it::

    lower_derivative(aten.grid_sampler_2d_backward.default, forward, "input", "grid")

The derivative keeps the dims apart that the forward keeps apart. Where the forward ran already, in
the same compiled step, XLA drops the second run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from xla_dtensor.runtimes.jax_lowering.as_one import as_one
from xla_dtensor.runtimes.jax_lowering.table import TABLE, lower

__all__ = ["lower_derivative", "pull_back"]


def pull_back(function: Callable[..., Any], primals: Any, grad: Any) -> tuple[Any, ...]:
    """Return the cotangents of `primals` under a function whose output has the cotangent `grad`.

    Args:
        function: Takes `primals`, returns one array.
        primals: Arrays of floats.
        grad: The output's cotangent; cast to the output's dtype.

    Example:
        >>> pull_back(lambda x: x * 3, (jax.numpy.ones(2),), jax.numpy.ones(2))
        (Array([3., 3.], dtype=float32),)
    """
    output, pull = jax.vjp(function, *primals)
    return pull(grad.astype(output.dtype))


def lower_derivative(backward: Any, forward: Any, *wrt: str) -> None:
    """Register the lowering of a backward op: the derivative of a forward op that has one.

    Args:
        backward: The op; its first argument is the cotangent of the forward's first result. A
            result that `output_mask` leaves out is None.
        forward: Its lowering has to be in the table already.
        wrt: The forward's arguments that the results of `backward` are the gradients of, in order.

    Example:
        >>> import torch
        >>> import xla_dtensor.runtimes.jax_lowering.losses
        >>> torch.ops.aten.multi_margin_loss_backward.default in TABLE
        True
    """
    lowering = TABLE[forward]
    forward_names = [argument.name for argument in forward._schema.arguments]
    defaults = {a.name: a.default_value for a in forward._schema.arguments if a.has_default_value()}
    backward_names = [argument.name for argument in backward._schema.arguments]

    def run(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(backward_names, args, strict=False)) | kwargs
        grad = given[backward_names[0]]
        mask = given.get("output_mask", [True] * len(wrt))
        needed = [name for name, wanted in zip(wrt, mask, strict=True) if wanted]

        def function(*values: Any) -> Any:
            every = {**defaults, **given, **dict(zip(needed, values, strict=True))}
            result = lowering(*(every[name] for name in forward_names))
            return result[0] if isinstance(result, tuple) else result

        primals = [given[name] for name in needed]
        found = dict(zip(needed, pull_back(function, primals, grad), strict=True))
        results = tuple(found.get(name) for name in wrt)
        return results if len(backward._schema.returns) > 1 else results[0]

    lower(backward)(as_one(run))
