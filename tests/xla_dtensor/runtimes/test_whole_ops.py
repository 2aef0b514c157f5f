"""linear, matmul and attention arrive whole, are right, and keep sharded dims apart."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.xla_dtensor.op_batches import Program, by_batches, check_all, check_values, eagerly
from xla_dtensor import DeviceMesh, distribute_tensor
from xla_dtensor import compile as xla_compile
from xla_dtensor.report import collectives
from xla_dtensor.runtimes import Runtime
from xla_dtensor.runtimes.whole_ops import attention as whole_attention
from xla_dtensor.runtimes.whole_ops import products

pytestmark = pytest.mark.usefixtures("runtime")

aten = torch.ops.aten
whole = torch.ops.xla_dtensor
_generator = torch.Generator().manual_seed(3)


def f(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=_generator)


def put(tensor: torch.Tensor, mesh: DeviceMesh, *spec: str | None) -> Any:
    return distribute_tensor(tensor, mesh, spec or ("dp", *(None,) * (tensor.ndim - 1)))


# ------------------------------------------------------------------ values and gradients

CLOSE, CLOSE_GRADIENTS = (1e-5, 1e-5), (1e-5, 2e-5)


def program(name: str, call: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> Program:
    return Program(name, call, inputs, CLOSE, CLOSE_GRADIENTS)


LINEAR = [
    program(f"linear {shape} {bias}", F.linear, f(*shape), f(6, 4), *([f(6)] if bias else []))
    for shape in ((4,), (5, 4), (3, 5, 4), (2, 3, 5, 4))
    for bias in (True, False)
]
LEFT = [(4,), (5, 4), (3, 5, 4), (2, 3, 5, 4)]
RIGHT = [(4,), (4, 6), (3, 4, 6), (2, 3, 4, 6)]
BROADCAST = [((1, 5, 4), (3, 4, 6)), ((3, 5, 4), (1, 4, 6)), ((2, 1, 5, 4), (3, 4, 6))]
MATMUL = [
    program(f"matmul {a} {b}", torch.matmul, f(*a), f(*b))
    for a, b in (*itertools.product(LEFT, RIGHT), *BROADCAST)
]
# A gradient without the conjugate of the other factor is wrong, not an error.
COMPLEX: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "matmul": (torch.matmul, [(5, 4), (4, 6)]),
    "matmul of batches": (torch.matmul, [(3, 5, 4), (3, 4, 6)]),
    "matmul with one matrix": (torch.matmul, [(3, 5, 4), (4, 6)]),
    "matmul of vectors": (torch.matmul, [(4,), (4,)]),
    "linear": (F.linear, [(3, 5, 4), (6, 4), (6,)]),
    "linear with one output": (F.linear, [(3, 5, 4), (4,)]),
    "einsum": (lambda a, b: torch.einsum("bqd,bkd->bqk", a, b), [(2, 5, 4), (2, 6, 4)]),
    "einsum of a gradient": (
        lambda a, b: torch.einsum("bsm,bsn->mn", a, b),
        [(2, 5, 4), (2, 5, 3)],
    ),
}


def parts_squared(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Real numbers in which the real and the imaginary part count differently."""

    def call(*inputs: torch.Tensor) -> torch.Tensor:
        made = torch.view_as_real(function(*inputs))
        return made[..., 0] + made[..., 1].square()

    return call


OF_COMPLEX = [
    Program(
        f"complex {name}",
        parts_squared(function),
        tuple(torch.complex(f(*shape), f(*shape)) for shape in shapes),
        (1e-4, 1e-4),
        (1e-4, 1e-4),
    )
    for name, (function, shapes) in COMPLEX.items()
]
CAUSAL_MASK = torch.ones(5, 7, dtype=torch.bool).tril()
ATTENTION: dict[str, tuple[int, int, dict[str, Any]]] = {
    "plain": (4, 7, {}),
    "causal": (4, 5, {"is_causal": True}),
    "causal, q shorter": (4, 7, {"is_causal": True}),
    "scale": (4, 7, {"scale": 0.3}),
    "bool mask": (4, 7, {"attn_mask": CAUSAL_MASK}),
    "bool mask per head": (4, 7, {"attn_mask": CAUSAL_MASK.expand(2, 4, 5, 7).contiguous()}),
    "float mask": (4, 7, {"attn_mask": f(5, 7)}),
    "bool mask, causal": (4, 5, {"attn_mask": torch.eye(5).bool(), "is_causal": True}),
    "float mask, causal": (4, 7, {"attn_mask": f(5, 7), "is_causal": True}),
    "grouped": (2, 7, {"enable_gqa": True}),
    "grouped, causal": (1, 5, {"enable_gqa": True, "is_causal": True}),
    "grouped, mask": (2, 7, {"enable_gqa": True, "attn_mask": f(2, 1, 5, 7)}),
}


