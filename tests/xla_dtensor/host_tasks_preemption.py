"""What processes do in tests of preemption."""

from __future__ import annotations

import os
import time

import xla_dtensor as xd

__all__ = ["agree"]


def agree(sender: int, at: int, number: int, seconds: list[float]) -> tuple[int, bool]:
    """Ask step by step, each process at its own pace; one gets a signal. When all agreed."""
    from xla_dtensor.runtimes.registry import get_runtime

    runtime = get_runtime()
    me = min(range(2), key=lambda process: (runtime.addressable_device_ids()[0] > 1000) != process)
    with xd.Preemption() as preemption:
        for step in range(2000):
            if me == sender and step == at:
                os.kill(os.getpid(), number)
            if preemption.reached():
                return step, preemption.reached()
            time.sleep(seconds[me])
    return -1, False
