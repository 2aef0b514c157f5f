"""Collectives of manual regions against NumPy: every axis of meshes of one to three axes.

The oracle keeps one array per device, [number of devices, *tile]. A collective over some axes acts
on groups of devices that differ only there; groups come from `Mesh.groups`. Gradients are checked
against the transpose of the oracle: <collective(x), c> = <x, gradient>.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from mesh_utils import Mesh
from xla_dtensor import collectives as xc
from xla_dtensor import distribute_tensor
from xla_dtensor.dtensor.mesh import as_device_mesh
from xla_dtensor.errors import ManualRegionError
from xla_dtensor.runtimes import Runtime
from xla_dtensor.spmd import disable_manual_sharding, enable_manual_sharding

TILE = (8, 16)  # every group size divides both dims
NAMES = ("a", "b", "c")
Array = NDArray[Any]
PerGroup = Callable[[Array], Array]


def meshes() -> list[Mesh]:
    permuted = np.arange(8).reshape(2, 4).T.ravel()
    return [
        Mesh.arange((8,), NAMES[:1]),
        Mesh.arange((2, 4), NAMES[:2]),
        Mesh.arange((2, 2, 2), NAMES),
        Mesh.arange((4, 1, 2), NAMES),
        Mesh(permuted, (4, 2), NAMES[:2]),
    ]


def axes_of(mesh: Mesh) -> list[tuple[str, ...]]:
    names = NAMES[: mesh.ndim]
    pairs = itertools.permutations(names, 2)
    return [*((name,) for name in names), *pairs]


CASES = [
    pytest.param(mesh, axes, id=f"{mesh!r}-{'.'.join(axes)}")
    for mesh in meshes()
    for axes in axes_of(mesh)
]


def oracle(per_group: PerGroup, tiles: Array, mesh: Mesh, axes: tuple[str, ...]) -> Array:
    """Apply a function on [members, *tile] to each group; tiles are in the mesh's order."""
    position = {int(device): i for i, device in enumerate(mesh.device_ids.flat)}
    result: list[Any] = [None] * len(tiles)
    for group in mesh.groups(axes):
        places = [position[int(device)] for device in group]
        for place, value in zip(places, per_group(tiles[places]), strict=True):
            result[place] = value
    return np.stack(result)


def spread(tiles: Array, mesh: Mesh) -> Any:
    """A DTensor whose tile on each device is its entry of [devices, *tile]."""
    shape = (*mesh.mesh_shape, *tiles.shape[1:])
    spec = (*mesh.axis_names, *(None,) * (tiles.ndim - 1))
    return distribute_tensor(torch.tensor(tiles.reshape(shape)), as_device_mesh(mesh), spec)


def enter(tensor: Any, mesh: Mesh) -> torch.Tensor:
    spec = (*mesh.axis_names, *(None,) * (tensor.ndim - mesh.ndim))
    tile = enable_manual_sharding(tensor, spec, mesh=mesh)
    return tile.reshape(tile.shape[mesh.ndim :])


def leave(tile: torch.Tensor, mesh: Mesh) -> Any:
    spec = (*mesh.axis_names, *(None,) * tile.ndim)
    shape = (*mesh.mesh_shape, *tile.shape)
    return disable_manual_sharding(tile.reshape(*(1,) * mesh.ndim, *tile.shape), spec, shape)


