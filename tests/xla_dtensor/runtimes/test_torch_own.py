"""Importing torch_xla replaces functions of torch; a runtime has torch's own."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.nn.modules import rnn
from torch.nn.utils import clip_grad

import xla_dtensor as xd
from xla_dtensor.runtimes import Runtime
from xla_dtensor.runtimes.torch_own import put_back


@pytest.fixture
def replaced() -> Iterator[Any]:
    """As if torch_xla had been imported just now."""
    patches = pytest.importorskip("torch_xla._patched_functions")
    put_back()
    patches._apply_patches()
    yield patches
    put_back()


def test_torch_xla_replaces_what_it_is_said_to_replace(replaced: Any) -> None:
    assert nn.utils.clip_grad_norm_ is replaced.clip_grad_norm_
    assert nn.GRU is replaced.ScanGRU


def test_both_come_back_and_torch_xlas_gru_knows(replaced: Any) -> None:
    put_back()
    assert nn.utils.clip_grad_norm_ is clip_grad.clip_grad_norm_
    assert nn.GRU is rnn.GRU
    assert type(replaced.ScanGRU(4, 4, bidirectional=True)) is rnn.GRU


def test_what_others_have_put_there_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def own(*args: Any) -> Any:
        return args

    class Own(nn.GRU):
        pass

    monkeypatch.setattr(nn.utils, "clip_grad_norm_", own)
    monkeypatch.setattr(nn, "GRU", Own)
    put_back()
    assert nn.utils.clip_grad_norm_ is own
    assert nn.GRU is Own


@pytest.mark.usefixtures("runtime")
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_a_gru_gives_torchs_values(mesh: xd.DeviceMesh, num_layers: int, batch_first: bool) -> None:
    torch.manual_seed(0)
    plain = rnn.GRU(8, 16, num_layers, batch_first=batch_first)
    ours = nn.GRU(8, 16, num_layers, batch_first=batch_first)
    ours.load_state_dict(plain.state_dict())
    x = torch.randn(4, 6, 8)
    expected = plain(x)
    found = xd.distribute_module(ours, mesh)(
        xd.distribute_tensor(x, mesh, [Shard(0 if batch_first else 1), Replicate()])
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.full_tensor().cpu(), other)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clipping_gives_torchs_values(
    runtime: Runtime, mesh: xd.DeviceMesh, norm_type: float
) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    ours = xd.distribute_module(copy.deepcopy(plain), mesh)
    for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
        q.grad = torch.randn_like(q)
        p.grad = xd.distribute_tensor(q.grad, mesh, [Shard(0), Replicate()])
    foreach = True if runtime.name == "jax" else None  # torch has no lists for device type "xla"
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.5, norm_type)
    found: Any = nn.utils.clip_grad_norm_(ours.parameters(), 0.5, norm_type, foreach=foreach)
    torch.testing.assert_close(found.full_tensor().cpu(), expected)
    pairs: Any = zip(ours.parameters(), plain.parameters(), strict=True)
    for p, q in pairs:
        torch.testing.assert_close(p.grad.full_tensor().cpu(), q.grad)
