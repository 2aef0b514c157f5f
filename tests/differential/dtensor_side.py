"""A program on DTensors: PyTorch's own and ours take the same lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import Replicate

from tests.differential.op_table import LOCAL_FUNCTIONS
from tests.differential.programs import placements_of

__all__ = ["DTensorSide"]

KEEPS_SHAPE = ("tanh", "double", "relu", "in_place", "flip", "softmax")


class DTensorSide:
    """Runs a program on DTensors over `mesh`, made by the given two functions."""

    def __init__(
        self, mesh: Any, distribute: Callable[..., Any], from_local: Callable[..., Any]
    ) -> None:
        self.mesh, self.distribute, self.from_local = mesh, distribute, from_local

    def put(self, value: torch.Tensor, tokens: Sequence[str]) -> Any:
        return self.distribute(value, self.mesh, placements_of(tuple(tokens)))

    def replicated(self, tensor: Any) -> Any:
        return tensor.redistribute(placements=[Replicate()] * self.mesh.ndim)

    def redistribute(self, tensor: Any, tokens: Sequence[str]) -> Any:
        return tensor.redistribute(placements=placements_of(tuple(tokens)))

    def full_tensor(self, tensor: Any) -> Any:
        whole = tensor.full_tensor() * 1.0
        return self.from_local(whole, self.mesh, [Replicate()] * self.mesh.ndim)

    def plain_beside(self, tensor: Any) -> Any:
        return tensor * torch.full(tuple(tensor.shape), 0.5, dtype=torch.float64)

    def local(self, tensor: Any, name: str, params: Any, shape: Any) -> Any:
        lying, after, arguments = params
        moved = tensor.redistribute(placements=placements_of(lying))
        # A replicated tensor whose copies are used as different parts has a gradient per device.
        back = [
            "Psum" if a[0] == "P" and t == "R" else t for t, a in zip(lying, after, strict=True)
        ]
        view = moved.to_local(grad_placements=placements_of(tuple(back)))
        result = LOCAL_FUNCTIONS[name](view, *arguments)
        options: dict[str, Any] = {}
        if name in KEEPS_SHAPE:  # only there may the shards be uneven
            stride = torch.empty(shape, device="meta").stride()
            options = {"shape": torch.Size(shape), "stride": stride}
        return self.from_local(result, self.mesh, placements_of(after), **options)

    def partial_matmul(self, a: Any, b: Any, axis: int) -> Any:
        def cut(dim: int) -> tuple[str, ...]:
            return tuple(f"S{dim}" if i == axis else "R" for i in range(self.mesh.ndim))

        product = self.redistribute(a, cut(1)) @ self.redistribute(b, cut(0))
        after = tuple("Psum" if i == axis else "R" for i in range(self.mesh.ndim))
        part = product.to_local() * 0.5
        return self.from_local(part, self.mesh, placements_of(after))

    def loss(self, tensor: Any, kind: str) -> Any:
        loss = (tensor * tensor).mean()
        return loss.full_tensor() if kind == "full" else loss
