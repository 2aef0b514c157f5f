"""Convolutions whose operands XLA's partitioner may cut in ways that it then computes wrongly.

In torch_xla 2.9's XLA a convolution is silently wrong when its weight is cut along a window dim,
when channels are cut unevenly, and in the gradient of a grouped weight even when only the batch is
cut. Right, and the usual way to train: the batch cut evenly, the weight whole. So that is what a
convolution is told here, whatever its operands were told; the gradient of a grouped weight is
computed whole on every device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mesh_utils import Mesh
from xla_dtensor.core import Layout
from xla_dtensor.runtimes.torch_xla_corrections_host import has_manual
from xla_dtensor.runtimes.torch_xla_corrections_points import annotated, whole
from xla_dtensor.runtimes.torch_xla_sharding import xlac

__all__ = ["convolution", "convolution_backward"]

aten = torch.ops.aten


def convolution(
    x: torch.Tensor, weight: torch.Tensor, *options: Any
) -> Callable[[], torch.Tensor] | None:
    """Return the call of ``aten.convolution`` with the batch cut and the weight whole.

    None in a manual region, where nothing is cut.
    """
    if has_manual(x, weight):
        return None

    def convolve() -> torch.Tensor:
        return _cut(aten.convolution.default(_cut(x), whole(weight), *options))

    return convolve


def convolution_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias_sizes: Sequence[int] | None,
    *options: Any,
) -> Callable[[], Sequence[torch.Tensor | None]] | None:
    """Return the call of ``aten.convolution_backward`` that is right; see the module.

    None in a manual region, where nothing is cut.
    """
    if has_manual(grad, x, weight):
        return None
    *described, groups, mask = options

    def run(place: Callable[..., torch.Tensor], *asked: bool) -> Any:
        return aten.convolution_backward.default(
            place(grad), place(x), whole(weight), bias_sizes, *described, groups, list(asked)
        )

    def backward() -> Sequence[torch.Tensor | None]:
        to_x, to_weight, to_bias = mask
        apart = groups > 1 and to_weight
        by_batch = run(_cut, to_x, to_weight and not apart, to_bias)
        grad_weight = run(whole, False, True, False)[1] if apart else by_batch[1]
        return (
            _cut(by_batch[0]) if to_x else None,
            whole(grad_weight) if to_weight else None,
            by_batch[2] if to_bias else None,
        )

    return backward


def _cut(tensor: torch.Tensor) -> torch.Tensor:
    """Cut dim 0 over as many devices as divide it."""
    num_devices = xlac()._xla_num_global_devices()
    tiles = math.gcd(tensor.shape[0], num_devices)
    if tiles == 1:
        return whole(tensor)
    mesh = Mesh.arange((tiles, num_devices // tiles), ("batch", "rest"))
    layout = Layout.from_partition_spec(("batch",), mesh, tensor_ndim=tensor.ndim)
    return annotated(tensor, layout.op_sharding())
