"""torch's own functions and modules, where importing torch_xla has put others in their place.

torch_xla 2.9 replaces two names of ``torch.nn`` for the whole process once anybody imports it::

    nn.utils.clip_grad_norm_    refuses foreach=True, and reads gradients one by one
    nn.GRU                      fails on a DTensor, on either runtime

torch's own work on both runtimes, so they come back: when a runtime starts, and where a step is
traced, because torch_xla may be imported in between. Whoever wants torch_xla's GRU for its own
tensors finds it in ``torch_xla.experimental.gru``.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules import rnn
from torch.nn.utils import clip_grad

__all__ = ["put_back"]


def put_back() -> None:
    """Give torch its own functions back where torch_xla's are; leave anybody else's alone."""
    if _is_torch_xlas(nn.utils.clip_grad_norm_):
        nn.utils.clip_grad_norm_ = clip_grad.clip_grad_norm_
    if _is_torch_xlas(nn.GRU):
        nn.GRU = rnn.GRU
        # How torch_xla's own class, which others may still hold, learns that nobody replaced it.
        rnn.GRU._orig = None  # pyright: ignore[reportAttributeAccessIssue]


def _is_torch_xlas(thing: Any) -> bool:
    return thing.__module__.partition(".")[0] == "torch_xla"
