"""torch.compile: what a compiled function knows of its tensors, and shapes changed in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch._dynamo.exc import Unsupported
from torch.distributed.tensor import Replicate, Shard

import xla_dtensor as xd
from tests.xla_dtensor.compiling import Counting, compiled, put

pytestmark = pytest.mark.usefixtures("fresh_compiler")

R, S0, S1 = Replicate(), Shard(0), Shard(1)


# ---------------------------------------------------------------------- submeshes


def test_what_is_known_of_other_axes_is_kept(mesh: xd.DeviceMesh, backend: str) -> None:
    """A batch is cut along dp, of which a tensor on the mesh of tp says nothing."""
    tp, graphs, values = mesh["tp"], Counting(backend), torch.randn(8, 4)

    def function(x: Any) -> Any:
        return (x * 2).redistribute(tp, [S1]).sin()

    x: Any = put(mesh, values, S0, R).redistribute(tp, [R]).requires_grad_()
    other = put(tp, values, R).requires_grad_()
    assert x._spec.outer_cuts == (("dp", 0),)
    assert x.placements == other.placements
    call = compiled(function, graphs)
    rows: Any = ((x, 1), (other, 2), (x, 2))
    for given, count in rows:
        given.grad = None
        found, expected = call(given), function(given.detach())
        assert graphs.count == count
        assert found._spec.outer_cuts == expected._spec.outer_cuts == given._spec.outer_cuts
        assert found.xla_sharding() == expected.xla_sharding()
        torch.testing.assert_close(found.detach().cpu(), (values * 2).sin())
        found.backward(torch.ones_like(found))
        grad: Any = given.grad
        assert grad._spec.outer_cuts == given._spec.outer_cuts
        if given is x:  # where nothing is known, XLA may choose
            assert grad.xla_sharding() == given.xla_sharding()
        torch.testing.assert_close(grad.cpu(), (values * 2).cos() * 2)


# ---------------------------------------------------------------------- shapes


RESHAPED: dict[str, Callable[[Any], Any]] = {
    "t_": lambda x: x.squeeze(1).t_(),
    "unsqueeze_": lambda x: x.unsqueeze_(0),
    "squeeze_": lambda x: x.squeeze_(1),
    "transpose_": lambda x: x.transpose_(0, 2),
    "and written to": lambda x: x.squeeze_(1).add_(1).t_()[0].mul_(2),
}


@pytest.mark.parametrize("name", RESHAPED)
def test_shapes_changed_in_place(mesh: xd.DeviceMesh, backend: str, name: str) -> None:
    values = torch.randn(8, 1, 4)

    def function(x: Any) -> Any:
        y = x * 2
        RESHAPED[name](y)
        return y + 1, y.detach() * 3

    def local(x: Any) -> Any:
        y = x.to_local() * 2
        RESHAPED[name](y)
        return xd.DTensor.from_local(y + 1, mesh, [R] * 2)

    x = put(mesh, values, S0, Shard(2))
    expected = function(values)
    found, eager = compiled(function, backend)(x), function(x)
    for one, other, alike in zip(found, expected, eager, strict=True):
        assert one.placements == alike.placements
        assert torch.equal(one.cpu(), other)
    back = compiled(local, backend)(put(mesh, values, R, R))
    assert torch.equal(back.cpu(), expected[0])


def test_the_shape_of_an_input_is_not_changed_inside(mesh: xd.DeviceMesh) -> None:
    x = put(mesh, torch.ones(8, 4), S0, S1)
    with pytest.raises(Unsupported, match="inplace view on a graph input is not supported"):
        compiled(lambda x: x.t_())(x)
    assert x.shape == (8, 4)
    assert torch.compile(lambda x: x.t_() * 1, backend="aot_eager")(x).shape == (4, 8)
    assert x.shape == (4, 8)
    assert x.placements == (S1, S0)
