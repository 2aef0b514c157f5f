"""mark_sharding and its family, eagerly: every kind of tensor, in place, and every message."""

# torch types .grad as optional and a module's attributes as tensors or modules.
# pyright: reportOptionalMemberAccess=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportReturnType=false
# pyright: reportIndexIssue=false, reportOptionalSubscript=false, reportOptionalIterable=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import copy
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import xla_dtensor as xd
import xla_dtensor.spmd as xs
from xla_dtensor.core import LayoutError, OpSharding
from xla_dtensor.errors import ArgumentTypeError, DistributeError, ManualRegionError
from xla_dtensor.runtimes import Runtime
from xla_dtensor.runtimes.registry import get_runtime

Plain = Callable[[torch.Tensor], Any]


def counting(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


def lies(tensor: torch.Tensor) -> str:
    """How a tensor lies, read from the runtime."""
    payload = tensor._local_tensor if isinstance(tensor, xd.DTensor) else tensor
    return str(get_runtime().op_sharding(payload))


# ---------------------------------------------------------------- partition specs


@pytest.mark.parametrize(
    ("spec", "sharding", "tile"),
    [
        ((0, None), "{devices=[2,1,4]<=[8] last_tile_dim_replicate}", (4, 16)),
        (("dp", None), "{devices=[2,1,4]<=[8] last_tile_dim_replicate}", (4, 16)),
        ((None, "tp"), "{devices=[1,4,2]<=[2,4]T(1,0) last_tile_dim_replicate}", (8, 4)),
        ((("dp", "tp"), None), "{devices=[8,1]<=[8]}", (1, 16)),
        ((None, ("tp", "dp")), "{devices=[1,8]<=[2,4]T(1,0)}", (8, 2)),
        ((("dp",), "tp"), "{devices=[2,4]<=[8]}", (4, 4)),
        (["tp", "dp"], "{devices=[4,2]<=[2,4]T(1,0)}", (2, 8)),
        ((None, None), "{replicated}", (8, 16)),
    ],
)
def test_partition_specs(dp_tp: xs.Mesh, spec: Any, sharding: str, tile: tuple[int, ...]) -> None:
    marked = xs.mark_sharding(counting(8, 16), dp_tp, spec)
    assert marked.sharding_spec == sharding
    assert {tuple(s.data.shape) for s in marked.local_shards} == {tile}
    assert torch.equal(marked.cpu(), counting(8, 16))


def test_any_kind_of_mesh(mesh: xd.DeviceMesh, dp_tp: xs.Mesh) -> None:
    for given in (mesh, dp_tp, dp_tp.value):
        marked = xs.mark_sharding(counting(8), given, ("tp",))
        assert marked.sharding_spec == "{devices=[4,2]<=[2,4]T(1,0) last_tile_dim_replicate}"


def test_a_wrong_partition_spec(dp_tp: xs.Mesh) -> None:
    message = (
        "mark_sharding was called with partition_spec=(0,) of 1 entries on a tensor of "
        "shape=(8, 4). There is one entry per dim, because a shorter one does not say which dims "
        "it leaves out. Pass 2 entries; None leaves a dim whole."
    )
    with pytest.raises(DistributeError, match=re.escape(message)):
        xs.mark_sharding(counting(8, 4), dp_tp, (0,))
    for wrong in (("nowhere", None), (7, None), ("dp", "dp"), ((("dp",), "tp"), None), (1.5, None)):
        with pytest.raises(LayoutError):
            xs.mark_sharding(counting(8, 4), dp_tp, wrong)


@pytest.mark.parametrize(
    "function",
    [xs.mark_sharding, xs.mark_sharding_with_gradients, xs.annotate_custom_sharding],
)
def test_what_is_no_tensor(dp_tp: xs.Mesh, function: Callable[..., Any]) -> None:
    message = (
        f"{function.__name__} was called with an object of type=list. Only a tensor can be "
        "annotated. Pass torch.as_tensor(value)."
    )
    with pytest.raises(ArgumentTypeError, match=re.escape(message)):
        function([1, 2], dp_tp, ("dp",))


def test_a_manual_tensor(dp_tp: xs.Mesh) -> None:
    tile = xs.enable_manual_sharding(counting(8), ("dp",), mesh=dp_tp)
    with pytest.raises(
        ManualRegionError,
        match=r"mark_sharding was called on .* Inside a manual region XLA lays nothing out\. "
        r"Call disable_manual_sharding first\.",
    ):
        xs.mark_sharding(tile, dp_tp, ("dp",))


@pytest.mark.parametrize(
    "call",
    [
        lambda t, m: xs.annotate_custom_sharding(t, m, ("dp",)),
        lambda t, m: xs.mark_sharding_with_gradients(t, m, ("dp",)),
        lambda t, m: xs.clear_sharding(t),
    ],
)
def test_a_host_tensor_where_none_is_taken(dp_tp: xs.Mesh, call: Callable[..., Any]) -> None:
    with pytest.raises(
        DistributeError,
        match=r"was called with a host tensor of shape=\(8,\) on device=cpu\. Only tensors on the "
        r"runtime's devices lie in some way\. Call mark_sharding or distribute_tensor, which put "
        r"it there\.",
    ):
        call(counting(8), dp_tp)


# ---------------------------------------------------------------- a DTensor


def test_a_dtensor_is_annotated_in_place(mesh: xd.DeviceMesh, dp_tp: xs.Mesh) -> None:
    tensor = xd.distribute_tensor(counting(8, 4), mesh, None)
    marked = xs.mark_sharding(tensor, dp_tp, ("dp", "tp"))
    assert marked is tensor
    assert tensor.placements == (Shard(0), Shard(1))
    assert lies(tensor) == "{devices=[2,4]<=[8]}"
    assert torch.equal(tensor.cpu(), counting(8, 4))


def test_a_dtensor_keeps_its_history(mesh: xd.DeviceMesh, dp_tp: xs.Mesh) -> None:
    leaf = xd.distribute_tensor(counting(8, 4), mesh, None).requires_grad_()
    hidden = leaf * 2
    marked = xs.mark_sharding(hidden, dp_tp, ("dp", None))
    assert marked is hidden
    (marked**2).sum().backward()
    assert torch.equal(leaf.grad.cpu(), 8 * counting(4 * 8).reshape(8, 4))
    assert marked.local_shards[0].data.shape == (4, 4)


def test_a_meta_dtensor_is_only_labelled(mesh: xd.DeviceMesh, dp_tp: xs.Mesh) -> None:
    module = xd.distribute_module(nn.Linear(8, 8, device="meta"), mesh)
    marked = xs.mark_sharding(module.weight, dp_tp, ("tp", None))
    assert marked is module.weight
    assert marked.placements == (Replicate(), Shard(0))
    xs.clear_sharding(marked)
    assert marked.placements == (Replicate(), Replicate())


# ---------------------------------------------------------------- a plain device tensor


def test_a_plain_tensor_is_annotated_in_place(dp_tp: xs.Mesh, plain: Plain) -> None:
    tensor = plain(counting(8, 4))
    marked = xs.mark_sharding(tensor, dp_tp, ("dp", "tp"))
    assert marked.global_tensor is tensor
    assert lies(tensor) == "{devices=[2,4]<=[8]}"
    assert torch.equal(tensor.cpu(), counting(8, 4))


def test_a_pending_plain_tensor(dp_tp: xs.Mesh, plain: Plain) -> None:
    tensor = plain(counting(8, 4)) * 2 + 1
    xs.mark_sharding(tensor, dp_tp, (None, "tp"))
    assert lies(tensor) == "{devices=[1,4,2]<=[2,4]T(1,0) last_tile_dim_replicate}"
    assert torch.equal(tensor.cpu(), counting(8, 4) * 2 + 1)


def test_the_wrapper_passes_gradients_to_the_tensor(dp_tp: xs.Mesh, plain: Plain) -> None:
    leaf = plain(counting(8)).requires_grad_()
    hidden = leaf * 3
    xs.mark_sharding(hidden, dp_tp, ("dp",)).square().sum().backward()
    assert torch.equal(leaf.grad.cpu(), 18 * counting(8))


def test_a_view_and_its_base(mesh: xd.DeviceMesh, dp_tp: xs.Mesh) -> None:
    base = xd.distribute_tensor(counting(8, 4), mesh, None)
    view = base[:4]
    marked = xs.mark_sharding(view, dp_tp, ("dp", None))
    assert marked is view
    assert torch.equal((view * 1).cpu(), counting(8, 4)[:4])
    with torch.no_grad():
        view.add_(100)
    assert torch.equal(base.cpu()[:4], counting(8, 4)[:4] + 100)
    assert torch.equal(base.cpu()[4:], counting(8, 4)[4:])
    assert marked.local_shards[0].data.shape == (2, 4)


# ---------------------------------------------------------------- a CPU tensor, moved in place


def test_a_parameter_stays_the_object_that_the_optimizer_has(dp_tp: xs.Mesh) -> None:
    torch.manual_seed(0)
    ours, reference = nn.Linear(8, 4), nn.Linear(8, 4)
    reference.load_state_dict(ours.state_dict())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (ours, reference)]
    weight = ours.weight
    xs.mark_sharding(ours.weight, dp_tp, ("tp", None))
    xs.mark_sharding(ours.bias, dp_tp, ("tp",))
    assert ours.weight is weight
    assert isinstance(weight, nn.Parameter)
    for _ in range(3):
        inputs = torch.randn(4, 8)
        on_devices = xs.clear_sharding(xs.mark_sharding(inputs.clone(), dp_tp, (None, None)))
        for optimizer, model, x in zip(
            optimizers, (ours, reference), (on_devices, inputs), strict=True
        ):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(weight.detach().cpu(), reference.weight.detach())
    state = optimizers[0].state[weight]["exp_avg"]
    assert lies(weight) == "{devices=[4,1,2]<=[2,4]T(1,0) last_tile_dim_replicate}"
    assert lies(state) == lies(weight)


