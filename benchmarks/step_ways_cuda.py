"""The benchmarked step on an NVIDIA GPU by torch.compile, with flash attention."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.step_plan import TORCH_COMPILE
from benchmarks.step_sizes import AnySizes
from benchmarks.step_torch import made, training_step
from benchmarks.step_ways import Way

__all__ = ["ways_on_cuda"]


def ways_on_cuda(sizes: AnySizes, dtype: torch.dtype) -> list[Way]:
    """Returns the one way: a compiled model, flash attention, PyTorch's fused AdamW.

    Args:
        sizes: The model's.
        dtype: Of parameters and moments; flash attention wants bfloat16.
    """
    model, host_batch = made(sizes)
    model = model.to("cuda", dtype)
    batch = [t.to("cuda", dtype if t.is_floating_point() else t.dtype) for t in host_batch]
    compiled: Any = torch.compile(model)
    step = training_step(compiled, fused=True)

    def train() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return step(*batch)

    return [
        Way(
            TORCH_COMPILE,
            train=train,
            wait=lambda _loss: torch.cuda.synchronize(),
            read=lambda loss: loss.item(),
            compiling=_compiling(),
            facts=_facts,
        )
    ]


def _compiling() -> Callable[[], float]:
    metrics: Any = importlib.import_module("torch._dynamo.utils")

    def seconds() -> float:
        # Inductor's share; what Dynamo and AOTAutograd trace is in the other figure.
        return sum(metrics.compilation_time_metrics.get("compile_fx_inner", ()))

    return seconds


def _facts() -> dict[str, Any]:
    return {
        "flops": None,
        "temporary_bytes": None,
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "collectives": [],
        "traces": None,
    }
