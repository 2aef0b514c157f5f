"""XLAShardedTensor: what it says of itself, its shards, loading them, wrapping and unwrapping."""

# torch types .grad as optional and a module's attributes as tensors or modules.
# pyright: reportOptionalMemberAccess=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportReturnType=false
# pyright: reportIndexIssue=false, reportOptionalSubscript=false, reportOptionalIterable=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import xla_dtensor as xd
import xla_dtensor.spmd as xs
from xla_dtensor.core import OpSharding
from xla_dtensor.errors import DistributeError
from xla_dtensor.runtimes import Runtime, get_runtime
from xla_dtensor.spmd.mesh import ShardingType, sharding_type_of

Plain = Callable[[torch.Tensor], Any]


def counting(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


def nested_tuple(value: Any) -> Any:
    return tuple(map(nested_tuple, value)) if isinstance(value, list) else value


# ---------------------------------------------------------------- what torch_xla says


def test_shards_are_those_of_torch_xla(runtime: Runtime, torch_xla_says: dict[str, Any]) -> None:
    """Device, indices, replica, padded and unpadded values, for 17 partition specs."""
    assert len(torch_xla_says["shards"]) == 17
    for theirs in torch_xla_says["shards"]:
        shape, ids, mesh_shape, spec = map(nested_tuple, theirs["case"])
        marked = xs.mark_sharding(counting(*shape), xs.Mesh(ids, mesh_shape), spec)
        ours = [
            [
                s.shard_device,
                None if s.indices is ... else [[i.start, i.stop] for i in s.indices],
                s.replica_id,
                s.data.tolist(),
                s.unpadded_data.tolist(),
            ]
            for s in marked.local_shards
        ]
        assert ours == theirs["shards"], theirs["case"]
        assert int(marked.sharding_type) == theirs["type"], theirs["case"]
        assert str(xs.Mesh(range(8), (2, 4), ("dp", "tp"))) == torch_xla_says["mesh"]


@pytest.mark.only_on("torch_xla")
def test_sharding_spec_is_that_of_torch_xla(
    runtime: Runtime, torch_xla_says: dict[str, Any]
) -> None:
    for theirs in torch_xla_says["shards"]:
        shape, ids, mesh_shape, spec = map(nested_tuple, theirs["case"])
        marked = xs.mark_sharding(counting(*shape), xs.Mesh(ids, mesh_shape), spec)
        assert OpSharding.parse(marked.sharding_spec) == OpSharding.parse(theirs["spec"])


# ---------------------------------------------------------------- attributes


def test_what_it_says_of_itself(dp_tp: xs.Mesh) -> None:
    marked = xs.mark_sharding(counting(16, 8), dp_tp, ("tp", None))
    assert marked.sharding_spec == "{devices=[4,1,2]<=[2,4]T(1,0) last_tile_dim_replicate}"
    assert marked.sharding_type is xs.ShardingType.PARTIAL
    assert marked.placements == (Replicate(), Shard(0))
    assert marked.mesh_shape == (2, 4)
    assert marked.partition_spec == ("tp", None)
    assert isinstance(marked, xd.DTensor)
    assert repr(marked) == (
        "XLAShardedTensor(shape=(16, 8), dtype=float32, placements=(R, S(0)), "
        "mesh=(dp=2, tp=4), local_shape=(4, 8))"
    )


@pytest.mark.parametrize(
    ("text", "num_devices", "kind"),
    [
        ("{replicated}", 8, ShardingType.REPLICATED),
        ("{devices=[1,1,8]<=[8] last_tile_dim_replicate}", 8, ShardingType.REPLICATED),
        ("{devices=[8,1]<=[8]}", 8, ShardingType.TILED),
        ("{devices=[2,1,4]<=[8] last_tile_dim_replicate}", 8, ShardingType.PARTIAL),
        ("{maximal device=3}", 8, ShardingType.MAXIMAL),
        ("{replicated}", 1, ShardingType.MAXIMAL),
        ("{manual}", 8, ShardingType.MANUAL),
        ("{unknown}", 8, ShardingType.UNKNOWN),
    ],
)
def test_sharding_type_of(text: str, num_devices: int, kind: ShardingType) -> None:
    assert sharding_type_of(OpSharding.parse(text), num_devices) is kind


def test_ops_and_methods_give_sharded_tensors(dp_tp: xs.Mesh) -> None:
    marked = xs.mark_sharding(counting(8, 4), dp_tp, ("dp", None))
    moved = marked.redistribute(dp_tp, [Replicate(), Shard(1)])
    for result in (marked + 1, marked.detach(), marked.data, marked.clone(), marked.t(), moved):
        assert type(result) is xs.XLAShardedTensor
    assert [s.data.shape for s in moved.local_shards] == [(8, 1)] * 8
    assert [s.data.shape for s in marked.local_shards] == [(4, 4)] * 8
    assert torch.equal(moved.cpu(), counting(8, 4))


def test_the_global_tensor_is_the_very_tensor(dp_tp: xs.Mesh) -> None:
    tensor = counting(8, 4)
    marked = xs.mark_sharding(tensor, dp_tp, ("dp", None))
    assert marked.global_tensor is tensor
    with torch.no_grad():
        tensor.add_(1)
        marked.mul_(2)
    assert torch.equal(tensor.cpu(), (counting(8, 4) + 1) * 2)
    assert torch.equal(marked.cpu(), (counting(8, 4) + 1) * 2)
    assert marked.local_shards[0].data.shape == (4, 4)


def test_the_global_tensor_of_a_result_has_its_history(dp_tp: xs.Mesh) -> None:
    weight = torch.nn.Parameter(counting(8, 4))
    marked = xs.mark_sharding(weight, dp_tp, ("dp", None))
    (marked * 3).global_tensor.sum().backward()
    assert torch.equal(weight.grad.cpu(), torch.full((8, 4), 3.0))


def test_the_global_tensor_follows_data(dp_tp: xs.Mesh) -> None:
    marked = xs.mark_sharding(torch.zeros(8, 4), dp_tp, ("dp", None))
    marked.data = xs.mark_sharding(torch.ones(8, 4), dp_tp, ("tp", None))
    assert torch.equal(marked.global_tensor.cpu(), torch.ones(8, 4))
    assert torch.equal(marked.cpu(), torch.ones(8, 4))
    assert marked.local_shards[0].data.shape == (2, 4)


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, copy.copy, lambda t: pickle.loads(pickle.dumps(t)), lambda t: saved(t)],
    ids=["deepcopy", "copy", "pickle", "torch.save"],
)
def test_copies_are_sharded_tensors(dp_tp: xs.Mesh, copied: Callable[[Any], Any]) -> None:
    marked = xs.mark_sharding(counting(10, 4).requires_grad_(), dp_tp, ("tp", None))
    other = copied(marked.detach().requires_grad_())
    assert type(other) is xs.XLAShardedTensor
    assert other.requires_grad
    assert other.placements == marked.placements
    assert [s.data.shape for s in other.local_shards] == [(3, 4)] * 8
    with torch.no_grad():
        other.zero_()
    shares = copied is copy.copy  # as a plain tensor's
    assert torch.equal(marked.detach().cpu(), counting(10, 4) * (not shares))


