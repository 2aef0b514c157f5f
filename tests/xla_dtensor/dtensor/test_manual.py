"""Manual regions on both runtimes: the border, gradients across it, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import xla_dtensor as xd
from mesh_utils import Mesh
from xla_dtensor import DeviceMesh, DTensor, distribute_tensor
from xla_dtensor.collectives import all_gather, psum
from xla_dtensor.core import Layout, LayoutError
from xla_dtensor.dtensor.manual import ManualTensor
from xla_dtensor.dtensor.mesh import as_device_mesh
from xla_dtensor.errors import ArgumentTypeError, ManualRegionError, UnsupportedOpError
from xla_dtensor.report import collectives, summarize
from xla_dtensor.runtimes import Runtime
from xla_dtensor.spmd import disable_manual_sharding, enable_manual_sharding, mark_sharding

PROPERTY = settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
SHAPES = ((8,), (2, 4), (2, 2, 2), (4, 1, 2))


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def on_mesh(value: torch.Tensor, mesh: Any, spec: tuple[Any, ...] | None = None) -> Any:
    spec = (None,) * value.ndim if spec is None else spec
    return distribute_tensor(value, as_device_mesh(mesh), spec).requires_grad_()


@st.composite
def borders(draw: st.DrawFn) -> tuple[Mesh, tuple[Any, ...], tuple[int, ...]]:
    """A mesh, perhaps permuted, a partition spec on it, and a shape, perhaps uneven."""
    mesh_shape = draw(st.sampled_from(SHAPES))
    names = ("a", "b", "c")[: len(mesh_shape)]
    ids = list(range(8))
    if draw(st.booleans()) and len(mesh_shape) == 2:
        ids = torch.arange(8).reshape(mesh_shape[::-1]).T.ravel().tolist()
    dims: list[list[str]] = [[] for _ in range(draw(st.integers(1, 3)))]
    for name in draw(st.permutations(names)):
        dim = draw(st.integers(-1, len(dims) - 1))
        if dim >= 0:
            dims[dim].append(name)
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=len(dims), max_size=len(dims))))
    return Mesh(ids, mesh_shape, names), tuple(tuple(d) or None for d in dims), shape


@PROPERTY
@given(borders())
def test_there_and_back(
    runtime: Runtime, border: tuple[Mesh, tuple[Any, ...], tuple[int, ...]]
) -> None:
    mesh, spec, shape = border
    value = numbers(*shape)
    source = on_mesh(value, mesh)
    tile = enable_manual_sharding(source, spec, mesh=mesh)
    sizes = [1 if d is None else int(torch.tensor([mesh.size(a) for a in d]).prod()) for d in spec]
    assert tuple(tile.shape) == tuple(-(-n // k) for n, k in zip(shape, sizes, strict=True))
    back = disable_manual_sharding(tile * 2, spec, shape)
    weight = numbers(*shape, 1)[..., 0]
    (back * weight).sum().backward()
    torch.testing.assert_close(back.detach().cpu(), value * 2)
    torch.testing.assert_close(source.grad.cpu(), weight * 2)
    asked = Layout.from_partition_spec(spec, mesh).op_sharding(runtime.root(mesh))
    assert back.xla_sharding() == asked == back.mesh_layout.op_sharding(runtime.root(mesh))


def test_a_row_parallel_matmul(runtime: Runtime, mesh: DeviceMesh) -> None:
    x, w = numbers(16, 8), numbers(8, 5)
    xd_, wd = on_mesh(x, mesh, ("dp", "tp")), on_mesh(w, mesh, ("tp", None))
    tile = enable_manual_sharding(xd_, ("dp", "tp"), mesh=mesh)
    rows = enable_manual_sharding(wd, ("tp", None), mesh=mesh)
    y = disable_manual_sharding(psum((tile @ rows).tanh(), "tp"), ("dp", None), (16, 5))
    weight = numbers(16, 5)
    (y * weight).sum().backward()

    x, w = x.requires_grad_(), w.requires_grad_()
    parts = [(x[:, 2 * i : 2 * i + 2] @ w[2 * i : 2 * i + 2]).tanh() for i in range(4)]
    expected = torch.stack(parts).sum(0)
    (expected * weight).sum().backward()
    torch.testing.assert_close(y.detach().cpu(), expected.detach())
    torch.testing.assert_close(xd_.grad.cpu(), x.grad)
    torch.testing.assert_close(wd.grad.cpu(), w.grad)


def test_copies_share_the_gradient(runtime: Runtime, mesh: DeviceMesh) -> None:
    """What enters as copies along an axis and leaves as one tensor is differentiated once."""
    value = numbers(6, 4)
    source = on_mesh(value, mesh)
    tile = enable_manual_sharding(source, (None, None), mesh=mesh)
    disable_manual_sharding(tile.sin(), (None, None), (6, 4)).sum().backward()
    torch.testing.assert_close(source.grad.cpu(), value.cos())


def test_gathered_parameters(runtime: Runtime, mesh: DeviceMesh) -> None:
    """FSDP by hand: a weight sharded over dp is gathered where it is used."""
    x, w = numbers(8, 6), numbers(6, 4)
    xs, ws = on_mesh(x, mesh, ("dp", None)), on_mesh(w, mesh, ("dp", None))
    whole = all_gather(enable_manual_sharding(ws, ("dp", None), mesh=mesh), "dp")
    y = enable_manual_sharding(xs, ("dp", None), mesh=mesh) @ whole
    (disable_manual_sharding(y, ("dp", None), (8, 4)) ** 2).sum().backward()
    x, w = x.requires_grad_(), w.requires_grad_()
    ((x @ w) ** 2).sum().backward()
    torch.testing.assert_close(ws.grad.cpu(), w.grad)
    torch.testing.assert_close(xs.grad.cpu(), x.grad)


def test_padding_is_zero(runtime: Runtime, mesh: DeviceMesh) -> None:
    value = numbers(10, 3).abs() + 1
    tile = enable_manual_sharding(on_mesh(value, mesh), ("tp", None), mesh=mesh)
    assert tuple(tile.shape) == (3, 3)
    total = disable_manual_sharding(psum(tile.sum(0), "tp"), (None,), (3,))
    whole = disable_manual_sharding(all_gather(tile, "tp"), (None, None), (12, 3))
    torch.testing.assert_close(total.detach().cpu(), value.sum(0))
    assert torch.equal(whole.detach().cpu()[10:], torch.zeros(2, 3))


def test_plain_tensors_may_enter(runtime: Runtime, mesh: DeviceMesh) -> None:
    value = numbers(8, 4)
    plain = mark_sharding(value.clone().requires_grad_(), mesh, ("dp", None)).global_tensor
    tile = enable_manual_sharding(plain, ("dp", None), mesh=mesh)
    host = enable_manual_sharding(numbers(4), (None,), mesh=mesh)
    y = disable_manual_sharding(tile * host + torch.ones(4), ("dp", None), (8, 4))
    y.sum().backward()
    torch.testing.assert_close(y.detach().cpu(), value * numbers(4) + 1)
    assert plain.grad is not None
    assert not isinstance(plain.grad, DTensor)
    torch.testing.assert_close(runtime.to_host(plain.grad), numbers(4).expand(8, 4))


def test_the_source_stays(runtime: Runtime, mesh: DeviceMesh) -> None:
    source = on_mesh(numbers(16, 8), mesh, ("dp", None)).detach()
    before = source.xla_sharding()
    tile = enable_manual_sharding(source, (None, "tp"), mesh=mesh)
    tile.add_(1)
    back = disable_manual_sharding(tile, (None, "tp"), (16, 8))
    torch.testing.assert_close(back.cpu(), numbers(16, 8) + 1)
    assert source.xla_sharding() == before
    torch.testing.assert_close(source.cpu(), numbers(16, 8))


def test_in_a_compiled_step_only_the_collective_is_there(
    runtime: Runtime, mesh: DeviceMesh
) -> None:
    def region(x: Any, w: Any) -> Any:
        tile = enable_manual_sharding(x, ("dp", "tp"), mesh=mesh)
        rows = enable_manual_sharding(w, ("tp", None), mesh=mesh)
        product = torch.nn.functional.gelu(tile) @ rows
        ranked = product.sort(-1).values.cumsum(-1)  # XLA would gather for these, were they global
        return disable_manual_sharding(psum(ranked, "tp"), ("dp", None), (16, 5))

    x, w = numbers(16, 8), numbers(8, 5)
    step = xd.compile(region)
    result = step(on_mesh(x, mesh, ("dp", "tp")).detach(), on_mesh(w, mesh, ("tp", None)).detach())
    parts = [
        (torch.nn.functional.gelu(x[:, 2 * i : 2 * i + 2]) @ w[2 * i : 2 * i + 2])
        .sort(-1)
        .values.cumsum(-1)
        for i in range(4)
    ]
    torch.testing.assert_close(result.cpu(), torch.stack(parts).sum(0), rtol=1e-4, atol=1e-5)
    found = collectives(step.hlo(), mesh.value)
    assert [(c.kind, c.axes) for c in found] == [("all-reduce", ("tp",))], summarize(found)


def test_training_through_a_region(runtime: Runtime, mesh: DeviceMesh) -> None:
    """Three compiled AdamW steps on parameters used inside a region."""

    def loss_of(x: Any, w: Any, by_hand: bool) -> Any:
        if not by_hand:
            return ((x @ w).tanh() ** 2).mean()
        rows = enable_manual_sharding(w, ("tp", None), mesh=mesh)
        tile = enable_manual_sharding(x, ("dp", "tp"), mesh=mesh)
        y = disable_manual_sharding(psum(tile @ rows, "tp"), ("dp", None), (16, 4))
        return (y.tanh() ** 2).mean()

    def losses(weight: Any, by_hand: bool, compiled: bool) -> list[float]:
        optimizer = torch.optim.AdamW([weight], lr=0.1)

        def step(x: Any) -> Any:
            loss = loss_of(x, weight, by_hand)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        run: Any = xd.compile(step) if compiled else step
        batches = [numbers(16, 8) * (i + 1) for i in range(3)]
        if by_hand:
            batches = [on_mesh(b, mesh, ("dp", None)).detach() for b in batches]
        return [float(run(batch).item()) for batch in batches]

    sharded = torch.nn.Parameter(on_mesh(numbers(8, 4), mesh, ("tp", None)).detach())
    plain = torch.nn.Parameter(numbers(8, 4))
    assert losses(sharded, True, True) == pytest.approx(losses(plain, False, False), abs=1e-5)


@pytest.mark.only_on("jax")
def test_manual_on_one_axis_automatic_on_the_other(runtime: Runtime, mesh: DeviceMesh) -> None:
    def region(x: Any, w: Any) -> Any:
        tile = enable_manual_sharding(x, (None, "tp"), mesh=mesh, manual_axes=["tp"])
        rows = enable_manual_sharding(w, ("tp", None), mesh=mesh, manual_axes=["tp"])
        return disable_manual_sharding(psum(tile @ rows, "tp"), (None, None), (16, 5))

    x, w = numbers(16, 8), numbers(8, 5)
    given = [on_mesh(x, mesh, ("dp", "tp")), on_mesh(w, mesh, ("tp", None))]
    region(*given).sum().backward()
    eager = region(*given).detach().cpu()
    torch.testing.assert_close(eager, x @ w, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(given[0].grad.cpu(), w.sum(1).expand(16, 8), rtol=1e-4, atol=1e-5)
    step = xd.compile(region)
    result = step(*(t.detach() for t in given))
    torch.testing.assert_close(result.cpu(), x @ w, rtol=1e-4, atol=1e-5)
    kinds = [(c.kind, c.axes) for c in collectives(step.hlo(), mesh.value)]
    assert kinds == [("all-reduce", ("tp",))]  # dp stays sharded: nothing is gathered over it


@pytest.mark.only_on("torch_xla")
def test_partial_regions_need_jax(runtime: Runtime, mesh: DeviceMesh) -> None:
    with pytest.raises(UnsupportedOpError, match=r"tp.*'jax'"):
        enable_manual_sharding(
            on_mesh(numbers(16, 8), mesh), (None, "tp"), mesh=mesh, manual_axes=["tp"]
        )


REFUSED: list[tuple[str, Callable[[Any, Any, Any], Any], type[Exception], str]] = [
    ("item", lambda m, x, mesh: m[0, 0].item(), ManualRegionError, "another value on each device"),
    ("bool", lambda m, x, mesh: bool(m.sum() > 0), ManualRegionError, "another value on each"),
    ("cpu", lambda m, x, mesh: m.cpu(), ManualRegionError, r"cpu\(\) was called on a manual"),
    ("numpy", lambda m, x, mesh: m.numpy(), ManualRegionError, r"numpy\(\) was called"),
    ("tolist", lambda m, x, mesh: m.tolist(), ManualRegionError, r"tolist\(\) was called"),
    ("equal", lambda m, x, mesh: torch.equal(m, m), ManualRegionError, r"equal.* was called"),
    ("global", lambda m, x, mesh: m + x, ManualRegionError, r"local shape=\(8, 2\).*\(16, 8\)"),
    ("global first", lambda m, x, mesh: x + m, ManualRegionError, r"local shape=\(8, 2\)"),
    (
        "plain",
        lambda m, x, mesh: m * x.full_tensor(),
        ManualRegionError,
        r"local shape=\(8, 2\).*\(16, 8\)",
    ),
    (
        "plain first",
        lambda m, x, mesh: x.full_tensor() * m,
        ManualRegionError,
        r"local shape=\(8, 2\)",
    ),
    (
        "wrong full_shape",
        lambda m, x, mesh: disable_manual_sharding(m, ("dp", "tp"), (16, 9)),
        ManualRegionError,
        r"full_shape=\(16, 9\).*tiles of shape=\(8, 2\).*tiles of shape=\(8, 3\)",
    ),
    (
        "wrong rank",
        lambda m, x, mesh: disable_manual_sharding(m, ("dp", "tp"), (16,)),
        ManualRegionError,
        r"full_shape=\(16,\)",
    ),
    (
        "short spec",
        lambda m, x, mesh: disable_manual_sharding(m, ("dp",), (16, 8)),
        LayoutError,
        "2 dims.*Pass 2 entries",
    ),
    (
        "another mesh",
        lambda m, x, mesh: disable_manual_sharding(
            m, ("a", None), (16, 8), mesh=Mesh.arange((8,), ("a",))
        ),
        ManualRegionError,
        r"mesh \(a=8\).*\(dp=2, tp=4\)",
    ),
    (
        "global leaves",
        lambda m, x, mesh: disable_manual_sharding(x, ("dp", "tp"), (16, 8)),
        ManualRegionError,
        "global already",
    ),
    (
        "manual enters",
        lambda m, x, mesh: enable_manual_sharding(m, ("dp", "tp"), mesh=mesh),
        ManualRegionError,
        "tile already",
    ),
    (
        "marked",
        lambda m, x, mesh: mark_sharding(m, mesh, ("dp", "tp")),
        ManualRegionError,
        "XLA lays nothing out",
    ),
    (
        "host with gradient",
        lambda m, x, mesh: enable_manual_sharding(
            torch.ones(8).requires_grad_(), ("dp",), mesh=mesh
        ),
        ArgumentTypeError,
        "requires grad.*mark_sharding",
    ),
    (
        "two regions",
        lambda m, x, mesh: (
            m
            + enable_manual_sharding(torch.ones(8, 16), (None, "a"), mesh=Mesh.arange((8,), ("a",)))
        ),
        ManualRegionError,
        "two regions",
    ),
]


@pytest.mark.parametrize(
    ("call", "error", "message"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED]
)
def test_refuses(
    runtime: Runtime,
    mesh: DeviceMesh,
    call: Callable[[Any, Any, Any], Any],
    error: type[Exception],
    message: str,
) -> None:
    x = on_mesh(numbers(16, 8), mesh).detach()
    manual = enable_manual_sharding(x, ("dp", "tp"), mesh=mesh)
    with pytest.raises(error, match=message):
        call(manual, x, mesh)


def test_repr_names_the_region(runtime: Runtime, mesh: DeviceMesh) -> None:
    tile = enable_manual_sharding(torch.ones(16, 8), ("dp", "tp"), mesh=mesh)
    assert isinstance(tile, ManualTensor)
    assert repr(tile) == (
        "ManualTensor(local_shape=(8, 2), dtype=float32, axes=('dp', 'tp'), mesh=(dp=2, tp=4))"
    )


def test_numbers_may_be_written(runtime: Runtime, mesh: DeviceMesh) -> None:
    value = numbers(16, 8)
    tile = enable_manual_sharding(on_mesh(value, mesh).detach(), ("dp", "tp"), mesh=mesh)
    tile[:, 1] = 7.0
    tile.masked_fill_(tile < 0, 0.5)
    back = disable_manual_sharding(tile.clamp(max=5), ("dp", "tp"), (16, 8)).cpu()
    value[:, 1::2] = 7.0
    value.masked_fill_(value < 0, 0.5)
    torch.testing.assert_close(back, value.clamp(max=5))
