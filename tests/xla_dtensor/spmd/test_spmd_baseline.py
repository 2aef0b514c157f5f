"""What torch_xla 2.9's annotation API gets wrong, by the letter of its case, and is right here.

Where torch_xla is wrong in silence, the test is called ``test_silent_...``. How a tensor lies is
read from the runtime or from the shards' shapes, never from a label alone.
"""

# torch types .grad as optional and a module's attributes as tensors or modules.
# pyright: reportOptionalMemberAccess=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportReturnType=false
# pyright: reportIndexIssue=false, reportOptionalSubscript=false, reportOptionalIterable=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import copy
import importlib
import importlib.util
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import xla_dtensor as xd
import xla_dtensor.spmd as xs
from xla_dtensor.errors import DistributeError
from xla_dtensor.runtimes import Runtime, get_runtime

Plain = Callable[[torch.Tensor], Any]
ROWS_ON_DP = "{devices=[2,1,4]<=[8] last_tile_dim_replicate}"
COLUMNS_ON_TP = "{devices=[1,4,2]<=[2,4]T(1,0) last_tile_dim_replicate}"
needs_torch_xla = pytest.mark.skipif(
    importlib.util.find_spec("torch_xla") is None, reason="torch_xla is not installed here"
)


def counting(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


def lies(tensor: torch.Tensor) -> str:
    payload = tensor._local_tensor if isinstance(tensor, xd.DTensor) else tensor
    return str(get_runtime().op_sharding(payload))


@pytest.fixture
def marked(dp_tp: xs.Mesh) -> Any:
    """An (8, 4) tensor with its rows on dp."""
    return xs.mark_sharding(counting(8, 4), dp_tp, ("dp", None))


# ---------------------------------------------------------------- A. marking


def test_silent_a_requires_grad_is_kept(dp_tp: xs.Mesh) -> None:
    leaf, weight = counting(8, 4).requires_grad_(), nn.Parameter(counting(8, 4))
    for tensor in (leaf, weight):
        wrapper = xs.mark_sharding(tensor, dp_tp, ("dp", None))
        assert tensor.requires_grad
        assert wrapper.requires_grad
        (wrapper * 3).sum().backward()
        assert torch.equal(tensor.grad.cpu(), torch.full((8, 4), 3.0))
    assert isinstance(weight, nn.Parameter)


def test_silent_a_both_axes_on_one_dim(dp_tp: xs.Mesh) -> None:
    wrapper = xs.mark_sharding(counting(16, 4), dp_tp, (("dp", "tp"), None))
    assert {s.data.shape for s in wrapper.local_shards} == {(2, 4)}
    assert wrapper.placements == (Shard(0), Shard(0))


def test_silent_a_device_order_is_what_the_mesh_says(runtime: Runtime) -> None:
    crossed = xs.Mesh([0, 4, 1, 5, 2, 6, 3, 7], (4, 2), ("tp", "dp"))
    wrapper = xs.mark_sharding(torch.arange(8), crossed, (("tp", "dp"),))
    assert wrapper.device_mesh.mesh.flatten().tolist() == crossed.device_ids.tolist()
    assert {s.shard_device: s.data.item() for s in wrapper.local_shards}["CPU:4"] == 1


def test_a_marking_a_meta_module_then_loading_it(mesh: xd.DeviceMesh, dp_tp: xs.Mesh) -> None:
    layer = xd.distribute_module(nn.Linear(8, 8, device="meta"), mesh)
    xs.mark_sharding(layer.weight, dp_tp, ("tp", None))
    assert layer.weight.placements == (Replicate(), Shard(0))


# ---------------------------------------------------------------- B. redistribute


def test_silent_b_redistribute_leaves_its_source(marked: Any) -> None:
    moved = marked.redistribute(marked.device_mesh, [Replicate(), Shard(1)])
    assert (lies(moved), lies(marked)) == (COLUMNS_ON_TP, ROWS_ON_DP)
    assert [s.data.shape for s in marked.local_shards] == [(4, 4)] * 8
    with torch.no_grad():
        moved.zero_()
    assert torch.equal(marked.cpu(), counting(8, 4))
    asynchronous = marked.redistribute(placements=[Replicate(), Shard(1)], async_op=True)
    assert lies(asynchronous) == COLUMNS_ON_TP


def test_silent_b_redistribute_keeps_autograd(dp_tp: xs.Mesh) -> None:
    weight = nn.Parameter(counting(8, 4))
    hidden = xs.mark_sharding(weight, dp_tp, ("dp", None)) * 2
    moved = hidden.redistribute(placements=[Shard(1), Replicate()])
    assert type(moved) is xs.XLAShardedTensor
    moved.sum().backward()
    assert torch.equal(weight.grad.cpu(), torch.full((8, 4), 2.0))


def test_b_full_tensor(marked: Any) -> None:
    full = marked.full_tensor()
    assert get_runtime().is_payload(full)
    assert torch.equal(full.cpu(), counting(8, 4))
    assert lies(full) == "{replicated}"


# ---------------------------------------------------------------- C. placements


@pytest.mark.parametrize(
    "op",
    [
        lambda t: t + 1,
        lambda t: t.detach(),
        lambda t: t.data,
        lambda t: t.clone(),
        lambda t: t.to(torch.bfloat16),
        lambda t: nn.Parameter(t),
    ],
    ids=["op", "detach", "data", "clone", "to", "Parameter"],
)
def test_c_placements_are_always_known(marked: Any, op: Callable[[Any], Any]) -> None:
    result = op(marked)
    assert result.placements == (Shard(0), Replicate())
    assert result.device_mesh == marked.device_mesh
    assert [s.data.shape for s in result.addressable_shards()] == [(4, 4)] * 8


def test_silent_c_placements_of_named_axes_and_tuples(dp_tp: xs.Mesh) -> None:
    for spec, placements, tile in (
        (("dp", None), (Shard(0), Replicate()), (4, 8)),
        ((None, "tp"), (Replicate(), Shard(1)), (8, 2)),
        (((0, 1), None), (Shard(0), Shard(0)), (1, 8)),
        ((None, ("dp", "tp")), (Shard(1), Shard(1)), (8, 1)),
    ):
        wrapper = xs.mark_sharding(counting(8, 8), dp_tp, spec)
        assert wrapper.placements == placements
        assert {s.data.shape for s in wrapper.local_shards} == {tile}
        assert wrapper.partition_spec == tuple(
            tuple(dp_tp.axis_names[i] for i in e) if e == (0, 1) else e
            for e in spec  # pyright: ignore
        )


def test_silent_c_views_in_place(marked: Any) -> None:
    reference = counting(8, 4)
    assert marked.t_() is marked
    reference.t_()
    assert marked.shape == reference.shape == marked.global_tensor.shape
    assert marked.placements == (Shard(1), Replicate())
    assert torch.equal(marked.cpu(), reference)
    assert torch.equal(marked.global_tensor.cpu(), reference)
    whole = torch.empty(4, 8)
    for shard in marked.local_shards:
        whole[tuple(shard.indices)] = shard.unpadded_data
    assert torch.equal(whole, reference)
    marked.unsqueeze_(0).add_(1)
    assert torch.equal(marked.cpu(), reference.unsqueeze(0) + 1)


# ---------------------------------------------------------------- E, I. modules and training


def test_silent_e_a_module_without_a_partition_function_is_on_the_devices(
    mesh: xd.DeviceMesh,
) -> None:
    layer = xs.xla_distribute_module(nn.Linear(4, 4), mesh)
    assert all(isinstance(p, xd.DTensor) for p in layer.parameters())
    assert layer(xs.xla_distribute_tensor(torch.ones(2, 4), mesh)).shape == (2, 4)


def test_i_training_a_parameter_made_of_a_wrapper(dp_tp: xs.Mesh) -> None:
    torch.manual_seed(0)
    ours, reference = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    reference.load_state_dict(ours.state_dict())
    wrapper = xs.mark_sharding(ours.weight.detach().clone(), dp_tp, ("tp", None))
    ours.weight = nn.Parameter(wrapper)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (ours, reference)]
    for _ in range(3):
        x = torch.randn(4, 8)
        given = xs.mark_sharding(x.clone(), dp_tp, ("dp", None))
        for optimizer, model, inputs in zip(optimizers, (ours, reference), (given, x), strict=True):
            optimizer.zero_grad()
            model(inputs).square().sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    torch.testing.assert_close(ours.weight.detach().cpu(), reference.weight.detach())
    assert {s.data.shape for s in ours.weight.addressable_shards()} == {(2, 8)}
    state = optimizers[0].state[ours.weight]["exp_avg"]
    assert {s.data.shape for s in state.addressable_shards()} == {(2, 8)}