def attention(name: str) -> Program:
    heads, length, options = ATTENTION[name]

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        given = dict(options)
        mask = given.get("attn_mask")
        if mask is not None and mask.is_floating_point():
            given["attn_mask"] = mask.to(q.dtype)
        return F.scaled_dot_product_attention(q, k, v, **given)

    rest = f(2, heads, length, 8), f(2, heads, length, 8)
    return program(f"attention, {name}", call, f(2, 4, 5, 8), *rest)


def refusal(made: Program) -> str | None:
    """What torch says to the call; torch 2.15 takes no mask beside is_causal."""
    try:
        made.call(*made.inputs)
    except RuntimeError as error:
        return str(error)[:40]
    return None


OF_ATTENTION = [attention(name) for name in ATTENTION]
WHOLE = [
    *LINEAR,
    program("linear with one output", F.linear, f(2, 5, 4), f(4)),
    *MATMUL,
    *(made for made in OF_ATTENTION if refusal(made) is None),
    program(
        "attention without heads",
        F.scaled_dot_product_attention,
        f(2, 5, 8),
        f(2, 7, 8),
        f(2, 7, 8),
    ),
    program(
        "attention, a learned mask",
        F.scaled_dot_product_attention,
        f(2, 4, 5, 8),
        f(2, 4, 7, 8),
        f(2, 4, 7, 8),
        f(5, 7),
    ),
]


@by_batches(WHOLE, 26)
def test_values_and_gradients(mesh: DeviceMesh, batch: list[Program]) -> None:
    check_all(batch, lambda tensor: put(tensor, mesh), xla_compile)


@by_batches(WHOLE, 26)
def test_eager(mesh: DeviceMesh, batch: list[Program]) -> None:
    check_values(batch, lambda tensor: put(tensor, mesh), eagerly)


def test_complex_gradients(mesh: DeviceMesh) -> None:
    check_all(OF_COMPLEX, lambda tensor: put(tensor, mesh), eagerly)


@pytest.mark.only_on("jax")  # torch_xla takes complex numbers apart on the host
def test_complex_gradients_in_a_step(mesh: DeviceMesh) -> None:
    check_all(OF_COMPLEX, lambda tensor: put(tensor, mesh), xla_compile)


def test_what_torch_refuses_is_refused(mesh: DeviceMesh) -> None:
    for made in OF_ATTENTION:
        message = refusal(made)
        if message is not None:
            with pytest.raises(RuntimeError, match=message):
                made.call(*(put(t, mesh) for t in made.inputs))


def test_attention_with_dropout_runs_and_drops(mesh: DeviceMesh) -> None:
    q = put(torch.zeros(2, 4, 8, 8), mesh).requires_grad_()
    v = put(torch.ones(2, 4, 8, 8), mesh)
    out = F.scaled_dot_product_attention(q, q, v, dropout_p=0.5)
    out.sum().backward()
    assert out.detach().cpu().unique().numel() > 1
    assert out.detach().cpu().mean().item() == pytest.approx(1, abs=0.3)
    assert q.grad.shape == q.shape


# ------------------------------------------------------------------ they arrive whole


