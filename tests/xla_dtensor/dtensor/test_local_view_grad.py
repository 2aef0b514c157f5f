"""Gradients through to_local, from_local and the collectives on local views.

The oracle is the same mathematics on plain float64 tensors, in which each device's part is a slice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from xla_dtensor import DeviceMesh, DTensor, LocalView, distribute_tensor
from xla_dtensor.collectives import (
    all_gather,
    all_to_all,
    axis_index,
    permute,
    pmax,
    pmean,
    pmin,
    psum,
    reduce_scatter,
)
from xla_dtensor.errors import LocalViewError

VALUE = torch.randn(8, 4, generator=torch.Generator().manual_seed(3))
SCALE = torch.arange(1.0, 9.0)
"""One factor per device."""


def factors(mesh: DeviceMesh) -> Any:
    return LocalView.from_shards(list(SCALE), mesh)


def put(mesh: DeviceMesh, *placements: Any, value: torch.Tensor = VALUE) -> Any:
    return distribute_tensor(value, mesh, list(placements)).requires_grad_()


def close(found: Any, expected: torch.Tensor) -> None:
    found = found.detach().cpu() if hasattr(found, "cpu") else found
    torch.testing.assert_close(found.double(), expected.double(), rtol=1e-4, atol=1e-5)


def shards(view: Any) -> torch.Tensor:
    """Return [dp, tp, *local shape], what each device has."""
    data = torch.stack([shard.data for shard in view.detach().addressable_shards()])
    return data.reshape(2, 4, *data.shape[1:])


# ---------------------------------------------------------------------- to_local

R, P = Replicate(), Partial()
# placements -> (those of the gradient, the coefficient of each row of the value)
BY_ROW = SCALE.reshape(2, 4)
TO_LOCAL: dict[str, tuple[Any, Any, torch.Tensor]] = {
    "all shards": ((Shard(0), Shard(0)), None, SCALE),
    "the same, asked for": ((Shard(0), Shard(0)), (Shard(0), Shard(0)), SCALE),
    "parts along tp": ((Shard(0), R), (Shard(0), P), BY_ROW.sum(1).repeat_interleave(4)),
    "parts along dp": ((R, Shard(0)), (P, Shard(0)), BY_ROW.sum(0).repeat_interleave(2)),
    "parts along both": ((R, R), (P, P), SCALE.sum().expand(8)),
    "means": ((R, R), (Partial("avg"), P), SCALE.sum().expand(8) / 2),
    "the largest": ((R, Shard(0)), (Partial("max"), Shard(0)), BY_ROW[1].repeat_interleave(2)),
}


@pytest.mark.parametrize("name", TO_LOCAL)
def test_gradients_of_to_local(mesh: DeviceMesh, name: str) -> None:
    """Each device multiplies its shard by a number of its own."""
    placements, asked, expected = TO_LOCAL[name]
    x = put(mesh, *placements)
    view = x.to_local(grad_placements=asked)
    (view * factors(mesh)).sum().backward()
    assert x.grad.shape == (8, 4)
    assert isinstance(x.grad, DTensor)
    assert x.grad.placements == (placements if asked is None else asked)
    close(x.grad, expected[:, None].expand(8, 4))


def test_a_gradient_that_lies_otherwise(mesh: DeviceMesh) -> None:
    """The view is the whole tensor, and each device's gradient is of a part."""
    x = put(mesh, R, R, value=VALUE[:4])
    y = x.to_local(grad_placements=[R, Partial()])
    mine = y.index_select(0, axis_index(y, "tp")[None])
    psum((mine**2).sum(), "tp").backward()
    close(x.grad, 2 * VALUE[:4])


def test_a_replicated_gradient_that_differs(mesh: DeviceMesh) -> None:
    x = put(mesh, Shard(0), R)
    with pytest.raises(LocalViewError) as raised:
        (x.to_local() * factors(mesh)).sum().backward()
    assert str(raised.value) == (
        "The gradient of a to_local() of shape=(8, 4) may differ along ['tp'], where its "
        "placements (Shard(dim=0), Replicate()) say Replicate. Each device has only a part of it "
        "there. Pass to_local(grad_placements=...) with Partial() for these axes."
    )
    assert x.grad is None
    with pytest.raises(LocalViewError, match=r"may differ along \['dp', 'tp'\]"):
        (put(mesh, R, R).to_local() * factors(mesh)).sum().backward()


