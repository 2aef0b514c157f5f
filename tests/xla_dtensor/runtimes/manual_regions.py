"""What the tests of manual regions on the JAX runtime share: a region, and each device's values."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from mesh_utils import Mesh
from xla_dtensor.core import Layout, ManualRegion
from xla_dtensor.runtimes import Runtime

ROOT = Mesh.arange((2, 4), ("dp", "tp"))
MESHES = {
    "one axis": Mesh.arange((8,), ("x",)),
    "two axes": ROOT,
    "three axes": Mesh.arange((2, 2, 2), ("a", "b", "c")),
    "permuted": ROOT["tp", "dp"],
    "permuted digits": Mesh(np.arange(8).reshape(2, 2, 2).transpose(2, 0, 1), (4, 2), ("p", "q")),
    "axis of size 1": Mesh.arange((4, 1, 2), ("a", "one", "b")),
}
COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)\S*\("
)


def groups(hlo: str) -> Iterator[list[int]]:
    """Yield the devices of each group, or pair, that communicates in a program."""
    found = 0
    for text in re.findall(r"(?:replica_groups|source_target_pairs)=\{(.*?\})\}", hlo):
        found += 1
        for members in re.findall(r"\{([\d,]+)\}", text):
            yield [int(member) for member in members.split(",")]
    iota = r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?"
    for shape, dims, perm in re.findall(iota, hlo):
        found += 1
        sizes, order = _numbers(dims), _numbers(perm)
        ids = np.arange(np.prod(sizes)).reshape(sizes)
        yield from ids.transpose(order or None).reshape(_numbers(shape)).tolist()
    assert found == len(COLLECTIVE.findall(hlo))


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


class Region:
    """A region on the runtime under test, with NumPy's idea of what each device holds."""

    def __init__(self, runtime: Runtime, mesh: Mesh, axes: Any = None) -> None:
        runtime.root(ROOT)
        self.runtime, self.mesh = runtime, mesh
        self.region = ManualRegion.over(mesh, axes)

    def layout(self, *spec: Any, ndim: int | None = None) -> Layout:
        return Layout.from_partition_spec(spec, self.mesh, tensor_ndim=ndim)

    def enter(self, x: torch.Tensor, *spec: Any) -> Any:
        """Enter with one tile per device along `spec`."""
        layout = self.layout(*spec, ndim=x.ndim)
        payload = self.runtime.put(x, Layout.replicated(self.mesh, x.ndim))
        return self.runtime.enter_manual(payload, layout, self.region)

    def leave(self, manual: Any, *spec: Any) -> torch.Tensor:
        return self.runtime.to_host(self.left(manual, *spec))

    def left(self, manual: Any, *spec: Any) -> Any:
        layout = self.layout(*spec, ndim=manual.ndim)
        return self.runtime.leave_manual(manual, layout, self.region)

    def stacked(self, *tile: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Different values for each device: [devices along the region's axes, *tile]."""
        generator = torch.Generator().manual_seed(0)
        shape = (int(np.prod(self.region.sizes)), *tile)
        values = torch.randint(0, 7, shape, generator=generator)
        return (values % 2 == 0) if dtype == torch.bool else values.to(dtype)

    def scatter(self, values: torch.Tensor) -> Any:
        """Give row i of `values` to device i of the region."""
        return self.run("squeeze.dim", self.enter(values, self.region.axes), 0)

    def gather(self, manual: Any) -> torch.Tensor:
        """Return each device's tensor as one row."""
        return self.leave(self.run("unsqueeze", manual, 0), self.region.axes)

    def run(self, name: str, *args: Any, **kwargs: Any) -> Any:
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        return self.runtime.run_manual_op(op, args, kwargs)

    def collective(self, name: str, manual: Any, axes: Any, **options: Any) -> torch.Tensor:
        result = self.runtime.manual_collective(name, manual, self.region, tuple(axes), **options)
        return self.gather(result)