def numbers(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def check(
    run: Callable[[torch.Tensor], torch.Tensor],
    per_group: PerGroup,
    transpose: PerGroup,
    mesh: Mesh,
    axes: tuple[str, ...],
) -> None:
    """Compare value and gradient of a collective with the oracle's."""
    tiles = numbers(mesh.size(), *TILE)
    source = spread(tiles, mesh).requires_grad_()
    result = leave(run(enter(source, mesh)), mesh)
    expected = oracle(per_group, tiles, mesh, axes)
    weight = numbers(*expected.shape, seed=1)
    (result * spread(weight, mesh)).sum().backward()
    found = result.detach().cpu().numpy().reshape(expected.shape)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    grad = source.grad.cpu().numpy().reshape(tiles.shape)
    np.testing.assert_allclose(grad, oracle(transpose, weight, mesh, axes), rtol=1e-5, atol=1e-5)


def same(value: Array, members: int) -> Array:
    return np.broadcast_to(value, (members, *value.shape))


def blocks(tile: Array, members: int, dim: int) -> list[Array]:
    return np.split(tile, members, axis=dim)


def total(x: Array) -> Array:
    return same(x.sum(0), len(x))


def joined(dim: int) -> PerGroup:
    return lambda x: same(np.concatenate(list(x), axis=dim), len(x))


def scattered(dim: int) -> PerGroup:
    return lambda x: np.stack(blocks(x.sum(0), len(x), dim))


def swapped(split: int, concat: int) -> PerGroup:
    def apply(x: Array) -> Array:
        parts = [blocks(tile, len(x), split) for tile in x]
        return np.stack(
            [np.concatenate([part[i] for part in parts], axis=concat) for i in range(len(x))]
        )

    return apply


@pytest.mark.parametrize(("mesh", "axes"), CASES)
def test_psum_and_pmean(runtime: Runtime, mesh: Mesh, axes: tuple[str, ...]) -> None:
    check(lambda x: xc.psum(x, axes), total, total, mesh, axes)
    mean: PerGroup = lambda x: total(x) / len(x)  # noqa: E731
    check(lambda x: xc.pmean(x, axes), mean, mean, mesh, axes)


@pytest.mark.thorough
@pytest.mark.parametrize(("mesh", "axes"), CASES)
@pytest.mark.parametrize("largest", [True, False])
def test_pmax_and_pmin(runtime: Runtime, mesh: Mesh, axes: tuple[str, ...], largest: bool) -> None:
    run, reduce = (xc.pmax, np.max) if largest else (xc.pmin, np.min)
    tiles = np.round(numbers(mesh.size(), *TILE))  # rounded, so that members tie
    source = spread(tiles, mesh).requires_grad_()
    result = leave(run(enter(source, mesh), axes), mesh)
    weight = numbers(mesh.size(), *TILE, seed=1)
    (result * spread(weight, mesh)).sum().backward()
    expected = oracle(lambda x: same(reduce(x, 0), len(x)), tiles, mesh, axes)
    np.testing.assert_array_equal(result.detach().cpu().numpy().reshape(tiles.shape), expected)
    holds = (tiles == expected).astype(np.float32)
    share = holds / oracle(total, holds, mesh, axes)
    grad = source.grad.cpu().numpy().reshape(tiles.shape)
    np.testing.assert_allclose(
        grad, oracle(total, weight, mesh, axes) * share, rtol=1e-5, atol=1e-5
    )


@pytest.mark.thorough
@pytest.mark.parametrize(("mesh", "axes"), CASES)
@pytest.mark.parametrize("dim", [0, -1])
def test_all_gather_and_reduce_scatter(
    runtime: Runtime, mesh: Mesh, axes: tuple[str, ...], dim: int
) -> None:
    check(lambda x: xc.all_gather(x, axes, dim), joined(dim), scattered(dim), mesh, axes)
    check(lambda x: xc.reduce_scatter(x, axes, dim), scattered(dim), joined(dim), mesh, axes)


@pytest.mark.thorough
@pytest.mark.parametrize(("mesh", "axes"), CASES)
@pytest.mark.parametrize(("split", "concat"), [(0, 1), (-1, -1)])
def test_all_to_all(
    runtime: Runtime, mesh: Mesh, axes: tuple[str, ...], split: int, concat: int
) -> None:
    run = lambda x: xc.all_to_all(x, axes, split, concat)  # noqa: E731
    check(run, swapped(split, concat), swapped(concat, split), mesh, axes)


@pytest.mark.thorough
@pytest.mark.parametrize(("mesh", "axes"), CASES)
@pytest.mark.parametrize("ring", [True, False])
def test_permute(runtime: Runtime, mesh: Mesh, axes: tuple[str, ...], ring: bool) -> None:
    size = int(np.prod([mesh.size(axis) for axis in axes]))
    pairs = [(i, (i + 1) % size) for i in range(size)] if ring else [(size - 1, 0)]

    def moved(moves: list[tuple[int, int]]) -> PerGroup:
        def apply(x: Array) -> Array:
            result = np.zeros_like(x)
            for source, destination in moves:
                result[destination] = x[source]
            return result

        return apply

    run = lambda x: xc.permute(x, axes, pairs)  # noqa: E731
    check(run, moved(pairs), moved([(to, of) for of, to in pairs]), mesh, axes)


@pytest.mark.parametrize(("mesh", "axes"), CASES)
def test_axis_index(runtime: Runtime, mesh: Mesh, axes: tuple[str, ...]) -> None:
    tile = enter(spread(numbers(mesh.size(), 1), mesh), mesh)
    number = xc.axis_index(tile, axes)
    assert (number.shape, number.dtype) == ((), torch.int64)
    found = leave(number, mesh).cpu().numpy().ravel()
    counted = oracle(lambda x: np.arange(len(x)), np.zeros(mesh.size()), mesh, axes)
    np.testing.assert_array_equal(found, counted)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.bfloat16, torch.float64])
