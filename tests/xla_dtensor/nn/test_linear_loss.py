"""linear_cross_entropy against cross_entropy of linear; on the JAX runtime without the logits."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import xla_dtensor as xd
from xla_dtensor.errors import ArgumentTypeError
from xla_dtensor.report import collectives
from xla_dtensor.runtimes import Runtime

pytestmark = pytest.mark.usefixtures("runtime")

BATCH, LENGTH, FEATURES = 4, 6, 8


def inputs(classes: int, *, bias: bool = True) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(classes)
    x = torch.randn(BATCH, LENGTH, FEATURES, generator=generator)
    weight = torch.randn(classes, FEATURES, generator=generator)
    target = torch.randint(classes, (BATCH, LENGTH), generator=generator)
    target[0, :2] = -100
    target[1, 1] = 3
    return [x, weight, target, *([torch.randn(classes, generator=generator)] if bias else [])]


SPECS = [("dp", None, None), ("tp", None), ("dp", None), ("tp",)]


def put(mesh: xd.DeviceMesh, tensors: list[torch.Tensor]) -> list[Any]:
    return [xd.distribute_tensor(t, mesh, spec) for t, spec in zip(tensors, SPECS, strict=False)]


def expected_of(tensors: list[torch.Tensor], **options: Any) -> tuple[torch.Tensor, list[Any]]:
    """The same in float64, by torch: the loss, and the gradients of what has some."""
    leaves = [t.double().requires_grad_() if t.is_floating_point() else t for t in tensors]
    x, weight, target, *bias = leaves
    logits = F.linear(x, weight, *bias).flatten(0, 1)
    loss = F.cross_entropy(logits, target.flatten(), **options)
    weights = torch.linspace(-1, 1, loss.numel(), dtype=torch.float64).reshape(loss.shape)
    (loss * weights if loss.ndim else loss).sum().backward()
    return loss.detach(), [t.grad for t in leaves]


OPTIONS: dict[str, tuple[int, int | None, dict[str, Any]]] = {
    "one chunk": (16, 1, {}),
    "chunks": (16, 4, {}),
    "chunks that do not divide": (13, 4, {}),
    "as many chunks as classes": (6, 6, {}),
    "chosen": (24, None, {}),
    "sum": (16, 2, {"reduction": "sum"}),
    "none": (16, 2, {"reduction": "none"}),
    "smoothing": (13, 4, {"label_smoothing": 0.1}),
    "ignored class": (16, 4, {"ignore_index": 3}),
    "all": (13, 3, {"ignore_index": 3, "label_smoothing": 0.3, "reduction": "none"}),
}


@pytest.mark.thorough
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("name", OPTIONS)
def test_values_and_gradients(mesh: xd.DeviceMesh, name: str, bias: bool) -> None:
    classes, chunks, options = OPTIONS[name]
    tensors = inputs(classes, bias=bias)
    if options.get("ignore_index") == 3:
        tensors[2] = tensors[2].clamp(min=0)
    expected, gradients = expected_of(tensors, **options)
    ours = [t.requires_grad_() if t.is_floating_point() else t for t in put(mesh, tensors)]
    x, weight, target, *rest = ours
    found: Any = xd.linear_cross_entropy(
        x, weight, target, linear_bias=rest[0] if rest else None, chunks=chunks, **options
    )
    assert found.dtype == torch.float32
    torch.testing.assert_close(
        found.detach().cpu().flatten(), expected.float().flatten(), rtol=1e-5, atol=1e-5
    )
    weights = torch.linspace(-1, 1, found.numel()).reshape(found.shape)
    (found * xd.distribute_tensor(weights, mesh) if found.ndim else found).sum().backward()
    for mine, theirs in zip(ours, gradients, strict=True):
        assert (mine.grad is None) == (theirs is None)
        if theirs is not None:
            torch.testing.assert_close(mine.grad.cpu(), theirs.float(), rtol=1e-4, atol=1e-5)


def test_half_precision(mesh: xd.DeviceMesh) -> None:
    tensors = [t.bfloat16() if t.is_floating_point() else t for t in inputs(32)]
    expected, gradients = expected_of(tensors)
    x, weight, target, bias = put(mesh, tensors)
    for t in (x, weight, bias):
        t.requires_grad_()
    found: Any = xd.linear_cross_entropy(x, weight, target, linear_bias=bias, chunks=4)
    found.backward()
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(expected.item(), rel=1e-2)
    for mine, theirs in zip((x, weight, bias), (*gradients[:2], gradients[3]), strict=True):
        assert mine.grad.dtype == torch.bfloat16
        torch.testing.assert_close(mine.grad.cpu().double(), theirs, rtol=5e-2, atol=5e-3)


def step_of(lean: bool, chunks: int) -> Any:
    def step(x: Any, weight: Any, target: Any) -> Any:
        x, weight = (t.detach().requires_grad_() for t in (x, weight))
        if lean:
            loss = xd.linear_cross_entropy(x, weight, target, chunks=chunks)
        else:
            loss = F.cross_entropy(F.linear(x, weight).flatten(0, 1), target.flatten())
        loss.backward()
        return [loss.detach(), x.grad, weight.grad]

    return xd.compile(step)


@pytest.mark.only_on("jax")
def test_a_step_holds_no_logits_and_keeps_the_shardings(mesh: xd.DeviceMesh) -> None:
    given = put(mesh, inputs(64, bias=False))
    lean, plain = step_of(True, 4), step_of(False, 4)
    for a, b in zip(lean(*given), plain(*given), strict=True):
        torch.testing.assert_close(a.cpu(), b.cpu(), rtol=1e-4, atol=1e-5)
    text = lean.hlo()
    # A device has 2 of 4 sequences, and 16 of 64 classes: 4 of each chunk.
    assert re.search(r"f32\[(?:2,6|12),16\]", plain.hlo())
    assert re.search(r"f32\[(?:2,6|12),4\]", text)
    assert not re.search(r"f32\[(?:2,6|12|4,6|24),(?:16|64)\]", text)
    gathers = [c for c in collectives(text, mesh.value) if c.kind == "all-gather"]
    assert not gathers, gathers
    # The classes are summed over tp, token by token; the weight's gradient over dp.
    axes = {c.axes for c in collectives(text, mesh.value)}
    assert axes <= {("tp",), ("dp",), ("dp", "tp")}


def test_as_many_chunks_as_make_the_columns_few() -> None:
    from xla_dtensor.nn.loss import _chunks

    assert [_chunks(n) for n in (1, 1000, 8192, 8193, 32000, 50257, 128256)] == [
        1,
        1,
        1,
        3,
        4,
        7,
        16,
    ]


def test_what_is_refused(mesh: xd.DeviceMesh, runtime: Runtime) -> None:
    x, weight, target = put(mesh, inputs(16, bias=False))
    bad: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((x, weight.T, target), {}, r"Pass \(\.\.\., d\) and \(classes, d\)"),
        ((x, weight, x[..., 0]), {}, "Pass integers"),
        ((x, weight, target[0]), {}, "one target for each row"),
        ((x, weight, target), {"reduction": "max"}, "no such reduction"),
        ((x, weight, target), {"chunks": 0}, "at least one class"),
        ((x, weight, target), {"chunks": 17}, "at least one class"),
    ]
    for args, options, text in bad:
        with pytest.raises(ArgumentTypeError, match=text):
            xd.linear_cross_entropy(*args, **options)


def test_plain_tensors() -> None:
    x, weight, target = inputs(16, bias=False)
    found = xd.linear_cross_entropy(x, weight, target)
    assert found.item() == pytest.approx(
        F.cross_entropy(F.linear(x, weight).flatten(0, 1), target.flatten()).item(), rel=1e-5
    )