def test_a_parameter_keeps_its_gradient_hooks_and_attributes(dp_tp: xs.Mesh) -> None:
    weight: Any = nn.Parameter(counting(8, 4))
    (weight * 2).sum().backward()
    called: list[int] = []
    hook = weight.register_hook(lambda grad: grad * 10)
    weight.register_post_accumulate_grad_hook(lambda _: called.append(1))
    weight.sequence_parallel = True
    xs.mark_sharding(weight, dp_tp, ("dp", None))
    assert weight.sequence_parallel
    assert lies(weight.grad) == lies(weight) != "{replicated}"
    (weight * 3).sum().backward()
    assert torch.equal(weight.grad.cpu(), torch.full((8, 4), 32.0))
    assert called == [1]
    hook.remove()
    (weight * 3).sum().backward()
    assert torch.equal(weight.grad.cpu(), torch.full((8, 4), 35.0))


def test_tied_weights_and_frozen_ones(dp_tp: xs.Mesh) -> None:
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
    model[1].weight = model[0].weight
    expected = model[0].weight.detach().clone()
    xs.mark_sharding(model[0].weight.requires_grad_(False), dp_tp, ("tp", None))
    assert model[1].weight is model[0].weight
    assert not model[0].weight.requires_grad
    assert isinstance(model[0].weight, nn.Parameter)
    assert torch.equal(model[1].weight.cpu(), expected)


