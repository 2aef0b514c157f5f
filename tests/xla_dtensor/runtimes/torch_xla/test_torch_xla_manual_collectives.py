"""Collectives of manual regions on torch_xla: values on each device, and the programs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, permutations
from math import prod
from typing import Any

import pytest
import torch

from mesh_utils import Axis, Mesh
from tests.xla_dtensor.runtimes.torch_xla.torch_xla_tiles import (
    DTYPES,
    MESH,
    MESHES,
    aten,
    communication,
    each,
    layout,
    on_each,
    op,
    region,
    spread,
    stacked,
    values,
)
from xla_dtensor.core import Layout
from xla_dtensor.runtimes.base import Runtime

pytest.importorskip("torch_xla")
pytestmark = pytest.mark.only_on("torch_xla")


@pytest.fixture(params=MESHES)
def any_mesh(request: pytest.FixtureRequest) -> Mesh:
    return MESHES[request.param]


def groups_of_axes(mesh: Mesh) -> list[tuple[Axis, ...]]:
    counts = range(1, min(mesh.ndim, 2) + 1)
    some = chain.from_iterable(permutations(mesh.axis_names, count) for count in counts)
    return list(dict.fromkeys([*some, tuple(mesh.axis_names)]))


def by_members(
    mesh: Mesh, axes: tuple[Axis, ...], given: torch.Tensor, work: Callable[..., list[torch.Tensor]]
) -> torch.Tensor:
    """Work on the list of the members' tensors in each group; [*mesh shape, *tile] in and out."""
    along = [mesh.axis_index(axis) for axis in axes]
    order = [place for place in range(mesh.ndim) if place not in along] + along
    n, tile = prod(mesh.mesh_shape[place] for place in along), given.shape[mesh.ndim :]
    tiles = range(mesh.ndim, given.ndim)
    groups = given.permute(*order, *tiles).reshape(-1, n, *tile)
    worked = torch.stack([torch.stack(work(list(group))) for group in groups])
    worked = worked.reshape(*[mesh.mesh_shape[place] for place in order], *worked.shape[2:])
    return worked.permute(
        *[order.index(p) for p in range(mesh.ndim)], *range(mesh.ndim, worked.ndim)
    )


def reduced(tensors: list[torch.Tensor], name: str) -> torch.Tensor:
    together = torch.stack(tensors)
    if together.dtype == torch.bool:
        return together.all(0) if name == "min" else together.any(0)
    found = {"sum": lambda x: x.sum(0), "max": lambda x: x.amax(0), "min": lambda x: x.amin(0)}
    return found[name](together).to(together.dtype)


def shift(n: int) -> list[tuple[int, int]]:
    return [(member, (member + 1) % n) for member in range(n)]


def partial_pairs(n: int) -> list[tuple[int, int]]:
    """Member 0 receives nothing, the last one sends nothing."""
    return [(member, member + 1) for member in range(n - 1)]


def permuted(x: list[torch.Tensor], pairs: list[tuple[int, int]]) -> list[torch.Tensor]:
    source = {to: of for of, to in pairs}
    return [x[source[i]] if i in source else torch.zeros_like(x[i]) for i in range(len(x))]


def exchanged(x: list[torch.Tensor], split: int, concat: int) -> list[torch.Tensor]:
    return [torch.cat([each.chunk(len(x), split)[i] for each in x], concat) for i in range(len(x))]


def scattered(x: list[torch.Tensor], dim: int) -> list[torch.Tensor]:
    return list(reduced(x, "sum").chunk(len(x), dim))


