"""K. DTensors beside plain tensors, other meshes, local regions, losses and debugging tools."""

# torch does not list these names in __all__.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode, visualize_sharding
from torch.distributed.tensor.experimental import local_map
from torch.distributed.tensor.parallel import loss_parallel

import xla_dtensor as xd
import xla_dtensor.spmd as xs
from xla_dtensor.errors import ProcessGroupError, UnsupportedOpError
from xla_dtensor.report import collectives, summarize
from xla_dtensor.runtimes import Runtime

R = Replicate()
X = torch.arange(32.0).reshape(8, 4)


@pytest.fixture
def rows(mesh: xd.DeviceMesh) -> Any:
    return xd.distribute_tensor(X, mesh, [Shard(0), R])


@pytest.mark.parametrize("order", ["dtensor first", "plain first", "marked"])
def test_silent_mixing_gives_a_half_built_object(rows: Any, dp_tp: xs.Mesh, order: str) -> None:
    plain = torch.full((8, 4), 2.0)
    mixed: Any = {
        "dtensor first": lambda: rows + plain,
        "plain first": lambda: plain + rows,
        "marked": lambda: xs.mark_sharding(X.clone(), dp_tp, ("dp", None)) + plain,
    }[order]()
    assert isinstance(mixed, xd.DTensor)
    assert mixed.placements == (Shard(0), R)
    assert torch.equal(mixed.full_tensor().cpu(), X + 2)
    assert mixed.xla_sharding() is not None
    again = xs.wrap_as_sharded_tensor(mixed)
    assert torch.equal(again.global_tensor.cpu(), X + 2)


def test_write_through_a_view(rows: Any) -> None:
    rows[2:6].mul_(2)
    rows.t()[1].zero_()
    expected = X.clone()
    expected[2:6] *= 2
    expected[:, 1] = 0
    assert torch.equal(rows.cpu(), expected)


def test_convolution(runtime: Runtime, mesh: xd.DeviceMesh) -> None:
    torch.manual_seed(0)
    plain = nn.Conv2d(4, 8, 3, padding=1)
    weight, bias = plain.weight.detach(), plain.bias.detach()  # pyright: ignore
    x, filters = torch.randn(8, 4, 6, 6), [R, Shard(0)]
    ours: Any = nn.Parameter(xd.distribute_tensor(weight, mesh, filters))
    given = xd.distribute_tensor(x, mesh, [Shard(0), R])
    if runtime.name == "jax" and not lowers_convolution(given, ours):
        found = through_jax(given, ours) + bias[:, None, None]
    else:
        found: Any = F.conv2d(given, ours, bias, padding=1)
    expected = plain(x)
    torch.testing.assert_close(found.detach().cpu(), expected.detach(), rtol=1e-4, atol=1e-4)
    found.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(ours.grad.cpu(), plain.weight.grad, rtol=1e-4, atol=1e-3)


def lowers_convolution(x: Any, weight: Any) -> bool:
    """Whether the runtime can; where it cannot, it says so."""
    try:
        F.conv2d(x, weight)
    except UnsupportedOpError:
        return False
    return True


def through_jax(x: Any, weight: Any) -> Any:
    import jax

    def convolve(x: Any, weight: Any) -> Any:
        return jax.lax.conv(x, weight, (1, 1), "SAME")

    placements = [Shard(0), R], [R, R]
    whole = weight.redistribute(placements=[R, R])
    return xd.call_jax(convolve, placements, [Shard(0), R])(x, whole)


def test_attention(mesh: xd.DeviceMesh) -> None:
    q, k, v = torch.randn(3, 4, 8, 16, 8).unbind(0)
    given: list[Any] = [xd.distribute_tensor(t, mesh, [Shard(0), Shard(1)]) for t in (q, k, v)]
    found: Any = F.scaled_dot_product_attention(*given, is_causal=True)
    torch.testing.assert_close(
        found.cpu(), F.scaled_dot_product_attention(q, k, v, is_causal=True), rtol=1e-4, atol=1e-5
    )


def test_two_meshes_in_one_op(mesh: xd.DeviceMesh, one_axis: xd.DeviceMesh, rows: Any) -> None:
    other = xd.distribute_tensor(X, one_axis, [Shard(0)])
    total: Any = rows + other
    assert total.device_mesh in (mesh, one_axis)
    assert torch.equal(total.cpu(), X * 2)


