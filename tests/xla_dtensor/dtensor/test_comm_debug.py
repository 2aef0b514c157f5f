"""CommDebugMode warns on DTensors: once per mode, and nobody else's hooks set it off."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.modules.module import register_module_forward_pre_hook

import xla_dtensor as xd


@pytest.fixture
def d(mesh: xd.DeviceMesh) -> Any:
    return xd.distribute_tensor(torch.ones(8, 4), mesh)


def test_each_mode_warns_once(d: Any) -> None:
    for _ in range(2):
        with CommDebugMode(), pytest.warns(UserWarning, match="CommDebugMode saw an op") as caught:
            (d + 1).sum()
        assert len(caught) == 1


def test_plain_tensors_do_not_set_it_off(d: Any) -> None:
    with warnings.catch_warnings(), CommDebugMode() as mode:
        warnings.simplefilter("error")
        nn.Linear(4, 4)(torch.ones(2, 4))
    assert mode.get_total_counts() == 0


def test_other_hooks_do_not_set_it_off(d: Any) -> None:
    handle = register_module_forward_pre_hook(lambda module, inputs: None)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert (d + 1).sum().item() == 64
    finally:
        handle.remove()
