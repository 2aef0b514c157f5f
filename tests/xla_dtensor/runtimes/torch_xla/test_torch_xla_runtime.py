"""The torch_xla runtime on 8 virtual CPU devices: placing, reading, ops, training, one program.

Run it by ``pytest --runtime torch_xla``. torch_xla starts once, in the `runtime` fixture, with the
HLO dump on; what happens at start is checked in child processes.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.utils._pytree import tree_map

from mesh_utils import Mesh
from xla_dtensor.core import Layout, OpSharding
from xla_dtensor.errors import CompileError, DistributeError, RuntimeSetupError
from xla_dtensor.runtimes.base import AddressableShard, Runtime
from xla_dtensor.runtimes.registry import get_runtime
from xla_dtensor.runtimes.torch_xla.annotations import start
from xla_dtensor.runtimes.torch_xla.payload import UnevenPayloads
from xla_dtensor.runtimes.torch_xla.runtime import TorchXlaRuntime
from xla_dtensor.runtimes.torch_xla.step import TorchXlaStep

pytest.importorskip("torch_xla")
pytestmark = pytest.mark.only_on("torch_xla")

ROOT = Path(__file__).resolve().parents[4]
MESH = Mesh.arange((2, 4), ("dp", "tp"))
PERMUTED = Mesh([[7, 5, 3, 1], [6, 4, 2, 0]], (2, 4), ("dp", "tp"))
SHUFFLED = Mesh([0, 3, 5, 6, 1, 2, 4, 7], (2, 4), ("dp", "tp"))


def layout(text: str, mesh: Mesh = MESH) -> Layout:
    return Layout.parse(text, mesh)


def values(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(int(np.prod(shape))).reshape(shape).to(dtype)


def rebuilt(shards: tuple[AddressableShard, ...], like: torch.Tensor) -> torch.Tensor:
    whole = torch.zeros_like(like)
    for shard in shards:
        whole[shard.index] = shard.data
    return whole


# ---------------------------------------------------------------------- devices


def test_devices(runtime: Runtime) -> None:
    assert runtime.device_ids() == runtime.addressable_device_ids() == tuple(range(8))
    described = runtime.describe()
    assert described["platform"] == "CPU"
    assert described["torch_xla"].startswith("2.9")
    assert "CPU_NUM_DEVICES=8" in described["settings"]


def test_backward_runs_in_the_thread_that_asks_for_it(runtime: Runtime) -> None:
    threads: list[int] = []
    x = runtime.put(torch.ones(4), layout("[-]")).requires_grad_()
    host = torch.ones(4, requires_grad=True)
    for tensor in (x, host):
        tensor.register_hook(lambda _: threads.append(threading.get_ident()))
    (x * 2 + host.to(x.device)).sum().backward()
    assert threads == [threading.get_ident()] * 2


def test_root_is_the_plain_count(runtime: Runtime) -> None:
    for mesh in (MESH, PERMUTED, SHUFFLED, MESH["tp"]):
        assert runtime.root(mesh).device_ids.reshape(-1).tolist() == list(range(8))


@pytest.mark.parametrize("mesh", [Mesh.arange((4,)), Mesh([0, 1, 2, 9], (4,)), Mesh.arange((16,))])
def test_mesh_over_other_devices_is_refused(runtime: Runtime, mesh: Mesh) -> None:
    with pytest.raises(DistributeError, match=r"devices 0\.\.7"):
        runtime.put(torch.ones(8), Layout.replicated(mesh, 1))


# ---------------------------------------------------------------------- tensors

PLACED = [
    ((16, 8), "[dp, tp]", MESH),
    ((16, 8), "[dp.tp, -]", MESH),
    ((16, 8), "[tp.dp, -]", MESH),
    ((16, 8), "[-, tp]", MESH),
    ((16, 8), "[-, -]", MESH),
    ((16, 8), "[tp, dp]", PERMUTED),
    ((16, 8), "[dp.tp, -]", PERMUTED),
    ((16, 8), "[dp, tp]", SHUFFLED),
    ((16, 8), "[tp, -]", SHUFFLED),
    ((16, 8), "[tp/2%2.dp.tp%2, -]", MESH),
    ((16, 8), "[-, tp]", MESH["tp"]),
    ((10, 7), "[tp, dp]", MESH),
    ((3, 2), "[dp.tp, -]", MESH),
    ((0, 4), "[dp, tp]", MESH),
    ((), "[]", MESH),
    ((8, 3, 8), "[dp, -, tp]", MESH),
    ((2, 3, 4, 2, 5), "[dp, -, tp, -, -]", MESH),
    ((4, 1, 8, 2, 3, 2), "[dp, -, tp, -, -, -]", MESH),
    ((4, 1, 8, 2, 3, 2, 2), "[-, -, tp, -, -, -, dp]", PERMUTED),
]


@pytest.mark.parametrize(("shape", "text", "mesh"), PLACED, ids=lambda value: str(value))
def test_put_lies_as_asked(runtime: Runtime, shape: tuple[int, ...], text: str, mesh: Mesh) -> None:
    host, asked = values(*shape), layout(text, mesh)
    payload = runtime.put(host, asked)
    sharding = asked.op_sharding(runtime.root(mesh))
    assert runtime.op_sharding(payload) == sharding
    shards = runtime.addressable_shards(payload)
    assert [shard.device_id for shard in shards] == list(range(8))
    for shard in shards:
        assert shard.index == sharding.shard_index(shard.device_id, shape)
        assert torch.equal(shard.data, host[shard.index])
        assert shard.num_bytes_on_device == 4 * int(np.prod(sharding.shape_per_tile(shape)))
    assert torch.equal(runtime.to_host(payload), host)


@pytest.mark.parametrize(
    ("shape", "text", "mesh"),
    [case for case in PLACED if 0 not in case[0]],  # torch_xla places nothing of an empty tensor
    ids=lambda value: str(value),
)
def test_index_agrees_with_torch_xla(
    runtime: Runtime, shape: tuple[int, ...], text: str, mesh: Mesh
) -> None:
    payload = runtime.put(values(*shape), layout(text, mesh))
    theirs = importlib.import_module("torch_xla")._XLAC._get_local_shard_replica_and_indices(
        [payload]
    )[0]
    for shard, (_, index) in zip(runtime.addressable_shards(payload), theirs, strict=True):
        if index is not Ellipsis:
            assert shard.index == tuple(slice(part.start, part.stop) for part in index)


DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
    torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_are_kept(runtime: Runtime, dtype: torch.dtype) -> None:
    host = torch.arange(24).reshape(6, 4) % 5
    host = (host + 2**40 if dtype == torch.int64 else host).to(dtype)
    payload = runtime.put(host, layout("[tp, dp]"))
    moved = runtime.constrain(payload, layout("[dp, -]"))
    shards = {shard.device_id: shard.data for shard in runtime.addressable_shards(payload)}
    made = runtime.from_shards(shards, host.shape, layout("[tp, dp]"))
    for each in (payload, moved, made):
        assert each.dtype == dtype
        assert torch.equal(runtime.to_host(each).view(torch.uint8), host.view(torch.uint8))


def test_put_copies_and_leaves_the_source(runtime: Runtime) -> None:
    for text in ("[dp, tp]", "[-, -]"):
        host = torch.randn(64, 64, requires_grad=True)
        before = host.detach().clone()
        payload = runtime.put(host, layout(text))
        assert not payload.requires_grad
        with torch.no_grad():
            host.zero_()
        assert torch.equal(runtime.to_host(payload), before)
        runtime.run_op(torch.ops.aten.add_.Tensor, (payload, 1), {})
        assert host.abs().sum() == 0


def test_put_takes_strided_and_conjugated_tensors(runtime: Runtime) -> None:
    host = torch.randn(8, 6, dtype=torch.complex64)
    for view in (host.t(), host.conj(), host[::2, 1:4]):
        payload = runtime.put(view, layout("[tp, dp]"))
        assert payload.is_contiguous()
        assert torch.equal(runtime.to_host(payload), view)


def test_wrong_rank_is_refused(runtime: Runtime) -> None:
    with pytest.raises(DistributeError, match="2 dims, the tensor has 1"):
        runtime.put(torch.ones(8), layout("[dp, tp]"))


def test_special_floats_survive(runtime: Runtime) -> None:
    host = torch.tensor([-0.0, float("nan"), float("inf"), 1e-40])
    moved = runtime.constrain(runtime.put(host, layout("[tp]")), layout("[dp]"))
    assert torch.equal(runtime.to_host(moved).view(torch.int32), host.view(torch.int32))


@pytest.mark.parametrize("first", ["[dp, tp]", "[-, -]", "[tp, -]", "[dp.tp, -]"])
@pytest.mark.parametrize("second", ["[tp, dp]", "[-, -]", "[-, dp.tp]"])
@pytest.mark.parametrize("shape", [(16, 8), (10, 7), (3, 1)])
def test_constrain_leaves_its_source(
    runtime: Runtime, first: str, second: str, shape: tuple[int, int]
) -> None:
    host = torch.randn(shape)
    root = runtime.root(MESH)
    payload = runtime.put(host, layout(first))
    moved = runtime.constrain(payload, layout(second))
    again = runtime.constrain(moved, layout(first))
    for each, text in ((payload, first), (moved, second), (again, first)):
        assert runtime.op_sharding(each) == layout(text).op_sharding(root)
        assert torch.equal(runtime.to_host(each), host)
    runtime.run_op(torch.ops.aten.zero_.default, (moved,), {})
    assert torch.equal(runtime.to_host(payload), host)
    assert torch.equal(runtime.to_host(again), host)


def test_constrain_an_unfinished_value(runtime: Runtime) -> None:
    payload = runtime.put(torch.randn(16, 16), layout("[dp, tp]"))
    product = runtime.run_op(torch.ops.aten.mm.default, (payload, payload), {})
    rows = runtime.constrain(product, layout("[dp.tp, -]"))
    columns = runtime.constrain(rows, layout("[-, dp.tp]"))
    assert str(runtime.op_sharding(rows)) == "{devices=[8,1]<=[8]}"
    assert str(runtime.op_sharding(columns)) == "{devices=[1,8]<=[8]}"


def test_from_shards(runtime: Runtime) -> None:
    host, asked = torch.randn(10, 7), layout("[tp, dp]")
    sharding = asked.op_sharding(runtime.root(MESH))
    parts = {d: host[sharding.shard_index(d, host.shape)].clone() for d in range(8)}
    payload = runtime.from_shards(parts, host.shape, asked)
    for part in parts.values():
        part.zero_()
    assert runtime.op_sharding(payload) == sharding
    assert torch.equal(runtime.to_host(payload), host)
    assert torch.equal(rebuilt(runtime.addressable_shards(payload), host), host)
    with pytest.raises(DistributeError, match=r"expected|it has \(3, 4\)"):
        runtime.from_shards({d: torch.ones(3, 3) for d in range(8)}, (10, 7), asked)
    with pytest.raises(DistributeError, match=r"\[0, 1\]"):
        runtime.from_shards({d: torch.ones(3, 4) for d in range(2)}, (10, 7), asked)


def test_from_shards_replicated_and_scalar(runtime: Runtime) -> None:
    for host, text in ((torch.randn(3, 2), "[-, -]"), (torch.tensor(3.0), "[]")):
        payload = runtime.from_shards(dict.fromkeys(range(8), host), host.shape, layout(text))
        assert torch.equal(runtime.to_host(payload), host)


def test_op_sharding_of_results(runtime: Runtime) -> None:
    payload = runtime.put(torch.randn(8, 8), layout("[dp, tp]"))
    turned = runtime.run_op(torch.ops.aten.t.default, (payload,), {})
    assert str(runtime.op_sharding(turned)) == "{devices=[4,2]<=[2,4]T(1,0)}"
    assert len(runtime.addressable_shards(turned)) == 8
    plain = torch.full((3,), 2.0, device="xla")
    assert runtime.op_sharding(plain) == OpSharding.replicated()
    assert runtime.addressable_shards(torch.ones(2).to("xla"))[5].data.tolist() == [1.0, 1.0]


# ---------------------------------------------------------------------- ops


class Wrapped(TorchDTensor):
    """A stand-in for the DTensor layer: a wrapper around one payload."""

    _local_tensor: torch.Tensor

    @staticmethod
    def __new__(cls, payload: torch.Tensor) -> Wrapped:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            payload.shape,
            strides=payload.stride(),
            dtype=payload.dtype,
            device=payload.device,
        )
        made._local_tensor = payload
        return made

    def __init__(self, *args: Any) -> None:
        pass

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Wrapped({tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def unwrapped(value: Any) -> Any:
            return value._local_tensor if isinstance(value, Wrapped) else value

        def wrapped(value: Any) -> Any:
            return Wrapped(value) if runtime.is_payload(value) else value

        runtime = get_runtime()
        payloads = tree_map(unwrapped, (args, kwargs or {}))
        result = runtime.run_op(func, *payloads)
        if func._schema.is_mutable:
            return args[0] if func._schema.returns else None
        return tree_map(wrapped, result)


def wrap(tensor: torch.Tensor, text: str, mesh: Mesh = MESH) -> Wrapped:
    return Wrapped(get_runtime().put(tensor, layout(text, mesh)))


def payload_of(value: Any) -> torch.Tensor:
    return value._local_tensor


def host_of(value: Any) -> torch.Tensor:
    if not isinstance(value, Wrapped):
        return value
    return get_runtime().to_host(value._local_tensor)


def in_place(write: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    def run(x: torch.Tensor) -> torch.Tensor:
        x = x * 1
        write(x)
        return x

    return run


def ones(x: torch.Tensor, *shape: int, dtype: Any = None) -> torch.Tensor:
    """A plain tensor on the device of x, as models make their masks and positions."""
    return torch.ones(*shape, device=x.device, dtype=dtype)


def foreach(name: str, *args: Any) -> Any:
    return getattr(torch, f"_foreach_{name}")(*args)


def attention(x: torch.Tensor, mask: Any = None, is_causal: bool = False) -> torch.Tensor:
    heads = x.view(1, 2, 4, 8)
    return F.scaled_dot_product_attention(heads, heads, heads, mask, is_causal=is_causal)


OPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "linear": lambda x: F.linear(x, x),
    "causal_attention": lambda x: attention(x, is_causal=True),
    "masked_attention": lambda x: attention(x, ones(x, 4, 4, dtype=torch.bool).tril()),
    "plain_right": lambda x: x + ones(x, 8, 8),
    "plain_left": lambda x: ones(x, 8, 8) + x,
    "plain_positions": lambda x: F.embedding(torch.arange(4, device=x.device), x),
    "plain_mask": lambda x: x.masked_fill(ones(x, 8, 8, dtype=torch.bool).triu(1), 0.0),
    "host_vector": lambda x: x + torch.ones(8),
    "host_matrix": lambda x: x @ torch.ones(8, 8),
    "host_scalar": lambda x: torch.where(x > 0, torch.tensor(2.0), x),
    "host_index": lambda x: x[torch.tensor([2, 1])],
    "host_list": lambda x: torch.cat([x, torch.ones(1, 8)]),
    "host_copy": in_place(lambda x: x.copy_(torch.arange(8))),
    "set_row": in_place(lambda x: x.__setitem__(0, 5.0)),
    "set_column": in_place(lambda x: x.__setitem__((slice(None), 1), 2.0)),
    "set_mask": in_place(lambda x: x.__setitem__(x > 0, 0.0)),
    "transposed_add_": in_place(lambda x: x.t().add_(1)),
    "unbind_": in_place(lambda x: [c.add_(i) for i, c in enumerate(x.unbind(1))]),
    "chain_": in_place(lambda x: x.view(-1)[3:40].view(-1).add_(100)),
    "fill_diagonal_": in_place(lambda x: x.fill_diagonal_(3)),
    "as_strided": lambda x: torch.as_strided(x * 1, (4, 4), (8, 2), 1) + 1,
    "rotary": lambda x: torch.view_as_real(torch.view_as_complex(x.view(8, 4, 2)) * 1j),
    "bits": lambda x: x.view(torch.int32),
    "conv": lambda x: F.conv2d(x.view(1, 1, 8, 8), ones(x, 2, 1, 3, 3)),
    "einsum": lambda x: torch.einsum("ab,cb->ac", x, x),
    "vmap": lambda x: torch.vmap(lambda a: (a.t() @ a).softmax(-1))(x.view(2, 4, 8)),
    "out": lambda x: torch.add(x, x, out=torch.empty_like(x)),
    "topk": lambda x: x.topk(3)[0],
    "foreach": lambda x: foreach("mul", [x, x], 2.0)[1],
    "foreach_copy_": in_place(lambda x: foreach("copy_", [x], [x.t() + 0])),
    "layer_norm": lambda x: F.layer_norm(x, (8,)),
    "batch_norm": lambda x: F.batch_norm(x, ones(x, 8), ones(x, 8), training=True),
    "inverse": lambda x: torch.linalg.inv(x + 10 * torch.eye(8, device=x.device)),
    "nonzero": lambda x: (x > 0).nonzero(),
    "to_bf16": lambda x: x.to(torch.bfloat16).float(),
}


@pytest.mark.parametrize("name", OPS)
def test_op(runtime: Runtime, name: str) -> None:
    torch.manual_seed(0)
    host = torch.randn(8, 8)
    got, want = OPS[name](wrap(host, "[dp, tp]")), OPS[name](host.clone())
    assert isinstance(got, Wrapped)
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    torch.testing.assert_close(host_of(got), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("write_view", [True, False])
def test_views_stay_views_after_a_sync(runtime: Runtime, write_view: bool) -> None:
    host = torch.randn(8, 8)
    base = wrap(host, "[dp, tp]")
    view = base.t()[1:5]
    runtime.synchronize()
    (view if write_view else base).add_(1)
    expected = host.clone()
    (expected.t()[1:5] if write_view else expected).add_(1)
    assert torch.equal(host_of(base), expected)
    assert torch.equal(host_of(view), expected.t()[1:5])


def test_writing_into_foreign_tensors(runtime: Runtime) -> None:
    host = torch.randn(8, 8)
    payload = runtime.put(host, layout("[dp, tp]"))
    onto_host, plain = torch.zeros(8, 8), torch.zeros(8, 8, device="xla")
    runtime.run_op(torch.ops.aten.copy_.default, (onto_host, payload), {})
    assert torch.equal(onto_host, host)
    runtime.run_op(torch.ops.aten.add_.Tensor, (plain, payload), {})
    assert torch.equal(plain.cpu(), host)
    runtime.run_op(torch.ops.aten.copy_.default, (plain, payload), {})
    assert torch.equal(plain.cpu(), host)


WRITES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "copy_": lambda w, r: w.copy_(r),
    "foreach_copy_": lambda w, r: foreach("copy_", [w], [r]),
    "copy_host": lambda w, r: w.copy_(torch.ones(8, 8, dtype=torch.float64)),
    "copy_plain": lambda w, r: w.copy_(torch.ones(8, 8, device="xla")),
    "add_": lambda w, r: w.add_(r),
    "mul_add_": lambda w, r: w.mul_(0).add_(r),
    "zero_": lambda w, r: w.zero_(),
    "normal_": lambda w, r: nn.init.normal_(w),
    "view": lambda w, r: w[0:2].copy_(r[0:2]),
    "transposed": lambda w, r: w.t().add_(r),
    "out": lambda w, r: torch.mm(r, r, out=w),
    "foreach_add_": lambda w, r: foreach("add_", [w], [r]),
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("other", ["[-, -]", "[dp.tp, -]", "[-, dp]"])
def test_writing_keeps_the_sharding(runtime: Runtime, name: str, other: str) -> None:
    weight, source = wrap(torch.randn(8, 8), "[dp, tp]"), wrap(torch.randn(8, 8), other)
    before = host_of(source)
    WRITES[name](weight, source)
    runtime.synchronize()
    assert str(runtime.op_sharding(weight._local_tensor)) == "{devices=[2,4]<=[8]}"
    assert runtime.addressable_shards(weight._local_tensor)[0].data.shape == (4, 2)
    expected = layout(other).op_sharding(runtime.root(MESH))
    assert runtime.op_sharding(source._local_tensor) == expected
    assert torch.equal(host_of(source), before)


def test_uneven_results_are_cut_again(runtime: Runtime, caplog: pytest.LogCaptureFixture) -> None:
    runtime_uneven = UnevenPayloads()
    asked = layout("[tp, dp]").op_sharding(runtime.root(MESH))
    payload = runtime_uneven.note(runtime.put(torch.ones(10, 7), layout("[tp, dp]")), asked)
    weight = nn.Parameter(Wrapped(payload))
    with torch.no_grad():
        for _ in range(3):
            weight.mul_(2).add_(1)
            runtime.synchronize()
    assert runtime.op_sharding(payload_of(weight)) == asked
    assert torch.equal(host_of(weight), torch.full((10, 7), 15.0))
    torch_xla = importlib.import_module("torch_xla")
    payload.add_(1)
    torch_xla.sync()  # Not the runtime's: what XLA returns is seen.
    assert torch_xla._XLAC._get_xla_sharding_spec(payload) == "{replicated}"
    runtime_uneven.restore()
    assert "Pad it, for example to shape=(12, 8)" in caplog.text
    assert runtime.addressable_shards(payload)[0].data.shape == (3, 4)


def test_key_is_excluded_again_after_an_error(runtime: Runtime) -> None:
    key = torch._C.DispatchKey.Functionalize
    payload = runtime.put(torch.ones(8, 8), layout("[dp, tp]"))
    for excluded in (True, False):
        before = torch._C._dispatch_tls_is_dispatch_key_excluded(key)
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, excluded)
        try:
            with pytest.raises(RuntimeError):
                runtime.run_op(torch.ops.aten.mm.default, (payload, torch.ones(3, 3)), {})
            assert torch._C._dispatch_tls_is_dispatch_key_excluded(key) == excluded
        finally:
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, before)


def test_is_payload(runtime: Runtime) -> None:
    payload = runtime.put(torch.ones(4), layout("[tp]"))
    assert runtime.is_payload(payload)
    assert not runtime.is_payload(torch.ones(4))
    assert not runtime.is_payload(Wrapped(payload))


def test_plain_values_mix_with_wrapped_ones(runtime: TorchXlaRuntime) -> None:
    host = torch.randn(8, 8)
    x = wrap(host, "[dp, tp]")
    x.t().add_(1)
    plain = runtime.to_plain(x._local_tensor)
    x.add_(1)
    for mixed in (x + plain, plain + x):
        assert isinstance(mixed, Wrapped)
        torch.testing.assert_close(host_of(mixed), 2 * host + 3)
    back = runtime.constrain(plain.t(), layout("[tp, -]"))
    assert torch.equal(runtime.to_host(back), (host + 1).t())
    assert runtime.is_payload(plain)


def test_manual_seed(runtime: Runtime) -> None:
    drawn = []
    for seed in (1, 1, 2):
        runtime.manual_seed(seed)
        drawn.append(host_of(torch.rand_like(wrap(torch.ones(8, 8), "[dp, tp]"))))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


# ---------------------------------------------------------------------- training


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(33, 16)
        self.norm = nn.LayerNorm(16)
        self.qkv = nn.Linear(16, 48, bias=False)
        self.out = nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.head = nn.Linear(16, 33, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, 4, 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return self.head(x + self.down(F.gelu(self.up(x))))


PLAN = {
    "embedding.weight": "[tp, -]",  # 33 rows: uneven.
    "qkv.weight": "[tp.dp, -]",
    "out.weight": "[dp, tp]",
    "up.weight": "[tp, -]",
    "up.bias": "[tp]",
    "down.weight": "[-, tp]",
    "head.weight": "[dp.tp, -]",
}


def distribute(model: nn.Module) -> None:
    for name, parameter in list(model.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        text = PLAN.get(name, f"[{', '.join('-' * parameter.ndim)}]")
        setattr(model.get_submodule(owner), leaf, nn.Parameter(wrap(parameter, text)))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("compiled", [True, False])
def test_training_equals_cpu(runtime: Runtime, foreach: bool, compiled: bool) -> None:
    torch.manual_seed(0)
    reference, model = Model(), Model()
    model.load_state_dict(reference.state_dict())
    distribute(model)
    annotated = {n: runtime.op_sharding(payload_of(p)) for n, p in model.named_parameters()}
    steps = [
        train_step(each, torch.optim.AdamW(each.parameters(), lr=1e-2, foreach=foreach))
        for each in (reference, model)
    ]
    compiled_step = runtime.compile(steps[1])
    run = compiled_step if compiled else steps[1]
    for _ in range(4):
        tokens, targets = torch.randint(0, 33, (2, 4, 8))
        want = steps[0](tokens, targets)
        got = run(wrap(tokens, "[dp, -]"), wrap(targets, "[dp, -]"))
        torch.testing.assert_close(host_of(got), want, atol=1e-5, rtol=1e-5)
    runtime.synchronize()
    for (name, want), got in zip(reference.named_parameters(), model.parameters(), strict=True):
        assert isinstance(got, Wrapped)
        torch.testing.assert_close(host_of(got), want.detach(), atol=1e-5, rtol=1e-5)
        assert runtime.op_sharding(got._local_tensor) == annotated[name]
    if compiled:
        assert compiled_step.stats()["calls"] == 4
        assert compiled_step.stats()["traces"] == 2  # The second call finds optimizer state.
        check_collectives(compiled_step.hlo())


def check_collectives(hlo: str) -> None:
    """Collectives over tp (groups of neighbours) and over dp are there, and inputs are donated."""
    assert re.search(r"all-reduce\(.*replica_groups=\{\{0,1,2,3\},\{4,5,6,7\}\}", hlo)
    assert re.search(r"all-reduce\(.*replica_groups=\{\{0,4\},\{1,5\},\{2,6\},\{3,7\}\}", hlo)
    assert "input_output_alias=" in hlo


# ---------------------------------------------------------------------- one program


def test_a_write_to_an_argument_on_the_host_is_refused(runtime: Runtime) -> None:
    host = torch.ones(2, 4)
    for write in (lambda x: x.add_(1), lambda x: x[1].zero_(), lambda x: x.t().mul_(2)):
        with pytest.raises(CompileError, match=r"shape=\(2, 4\).*the write would be lost"):
            runtime.compile(write)(host)
    assert torch.equal(host, torch.ones(2, 4))
    with torch.inference_mode():
        assert runtime.compile(lambda x: x + 1)(host).cpu().tolist() == [[2] * 4] * 2


def test_compile_counts_and_explains(runtime: Runtime) -> None:
    step = runtime.compile(lambda x, scale=1.0: x * scale + 1)
    results = [
        step(wrap(torch.ones(n, 8), "[dp, tp]"), scale=scale)
        for n, scale in ((4, 3.0), (4, 3.0), (6, 3.0), (4, 5.0))
    ]
    assert [float(host_of(r).flatten()[0]) for r in results] == [4.0, 4.0, 4.0, 6.0]
    stats = step.stats()
    assert (stats["calls"], stats["traces"]) == (4, 2)
    assert stats["reasons"][0] == "first call"
    assert "[4, 8]" in stats["reasons"][1]
    assert "[6, 8]" in stats["reasons"][1]


def test_there_is_nothing_to_verify(runtime: Runtime) -> None:
    step, calls = runtime.compile(lambda x: calls.append(x) or x + 1), []
    step(wrap(torch.ones(4, 8), "[dp, tp]"))
    found = step.verify(wrap(torch.ones(4, 8), "[dp, tp]"))
    assert found.is_same
    assert str(found).startswith("nothing to verify: torch_xla runs the step's Python on every")
    assert len(calls) == step.stats()["calls"] == 1


def test_hlo_is_that_of_the_last_call(runtime: Runtime) -> None:
    step = runtime.compile(lambda x: torch.tanh(x))
    texts = []
    for n in (4, 6, 4):
        step(wrap(torch.ones(n, 8), "[dp, -]"))
        texts.append(step.hlo())
    assert "f32[2,8]" in texts[0]
    assert "f32[3,8]" in texts[1]
    assert texts[2] == texts[0]


def test_results_are_one_program(runtime: Runtime) -> None:
    weight = wrap(torch.ones(8, 8), "[dp, tp]")
    pending = weight * 7  # Belongs to no step.

    def work(x: torch.Tensor) -> Any:
        y = x @ weight
        weight.add_(1)
        return {"y": y, "loss": y.sum()}

    step = runtime.compile(work)
    x = wrap(torch.ones(8, 8), "[dp, -]")
    count = importlib.import_module("torch_xla")._XLAC._xla_counter_value
    before = count("ExecuteReplicated") or 0
    result = step(x)
    for _ in range(500):  # Programs are started by a thread of torch_xla's.
        if count("ExecuteReplicated") - before >= 2:
            break
        time.sleep(0.01)
    assert count("ExecuteReplicated") - before == 2  # What was pending, and the step.
    assert float(host_of(result["loss"])) == 512.0
    assert torch.equal(host_of(weight), torch.full((8, 8), 2.0))
    assert torch.equal(host_of(pending), torch.full((8, 8), 7.0))


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: x if x.sum() > 0 else -x,
        lambda x: x[x > 0],
        lambda x: get_runtime().op_sharding((x + 1)._local_tensor),
    ],
)
def test_reading_inside_is_refused(runtime: Runtime, read: Callable[..., Any]) -> None:
    step = runtime.compile(read)
    with pytest.raises(CompileError, match=r"after the call"):
        step(wrap(torch.randn(8, 8), "[dp, tp]"))
    assert float(host_of(wrap(torch.ones(8), "[tp]").sum())) == 8.0


def test_error_inside_passes_through(runtime: Runtime) -> None:
    def step(x: torch.Tensor) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        runtime.compile(step)(wrap(torch.ones(8), "[tp]"))


def test_high_rank_inside_a_step(runtime: Runtime) -> None:
    asked = layout("[-, tp, -, -, -, dp, -, -]")

    def step(x: Wrapped) -> Wrapped:
        return Wrapped(runtime.constrain(payload_of(x + 1), asked))

    x = wrap(torch.zeros(1, 4, 1, 1, 1, 2, 1, 1), "[-, -, -, -, -, -, -, -]")
    result = runtime.compile(step)(x)._local_tensor
    assert runtime.op_sharding(result) == asked.op_sharding(runtime.root(MESH))


def test_equal_steps_have_their_own_programs(runtime: Runtime) -> None:
    x = wrap(torch.randn(8, 8), "[dp, tp]")
    for run in (lambda x: x.exp(), runtime.compile(torch.exp)):  # As a plain op, and as a step.
        host_of(run(x))
    step = runtime.compile(torch.exp)
    host_of(step(x))
    host_of(step(x))
    assert step.stats()["traces"] == 1
    assert "exponential" in step.hlo()


def test_hlo_before_the_first_call(runtime: Runtime) -> None:
    with pytest.raises(CompileError, match="first call"):
        runtime.compile(lambda x: x).hlo()


# ---------------------------------------------------------------------- start


def child(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PJRT_", "CPU_NUM", "XLA_", "NPROC"))
    }
    clean |= {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2", "PJRT_DEVICE": "CPU"}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=clean | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


LATE = {
    "tensor": "import torch, torch_xla; t = torch.ones(3).to('xla')",
    "device": "import torch_xla; torch_xla.device()",
    "use_spmd_after_a_tensor": """
        import torch, torch_xla
        import torch_xla.runtime as xr
        t = torch.ones(3).to('xla')
        xr.use_spmd()""",
}


@pytest.mark.parametrize("how", LATE)
def test_starting_late_is_an_error(how: str) -> None:
    start = """
        from xla_dtensor.runtimes.registry import get_runtime
        try:
            get_runtime("torch_xla")
        except RuntimeError as error:
            print(type(error).__name__, error)"""
    result = child(textwrap.dedent(LATE[how]) + textwrap.dedent(start))
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("RuntimeSetupError")
    assert "get_runtime('torch_xla')" in result.stdout


def test_start_from_the_environment() -> None:
    result = child(
        """
        import os
        import torch, torch_xla.runtime as xr
        xr.use_spmd()   # The user's own: fine, as long as it is first.
        from mesh_utils import Mesh
        from xla_dtensor.core import Layout
        from xla_dtensor.runtimes.registry import get_runtime
        runtime = get_runtime("torch_xla")
        step = runtime.compile(lambda x: runtime.run_op(torch.ops.aten.add.Tensor, (x, 1), {}))
        payload = runtime.put(torch.ones(8), Layout.parse("[x]", Mesh.arange((4,), ("x",))))
        print(runtime.to_host(step(payload)).sum().item(), len(runtime.device_ids()))
        print("ENTRY" in step.hlo(), "NPROC" in os.environ)
        """,
        XLA_DTENSOR_CPU_DEVICES="4",
        XLA_DTENSOR_DUMP_HLO="1",
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["16.0", "4", "True", "False"]


def test_a_client_that_has_the_devices_that_are_asked_for() -> None:
    result = child(
        """
        import torch_xla.runtime as xr
        xr.use_spmd()
        print(xr.global_runtime_device_count())
        from xla_dtensor.runtimes.registry import get_runtime
        print(len(get_runtime("torch_xla").device_ids()))
        """,
        PJRT_DEVICE="CPU",
        CPU_NUM_DEVICES="4",
        NPROC="64",
        XLA_DTENSOR_CPU_DEVICES="4",
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["4", "4"]


def test_refused_settings(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    # Settings are looked at before anything is touched, so a running torch_xla does no harm.
    with pytest.raises(RuntimeSetupError, match="no number of devices"):
        start(0, None)
    with pytest.raises(RuntimeSetupError, match="client already runs"):
        start(4, None)
    with monkeypatch.context() as patch:
        patch.setenv("PJRT_DEVICE", "TPU")
        with pytest.raises(RuntimeSetupError, match="Set PJRT_DEVICE=CPU"):
            start(8, None)
    with monkeypatch.context() as patch:
        patch.setenv("XLA_DISABLE_FUNCTIONALIZATION", "0")
        with pytest.raises(RuntimeSetupError, match="Unset that variable"):
            start(None, None)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "2.13.0")
        with pytest.raises(RuntimeSetupError, match=r"Install 'torch==2\.9"):
            start(None, None)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torch_xla", None)
        with pytest.raises(RuntimeSetupError, match="importing torch_xla failed"):
            start(None, None)


def test_no_hlo_without_a_dump(runtime: Runtime) -> None:
    step = TorchXlaStep(lambda x: x * 3, None)
    step(wrap(torch.ones(8), "[tp]"))
    with pytest.raises(CompileError, match="XLA_DTENSOR_DUMP_HLO"):
        step.hlo()


def test_jax_stays_out() -> None:
    # In a child process: other tests import jax in this one.
    code = """
        import sys
        import torch
        from torch.distributed.tensor import Shard
        import xla_dtensor as xd
        from xla_dtensor.runtimes.registry import get_runtime
        get_runtime("torch_xla", num_cpu_devices=8)
        mesh = xd.init_device_mesh("xla", (8,))
        w = xd.distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)]).requires_grad_()
        torch.nn.functional.linear(w, w).softmax(-1).sum().backward()
        assert xd.compile(lambda x: x * 2)(w.grad).full_tensor().cpu().shape == (8, 8)
        assert "torch_xla" in sys.modules
        assert "jax" not in sys.modules, "the torch_xla runtime imported jax"
    """
    done = child(code)
    assert done.returncode == 0, done.stderr[-4000:]
