"""Local views on torch_xla, on 8 CPU devices: the border, views, writes, ops."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations, product
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.xla_dtensor.runtimes.torch_xla.torch_xla_locals import (
    GRADIENTS,
    OPS,
    TABLE,
    Local,
    gradient,
    localized,
    on_devices,
    own,
    stacked,
)
from tests.xla_dtensor.runtimes.torch_xla.torch_xla_tiles import (
    DTYPES,
    MESH,
    MESHES,
    communication,
    layout,
    values,
)
from xla_dtensor.core import Layout, ManualRegion
from xla_dtensor.errors import LocalViewError
from xla_dtensor.runtimes.base import Runtime

pytest.importorskip("torch_xla")
pytestmark = pytest.mark.only_on("torch_xla")

PERMUTED = MESHES["2d_permuted"]
WHOLE = ManualRegion.over(PERMUTED)
REGIONS = {
    **{name: ManualRegion.over(mesh) for name, mesh in MESHES.items()},
    "tp": ManualRegion.over(MESH, ["tp"]),
    "dp_permuted": ManualRegion.over(PERMUTED, ["dp"]),
    "a_c": ManualRegion.over(MESHES["3d_shuffled"], ["a", "c"]),
}


def numbers(region: ManualRegion, *shape: int) -> torch.Tensor:
    return torch.randn(*region.sizes, *shape, generator=torch.Generator().manual_seed(0))


def each(region: ManualRegion, given: torch.Tensor, work: Any) -> torch.Tensor:
    """Plain torch, device by device."""
    tensors = given.flatten(0, len(region.axes) - 1)
    found = torch.stack([work(tensor.clone()) for tensor in tensors])
    return found.reshape(*region.sizes, *found.shape[1:])


def check(found: torch.Tensor, wanted: torch.Tensor, name: str = "") -> None:
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), name
    scale = max([1.0, *wanted.abs().flatten().tolist()]) if wanted.is_floating_point() else 1.0
    torch.testing.assert_close(
        found, wanted, atol=1e-5 * scale, rtol=1e-4, msg=lambda text: f"{name}: {text}"
    )


# ---------------------------------------------------------------------- stacks


def all_layouts(region: ManualRegion) -> Iterator[Layout]:
    """Every way to cut two dims along axes of the region."""
    for count in range(len(region.axes) + 1):
        for order in permutations(region.axes, count):
            for cut in range(count + 1):
                yield layout(region.mesh, order[:cut] or None, order[cut:] or None)


def own_part(host: torch.Tensor, asked: Layout, region: ManualRegion, at: Any) -> torch.Tensor:
    """What lies at the coordinates `at` along the region's axes, counted by hand."""
    for dim, entries in enumerate(asked.dims):
        for axis in entries:
            place = region.axes.index(axis)
            host = host.chunk(region.sizes[place], dim)[at[place]]
    return host


@pytest.mark.parametrize("name", REGIONS)
def test_in_and_out(runtime: Runtime, name: str) -> None:
    region = REGIONS[name]
    mesh, host, cases = region.mesh, values(16, 24), []
    sources = layout(mesh, None, None), layout(mesh, None, tuple(mesh.axis_names))
    for source in sources:
        payload = runtime.put(host, source)
        for asked in all_layouts(region):
            local = runtime.enter_local(payload, asked, region)
            assert tuple(local.shape) == region.tile_shape(asked, host.shape)
            back = runtime.leave_local(local, asked, region)
            assert runtime.is_payload(back)
            assert not runtime.is_payload(local)
            cases.append((asked, stacked(Local(local, runtime), region), back))
        assert runtime.op_sharding(payload) == source.op_sharding(runtime.root(mesh))
    for asked, found, back in cases:
        each_own = runtime.to_host(found)
        for at in product(*map(range, region.sizes)):
            assert torch.equal(each_own[at], own_part(host, asked, region, at)), asked
        assert torch.equal(runtime.to_host(back), host), asked
        if region.is_whole:
            assert runtime.op_sharding(back) == asked.op_sharding(runtime.root(mesh))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16, torch.uint8, torch.complex64])
def test_dtypes(runtime: Runtime, dtype: torch.dtype) -> None:
    host = values(*WHOLE.sizes, 3, dtype=torch.bool).to(dtype)
    x = localized(runtime, host, WHOLE)
    assert x.dtype == dtype
    check(on_devices(runtime, x, WHOLE), host)
    check(on_devices(runtime, torch.stack([x, x]).flatten(), WHOLE), torch.cat([host, host], -1))


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (1, 2, 1, 2, 1, 2)])
def test_shapes(runtime: Runtime, shape: tuple[int, ...]) -> None:
    host = numbers(WHOLE, *shape)
    x = localized(runtime, host, WHOLE)
    assert tuple(x.shape) == shape
    check(on_devices(runtime, x * 2, WHOLE), host * 2)
    check(on_devices(runtime, torch.ones_like(x) - x, WHOLE), 1 - host)
    flipped = host.reshape(2, 4, prod(shape)).flip(2)
    check(on_devices(runtime, x.reshape(-1).flip(0), WHOLE), flipped)


