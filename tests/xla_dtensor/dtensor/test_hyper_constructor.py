"""``DTensor(local, mesh, placements)``, and what else HyperParallel's DTensor tells of itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from xla_dtensor import DeviceMesh, DTensor, LocalView, compile, distribute_tensor
from xla_dtensor.errors import ArgumentTypeError, DistributeError, LocalViewError
from xla_dtensor.report import collectives
from xla_dtensor.runtimes import Runtime

R = Replicate()
ROWS = torch.arange(24.0).reshape(8, 3)
TEN = torch.arange(30.0).reshape(10, 3)


def each(mesh: DeviceMesh, *shape: int) -> tuple[LocalView, list[torch.Tensor]]:
    """A view, and the tensors that the eight devices have in it."""
    draw = torch.Generator().manual_seed(7)
    tensors = [torch.randn(shape, generator=draw) for _ in range(8)]
    return LocalView.from_shards(tensors, mesh), tensors


# ---------------------------------------------------------------------- the constructor


def test_it_puts_shards_together(mesh: DeviceMesh) -> None:
    view, tensors = each(mesh, 2, 3)
    made = DTensor(view, mesh, [Shard(0), Shard(1)])
    rows = [torch.cat(tensors[4 * i : 4 * i + 4], 1) for i in range(2)]
    assert type(made) is DTensor
    assert made.placements == (Shard(0), Shard(1))
    assert torch.equal(made.cpu(), torch.cat(rows))


def test_parts_of_a_sum(mesh: DeviceMesh) -> None:
    view, tensors = each(mesh, 5)
    made = DTensor(view, device_mesh=mesh, placements=[Partial(), Partial()])
    assert made.is_partial()
    torch.testing.assert_close(made.cpu(), torch.stack(tensors).sum(0))


@pytest.mark.parametrize(
    "placements",
    [[Shard(0), R], [R, Shard(1)], [Shard(0), Shard(0)], [Partial(), Shard(0)], [R, R]],
    ids=str,
)
@pytest.mark.parametrize("value", [ROWS, TEN], ids=["even", "uneven"])
def test_there_and_back(mesh: DeviceMesh, value: torch.Tensor, placements: list[Any]) -> None:
    lies = [R if p.is_partial() else p for p in placements]
    view: Any = distribute_tensor(value, mesh, lies).to_local()
    if placements != lies:
        view = view / 2  # the sum over dp gives it back
    uneven = view._uneven is not None
    options: Any = {"shape": value.shape, "stride": value.stride()} if uneven else {}
    made = DTensor(view, mesh, placements, **options)
    assert made.placements == tuple(placements)
    assert torch.equal(made.cpu(), value)


def test_gradients_go_to_the_local_tensor(mesh: DeviceMesh) -> None:
    view, tensors = each(mesh, 2, 3)
    view.requires_grad_()
    weight = torch.arange(24.0 * 2).reshape(16, 3)
    made = DTensor(view, mesh, [Shard(0), Shard(0)])
    (made * distribute_tensor(weight, mesh)).sum().backward()
    assert len(tensors) == 8
    grad: Any = view.grad
    for device, shard in enumerate(grad.addressable_shards()):
        assert torch.equal(shard.data, weight[2 * device : 2 * device + 2])


def test_a_plain_tensor_is_the_same_on_every_device(mesh: DeviceMesh) -> None:
    plain = torch.tensor([1.0, 2.0], requires_grad=True)
    made = DTensor(plain, mesh, [R, R])
    assert made.tolist() == [1.0, 2.0]
    (made * 3).sum().backward()
    assert plain.grad is not None
    assert plain.grad.tolist() == [3.0, 3.0]
    with mesh:
        assert DTensor(plain).placements == (R, R)


def test_a_tensor_of_the_runtime_is_a_plain_one(mesh: DeviceMesh, runtime: Runtime) -> None:
    # It is of the very kind that a DTensor wraps: only the way it comes in tells them apart.
    whole = distribute_tensor(ROWS, mesh, [Shard(0), R]).full_tensor()
    assert runtime.is_payload(whole)
    made = DTensor(whole, mesh, [R, R])
    assert torch.equal(made.cpu(), ROWS)
    assert made.shape == (8, 3)
    blocks = DTensor(whole, mesh, [Shard(0), R], same_on_every_device=True)
    assert torch.equal(blocks.cpu(), torch.cat([ROWS, ROWS]))
    with pytest.raises(DistributeError, match="a plain tensor of shape=\\(8, 3\\) and S"):
        DTensor(whole, mesh, [Shard(0), R])


def test_run_check_takes_the_first_devices_values(mesh: DeviceMesh) -> None:
    view, tensors = each(mesh, 3)
    with pytest.raises(LocalViewError, match="Replicate says that they are equal there"):
        DTensor(view, mesh, [R, R])
    assert torch.equal(DTensor(view, mesh, [R, R], run_check=True).cpu(), tensors[0])


def test_a_parameter_of_it(mesh: DeviceMesh) -> None:
    view, tensors = each(mesh, 2)
    parameter = torch.nn.Parameter(DTensor(view, mesh, ("dp",), run_check=True))
    assert isinstance(parameter, torch.nn.Parameter)
    assert parameter.is_leaf
    parameter.sum().backward()
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [1.0] * 4
    assert torch.equal(parameter.detach().cpu(), torch.cat([tensors[0], tensors[4]]))


def test_what_is_no_local_tensor(mesh: DeviceMesh) -> None:
    x: Any = distribute_tensor(ROWS, mesh)
    bad: Any = [1.0, 2.0]
    with pytest.raises(ArgumentTypeError, match=r"a DTensor of shape=\(8, 3\)\. That is not one"):
        DTensor(x, mesh, [R, R])
    with pytest.raises(ArgumentTypeError, match="an object of type=list"):
        DTensor(bad, mesh, [R, R])
    with pytest.raises(DistributeError, match="plain tensor of shape=\\(8, 3\\) and S"):
        DTensor(ROWS, mesh, [Shard(0), R])
    with pytest.raises(ArgumentTypeError, match="A mesh was expected"):
        DTensor(ROWS, x._spec)  # what PyTorch's own, internal constructor takes
    with pytest.raises(DistributeError, match="without a mesh"):
        DTensor(ROWS)
    with pytest.raises(TypeError, match="sizes"):
        DTensor(ROWS, mesh, [R, R], sizes=3)


# ---------------------------------------------------------------------- what it is


def test_local_shape(mesh: DeviceMesh) -> None:
    x = distribute_tensor(TEN, mesh, [R, Shard(0)])
    assert x.local_shape == torch.Size([3, 3])
    assert isinstance(x.local_shape, torch.Size)
    assert x.local_shape == x.to_local().shape
    assert distribute_tensor(TEN, mesh, ("tp", "dp")).local_shape == (3, 2)
    assert distribute_tensor(torch.tensor(1.0), mesh).local_shape == ()


def test_layout(mesh: DeviceMesh) -> None:
    x: Any = distribute_tensor(ROWS, mesh, (("tp", "dp"), "None"))
    assert x.layout == torch.strided
    assert x.mesh_layout.alias_placements == (("tp", "dp"), "None")
    assert x.mesh_layout.get_global_shape(x.local_shape) == (8, 3)
    assert not x.mesh_layout.is_partial()
    assert x.sum(0).mesh_layout.is_partial()


def test_reduce_partial(mesh: DeviceMesh) -> None:
    x = distribute_tensor(ROWS, mesh, [Shard(0), Shard(1)]).requires_grad_()
    total: Any = x.sum(0)
    assert total.placements == (Partial(), Shard(0))
    reduced = total.reduce_partial()
    assert reduced.placements == (R, Shard(0))
    assert reduced.mesh_layout.op_sharding() == reduced.xla_sharding()
    assert torch.equal(reduced.cpu(), ROWS.sum(0))
    assert reduced.reduce_partial() is reduced
    assert not reduced.is_partial()
    assert total.is_partial()
    (reduced * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[1.0, 2.0, 3.0]] * 8


@pytest.mark.parametrize(
    ("op", "reduced"), [("max", torch.amax), ("min", torch.amin), ("avg", torch.mean)]
)
def test_reduce_partial_by_other_ops(mesh: DeviceMesh, op: str, reduced: Any) -> None:
    view, tensors = each(mesh, 4)
    made = DTensor(view, mesh, [Partial(op), Partial(op)]).reduce_partial()
    assert made.placements == (R, R)
    torch.testing.assert_close(made.cpu(), reduced(torch.stack(tensors), 0))


def test_reduce_partial_reduces_once(mesh: DeviceMesh, runtime: Runtime) -> None:
    x = distribute_tensor(torch.ones(8, 64), mesh, [Shard(0), R])
    step = compile(lambda t: t.sum(0).reduce_partial().reduce_partial())
    assert step(x).tolist() == [8.0] * 64
    found = collectives(step.hlo(), mesh.value)
    assert [(c.kind, c.axes) for c in found] == [("all-reduce", ("dp",))]


# ---------------------------------------------------------------------- conversions and sizes

CONVERSIONS: dict[str, tuple[Any, torch.dtype]] = {
    "to_dtype": (lambda t: t.to(torch.float64), torch.float64),
    "to_other": (lambda t: t.to(t.int()[:1]), torch.int32),
    "to_copy": (lambda t: t.to(torch.float32, copy=True), torch.float32),
    "type": (lambda t: t.type(torch.int64), torch.int64),
    "float": (lambda t: t.double().float(), torch.float32),
    "half": (lambda t: t.half(), torch.float16),
    "bfloat16": (lambda t: t.bfloat16(), torch.bfloat16),
    "int": (lambda t: t.int(), torch.int32),
}


@pytest.mark.parametrize("name", CONVERSIONS)
@pytest.mark.parametrize(
    "placements", [[Shard(0), R], [Shard(0), Shard(0)], ("None", "tp"), [R, R]], ids=str
)
def test_conversions_keep_placements(mesh: DeviceMesh, name: str, placements: Any) -> None:
    convert, dtype = CONVERSIONS[name]
    value = torch.arange(32.0).reshape(8, 4)
    x = distribute_tensor(value, mesh, placements)
    made = convert(x)
    assert type(made) is DTensor
    assert made.dtype == dtype
    assert (made.placements, made.device_mesh) == (x.placements, mesh)
    assert made.xla_sharding() == x.xla_sharding()
    assert torch.equal(made.cpu(), value.to(dtype))


def test_conversions_of_what_is_pending(mesh: DeviceMesh) -> None:
    total: Any = distribute_tensor(ROWS, mesh, [Shard(0), R]).sum(0)
    assert total.float().placements == total.placements
    assert total.to(torch.float64).tolist() == ROWS.sum(0).tolist()


def test_sizes_are_those_of_the_whole(mesh: DeviceMesh) -> None:
    x = distribute_tensor(TEN, mesh, ("dp", "tp"))
    assert (x.size(), x.size(0), x.size(-1), x.numel()) == (torch.Size([10, 3]), 10, 3, 30)
    assert x.size(dim=1) == 3
    assert x.to_local().size(0) == 5
    even = distribute_tensor(TEN, mesh, ("dp", "None"))
    assert (even.to_local().size(0), even.to_local().numel()) == (5, 15)
