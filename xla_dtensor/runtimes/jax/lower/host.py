"""Ops whose result's shape depends on values: torch's own kernel, on the value read to the host.

Outside of a compiled step that is right, and as slow as reading a tensor is; the result is whole
on every device. A compiled step cannot have such an op: its shapes are fixed before it runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import NamedSharding, PartitionSpec

from xla_dtensor.runtimes.jax.arrays.sharding import host_value, put_host_array
from xla_dtensor.runtimes.jax.arrays.trace import active_trace, is_tracer, refuse_read
from xla_dtensor.runtimes.jax.arrays.values import numpy_from_torch, torch_from_numpy
from xla_dtensor.runtimes.jax.lower.table import lower
from xla_dtensor.runtimes.nested import leaves, map_nested

__all__ = ["read_on_host"]


# -------------------------- Read a value on the host, for an op whose result's shape depends on it


def read_on_host(array: Any, usage: str) -> np.ndarray[Any, Any]:
    """Return the whole value of an array. With several processes, all of them call this alike.

    Args:
        array: The array.
        usage: For the text, what happens to "a tensor's value".

    Raises:
        CompileError: A step is traced, and the value is one that changes between its calls.
    """
    trace = active_trace()
    # What the step captured is an input of its program, though the trace sees the array itself.
    captured = trace is not None and any(array is input for input in trace.captured.values())
    if captured or is_tracer(array):
        refuse_read(usage)
    return host_value(array)


# ------------------------------------------------------ Ops whose result's shape depends on values

aten = torch.ops.aten
logger = logging.getLogger("xla_dtensor")
_logged: set[Any] = set()


def _on_host(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an op on the host's copies of its arguments."""
    usage = f"read by {func}, the shape of whose result depends on it,"

    def to_host(argument: Any) -> Any:
        if not isinstance(argument, jax.Array):
            return argument
        return torch_from_numpy(read_on_host(argument, usage))

    host_args, host_kwargs = map_nested(to_host, (args, kwargs))
    _log_once(func)
    sharding = _replicated(args, kwargs)

    def to_devices(output: Any) -> Any:
        if not isinstance(output, torch.Tensor):
            return output
        return put_host_array(np.array(numpy_from_torch(output)), sharding)

    outputs = func(*host_args, **host_kwargs)
    return tuple(map(to_devices, outputs)) if isinstance(outputs, tuple) else to_devices(outputs)


def _replicated(args: Any, kwargs: Any) -> NamedSharding | None:
    """Return the whole tensor on every device of the arguments; None where these lie on one."""
    for argument in leaves((args, kwargs)):
        if isinstance(argument, jax.Array) and isinstance(argument.sharding, NamedSharding):
            return NamedSharding(argument.sharding.mesh, PartitionSpec())
    return None


def _log_once(func: Any) -> None:
    if func not in _logged:
        _logged.add(func)
        logger.info(
            "%s reads its whole input on the host, because the shape of its result depends on the "
            "values; the result is replicated.",
            func,
        )


def _register(func: Any) -> Callable[..., Any]:
    def rule(*args: Any, **kwargs: Any) -> Any:
        return _on_host(func, args, kwargs)

    return lower(func)(rule)


for _func in (
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    aten.unique_dim_consecutive.default,
    aten.bincount.default,
):
    _register(_func)


@lower(aten.repeat_interleave.Tensor)
def _repeat_interleave(repeats: Any, *, output_size: int | None = None) -> Any:
    """Return each place as often as `repeats` says."""
    if output_size is None:
        return _on_host(aten.repeat_interleave.Tensor, (repeats,), {})
    ends = jnp.cumsum(repeats)
    places = jnp.searchsorted(ends, jnp.arange(output_size), side="right")
    # Of another sum: places that there are not, whose rows are NaN.
    is_sum = jnp.sum(repeats) == output_size
    return jnp.where(is_sum, places, repeats.shape[0])
