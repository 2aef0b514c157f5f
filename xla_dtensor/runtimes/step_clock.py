"""How fast a compiled step goes: the time from call to call, tokens per second, utilisation.

A call returns before the devices are done, so what a call takes says little. In a loop that is
full, calls follow one another as fast as the devices work; the clock takes the time between the
starts of consecutive calls, and leaves out those between which a program was traced.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch

__all__ = ["StepClock", "num_tokens"]

_KEPT = 100


class StepClock:
    """The starts of a step's calls.

    Args:
        now: The clock, in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._before: float | None = None
        self._seconds: deque[float] = deque(maxlen=_KEPT)

    def start(self) -> None:
        """Note that a call begins."""
        now = self._now()
        if self._before is not None:
            self._seconds.append(now - self._before)
        self._before = now

    def interrupt(self) -> None:
        """Leave out the time from this call to the next: it compiles."""
        self._before = None

    def metrics(
        self, tokens: int | None, flops: int | None, peak_flops: float | None
    ) -> Mapping[str, float | None]:
        """Return what :meth:`CompiledStep.metrics` does.

        Args:
            tokens: Tokens per call; None where nobody knows.
            flops: Floating-point operations per call, on all devices.
            peak_flops: What all devices together can do per second.
        """
        seconds = statistics.median(self._seconds) if self._seconds else None

        def per_second(amount: float | None) -> float | None:
            return None if seconds is None or amount is None else amount / seconds

        speed = per_second(flops)
        return {
            "step_seconds": seconds,
            "tokens_per_second": per_second(tokens),
            "flops_per_step": flops,
            "flops_per_second": speed,
            "mfu": None if speed is None or peak_flops is None else speed / peak_flops,
        }


def num_tokens(leaves: list[Any]) -> int | None:
    """Return the size of the largest tensor of integers among a call's arguments, token ids."""
    sizes = [
        leaf.numel()
        for leaf in leaves
        if isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.int64, torch.int32)
    ]
    return max(sizes, default=None)
