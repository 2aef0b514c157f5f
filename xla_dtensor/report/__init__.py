"""Reports about compiled programs: text in, plain values out, without torch and without jax.

Example:
    >>> from xla_dtensor.report import collectives, render_collectives, summarize
    >>> print(render_collectives(summarize(collectives("HloModule m, num_partitions=8"))))
    no collectives
"""

from xla_dtensor.report.collective import COLLECTIVE_KINDS, Collective, CollectiveKind
from xla_dtensor.report.errors import EvidenceError, HloError
from xla_dtensor.report.evidence import CompilerMemory, Evidence, Held, Role
from xla_dtensor.report.hlo import collectives, num_partitions
from xla_dtensor.report.hlo_shape import ArrayShape
from xla_dtensor.report.render import render_collectives
from xla_dtensor.report.replica_groups import ReplicaGroups
from xla_dtensor.report.stack_frames import SourceLine
from xla_dtensor.report.summary import CollectiveSummary, summarize

__all__ = [
    "COLLECTIVE_KINDS",
    "ArrayShape",
    "Collective",
    "CollectiveKind",
    "CollectiveSummary",
    "CompilerMemory",
    "Evidence",
    "EvidenceError",
    "Held",
    "HloError",
    "ReplicaGroups",
    "Role",
    "SourceLine",
    "collectives",
    "num_partitions",
    "render_collectives",
    "summarize",
]
