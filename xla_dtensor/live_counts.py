"""CommDebugMode's questions, answered from the program of a step that runs here.

step = xd.compile(train)
step(batch)
print(xd.comm_counts(step, mesh))
"""

from __future__ import annotations

import torch

from xla_dtensor.live_report import evidence_of
from xla_dtensor.report.compile_report import CompileReport
from xla_dtensor.report.evidence import Evidence
from xla_dtensor.report.module_counts import CommCounts
from xla_dtensor.report.module_counts import comm_counts as count
from xla_dtensor.runtimes.base import CompiledStep

__all__ = ["comm_counts"]


def comm_counts(
    source: CompiledStep | CompileReport | Evidence, mesh: object = None, *models: torch.nn.Module
) -> CommCounts:
    """Count what each module communicates, forward and backward, in the compiled program.

    PyTorch's CommDebugMode counts calls of collectives while Python runs, and is blind to what XLA
    inserts. This has its methods (``get_comm_counts``, ``get_total_counts``,
    ``generate_comm_debug_tracing_table``, ...) and reads the program. Names of modules are known on
    the JAX runtime; torch_xla's programs carry none, and everything counts as "Global" there.

    Args:
        source: What ``compile`` returned, after a call; or a report, or its evidence.
        mesh: The mesh to name axes of; needed with a step only.
        *models: Taken as by ``report_of``; names of modules are in the program itself.

    Returns:
        The counts by module. Their sums are those of the report.

    Raises:
        CompileError: The step was not called yet.
        ArgumentTypeError: `source` is nothing of the kind.

    Example:
        >>> import torch, xla_dtensor as xd
        >>> from torch.distributed.tensor import Shard
        >>> mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("dp",))
        >>> total = xd.compile(lambda x: x.sum())
        >>> _ = total(xd.distribute_tensor(torch.ones(8), mesh, [Shard(0)]))
        >>> xd.comm_counts(total, mesh).get_comm_counts()
        {'all-reduce': 1}
    """
    if isinstance(source, CompileReport | Evidence):
        return count(source)
    return count(evidence_of(source, mesh, *models))
