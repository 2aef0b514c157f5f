"""A report as JSON, with a numbered schema.

    {
     "format": "xla_dtensor compile report",
     "schema": 1,
     "summary": {"fits": true, "total_bytes": ..., "step_seconds": ..., ...},
     "report": {"title": ..., "machine": {...}, "mesh": [...], "memory": {...}, ...}
    }

"report" holds the fields of CompileReport under their names, and those of the dataclasses in it:
plain_data.py says how each type is written, `schema()` gives a JSON Schema of the whole. Bytes are
those of one device, seconds are seconds. "summary" repeats, for programs that want nothing else,
what properties compute; it is not read back.

SCHEMA grows whenever a reader of the old one would misread, or could not read, what is written.
Files of older schemas are read where that is possible; those of newer ones are refused.
"""

from __future__ import annotations

import json
from typing import Any

from xla_dtensor.report.compile_report import CompileReport
from xla_dtensor.report.errors import ReportError
from xla_dtensor.report.plain_data import from_plain, json_schema, to_plain

__all__ = ["FORMAT", "SCHEMA", "from_json", "schema", "to_json"]

FORMAT = "xla_dtensor compile report"
SCHEMA = 1


def to_json(report: CompileReport) -> str:
    """Writes a report.

    Args:
        report: the report.

    Returns:
        The JSON, without a line break at the end.
    """
    data = {
        "format": FORMAT,
        "schema": SCHEMA,
        "summary": to_plain(_summary(report)),
        "report": to_plain(report),
    }
    return json.dumps(data, indent=1, allow_nan=False)


def from_json(text: str) -> CompileReport:
    """Reads a report, exactly as it was.

    Args:
        text: what `to_json` wrote.

    Returns:
        The report.

    Raises:
        ReportError: text that is no report, or one of a newer schema.
    """
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ReportError(
            f"A report was read from text that is no JSON: {error}. Nothing can be read of it. "
            "Pass a file that CompileReport.to_json wrote."
        ) from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ReportError(
            f"A report was read from JSON whose format is not {FORMAT!r}. It is something else. "
            "Pass a file that CompileReport.to_json wrote."
        )
    number = data.get("schema")
    if not isinstance(number, int) or number > SCHEMA or number < 1:
        raise ReportError(
            f"A report was read of schema={number}. This version reads schemas 1 to {SCHEMA}. "
            "Install the version of xla_dtensor that wrote it, or a newer one."
        )
    return from_plain(CompileReport, data.get("report"))


def schema() -> dict[str, Any]:
    """Describes the JSON of a report.

    Returns:
        A JSON Schema, draft 2020-12.

    Example:
        >>> schema()["properties"]["schema"]
        {'const': 1}
    """
    report = json_schema(CompileReport)
    definitions = report.pop("$defs")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": FORMAT,
        "type": "object",
        "properties": {
            "format": {"const": FORMAT},
            "schema": {"const": SCHEMA},
            "summary": {"type": "object"},
            "report": report,
        },
        "required": ["format", "schema", "report"],
        "$defs": definitions,
    }


def _summary(report: CompileReport) -> dict[str, Any]:
    """What is computed from the fields, for programs that do not want to compute it."""
    model = report.roofline
    return {
        "fits": report.fits,
        "total_bytes": report.memory.total_bytes,
        "capacity_bytes": report.memory.capacity_bytes,
        "spare_bytes": report.memory.spare_bytes,
        "collective_bytes_per_device": report.collective_bytes,
        "attributed_share": report.attribution.share,
        "modelled_step_seconds": None if model is None else model.step_seconds,
        "modelled_mfu": None if model is None else model.mfu,
        "modelled_binding": None if model is None else model.binding,
        "findings": {
            severity: sum(one.severity == severity for one in report.findings)
            for severity in ("error", "warning", "note")
        },
    }
