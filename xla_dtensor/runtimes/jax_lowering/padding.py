"""The backward of padding with an image's own elements."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import torch

from xla_dtensor.runtimes.jax_lowering.table import lower
from xla_dtensor.runtimes.jax_lowering.taps import Taps, apply_taps

__all__: list[str] = []

aten = torch.ops.aten


@lower(
    aten.replication_pad1d_backward.default,
    aten.replication_pad2d_backward.default,
    aten.replication_pad3d_backward.default,
)
def _replication_backward(grad: Any, x: Any, padding: Any) -> Any:
    wide = grad.astype(jnp.promote_types(grad.dtype, jnp.float32))
    for last, before in enumerate(padding[::2]):
        dim = x.ndim - 1 - last
        places = np.arange(grad.shape[dim]) - before
        indices = np.clip(places, 0, x.shape[dim] - 1)[:, None]
        taps = Taps(indices, np.ones(indices.shape), x.shape[dim])
        wide = apply_taps(wide, dim, taps.transposed())
    return wide.astype(grad.dtype)
