"""Finding: something about a compiled step that its author will want to look at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from xla_dtensor.report.attribution import Origin

__all__ = ["SEVERITIES", "Finding", "Severity"]

Severity: TypeAlias = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
"""An error: it cannot run. A warning: it runs, but likely not as meant. A note: good to know."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something to look at.

    Attributes:
        severity: "error", "warning" or "note".
        code: its kind, the same in every version, "does-not-fit".
        title: what is the matter, in a few words.
        detail: the numbers; "modelled" where a model says them.
        fix: what to try.
        origin: whose it is; None where it is nobody's.

    Example:
        >>> str(Finding("note", "axis-of-size-1", "Axis 'pp' has size 1", "", "Leave it out."))
        "note: Axis 'pp' has size 1. Leave it out. [axis-of-size-1]"
    """

    severity: Severity
    code: str
    title: str
    detail: str
    fix: str
    origin: Origin | None = None

    def __str__(self) -> str:
        told = [f"{self.severity}: {self.title}.", self.detail, self.fix, f"[{self.code}]"]
        return " ".join(part for part in told if part)
