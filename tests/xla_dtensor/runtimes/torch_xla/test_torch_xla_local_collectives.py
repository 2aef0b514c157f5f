"""Collectives of local views on torch_xla: values on each device, and the programs."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch

from mesh_utils import Axis, Mesh
from tests.xla_dtensor.runtimes.torch_xla.test_torch_xla_manual_collectives import (
    CASES,
    by_members,
    groups_of_axes,
)
from tests.xla_dtensor.runtimes.torch_xla.torch_xla_locals import (
    Local,
    localized,
    own,
    stack_layout,
    stacked,
)
from tests.xla_dtensor.runtimes.torch_xla.torch_xla_tiles import (
    DTYPES,
    MESH,
    MESHES,
    communication,
    values,
)
from xla_dtensor.core import ManualRegion
from xla_dtensor.errors import DistributeError, UnsupportedOpError
from xla_dtensor.runtimes.base import Runtime

pytest.importorskip("torch_xla")
pytestmark = pytest.mark.only_on("torch_xla")

REGIONS = {
    **{name: ManualRegion.over(MESHES[name]) for name in ("1d", "2d_permuted", "3d_shuffled")},
    "2d": ManualRegion.over(MESH),
    "tp": ManualRegion.over(MESH, ["tp"]),
    "tp_permuted": ManualRegion.over(MESHES["2d_permuted"], ["tp"]),
    "a_c": ManualRegion.over(MESHES["3d_shuffled"], ["a", "c"]),
}


def axes_mesh(region: ManualRegion) -> Mesh:
    """A mesh of the region's axes only, to count members by."""
    return Mesh.arange(region.sizes, region.axes)


def run(
    runtime: Runtime, region: ManualRegion, stack: torch.Tensor, axes: tuple[Axis, ...], case: str
) -> Any:
    name, options, _ = CASES[case]
    n = prod(region.mesh.size(axis) for axis in axes)
    x = own(runtime, stack, region).payload
    return Local(runtime.local_collective(name, x, region, axes, **options(n)), runtime)


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("region_name", ["1d", "2d_permuted", "3d_shuffled", "tp_permuted", "a_c"])
def test_collective_over_axes(runtime: Runtime, region_name: str, case: str) -> None:
    region, cases = REGIONS[region_name], []
    for axes in groups_of_axes(axes_mesh(region)):
        given = values(*region.sizes, 8, 16, dtype=torch.int64)
        stack = runtime.put(given, stack_layout(region, given.ndim))
        found = stacked(run(runtime, region, stack, axes, case), region)
        cases.append((found, by_members(axes_mesh(region), axes, given, CASES[case][2])))
    for found, wanted in cases:
        host = runtime.to_host(found)
        assert host.dtype == wanted.dtype
        assert torch.equal(host, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_collective_of_dtypes(runtime: Runtime, dtype: torch.dtype) -> None:
    region, axes = REGIONS["2d_permuted"], ("tp",)
    given = values(*region.sizes, 8, 16, dtype=dtype)
    stack = runtime.put(given, stack_layout(region, given.ndim))
    names = [case for case in CASES if dtype != torch.bool or not case.startswith("reduce")]
    found = {case: stacked(run(runtime, region, stack, axes, case), region) for case in names}
    for case, result in found.items():
        wanted = by_members(axes_mesh(region), axes, given, CASES[case][2])
        assert torch.equal(runtime.to_host(result), wanted), case


KINDS = {
    "sum": [("all-reduce", 512, 512)],
    "max": [("all-reduce", 512, 512)],
    "all_gather_0": [("all-gather", 512, 2048)],
    "reduce_scatter_0": [("reduce-scatter", 512, 128)],
    "all_to_all_01": [("all-to-all", 512, 512)],
    "shift": [("collective-permute", 512, 512)],
    "partial": [("collective-permute", 512, 512)],
    "nobody": [],
    "index": [],
}


@pytest.mark.parametrize("case", KINDS)
@pytest.mark.parametrize("region_name", ["2d", "tp"])
def test_one_collective_each(runtime: Runtime, region_name: str, case: str) -> None:
    region = REGIONS[region_name]
    given = values(*region.sizes, 8, 16)

    def step(stack: torch.Tensor) -> torch.Tensor:
        return stacked(run(runtime, region, stack, ("tp",), case), region)

    compiled = runtime.compile(step)
    compiled(runtime.put(given, stack_layout(region, given.ndim)))
    found = communication(compiled.hlo())
    assert [(kind, *sizes) for kind, _, *sizes in found] == KINDS[case]
    assert all(axes == ("tp",) for _, axes, *_ in found)


def test_results_stay_local_views(runtime: Runtime) -> None:
    region = REGIONS["2d"]
    given = values(*region.sizes, 4)
    x = localized(runtime, given, region)
    total = runtime.local_collective("all_reduce", x.payload, region, ("dp", "tp"), op="sum")
    runtime.synchronize()
    share = Local(total, runtime) / 8
    share += x
    wanted = given.sum((0, 1)) / 8 + given
    assert torch.equal(runtime.to_host(stacked(share, region)), wanted)


def test_wrong_collectives_are_refused(runtime: Runtime) -> None:
    region = REGIONS["2d"]
    x = localized(runtime, values(*region.sizes, 6), region).payload
    with pytest.raises(UnsupportedOpError, match="name='gossip'"):
        runtime.local_collective("gossip", x, region, ("tp",))
    with pytest.raises(DistributeError, match="no 4 equal blocks"):
        runtime.local_collective("reduce_scatter", x, region, ("tp",), dim=0)
