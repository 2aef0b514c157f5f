"""The ops of the random programs: what each does, written once for every side.

An op is a function of its tensors and of plain parameters. Plain torch, PyTorch's DTensor and
xla_dtensor run the same lines, so a difference is never one of the programs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

__all__ = ["LOCAL_FUNCTIONS", "OPS", "UNARY"]

# Kept small in value: chains of them stay within what float64 compares well.
UNARY: dict[str, Callable[[Any], Any]] = {
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "neg": torch.neg,
    "abs": torch.abs,
    "gelu": F.gelu,
    "cos": torch.cos,
    "square": lambda a: a.tanh().square(),
    "exp": lambda a: (a.tanh() * 0.5).exp(),
    "rsqrt": lambda a: (a * a + 1.0).rsqrt(),
    "half": lambda a: a * 0.5,
    "shift": lambda a: a + 0.25,
    "clamp": lambda a: a.clamp(-0.5, 0.75),
    "clone": torch.clone,
    "silu": F.silu,
}


def _in_place(tensors: Sequence[Any], name: str) -> Any:
    written, *others = tensors
    written = written.clone()
    return getattr(written, name)(*others)


def _masked(tensors: Sequence[Any], value: float) -> Any:
    return tensors[0].masked_fill(tensors[0] > 0.1, value)


def _layer_norm(tensors: Sequence[Any]) -> Any:
    return F.layer_norm(tensors[0], tuple(tensors[1].shape), tensors[1], tensors[2])


OPS: dict[str, Callable[..., Any]] = {
    **{name: lambda t, f=function: f(t[0]) for name, function in UNARY.items()},
    "add": lambda t: t[0] + t[1],
    "sub": lambda t: t[0] - t[1],
    "mul": lambda t: t[0] * t[1].tanh(),
    "div": lambda t: t[0] / (t[1] * t[1] + 1.0),
    "maximum": lambda t: torch.maximum(t[0], t[1]),
    "where": lambda t: torch.where(t[0] > t[1], t[0], t[1] * 0.5),
    "lerp": lambda t: torch.lerp(t[0], t[1], 0.25),
    "masked_fill": _masked,
    "sum": lambda t, dims, keep: t[0].sum(list(dims), keepdim=keep),
    "mean": lambda t, dims, keep: t[0].mean(list(dims), keepdim=keep),
    "amax": lambda t, dims, keep: t[0].amax(list(dims), keepdim=keep),
    "amin": lambda t, dims, keep: t[0].amin(list(dims), keepdim=keep),
    "max_values": lambda t, dim: t[0].max(dim).values,
    "var": lambda t, dim, keep: t[0].var(dim, keepdim=keep),
    "norm": lambda t, dim: torch.linalg.vector_norm(t[0] + 2.0, dim=dim),
    "logsumexp": lambda t, dim: torch.logsumexp(t[0], dim),
    "cumsum": lambda t, dim: t[0].cumsum(dim) * 0.25,
    "argmax": lambda t, dim: t[0].argmax(dim),
    "mm": lambda t: (t[0] @ t[1]) * 0.25,
    "linear": lambda t: F.linear(t[0], t[1]) * 0.25,
    "linear_bias": lambda t: F.linear(t[0], t[1], t[2]) * 0.25,
    "bmm": lambda t: torch.bmm(t[0], t[1]) * 0.25,
    "einsum": lambda t: torch.einsum("...ij,kj->...ik", t[0], t[1]) * 0.25,
    "transpose": lambda t, a, b: t[0].transpose(a, b),
    "permute": lambda t, order: t[0].permute(order),
    "view": lambda t, shape: t[0].reshape(shape),
    "flatten": lambda t: t[0].flatten(0, 1),
    "unsqueeze": lambda t, dim: t[0].unsqueeze(dim),
    "squeeze": lambda t, dim: t[0].squeeze(dim),
    "expand": lambda t, shape: t[0].expand(shape),
    "split": lambda t, size, dim, which: t[0].split(size, dim)[which],
    "chunk": lambda t, count, dim, which: t[0].chunk(count, dim)[which],
    "narrow": lambda t, dim, start, length: t[0].narrow(dim, start, length),
    "select": lambda t, dim, index: t[0].select(dim, index),
    "slice_step": lambda t: t[0][1::2],
    "flip": lambda t, dim: t[0].flip(dim),
    "cat": lambda t, dim: torch.cat(list(t), dim),
    "stack": lambda t, dim: torch.stack(list(t), dim),
    "softmax": lambda t, dim: t[0].softmax(dim),
    "log_softmax": lambda t, dim: t[0].log_softmax(dim),
    "layer_norm": _layer_norm,
    "embedding": lambda t: F.embedding(t[0], t[1]),
    "in_place": lambda t, name: _in_place(t, name),
    "in_place_scale": lambda t: t[0].clone().mul_(0.5),
    "in_place_zero_row": lambda t: t[0].clone().masked_fill_(t[0] < 0, 0.0),
    "mse": lambda t: F.mse_loss(t[0], t[1]),
    "tril": lambda t: t[0].tril(),
    "dtype": lambda t: t[0].float().double(),
    "zeros_like": lambda t: torch.zeros_like(t[0]) + t[0] * 0.5,
}

# What runs on one device's own tensor, between to_local and from_local.
LOCAL_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "tanh": lambda v: v.tanh(),
    "double": lambda v: v * 2.0,
    "relu": lambda v: (v - 0.1).relu(),
    "in_place": lambda v: v.clone().mul_(0.5).add_(0.125),
    "sum": lambda v, dim: v.sum(dim),
    "mean": lambda v, dim: v.mean(dim),
    "amax": lambda v, dim: v.amax(dim),
    "flip": lambda v, dim: v.flip(dim),
    "softmax": lambda v, dim: v.softmax(dim),
    "transpose": lambda v: v.transpose(0, 1),
}
