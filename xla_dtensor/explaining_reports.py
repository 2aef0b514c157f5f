"""Why a tensor of a report lies as it does: what was asked for, and what XLA chose."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xla_dtensor.explaining_advice import padding_words, sharding_advice
from xla_dtensor.report.compile_report import CompileReport
from xla_dtensor.report.quantities import bytes_text
from xla_dtensor.report.report_tensors import TensorLine
from xla_dtensor.report.report_words import mesh_axes_text
from xla_dtensor.report.tensor_pictures import layout_of_text, tensor_line

if TYPE_CHECKING:
    from xla_dtensor.explaining import Explanation

__all__ = ["explain_in_report"]


def explain_in_report(report: CompileReport, name: str) -> Explanation:
    """Say why a tensor of a report lies as it does.

    Args:
        report: The report.
        name: Of the tensor: "layers.0.wq.weight", where equal layers are one line too.

    Returns:
        The explanation.

    Raises:
        ReportError: The report has no tensor of that name.
    """
    from xla_dtensor.explaining import Explanation

    line = tensor_line(report, name)
    shape, tile = tuple(line.shape), tuple(line.device_shape)
    many = f", one of {line.count:,} that lie alike" if line.count > 1 else ""
    held = [
        f"A device holds {tile}, {bytes_text(line.device_bytes)} of "
        f"{bytes_text(line.global_bytes)}."
    ]
    layout = layout_of_text(line.layout, report.mesh, len(shape))
    advice = [] if layout is None else sharding_advice(layout, shape, tile)
    return Explanation(
        what=f"{name} ({line.role}), {line.dtype} of shape {shape}{many}, on the mesh "
        f"{mesh_axes_text(report.mesh)}.",
        asked=(_asked(line),),
        real=_chosen(line),
        held=(*held, *padding_words(shape, tile)),
        advice=(*_fixes(report, line, name), *advice),
        agrees=None if line.requested is None or line.chosen is None else not line.differs,
    )


def _asked(line: TensorLine) -> str:
    if line.requested is None:
        return "Nobody asked how it is to lie."
    return f"Asked for was {line.requested}."


def _chosen(line: TensorLine) -> str:
    if line.chosen is None:
        return "How the compiled program lays it out cannot be said in axes of the mesh."
    if line.requested is None:
        return f"The compiled program lays it out as {line.chosen}: XLA's choice."
    if line.differs:
        return f"The compiled program lays it out OTHERWISE: as {line.chosen}."
    return "The compiled program lays it out so."


def _fixes(report: CompileReport, line: TensorLine, name: str) -> list[str]:
    """What the report's findings say of it."""
    names = {name, line.name}
    return [
        f"{each.title}: {each.fix}"
        for each in report.findings
        if any(one in f"{each.title} {each.detail}" for one in names)
    ]