def test_buffers(dp_tp: xs.Mesh) -> None:
    model = nn.BatchNorm1d(8)
    buffer = nn.Buffer(counting(8))
    xs.mark_sharding(model.running_var, dp_tp, ("tp",))
    xs.mark_sharding(buffer, dp_tp, ("tp",))
    assert isinstance(buffer, nn.Buffer)
    assert not buffer.requires_grad
    assert model.state_dict()["running_var"].cpu().tolist() == [1.0] * 8
    assert lies(model.running_var) == "{devices=[4,2]<=[2,4]T(1,0) last_tile_dim_replicate}"


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.bool, torch.bfloat16, torch.float64, torch.complex64]
)
def test_dtypes(dp_tp: xs.Mesh, dtype: torch.dtype) -> None:
    tensor = counting(8).to(dtype)
    xs.mark_sharding(tensor, dp_tp, ("tp",))
    assert tensor.dtype == dtype
    assert torch.equal(tensor.cpu(), counting(8).to(dtype))


def test_empty_and_scalar_tensors(dp_tp: xs.Mesh) -> None:
    empty = xs.mark_sharding(torch.ones(0, 4), dp_tp, ("dp", None))
    assert empty.shape == (0, 4)
    assert empty.cpu().tolist() == []
    scalar = xs.mark_sharding(torch.tensor(1.5), dp_tp, ())
    assert (scalar.item(), f"{scalar:.2f}") == (1.5, "1.50")


def test_the_memory_that_it_shared_stays_where_it_was(dp_tp: xs.Mesh) -> None:
    array = counting(8).numpy()
    tensor = torch.from_numpy(array)
    xs.mark_sharding(tensor, dp_tp, ("dp",))
    array[:] = 7
    assert torch.equal(tensor.cpu(), counting(8))


def refused(tensor: Any, dp_tp: xs.Mesh, message: str) -> None:
    before = copy.copy(tensor.__dict__)
    with pytest.raises(DistributeError, match=message):
        xs.mark_sharding(tensor, dp_tp, ("dp", *(None,) * (tensor.ndim - 1)))
    assert tensor.__dict__ == before
    assert not get_runtime().is_payload(tensor)


