"""A plain tensor beside LocalViews: the same on every device, its gradient gathered from all.

``F.linear(view, weight)`` with a plain `weight` uses it on every device. What each device sends
back is its own part of the gradient: along mesh axes where these parts differ they are summed, as
they are parts of one derivative; along the others all devices hold the same gradient already.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from xla_dtensor.core import Layout, ManualRegion
from xla_dtensor.local_link import Memory
from xla_dtensor.runtimes.functional_local import (
    enter_everywhere,
    gather_everywhere,
    operand_everywhere,
)
from xla_dtensor.runtimes.functional_ops import is_traced
from xla_dtensor.runtimes.registry import get_runtime
from xla_dtensor.runtimes.whole_autograd import LinearResult, refuse_second

__all__ = ["as_gradient", "same_on_all", "spread_payload"]


def spread_payload(payload: torch.Tensor, region: ManualRegion) -> torch.Tensor:
    """Return a local payload with a copy of `payload` on each device."""
    if is_traced(payload):
        return operand_everywhere(payload, region)
    return get_runtime().enter_local(payload, whole(region, payload.ndim), region)


@lru_cache(maxsize=4096)
def whole(region: ManualRegion, ndim: int) -> Layout:
    """Return the layout of a tensor that the region's axes do not cut."""
    open_dims = frozenset() if region.is_whole else frozenset(range(ndim))
    return Layout(region.mesh, ((),) * ndim, (), open_dims)


def as_gradient(grad: Any, output: Any) -> Any:
    """Return a plain gradient given for a LocalView as a view; anything else as it is.

    It differs where `output` does: each device's is the gradient of its own value.
    """
    plain = isinstance(grad, torch.Tensor) and not hasattr(grad, "_local_tensor")
    if not plain or getattr(grad, "_is_per_device", False) or not hasattr(output, "_varying"):
        return grad
    view: Any = same_on_all(grad, output.region)
    return view._labelled(output._varying)


def gathered(grad: Any, on_host: bool) -> torch.Tensor:
    """Return the gradient of a plain tensor of which each device had a copy.

    Args:
        grad: A LocalView: what each device sends back.
        on_host: Whether the tensor is on the host.
    """
    region, runtime = grad.region, get_runtime()
    total = _whole_gradient(grad)
    payload = runtime.leave_local(total._payload, whole(region, grad.ndim), region)
    return runtime.to_host(payload) if on_host else runtime.to_plain(payload)


def _whole_gradient(grad: Any) -> Any:
    from xla_dtensor.collectives import psum

    over = grad._varies_over(grad.region.axes)
    return psum(grad, over) if over else grad


def same_on_all(tensor: torch.Tensor, region: ManualRegion) -> torch.Tensor:
    """Return a plain tensor as a LocalView that differs nowhere, differentiably.

    Args:
        tensor: A CPU tensor or a plain tensor of the runtime.
        region: The region of the view.
    """
    return _SameOnAll.apply(tensor, region)  # pyright: ignore[reportReturnType]


class _SameOnAll(LinearResult):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, region: ManualRegion) -> Any:
        from xla_dtensor.local_view import LocalView

        runtime = get_runtime()
        ctx.inputs = [tensor]
        if is_traced(tensor):
            ctx.on_host, ctx.region = None, region
            ctx.save_for_backward(tensor)
            memory = Memory(frozenset(), stands_for_plain=True)
            return LocalView(enter_everywhere(tensor, region), region, memory=memory)
        ctx.on_host = not runtime.is_payload(tensor)
        payload = tensor.detach()
        if ctx.on_host:
            payload = runtime.put(payload, Layout.replicated(region.mesh, tensor.ndim))
        memory = Memory(frozenset(), stands_for_plain=True)
        return LocalView(spread_payload(payload, region), region, memory=memory)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        if ctx.on_host is None:
            whole, (like,) = _whole_gradient(grad), ctx.saved_tensors
            found = gather_everywhere(whole._payload, like, ctx.region)
        else:
            found = gathered(grad, ctx.on_host)
        return (*refuse_second("a plain tensor beside local tensors", ctx.inputs, found), None)