Case = tuple[str, Callable[[int], dict[str, Any]], Callable[..., list[torch.Tensor]]]
CASES: dict[str, Case] = {
    "sum": ("all_reduce", lambda n: {"op": "sum"}, lambda x: [reduced(x, "sum")] * len(x)),
    "max": ("all_reduce", lambda n: {"op": "max"}, lambda x: [reduced(x, "max")] * len(x)),
    "min": ("all_reduce", lambda n: {"op": "min"}, lambda x: [reduced(x, "min")] * len(x)),
    "all_gather_0": ("all_gather", lambda n: {"dim": 0}, lambda x: [torch.cat(x, 0)] * len(x)),
    "all_gather_1": ("all_gather", lambda n: {"dim": -1}, lambda x: [torch.cat(x, 1)] * len(x)),
    "reduce_scatter_0": ("reduce_scatter", lambda n: {"dim": 0}, lambda x: scattered(x, 0)),
    "reduce_scatter_1": ("reduce_scatter", lambda n: {"dim": -1}, lambda x: scattered(x, 1)),
    **{
        f"all_to_all_{split}{concat}": (
            "all_to_all",
            lambda n, s=split, c=concat: {"split_dim": s, "concat_dim": c},
            lambda x, s=split, c=concat: exchanged(x, s, c),
        )
        for split, concat in ((0, 0), (0, 1), (1, 0), (1, 1))
    },
    "shift": ("permute", lambda n: {"pairs": shift(n)}, lambda x: permuted(x, shift(len(x)))),
    "partial": (
        "permute",
        lambda n: {"pairs": partial_pairs(n)},
        lambda x: permuted(x, partial_pairs(len(x))),
    ),
    "nobody": ("permute", lambda n: {"pairs": []}, lambda x: permuted(x, [])),
    "one": ("permute", lambda n: {"pairs": [(n - 1, 0)]}, lambda x: permuted(x, [(len(x) - 1, 0)])),
    "index": (
        "axis_index",
        lambda n: {},
        lambda x: [torch.tensor(member) for member in range(len(x))],
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
def test_collective_over_axes(runtime: Runtime, any_mesh: Mesh, case: str) -> None:
    name, options, expected = CASES[case]
    found, wanted = [], []
    for axes in groups_of_axes(any_mesh):
        n = any_mesh.groups(axes).shape[1]
        for dtype in (torch.float32, torch.int64):
            given = values(*any_mesh.mesh_shape, 8, 16, dtype=dtype)
            manual = spread(runtime, any_mesh, given)
            result = runtime.manual_collective(name, manual, region(any_mesh), axes, **options(n))
            assert runtime.is_payload(result)
            found.append(stacked(runtime, any_mesh, result))
            wanted.append(by_members(any_mesh, axes, given, expected))
    for got, want in zip(found, wanted, strict=True):
        host = runtime.to_host(got)
        assert host.dtype == want.dtype
        assert torch.equal(host, want.flatten(0, any_mesh.ndim - 1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mesh_name", ["2d", "2d_permuted"])
def test_collective_of_dtypes(runtime: Runtime, mesh_name: str, dtype: torch.dtype) -> None:
    mesh, found, wanted = MESHES[mesh_name], [], []
    for axes in (("tp",), ("tp", "dp")):
        n = mesh.groups(axes).shape[1]
        given = values(2, 4, 8, 8, dtype=dtype)
        for name, options, expected in CASES.values():
            manual = spread(runtime, mesh, given)
            result = runtime.manual_collective(name, manual, region(mesh), axes, **options(n))
            found.append(stacked(runtime, mesh, result))
            wanted.append(by_members(mesh, axes, given, expected))
    for got, want, case in zip(found, wanted, [*CASES, *CASES], strict=True):
        host = runtime.to_host(got)
        assert host.dtype == want.dtype, case
        assert torch.equal(host, want.flatten(0, 1)), case


def test_collectives_of_small_tensors(runtime: Runtime) -> None:
    def run(name: str, given: torch.Tensor, axes: tuple[str, ...], **options: Any) -> torch.Tensor:
        manual = spread(runtime, MESH, given)
        result = runtime.manual_collective(name, manual, region(MESH), axes, **options)
        return on_each(runtime, MESH, result)

    scalars, empty = values(2, 4), values(2, 4, 0, 4)
    assert torch.equal(
        run("all_reduce", scalars, ("tp",), op="sum"), scalars.sum(1, True).expand(2, 4)
    )
    assert torch.equal(run("permute", scalars, ("tp",), pairs=shift(4)), scalars.roll(1, 1))
    assert run("all_reduce", empty, ("tp",), op="max").shape == (2, 4, 0, 4)
    assert run("all_gather", empty, ("tp",), dim=1).shape == (2, 4, 0, 16)
    assert run("reduce_scatter", empty, ("tp",), dim=1).shape == (2, 4, 0, 1)
    assert run("all_to_all", empty, ("tp",), split_dim=1, concat_dim=0).shape == (2, 4, 0, 1)
    assert run("permute", empty, ("tp",), pairs=shift(4)).shape == (2, 4, 0, 4)
    five = values(2, 4, 2, 1, 4, 3, 2)
    swapped = run("all_to_all", five, ("dp",), split_dim=4, concat_dim=0)
    assert torch.equal(swapped, by_members(MESH, ("dp",), five, lambda x: exchanged(x, 4, 0)))


def test_collectives_over_one_device(runtime: Runtime) -> None:
    mesh = Mesh.arange((8, 1), ("x", "one"))
    given = values(8, 1, 4, 4)
    for case, (name, options, _) in CASES.items():
        manual = spread(runtime, mesh, given)
        result = runtime.manual_collective(name, manual, region(mesh), ("one",), **options(1))
        want = torch.zeros(8, 1) if case == "index" else given
        if case in ("partial", "nobody"):
            want = torch.zeros_like(given)
        assert torch.equal(on_each(runtime, mesh, result).float(), want), case


def test_collective_sees_writes_through_views(runtime: Runtime) -> None:
    given, found = values(2, 4, 4, 4), {}
    manual = spread(runtime, MESH, given)
    op(runtime, aten.add_.Tensor, op(runtime, aten.select.int, manual, 0, 1), 5)
    given[:, :, 1] += 5
    for case in ("sum", "all_gather_1", "reduce_scatter_0", "all_to_all_01", "shift"):
        name, options, _ = CASES[case]
        result = runtime.manual_collective(name, manual, region(MESH), ("tp",), **options(4))
        found[case] = stacked(runtime, MESH, result)
    for case, got in found.items():
        want = by_members(MESH, ("tp",), given, CASES[case][2])
        assert torch.equal(runtime.to_host(got), want.flatten(0, 1)), case


# ---------------------------------------------------------------------- programs


def program(runtime: Runtime, work: Callable[[torch.Tensor], torch.Tensor], source: Layout) -> str:
    """The program of entering, some work, and leaving with the devices stacked."""

    def step(x: torch.Tensor) -> torch.Tensor:
        return stacked(runtime, MESH, work(runtime.enter_manual(x, source, region(MESH))))

    compiled = runtime.compile(step)
    compiled(runtime.put(values(32, 8), source))
    return compiled.hlo()


@pytest.mark.parametrize(
    ("case", "axes", "kind", "bytes_in", "bytes_out"),
    [
        ("sum", ("tp",), "all-reduce", 128, 128),
        ("max", ("dp",), "all-reduce", 128, 128),
        ("all_gather_1", ("tp",), "all-gather", 128, 512),
        ("all_gather_0", ("dp",), "all-gather", 128, 256),
        ("reduce_scatter_0", ("tp",), "reduce-scatter", 128, 32),
        ("reduce_scatter_0", ("dp", "tp"), "reduce-scatter", 128, 16),
        ("all_to_all_01", ("tp",), "all-to-all", 128, 128),
        ("all_to_all_11", ("dp",), "all-to-all", 128, 128),
        ("all_to_all_00", ("dp", "tp"), "all-to-all", 128, 128),
        ("shift", ("tp",), "collective-permute", 128, 128),
        ("partial", ("dp",), "collective-permute", 128, 128),
        ("shift", ("dp", "tp"), "collective-permute", 128, 128),
    ],
)
def test_one_collective_in_the_program(
    runtime: Runtime, case: str, axes: tuple[str, ...], kind: str, bytes_in: int, bytes_out: int
) -> None:
    name, options, _ = CASES[case]
    n = MESH.groups(axes).shape[1]

    def work(x: torch.Tensor) -> torch.Tensor:
        x = op(runtime, aten.view.default, x, [8, 4])  # 128 bytes on each device
        return runtime.manual_collective(name, x, region(MESH), axes, **options(n))

    hlo = program(runtime, work, layout(MESH, ("dp", "tp"), None))
    assert communication(hlo) == [(kind, axes, bytes_in, bytes_out)]


def test_border_costs_nothing(runtime: Runtime) -> None:
    for entries in (("dp", "tp"), ("tp", None), (None, ("tp", "dp")), (None, None)):
        asked = layout(MESH, *entries)

        def step(x: torch.Tensor, asked: Layout = asked) -> torch.Tensor:
            manual = op(runtime, aten.mul.Tensor, runtime.enter_manual(x, asked, region(MESH)), 2.5)
            return runtime.leave_manual(manual, asked, region(MESH))

        compiled, host = runtime.compile(step), values(16, 8)
        result = compiled(runtime.put(host, asked))
        assert communication(compiled.hlo()) == [], entries
        assert torch.equal(runtime.to_host(result), host * 2.5)


def test_entering_cuts_what_lies_otherwise(runtime: Runtime) -> None:
    """A row of tiles to a column of tiles: GSPMD's own all-to-all, before the region."""

    def step(x: torch.Tensor) -> torch.Tensor:
        return stacked(
            runtime, MESH, runtime.enter_manual(x, layout(MESH, None, "tp"), region(MESH))
        )

    compiled, host = runtime.compile(step), values(16, 8)
    result = compiled(runtime.put(host, layout(MESH, "tp", None)))
    assert [kind for kind, *_ in communication(compiled.hlo())] == ["all-to-all"]
    assert torch.equal(runtime.to_host(result)[5], host[:, 2:4])


def test_several_collectives_in_one_program(runtime: Runtime) -> None:
    """torch_xla gives its collectives one channel, whatever their kind and groups."""
    given = values(2, 4, 8, 8)
    cases = [(case, axes) for case in CASES for axes in (("tp",), ("dp",), ("tp", "dp"))]

    def step(x: torch.Tensor) -> list[torch.Tensor]:
        manual = runtime.enter_manual(x, each(MESH, 2), region(MESH))
        manual = op(runtime, aten.view.default, manual, [8, 8])
        results = []
        for case, axes in cases:
            name, options, _ = CASES[case]
            chosen = options(MESH.groups(axes).shape[1])
            results.append(runtime.manual_collective(name, manual, region(MESH), axes, **chosen))
        return [stacked(runtime, MESH, result) for result in results]

    compiled = runtime.compile(step)
    for scale in (1, 3):
        whole = runtime.put(scale * given.flatten(0, 1), each(MESH, 2))
        for (case, axes), got in zip(cases, compiled(whole), strict=True):
            want = by_members(MESH, axes, scale * given, CASES[case][2])
            assert torch.equal(runtime.to_host(got), want.flatten(0, 1)), (case, axes)
    assert compiled.stats()["traces"] == 1