@pytest.mark.usefixtures("installed")
def test_local_map(mesh: xd.DeviceMesh) -> None:
    def product(a: Any, b: Any) -> Any:
        assert (tuple(a.shape), tuple(b.shape)) == ((4, 1), (1, 3))
        return funcol.all_reduce(a @ b, "sum", (mesh, 1))

    b = torch.randn(4, 3)
    mapped: Any = local_map(product, [Shard(0), R], ([Shard(0), Shard(1)], [R, Shard(0)]))
    found: Any = mapped(
        xd.distribute_tensor(X, mesh, [Shard(0), Shard(1)]),
        xd.distribute_tensor(b, mesh, [R, Shard(0)]),
    )
    assert found.placements == (Shard(0), R)
    torch.testing.assert_close(found.cpu(), X @ b)


@pytest.mark.parametrize("context", [loss_parallel, xd.loss_parallel], ids=["torch", "ours"])
def test_loss_parallel(mesh: xd.DeviceMesh, context: Callable[[], Any]) -> None:
    logits, classes = torch.randn(8, 16), torch.randint(0, 16, (8,))
    ours: Any = xd.distribute_tensor(logits, mesh, [R, Shard(1)]).requires_grad_()
    with context():
        found: Any = F.cross_entropy(ours, classes)
        found.backward()
    expected = F.cross_entropy(logits.requires_grad_(), classes)
    expected.backward()
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(ours.grad.cpu(), logits.grad)


def test_silent_comm_debug_mode_reports_no_communication(mesh: xd.DeviceMesh, rows: Any) -> None:
    with CommDebugMode() as mode:
        with pytest.warns(UserWarning, match="CommDebugMode saw an op on a DTensor") as caught:
            product: Any = rows @ rows.t()
        moved = (product + 1).redistribute(placements=[R, R])  # says it no more
    assert len(caught) == 1
    assert "It counts calls of collectives, but here XLA's partitioner" in str(caught[0].message)
    assert "xla_dtensor.report.collectives" in str(caught[0].message)
    assert mode.get_total_counts() == 0
    assert torch.equal(moved.cpu(), X @ X.t() + 1)


def test_communication_is_read_from_the_program(mesh: xd.DeviceMesh) -> None:
    @xd.compile
    def product(a: Any, b: Any) -> Any:
        return (a @ b).redistribute(placements=[Shard(0), R])

    a, b = torch.randn(8, 16), torch.randn(16, 4)
    given = [
        xd.distribute_tensor(a, mesh, [Shard(0), Shard(1)]),
        xd.distribute_tensor(b, mesh, [R, Shard(0)]),
    ]
    torch.testing.assert_close(product(*given).cpu(), a @ b)
    rows = summarize(collectives(product.hlo(), mesh=mesh.value))
    assert [(row.kind, row.axes, row.count) for row in rows] == [("all-reduce", ("tp",), 1)]


def test_picture_of_a_sharding_by_torch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], mesh: xd.DeviceMesh
) -> None:
    # torch needs the package tabulate for it; a stand-in shows the rows that torch hands over.
    tables = types.ModuleType("tabulate")
    tables.__spec__ = importlib.machinery.ModuleSpec("tabulate", None)
    seen: list[Any] = []
    tables.tabulate = lambda rows, **_: seen.append(rows) or "a table"  # pyright: ignore
    monkeypatch.setitem(sys.modules, "tabulate", tables)
    visualize_sharding(xd.distribute_tensor(torch.ones(8, 8), mesh, [Shard(0), Shard(1)]))
    assert "a table" in capsys.readouterr().out
    assert len(seen) == 1
    cells = [str(cell) for row in seen[0] for cell in row]
    assert sum(any(f"xla:{device}" in cell for cell in cells) for device in range(8)) == 8


def test_picture_of_a_sharding_read_from_the_runtime(
    mesh: xd.DeviceMesh, capsys: pytest.CaptureFixture[str]
) -> None:
    d = xd.distribute_tensor(torch.ones(8, 8), mesh, [Shard(0), Shard(1)])
    xs.visualize_tensor_sharding(d, use_color=False)
    printed = capsys.readouterr().out
    assert all(f"CPU {device}" in printed for device in range(8))


def test_functional_collectives_on_a_dtensor_name_the_way_out(
    mesh: xd.DeviceMesh, rows: Any
) -> None:
    with pytest.raises(ProcessGroupError, match=r"collectives on x.to_local\(\)"):
        funcol.all_reduce(rows, "sum", (mesh, 0))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ProcessGroupError, match="Its value is whole"):
            dist.all_reduce(rows)
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("installed")
def test_functional_collectives_on_a_local_view(mesh: xd.DeviceMesh, rows: Any) -> None:
    summed: Any = funcol.all_reduce(rows.to_local(), "sum", (mesh, 0))
    assert torch.equal(summed.cpu(), X[:4] + X[4:])
