"""Reports about compiled programs: text in, plain values out, without torch and without jax.

Example:
    >>> from xla_dtensor.report import collectives, render_collectives, summarize
    >>> print(render_collectives(summarize(collectives("HloModule m, num_partitions=8"))))
    no collectives
"""

from xla_dtensor.report.collective import (
    COLLECTIVE_KINDS,
    Collective,
    CollectiveKind,
    ReplicaGroups,
)
from xla_dtensor.report.compile_report import Attribution, CompileReport
from xla_dtensor.report.finding import CollectiveLine, Finding, Origin, origin_of
from xla_dtensor.report.findings import findings
from xla_dtensor.report.hlo import SourceLine
from xla_dtensor.report.hlo_text import ArrayShape, HloError
from xla_dtensor.report.memory import MemoryPart, MemoryReport, memory_report
from xla_dtensor.report.reading import (
    CollectiveSummary,
    HloReading,
    collectives,
    num_partitions,
    read_hlo,
    summarize,
)
from xla_dtensor.report.render import render_collectives
from xla_dtensor.report.report import (
    CompilerMemory,
    Evidence,
    EvidenceError,
    Held,
    ReportError,
    Role,
)
from xla_dtensor.report.roofline import Roofline, roofline
from xla_dtensor.report.verification import DeviceMemory, Tolerances, Verification, verify

__all__ = [
    "COLLECTIVE_KINDS",
    "ArrayShape",
    "Attribution",
    "Collective",
    "CollectiveKind",
    "CollectiveLine",
    "CollectiveSummary",
    "CompileReport",
    "CompilerMemory",
    "DeviceMemory",
    "Evidence",
    "EvidenceError",
    "Finding",
    "Held",
    "HloError",
    "HloReading",
    "MemoryPart",
    "MemoryReport",
    "Origin",
    "ReplicaGroups",
    "ReportError",
    "Role",
    "Roofline",
    "SourceLine",
    "Tolerances",
    "Verification",
    "collectives",
    "findings",
    "memory_report",
    "num_partitions",
    "origin_of",
    "read_hlo",
    "render_collectives",
    "roofline",
    "summarize",
    "verify",
]
