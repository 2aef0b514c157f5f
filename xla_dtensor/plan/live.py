"""The report of a step that runs here: what its own program does, on the devices at hand.

step = xd.compile(train)
step(batch)
report = report_of(step, mesh, model)
report.collectives, report.attribution.share, print(report.render())
report.diff(predicted)                  of compile_for, made before the pod was booked
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from mesh_utils import MeshError, Topology
from xla_dtensor.core.errors import ArgumentTypeError
from xla_dtensor.dtensor.mesh import as_device_mesh
from xla_dtensor.report.compile_report import CompileReport
from xla_dtensor.report.report import Evidence
from xla_dtensor.report.verification import DeviceMemory, Tolerances, Verification
from xla_dtensor.report.verification import verify as compare
from xla_dtensor.runtimes.base import CompiledStep
from xla_dtensor.runtimes.registry import get_runtime
from xla_dtensor.versions import read_installed

__all__ = ["device_memories", "evidence_of", "report_of"]


# ------------------------------------------------------------- The report of a step that runs here


def report_of(
    step: CompiledStep, mesh: object, *models: torch.nn.Module, title: str = "a step"
) -> CompileReport:
    """Report what the program of a compiled step does.

    Args:
        step: What ``compile`` returned, after a call.
        mesh: The mesh to name axes of.
        *models: The modules that it trains, by whose paths tensors are named. (The JAX runtime
            tells tensors; of torch_xla's programs only the text is known.)
        title: What it is called.

    Returns:
        The report. Whether it fits and how long it takes is said where the devices are known chips.

    Raises:
        CompileError: The step was not called yet.
        ArgumentTypeError: `step` is no compiled step.

    Example:
        >>> import torch, xla_dtensor as xd
        >>> from torch.distributed.tensor import Shard
        >>> mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("dp",))
        >>> total = xd.compile(lambda x: x.sum())
        >>> _ = total(xd.distribute_tensor(torch.ones(8), mesh, [Shard(0)]))
        >>> [(line.kind, line.axes) for line in report_of(total, mesh).collectives]
        [('all-reduce', ('dp',))]
    """
    return CompileReport.of(evidence_of(step, mesh, *models, title=title))


def evidence_of(
    step: CompiledStep, mesh: object, *models: torch.nn.Module, title: str = "a step"
) -> Evidence:
    """Return the evidence of a compiled step, from which reports are made; see :func:`report_of`.

    Args:
        step: As there.
        mesh: As there.
        *models: As there.
        title: As there.

    Returns:
        The evidence.

    Raises:
        CompileError: As there.
        ArgumentTypeError: As there.
    """
    if not isinstance(step, CompiledStep):
        raise ArgumentTypeError(
            f"A report was asked for, of an object of type={type(step).__name__}. What it does is "
            "read from its program, which only a compiled step has. Pass xd.compile(step)."
        )
    installed = read_installed().versions.items()
    return step.evidence(
        as_device_mesh(mesh).value,
        models,
        title=title,
        topology=_topology(),
        versions={name: version for name, version in installed if version},
    )


def _topology() -> Topology | None:
    """The machine, where its devices say what and where they are."""
    try:
        topology = Topology.from_devices(get_runtime().device_attributes())
    except MeshError:
        return None
    return None if topology.chip is None or topology.wrap is None else topology


# -------------------------------------------------------------------------------- Live verification
#
# A report made before the pod was booked, held against the job that runs there.
#
#     predicted = CompileReport.load("70b.json")      of compile_for or ``plan --out``
#     step(batch)                                     once at least: then the program is known
#     outcome = predicted.verify(step, mesh, model)
#     print(outcome)                                  what is new, what is missing, by how much
#     sys.exit(outcome.status)                        0, or 1 if it is not what was predicted


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
    statistics = get_runtime().memory_statistics()
    return compare(predicted, actual, device_memories(statistics), tolerances)


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
            statistics.get("peak_bytes_in_use"),
            statistics.get("bytes_in_use"),
            statistics.get("bytes_limit"),
        )
        for device, statistics in sorted(said.items())
    )