def test_dtypes_are_kept_and_exact(runtime: Runtime, dtype: torch.dtype) -> None:
    mesh = Mesh.arange((2, 4), NAMES[:2])
    tiles = np.arange(8 * 8).reshape(8, 8) % 16
    if dtype == torch.int64:
        tiles = tiles + 2**40
    source = spread(tiles, mesh).to(dtype)
    for run, expected in (
        (lambda x: xc.psum(x, "b"), total),
        (lambda x: xc.pmax(x, "b"), lambda x: same(x.max(0), len(x))),
        (lambda x: xc.all_gather(x, "b"), joined(0)),
        (lambda x: xc.reduce_scatter(x, "b"), scattered(0)),
        (lambda x: xc.all_to_all(x, "b", 0, 0), swapped(0, 0)),
    ):
        result = leave(run(enter(source, mesh)), mesh)
        assert result.dtype == dtype
        found = result.cpu().double().numpy().reshape(8, -1)
        np.testing.assert_array_equal(found, oracle(expected, tiles, mesh, ("b",)))


def test_second_derivative(runtime: Runtime) -> None:
    mesh = Mesh.arange((2, 4), NAMES[:2])
    source = spread(numbers(8, 4), mesh).requires_grad_()
    value = leave(xc.psum(enter(source, mesh) ** 3, "b"), mesh).sum()
    (first,) = torch.autograd.grad(value, source, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), source)
    # d2/dx2 of 4 x^3, since each of 4 members holds the sum.
    np.testing.assert_allclose(
        second.cpu().numpy(), 24 * source.detach().cpu().numpy(), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: xc.psum(x, "z"), "z"),
        (lambda x: xc.psum(x, ("a", "a")), r"over axis=\('a', 'a'\).*each once"),
        (lambda x: xc.all_gather(x, "a", 2), r"dim=2 .*local shape=\(4, 6\)"),
        (lambda x: xc.reduce_scatter(x, "b", 1), r"dim=1 .*4 members.*do not divide"),
        (lambda x: xc.all_to_all(x, "b", 1, 0), r"dim=1 .*4 members.*do not divide"),
        (lambda x: xc.permute(x, "b", [(0, 1), (0, 2)]), "sends or receives twice"),
        (lambda x: xc.permute(x, "b", [(0, 4)]), "numbered from 0 to 3"),
    ],
)
def test_refuses(runtime: Runtime, call: Callable[[Any], Any], message: str) -> None:
    mesh = Mesh.arange((2, 4), NAMES[:2])
    with pytest.raises((ManualRegionError, ValueError), match=message):
        call(enter(spread(numbers(8, 4, 6), mesh), mesh))


def test_refuses_a_global_tensor(runtime: Runtime) -> None:
    mesh = Mesh.arange((2, 4), NAMES[:2])
    with pytest.raises(ManualRegionError, match=r"psum was called on a DTensor.*ordinary op"):
        xc.psum(spread(numbers(8, 4), mesh), "a")
