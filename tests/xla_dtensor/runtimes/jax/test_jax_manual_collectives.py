"""Collectives between the devices of a manual region, against NumPy's idea of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import xla_dtensor as xd
from tests.xla_dtensor.runtimes.manual_regions import MESHES, ROOT, Region
from xla_dtensor.errors import ManualRegionError
from xla_dtensor.report import collectives
from xla_dtensor.runtimes import Runtime

pytestmark = pytest.mark.only_on("jax")


@pytest.fixture(params=list(MESHES))
def whole(request: pytest.FixtureRequest, runtime: Runtime) -> Region:
    return Region(runtime, MESHES[request.param])


@pytest.fixture
def region(runtime: Runtime) -> Region:
    return Region(runtime, ROOT)


def _groups(region: Region, axes: tuple[Any, ...]) -> Iterator[list[int]]:
    """The members of each group, in the order in which they are numbered."""
    sizes, names = region.region.sizes, region.region.axes
    where = [names.index(axis) for axis in axes]
    rest = [i for i in range(len(names)) if i not in where]
    numbers = np.arange(np.prod(sizes)).reshape(sizes).transpose(*rest, *where)
    yield from numbers.reshape(-1, int(np.prod([sizes[i] for i in where]))).tolist()


def _expected(region: Region, axes: tuple[Any, ...], values: torch.Tensor, rule: Any) -> Any:
    """Apply `rule` (a list of the members' tensors to a list of results) to every group."""
    results: list[Any] = [None] * len(values)
    for members in _groups(region, axes):
        for member, result in zip(members, rule([values[m] for m in members]), strict=True):
            results[member] = result
    return torch.stack(results)


def _reduced(op: str) -> Any:
    def rule(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        stacked = torch.stack(tensors)
        if op == "sum":
            return [stacked.sum(0, dtype=stacked.dtype)] * len(tensors)
        wide = stacked if stacked.dtype.is_floating_point else stacked.to(torch.int64)
        return [getattr(wide, f"a{op}")(0).to(stacked.dtype)] * len(tensors)

    return rule


def _exchanged(split_dim: int, concat_dim: int) -> Any:
    def rule(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        blocks = [t.chunk(len(tensors), split_dim) for t in tensors]
        return [torch.cat([b[i] for b in blocks], concat_dim) for i in range(len(tensors))]

    return rule


def _scattered(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return list(torch.stack(tensors).sum(0, dtype=tensors[0].dtype).chunk(len(tensors), 1))


def _moved(pairs: list[tuple[int, int]]) -> Any:
    def rule(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        results = [torch.zeros_like(t) for t in tensors]
        for source, to in pairs:
            results[to] = tensors[source]
        return results

    return rule


def _choices(axes: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    return list(dict.fromkeys([axes, axes[::-1], axes[:1], axes[-1:], (axes[-1], axes[0])][:4]))


@pytest.mark.thorough
@pytest.mark.parametrize("part", [False, True], ids=["whole", "some axes"])
def test_collectives(whole: Region, part: bool) -> None:
    if part:
        whole = Region(whole.runtime, whole.mesh, [whole.region.axes[-1]])
    values = whole.stacked(8, 16)
    manual = whole.scatter(values)
    for axes in _choices(whole.region.axes):
        count = len(next(_groups(whole, axes)))
        pairs = [(i, (i + 1) % count) for i in range(count - 1)]
        cases: list[tuple[str, dict[str, Any], Any]] = [
            ("all_reduce", {"op": "sum"}, _reduced("sum")),
            ("all_gather", {"dim": 1}, lambda ts: [torch.cat(ts, 1)] * len(ts)),
            ("reduce_scatter", {"dim": 1}, _scattered),
            ("all_to_all", {"split_dim": 0, "concat_dim": 1}, _exchanged(0, 1)),
            ("all_to_all", {"split_dim": 1, "concat_dim": 1}, _exchanged(1, 1)),
            ("permute", {"pairs": pairs}, _moved(pairs)),
            ("axis_index", {}, lambda ts: [torch.tensor(i) for i in range(len(ts))]),
        ]
        for name, options, rule in cases:
            found = whole.collective(name, manual, axes, **options)
            expected = _expected(whole, axes, values, rule)
            assert torch.equal(found, expected), (name, axes, options)
            assert found.dtype == expected.dtype


DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
]


@pytest.mark.thorough
@pytest.mark.parametrize("axes", [None, ("tp",)], ids=["whole", "some axes"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_collectives_are_exact_in_every_dtype(
    dtype: torch.dtype, axes: Any, runtime: Runtime
) -> None:
    region = Region(runtime, ROOT, axes)
    values = region.stacked(4, 4, dtype=dtype)
    if dtype == torch.int64:
        values = values + 2**40
    manual = region.scatter(values)
    ops = ("max", "min") if dtype == torch.bool else ("sum", "max", "min")
    for op in ops:
        found = region.collective("all_reduce", manual, ("tp",), op=op)
        assert torch.equal(found, _expected(region, ("tp",), values, _reduced(op))), op
    found = region.collective("all_to_all", manual, ("tp",), split_dim=0, concat_dim=1)
    assert torch.equal(found, _expected(region, ("tp",), values, _exchanged(0, 1)))
    pairs = [(0, 3), (2, 0)]
    found = region.collective("permute", manual, ("tp",), pairs=pairs)
    assert torch.equal(found, _expected(region, ("tp",), values, _moved(pairs)))
    if dtype != torch.bool:
        found = region.collective("reduce_scatter", manual, ("tp",), dim=1)
        assert torch.equal(found, _expected(region, ("tp",), values, _scattered))


def test_a_collective_becomes_one_of_xla_s(region: Region) -> None:
    def step(x: Any) -> Any:
        manual = region.runtime.enter_manual(
            x._local_tensor, region.layout("dp", "tp"), region.region
        )
        summed: Any = region.runtime.manual_collective(
            "all_reduce", manual, region.region, ("tp",), op="sum"
        )
        return region.left(summed, "dp", None)

    mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
    x = torch.arange(32.0).reshape(4, 8)
    compiled: Any = xd.compile(step)
    found = compiled(xd.distribute_tensor(x, mesh, ("dp", "tp"))).host()
    assert torch.equal(found, x.reshape(4, 4, 2).sum(1))
    (collective,) = collectives(compiled.hlo())
    assert collective.kind == "all-reduce"
    assert collective.replica_groups is not None
    assert collective.replica_groups.groups == ((0, 1, 2, 3), (4, 5, 6, 7))


def test_a_collective_refuses_blocks_that_differ(region: Region) -> None:
    manual = region.scatter(region.stacked(6, 3))
    with pytest.raises(ManualRegionError, match=r"a group of 4 devices .* shape=\(6, 3\) with dim"):
        region.collective("reduce_scatter", manual, ("tp",), dim=0)
    with pytest.raises(ManualRegionError, match="all_to_all over a group of 8"):
        region.collective("all_to_all", manual, ("dp", "tp"), split_dim=1, concat_dim=0)
    payload: Any = region.runtime.put(torch.ones(4), region.layout(None))
    with pytest.raises(ManualRegionError, match="not in the manual region"):
        region.collective("all_gather", payload, ("dp",), dim=0)
