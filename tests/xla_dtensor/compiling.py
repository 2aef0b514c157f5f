"""What the tests of torch.compile share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo

import xla_dtensor as xd

__all__ = ["Counting", "compiled", "lies_as", "put"]


class Counting:
    """A back end of torch.compile that keeps the graphs it is given."""

    def __init__(self, backend: str = "aot_eager") -> None:
        self.backend = backend
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.graphs.append(graph)
        return torch._dynamo.lookup_backend(self.backend)(graph, inputs)

    @property
    def count(self) -> int:
        return len(self.graphs)


def compiled(function: Callable[..., Any], backend: Any = "aot_eager") -> Callable[..., Any]:
    return torch.compile(function, backend=backend, fullgraph=True)


def put(mesh: xd.DeviceMesh, values: torch.Tensor, *placements: Any) -> Any:
    return xd.distribute_tensor(values, mesh, list(placements))


def lies_as(found: Any, expected: Any) -> bool:
    return (
        found.placements == expected.placements
        and [type(p) for p in found.placements] == [type(p) for p in expected.placements]
        and found.device_mesh == expected.device_mesh
        and found.xla_sharding() == expected.xla_sharding()
    )