def test_what_does_not_differ_is_the_whole_gradient(mesh: DeviceMesh) -> None:
    x = put(mesh, R, R)
    (x.to_local() ** 2).sum().backward()
    close(x.grad, 2 * VALUE)


def test_unreduced_gradients_are_accumulated(mesh: DeviceMesh) -> None:
    """Microbatches add up as each device's own parts, which are summed once, at the end."""
    w, x = put(mesh, R, R, value=VALUE[:4]), torch.randn(24, 4, dtype=torch.float64)
    local: Any = w.detach().to_local().clone().requires_grad_()
    for batch in x.float().chunk(3):
        rows = distribute_tensor(batch, mesh, [Shard(0), R]).to_local()
        ((rows @ local) ** 2).sum().backward()
    assert local.grad.varying == {"dp"}
    total = DTensor.from_local(local.grad, mesh, [Partial(), R])
    plain = VALUE[:4].double().requires_grad_()
    ((x @ plain) ** 2).sum().backward()
    close(total, plain.grad)  # pyright: ignore


def test_used_twice(mesh: DeviceMesh) -> None:
    x = put(mesh, Shard(0), R)
    one, two = x.to_local(), x.to_local()
    y = DTensor.from_local(one * two + one, mesh, [Shard(0), R])
    (y + x).sum().backward()
    close(x.grad, 2 * VALUE + 2)


@pytest.mark.parametrize("op", ["sum", "product", "avg", "max", "min"])
def test_to_local_of_a_partial(mesh: DeviceMesh, op: str) -> None:
    """There and back as the same Partial is the identity, and so is its gradient."""
    parts = LocalView.from_shards(list(VALUE.abs() + 1), mesh)
    x: Any = DTensor.from_local(parts, mesh, [Partial(op), R], run_check=True).requires_grad_()
    view = x.to_local()
    whole = DTensor.from_local(view, mesh, [Partial(op), R]).full_tensor()
    close(whole, x.detach().cpu())
    weight = torch.arange(4.0) + 1
    if op in ("sum", "product"):
        reduced = psum(view, "dp") if op == "sum" else all_gather(view[None], "dp").prod(0)
        (reduced * weight).sum().backward()
        close(x.grad, weight)


# ---------------------------------------------------------------------- from_local


@pytest.mark.parametrize("ops", [("sum", "sum"), ("avg", "sum"), ("avg", "avg"), ("sum", "avg")])
def test_from_local_of_parts(mesh: DeviceMesh, ops: tuple[str, str]) -> None:
    parts: Any = LocalView.from_shards(list(VALUE), mesh).requires_grad_()
    y = DTensor.from_local(parts**2, mesh, [Partial(op) for op in ops])
    weight = torch.arange(4.0) + 1
    (y * weight).sum().backward()
    plain = VALUE.double().reshape(2, 4, 4).requires_grad_()
    whole = plain**2
    for op in ops:
        whole = whole.sum(0) if op == "sum" else whole.mean(0)
    (whole * weight).sum().backward()
    close(y, whole.detach())
    close(shards(parts.grad), plain.grad)  # pyright: ignore


def torch_product(x: torch.Tensor) -> torch.Tensor:
    return x.prod(0)


REDUCED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "max": lambda x: x.amax(0),
    "min": lambda x: x.amin(0),
    "product": torch_product,
}


@pytest.mark.parametrize("op", REDUCED)
def test_from_local_of_other_reductions(mesh: DeviceMesh, op: str) -> None:
    """PyTorch gives each part the whole gradient; here it goes to the parts that have a say."""
    value = VALUE.clone()
    value[0, 0] = value[5, 1] = 0.0
    parts: Any = LocalView.from_shards(list(value), mesh).requires_grad_()
    y = DTensor.from_local(parts * 1, mesh, [Partial(op), Shard(0)])
    weight = torch.arange(16.0) + 1
    (y * weight).sum().backward()
    plain = value.double().reshape(2, 4, 4).requires_grad_()
    whole = REDUCED[op](plain).flatten()
    (whole * weight).sum().backward()
    close(y, whole.detach())
    close(shards(parts.grad), plain.grad)  # pyright: ignore


