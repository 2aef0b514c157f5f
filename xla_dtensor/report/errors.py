"""The errors of the reports.

Each message has three short sentences: what was given, why it cannot be read, what to pass instead.
"""


class HloError(ValueError):
    """Text that is no HLO, or a part of it that cannot be read.

    Example:
        >>> from xla_dtensor.report import HloError, ReplicaGroups
        >>> try:
        ...     ReplicaGroups.parse("{{0,1},{1,2}}")
        ... except HloError as error:
        ...     print(str(error).split(". ")[0])
        The replica groups '{{0,1},{1,2}}' were given
    """


class EvidenceError(ValueError):
    """What a compiled step left behind cannot be read, or contradicts itself.

    Example:
        >>> from xla_dtensor.report import Evidence, EvidenceError
        >>> try:
        ...     Evidence.load("/nowhere")
        ... except EvidenceError as error:
        ...     print(str(error).split(". ")[0])
        Evidence was asked for from /nowhere
    """


class ReportError(ValueError):
    """A stored report cannot be read.

    Example:
        >>> from xla_dtensor.report import ReportError
        >>> from xla_dtensor.report.compile_report import from_json
        >>> try:
        ...     from_json("{}")
        ... except ReportError as error:
        ...     print(str(error).split(". ")[1])
        It is something else
    """