def test_the_border_moves_nothing(runtime: Runtime) -> None:
    host, asked = values(16, 24), layout(PERMUTED, "tp", "dp")

    def step(payload: torch.Tensor) -> torch.Tensor:
        return runtime.leave_local(runtime.enter_local(payload, asked, WHOLE), asked, WHOLE)

    compiled = runtime.compile(step)
    assert torch.equal(runtime.to_host(compiled(runtime.put(host, asked))), host)
    assert communication(compiled.hlo()) == []


def test_shards_of_a_stack(runtime: Runtime) -> None:
    host = numbers(WHOLE, 3)
    result = localized(runtime, host, WHOLE).cumsum(0)
    shards = runtime.addressable_shards(stacked(result, WHOLE))
    wanted = host.cumsum(-1)
    assert [shard.device_id for shard in shards] == list(range(8))
    for shard in shards:
        at = PERMUTED.coordinates(shard.device_id)
        check(shard.data, wanted[at][None, None])


def test_going_on_after_a_sync(runtime: Runtime) -> None:
    host = numbers(WHOLE, 4, 4)
    x = localized(runtime, host, WHOLE)
    y = x.softmax(-1)
    row = y[1]
    gathered = y.gather(1, y.argsort(1))
    runtime.synchronize()
    gathered += row
    row.mul_(2)
    runtime.synchronize()
    y.add_(1)
    plain = host.softmax(-1)
    wanted = plain.gather(-1, plain.argsort(-1)) + plain[..., 1:2, :]
    check(on_devices(runtime, gathered, WHOLE), wanted)
    plain[..., 1, :] *= 2
    check(on_devices(runtime, y, WHOLE), plain + 1)
    check(on_devices(runtime, row, WHOLE), plain[..., 1, :] + 1)


