"""Convolution, pooling, resizing, norms and losses against plain torch, on sharded inputs.

Each call runs on DTensors whose first two dims are cut, unevenly as a rule; values and gradients
are compared with torch on the CPU in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.utils._pytree import tree_flatten

import xla_dtensor as xd
from tests.xla_dtensor.op_batches import Program, check_all, check_values, eagerly
from tests.xla_dtensor.runtimes.layer_cases import (
    BAG,
    IMAGE,
    OFFSETS,
    TABLE_OF_ROWS,
    Layer,
)
from tests.xla_dtensor.runtimes.layer_cases_images import ALL, LAYERS
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.report import collectives
from xla_dtensor.runtimes.jax.lower.table import TABLE, Lowering

pytestmark = [pytest.mark.only_on("jax"), pytest.mark.usefixtures("runtime")]

aten = torch.ops.aten
Put = Callable[[torch.Tensor], torch.Tensor]


def test_every_case_is_of_a_lowering() -> None:
    """That every lowering has a case says test_jax_lowering."""
    assert len(ALL) > 70
    assert set(ALL) - set(TABLE) == set()


def recorded(monkeypatch: pytest.MonkeyPatch) -> set[Any]:
    """Return the set that each op that is lowered from now on is put into."""
    reached: set[Any] = set()

    def noting(op: Any, lowering: Lowering) -> Lowering:
        def call(*args: Any, **kwargs: Any) -> Any:
            reached.add(op)
            return lowering.function(*args, **kwargs)

        return Lowering(call, lowering.wants_meta)

    for op, lowering in list(TABLE.items()):
        monkeypatch.setitem(TABLE, op, noting(op, lowering))
    return reached


def tensors_of(result: Any) -> list[torch.Tensor]:
    return [value for value in tree_flatten(result)[0] if isinstance(value, torch.Tensor)]


def results_of(case: Layer, change: Put, put: Put) -> tuple[list[Any], list[Any]]:
    """The outputs and the inputs' gradients, for cotangents that are distinct numbers."""
    inputs = [change(v).detach().requires_grad_(v.is_floating_point()) for v in case.inputs]
    outputs = tensors_of(case.call(*inputs))
    for out in outputs:
        if out.requires_grad:
            grad = torch.linspace(-1, 1.3, out.numel(), dtype=torch.float64).reshape(out.shape)
            out.backward(put(grad.to(out.dtype)), retain_graph=True)
    return outputs, [v.grad for v in inputs]


