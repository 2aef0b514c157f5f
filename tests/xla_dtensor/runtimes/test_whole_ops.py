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

from xla_dtensor import DeviceMesh, distribute_tensor
from xla_dtensor import compile as xla_compile
from xla_dtensor.report import collectives
from xla_dtensor.runtimes import Runtime, whole_ops

pytestmark = pytest.mark.usefixtures("runtime")

aten = torch.ops.aten
whole = torch.ops.xla_dtensor
_generator = torch.Generator().manual_seed(3)


def f(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=_generator)


def put(tensor: torch.Tensor, mesh: DeviceMesh, *spec: str | None) -> Any:
    return distribute_tensor(tensor, mesh, spec or ("dp", *(None,) * (tensor.ndim - 1)))


def both(mesh: DeviceMesh, function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> None:
    """Compare values and gradients with torch in float64."""
    exact = [t.double().requires_grad_() for t in inputs]
    ours = [put(t, mesh).requires_grad_() for t in inputs]
    expected, found = function(*exact), function(*ours)
    torch.testing.assert_close(
        found.detach().cpu(), expected.detach().float(), rtol=1e-5, atol=1e-5
    )
    cotangent = torch.linspace(-1, 1, expected.numel()).reshape(expected.shape)
    expected.backward(cotangent.double())
    found.backward(distribute_tensor(cotangent, mesh))
    for mine, theirs in zip(ours, exact, strict=True):
        assert theirs.grad is not None
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad.float(), rtol=1e-5, atol=2e-5)


# ------------------------------------------------------------------ values and gradients


@pytest.mark.parametrize("x_shape", [(4,), (5, 4), (3, 5, 4), (2, 3, 5, 4)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_linear(mesh: DeviceMesh, x_shape: tuple[int, ...], bias: bool) -> None:
    both(mesh, F.linear, f(*x_shape), f(6, 4), *([f(6)] if bias else []))


def test_linear_with_one_output(mesh: DeviceMesh) -> None:
    both(mesh, F.linear, f(2, 5, 4), f(4))


LEFT = [(4,), (5, 4), (3, 5, 4), (2, 3, 5, 4)]
RIGHT = [(4,), (4, 6), (3, 4, 6), (2, 3, 4, 6)]
BROADCAST = [((1, 5, 4), (3, 4, 6)), ((3, 5, 4), (1, 4, 6)), ((2, 1, 5, 4), (3, 4, 6))]


@pytest.mark.parametrize(("a", "b"), [*itertools.product(LEFT, RIGHT), *BROADCAST], ids=str)
def test_matmul(mesh: DeviceMesh, a: tuple[int, ...], b: tuple[int, ...]) -> None:
    both(mesh, torch.matmul, f(*a), f(*b))


def conjugating(mesh: DeviceMesh, function: Callable[..., Any], *inputs: torch.Tensor) -> None:
    """Compare gradients of complex inputs: one without its conjugate is wrong, not an error."""
    theirs = [t.clone().requires_grad_() for t in inputs]
    ours = [put(t, mesh).requires_grad_() for t in inputs]
    for given in (theirs, ours):
        made = torch.view_as_real(function(*given))
        (made[..., 0] + made[..., 1].square()).sum().backward()
    for mine, plain in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad.cpu(), plain.grad, rtol=1e-4, atol=1e-4)


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


@pytest.mark.parametrize("name", COMPLEX)
def test_complex_gradients(mesh: DeviceMesh, name: str) -> None:
    function, shapes = COMPLEX[name]
    conjugating(mesh, function, *(torch.complex(f(*shape), f(*shape)) for shape in shapes))


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


@pytest.mark.parametrize("name", ATTENTION)
def test_attention(mesh: DeviceMesh, name: str) -> None:
    heads, length, options = ATTENTION[name]

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        given = dict(options)
        mask = given.get("attn_mask")
        if mask is not None and mask.is_floating_point():
            given["attn_mask"] = mask.to(q.dtype)
        return F.scaled_dot_product_attention(q, k, v, **given)

    inputs = f(2, 4, 5, 8), f(2, heads, length, 8), f(2, heads, length, 8)
    try:
        attention(*inputs)
    except RuntimeError as error:  # torch 2.15 takes no mask beside is_causal
        with pytest.raises(RuntimeError, match=str(error)[:40]):
            attention(*(put(t, mesh) for t in inputs))
        return
    both(mesh, attention, *inputs)


def test_attention_without_heads(mesh: DeviceMesh) -> None:
    both(mesh, F.scaled_dot_product_attention, f(2, 5, 8), f(2, 7, 8), f(2, 7, 8))


def test_a_mask_can_be_learned(mesh: DeviceMesh) -> None:
    both(mesh, F.scaled_dot_product_attention, f(2, 4, 5, 8), f(2, 4, 7, 8), f(2, 4, 7, 8), f(5, 7))


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
    for function in (whole_ops._Linear, whole_ops._Matmul, whole_ops._Attention):
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
