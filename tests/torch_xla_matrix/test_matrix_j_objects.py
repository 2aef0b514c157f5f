"""J. What Python and torch ask of a tensor as an object."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import xla_dtensor as xd

R = Replicate()
X = torch.arange(32.0).reshape(8, 4)


@pytest.fixture
def d(mesh: xd.DeviceMesh) -> Any:
    return xd.distribute_tensor(X, mesh, [Shard(0), R])


def test_equality_and_hash(mesh: xd.DeviceMesh, d: Any) -> None:
    other = xd.distribute_tensor(X, mesh, [R, Shard(1)])
    assert torch.equal(d, other)
    assert torch.allclose(d, other)
    assert not torch.equal(d, other + 1)
    same = other.redistribute(placements=d.placements)  # newer torch compares placements, too
    torch.testing.assert_close(d, same)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(d, same + 1)
    assert {d: 1}[d] == 1
    assert hash(d) == hash(d)


def test_text_names_the_placements(d: Any) -> None:
    text = (
        "DTensor(shape=(8, 4), dtype=float32, placements=(S(0), R), mesh=(dp=2, tp=4), "
        "local_shape=(4, 4))"
    )
    assert repr(d) == str(d) == f"{d}" == text


def test_format_of_a_scalar(d: Any) -> None:
    assert f"{d.sum():.2f}" == "496.00"
    assert f"{d[1, 2]:>6.1f}" == "   6.0"


def test_save_and_pickle(d: Any) -> None:
    file = io.BytesIO()
    torch.save({"w": d}, file)
    file.seek(0)
    for other in (torch.load(file)["w"], pickle.loads(pickle.dumps(d))):
        assert type(other) is xd.DTensor
        assert other.placements == d.placements
        assert other.xla_sharding() == d.xla_sharding()
        assert torch.equal(other.cpu(), X)


def test_deepcopy(d: Any) -> None:
    parameter: Any = torch.nn.Parameter(d)
    other = copy.deepcopy(parameter)
    assert isinstance(other, torch.nn.Parameter)
    assert other.placements == d.placements  # pyright: ignore[reportAttributeAccessIssue]
    with torch.no_grad():
        other.add_(1)
    assert torch.equal(parameter.detach().cpu(), X)
    assert torch.equal(other.detach().cpu(), X + 1)


def test_host_copy_is_a_plain_tensor(d: Any) -> None:
    host = d.cpu()
    assert type(host) is torch.Tensor
    assert torch.equal(host, X)
    assert (host.numpy() == X.numpy()).all()
    assert (d.numpy() == X.numpy()).all()
    assert host.tolist() == d.tolist() == X.tolist()


def test_numbers_and_truth(d: Any) -> None:
    assert d[7, 3].item() == 31.0
    assert (float(d.sum()), int(d.amax())) == (496.0, 31)
    assert bool(d.sum() > 1)
    assert not d.sum() < 1
    assert len(d) == 8