def test_run_check_gives_gradients_to_the_first(mesh: DeviceMesh) -> None:
    parts: Any = LocalView.from_shards(list(VALUE), mesh).requires_grad_()
    y = DTensor.from_local(parts * 2, mesh, [Shard(0), R], run_check=True)
    (y * torch.arange(8.0)).sum().backward()
    close(y, 2 * torch.cat([VALUE[0], VALUE[4]]))
    expected = torch.zeros(2, 4, 4)
    expected[:, 0] = 2 * torch.arange(8.0).reshape(2, 4)
    close(shards(parts.grad), expected)


def test_uneven_shards(mesh: DeviceMesh) -> None:
    value = torch.randn(10, 3, generator=torch.Generator().manual_seed(4))
    x, scale = (
        put(mesh, R, Shard(0), value=value),
        torch.tensor([1.0, 2.0, 3.0], requires_grad=True),
    )
    y = (x.to_local() * scale).tanh()
    (DTensor.from_local(y, mesh, [R, Shard(0)]) ** 2).sum().backward()
    plain, wide = value.double().requires_grad_(), scale.detach().double().requires_grad_()
    ((plain * wide).tanh() ** 2).sum().backward()
    close(x.grad, plain.grad)  # pyright: ignore
    close(scale.grad, wide.grad)  # pyright: ignore


def uneven_functions() -> dict[str, Callable[[Any], Any]]:
    return {
        "sum of products": lambda v: (v * v).sum(),
        "columns": lambda v: (v[:, 1:] * v[:, :1]).sum(0).exp().sum(),
        "transposed": lambda v: (v.t().exp().sum(0) * 2).relu().sum(),
        "reshaped": lambda v: (v.unsqueeze(1).relu() * v[:, None, :]).sum(),
    }


@pytest.mark.parametrize("name", uneven_functions())
def test_functions_of_uneven_views(mesh: DeviceMesh, name: str) -> None:
    function = uneven_functions()[name]
    value = torch.randn(10, 3, generator=torch.Generator().manual_seed(4))
    x, plain = put(mesh, R, Shard(0), value=value), value.double().requires_grad_()
    psum(function(x.to_local()), "tp").backward()
    torch.stack([function(rows) for rows in plain.split(3)]).sum().backward()
    close(x.grad, plain.grad)  # pyright: ignore


def test_second_derivatives(mesh: DeviceMesh) -> None:
    x = put(mesh, Shard(0), R)
    y = DTensor.from_local(x.to_local() ** 3, mesh, [Shard(0), R]).sum()
    (first,) = torch.autograd.grad(y, x, create_graph=True)
    (first**2).sum().backward()
    close(x.grad, 36 * VALUE.double() ** 3)


@pytest.mark.parametrize("whole", [True, False])
def test_gradients_given_as_plain_tensors(mesh: DeviceMesh, whole: bool) -> None:
    x, bias = put(mesh, Shard(0), R), torch.zeros(4, requires_grad=True)
    y: Any = x.to_local() * 2 + bias
    if whole:
        DTensor.from_local(y, mesh, [Shard(0), R]).backward(torch.ones(8, 4))
    else:
        grads = torch.autograd.grad(y, [bias], torch.ones(4, 4), retain_graph=True)
        close(grads[0], torch.full((4,), 8.0))
        y.backward(torch.ones(4, 4))
    close(x.grad, torch.full((8, 4), 2.0))
    close(bias.grad, torch.full((4,), 8.0))


# ---------------------------------------------------------------------- plain tensors beside views