def test_silent_i_an_activation_that_is_marked_keeps_its_history(dp_tp: xs.Mesh) -> None:
    weight = nn.Parameter(counting(8, 4))
    hidden = xs.mark_sharding(weight, dp_tp, ("dp", None)) * 2
    (xs.mark_sharding(hidden.detach() + hidden, dp_tp, ("dp", "tp")) ** 2).sum().backward()
    torch.testing.assert_close(weight.grad.cpu(), 16 * counting(8, 4))


# ---------------------------------------------------------------- J. Python's protocols


def test_j_copies(marked: Any) -> None:
    file = io.BytesIO()
    torch.save(marked, file)
    file.seek(0)
    for other in (copy.deepcopy(marked), pickle.loads(pickle.dumps(marked)), torch.load(file)):
        assert type(other) is xs.XLAShardedTensor
        assert lies(other) == ROWS_ON_DP
        assert torch.equal(other.cpu(), counting(8, 4))


def test_j_a_marked_module_is_copied(dp_tp: xs.Mesh) -> None:
    layer = nn.Linear(8, 8)
    xs.mark_sharding(layer.weight, dp_tp, ("tp", None))
    other = copy.deepcopy(layer)
    assert isinstance(other.weight, nn.Parameter)
    assert other.weight is not layer.weight
    assert torch.equal(other.weight.detach().cpu(), layer.weight.detach().cpu())


