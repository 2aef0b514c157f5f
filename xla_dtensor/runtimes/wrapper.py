"""make_wrapper: a tensor of one of our classes, which is also a view in inference mode.

with torch.inference_mode():
weight.t()      weight is from before, so its view counts the same writes: it is no tensor
of inference mode. torch does so for its own tensors; what a class makes
there is one, and torch fails to give it the count.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["make_wrapper"]

_make: Any = torch.Tensor._make_wrapper_subclass


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