def saved(tensor: torch.Tensor) -> Any:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return torch.load(file)


# ---------------------------------------------------------------- shards


def test_shards_are_copies(dp_tp: xs.Mesh) -> None:
    marked = xs.mark_sharding(counting(8, 4), dp_tp, ("dp", None))
    for shard in marked.local_shards:
        shard.data.zero_()
    assert torch.equal(marked.cpu(), counting(8, 4))


def test_load_local_shards(runtime: Runtime) -> None:
    mesh = xs.Mesh(range(8), (4, 2), ("x", "y"))
    tensor = counting(10, 3)
    marked = xs.mark_sharding(tensor, mesh, ("x", None))
    shards = marked.local_shards
    for shard in shards:
        shard.unpadded_data = shard.unpadded_data * 2
        assert shard.data.shape == (3, 3)
    assert shards[7].data.tolist() == [[54.0, 56.0, 58.0], [0.0] * 3, [0.0] * 3]
    marked.load_local_shards_(list(reversed(shards)))
    assert torch.equal(marked.cpu(), counting(10, 3) * 2)
    assert torch.equal(tensor.cpu(), counting(10, 3) * 2)
    assert [s.data.shape for s in marked.local_shards] == [(3, 3)] * 8


def test_load_local_shards_into_a_parameter(dp_tp: xs.Mesh) -> None:
    weight = torch.nn.Parameter(counting(8, 4))
    marked = xs.mark_sharding(weight, dp_tp, ("dp", "tp"))
    shards = [xs.XLAShard(s.data + 1, s.indices, s.shard_device, 0) for s in marked.local_shards]
    marked.load_local_shards_(shards)
    assert torch.equal(weight.detach().cpu(), counting(8, 4) + 1)
    (marked * 2).sum().backward()
    assert torch.equal(weight.grad.cpu(), torch.full((8, 4), 2.0))


