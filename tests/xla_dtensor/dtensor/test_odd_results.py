"""Results that are no tensor, or not one; ops without a rule; devices outside of the mesh."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor as StockDTensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec

import xla_dtensor as xd
from mesh_utils import Mesh
from xla_dtensor.dtensor import labels as propagation
from xla_dtensor.dtensor.mesh import (
    DeviceMesh,
    as_device_mesh,
    empty_local,
    is_off_mesh,
    off_mesh_result,
)
from xla_dtensor.errors import ArgumentTypeError, UnsupportedOpError

R = Replicate()
aten = torch.ops.aten
untyped: Any = torch  # some of its names are private to it
ROWS = torch.arange(32.0).reshape(8, 4)


@pytest.fixture
def x(mesh: xd.DeviceMesh) -> Any:
    return xd.distribute_tensor(ROWS.clone(), mesh, [Shard(0), R])


# ---------------------------------------------------------------- scalars and bools


def test_equal_is_one_answer_for_all_devices(x: Any, mesh: xd.DeviceMesh) -> None:
    same = xd.distribute_tensor(ROWS.clone(), mesh, [R, Shard(1)])
    other = ROWS.clone()
    other[7, 3] = -1  # on the last device only
    different = xd.distribute_tensor(other, mesh, [Shard(0), R])
    assert torch.equal(x, same) is True
    assert torch.equal(x, different) is False
    assert torch.equal(x, x[:4]) is False
    assert torch.equal(x, ROWS) is True
    assert torch.allclose(x, same + 1e-9) is True
    assert torch.allclose(x, different) is False
    assert aten.is_same_size(x, same) is True
    assert aten.is_same_size(x, x[:4]) is False


def test_numbers(x: Any) -> None:
    total = x.sum()
    assert (total.item(), float(total), int(total), bool(total)) == (496.0, 496.0, 496, True)
    assert type(total.item()) is float
    assert type(x.long().sum().item()) is int
    assert type((x > 3).any().item()) is bool
    assert torch.is_nonzero(x[0, 0]) is False
    assert x.is_floating_point() is True
    assert x.dim() == 2
    assert aten.sym_size.int(x, 0) == 8


# ---------------------------------------------------------------- several results

SEVERAL: dict[str, Callable[[Any], Any]] = {
    "split": lambda t: t.split(3),
    "unbind": lambda t: t.unbind(1),
    "chunk": lambda t: t.chunk(2, 1),
    "sort": lambda t: t.sort(1, descending=True),
    "topk": lambda t: t.topk(2),
    "max": lambda t: t.max(0),
    "aminmax": lambda t: torch.aminmax(t, dim=0),
    "var_mean": lambda t: torch.var_mean(t, 1),
    "foreach": lambda t: untyped._foreach_add([t, t[:2]], [t, t[:2]]),
    "meshgrid": lambda t: torch.meshgrid(t[0], t[:, 0], indexing="ij"),
    "nothing": lambda t: untyped._foreach_add_([t.clone()], 1),
    "layer norm": lambda t: aten.native_layer_norm(t, [4], None, None, 1e-5),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_the_structure_is_pytorchs(name: str, x: Any) -> None:
    expected, found = SEVERAL[name](ROWS), SEVERAL[name](x)
    assert type(found) is type(expected)
    if expected is None:
        return
    assert len(found) == len(expected)
    for f, e in zip(found, expected, strict=True):
        assert type(f) is xd.DTensor
        assert len(f.placements) == 2
        torch.testing.assert_close(f.cpu(), e)


def test_results_with_none_in_them(x: Any) -> None:
    def backward(t: Any, mask: list[bool]) -> Any:
        mean, rstd = t.mean(1, keepdim=True), (t.var(1, correction=0, keepdim=True) + 1).rsqrt()
        return aten.native_layer_norm_backward(t, t, [4], mean, rstd, t[0], t[1], mask)

    for mask in ([True, False, True], [False, True, False], [True, True, True]):
        found, expected = backward(x, mask), backward(ROWS, mask)
        assert type(found) is tuple
        assert [f is None for f in found] == [e is None for e in expected]
        for f, e in zip(found, expected, strict=True):
            if e is not None:
                assert type(f) is xd.DTensor
                torch.testing.assert_close(f.cpu(), e, atol=1e-4, rtol=1e-4)


@pytest.mark.only_on("torch_xla")  # the JAX runtime refuses ops whose shapes depend on values
def test_the_same_call_with_other_shapes_of_result(x: Any) -> None:
    # The shape of the result depends on values: what is kept of one call must not serve another.
    for limit in (30, 3, 17):
        found, expected = (x > limit).nonzero(), ROWS.gt(limit).nonzero()
        assert found.shape == expected.shape
        assert torch.equal(found.cpu(), expected)


def test_another_kind_of_dtensor_is_refused(x: Any, count_sentences: Callable[[str], int]) -> None:
    stock = StockDTensor.__new__(
        StockDTensor,
        ROWS,
        DTensorSpec(x.device_mesh, x.placements, tensor_meta=x._spec.tensor_meta),
        requires_grad=False,
    )
    with pytest.raises(ArgumentTypeError, match=r"one of torch\.distributed\.tensor on") as raised:
        torch.add(x, stock)
    assert count_sentences(str(raised.value)) == 3


# ---------------------------------------------------------------- ops without a rule


_asked = propagation._from_propagator


def _no_rule(func: Any, *rest: Any) -> Any:
    if func is torch.ops.aten.logcumsumexp.default:
        raise NotImplementedError  # as torch's propagator does; which ops those are changes
    return _asked(func, *rest)


def test_an_op_without_a_rule_works_and_says_so_once(
    x: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(propagation, "_logged", set())
    monkeypatch.setattr(propagation, "_cache", {})
    monkeypatch.setattr(propagation, "_from_propagator", _no_rule)
    caplog.set_level(logging.INFO, "xla_dtensor")
    for rows in (8, 6, 8):
        found: Any = torch.logcumsumexp(x[:rows], 1)
        assert found.placements == (R, R)
        torch.testing.assert_close(found.cpu(), torch.logcumsumexp(ROWS[:rows], 1))
    lines = [r.getMessage() for r in caplog.records if r.name == "xla_dtensor"]
    assert len([line for line in lines if "No placement rule for aten.logcumsumexp" in line]) == 1


# ---------------------------------------------------------------- devices outside of the mesh


@pytest.mark.only_on("jax")
@pytest.mark.parametrize("ids", [[0, 1, 2, 3], [4, 5, 6, 7], [6, 1, 4, 3]])
def test_a_mesh_over_some_of_the_devices(ids: list[int], mesh: xd.DeviceMesh) -> None:
    part = as_device_mesh(Mesh(ids, (2, 2), ("a", "b")))
    d = xd.distribute_tensor(ROWS, part, [Shard(0), Shard(1)])
    assert sorted(s.device_id for s in d.addressable_shards()) == sorted(ids)
    y: Any = (d @ d.t()).softmax(-1) + torch.ones(8)
    assert y.device_mesh is part
    torch.testing.assert_close(y.cpu(), (ROWS @ ROWS.t()).softmax(-1) + 1)
    assert torch.equal(d, d.clone())
    d.add_(1)
    assert d.sum().item() == 528.0


@pytest.fixture
def elsewhere(mesh: xd.DeviceMesh) -> Any:
    """A DTensor on a mesh of which this process has no device, as far as the mesh says."""
    ids = np.array(mesh.value.device_ids).reshape(2, 4)
    far = DeviceMesh(Mesh(ids, (2, 4), ("far_dp", "far_tp")))
    far._coordinate_on_dim = None
    assert is_off_mesh(far)
    assert not is_off_mesh(mesh)
    return xd.distribute_tensor(ROWS, far, [Shard(0), R])


def test_tensors_elsewhere_have_shapes_and_no_values(elsewhere: Any) -> None:
    assert (elsewhere.shape, elsewhere.dtype) == ((8, 4), torch.float32)
    y = (elsewhere @ elsewhere.t()).long() + torch.ones(8, dtype=torch.int64)
    assert (y.shape, y.dtype, y.placements[0]) == ((8, 8), torch.int64, Shard(0))
    assert [part.shape for part in elsewhere.split(3, 1)] == [(8, 3), (8, 1)]
    assert elsewhere.add_(1) is elsewhere
    assert elsewhere.addressable_shards() == ()
    for whole in (y.full_tensor(), y.cpu()):
        assert (whole.shape, whole.dtype, whole.is_meta) == ((0,), torch.int64, False)
    assert torch.equal(elsewhere.sum().full_tensor(), torch.zeros(()))


def test_numbers_elsewhere(elsewhere: Any) -> None:
    assert off_mesh_result(aten._local_scalar_dense.default, (elsewhere.sum(),), {}) is None
    with pytest.raises(RuntimeError, match="None"):  # PyTorch's own, which item() gives there
        elsewhere.sum().item()
    assert aten.is_same_size(elsewhere, elsewhere) is True
    for compare in (torch.equal, torch.allclose):
        with pytest.raises(UnsupportedOpError, match=r"compares values, and this process has none"):
            compare(elsewhere, elsewhere)


def test_lists_with_none_elsewhere(elsewhere: Any, count_sentences: Callable[[str], int]) -> None:
    one = elsewhere[:, :1]
    arguments = (elsewhere, elsewhere, [4], one, one, None, None)
    with pytest.raises(NotImplementedError, match="are a tuple with None in it") as raised:
        aten.native_layer_norm_backward(*arguments, [True, False, False])
    assert isinstance(raised.value, UnsupportedOpError)
    assert count_sentences(str(raised.value)) == 3
    result, *_ = aten.native_layer_norm(elsewhere, [4], None, None, 1e-5)
    assert result.shape == (8, 4)


@pytest.mark.parametrize(
    ("shape", "expected"), [((8, 4), (0,)), ((3,), (0,)), ((), ()), ((0, 2), (0,))]
)
def test_empty_local(shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    for dtype in (torch.int64, torch.bfloat16, torch.bool):
        empty = empty_local(shape, dtype)
        assert (tuple(empty.shape), empty.dtype) == (expected, dtype)