# A plain bias is one tensor on all devices: whatever happens to the sum, each device's use counts.
ENDS: dict[str, tuple[Callable[[Any, Any], Any], float]] = {
    "on each device": (lambda z, m: z.sum(), 8.0),
    "psum": (lambda z, m: psum(z.sum(), "dp"), 8.0),
    "pmean": (lambda z, m: pmean(z.sum(), "dp"), 4.0),
    "all_gather": (lambda z, m: all_gather(z, "dp").sum(), 8.0),
    "reduce_scatter": (
        lambda z, m: DTensor.from_local(reduce_scatter(z.sum(0), "dp"), m, [Shard(0), R]).sum(),
        8.0,
    ),
    "permute": (lambda z, m: psum(permute(z, "dp", [(0, 1)]).sum(), "dp"), 4.0),
    "all_to_all": (lambda z, m: psum(all_to_all(z, "dp", 0, 1).sum(), "dp"), 8.0),
    "shards": (lambda z, m: DTensor.from_local(z, m, [Shard(0), R]).sum(), 8.0),
    "parts": (lambda z, m: DTensor.from_local(z.sum(0), m, [P, R]).sum(), 8.0),
    "means": (lambda z, m: DTensor.from_local(z.sum(0), m, [Partial("avg"), R]).sum(), 4.0),
    "the first": (
        lambda z, m: DTensor.from_local(z.sum(0), m, [R, R], run_check=True).sum(),
        4.0,
    ),
    "copies along tp": (lambda z, m: psum(z.sum(), ("dp", "tp")) / 4, 8.0),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_plain_bias(mesh: DeviceMesh, name: str) -> None:
    """Four rows on each of two devices along dp, the same along tp."""
    end, expected = ENDS[name]
    bias, view = torch.zeros(4, requires_grad=True), put(mesh, Shard(0), R).detach().to_local()
    end(view + bias, mesh).backward()
    assert type(bias.grad) is torch.Tensor
    close(bias.grad, torch.full((4,), expected))


# ---------------------------------------------------------------------- collectives

RING = [(0, 1), (1, 2), (3, 0)]


def moved(x: torch.Tensor) -> torch.Tensor:
    """`permute` along tp of a stack [dp, tp, ...]."""
    rows = [torch.zeros_like(x[:, 0]) for _ in range(4)]
    for source, to in RING:
        rows[to] = x[:, source]
    return torch.stack(rows, 1)


def exchanged(x: torch.Tensor) -> torch.Tensor:
    """`all_to_all` along tp of a stack [dp, tp, 4, 2]."""
    return x.transpose(1, 2).reshape(2, 4, 1, 8)


# name -> (on views, on the stack [dp, tp, 4, 2])
COLLECTIVES: dict[str, tuple[Callable[[Any], Any], Callable[[torch.Tensor], torch.Tensor]]] = {
    "psum": (lambda x: psum(x, "tp"), lambda x: x.sum(1, keepdim=True).expand(2, 4, 4, 2)),
    "psum, both": (lambda x: psum(x, ("dp", "tp")), lambda x: x.sum((0, 1)).expand(2, 4, 4, 2)),
    "psum twice": (
        lambda x: psum(psum(x, "tp").sin(), "tp"),
        lambda x: (4 * x.sum(1, keepdim=True).sin()).expand(2, 4, 4, 2),
    ),
    "pmean": (lambda x: pmean(x, "dp"), lambda x: x.mean(0, keepdim=True).expand(2, 4, 4, 2)),
    "pmax": (lambda x: pmax(x, "tp"), lambda x: x.amax(1, keepdim=True).expand(2, 4, 4, 2)),
    "pmin": (lambda x: pmin(x, "dp"), lambda x: x.amin(0, keepdim=True).expand(2, 4, 4, 2)),
    "all_gather": (
        lambda x: all_gather(x, "tp", 1),
        lambda x: x.permute(0, 2, 1, 3).reshape(2, 1, 4, 8).expand(2, 4, 4, 8),
    ),
    "reduce_scatter": (lambda x: reduce_scatter(x, "tp"), lambda x: x.sum(1).unsqueeze(2)),
    "all_to_all": (lambda x: all_to_all(x, "tp", 0, 1), exchanged),
    "permute": (lambda x: permute(x, "tp", RING), moved),
}
SAME: dict[str, set[str]] = {"differs": set(), "same along tp": {"tp"}, "same on all": {"dp", "tp"}}


@pytest.mark.parametrize("same", SAME)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives(mesh: DeviceMesh, name: str, same: str) -> None:
    """Values and gradients, also of tensors that are the same on some devices to begin with.

    `x` is one variable where devices have the same; each device then weights the result by a
    number of its own, so that gradients differ.
    """
    on_views, on_stack = COLLECTIVES[name]
    copied = SAME[same]
    sizes = [1 if axis in copied else size for axis, size in (("dp", 2), ("tp", 4))]
    value = torch.randn(*sizes, 4, 2, generator=torch.Generator().manual_seed(5))
    plain = value.double().requires_grad_()
    result = on_stack((plain * plain).expand(2, 4, 4, 2))
    weight = BY_ROW.double().reshape(2, 4, *[1] * (result.ndim - 2))
    ((result / 8).sin() * weight).sum().backward()

    placements = [R if axis in copied else Shard(dim) for dim, axis in enumerate(("dp", "tp"))]
    cut: Any = put(mesh, *placements, value=value).detach().to_local()[0, 0]
    view: Any = cut.clone().requires_grad_()
    assert view.varying == {"dp", "tp"} - copied
    found = on_views(view * view)
    close(shards(found), result.detach().expand(2, 4, *result.shape[2:]))
    psum(((found / 8).sin() * factors(mesh)).sum(), ("dp", "tp")).backward()
    # Where the devices' gradients of one variable differ they are parts of a sum, else the whole.
    parts = tuple(axis for axis in ("dp", "tp") if axis in copied & view.grad.varying)
    total = psum(view.grad, parts) if parts else view.grad
    assert total.varying == {"dp", "tp"} - copied  # pyright: ignore
    close(shards(total), plain.grad.expand(2, 4, 4, 2))  # pyright: ignore


def test_labels_of_collectives(mesh: DeviceMesh) -> None:
    view = LocalView.from_shards(list(torch.ones(8, 4)), mesh)
    assert psum(view, "tp").varying == {"dp"}  # pyright: ignore
    assert all_gather(view, ("dp", "tp")).varying == frozenset()  # pyright: ignore
    assert reduce_scatter(psum(view, "tp"), "tp").varying == {"dp", "tp"}  # pyright: ignore
    assert axis_index(view, "tp").varying == {"tp"}  # pyright: ignore
    assert permute(psum(view, ("dp", "tp")), "dp", [(0, 1)]).varying == {"dp"}  # pyright: ignore


def test_the_gradient_of_from_local_lies_as_asked(mesh: DeviceMesh) -> None:
    """A name of newer torch: each device gets its shard of a gradient that is cut that way."""
    rows = torch.arange(8.0).reshape(8, 1).expand(8, 8).contiguous()
    source: Any = distribute_tensor(torch.ones(4, 8), mesh, [Replicate(), Replicate()])
    view = source.to_local().requires_grad_()
    kinds = [Shard(0), Replicate()]
    whole = DTensor.from_local(view, mesh, kinds, grad_placements=kinds)
    (whole * distribute_tensor(rows, mesh)).sum().backward()
    grads = [shard.data for shard in view.grad.addressable_shards()]  # pyright: ignore
    assert torch.equal(grads[0], rows[:4])
    assert torch.equal(grads[-1], rows[4:])


def test_a_strided_gradient_of_from_local(mesh: DeviceMesh) -> None:
    """Rows cut by dp and then tp get back their own gradient from a tensor cut the other way."""
    x = put(mesh, Shard(0), Shard(0), value=torch.zeros(8, 2))
    made: Any = DTensor.from_local(x.to_local(), mesh, [Shard(0), Shard(0)])
    weight = torch.arange(16.0).reshape(8, 2)
    made.backward(distribute_tensor(weight, mesh, [_StridedShard(0, split_factor=4), Shard(0)]))
    assert torch.equal(x.grad.cpu(), weight)


@pytest.mark.parametrize("op", ["max", "min"])
def test_equal_parts_of_an_extreme_share_its_gradient(mesh: DeviceMesh, op: str) -> None:
    x = put(mesh, Replicate(), Shard(0), value=torch.ones(8))
    parts = x.to_local(grad_placements=[Partial(), Shard(0)]) * 2
    DTensor.from_local(parts, mesh, [Partial(op), Shard(0)]).sum().backward()
    assert torch.equal(x.grad.cpu(), torch.full((8,), 2.0))