def test_load_local_shards_of_a_replicated_tensor(dp_tp: xs.Mesh) -> None:
    marked = xs.mark_sharding(counting(8), dp_tp, (None,))
    shards = marked.local_shards
    assert all(shard.indices is ... for shard in shards)
    for shard in shards:
        shard.unpadded_data = shard.unpadded_data + 1
    marked.load_local_shards_(shards)
    assert torch.equal(marked.cpu(), counting(8) + 1)


def test_load_local_shards_needs_each_device_once(dp_tp: xs.Mesh) -> None:
    marked = xs.mark_sharding(counting(8), dp_tp, ("dp",))
    shards = marked.local_shards
    for wrong in (shards[1:], [*shards[1:], shards[1]], [*shards, shards[0]]):
        with pytest.raises(DistributeError, match=r"Pass one shard for each of these\."):
            marked.load_local_shards_(wrong)
    foreign = xs.XLAShard(shards[0].data, shards[0].indices, "TPU:77", 0)
    with pytest.raises(DistributeError, match=r"shards of the devices \['TPU:77', 1, 2, 3"):
        marked.load_local_shards_([foreign, *shards[1:]])
    assert torch.equal(marked.cpu(), counting(8))


def test_load_local_shards_of_another_shape(dp_tp: xs.Mesh) -> None:
    marked = xs.mark_sharding(counting(8), dp_tp, ("dp",))
    shards = [xs.XLAShard(torch.ones(5), [slice(0, 5)], f"CPU:{i}", 0) for i in range(8)]
    message = (
        "load_local_shards_ was called with a shard of shape=(5,) for device=0. That device has "
        "shape=(4,) of the tensor of shape=(8,). Pass shards whose unpadded_data has the shape "
        "that local_shards gives."
    )
    with pytest.raises(DistributeError, match=re.escape(message)):
        marked.load_local_shards_(shards)
    short = [xs.XLAShard(torch.ones(3), [slice(0, 3)], f"CPU:{i}", 0) for i in range(8)]
    with pytest.raises(DistributeError, match=r"shape=\(3,\) for device=0"):
        marked.load_local_shards_(short)
    assert torch.equal(marked.cpu(), counting(8))


def test_load_local_shards_of_a_tensor_that_lies_otherwise(dp_tp: xs.Mesh) -> None:
    marked = xs.mark_sharding(counting(8), dp_tp, ("dp",))
    shards = marked.local_shards
    labelled = xs.wrap_as_sharded_tensor(marked.global_tensor, (2, 4), (1,))
    with pytest.raises(
        DistributeError,
        match=r"labelled \{devices=\[4,2\].* that XLA laid out as \{devices=\[2,4\].*\. "
        r"The shards would go to wrong places\. Call mark_sharding on it first\.",
    ):
        labelled.load_local_shards_(shards)


# ---------------------------------------------------------------- wrapping


