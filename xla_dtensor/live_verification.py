"""A report made before the pod was booked, held against the job that runs there.

predicted = CompileReport.load("70b.json")      of compile_for or ``plan --out``
step(batch)                                     once at least: then the program is known
outcome = predicted.verify(step, mesh, model)
print(outcome)                                  what is new, what is missing, by how much
sys.exit(outcome.status)                        0, or 1 if it is not what was predicted
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from xla_dtensor.live_report import report_of
from xla_dtensor.report.compile_report import CompileReport
from xla_dtensor.report.verification import DeviceMemory, Tolerances, Verification
from xla_dtensor.report.verification import verify as compare
from xla_dtensor.runtimes.base import CompiledStep
from xla_dtensor.runtimes.registry import get_runtime

__all__ = ["device_memories", "verify"]


def verify(
    predicted: CompileReport,
    step: CompiledStep,
    mesh: object,
    *models: torch.nn.Module,
    tolerances: Tolerances | None = None,
    title: str = "this job",
) -> Verification:
    """Compare a prediction with a step that runs: its own program, and its devices' memory.

    The devices of this process are asked. On several hosts let every process verify, and end with
    its status: one that differs ends the job.

    Args:
        predicted: The report made before.
        step: What ``compile`` returned, after a call; better after two, when state is there.
        mesh: The mesh to name axes of.
        *models: The modules that it trains, by whose paths tensors are named.
        tolerances: By how much each quantity may differ.
        title: What the job is called.

    Returns:
        What differs, with an exit status.

    Raises:
        CompileError: The step was not called yet.
        ArgumentTypeError: `step` is no compiled step.

    Example:
        >>> import torch, xla_dtensor as xd
        >>> from torch.distributed.tensor import Shard
        >>> mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("dp",))
        >>> total = xd.compile(lambda x: x.sum())
        >>> _ = total(xd.distribute_tensor(torch.ones(8), mesh, [Shard(0)]))
        >>> report_of(total, mesh).verify(total, mesh).status
        0
    """
    actual = report_of(step, mesh, *models, title=title)
    said = get_runtime().memory_statistics()
    return compare(predicted, actual, device_memories(said), tolerances)


def device_memories(said: Mapping[int, Mapping[str, int]]) -> tuple[DeviceMemory, ...]:
    """Return what devices say of their memory, in this package's words.

    Args:
        said: By device, as :meth:`Runtime.memory_statistics` returns it.

    Example:
        >>> device_memories({0: {"bytes_in_use": 5, "peak_bytes_in_use": 7}})
        (DeviceMemory(device=0, peak=7, in_use=5, limit=None),)
    """
    return tuple(
        DeviceMemory(
            device,
            told.get("peak_bytes_in_use"),
            told.get("bytes_in_use"),
            told.get("bytes_limit"),
        )
        for device, told in sorted(said.items())
    )
