"""torch's own functions and modules, where importing torch_xla has put others in their place.

torch_xla 2.9 replaces two names of ``torch.nn`` for the whole process once anybody imports it::

    nn.utils.clip_grad_norm_    refuses foreach=True, and reads gradients one by one
    nn.GRU                      fails on a DTensor, on either runtime

torch's own work on both runtimes, so they come back: when a runtime starts, and where a step is
traced, because torch_xla may be imported in between. Whoever wants torch_xla's GRU for its own
tensors finds it in ``torch_xla.experimental.gru``.

`past_functions` gives methods of torch's own for which others stand while a step is traced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules import rnn
from torch.nn.utils import clip_grad

__all__ = ["past_functions", "put_back"]


def put_back() -> None:
    """Give torch its own functions back where torch_xla's are; leave anybody else's alone."""
    if _is_torch_xlas(nn.utils.clip_grad_norm_):
        nn.utils.clip_grad_norm_ = clip_grad.clip_grad_norm_
    if _is_torch_xlas(nn.GRU):
        nn.GRU = rnn.GRU
        # How torch_xla's own class, which others may still hold, learns that nobody replaced it.
        rnn.GRU._orig = None  # pyright: ignore[reportAttributeAccessIssue]


def past_functions(name: str) -> Callable[[torch.Tensor], Any]:
    """Return a method of all tensors, past what stands for it on torch.Tensor meanwhile.

    Under a mode of functions, such as ``with torch.device("cpu")``, torch looks each method up
    there by its name.
    """
    method: Any = getattr(torch._C.TensorBase, name)

    def call(tensor: torch.Tensor) -> Any:
        with torch._C.DisableTorchFunction():
            return method(tensor)

    return call


def _is_torch_xlas(thing: Any) -> bool:
    return thing.__module__.partition(".")[0] == "torch_xla"
