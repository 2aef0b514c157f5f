"""compile(step): a whole PyTorch training step as one XLA program, on either runtime.

The step is an ordinary Python function: forward, ``loss.backward()``, gradient clipping,
``optimizer.step()``. It is traced on the first call, and once more when that call made optimizer
state. Later calls only launch the program: parameters, optimizer state, counters and the learning
rate are inputs, state is updated in place, and shardings stay what they were.

What Python holds is looked at on every call: where a number, a function, a module or a tensor that
the step reaches by name is another one than when it was traced, it is traced anew, and `stats()`
says which. What the step computes on ordinary CPU tensors, draws included, is computed before each
run; what it assigns (``self.loss = loss``) is assigned after it. Numbers among the arguments are
part of the program: pass what changes often as a tensor.

What the step must not do: branch on the value of a tensor on the mesh, draw from Python's or
NumPy's random numbers, take from an iterator that is older than the call (all clear errors), or
rely on other effects of Python per call, such as printing, or ``scheduler.step()``. Call the
scheduler after the step; the learning rate is read anew on every call.

Gradients that the step leaves in ``p.grad`` are outputs of the program and take memory between
steps. End the step with ``optimizer.zero_grad()`` to drop them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from xla_dtensor.core.errors import ArgumentTypeError
from xla_dtensor.runtimes.base import CompiledStep
from xla_dtensor.runtimes.registry import get_runtime

__all__ = ["compile"]


def compile(step: Callable[..., Any]) -> CompiledStep:
    """Return `step` as one XLA program that is called like `step` itself.

    Args:
        step: A function of tensors (DTensors or plain ones) and of values that rarely change.

    Returns:
        A callable with ``hlo()`` (the partitioned program's text) and ``stats()`` (calls, traces
        and the reason of each trace).

    Raises:
        ArgumentTypeError: `step` cannot be called, or is a generator function or a coroutine.
        CompileError: On a call, when the step needs a tensor's value while it is traced.

    Example:
        >>> import torch, xla_dtensor as xd
        >>> mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
        >>> double = xd.compile(lambda x: x * 2)
        >>> double(xd.distribute_tensor(torch.ones(4), mesh)).full_tensor().tolist()
        [2.0, 2.0, 2.0, 2.0]
    """
    if not callable(step):
        raise ArgumentTypeError(
            f"compile was called with an object of type={type(step).__name__}. A step is a "
            "function that is called with its inputs. Pass a function, or a module."
        )
    kinds = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    if any(is_of_kind(step) for is_of_kind in kinds):
        raise ArgumentTypeError(
            f"compile was called with {step!r}, a generator function or a coroutine. Its body runs "
            "after the call, piece by piece, and a step is one program. Pass a function that "
            "returns its results."
        )
    return get_runtime().compile(step)
