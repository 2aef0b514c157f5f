"""Gradients that PyTorch finds by comparing, of what a compiled step computes in many ways."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard

import xla_dtensor as xd

__all__ = ["OPERANDS", "OPS", "wrong_gradients"]

INFINITY = float("inf")
OPERANDS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "fma": lambda a, b, c: a * b + c * 0.3,
    "tanh": lambda a, b, c: torch.tanh(a) * b - c,
    "softmax": lambda a, b, c: torch.softmax(a * b + c, -1) * b + c,
    "layer_norm": lambda a, b, c: F.layer_norm(a, a.shape[-1:]) * b + c,
    "matmul": lambda a, b, c: (a @ b.mT) @ c + a,
    "addcmul": lambda a, b, c: torch.addcmul(a, b, c, value=0.7) * c,
}
OPS: dict[str, Callable[[Any], Any]] = {
    "amax of rows": lambda x: x.amax(1),
    "less amax": lambda x: x - x.amax(1, keepdim=True),
    "max": torch.max,
    "median": torch.median,
    "aminmax": lambda x: torch.aminmax(x, dim=1)[1] - torch.aminmax(x, dim=0)[0],
    "norm of columns": lambda x: torch.linalg.vector_norm(x, INFINITY, dim=0),
    "norm": lambda x: torch.linalg.vector_norm(x, INFINITY),
    "cdist": lambda x: torch.cdist(x, x.flip(0) * 1.1, p=INFINITY),
    "scatter_reduce": lambda x: x.new_zeros(x.shape).scatter_reduce(
        1, (x.detach() > 0).long(), x, "amin", include_self=False
    ),
}


def wrong_gradients(cases: Sequence[tuple[str, str]]) -> list[tuple[str, str, str, float]]:
    """Return the cases whose gradient is off, each with the placement and its relative error.

    Args:
        cases: Names of an operand and of an op.
    """
    mesh = xd.init_device_mesh("xla", (8,))
    wrong: list[tuple[str, str, str, float]] = []
    for operand, op in cases:

        def gradient(a: Any, b: Any, c: Any, w: Any, operand: str = operand, op: str = op) -> Any:
            leaf = a.detach().requires_grad_()
            x = OPERANDS[operand](leaf, b, c)
            return torch.autograd.grad((OPS[op](x) ** 2).sum() + (x * w).sum(), leaf)[0]

        plain: Callable[..., Any] = gradient
        step = xd.compile(gradient)
        for seed, placement in enumerate([Replicate(), Shard(0), Shard(1)]):
            generator = torch.Generator().manual_seed(seed)
            inputs = torch.randn(4, 16, 16, generator=generator)
            on_mesh = [xd.distribute_tensor(each, mesh, [placement]) for each in inputs]
            expected = plain(*inputs.double())
            error = (step(*on_mesh).full_tensor().cpu().double() - expected).abs().max()
            relative = (error / expected.abs().max()).item()
            if not relative <= 1e-3:
                wrong.append((operand, op, str(placement), relative))
    return wrong