ONLY_DENSE = (
    r"Only a dense CPU tensor without history can be put on the devices in place\. Pass such a "
    r"tensor, or compute it from tensors that are there already\."
)
HELD = (
    r"shape=\(8,\) that cannot become a device tensor in place: .* Something holds on to it as it "
    r"is\. Use the tensor that distribute_tensor\(t, mesh, placements\) returns\."
)


def test_a_cpu_tensor_with_a_history(dp_tp: xs.Mesh) -> None:
    message = r"called with a Tensor on device=cpu, layout=torch.strided, with an autograd history"
    refused(counting(8).requires_grad_() * 2, dp_tp, rf"{message}\. {ONLY_DENSE}")


def test_a_sparse_and_a_meta_tensor(dp_tp: xs.Mesh) -> None:
    refused(torch.eye(8).to_sparse(), dp_tp, rf"layout=torch.sparse_coo, a leaf\. {ONLY_DENSE}")
    refused(torch.ones(8, 4, device="meta"), dp_tp, rf"device=meta, .*a leaf\. {ONLY_DENSE}")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor(dp_tp: xs.Mesh) -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    refused(nested, dp_tp, rf"nested\. {ONLY_DENSE}")


def test_a_tensor_that_something_holds_on_to(dp_tp: xs.Mesh) -> None:
    tensor = counting(9)[:8].clone()
    reference = weakref.ref(tensor)
    refused(tensor, dp_tp, HELD)
    assert reference() is tensor
    viewed = counting(9)[:8].clone()
    view = viewed[:4]
    refused(viewed, dp_tp, HELD)
    assert torch.equal(view, counting(4))


def test_backward_through_what_was_computed_before_the_move(dp_tp: xs.Mesh) -> None:
    """torch poisons such a graph: an error, and no gradient on the wrong device."""
    weight = nn.Parameter(counting(8))
    loss = (weight * 2).sum()
    xs.mark_sharding(weight, dp_tp, ("dp",))
    with pytest.raises(RuntimeError, match="poisoned by swap_tensors"):
        loss.backward()
    assert weight.grad is None


# ---------------------------------------------------------------- again, and back


def test_the_same_again_does_nothing(dp_tp: xs.Mesh) -> None:
    tensor = counting(8, 4)
    first = xs.mark_sharding(tensor, dp_tp, ("dp", None))
    second = xs.mark_sharding(tensor, dp_tp, (0, ()))
    assert xs.mark_sharding(first, dp_tp, (("dp",), None)) is first
    assert second.sharding_spec == first.sharding_spec


@pytest.mark.parametrize("which", ["tensor", "wrapper", "dtensor", "pending"])
def test_otherwise_again_is_refused(
    mesh: xd.DeviceMesh, dp_tp: xs.Mesh, plain: Plain, which: str
) -> None:
    tensor = plain(counting(8, 4))
    marked = xs.mark_sharding(tensor + 1 if which == "pending" else tensor, dp_tp, ("dp", None))
    dtensor = xd.distribute_tensor(counting(8, 4), mesh, [Shard(0), Replicate()])
    again = {"tensor": tensor, "wrapper": marked, "dtensor": dtensor}.get(
        which, marked.global_tensor
    )
    message = (
        "mark_sharding was called with {devices=[1,4,2]<=[2,4]T(1,0) last_tile_dim_replicate} on a "
        "tensor of shape=(8, 4) that was told {devices=[2,1,4]<=[8] last_tile_dim_replicate} "
        "before. Existing annotation must be cleared first, or the later one would win in some "
        "programs and the earlier in others. Call clear_sharding, or move it with redistribute."
    )
    with pytest.raises(DistributeError, match=re.escape(message)):
        xs.mark_sharding(again, dp_tp, (None, "tp"))
    assert lies(again) == "{devices=[2,1,4]<=[8] last_tile_dim_replicate}"


def test_a_replication_needs_no_clearing(dp_tp: xs.Mesh) -> None:
    tensor = counting(8, 4)
    whole = xs.mark_sharding(tensor, dp_tp, (None, None))
    marked = xs.mark_sharding(whole, dp_tp, ("dp", "tp"))
    assert marked.global_tensor is tensor
    assert lies(tensor) == lies(marked) == "{devices=[2,4]<=[8]}"


@pytest.mark.parametrize("through", ["tensor", "wrapper"])
def test_cleared_and_marked_otherwise(dp_tp: xs.Mesh, through: str) -> None:
    tensor = counting(8, 4)
    marked = xs.mark_sharding(tensor, dp_tp, ("dp", None))
    cleared = xs.clear_sharding(marked if through == "wrapper" else tensor)
    assert cleared is tensor
    assert lies(tensor) == lies(marked) == "{replicated}"
    assert xs.wrap_if_sharded(tensor) is tensor
    assert torch.equal((tensor * 2).cpu(), counting(8, 4) * 2)
    again = xs.mark_sharding(tensor, dp_tp, (None, "tp"))
    assert again.local_shards[0].data.shape == (8, 1)
    assert torch.equal(again.cpu(), counting(8, 4))