class Counts:
    """How often each op reached the runtime."""

    def __init__(self, runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
        self.of: dict[Any, int] = {}
        self._run_op = runtime.run_op
        monkeypatch.setattr(runtime, "run_op", self._counted)

    def _counted(self, func: Any, args: Any, kwargs: Any) -> Any:
        self.of[func] = self.of.get(func, 0) + 1
        return self._run_op(func, args, kwargs)

    def __call__(self, op: Any) -> int:
        return self.of.get(op, 0)


@pytest.fixture
def counts(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> Counts:
    return Counts(runtime, monkeypatch)


def block(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = F.linear(x, weight)
    return F.scaled_dot_product_attention(y, y, y) @ weight


def flattened(counts: Counts) -> int:
    return sum(map(counts, (aten.mm.default, aten.bmm.default, aten.addmm.default)))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_forward_ops_arrive_whole(mesh: DeviceMesh, counts: Counts, mode: Any) -> None:
    x, weight = put(f(2, 4, 5, 8), mesh).requires_grad_(), put(f(8, 8), mesh)
    with mode():
        block(x, weight)
    assert counts(aten.linear.default) == 1
    assert counts(aten.matmul.default) == 1
    assert counts(aten.scaled_dot_product_attention.default) == 1
    assert flattened(counts) == 0


def test_backward_ops_arrive_whole(mesh: DeviceMesh, counts: Counts) -> None:
    x, weight = put(f(2, 4, 5, 8), mesh).requires_grad_(), put(f(8, 8), mesh).requires_grad_()
    block(x, weight).sum().backward()
    assert counts(whole.linear_weight_grad.default) == 2
    assert counts(whole.sdpa_backward.default) == 1
    assert flattened(counts) == 0


@pytest.mark.parametrize("reentrant", [True, False])
def test_they_are_whole_and_right_under_checkpoint(
    mesh: DeviceMesh, counts: Counts, reentrant: bool
) -> None:
    x, weight = f(2, 4, 5, 8), f(8, 8) / 4
    plain = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    block(*plain).sum().backward()
    ours = [put(t, mesh).requires_grad_() for t in (x, weight)]
    cast("Any", checkpoint(block, *ours, use_reentrant=reentrant)).sum().backward()
    assert counts(aten.scaled_dot_product_attention.default) == 2
    assert flattened(counts) == 0
    for mine, theirs in zip(ours, plain, strict=True):
        assert theirs.grad is not None
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad, rtol=1e-4, atol=1e-5)


def test_autocast_reaches_them(mesh: DeviceMesh, runtime: Runtime, counts: Counts) -> None:
    x, weight = put(f(2, 4, 5, 8), mesh).requires_grad_(), put(f(8, 8), mesh).requires_grad_()
    with torch.autocast(torch.device(runtime.torch_device).type, torch.bfloat16):
        for out in (F.linear(x, weight), x @ weight, F.scaled_dot_product_attention(x, x, x)):
            assert out.dtype == torch.bfloat16
        block(x, weight).sum().backward()
    assert x.grad.dtype == torch.float32
    assert weight.grad.dtype == torch.float32
    assert counts(aten.linear.default) == 2
    assert flattened(counts) == 0


def test_plain_tensors_never_meet_our_kernels(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    for function in (products._Linear, products._Matmul, whole_attention._Attention):
        original = function.forward
        monkeypatch.setattr(
            function,
            "forward",
            staticmethod(lambda *args, original=original: calls.append(1) or original(*args)),
        )
    x, weight = f(2, 4, 5, 8).requires_grad_(), f(8, 8).requires_grad_()
    block(x, weight).sum().backward()
    assert calls == []
    block(put(x.detach(), mesh), put(weight.detach(), mesh))
    assert len(calls) == 3


# ------------------------------------------------------------------ what XLA makes of them


def gathers(mesh: DeviceMesh, step: Callable[..., Any], *arguments: Any) -> list[str]:
    compiled = xla_compile(step)
    compiled(*arguments)
    found = collectives(compiled.hlo(), mesh.value)
    return [str(c) for c in found if "gather" in str(c.kind).lower()]


def parameter(mesh: DeviceMesh, shape: Sequence[int], *spec: str | None) -> nn.Parameter:
    return nn.Parameter(put(f(*shape) / shape[-1], mesh, *spec))


def test_a_megatron_mlp_gathers_nothing(mesh: DeviceMesh) -> None:
    up, down = parameter(mesh, (16, 8), "tp", None), parameter(mesh, (8, 16), None, "tp")
    x = put(f(4, 6, 8), mesh, "dp", None, None).requires_grad_()

    def step(x: torch.Tensor) -> torch.Tensor:
        up.grad = down.grad = None
        loss = F.linear(F.gelu(F.linear(x, up)), down).square().sum()
        loss.backward()
        return loss

    assert gathers(mesh, step, x) == []


def test_attention_with_sharded_heads_gathers_nothing(mesh: DeviceMesh) -> None:
    weights = [parameter(mesh, (8, 8), "tp", None) for _ in "qkv"]
    out = parameter(mesh, (8, 8), None, "tp")
    x = put(f(4, 6, 8), mesh, "dp", None, None)

    def step(x: torch.Tensor) -> torch.Tensor:
        for weight in (*weights, out):
            weight.grad = None
        q, k, v = (F.linear(x, w).unflatten(-1, (4, 2)).transpose(1, 2) for w in weights)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        loss = F.linear(heads.transpose(1, 2).flatten(-2), out).square().sum()
        loss.backward()
        return loss

    assert gathers(mesh, step, x) == []


def test_a_sharded_vocabulary_is_not_gathered(mesh: DeviceMesh) -> None:
    table = parameter(mesh, (32, 8), "tp", None)
    tokens = put(torch.arange(24).reshape(4, 6), mesh, "dp", None)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        table.grad = None
        logits = F.linear(F.embedding(tokens, table), table)
        loss = F.cross_entropy(logits.transpose(1, 2), tokens)
        loss.backward()
        return loss

    assert gathers(mesh, step, tokens) == []


def test_the_control_a_flattened_linear_gathers(mesh: DeviceMesh) -> None:
    weight = parameter(mesh, (8, 16), None, None)
    x = put(f(4, 8, 16), mesh, "dp", "tp", None)

    def step(x: torch.Tensor, flatten: bool) -> torch.Tensor:
        weight.grad = None
        y = F.linear(x.reshape(-1, 16) if flatten else x, weight)
        loss = y.square().sum()
        loss.backward()
        return y

    assert gathers(mesh, step, x, False) == []
    assert gathers(mesh, step, x, True) != []
