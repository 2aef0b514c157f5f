"""torch._assert_async: what a program claims of a value, checked where the value is there."""

from __future__ import annotations

from typing import Any

import torch

from xla_dtensor.runtimes.jax_lowering.table import lower
from xla_dtensor.runtimes.jax_placing import host_value
from xla_dtensor.runtimes.jax_trace import is_tracer

__all__: list[str] = []

aten = torch.ops.aten


@lower(aten._assert_async.default, aten._assert_async.msg)
def _assert_async(claim: Any, message: str = "Expected Tensor with single nonzero value") -> None:
    # A compiled program has no way to raise, and torch leaves such a check out as well.
    if not is_tracer(claim) and not host_value(claim):
        raise RuntimeError(message)