def test_wrapping_knows_what_the_tensor_was_told(dp_tp: xs.Mesh, plain: Plain) -> None:
    tensor = plain(counting(8, 4))
    assert xs.wrap_if_sharded(tensor) is tensor
    xs.mark_sharding(tensor, dp_tp, (None, "tp"))
    for wrapped in (xs.wrap_if_sharded(tensor), xs.wrap_as_sharded_tensor(tensor)):
        assert type(wrapped) is xs.XLAShardedTensor
        assert wrapped.global_tensor is tensor
        assert wrapped.partition_spec == (None, "tp")
        assert wrapped.local_shards[0].data.shape == (8, 1)
    assert xs.wrap_as_sharded_tensor(tensor, (2, 4)).placements == (Replicate(), Shard(1))
    assert xs.unwrap_sharded_tensor(xs.wrap_if_sharded(tensor)) is tensor


def test_wrapping_takes_the_callers_word(plain: Plain) -> None:
    wrapped = xs.wrap_as_sharded_tensor(plain(counting(8, 4)), (4, 2), (1, None))
    assert wrapped.mesh_shape == (4, 2)
    assert wrapped.placements == (Replicate(), Shard(0))
    assert wrapped.sharding_spec == "{replicated}"  # the runtime's, which nobody has told


def test_wrapping_a_dtensor_is_the_same_object(mesh: xd.DeviceMesh) -> None:
    tensor = xd.distribute_tensor(counting(8, 4), mesh, [Shard(0), Replicate()])
    wrapped = xs.wrap_as_sharded_tensor(tensor)
    assert wrapped is tensor
    assert isinstance(tensor, xs.XLAShardedTensor)
    assert xs.wrap_as_sharded_tensor(tensor, (8,), (0, None)).mesh_shape == (8,)
    assert xs.wrap_if_sharded(tensor) is tensor


def test_what_is_no_device_tensor_stays(runtime: Runtime) -> None:
    tensor = counting(8)
    for value in (tensor, None, 3, "text", [tensor]):
        assert xs.wrap_if_sharded(value) is value
        assert xs.unwrap_sharded_tensor(value) is value  # pyright: ignore


def test_the_constructor_wraps_without_annotating(dp_tp: xs.Mesh, plain: Plain) -> None:
    tensor = plain(counting(8, 4))
    wrapped = xs.XLAShardedTensor(tensor, (2, 4), (0, 1))
    assert wrapped.placements == (Shard(0), Shard(1))
    assert wrapped.sharding_spec == "{replicated}"
    marked = xs.mark_sharding(tensor, dp_tp, ("dp", None))
    again = xs.XLAShardedTensor(marked)
    assert again.placements == (Shard(0), Replicate())
    assert torch.equal(again.cpu(), counting(8, 4))
    assert get_runtime().is_payload(again._local_tensor)


def test_wrapping_a_host_tensor_is_refused(runtime: Runtime) -> None:
    message = (
        "wrap_as_sharded_tensor was called with a host tensor of shape=(3,). Only tensors on the "
        "devices are sharded. Call mark_sharding or xla_distribute_tensor."
    )
    with pytest.raises(DistributeError, match=re.escape(message)):
        xs.wrap_as_sharded_tensor(torch.ones(3))
    with pytest.raises(DistributeError, match=r"XLAShardedTensor was called with a host tensor"):
        xs.XLAShardedTensor(torch.ones(3))


def test_gradients_pass_the_wrapper_in_both_directions(plain: Plain) -> None:
    leaf = plain(counting(4)).requires_grad_()
    wrapped = xs.wrap_as_sharded_tensor(leaf * 2)
    assert wrapped.requires_grad
    (grad,) = torch.autograd.grad((wrapped**3).sum(), leaf, create_graph=True)
    assert torch.equal(grad.detach().cpu(), 6 * (2 * counting(4)) ** 2)
    (twice,) = torch.autograd.grad(grad.sum(), leaf)
    assert torch.equal(twice.cpu(), 48 * counting(4))
    with torch.no_grad():
        assert not xs.wrap_as_sharded_tensor(leaf).requires_grad
