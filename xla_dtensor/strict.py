"""Strict placements: what an op returns, or has written to, is told to lie as its label says.

See :func:`xla_dtensor.strict_placements`. New values are constrained. Views have to stay views, so
that writes through them reach their base, and are told in place; a graph of torch.compile has no
such op, and leaves them to XLA.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from xla_dtensor.global_state import GlobalState
from xla_dtensor.nested import leaves
from xla_dtensor.runtimes import functional_ops
from xla_dtensor.runtimes.registry import get_runtime
from xla_dtensor.written import written_values

__all__ = ["constrain_output", "constrain_written"]


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
        return functional_ops.constrain(payload, state.span_layout)
    if not functional_ops.is_traced(payload):
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
