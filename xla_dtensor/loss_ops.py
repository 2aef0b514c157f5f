"""What :func:`xla_dtensor.loss_parallel` does: the parts of a cross entropy lie as its logits do.

PyTorch's rules label a log-softmax over a sharded dim Replicate, as they would gather it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from xla_dtensor.runtimes import functional_ops

__all__ = ["state_of_loss_op", "with_state_of_logits"]

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
    return functional_ops.constrain(payload, state.span_layout)