def test_a_pending_value_cleared_and_marked_otherwise(dp_tp: xs.Mesh, plain: Plain) -> None:
    source = plain(counting(8, 4))
    pending = source + 1
    xs.clear_sharding(xs.mark_sharding(pending, dp_tp, ("dp", None)))
    again = xs.mark_sharding(pending, dp_tp, (None, "tp"))
    assert again.local_shards[0].data.shape == (8, 1)
    assert torch.equal(again.cpu(), counting(8, 4) + 1)
    assert lies(source) == "{replicated}"


def test_clearing_a_dtensor(mesh: xd.DeviceMesh) -> None:
    tensor = xd.distribute_tensor(counting(8, 4), mesh, [Shard(0), Replicate()])
    assert xs.clear_sharding(tensor) is tensor
    assert tensor.placements == (Replicate(), Replicate())
    assert lies(tensor) == "{replicated}"


def test_clearing_a_view(mesh: xd.DeviceMesh, dp_tp: xs.Mesh) -> None:
    view = xd.distribute_tensor(counting(8, 4), mesh, None)[:4]
    xs.clear_sharding(xs.mark_sharding(view, dp_tp, ("dp", None)))
    again = xs.mark_sharding(view, dp_tp, (None, "tp"))
    assert torch.equal(again.cpu(), counting(8, 4)[:4])
    assert again.local_shards[0].data.shape == (4, 1)


@pytest.mark.parametrize("kind", ["dtensor", "plain"])
def test_annotate_custom_sharding_needs_no_clearing(
    dp_tp: xs.Mesh, plain: Plain, kind: str
) -> None:
    tensor = plain(counting(8, 4))
    marked = xs.mark_sharding(tensor, dp_tp, ("dp", None))
    given = marked if kind == "dtensor" else tensor
    again = xs.annotate_custom_sharding(given, dp_tp, (None, "tp"))
    assert (again is marked) == (kind == "dtensor")
    assert again.global_tensor is tensor
    assert again.placements == (Replicate(), Shard(1))
    for lying in (again, tensor):
        assert OpSharding.parse(lies(lying)) == dp_tp.op_sharding((None, "tp"))
    assert torch.equal(again.cpu(), counting(8, 4))


# ---------------------------------------------------------------- with gradients


@pytest.mark.parametrize("kind", ["dtensor", "plain"])
def test_mark_sharding_with_gradients(
    mesh: xd.DeviceMesh, dp_tp: xs.Mesh, plain: Plain, kind: str
) -> None:
    put = plain if kind == "plain" else lambda t: xd.distribute_tensor(t, mesh, None)
    leaf = put(counting(8, 4)).requires_grad_()
    source = leaf * 1
    marked = xs.mark_sharding_with_gradients(source, dp_tp, ("dp", "tp"))
    assert marked is not source
    assert type(marked) is (xs.XLAShardedTensor if kind == "dtensor" else type(source))
    assert lies(marked) == "{devices=[2,4]<=[8]}"
    (grad,) = torch.autograd.grad((marked**3).sum(), leaf, create_graph=True)
    assert lies(grad) == "{devices=[2,4]<=[8]}"
    torch.testing.assert_close(grad.detach().cpu(), 3 * counting(8, 4) ** 2)
    (twice,) = torch.autograd.grad(grad.sum(), leaf)
    torch.testing.assert_close(twice.cpu(), 6 * counting(8, 4))


def test_the_autograd_function_itself(mesh: xd.DeviceMesh, dp_tp: xs.Mesh) -> None:
    leaf = xd.distribute_tensor(counting(8), mesh, None).requires_grad_()
    marked: Any = xs.MarkShardingFunction.apply(leaf, dp_tp, ("tp",))
    assert lies(marked) == "{devices=[4,2]<=[2,4]T(1,0) last_tile_dim_replicate}"
    assert lies(leaf) == "{replicated}"
    marked.sum().backward()
    assert lies(leaf.grad) == lies(marked)


def test_without_a_mesh(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xla_dtensor.spmd.mesh._global_mesh", None)
    message = (
        "mark_sharding was called without a mesh. None was passed and there is no global one. "
        "Pass mesh=, or call set_global_mesh once."
    )
    with pytest.raises(DistributeError, match=re.escape(message)):
        xs.mark_sharding(counting(8), None, (None,))
