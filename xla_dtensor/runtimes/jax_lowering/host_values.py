"""Read a value on the host, for an op whose result's shape depends on it."""

from __future__ import annotations

from typing import Any

import numpy as np

from xla_dtensor.runtimes.jax_placing import host_value
from xla_dtensor.runtimes.jax_trace import active_trace, is_tracer, refuse_read

__all__ = ["read_on_host"]


def read_on_host(value: Any, what: str) -> np.ndarray[Any, Any]:
    """Return the whole value of an array. With several processes, all of them call this alike.

    Args:
        value: The array.
        what: For the text, what happens to "a tensor's value".

    Raises:
        CompileError: A step is traced, and the value is one that changes between its calls.
    """
    trace = active_trace()
    # What the step captured is an input of its program, though the trace sees the array itself.
    captured = trace is not None and any(value is array for array in trace.captured.values())
    if captured or is_tracer(value):
        refuse_read(what)
    return host_value(value)
