"""Random programs on xla_dtensor and in plain torch, float64: the values are the same.

Where PyTorch's own DTensor raises there is nothing stored to compare with; here every program
counts, and hypothesis shrinks one that fails.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import xla_dtensor as xd
from tests.differential.differences import against_plain_torch
from tests.differential.generating import program_of
from xla_dtensor.runtimes import Runtime


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(chance=st.randoms(use_true_random=False), length=st.integers(1, 6))
def test_values(runtime: Runtime, chance: random.Random, length: int) -> None:
    program: Any = program_of(chance, 0, length)
    mesh = xd.init_device_mesh("xla", program.mesh_shape)
    assert not against_plain_torch(program, mesh), program