def test_j_text(marked: Any, dp_tp: xs.Mesh) -> None:
    assert (
        repr(marked)
        == f"{marked}"
        == (
            "XLAShardedTensor(shape=(8, 4), dtype=float32, placements=(S(0), R), "
            "mesh=(dp=2, tp=4), local_shape=(4, 4))"
        )
    )
    assert f"{xs.mark_sharding(torch.tensor(2.5), dp_tp, ()):.1f}" == "2.5"


def test_j_to_the_host(marked: Any) -> None:
    host = marked.cpu()
    assert type(host) is torch.Tensor
    assert (host.numpy() == counting(8, 4).numpy()).all()
    assert host.tolist() == marked.tolist() == counting(8, 4).tolist()
    assert (marked.numpy() == counting(8, 4).numpy()).all()
    assert marked[1, 1].item() == 5.0
    assert bool(marked[1, 1] > 4)


# ---------------------------------------------------------------- K. mixing


@pytest.mark.parametrize("order", ["wrapper first", "plain first", "wrapper and host"])
def test_silent_k_mixing_gives_sharded_tensors(marked: Any, plain: Plain, order: str) -> None:
    other = plain(torch.ones(8, 4))
    result = {
        "wrapper first": lambda: marked + other,
        "plain first": lambda: other + marked,
        "wrapper and host": lambda: marked + torch.ones(8, 4),
    }[order]()
    assert type(result) is xs.XLAShardedTensor
    assert torch.equal(result.global_tensor.cpu(), counting(8, 4) + 1)
    assert result.placements == (Shard(0), Replicate())
    assert type(torch.cat([other, marked])) is xs.XLAShardedTensor