@pytest.mark.thorough
@pytest.mark.parametrize("name", LAYERS)
def test_layer(mesh: xd.DeviceMesh, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    case = LAYERS[name]

    def put(tensor: torch.Tensor) -> torch.Tensor:
        return xd.distribute_tensor(tensor, mesh, ("dp", "tp", None, None, None)[: tensor.ndim])

    def wide(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.double() if tensor.is_floating_point() else tensor

    expected, expected_grads = results_of(case, wide, lambda t: t)
    reached = recorded(monkeypatch)
    found, grads = results_of(case, put, put)
    assert set(case.lowerings()) <= reached
    options: dict[str, Any] = {"rtol": 3e-5, "atol": 1e-5}
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.shape == theirs.shape
        torch.testing.assert_close(mine.cpu(), theirs.detach().to(mine.dtype), **options)
    for mine, theirs in zip(grads, expected_grads, strict=True):
        assert (mine is None) == (theirs is None)
        if theirs is not None:
            torch.testing.assert_close(mine.cpu(), theirs.to(mine.dtype), **options)


# ------------------------------------------------------------------ what layers communicate


def step_of(call: Callable[..., torch.Tensor], mesh: xd.DeviceMesh, *inputs: Any) -> Any:
    """Compile a layer with its gradients, check both, return (kind, axes) of what it sends."""

    def step(*values: torch.Tensor) -> list[torch.Tensor]:
        out = call(*values)
        return [out, *torch.autograd.grad((out * out).sum(), values)]

    placed = [xd.distribute_tensor(v, mesh, p).requires_grad_() for v, p in inputs]
    compiled = xd.compile(step)
    expected = step(*(v.clone().requires_grad_() for v, _ in inputs))
    for mine, theirs in zip(compiled(*placed), expected, strict=True):
        scale = theirs.detach().abs().max().item()
        torch.testing.assert_close(
            mine.full_tensor().cpu(), theirs.detach(), rtol=1e-5, atol=1e-5 * scale
        )
    return [(c.kind, c.axes) for c in collectives(compiled.hlo(), mesh.value)]


R, ROWS, CHANNELS = Replicate(), Shard(0), Shard(1)
BATCH = (ROWS, R)
X, W = torch.randn(8, 8, 9, 9), torch.randn(16, 8, 3, 3)
OVER_DP, OVER_TP = ("all-reduce", ("dp",)), ("all-reduce", ("tp",))


@pytest.mark.parametrize("groups", [1, 4, 8])
@pytest.mark.parametrize("stride", [1, 2])
def test_a_sharded_batch_costs_the_sum_of_the_weights_gradient(
    mesh: xd.DeviceMesh, groups: int, stride: int
) -> None:
    sent = step_of(
        lambda x, w: F.conv2d(x, w, None, stride, 1, 1, groups),
        mesh,
        (X, BATCH),
        (W[:, : 8 // groups], (R, R)),
    )
    assert sent == [OVER_DP]


def test_sharded_channels_cost_one_sum_more(mesh: xd.DeviceMesh) -> None:
    """Of the images' gradient where the results are cut, of the results where the images are."""

    def convolution(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, w, None, 1, 1)

    sent = step_of(convolution, mesh, (X, BATCH), (W, (R, ROWS)))
    assert sorted(sent) == [OVER_DP, OVER_TP]
    sent = step_of(convolution, mesh, (X, (ROWS, CHANNELS)), (W, (R, CHANNELS)))
    assert sorted(sent) == [OVER_DP, OVER_TP]


def test_a_step_on_one_device() -> None:
    mesh = xd.init_device_mesh("xla", (1, 1), mesh_dim_names=("dp", "tp"))
    image, kernel = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)
    step: Any = xd.compile(lambda x, w: F.max_pool2d(F.conv2d(x, w), 2))
    found = step(*(xd.distribute_tensor(t, mesh) for t in (image, kernel)))
    torch.testing.assert_close(
        found.cpu(), F.max_pool2d(F.conv2d(image, kernel), 2), rtol=1e-5, atol=1e-5
    )


def test_grouped_channels_stay_where_they_are(mesh: xd.DeviceMesh) -> None:
    sent = step_of(
        lambda x, w: F.conv2d(x, w, None, 1, 1, 1, 8),
        mesh,
        (X, (ROWS, CHANNELS)),
        (W[:, :1], (R, ROWS)),
    )
    assert sent == [OVER_DP]


@pytest.mark.parametrize(
    "call",
    [
        lambda x: F.max_pool2d(x, 3, 2, 1),
        lambda x: F.avg_pool2d(x, 3, 2, 1),
        lambda x: F.adaptive_avg_pool2d(x, (4, 5)),
        lambda x: F.adaptive_max_pool2d(x, 4),
        lambda x: F.interpolate(x, scale_factor=1.5, mode="bicubic"),
        lambda x: F.pad(x, (1, 2, 3, 4), "replicate"),
        lambda x: F.group_norm(x, 4) * x,
    ],
)
def test_pooling_sends_nothing(
    mesh: xd.DeviceMesh, call: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    assert step_of(call, mesh, (X, (ROWS, CHANNELS))) == []


def test_batch_norm_sends_its_statistics(mesh: xd.DeviceMesh) -> None:
    sent = step_of(
        lambda x: F.batch_norm(x, None, None, training=True) * x, mesh, (X, (ROWS, CHANNELS))
    )
    assert set(sent) == {OVER_DP}


# Sums of up to 650 terms of either sign.
CUT_ANYWHERE = [
    Program(name, call, inputs, values=(3e-5, 1e-4), gradients=(3e-5, 2e-4))
    for name, call, inputs in (
        ("maxima", lambda x: F.max_pool2d(x, 3, 2, 1), (X,)),
        ("averages", lambda x: F.avg_pool2d(x, 2, 2, ceil_mode=True), (X,)),
        ("convolution", lambda x, w: F.conv2d(x, w, None, 2, 1), (X, W)),
        ("groups", lambda x, w: F.conv2d(x, w[:, :2], None, 2, 1, 1, 4), (X, W)),
        (
            "transposed",
            lambda x, w: F.conv_transpose2d(x, w.mT.transpose(0, 1), None, 2, 1, 1),
            (X, W),
        ),
    )
]


@pytest.mark.parametrize("dim", [0, 1, 2, 3])
def test_images_may_be_cut_anywhere(mesh: xd.DeviceMesh, dim: int) -> None:
    """XLA's partitioner moves borders of images between devices, or more; values stay right."""

    def put(tensor: torch.Tensor) -> torch.Tensor:
        return xd.distribute_tensor(tensor, mesh, [R, Shard(dim) if tensor is X else R])

    check_all(CUT_ANYWHERE, put, xd.compile)


# ------------------------------------------------------------------ corners


def on_mesh(mesh: xd.DeviceMesh, tensor: torch.Tensor) -> xd.DTensor:
    return xd.distribute_tensor(tensor, mesh, ("dp", "tp", None, None)[: tensor.ndim])


def test_maxima_of_nan_and_infinity(mesh: xd.DeviceMesh) -> None:
    x = IMAGE.clone()
    x[0, 0, :5], x[1, :, 3, 4], x[2, 1, 6, 6] = -torch.inf, torch.nan, torch.inf
    for call in (
        lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True),
        lambda x: F.adaptive_max_pool2d(x, 4, return_indices=True),
    ):
        for mine, theirs in zip(call(on_mesh(mesh, x)), call(x), strict=True):
            torch.testing.assert_close(mine.cpu(), theirs, equal_nan=True)


def test_an_infinity_stays_where_it_is(mesh: xd.DeviceMesh) -> None:
    x = IMAGE.clone()
    x[0, 0, 4, 4] = torch.inf
    for call in (
        lambda x: F.adaptive_avg_pool2d(x, (4, 7)),
        lambda x: F.interpolate(x, size=(4, 13), mode="bilinear", antialias=True),
    ):
        assert call(on_mesh(mesh, x)).cpu().isfinite().equal(call(x).isfinite())


def test_whole_numbers(mesh: xd.DeviceMesh) -> None:
    x = (IMAGE * 9).long()
    assert F.avg_pool2d(on_mesh(mesh, x), 2).cpu().equal(F.avg_pool2d(x, 2))
    assert F.max_pool2d(on_mesh(mesh, x), 2).cpu().equal(F.max_pool2d(x, 2))
    bytes_ = x.abs().to(torch.uint8)
    found = F.interpolate(on_mesh(mesh, bytes_), scale_factor=2)
    assert found.cpu().equal(F.interpolate(bytes_, scale_factor=2))


TWICE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "convolution": lambda x: F.conv2d(x, x[:, :, :3, :3], None, 1, 1),
    "averages": lambda x: F.avg_pool2d(x, 3, 2) ** 2,
    "maxima": lambda x: F.max_pool2d(x, 3, 2) ** 2,
    "resizing": lambda x: F.interpolate(x, scale_factor=1.5, mode="bilinear") ** 2,
    "adaptive averages": lambda x: F.adaptive_avg_pool2d(x, 4) ** 2,
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True) ** 3,
}


@pytest.mark.parametrize("execute", [xd.compile, eagerly], ids=["compiled", "eager"])
def test_second_derivatives(mesh: xd.DeviceMesh, execute: Any) -> None:
    def penalty(
        call: Callable[[torch.Tensor], torch.Tensor],
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        def computed(x: torch.Tensor) -> torch.Tensor:
            x = x.detach().requires_grad_()
            with torch.enable_grad():
                (first,) = torch.autograd.grad(call(x).square().mean(), x, create_graph=True)
                return torch.autograd.grad(first.square().sum(), x)[0]

        return computed

    plain = IMAGE[:, :, :6, :6].double()
    batch = [Program(name, penalty(call), (plain,), values=None) for name, call in TWICE.items()]
    check_values(batch, lambda tensor: on_mesh(mesh, tensor), execute)


def test_bfloat16(mesh: xd.DeviceMesh) -> None:
    """Accumulated in float32 where torch does that, in one rounding."""
    x = IMAGE.bfloat16()
    for call in (
        lambda x: F.avg_pool2d(x, 3),
        lambda x: F.batch_norm(x, None, None, training=True),
        lambda x: F.group_norm(x, 2),
        lambda x: F.conv2d(x, x[:, :, :3, :3]),
        lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"),
    ):
        found = call(on_mesh(mesh, x))
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.cpu().float(), call(x.float()), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("option", ["sparse", "scale_grad_by_freq"])
def test_bags_without_a_gradient_of_ours(mesh: xd.DeviceMesh, option: str) -> None:
    weight = on_mesh(mesh, torch.ones(7, 4)).requires_grad_()
    options: dict[str, Any] = {option: True}
    out = F.embedding_bag(torch.tensor([[1, 2]]), weight, mode="sum", **options)
    with pytest.raises(UnsupportedOpError, match=rf"with {option}=True\. The JAX runtime does not"):
        out.sum().backward()


def test_bags_called_by_their_own_names(mesh: xd.DeviceMesh) -> None:
    """What inference calls, and the second half of the backward."""
    rows = TABLE_OF_ROWS
    for mode in (0, 1, 2):
        found, *seen = aten._embedding_bag_forward_only(
            on_mesh(mesh, rows), BAG, OFFSETS, mode=mode
        )
        expected, *plain = aten._embedding_bag(rows, BAG, OFFSETS, mode=mode)
        torch.testing.assert_close(found.cpu(), expected)
        grad = torch.randn(expected.shape)
        ours = aten._embedding_bag_dense_backward(
            on_mesh(mesh, grad), BAG, seen[0], seen[1], seen[2], 7, False, mode, None
        )
        bags = torch.tensor([1, 1, 1, 1, 2, 2, 2, 2, 2])
        theirs = aten._embedding_bag_dense_backward(
            grad, BAG, bags, plain[1], plain[2], 7, False, mode, None
        )
        torch.testing.assert_close(ours.cpu(), theirs)


def test_lengths_as_numbers(mesh: xd.DeviceMesh) -> None:
    """A list of lengths says how long the longest target is, whatever the targets' shape."""
    x = torch.randn(9, 2, 6).log_softmax(-1)
    targets = torch.tensor([[1, 2, 3, 5], [4, 4, 1, 1]])
    ours, theirs = (aten._ctc_loss(v, targets, [9, 8], [3, 2]) for v in (on_mesh(mesh, x), x))
    torch.testing.assert_close(ours[0].cpu(), theirs[0])
    for row, steps, states in ((0, 9, 7), (1, 8, 5)):  # torch leaves the rest as it found it
        mine, plain = (sums[row, :steps, :states] for sums in (ours[1].cpu(), theirs[1]))
        torch.testing.assert_close(mine, plain)
    grads = [
        aten._ctc_loss_backward(
            torch.tensor([1.0, -2.0]), v, targets, [9, 8], [3, 2], r[0], r[1], 0
        )
        for v, r in ((on_mesh(mesh, x), ours), (x, theirs))
    ]
    torch.testing.assert_close(grads[0].cpu(), grads[1], rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------ on one device's part


def test_in_a_manual_region(mesh: xd.DeviceMesh) -> None:
    """Each device has images of its own, which no sharding may be asked of."""

    def layers(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = F.batch_norm(F.conv2d(x, w, None, 2, 1), None, None, training=True)
        return F.interpolate(F.max_pool2d(y, 3, 2, 1), scale_factor=2, mode="bilinear")

    rows = (Shard(0), Replicate())
    made = xd.custom_shard(layers, mesh, (rows,), (rows, (R, R)))
    x, w = xd.distribute_tensor(X, mesh, rows), xd.distribute_tensor(W, mesh, (R, R))
    expected = torch.cat([layers(part, W) for part in X.chunk(2)])
    torch.testing.assert_close(made(x, w).cpu(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(xd.compile(made)(x, w).cpu(), expected, rtol=1e-5, atol=1e-5)


def test_on_local_tensors(mesh: xd.DeviceMesh) -> None:
    x = xd.distribute_tensor(X, mesh, BATCH).requires_grad_()
    w = xd.distribute_tensor(W, mesh, (R, R)).requires_grad_()

    def step(x: Any, w: Any) -> list[Any]:
        local = w.to_local(grad_placements=(Partial(), R))
        local = F.max_pool2d(F.conv2d(x.to_local(), local, None, 2, 1), 3, 2, 1)
        out = xd.DTensor.from_local(local, mesh, BATCH)
        return [out, *torch.autograd.grad((out * out).sum(), (x, w))]

    images, weight = (v.clone().requires_grad_() for v in (X, W))
    out = F.max_pool2d(F.conv2d(images, weight, None, 2, 1), 3, 2, 1)
    expected = [out, *torch.autograd.grad((out * out).sum(), (images, weight))]
    for run in (step, xd.compile(step)):
        for mine, theirs in zip(run(x, w), expected, strict=True):
            torch.testing.assert_close(mine.full_tensor().cpu(), theirs, rtol=1e-5, atol=1e-3)
