"""torch's own functions and modules, where importing torch_xla has put others in their place.

torch_xla 2.9 replaces two names of ``torch.nn`` for the whole process once anybody imports it::

    nn.utils.clip_grad_norm_    refuses foreach=True, and reads gradients one by one
    nn.GRU                      fails on a DTensor, on either runtime

torch's own work on both runtimes, so they come back: when a runtime starts, and where a step is
traced, because torch_xla may be imported in between. Whoever wants torch_xla's GRU for its own
tensors finds it in ``torch_xla.experimental.gru``.

`past_functions` gives methods of torch's own for which others stand while a step is traced.

`make_wrapper` makes a tensor of a class of ours, in inference mode too::

    with torch.inference_mode():
        weight.t()      weight is from before, so its view counts the same writes: it is no tensor
                        of inference mode. torch does so for its own tensors; what a class makes
                        there is one, and torch fails to give it the count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules import rnn
from torch.nn.utils import clip_grad

__all__ = ["make_wrapper", "past_functions", "put_back"]

_make: Any = torch.Tensor._make_wrapper_subclass


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


def make_wrapper(cls: type, shape: Any, **options: Any) -> Any:
    """Return what ``torch.Tensor._make_wrapper_subclass`` does, outside of inference mode.

    Args:
        cls: The class.
        shape: The tensor's shape.
        **options: As torch's function takes them.
    """
    if not torch.is_inference_mode_enabled():
        return _make(cls, shape, **options)
    with torch.inference_mode(False):
        return _make(cls, shape, **options)


def _is_torch_xlas(thing: Any) -> bool:
    return thing.__module__.partition(".")[0] == "torch_xla"
