"""Products that XLA might put on the wrong devices, by their labels: they are pinned to them.

Which products XLA gets wrong, and why, see :mod:`xla_dtensor.core.product_order`. The JAX runtime
looks at how a whole program will be cut. Where that cannot be asked before compiling, the labels
are the next best: a product is told to lie as its label says, with the sum done,

    linear_weight_grad   [b, c] x [b, a.c]  ->  [c, a] sum(b)        told [c, a]

so that what is done with it later cannot ask XLA for a cut whose order it loses. On a mesh of three
axes larger than 1 all products are told: how XLA cuts a factor that nobody placed may differ from
its label. On one of two only a product with batch dims is concerned, and only where its sum is cut.

On one of four the factors are told too (:mod:`xla_dtensor.product_factors`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from xla_dtensor.global_state import GlobalState
from xla_dtensor.nested import leaves

__all__ = ["pin_products"]

aten = torch.ops.aten
_BATCHED = frozenset(
    {
        aten.bmm.default,
        aten.baddbmm.default,
        aten.matmul.default,
        aten.einsum.default,
    }
)
_PRODUCTS = _BATCHED | {
    aten.mm.default,
    aten.addmm.default,
    aten.mv.default,
    aten.addmv.default,
    aten.addbmm.default,
    aten.linear.default,
    aten.convolution.default,
    aten.convolution_backward.default,
}
_NAMES = frozenset({"xla_dtensor::linear_weight_grad"})


def pin_products(states: Any, func: Any, found: Sequence[Any]) -> None:
    """Note in the states of a product's outputs whether those are to be told how to lie.

    Args:
        states: A state, or nested lists of states and None.
        func: The ``OpOverload``.
        found: The DTensors among its arguments.
    """
    if func not in _PRODUCTS and func._schema.name not in _NAMES:
        return
    before = {axis for tensor in found for axis in _partial_axes(tensor._spec)}
    for state in leaves([states]):
        if isinstance(state, GlobalState):
            # A tensor on a submesh may be cut along the other axes as well.
            axes = sum(size > 1 for size in state.span_layout.mesh.mesh_shape)
            is_cut_sum = not before.issuperset(_partial_axes(state))
            state.pinned = axes > 2 or (axes == 2 and is_cut_sum and func in _BATCHED)


def _partial_axes(state: GlobalState) -> list[Any]:
    names = state.mesh.value.axis_names
    return [n for n, p in zip(names, state.placements, strict=True) if p.is_partial()]