@needs_torch_xla
def test_silent_k_mixing_where_the_script_called_use_spmd(run_child: Callable[..., Any]) -> None:
    """There torch_xla wraps all plain tensors, and would wrap the result of an op with one."""
    status, out, errors = run_child(
        "import torch_xla.runtime as xr; xr.use_spmd()\n"
        "import torch, xla_dtensor.spmd as xs\n"
        "from xla_dtensor.errors import DistributeError\n"
        "mesh = xs.Mesh(range(8), (2, 4), ('dp', 'tp'))\n"
        "x = torch.arange(32.0).reshape(8, 4).to('xla')\n"
        "w = xs.mark_sharding(x, mesh, ('dp', None))\n"
        "y = torch.ones(8, 4).to('xla')\n"
        "assert (x + y).cpu().sum() == 528, 'plain with plain'\n"
        "assert w.local_shards[0].data.shape == (4, 4)\n"
        "y.requires_grad_()\n"
        "z = torch.nn.functional.linear(y * w, torch.ones(3, 4).to('xla'))\n"
        "assert isinstance(z, xs.XLAShardedTensor), type(z)\n"
        "z.sum().backward()\n"
        "assert torch.equal(y.grad.cpu(), x.cpu() * 3)\n"
        "print('mixed', (w + y).global_tensor.cpu().sum().item())\n"
        "def setitem(plain): plain[0] = w[0]\n"
        "def iadd(plain): plain += w\n"
        "for write in (lambda plain: plain.add_(w), setitem, iadd):\n"
        "    try:\n"
        "        write(torch.ones(8, 4).to('xla'))\n"
        "        print('taken')\n"
        "    except DistributeError as error:\n"
        "        print('refused', '.global_tensor' in str(error))\n"
        "v = w.clone()\n"
        "v.add_(torch.ones(8, 4).to('xla'))\n"
        "v[0] = torch.zeros(4).to('xla')\n"
        "print(v.global_tensor.cpu().sum().item())\n"
    )
    assert status == 0, errors
    assert out.split() == ["mixed", "528.0", *["refused", "True"] * 3, "518.0"]


def test_k_a_write_through_a_view(mesh: xd.DeviceMesh, dp_tp: xs.Mesh) -> None:
    whole = xd.distribute_tensor(counting(8, 4), mesh, None)
    tensor = xs.mark_sharding(whole, dp_tp, ("dp", None))
    tensor[:2].zero_()
    expected = counting(8, 4)
    expected[:2] = 0
    assert torch.equal(tensor.cpu(), expected)
    assert torch.equal(tensor.global_tensor.cpu(), expected)
    assert lies(tensor) == ROWS_ON_DP


def test_k_a_write_through_a_view_of_a_wrapper(runtime: Runtime, marked: Any) -> None:
    marked[:2].zero_()
    expected = counting(8, 4)
    expected[:2] = 0
    assert torch.equal(marked.cpu(), expected)
    assert torch.equal(marked.global_tensor.cpu(), expected)
    assert lies(marked) == ROWS_ON_DP


# ---------------------------------------------------------------- M. specs and annotations


def test_m_lower_ranks(dp_tp: xs.Mesh) -> None:
    """A 2-axis mesh and tensors of fewer dims than axes, and none at all."""
    assert xs.mark_sharding(counting(8), dp_tp, ("dp",)).local_shards[0].data.shape == (4,)
    assert xs.mark_sharding(counting(8), dp_tp, (("dp", "tp"),)).local_shards[0].data.shape == (1,)
    assert xs.mark_sharding(torch.tensor(1.0), dp_tp, ()).local_shards[0].data.shape == ()


@pytest.mark.only_on("torch_xla")
def test_m_input_shardings_of_lower_rank(runtime: Runtime, dp_tp: xs.Mesh) -> None:
    sent = importlib.import_module("torch_xla.core.xla_model").send_cpu_data_to_device
    for host, spec, tile in (
        (counting(8), ("dp",), (4,)),
        (counting(8), ("tp",), (2,)),
        (counting(8, 4), (None, "dp"), (8, 2)),
    ):
        (tensor,) = sent([host], "xla", input_sharding=xs.ShardingSpec(dp_tp, spec))
        assert runtime.addressable_shards(tensor)[0].data.shape == tile


def test_m_a_second_annotation(marked: Any, dp_tp: xs.Mesh) -> None:
    xs.mark_sharding(marked, dp_tp, ("dp", None))
    with pytest.raises(DistributeError, match="Existing annotation must be cleared first"):
        xs.mark_sharding(marked, dp_tp, (None, "tp"))
    xs.clear_sharding(marked)
    xs.mark_sharding(marked, dp_tp, (None, "tp"))
    assert lies(marked) == COLUMNS_ON_TP


