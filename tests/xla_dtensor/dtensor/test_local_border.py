"""What to_local gives each device, and what from_local makes of it, for all kinds of placements.

The oracle is `torch_indices`, PyTorch's own rule for the rows of a shard, on the NumPy value.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from mesh_utils import Mesh
from xla_dtensor import DeviceMesh, DTensor, distribute_tensor, init_device_mesh
from xla_dtensor.core import Layout, LayoutError
from xla_dtensor.core.local_shape import torch_indices
from xla_dtensor.core.placements import Gap
from xla_dtensor.dtensor.local import LocalView
from xla_dtensor.dtensor.local_border import border_of
from xla_dtensor.runtimes import Runtime, get_runtime

MESHES = ((8,), (2, 4), (2, 2, 2))
SUPPRESSED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
OPS = ("sum", "avg", "max", "min", "product")
REDUCTIONS: dict[str, Any] = {
    "sum": np.sum,
    "avg": np.mean,
    "max": np.max,
    "min": np.min,
    "product": np.prod,
}


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("xla", shape, mesh_dim_names=("a", "b", "c")[: len(shape)])


def view_of(value: torch.Tensor, mesh: DeviceMesh, placements: Any) -> LocalView:
    """Cut a value by any placements, those that distribute_tensor refuses among them."""
    whole = distribute_tensor(value, mesh, [Replicate()] * mesh.ndim)
    at = border_of(Layout.from_placements(placements, value.ndim, mesh.value), tuple(value.shape))
    return LocalView(at.cut(whole._local_tensor), at.region, varying=at.varying, uneven=at.uneven)


def has_gap(layout: Layout) -> bool:
    """Whether a strided shard has no mesh axis for its outer cut."""
    return any(isinstance(entry, Gap) for dim in layout.dims for entry in dim)


def first_is_longest(layout: Layout, shape: tuple[int, ...]) -> bool:
    """Whether no device has more rows of any dim than the first, whose shape a view has."""
    first, *others = (
        [len(rows) for rows in torch_indices(layout, shape, coordinate)]
        for coordinate in np.ndindex(*layout.mesh.mesh_shape)
    )
    return all(a >= b for other in others for a, b in zip(first, other, strict=True))


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[Any, ...], tuple[int, ...]]:
    """A mesh shape, placements on it, and the shape of a tensor."""
    mesh_shape = draw(st.sampled_from(MESHES))
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    dims = st.integers(0, len(shape) - 1)
    kinds = st.one_of(
        st.just(Replicate()),
        st.builds(Shard, dims),
        st.builds(Shard, dims),
        st.builds(lambda d, f: _StridedShard(d, split_factor=f), dims, st.sampled_from([2, 3, 4])),
        st.builds(Partial, st.sampled_from(OPS)),
    )
    count = len(mesh_shape)
    placements = tuple(draw(st.lists(kinds, min_size=count, max_size=count)))
    try:
        layout = Layout.from_placements(placements, len(shape), Mesh.arange(mesh_shape))
    except LayoutError:
        reject()  # a strided shard that cuts across the next one
    if has_gap(layout) and not first_is_longest(layout, shape):
        reject()  # from_local refuses gaps, and no DTensor has one to be cut
    return mesh_shape, placements, shape


def check(mesh_shape: tuple[int, ...], placements: tuple[Any, ...], shape: tuple[int, ...]) -> None:
    mesh, value = mesh_of(mesh_shape), numbers(*shape)
    view = view_of(value, mesh, placements)
    layout = Layout.from_placements(placements, value.ndim, mesh.value)
    whole, parts = value.numpy(), {}
    for shard in view.addressable_shards():
        coordinate = mesh.value.coordinates(shard.device_id)
        mine = whole[np.ix_(*torch_indices(layout, shape, coordinate))]
        assert tuple(shard.data.shape) == mine.shape
        pending = [
            (place, p.reduce_op)
            for place, p in zip(coordinate, placements, strict=True)
            if p.is_partial()
        ]
        first = all(place == 0 or op not in ("sum", "product") for place, op in pending)
        if first:
            np.testing.assert_array_equal(shard.data.numpy(), mine)
        parts[coordinate] = shard.data.numpy()
    assert tuple(view.shape) == parts[(0,) * mesh.ndim].shape
    check_reductions(mesh, placements, parts, layout, whole)
    if has_gap(layout):
        # XLA has no such shards, so no DTensor lies so; the rows are put together all the same.
        with pytest.raises(LayoutError, match="so its shards are no tiles"):
            DTensor.from_local(view, mesh, placements, shape=shape, stride=value.stride())
        joined = get_runtime().to_host(border_of(layout, shape).joined(view._payload))
        np.testing.assert_allclose(joined.numpy(), whole, rtol=2e-7, atol=0)
        return
    back = DTensor.from_local(view, mesh, placements, shape=shape, stride=value.stride())
    assert back.placements == placements
    found = back.cpu().numpy()
    if any(p.is_partial() and p.reduce_op == "avg" for p in placements):
        np.testing.assert_allclose(found, whole, rtol=2e-7, atol=0)
    else:
        np.testing.assert_array_equal(found.view(np.int32), whole.view(np.int32))


def check_reductions(
    mesh: DeviceMesh, placements: tuple[Any, ...], parts: Any, layout: Layout, whole: Any
) -> None:
    """The parts of all devices along the Partial axes make up each shard."""
    axes = [i for i, p in enumerate(placements) if p.is_partial()]
    sizes = mesh.value.mesh_shape
    for coordinate in parts:
        if any(coordinate[axis] for axis in axes):
            continue
        stack = np.empty([sizes[axis] for axis in axes], dtype=object)
        for place in np.ndindex(*stack.shape):
            there = list(coordinate)
            for axis, at in zip(axes, place, strict=True):
                there[axis] = at
            stack[place] = parts[tuple(there)]
        found = np.array(stack.tolist())
        for axis in axes:
            found = REDUCTIONS[placements[axis].reduce_op](found, axis=0)
        mine = whole[np.ix_(*torch_indices(layout, whole.shape, coordinate))]
        # A mean of equal parts may be off by a bit.
        found = found.reshape(mine.shape).astype(np.float32)
        np.testing.assert_allclose(found, mine, rtol=2e-7, atol=0)


@settings(max_examples=12, deadline=None, suppress_health_check=SUPPRESSED)
@given(cases())
def test_there_and_back(runtime: Runtime, case: Any) -> None:
    check(*case)


@pytest.mark.thorough
@settings(max_examples=300, deadline=None, suppress_health_check=SUPPRESSED)
@given(cases())
def test_there_and_back_often(runtime: Runtime, case: Any) -> None:
    check(*case)


STRIDED = _StridedShard(0, split_factor=2)
CASES = {
    "even": ((2, 4), (Shard(0), Shard(1)), (8, 8)),
    "two axes on an uneven dim": ((2, 4), (Shard(0), Shard(0)), (5, 2)),
    "fewer rows than devices": ((8,), (Shard(0),), (3, 2)),
    "no rows": ((2, 4), (Shard(0), Shard(1)), (0, 4)),
    "strided": ((2, 4), (STRIDED, Shard(0)), (16,)),
    "strided with a gap": ((8,), (STRIDED,), (16, 2)),
    "strided and uneven": ((2, 2, 2), (STRIDED, Replicate(), Shard(0)), (9,)),
    "every reduction": ((2, 2, 2), (Partial("avg"), Partial("product"), Partial("max")), (3,)),
    "a sum of uneven shards": ((2, 4), (Partial(), Shard(0)), (10, 2)),
    "a minimum of strided ones": ((2, 4), (Partial("min"), STRIDED), (9,)),
}


@pytest.mark.parametrize("name", CASES)
def test_example(runtime: Runtime, name: str) -> None:
    check(*CASES[name])


def test_to_local_of_a_dtensor(mesh: DeviceMesh) -> None:
    """The same by the public way, on a submesh too."""
    value = numbers(10, 4)
    for on, placements in ((mesh, [Shard(1), Shard(0)]), (mesh["tp"], [Shard(0)])):
        x = distribute_tensor(value, on, placements)
        view: Any = x.to_local()
        assert tuple(view.shape) == (3, 2 if on is mesh else 4)
        sizes = [len(shard.data) for shard in view.addressable_shards()]
        assert sizes == [3, 3, 3, 1] * 2
        back = DTensor.from_local(view, on, placements)
        assert torch.equal(back.cpu(), value)
        assert prod(back.shape) == 40


@pytest.mark.parametrize("op", OPS)
def test_parts_of_one_element(mesh: DeviceMesh, op: str) -> None:
    """A scalar has no dim to cut; its parts are made all the same."""
    view = view_of(torch.tensor(3.0), mesh, (Partial(op), Replicate()))
    values = [shard.data.item() for shard in view.addressable_shards()]
    other = {"sum": 0.0, "product": 1.0}.get(op, 3.0)
    assert values == [3.0] * 4 + [other] * 4
    assert DTensor.from_local(view, mesh, (Partial(op), Replicate())).item() == 3.0


@pytest.mark.parametrize("dtype", [torch.int32, torch.int8, torch.bool, torch.bfloat16])
@pytest.mark.parametrize("op", ["sum", "max", "product"])
def test_reductions_keep_the_dtype(mesh: DeviceMesh, dtype: torch.dtype, op: str) -> None:
    value = torch.tensor([0, 1, 1, 0]).to(dtype)
    view = view_of(value, mesh, (Partial(op), Replicate()))
    back = DTensor.from_local(view, mesh, (Partial(op), Replicate()))
    assert back.dtype == dtype
    assert torch.equal(back.cpu(), value)


def test_the_mean_of_whole_numbers_is_refused(mesh: DeviceMesh) -> None:
    view = view_of(torch.arange(4), mesh, (Replicate(), Replicate()))
    with pytest.raises(ValueError, match="The mean of whole numbers is none"):
        DTensor.from_local(view, mesh, (Partial("avg"), Replicate()))
