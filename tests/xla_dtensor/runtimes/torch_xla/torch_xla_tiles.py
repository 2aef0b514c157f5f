"""What the tests of manual regions on torch_xla share: meshes, and values per device."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map

from mesh_utils import Mesh
from xla_dtensor.core import Layout, ManualRegion
from xla_dtensor.report import collectives
from xla_dtensor.runtimes.base import Runtime

__all__ = [
    "DTYPES",
    "MESH",
    "MESHES",
    "Tiles",
    "aten",
    "communication",
    "each",
    "layout",
    "on_each",
    "op",
    "region",
    "spread",
    "stacked",
    "values",
]

aten = torch.ops.aten
MESH = Mesh.arange((2, 4), ("dp", "tp"))
MESHES = {
    "1d": Mesh.arange((8,), ("x",)),
    "2d": MESH,
    "3d": Mesh.arange((2, 2, 2), ("a", "b", "c")),
    "2d_permuted": Mesh([7, 5, 3, 1, 6, 4, 2, 0], (2, 4), ("dp", "tp")),
    "3d_shuffled": Mesh([0, 3, 5, 6, 1, 2, 4, 7], (2, 2, 2), ("a", "b", "c")),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.int64, torch.bool]


def layout(mesh: Mesh, *entries: Any) -> Layout:
    return Layout.from_partition_spec(entries, mesh)


def region(mesh: Mesh) -> ManualRegion:
    return ManualRegion.over(mesh)


def each(mesh: Mesh, ndim: int) -> Layout:
    """Of a tensor whose first dim counts the devices, in the mesh's order."""
    return layout(mesh, tuple(mesh.axis_names), *[None] * ndim)


def op(runtime: Runtime, func: Any, *args: Any, **kwargs: Any) -> Any:
    return runtime.run_manual_op(func, args, kwargs)


def spread(runtime: Runtime, mesh: Mesh, values: torch.Tensor) -> torch.Tensor:
    """A manual payload from its value on each device: `values` is [*mesh shape, *tile]."""
    tile = values.shape[mesh.ndim :]
    whole = runtime.put(values.flatten(0, mesh.ndim - 1), each(mesh, len(tile)))
    manual = runtime.enter_manual(whole, each(mesh, len(tile)), region(mesh))
    return op(runtime, aten.view.default, manual, list(tile))


def stacked(runtime: Runtime, mesh: Mesh, manual: torch.Tensor) -> torch.Tensor:
    """The inverse of `spread`, still on the devices; the first dim counts them."""
    manual = op(runtime, aten.unsqueeze.default, manual, 0)
    return runtime.leave_manual(manual, each(mesh, manual.ndim - 1), region(mesh))


def on_each(runtime: Runtime, mesh: Mesh, manual: torch.Tensor) -> torch.Tensor:
    host = runtime.to_host(stacked(runtime, mesh, manual))
    return host.reshape(*mesh.mesh_shape, *host.shape[1:])


def values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Numbers whose sums over 8 devices are exact in `dtype`."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) > 0.5
    bound = {torch.int64: 2**59, torch.int32: 2**27}.get(dtype, 16)
    drawn = torch.randint(-bound, bound, shape, generator=generator).to(dtype)
    return drawn * (1 + 2**-40) if dtype == torch.float64 else drawn


def communication(hlo: str) -> list[tuple[str, Any, int, int]]:
    found = collectives(hlo, mesh=MESH)
    return [(each.kind, each.axes, each.operand_bytes, each.result_bytes) for each in found]


class Tiles(torch.Tensor):
    """A manual payload with every op run on it, and autograd above: what a user layer would be."""

    payload: torch.Tensor
    runtime: Runtime

    @staticmethod
    def __new__(cls, payload: torch.Tensor, runtime: Runtime) -> Tiles:
        made = torch.Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls, payload.shape, dtype=payload.dtype, device=payload.device
        )
        made.payload, made.runtime = payload, runtime
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        flat = [value for value in args if isinstance(value, Tiles)]
        listed = [value for value in args if isinstance(value, list | tuple)]
        flat += [value for values in listed for value in values if isinstance(value, Tiles)]
        runtime = flat[0].runtime

        def inner(value: Any) -> Any:
            return value.payload if isinstance(value, Tiles) else value

        result = runtime.run_manual_op(func, tree_map(inner, args), tree_map(inner, kwargs or {}))
        if func._schema.is_mutable:
            return args[0]
        wrap = lambda value: Tiles(value, runtime) if isinstance(value, torch.Tensor) else value  # noqa: E731
        return tree_map(wrap, result)
