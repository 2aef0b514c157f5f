"""A program in plain torch: one tensor for the whole value, no mesh.

Only what one device does with its own part needs more: the part is cut out by torch.chunk, axis by
axis, and the results are put together as the placements say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.differential.op_table import LOCAL_FUNCTIONS

__all__ = ["PlainTorch", "cut"]

REDUCTIONS: dict[str, Callable[[Any], Any]] = {
    "Psum": lambda parts: torch.stack(parts).sum(0),
    "Pavg": lambda parts: torch.stack(parts).mean(0),
    "Pmax": lambda parts: torch.stack(parts).amax(0),
}


def cut(value: Any, token: str, size: int) -> list[Any]:
    """The parts of a tensor along one mesh axis, empty ones too."""
    if not token.startswith("S"):
        return [value] * size
    dim = int(token[1:])
    parts = list(torch.chunk(value, size, dim)) if value.shape[dim] else []
    return parts + [value.narrow(dim, 0, 0)] * (size - len(parts))


def on_each_device(
    function: Callable[[Any], Any],
    value: Any,
    mesh_shape: Sequence[int],
    lying: Sequence[str],
    after: Sequence[str],
) -> Any:
    """Run a function on each device's part and put the results together."""
    if not mesh_shape:
        return function(value)
    results = [
        on_each_device(function, part, mesh_shape[1:], lying[1:], after[1:])
        for part in cut(value, lying[0], mesh_shape[0])
    ]
    if after[0] == "R":
        return results[0]
    if after[0].startswith("S"):
        return torch.cat(results, int(after[0][1:]))
    return REDUCTIONS[after[0]](results)


class PlainTorch:
    """Runs a program on whole values."""

    def __init__(self, mesh_shape: tuple[int, ...]) -> None:
        self.mesh_shape = mesh_shape

    def put(self, value: torch.Tensor, tokens: Sequence[str]) -> Any:
        return value.clone()

    def replicated(self, tensor: Any) -> Any:
        return tensor

    def redistribute(self, tensor: Any, tokens: Sequence[str]) -> Any:
        return tensor * 1.0

    def full_tensor(self, tensor: Any) -> Any:
        return tensor * 1.0

    def plain_beside(self, tensor: Any) -> Any:
        return tensor * torch.full(tuple(tensor.shape), 0.5, dtype=torch.float64)

    def local(self, tensor: Any, name: str, params: Any, shape: Any) -> Any:
        lying, after, arguments = params

        def function(part: Any) -> Any:
            return LOCAL_FUNCTIONS[name](part, *arguments)

        return on_each_device(function, tensor, self.mesh_shape, lying, after)

    def partial_matmul(self, a: Any, b: Any, axis: int) -> Any:
        return (a @ b) * 0.5

    def loss(self, tensor: Any, kind: str) -> Any:
        return (tensor * tensor).mean()