def tangled(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A base and views of it, each written through, by ops of both kinds."""
    base = x.clone()
    rows, flat, same = base.t()[1:4], base.view(-1)[3:9], base.detach()
    rows.diagonal().mul_(3)
    flat.add_(1)
    base.index_add_(0, torch.tensor([1, 0]), base[:2].clone())
    rows.index_fill_(0, torch.tensor([2]), 7.0)
    flat.scatter_(0, flat.argsort()[:2], 5.0)
    same[0, 0] = -1
    base.split(2)[1].zero_()
    first, second = base.unbind(0)[:2]
    first.sub_(second)
    return base, rows, flat, same, base.unsqueeze(0).expand(2, 4, 6)


def test_views_and_bases_see_each_others_writes(runtime: Runtime) -> None:
    host = numbers(WHOLE, 4, 6)
    x = localized(runtime, host, WHOLE)
    for place, found in enumerate(tangled(x)):
        wanted = each(WHOLE, host, lambda tensor, at=place: tangled(tensor)[at])
        check(on_devices(runtime, found, WHOLE), wanted, str(place))
    check(on_devices(runtime, x, WHOLE), host)


@pytest.mark.parametrize("name", ["2d", "tp"])
def test_global_tensors_are_never_written(runtime: Runtime, name: str) -> None:
    region = REGIONS[name]
    host = values(*region.sizes, 8, 6)
    spec = (*region.axes, *([] if region.is_whole else ["dp"]), *[None] * (1 + region.is_whole))
    source = runtime.put(host, layout(MESH, *spec))
    x = own(runtime, source, region)
    x.add_(1)
    result = stacked(x, region)
    x.zero_()
    assert torch.equal(runtime.to_host(source), host)
    assert torch.equal(runtime.to_host(result), host + 1)


# ---------------------------------------------------------------------- ops


def run_all(runtime: Runtime, region: ManualRegion, functions: dict[str, Any]) -> str:
    """Check functions against plain torch on each device, in one program; return its HLO."""
    host = numbers(region, 8, 8)

    def step(stack: torch.Tensor) -> dict[str, torch.Tensor]:
        x = own(runtime, stack, region)
        found: dict[str, Any] = {name: work(x) for name, work in functions.items()}
        return {name: stacked(y, region) for name, y in found.items()}

    compiled = runtime.compile(step)
    stack = runtime.put(host, layout(region.mesh, *region.axes, None, None))
    for name, found in compiled(stack).items():
        check(runtime.to_host(found), each(region, host, functions[name]), name)
    # Nothing has written into the argument.
    assert torch.equal(runtime.to_host(stack), host)
    return compiled.hlo()


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("name", ["2d_permuted", "tp"])
def test_ops_are_local(runtime: Runtime, name: str, part: int) -> None:
    functions = dict(list(OPS.items())[part::4])
    assert communication(run_all(runtime, REGIONS[name], functions)) == []


@pytest.mark.parametrize("part", range(4))
def test_gradients_are_local(runtime: Runtime, part: int) -> None:
    functions = {name: gradient(OPS[name]) for name in GRADIENTS[part::4]}
    assert communication(run_all(runtime, WHOLE, functions)) == []


@pytest.mark.thorough
def test_every_op_alone(runtime: Runtime) -> None:
    host = numbers(WHOLE, 8, 8)
    for name, work in OPS.items():
        found = work(localized(runtime, host, WHOLE))
        check(on_devices(runtime, found, WHOLE), each(WHOLE, host, work), name)


def test_other_axes_stay_with_xla(runtime: Runtime) -> None:
    """A batch cut over dp, weights of one's own along tp: nothing is gathered."""
    region = REGIONS["tp"]
    host = {"x": numbers(region, 8, 4), "w": numbers(region, 4, 6)}

    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        a, b = (own(runtime, stack, region) for stack in (x, w))
        hidden: Any = F.gelu(a @ b).softmax(-1)
        return stacked(hidden, region)

    compiled = runtime.compile(step)
    x = runtime.put(host["x"], layout(MESH, "tp", "dp", None))
    w = runtime.put(host["w"], layout(MESH, "tp", None, None))
    found = compiled(x, w)
    check(runtime.to_host(found), F.gelu(host["x"] @ host["w"]).softmax(-1))
    asked = layout(MESH, "tp", "dp", None)
    assert runtime.op_sharding(found) == asked.op_sharding(runtime.root(MESH))
    assert communication(compiled.hlo()) == []


def test_statistics_of_batch_norm_are_written(runtime: Runtime) -> None:
    host = numbers(WHOLE, 6, 4)

    def normed(x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = [F.batch_norm(x, mean, var, training=True, momentum=0.3) for _ in range(2)]
        return found[1], mean, var

    x = localized(runtime, host, WHOLE)
    found = normed(x, x[0].clone(), x[1].abs())
    for place in (0, 1, 2):
        wanted = each(WHOLE, host, lambda t, at=place: normed(t, t[0].clone(), t[1].abs())[at])
        check(on_devices(runtime, found[place], WHOLE), wanted, str(place))
    with pytest.raises(LocalViewError, match=r"shape=\(4,\) that is none"):
        normed(x, torch.zeros(4), torch.ones(4))


def test_training_with_adamw(runtime: Runtime) -> None:
    host = numbers(WHOLE, 8, 8)

    def train(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        weight = weight.detach().requires_grad_()
        optimizer = torch.optim.AdamW([weight], lr=0.1, foreach=True)
        for _ in range(3):
            optimizer.zero_grad()
            F.layer_norm(x @ weight, (8,)).sub(TABLE).pow(2).sum().backward()
            optimizer.step()
        return weight.detach()

    x = localized(runtime, host, WHOLE)
    found = train(x, localized(runtime, host * 0.3, WHOLE))
    pairs = zip(host.flatten(0, 1), host.flatten(0, 1) * 0.3, strict=True)
    wanted = torch.stack([train(a, b.clone()) for a, b in pairs]).reshape(host.shape)
    torch.testing.assert_close(on_devices(runtime, found, WHOLE), wanted, atol=1e-3, rtol=1e-3)


# ---------------------------------------------------------------------- random numbers


DRAWS: dict[str, Any] = {
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 1000),
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.5)),
    "dropout": lambda x: F.dropout(torch.ones_like(x), 0.5),
    "uniform_": lambda x: torch.zeros_like(x).uniform_(2, 3),
    "normal_": lambda x: torch.zeros_like(x).normal_(),
    "normal_bfloat16": lambda x: torch.zeros_like(x, dtype=torch.bfloat16).normal_(5, 2) / 2 - 2.5,
}
MEANS = {
    "rand_like": (0.45, 0.55),
    "randint_like": (450, 550),
    "bernoulli": (0.45, 0.55),
    "dropout": (0.9, 1.1),
    "uniform_": (2.45, 2.55),
}


@pytest.mark.parametrize("name", DRAWS)
def test_each_device_draws_its_own_numbers(runtime: Runtime, name: str) -> None:
    host = numbers(WHOLE, 16, 16)

    def step(stack: torch.Tensor) -> torch.Tensor:
        drawn = DRAWS[name](own(runtime, stack, WHOLE))
        return stacked(drawn, WHOLE)

    compiled = runtime.compile(step)
    stack = runtime.put(host, layout(PERMUTED, "dp", "tp", None, None))
    runtime.manual_seed(7)
    first = runtime.to_host(compiled(stack)).flatten(0, 1)
    runtime.manual_seed(7)
    again = runtime.to_host(compiled(stack)).flatten(0, 1)
    assert torch.equal(first, again)
    assert len({tuple(tensor.flatten().tolist()) for tensor in first}) == 8
    low, high = MEANS.get(name, (-0.1, 0.1))
    assert low < first.float().mean() < high
    if "norm" in name or name == "randn_like":
        assert 0.9 < first.std() < 1.1
    assert communication(compiled.hlo()) == []