def test_silent_m_a_mark_on_a_clone_is_not_one_on_its_source(dp_tp: xs.Mesh, plain: Plain) -> None:
    source = plain(counting(8, 4))
    clone = source.clone()
    xs.mark_sharding(clone, dp_tp, (None, "tp"))
    assert (lies(clone), lies(source)) == (COLUMNS_ON_TP, "{replicated}")
    wrapper = xs.mark_sharding(source, dp_tp, ("dp", None))
    other = xs.clear_sharding(wrapper.clone())
    assert (lies(other), lies(source)) == ("{replicated}", ROWS_ON_DP)


def test_m_clearing_then_a_program(marked: Any) -> None:
    tensor = xs.clear_sharding(marked)
    assert torch.equal((tensor * 2 + 1).cpu(), counting(8, 4) * 2 + 1)
    assert lies(tensor) == "{replicated}"
    step = xd.compile(lambda t: t * 3)
    assert torch.equal(step(tensor).cpu(), counting(8, 4) * 3)


def test_m_equal_meshes_are_one(dp_tp: xs.Mesh) -> None:
    again = xs.Mesh(range(8), (2, 4), ("dp", "tp"))
    assert again is not dp_tp
    assert {dp_tp: 1}[again] == 1


# ---------------------------------------------------------------- N. too late for SPMD


@pytest.mark.thorough
@needs_torch_xla
@pytest.mark.parametrize(
    "early",
    [
        "import torch_xla, torch; torch.ones(2).to('xla')",
        "import torch_xla; torch_xla.device()",
        "import torch_xla, torch_xla.runtime as xr; torch_xla.device(); xr.use_spmd()",
        "import torch, torch_xla, torch_xla.runtime as xr; torch.ones(2).to('xla'); xr.use_spmd()",
    ],
    ids=["tensor", "device", "device, use_spmd", "tensor, use_spmd"],
)
def test_n_a_tensor_or_device_before_spmd(run_child: Callable[..., Any], early: str) -> None:
    status, _, errors = run_child(
        f"{early}\n"
        "import torch, xla_dtensor as xd, xla_dtensor.spmd as xs\n"
        "mesh = xs.Mesh(range(8), (2, 4), ('dp', 'tp'))\n"
        "xs.mark_sharding(torch.ones(8), mesh, ('dp',)).cpu()\n",
        XLA_DTENSOR_RUNTIME="torch_xla",
    )
    assert status == 1, (status, errors)  # and not -11, a segmentation fault
    last = errors.strip().splitlines()[-1]
    assert last.startswith(
        "xla_dtensor.core.errors.RuntimeSetupError: Runtime 'torch_xla' was asked for"
    )


@needs_torch_xla
def test_n_use_spmd_first_is_taken_over(run_child: Callable[..., Any]) -> None:
    status, out, errors = run_child(
        "import torch_xla.runtime as xr; xr.use_spmd()\n"
        "import torch, xla_dtensor.spmd as xs\n"
        "from xla_dtensor.runtimes import get_runtime\n"
        "mesh = xs.Mesh(range(8), (2, 4), ('dp', 'tp'))\n"
        "w = xs.mark_sharding(torch.arange(8.0).to('xla'), mesh, ('dp',))\n"
        "print(get_runtime().name, w.local_shards[4].data.tolist())\n"
    )
    assert (status, out.strip()) == (0, "torch_xla [4.0, 5.0, 6.0, 7.0]"), errors


# ---------------------------------------------------------------- O. HybridMesh


def test_o_a_hybrid_mesh_on_cpu(runtime: Runtime) -> None:
    mesh = xs.HybridMesh(ici_mesh_shape=(2, 2), dcn_mesh_shape=(2, 1), granule=4)
    wrapper = xs.mark_sharding(torch.arange(8), mesh, ((0, 1),))
    assert [s.data.item() for s in wrapper.local_shards] == list(range(8))
    with pytest.raises(DistributeError, match="Invalid dcn_mesh_shape for single slice mesh"):
        xs.HybridMesh(ici_mesh_shape=(2, 2), dcn_mesh_shape=(2, 1))
