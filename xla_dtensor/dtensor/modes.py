"""Modes of dispatch: are labels enforced, and may plain tensors meet DTensors?

Both are context managers that hold for the calling thread and, as PyTorch carries its thread-local
state along, for the backward passes that it starts. A compiled step is traced anew under another
mode. The third mode, :mod:`xla_dtensor.dtensor.custom`, has a file of its own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from xla_dtensor.dtensor.labels import GlobalState
from xla_dtensor.runtimes import functional
from xla_dtensor.runtimes.nested import leaves
from xla_dtensor.runtimes.registry import get_runtime
from xla_dtensor.runtimes.state import register_setting
from xla_dtensor.runtimes.written import written_values

__all__ = [
    "constrain_output",
    "constrain_written",
    "current_modes",
    "implicit_replication",
    "loss_parallel",
    "state_of_loss_op",
    "strict_placements",
    "using_modes",
    "with_state_of_logits",
]


# ----------------------------------------------------- What :func:`xla_dtensor.loss_parallel` does
#
# The parts of a cross entropy lie as its logits do.
#
# PyTorch's rules label a log-softmax over a sharded dim Replicate, as they would gather it.

aten = torch.ops.aten
# Which argument each one's result lies as.
_LIES_AS = {
    aten._log_softmax.default: 0,
    aten._log_softmax_backward_data.default: 1,
    aten.nll_loss_backward.default: 1,
    aten.nll_loss2d_backward.default: 1,
}


def state_of_loss_op(func: Any, args: Sequence[Any]) -> Any:
    """Return the state of the logits (or log-probabilities) that an op's result is to lie as.

    None for other ops.
    """
    place = _LIES_AS.get(func)
    return None if place is None else getattr(args[place], "_spec", None)


def with_state_of_logits(payload: torch.Tensor, state: Any) -> torch.Tensor:
    """Return a result told to lie as `state` says; where a reduction is pending, as it is."""
    if payload.is_meta or any(placement.is_partial() for placement in state.placements):
        return payload
    return functional.constrain(payload, state.span_layout)


# ------------------------------------------------------------------------------- Modes of dispatch

_KEY = "xla_dtensor.dtensor.modes"


class Modes(NamedTuple):
    """What holds in this thread."""

    strict: bool = False
    implicit: bool = True
    no_skip: frozenset[str] | None = None  # None: no op is skipped
    loss_parallel: bool = False


_DEFAULT = Modes()


def current_modes() -> Modes:
    """Return the modes of the calling thread."""
    # PyTorch's own thread-local store and not a ContextVar: backward passes of XLA tensors run in
    # threads of PyTorch's, into which it copies this one.
    if torch._C._is_key_in_tls(_KEY):
        return torch._C._get_obj_in_tls(_KEY)
    return _DEFAULT


register_setting("modes", current_modes)


@contextmanager
def strict_placements(enabled: bool = True) -> Iterator[None]:
    """Make every op's output lie as its label says, in this thread.

    Labels are PyTorch's placements of an op's output. Outside of this mode they are not enforced:
    XLA chooses how a value lies. Here each output is constrained to its label, so that
    ``x.xla_sharding()`` equals it and a program communicates where PyTorch's DTensor would. It
    costs speed, and shows where the two differ. A label with a Partial names no way to lie, and
    such an output is left to XLA.

    Args:
        enabled: False switches an outer ``strict_placements()`` off.

    Example:
        >>> import torch, xla_dtensor as xd
        >>> from torch.distributed.tensor import Replicate, Shard
        >>> mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
        >>> x = xd.distribute_tensor(torch.ones(8, 4), mesh, [Shard(0), Replicate()])
        >>> with xd.strict_placements():
        ...     y = x + 1
        >>> y.xla_sharding() == x.xla_sharding()
        True
    """
    with using_modes(current_modes()._replace(strict=enabled)):
        yield


@contextmanager
def implicit_replication(enabled: bool = True) -> Iterator[None]:
    """Say whether plain tensors may be mixed with DTensors in one op, in this thread.

    They may by default: DTensors are global here, so a plain tensor has one meaning, its value on
    every device. ``implicit_replication(False)`` gives PyTorch's rule, so that code written here
    runs there: one-element tensors pass (with PyTorch's warning where they have a dim), others
    raise. PyTorch's own ``torch.distributed.tensor.experimental.implicit_replication()`` allows
    them as well, whatever is said here.

    Args:
        enabled: False refuses plain tensors.

    Raises:
        MixedTensorsError: From an op inside the block, with a plain tensor of several elements.

    Example:
        >>> import torch, xla_dtensor as xd
        >>> mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
        >>> x = xd.distribute_tensor(torch.ones(4), mesh)
        >>> with xd.implicit_replication(False):
        ...     x = x * torch.tensor(2.0)
        >>> (x + torch.ones(4)).tolist()
        [3.0, 3.0, 3.0, 3.0]
    """
    with using_modes(current_modes()._replace(implicit=enabled)):
        yield


@contextmanager
def loss_parallel() -> Iterator[None]:
    """Keep a loss over classes sharded, in this thread: logits are nowhere whole.

    PyTorch's name. There, a cross entropy of logits that are sharded over the classes gathers them
    outside of this context. Here XLA works on the shards anyway, as long as nothing moves it to
    gather; inside, the log-probabilities and the gradient of the logits are told to lie as the
    logits do (and are labelled so). Call ``backward()`` inside as well, as in PyTorch.

    Example:
        >>> import torch, xla_dtensor as xd
        >>> from torch.distributed.tensor import Replicate, Shard
        >>> mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
        >>> logits = torch.zeros(8, 16, requires_grad=True)
        >>> classes = torch.zeros(8, dtype=torch.int64)
        >>> sharded = xd.distribute_tensor(logits, mesh, [Shard(0), Shard(1)])
        >>> with xd.loss_parallel():
        ...     loss = torch.nn.functional.cross_entropy(sharded, classes)
        >>> f"{loss.item():.4f}"
        '2.7726'
    """
    with using_modes(current_modes()._replace(loss_parallel=True)):
        yield


@contextmanager
def using_modes(modes: Modes) -> Iterator[None]:
    """Let `modes` hold in this thread; those before hold again afterwards."""
    outer = current_modes()
    _stash(modes)
    try:
        yield
    finally:
        _stash(outer)


def _stash(modes: Modes) -> None:
    # torch takes over the reference that it is given, and drops it with the next one.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(modes))
    torch._C._stash_obj_in_tls(_KEY, modes)


# ------------------------------------------------------------------------------- Strict placements
#
# What an op returns, or has written to, is told to lie as its label says.
#
# See :func:`xla_dtensor.strict_placements`. New values are constrained. Views have to stay views,
# so that writes through them reach their base, and are told in place; a graph of torch.compile has
# no such op, and leaves them to XLA.


def constrain_output(payload: torch.Tensor, state: GlobalState, is_view: bool) -> torch.Tensor:
    """Return an op's output, told to lie as its label says.

    Args:
        payload: The runtime's tensor.
        state: The output's state. A Partial in its label names no way to lie: nothing is told.
        is_view: The output shares its values with an argument.

    Returns:
        `payload` itself where it is a view, else one with the same values.
    """
    if payload.is_meta or _is_pending(state):
        return payload
    if not is_view:
        return functional.constrain(payload, state.span_layout)
    if not functional.is_traced(payload):
        get_runtime().annotate_view(payload, state.span_layout)
    return payload


def constrain_written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Tell the DTensors that a mutating op wrote to, to lie as they are labelled.

    Args:
        func: The ``OpOverload``.
        args: Its arguments, as the caller passed them.
        kwargs: Its keyword arguments.
    """
    for target in leaves(written_values(func, args, kwargs)):
        state = getattr(target, "_spec", None)
        if isinstance(state, GlobalState) and not _is_pending(state):
            payload, runtime = target._local_tensor, get_runtime()
            if runtime.is_payload(payload):
                runtime.annotate_view(payload, state.span_layout)


def _is_pending(state: GlobalState) -> bool:
    return any(placement.is_partial() for placement in state.placements)
