"""What to look at in a compiled step, the worst first, each with the fix to try.

    does-not-fit                 it takes more memory than there is; the three largest causes
    tensor-parallel-over-dcn     activations cross slices while the forward waits for them
    vocabulary-unsharded         a vocabulary matrix is whole where the rest is sharded
    tensor-unsharded             so is another large tensor
    state-unsharded              all state is whole, and takes much of the memory
    optimizer-state-unsharded    moments lie in fewer shards than their parameters
    activation-gathered          an activation is gathered over an axis that no weight uses
    attention-gathered           attention gathers more than keys and values of a cut sequence
    experts-gathered             experts are gathered over the axis that cuts them
    batch-replicated             an axis gathers weights, and its devices have the same batch
    axis-idle                    an axis cuts nothing
    full-rematerialization       XLA gathered an array whole to shard it in another way
    sharding-differs             XLA chose another layout than was asked for
    axis-of-size-1               an axis of the mesh does nothing
    hlo-unread                   a part of the program could not be read

The codes stay the same from version to version. Right plans have no findings (an axis of size 1 is
a note): where the numbers that decide come from stands beside them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from xla_dtensor.report.collective_lines import CollectiveLine
from xla_dtensor.report.evidence import Evidence
from xla_dtensor.report.finding import SEVERITIES, Finding, Severity
from xla_dtensor.report.finding_rematerialization import rematerialization_findings
from xla_dtensor.report.finding_state import state_findings
from xla_dtensor.report.finding_traffic import traffic_findings
from xla_dtensor.report.hlo_reading import HloReading, read_hlo
from xla_dtensor.report.roofline import Roofline

if TYPE_CHECKING:
    from xla_dtensor.report.memory import MemoryReport

__all__ = ["SEVERITIES", "Finding", "Severity", "findings"]

_SHOWN = 3


def findings(
    evidence: Evidence,
    memory: MemoryReport | None = None,
    lines: Iterable[CollectiveLine] = (),
    roofline: Roofline | None = None,
) -> tuple[Finding, ...]:
    """Looks for what is likely not meant.

    Args:
        evidence: what the compiled step left behind.
        memory: its memory report; None leaves out what needs one.
        lines: its collectives, summed; those that follow no axes of the mesh are told.
        roofline: its modelled times; None leaves them out of the texts.

    Returns:
        The findings: errors, then warnings, then notes.

    Example:
        >>> from mesh_utils import Mesh
        >>> found = findings(Evidence("a step", "HloModule m", Mesh.arange((1, 8), ("pp", "dp"))))
        >>> [each.code for each in found]
        ['axis-of-size-1']
    """
    reading = read_hlo(evidence.hlo_text, evidence.mesh, evidence.granules)
    cut_again = list(rematerialization_findings(evidence))
    found = [
        *state_findings(evidence, memory),
        # What is gathered only to be cut again is said once.
        *(
            each
            for each in traffic_findings(evidence, reading, roofline)
            if not _is_said(each, cut_again)
        ),
        *cut_again,
        *_unread(reading, lines),
    ]
    return tuple(sorted(found, key=lambda each: SEVERITIES.index(each.severity)))


def _is_said(finding: Finding, others: Iterable[Finding]) -> bool:
    if finding.code != "activation-gathered" or finding.origin is None:
        return False
    here = finding.origin
    return any(
        other.origin is not None
        and (other.origin.module, other.origin.op) == (here.module, here.op)
        for other in others
    )


def _unread(reading: HloReading, lines: Iterable[CollectiveLine]) -> Iterator[Finding]:
    if reading.unread:
        shown = "; ".join(f"{each.where}: {each.why}" for each in reading.unread[:_SHOWN])
        more = len(reading.unread) - _SHOWN
        yield Finding(
            "note",
            "hlo-unread",
            f"{len(reading.unread)} parts of the program could not be read",
            shown + (f"; and {more} more." if more > 0 else "."),
            "The numbers leave them out. Please report it, with the program and XLA's version.",
        )
    mixed = [line for line in lines if line.axes is None and line.kind not in ("send", "recv")]
    if mixed and not reading.unread:
        largest = max(mixed, key=lambda line: line.bytes_per_device)
        yield Finding(
            "note",
            "groups-along-no-axes",
            f"{len(mixed)} kinds of collectives follow no axes of the mesh",
            f"The largest is {largest.kind}; XLA made groups that are no axis and no part of one.",
            "Their bytes are counted under 'mixed'.",
            largest.origin,
        )
