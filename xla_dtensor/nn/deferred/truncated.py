"""``nn.init.trunc_normal_`` on a DTensor, where torch draws until all values are within bounds.

Newer versions of torch do that with masks over the whole tensor and ``new_tensor``, which a DTensor
does not have. Older ones draw once and use the inverse of the distribution function; that form has
one op after the other in place, and is what the devices do with any version.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import nn

from xla_dtensor.dtensor.dtensor import DTensor

__all__ = ["truncated_normals"]

_NAME = "_no_grad_trunc_normal_"


@contextlib.contextmanager
def truncated_normals(rng: Literal["device", "torch"]) -> Iterator[None]:
    """Let ``nn.init.trunc_normal_`` take DTensors, for a while.

    Args:
        rng: "torch": its values are torch's, made on the host, whole. "device": drawn once.
    """
    original: Any = getattr(nn.init, _NAME)
    if "new_tensor" not in original.__code__.co_names:
        yield
        return

    def truncated(
        tensor: Any, mean: float, std: float, a: float, b: float, generator: Any = None
    ) -> Any:
        if not isinstance(tensor, DTensor):
            return original(tensor, mean, std, a, b, generator)
        with torch.no_grad():
            if rng == "device":
                return _by_inverse(tensor, mean, std, a, b, generator)
            whole = torch.empty(tensor.shape, dtype=tensor.dtype)
            return tensor.copy_(original(whole, mean, std, a, b, generator))

    setattr(nn.init, _NAME, truncated)
    try:
        yield
    finally:
        setattr(nn.init, _NAME, original)


def _by_inverse(
    tensor: torch.Tensor, mean: float, std: float, a: float, b: float, generator: Any
) -> torch.Tensor:
    low, high = (math.erf((bound - mean) / std / math.sqrt(2.0)) for bound in (a, b))
    tensor.uniform_(low, high, generator=generator)
    return tensor.erfinv_().mul_(std * math.sqrt(2.0)).add_(mean).clamp_(min=a, max=b)
